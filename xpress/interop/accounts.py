"""Every tensor is accounted for before a weight is used: missing, unexpected, of another shape or dtype, not finite.

What is read has the shape that was expected, so a file cannot make more of itself in memory than it is.

| found | rule |
|---|---|
| missing, unexpected, another shape, a dtype that is no float of 16 to 64 bits | refused, all of them told at once |
| NaN or infinity | refused, with the tensor's name |
| embed_tokens, lm_head of the target | dropped; with a target they must equal its own up to rounding, else a note |
| a causal mask (mix.tril, causal_tril) | dropped if it is the lower triangle, else refused |
| t2d | dropped if it says what d2t says, else refused |
| a mixer that was folded | refused where the config says so; a diagonal near 1 is a warning |
| weights of 16 and 32 bits side by side | taken, with a note |
"""

from __future__ import annotations

import dataclasses
import warnings

import torch
from torch import Tensor

from xpress import checkpoint
from xpress.drafter import DFlashDrafter, Rotary
from xpress.heads import ConfidenceHead
from xpress.interop.base import EMBEDDING, Plan, Weights
from xpress.interop.source import FLOATS, Source

ROWS = 4096  # of an embedding, compared at a time


def expected(plan: Plan) -> tuple[dict[str, tuple[int, ...]], dict | None]:
    """Our name of every tensor of a plan -> shape; the head's config with all defaults. Nothing is allocated."""
    head_config = None
    config, plain = plan.config, {"rope_type": "default", "rope_theta": 1e4}  # scaled ones are computed on the CPU
    with torch.device("meta"):
        state = DFlashDrafter(dataclasses.replace(config, rope_parameters=plain)).state_dict()
    if plan.head is not None:
        checkpoint.check_head(plan.head, config)
        own = str(plan.head.get("_target_", "")).startswith("xpress.heads.")
        with torch.device("meta" if own else "cpu"):  # a user's own __init__ may not run on meta
            head = checkpoint.build_head(plan.head)
        head_config = head.config
        checkpoint.check_head({"draft_vocab_size": head.readout.out_features}, config)
        state |= {f"head.{name}": t for name, t in head.state_dict().items()}
    if plan.confidence is not None:
        with torch.device("meta"):
            confidence = ConfidenceHead(config.hidden_size, plan.confidence)
        state |= {f"confidence.{name}": t for name, t in confidence.state_dict().items()}
    return {name: tuple(t.shape) for name, t in state.items()}, head_config


def collect(source: Source, plan: Plan, target=None) -> Weights:
    """The weights of a plan. Raises ValueError for anything that the rules above refuse; no partial load."""
    _refuse_folded(source)
    try:
        wanted, head = expected(plan)
    except RuntimeError as error:  # torch cannot even count them
        raise ValueError(
            f"{source.place}: not loaded, nothing partial: its config declares sizes that no file holds ({error}); "
            "restore the config.json that belongs to these weights"
        ) from error
    shapes = {name: (plan.theirs(name), shape) for name, shape in wanted.items()}
    entries, known = source.entries, {theirs for theirs, _ in shapes.values()}
    extra = {**plan.frozen, **dict.fromkeys(plan.masks), **plan.dropped} | dict.fromkeys(("d2t", "t2d"))
    problems = [f"missing {theirs} {list(shape)}" for theirs, shape in shapes.values() if theirs not in entries]
    problems += [f"unexpected {name}" for name in entries if name not in known and name not in extra]
    tensors = {}
    for ours, (theirs, shape) in shapes.items():
        entry = entries.get(theirs)
        if entry is None:
            continue
        if entry.shape != shape:
            problems.append(f"{theirs} has shape {list(entry.shape)}, expected {list(shape)}")
        elif entry.dtype not in FLOATS:
            problems.append(
                f"{theirs} is {entry.dtype}, not one of {', '.join(FLOATS)}: quantised weights are not read"
            )
        else:
            tensors[ours] = entry.read()
            if not torch.isfinite(tensors[ours]).all():
                problems.append(f"{theirs} holds NaN or infinity")
    rows = None
    for name, kind in plan.frozen.items():
        if name in entries:
            found, problem = _frozen(entries[name], name, kind, plan, target)
            problems += [problem] if problem else []
            rows = found if kind != EMBEDDING and plan.config.draft_ids is not None else rows
    problems += [p for name in plan.masks if name in entries and (p := _mask(entries[name], name, plan))]
    problems += [p for p in [_t2d(entries, plan)] if p]
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise ValueError(
            f"{source.place}: not loaded, nothing partial: {'; '.join(sorted(problems)[:8])}{more}; copy it again, "
            "with the config.json that belongs to it"
        )
    try:
        Rotary(plan.config)
    except (KeyError, TypeError, ValueError) as error:  # transformers' word on a scaling that lacks a value
        raise ValueError(f"{source.place}: rope_parameters cannot be used ({error}); restore config.json") from error
    notes = plan.notes + [f"{name}: {why}" for name, why in plan.dropped.items() if name in entries]
    if target is None and (saved := [name for name in plan.frozen if name in entries]):
        notes.append(f"{', '.join(saved)}: taken for the target's own; no target was given to compare with")
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()})
    if len(dtypes) > 1:
        notes.append(f"weights of several dtypes: {', '.join(dtypes)}")
    notes += _looks_folded(source, tensors)
    return Weights(
        plan.format,
        plan.config,
        head,
        plan.confidence,
        tensors,
        rows,
        plan.facts,
        notes,
        source.provenance,
        source.place,
    )


