"""Weights move both ways: every public layout in, every engine's layout out.

found = load("z-lab/Qwen3-8B-DFlash-b16", target)          ready to decode
convert("outputs/run", "served", "zlab")                   another layout of the same weights
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import save_file

from xpress import checkpoint
from xpress.checkpoint import Checkpoint
from xpress.drafter import DFlashDrafter
from xpress.files import new_folder, write_json
from xpress.heads import ConfidenceHead
from xpress.interop import domino, dspark, ours, research, serving, speculators, zlab
from xpress.interop.accounts import collect
from xpress.interop.base import Files, Plan, Weights
from xpress.interop.layer_ids import layer_ids
from xpress.interop.source import Source, open_source

__all__ = ["FORMATS", "convert", "layer_ids", "load", "plan", "read", "write"]

# The first that recognises a source reads it: those with a mark of their own before those that share z-lab's fields.
FORMATS = {kind.NAME: kind for kind in (research, ours, speculators, serving, dspark, domino, zlab)}
PACKAGES = ("xpress-refiner", "torch", "transformers", "safetensors")
DROPS = ("head", "confidence")


def _say(text: str):
    print(text, file=sys.stderr)


def load(
    path: str | Path,
    target=None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    drafter: str | Path | None = None,
    say: Callable[[str], None] | None = _say,
) -> Checkpoint:
    """Read a checkpoint of any format and bind it to `target`. `say` (stderr) is told which format it is, unless ours.
    The drafter comes frozen, as decoding in static buffers needs it; training asks for its gradients by itself.

    path: a folder, a training run's folder, a research file or a hub id; drafter: for a research file, the folder of
    the dFlash drafter that it started from. Raises FileNotFoundError for a missing or partial folder, ValueError for a
    layout that is not known, for tensors that are missing, unexpected, of another shape or dtype or not finite, and for
    a checkpoint that belongs to another target.
    """
    weights = read(path, target, drafter)
    if weights.format != ours.NAME and say is not None:
        say("; ".join([f"{path}: {FORMATS[weights.format].ABOUT}", *weights.notes]))
    config = weights.config
    body = DFlashDrafter(config).to(device=device, dtype=dtype).eval().requires_grad_(False)
    state = {name: t for name, t in weights.tensors.items() if not name.startswith(("head.", "confidence."))}
    state["fc.weight"] = checkpoint.scaled(state["fc.weight"], config.feature_scale, -1.0)
    body.load_state_dict(state)
    head = confidence = None
    if weights.head is not None:
        head = checkpoint.build_head(weights.head).to(device=device, dtype=dtype).eval()
        head.load_state_dict(_below("head.", weights))
    if weights.confidence is not None:
        confidence = ConfidenceHead(config.hidden_size, weights.confidence).to(device=device, dtype=dtype).eval()
        confidence.load_state_dict(_below("confidence.", weights))
    if target is not None:
        body.bind(target)
        if head is not None:
            head.bind(target)
    return Checkpoint(body, head, weights.provenance, weights.path, confidence, weights.format, tuple(weights.notes))


def _below(prefix: str, weights: Weights) -> dict:
    return {name.removeprefix(prefix): t for name, t in weights.tensors.items() if name.startswith(prefix)}


def plan(path: str | Path, target=None, drafter=None) -> Plan:
    """What a checkpoint's config promises; of its weights only names, shapes and d2t are read. Raises as `load`."""
    return _planned(path, target, drafter)[1]


def read(path: str | Path, target=None, drafter=None) -> Weights:
    """A checkpoint of any format as weights without one, every tensor accounted for. Raises as `load`."""
    source, promised = _planned(path, target, drafter)
    if target is not None:
        checkpoint.check_target(source.provenance, target, source.place)
    with _about(source, FORMATS[promised.format]):
        return collect(source, promised, target)


