"""Research files (refiner_cotrain.pt): torch's own file of refiner, co-trained drafter and an argparse Namespace.

Read through torch's weights-only loader with that one class allowed, so that nothing in the file runs; never written.
Sizes of the drafter are not in it: they come from a config.json beside it or from the drafter that it started from.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import torch

from xpress import checkpoint
from xpress.interop import zlab
from xpress.interop.base import MARKOV, REFINER, Plan, head_config
from xpress.interop.serving import RESEARCH_NAMES
from xpress.interop.source import NAMES, Entry, Source

NAME, ABOUT, WRITES = "research", "XPress or Markov research file (.pt)", False
NEEDED = {  # fields of args that change what the head computes -> the only value that this library computes
    "no_hidden": False,
    "no_perpos": False,
    "no_global": False,
    "no_residual": True,
    "no_mixer": False,
    "no_mlp": False,
    "input_mode": "concat",
    "no_sublayer_norm": True,
    "no_mix_out": True,
    "lowrank_lmhead_shared_rank": 0,
    "lowrank_base_rank": 0,
    "input_relu": False,
    "mlp_ratio": 2,
    "markov_only": False,
}
MARKOV_NAMES = {"token_embed.weight": "w1.weight", "readout.weight": "w2.weight"}


def open_file(file: Path, drafter: str | Path | None = None) -> Source:
    """The tensors and args of a research file; `drafter`: a folder or config.json with the sizes of its drafter."""
    found = _load(file)
    entries = {}
    for section, prefix in (("draft_state_dict", "draft."), ("refiner_state_dict", "refiner.")):
        tensors = found.get(section)
        if not isinstance(tensors, dict) or not tensors:
            raise ValueError(f"{file}: no {section}; give the file that holds drafter and head (refiner_cotrain.pt)")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise ValueError(f"{file}: {section}[{name!r}] is no tensor; give the original file")
            entries[prefix + name] = _entry(file, prefix + name, tensor)
    args = found.get("args")
    if not isinstance(args, argparse.Namespace | dict):
        raise ValueError(f"{file}: no args: which head this is cannot be told; give the original file")
    return Source(file, _config(file, drafter), entries, args=args if isinstance(args, dict) else vars(args))


def _load(file: Path) -> dict:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        cause = next((line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line), "")
        raise ValueError(
            f"{file}: refused, nothing in it was run: it holds more than tensors, plain values and a Namespace "
            f"({cause.strip() or 'not a file of torch'}); give a file saved without such objects"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{file}: damaged or truncated ({' '.join(str(error).split())[:120] or 'it ends early'}); copy it again"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: not a research checkpoint; give refiner_cotrain.pt")
    return found


def _entry(file: Path, name: str, tensor: torch.Tensor) -> Entry:
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(f"{file}: {name} declares {list(tensor.shape)}, more than it stores; give the original file")
    return Entry(tuple(tensor.shape), NAMES.get(tensor.dtype, str(tensor.dtype)), lambda: tensor.contiguous().clone())


def _config(file: Path, drafter) -> dict:
    place = file.parent if drafter is None else Path(drafter).expanduser()
    place = place / checkpoint.CONFIG if place.is_dir() else place
    if not place.is_file():
        raise FileNotFoundError(
            f"checkpoint={file}: the sizes of its drafter are not in it, and there is no {place}; give "
            "drafter=<folder of the dFlash drafter that it started from>"
        )
    return checkpoint.read_json(place)


def recognise(source) -> bool:
    return source.place.is_file()


def read(source, target) -> Plan:
    config = zlab.drafter(source)
    rank = source.args.get("markov_rank", 256)
    if "refiner.in_proj.weight" in source.entries:
        for key, needed in NEEDED.items():
            if source.args.get(key, needed) != needed:
                raise ValueError(
                    f"{source.place}: args.{key}={source.args[key]!r}: another head; only {needed!r} is read"
                )
        return Plan(
            NAME, config, head_config(REFINER, config, rank), _names(RESEARCH_NAMES), masks=("refiner.mix.tril",)
        )
    prefix = "markov_" if source.has("refiner.markov_w1") else ""
    names = {ours: prefix + theirs for ours, theirs in MARKOV_NAMES.items()}
    return Plan(NAME, config, head_config(MARKOV["vanilla"], config, rank), _names(names))


def _names(head: dict[str, str]):
    return lambda name: f"refiner.{head[name[5:]]}" if name.startswith("head.") else f"draft.{name}"
