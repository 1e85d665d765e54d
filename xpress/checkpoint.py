"""A checkpoint is a folder, never a pickle: config.json, model.safetensors, provenance.json.

Drafter tensors stand under their published names, the head's under `head.`, the map of a reduced draft vocabulary as
`d2t` (target id = draft id + d2t[draft id]). Frozen target weights are not stored. `feature_scale` is folded into `fc`
on saving (powers of two, so exactly), and taken out again on loading. Loading accounts for every tensor.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from xpress.drafter import DFlashDrafter
from xpress.drafter_config import DrafterConfig
from xpress.files import new_folder, write_json
from xpress.heads import CorrectionHead

WEIGHTS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"


@dataclass
class Checkpoint:
    """What a folder holds, bound to its target where one was given. head is None for a plain drafter."""

    drafter: DFlashDrafter
    head: CorrectionHead | None
    provenance: dict
    path: Path


def locate(path: str | Path) -> Path:
    """The folder that holds the checkpoint: `path` itself, for a training run its `checkpoint`, for a hub id
    ("owner/name") the downloaded copy. Raises FileNotFoundError with the remedy.
    """
    hub_id = str(path)
    path = Path(path).expanduser()
    if not path.exists() and hub_id.count("/") == 1 and hub_id[0] not in "./~":
        path = _download(hub_id)
    for folder in (path, path / "checkpoint"):
        if (folder / CONFIG).exists():
            missing = [name for name in (WEIGHTS,) if not (folder / name).exists()]
            if missing:
                raise FileNotFoundError(f"checkpoint={path}: {missing[0]} is missing; the folder is incomplete")
            return folder
    raise FileNotFoundError(
        f"checkpoint={path}: no {CONFIG} there. Give the folder that training wrote, or train one first "
        "(bash scripts/quickstart.sh trains one in minutes)"
    )


def provenance_of(folder: Path) -> dict:
    """Where a checkpoint comes from; {} for one that does not say."""
    return _read_json(folder / PROVENANCE) if (folder / PROVENANCE).exists() else {}


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=[WEIGHTS, CONFIG, PROVENANCE]))
    except Exception as error:  # the hub client raises a dozen kinds
        raise FileNotFoundError(
            f"checkpoint={hub_id}: no such folder, and the hub cannot be read ({type(error).__name__}); give a local "
            "folder, or try again with network"
        ) from error


def save(path: str | Path, drafter, head=None, provenance: dict | None = None, tensors: dict | None = None):
    """Write a checkpoint folder, whole or not at all; `tensors` where they are gathered already."""
    tensors = tensors_of(drafter, head) if tensors is None else tensors
    with new_folder(Path(path)) as folder:
        write(folder, drafter, head, tensors, provenance)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on the CPU; of a sharded one, gathered from all processes."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().cpu().contiguous()


def tensors_of(drafter: DFlashDrafter, head: CorrectionHead | None) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, on the CPU. Sharded parameters are gathered: then all processes call it together."""
    both = drafter.state_dict() | ({} if head is None else {f"head.{k}": v for k, v in head.state_dict().items()})
    tensors = {name: whole(weight) for name, weight in both.items()}
    tensors["fc.weight"] = _scaled(tensors["fc.weight"], drafter.config.feature_scale)
    if drafter.draft_ids is not None:
        ids = drafter.draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
    return tensors


def write(folder: Path, drafter, head, tensors: dict[str, torch.Tensor], provenance: dict | None = None):
    """The files of a checkpoint into a folder that is there."""
    config = drafter.config.to_json() | {"dtype": str(tensors["fc.weight"].dtype).removeprefix("torch.")}
    if head is not None:
        config["head"] = head.config
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, config)
    write_json(folder / PROVENANCE, provenance or {})


def _scaled(fc: torch.Tensor, scale, power: float = 1.0) -> torch.Tensor:
    return (fc.unflatten(1, (len(scale), -1)) * fc.new_tensor(scale)[:, None] ** power).flatten(1)


