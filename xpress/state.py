"""States that a run can be resumed from: weights, AdamW's moments, random states, the step, what must stay the same.

    step-0000400/  config.json model.safetensors provenance.json   a checkpoint like any other
                   optimizer.safetensors  random.safetensors       moments by parameter name; one state a process
                   trainer.json                                    step, best score, tracker id, the run's facts

A state is written under another name and renamed, so that one that is there is whole. Sharded parameters are gathered
before they are written: a state knows nothing of how many processes wrote it.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from xpress import checkpoint, interop
from xpress.checkpoint import whole
from xpress.files import new_folder, write_json
from xpress.recipe import differences

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
POSITION = "trainer.json"


def put(weight: Tensor, full: Tensor) -> Tensor:
    """A full tensor as `weight` is: its device, its type, its shards."""
    full = full.to(weight.device, weight.dtype)
    if not hasattr(weight, "full_tensor"):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, weight.device_mesh, weight.placements)


def moments_of(trainee: nn.Module, optimizer) -> dict[str, Tensor]:
    """AdamW's moments under `<key>.<parameter name>`, whole. All processes call it together."""
    found = {}
    for name, weight in trainee.named_parameters():
        for key, value in optimizer.state.get(weight, {}).items():
            found[f"{key}.{name}"] = whole(value)
    return found


def random_states() -> dict[str, Tensor]:
    """Of this process: torch on the CPU, and on its GPU where it has one."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def save(folder: Path, run, provenance: dict) -> None:
    """Write the state of `run` (train.Run) to `folder`. All processes call it together, one writes."""
    drafter, head, confidence = run.trainee.drafter, run.trainee.head, run.trainee.confidence
    weights = checkpoint.tensors_of(drafter, head, confidence)
    moments = moments_of(run.trainee, run.optimizer)
    states = gather_object([random_states()])
    if not run.accelerator.is_main_process:
        return
    with new_folder(folder) as temporary:
        checkpoint.write(temporary, drafter, head, weights, provenance, confidence)
        save_file(moments, temporary / "optimizer.safetensors")
        flat = {f"{rank}.{kind}": s for rank, own in enumerate(states) for kind, s in own.items()}
        save_file(flat, temporary / "random.safetensors")
        write_json(temporary / POSITION, run.position())


def newest(out: Path) -> Path | None:
    states = sorted(path.parent for path in Path(out).glob(f"step-*/{POSITION}"))
    return states[-1] if states else None


def read(folder: Path) -> dict:
    """What the state says of its run. Raises ValueError where the file is damaged."""
    try:
        return json.loads((folder / POSITION).read_text())
    except ValueError as error:
        raise ValueError(_damaged(folder / POSITION, error)) from error


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Raises FileNotFoundError or ValueError where the file of a state is missing or damaged."""
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(_damaged(path, "it is missing")) from error
    except SafetensorError as error:
        raise ValueError(_damaged(path, error)) from error


def _damaged(path: Path, why) -> str:
    return f"resume: {path} cannot be read ({why}); delete {path.parent}, and the run goes on from the state before it"


def check(folder: Path, saved: dict, now: dict) -> list[str]:
    """Raises ValueError where the run has changed in what must stay -> what has changed and may."""
    refused, allowed = differences(saved, now)
    if refused:
        fine = f" These may change: {'; '.join(allowed)}." if allowed else ""
        raise ValueError(
            f"resume: {folder} was made by another run. These must stay as they were: {'; '.join(refused)}.{fine} Give "
            "the old values, or another out= for a new run"
        )
    return allowed


def load(folder: Path, run) -> None:
    """Weights, moments and random states of `folder` into `run`, whatever the number of processes. Nothing is changed
    where a file is missing or damaged."""
    found = interop.load(folder, dtype=next(run.trainee.drafter.parameters()).dtype)
    parts = {"drafter": found.drafter, "head": found.head, "confidence": found.confidence}
    there = {part: module for part, module in parts.items() if module is not None}
    tensors = {f"{part}.{name}": t for part, module in there.items() for name, t in module.state_dict().items()}
    moments, states = (tensors_in(folder / f"{name}.safetensors") for name in ("optimizer", "random"))
    with torch.no_grad():
        for name, weight in run.trainee.named_parameters():
            weight.copy_(put(weight, tensors[name]))
            own = {key: moments[f"{key}.{name}"] for key in MOMENTS if f"{key}.{name}" in moments}
            if own:  # a parameter that was never stepped has none
                run.optimizer.state[weight] = {
                    k: v.to(weight.device) if k == "step" else put(weight, v) for k, v in own.items()
                }
    rank = run.accelerator.process_index
    if f"{rank}.cpu" in states:
        torch.set_rng_state(states[f"{rank}.cpu"])
    if f"{rank}.cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[f"{rank}.cuda"])


def prune(out: Path, pattern: str, keep: int) -> None:
    """Of the folders that match, the newest `keep` stay; half-written ones of a killed run go."""
    found = sorted(Path(out).glob(pattern))
    for old in [*found[: max(0, len(found) - keep)], *Path(out).glob(f".{pattern}.tmp")]:
        shutil.rmtree(old, ignore_errors=True)


def clear(out: Path) -> None:
    """What a killed process left half-written or half-replaced goes; see files.py."""
    for path in Path(out).glob(".*"):
        if re.search(r"\.\d+\.(tmp|old)$", path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def size(trainee: nn.Module) -> int:
    """Bytes of one state: weights, and two moments of what is trained."""
    return sum(w.numel() * w.element_size() * (3 if w.requires_grad else 1) for w in trainee.parameters())