def _planned(path, target, drafter) -> tuple[Source, Plan]:
    place = checkpoint.locate(path)
    source = research.open_file(place, drafter) if place.is_file() else open_source(place)
    for kind in FORMATS.values():
        if kind.recognise(source):
            with _about(source, kind):
                return source, kind.read(source, target)
    raise ValueError(
        f"{place}: no known layout: architectures={source.config.get('architectures')!r}, tensors "
        f"{', '.join(sorted(source.entries)[:3]) or 'none'} …; known are {', '.join(k.ABOUT for k in FORMATS.values())}"
    )


@contextmanager
def _about(source: Source, kind):
    """Every error names the checkpoint, also those of parts that do not know it."""
    try:
        yield
    except ValueError as error:
        if str(source.place) in str(error):
            raise
        raise ValueError(f"{source.place}: {error}") from error
    except (TypeError, AttributeError, KeyError) as error:  # a value of another kind than the format has there
        raise ValueError(
            f"{source.place}: config.json is not as {kind.ABOUT} has it ({error}); restore the published file"
        ) from error


def formats_for(weights: Weights) -> list[str]:
    """The formats that can hold these weights."""
    return [name for name, kind in FORMATS.items() if kind.WRITES and kind.cannot(weights) is None]


def write(path: str | Path, weights: Weights, format: str, target=None, source: dict | None = None) -> dict:
    """A new folder of that format, whole or not at all -> its conversion record (conversion.json in the folder).

    Raises ValueError for a format that is not known or cannot hold these weights, FileExistsError where `path` exists.
    """
    _check_format(format)
    kind = FORMATS[format]
    if reason := kind.cannot(weights):
        raise ValueError(f"format={format}: {reason}")
    made = Files({}, {}) if kind is ours else kind.files(weights, target)
    record = {
        "format_version": 1,
        "source": source or {"format": weights.format},
        "written": format,
        "left_out": made.left_out,
        "notes": weights.notes,
        "versions": {name: _version(name) for name in PACKAGES},
        "provenance": weights.provenance,
    }
    with new_folder(Path(path), replace=False) as folder:
        if kind is ours:
            ours.write(weights, folder)
        else:
            tensors = {name: t.contiguous() for name, t in made.tensors.items()}
            save_file(tensors, folder / checkpoint.WEIGHTS, metadata={"format": "pt"})
            write_json(folder / checkpoint.CONFIG, made.config)
        write_json(folder / checkpoint.CONVERSION, record)
    return record


def convert(source, destination, format: str, target=None, drafter=None, drop=(), weights=None) -> dict:
    """Read `source`, write `destination` in another format -> the conversion record.

    drop: parts to leave out, of head and confidence; weights: the dtype to round to, as "bfloat16", None for none.
    Raises as `load` and `write`, before anything is written.
    """
    _check_format(format)
    narrow = None if weights is None else getattr(torch, str(weights), None)
    if weights is not None and not (isinstance(narrow, torch.dtype) and narrow.is_floating_point):
        raise ValueError(f"weights={weights}: give bfloat16, float16 or float32")
    if wrong := set(drop) - set(DROPS):
        raise ValueError(f"drop={sorted(wrong)[0]}: give {' or '.join(DROPS)}")
    if Path(destination).exists():
        raise FileExistsError(f"{destination} exists; give another name, nothing is written over it")
    found = read(source, target, drafter)
    origin = {"path": str(source), "format": found.format, "sha256": checkpoint.weights_hash(found.path)}
    for part in drop:
        found.tensors = {name: t for name, t in found.tensors.items() if not name.startswith(f"{part}.")}
        setattr(found, part, None)
        found.notes.append(f"{part}: left out as asked")
    if found.head is None and found.confidence:
        raise ValueError("drop=head: its confidence head reads the rows of the head; give drop=head,confidence")
    if narrow is not None:
        found.tensors = {name: t.to(narrow) for name, t in found.tensors.items()}
        found.notes.append(f"weights: rounded to {weights} as asked")
    return write(destination, found, format, target, origin)


def _check_format(format: str):
    written = [name for name, kind in FORMATS.items() if kind.WRITES]
    if format not in written:
        why = "research files are read, not written; " if format == research.NAME else ""
        raise ValueError(f"format={format}: {why}give one of {', '.join(written)}")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
