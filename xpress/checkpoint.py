"""A checkpoint is a folder, never a pickle: config.json, model.safetensors, provenance.json.

Drafter tensors stand under their published names, the head's under `head.`, the map of a reduced draft vocabulary as
`d2t` (target id = draft id + d2t[draft id]), a confidence head's under `confidence.`. Frozen target weights are not
stored. `feature_scale` is folded into `fc` on saving (powers of two, so exactly), and taken out again on loading.
Reading, of this and of every other format, is xpress/interop's.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from xpress.drafter import DFlashDrafter
from xpress.drafter_config import DrafterConfig
from xpress.files import file_hash, new_folder, write_json
from xpress.heads import ConfidenceHead, CorrectionHead

WEIGHTS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"
INDEX, RESEARCH = "model.safetensors.index.json", "refiner_cotrain.pt"  # weights in several files; a research file
PACKAGE = Path(__file__).resolve().parent  # its pretrained/ holds what comes with the library
CONVERSION = "conversion.json"  # what a conversion read and wrote
MOST_JSON = 64 * 2**20  # bytes; no config or index is near this


@dataclass
class Checkpoint:
    """What a folder holds, bound to its target where one was given. head is None for a plain drafter.

    confidence: a DSpark checkpoint's second head, None where there is none; format: the layout that was found;
    notes: what was left out or taken on trust while reading it.
    """

    drafter: DFlashDrafter
    head: CorrectionHead | None
    provenance: dict
    path: Path
    confidence: ConfidenceHead | None = None
    format: str = "ours"
    notes: tuple[str, ...] = ()


def locate(path: str | Path) -> Path:
    """Where the checkpoint is: `path` itself, for a training run its `checkpoint`, for "pretrained/…" what comes with
    the library, for a hub id ("owner/name") the downloaded copy. A folder, or the file of a research checkpoint. Raises
    FileNotFoundError with the remedy.
    """
    hub_id = str(path)
    path = Path(path).expanduser()
    if not path.exists() and (PACKAGE / path).exists():
        path = PACKAGE / path
    if not path.exists() and hub_id.count("/") == 1 and hub_id[0] not in "./~":
        path = _download(hub_id)
    if path.is_file() and path.suffix == ".pt":
        return path
    for folder in (path, path / "checkpoint"):
        if (folder / CONFIG).exists() and any((folder / name).exists() for name in (WEIGHTS, INDEX)):
            return folder
        if (folder / RESEARCH).exists():
            return folder / RESEARCH
        if (folder / CONFIG).exists():
            raise FileNotFoundError(f"checkpoint={path}: {WEIGHTS} is missing; the folder is incomplete")
    raise FileNotFoundError(
        f"checkpoint={path}: no {CONFIG} there. Give the folder that training wrote, or what comes with the library, "
        "pretrained/smollm2_xpress_b8"
    )


def provenance_of(folder: Path) -> dict:
    """Where a checkpoint comes from; {} for one that does not say."""
    for name, pick in ((PROVENANCE, lambda found: found), (CONVERSION, lambda found: found.get("provenance") or {})):
        if (folder / name).exists():
            return pick(read_json(folder / name))
    return {}


def weight_files(place: Path) -> list[Path]:
    """The files of the weights of what `locate` found, in one order."""
    if place.is_file():
        return [place]
    return [place / WEIGHTS] if (place / WEIGHTS).exists() else sorted(place.glob("*.safetensors"))


def weights_hash(place: Path) -> str:
    """sha256 of the weights of what `locate` found; of several files, of their hashes."""
    hashes = [file_hash(file) for file in weight_files(place)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=["*.safetensors", "*.json"]))
        if not weight_files(folder):  # a research file beside them would double the download
            folder = Path(snapshot_download(hub_id, allow_patterns=["*.json", RESEARCH]))
        return folder
    except Exception as error:  # the hub client raises a dozen kinds
        raise FileNotFoundError(
            f"checkpoint={hub_id}: no such folder, and the hub cannot be read ({type(error).__name__}); give a local "
            "folder, or try again with network"
        ) from error


def save(path: str | Path, drafter, head=None, provenance: dict | None = None, tensors=None, confidence=None):
    """Write a checkpoint folder, whole or not at all; `tensors` where they are gathered already."""
    tensors = tensors_of(drafter, head, confidence) if tensors is None else tensors
    with new_folder(Path(path)) as folder:
        write(folder, drafter, head, tensors, provenance, confidence)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on the CPU; of a sharded one, gathered from all processes."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().cpu().contiguous()


def tensors_of(drafter: DFlashDrafter, head: CorrectionHead | None, confidence=None) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, on the CPU. Sharded parameters are gathered: then all processes call it together."""
    parts = {"": drafter, "head.": head, "confidence.": confidence}
    state = {
        f"{prefix}{k}": v for prefix, part in parts.items() if part is not None for k, v in part.state_dict().items()
    }
    tensors = {name: whole(weight) for name, weight in state.items()}
    tensors["fc.weight"] = scaled(tensors["fc.weight"], drafter.config.feature_scale)
    return tensors | id_map(drafter.config.draft_ids)


def id_map(draft_ids) -> dict[str, torch.Tensor]:
    """d2t [V_draft]: target id − draft id of a reduced vocabulary; {} for the whole one."""
    return {} if draft_ids is None else {"d2t": torch.tensor(draft_ids) - torch.arange(len(draft_ids))}


def write(folder: Path, drafter, head, tensors: dict, provenance: dict | None = None, confidence=None):
    """The files of a checkpoint into a folder that is there."""
    write_files(folder, drafter.config, head and head.config, tensors, provenance, confidence and confidence.rank)


def write_files(folder: Path, config: DrafterConfig, head: dict | None, tensors, provenance=None, confidence=None):
    """The same from what it is made of: head, the config that builds it; confidence, the rank that its head reads."""
    raw = config.to_json() | {"dtype": str(tensors["fc.weight"].dtype).removeprefix("torch.")}
    if head is not None:
        raw["head"] = head
    if confidence is not None:
        raw["confidence"] = {"rank": confidence}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, raw)
    write_json(folder / PROVENANCE, provenance or {})


def scaled(fc: torch.Tensor, scale, power: float = 1.0) -> torch.Tensor:
    """fc.weight [D,M·D] times a factor for each captured layer, to a power."""
    return (fc.unflatten(1, (len(scale), -1)) * fc.new_tensor(scale)[:, None] ** power).flatten(1)


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
    except (TypeError, RuntimeError) as error:  # RuntimeError: torch refuses a size
        raise ValueError(f"head {kind.__name__}: {error}") from error


def read_json(path: Path) -> dict:
    """A JSON object from a file. Raises ValueError, naming the file, for anything else."""
    if path.stat().st_size > MOST_JSON:
        raise ValueError(f"{path}: {path.stat().st_size >> 20} MiB is no config; copy the checkpoint again")
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a JSON object")
    return found


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