def load(path: str | Path, target=None, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Checkpoint:
    """Read a checkpoint folder (ours or a z-lab dFlash drafter) and bind it to `target`. The drafter comes frozen, as
    decoding in static buffers needs it; training asks for its gradients by itself.

    Raises FileNotFoundError for a missing or partial folder, ValueError for tensors that are missing, unexpected, of
    another shape or not finite, and for a checkpoint that belongs to another target.
    """
    folder = locate(path)
    raw = _read_json(folder / CONFIG)
    provenance = provenance_of(folder)
    tensors = _read_tensors(folder / WEIGHTS)
    d2t = tensors.pop("d2t", None)
    draft_ids = None if d2t is None else (d2t.long() + torch.arange(len(d2t))).tolist()
    if draft_ids is None and (raw.get("draft_vocab_size") or raw.get("vocab_size")) != raw.get("vocab_size"):
        raise ValueError(f"{folder}: draft_vocab_size is reduced, but {WEIGHTS} has no map 'd2t'")
    drafter = DFlashDrafter(DrafterConfig.from_json(raw, draft_ids))
    if "fc.weight" in tensors and tensors["fc.weight"].shape == drafter.fc.weight.shape:
        tensors["fc.weight"] = _scaled(tensors["fc.weight"], drafter.config.feature_scale, -1.0)
    head = build_head(raw["head"]) if raw.get("head") else None
    if head is not None:
        check_head({**head.config, "draft_vocab_size": head.readout.out_features}, drafter.config)
    ours = {f"head.{name}": weight for name, weight in head.state_dict().items()} if head is not None else {}
    _account(folder, {**drafter.state_dict(), **ours}, tensors)
    drafter.to(device=device, dtype=dtype).eval().requires_grad_(False)
    drafter.load_state_dict({name: t for name, t in tensors.items() if not name.startswith("head.")})
    if head is not None:
        head.to(device=device, dtype=dtype).eval()
        head.load_state_dict({name[5:]: t for name, t in tensors.items() if name.startswith("head.")})
    if target is not None:
        check_target(provenance, target, folder)
        drafter.bind(target)
        if head is not None:
            head.bind(target)
    return Checkpoint(drafter, head, provenance, folder)


def head_class(path: str) -> type[CorrectionHead]:
    """Import path -> class. Raises ValueError unless it names a CorrectionHead."""
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"head _target_={path}: cannot be imported ({error})") from error
    if not (isinstance(kind, type) and issubclass(kind, CorrectionHead)):
        raise ValueError(f"head _target_={path}: not a CorrectionHead")
    return kind


def build_head(config: dict) -> CorrectionHead:
    """{"_target_": import path, arguments…} -> head. Raises ValueError for arguments that the class does not take."""
    arguments = dict(config)
    kind = head_class(arguments.pop("_target_", ""))
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"head {kind.__name__}: {error}") from error


def _read_json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a JSON object")
    return found


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged or truncated ({error}); copy or train it again") from error


def _account(folder: Path, wanted: dict, found: dict):
    """Every tensor is expected, present, of the right shape, and finite."""
    problems = [f"missing {name} {list(t.shape)}" for name, t in wanted.items() if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        if wanted[name].shape != found[name].shape:
            problems.append(f"{name} has shape {list(found[name].shape)}, expected {list(wanted[name].shape)}")
        elif not torch.isfinite(found[name].float()).all():
            problems.append(f"{name} holds NaN or infinity")
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise ValueError(f"{folder}: not loaded, nothing partial: {'; '.join(sorted(problems)[:8])}{more}")


def head_sizes(config: DrafterConfig) -> dict:
    """What a head takes from the drafter that it sits on."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
    }


def check_head(arguments: dict, config: DrafterConfig):
    """Raises ValueError where a head was made for a drafter of other sizes or vocabulary."""
    for key, ours in head_sizes(config).items():
        if arguments.get(key) not in (None, ours):
            raise ValueError(f"head.{key}={arguments[key]}, but the drafter has {ours}: they do not belong together")


def check_target(provenance: dict, target, folder):
    """Raises ValueError where the checkpoint was trained for other target weights."""
    trained_for = (provenance.get("target") or {}).get("fingerprint")
    if trained_for and trained_for != target.fingerprint():
        raise ValueError(
            f"checkpoint={folder} was trained for target {provenance['target'].get('name')} with weights of hash "
            f"{trained_for}, but target {target.name} has {target.fingerprint()}; give its own target"
        )
