"""What is on disk, before any weight is read: a config, and the name, shape and dtype of every tensor."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xpress import checkpoint

FLOATS = ("F64", "F32", "BF16", "F16")
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Entry:
    """A tensor that is not read yet. dtype as safetensors writes it."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


@dataclass
class Source:
    """place: the folder, or a research file; config: its own, or the one that a research file goes with."""

    place: Path
    config: dict
    entries: dict[str, Entry]
    provenance: dict = field(default_factory=dict)
    args: dict = field(default_factory=dict)  # a research file's

    @property
    def architecture(self) -> str:
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else ""

    def has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.entries)

    def inner(self) -> dict:
        """The dflash_config section; {} where there is none."""
        found = self.config.get("dflash_config") or {}
        if not isinstance(found, dict):
            raise ValueError(f"{self.place}: dflash_config={found!r} is no section; restore the published config.json")
        return dict(found)

    def check_layers(self, config: dict):
        """Raises ValueError where the config's number of layers is not the file's, before anything is made of it."""
        have = len({m[1] for name in self.entries if (m := re.match(r"(?:draft\.)?layers\.(\d+)\.", name))})
        said = config.get("num_hidden_layers", have)
        if said != have:
            raise ValueError(
                f"{self.place}: not loaded, nothing partial: num_hidden_layers={said!r}, but the file holds tensors of "
                f"{have} layers; restore the config.json that belongs to these weights"
            )

    def draft_ids(self, vocab_size, draft_vocab_size) -> tuple[int, ...] | None:
        """The target ids of a reduced draft vocabulary, from `d2t`; None where there is none or it changes nothing."""
        entry = self.entries.get("d2t")
        if entry is None:
            if (draft_vocab_size or vocab_size) != vocab_size:
                name = checkpoint.WEIGHTS if self.place.is_dir() else self.place.name
                raise ValueError(f"{self.place}: draft_vocab_size is reduced, but {name} has no map 'd2t'")
            return None
        size = draft_vocab_size or entry.shape[:1]
        if len(entry.shape) != 1 or entry.dtype not in ("I64", "I32") or (draft_vocab_size and entry.shape != (size,)):
            raise ValueError(
                f"{self.place}: d2t is {entry.dtype} {list(entry.shape)}, expected integers [{draft_vocab_size}]: one "
                "offset for each draft id; convert it again from the original"
            )
        ids = entry.read().long() + torch.arange(entry.shape[0])
        whole = len(ids) == vocab_size and bool((ids == torch.arange(len(ids))).all())
        return None if whole else tuple(ids.tolist())


def open_source(place: Path) -> Source:
    """The config and the headers of a folder. Raises ValueError for files that are damaged or lead out of it, OSError
    for those that are missing."""
    config = checkpoint.read_json(place / checkpoint.CONFIG)
    if (place / "mask_embedding.pt").exists():
        raise ValueError(f"{place}: mask_embedding.pt gives the mask slots an embedding of their own: not supported")
    entries: dict[str, Entry] = {}
    for file, names in _files(place).items():
        found = _header(file)
        if names is not None and set(found) != names:
            odd = sorted(set(found) ^ names)
            raise ValueError(
                f"{file}: {odd[0]} is not in both this file and {checkpoint.INDEX}; copy the checkpoint again"
            )
        entries |= found
    return Source(place, config, entries, checkpoint.provenance_of(place))


def _files(place: Path) -> dict[Path, set | None]:
    """Each file of weights, and the names that the index says are in it (None: no index)."""
    if (place / checkpoint.WEIGHTS).exists():
        return {place / checkpoint.WEIGHTS: None}
    index = place / checkpoint.INDEX
    places = checkpoint.read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index}: no weight_map of tensor names to file names; copy the checkpoint again")
    files: dict[Path, set | None] = {}
    for tensor, name in places.items():
        if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise ValueError(
                f"{index}: {tensor} is said to be in {name!r}, which is no safetensors file of this folder; nothing "
                "outside it is read"
            )
        if not (place / name).exists():
            raise FileNotFoundError(f"checkpoint={place}: {name} is missing; the folder is incomplete")
        files.setdefault(place / name, set()).add(tensor)
    return files


def _header(file: Path) -> dict[str, Entry]:
    try:
        opened = safe_open(file, framework="pt")
        parts = {name: opened.get_slice(name) for name in opened.keys()}
    except SafetensorError as error:
        raise ValueError(f"{file}: {file.name}: damaged or truncated ({error}); copy or train it again") from error

    def reader(name):
        return lambda: opened.get_tensor(name)

    return {name: Entry(tuple(part.get_shape()), part.get_dtype(), reader(name)) for name, part in parts.items()}