def _frozen(entry, name, kind, plan, target) -> tuple[Tensor | None, str | None]:
    """A saved tensor of the target -> its values where they are of use, what is wrong with it."""
    config = plan.config
    size = config.vocab_size if kind == EMBEDDING else config.draft_vocab_size
    if entry.shape != (size, config.hidden_size):
        return None, f"{name} has shape {list(entry.shape)}, expected {[size, config.hidden_size]}"
    if entry.dtype not in FLOATS:
        return None, f"{name} is {entry.dtype}, not one of {', '.join(FLOATS)}: quantised weights are not read"
    if target is None and (kind == EMBEDDING or config.draft_ids is None):
        return None, None
    saved = entry.read()
    if target is None:
        return saved, None if torch.isfinite(saved).all() else f"{name} holds NaN or infinity"
    theirs = (target.embedding if kind == EMBEDDING else target.lm_head).weight.detach()
    ids = torch.arange(size) if kind == EMBEDDING or config.draft_ids is None else torch.tensor(config.draft_ids)
    if theirs.shape[1] != config.hidden_size or int(ids.max()) >= len(theirs):
        return None, f"{name} does not fit target {target.name}, whose own is {list(theirs.shape)}"
    for part in range(0, size, ROWS):
        rows = theirs[ids[part : part + ROWS].to(theirs.device)].cpu()
        if not _same(saved[part : part + ROWS], rows):
            return None, (
                f"{name} is not target {target.name}'s own: the checkpoint is another target's, or trained this tensor "
                "too, which is not supported"
            )
    return saved, None


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal up to the rounding of the coarser dtype."""
    step = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    return torch.allclose(a.double(), b.double(), rtol=step, atol=1e-30 if a.dtype == b.dtype else 1e-7)


def _mask(entry, name, plan) -> str | None:
    B = plan.config.block_size
    if entry.shape != (B, B):
        return f"{name} has shape {list(entry.shape)}, expected {[B, B]}"
    ours = torch.ones(B, B).tril()
    return None if torch.equal(entry.read().float(), ours) else f"{name} is no lower triangle: the mixer is not causal"


def _t2d(entries, plan) -> str | None:
    if "t2d" not in entries:
        return None
    V, ids = plan.config.vocab_size, plan.config.draft_ids
    if entries["t2d"].shape != (V,):
        return f"t2d has shape {list(entries['t2d'].shape)}, expected {[V]}"
    ours = torch.ones(V, dtype=torch.bool) if ids is None else torch.zeros(V, dtype=torch.bool)
    ours[torch.tensor(ids or (0,))] = True
    return None if torch.equal(entries["t2d"].read().bool(), ours) else "t2d and d2t name other ids"


def _refuse_folded(source: Source):
    for key, value in source.config.items():
        if "fold" in key and value:
            raise ValueError(
                f"{source.place}: {key}={value!r}: its mixer is folded for inference already; give the checkpoint with "
                "the raw mixer"
            )


def _looks_folded(source: Source, tensors: dict[str, Tensor]) -> list[str]:
    mixer = tensors.get("head.mix_l")
    if mixer is None or not 0.5 < float(mixer.diagonal(dim1=1, dim2=2).float().median()) < 1.5:
        return []
    note = "the mixer's diagonal is near 1, as if the identity were folded in already; it is taken as raw"
    warnings.warn(f"{source.place}: {note}", stacklevel=4)
    return [note]
