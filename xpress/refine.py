"""Solvers of ids = argmax(s + head(hidden, prev_ids(ids))): parallel Jacobi passes, or slot by slot.

The head is causal, so after p passes the first p draft tokens are final: pass p + 1 need not read them out again, and
G passes give exactly what the serial solver gives. Above temperature 0 the argmax runs over ℓ/T + Γ with one noise
tensor Γ frozen for the block (Gumbel-max), which makes the same fixed point a sample of the serial distribution.

Losslessness needs the q of the very pass that drew a token: inputs of row k depend on Γ of earlier slots only, so that
token is distributed as softmax of THOSE logits. Rows that later passes skip keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from xpress.block import Block
from xpress.draft import Draft, check_noise, chooser
from xpress.fused import fits, fused
from xpress.heads.base import CorrectionHead
from xpress.sampling import GREEDY, Noise, Sampling


def sweep(head: CorrectionHead, prepared: Tensor, block: Block, ids: Tensor) -> Tensor:
    """One Jacobi pass up to the readout: draft tokens [N,G] -> latents [N,G,R]. Training unrolls this very function."""
    return block.rows(head.latent(prepared, block.prev_ids(ids)))


def jacobi(head: CorrectionHead | None, block: Block, choose=None) -> Iterator[Tensor]:
    """Yields draft tokens [N,G] after the seed (the plain drafter's own choice), then after each pass, without end."""
    choose = choose or chooser(block)
    ids = choose.seed()
    yield ids
    prepared = head.prepare(block.hidden)
    final = 0  # rows whose inputs can change no more, counted after the pass that read them out
    while True:
        latent = sweep(head, prepared, block, ids)[:, final:]
        ids = ids.clone()
        if latent.shape[1]:
            ids[:, final:] = choose(latent, final, head)
        yield ids
        final = min(final + 1, block.num_draft)


def _jacobi(head, block, passes, choose) -> tuple[Tensor, Tensor, Tensor | None]:
    """-> ids [N,G], passes [N], settled [N] or None"""
    trace = jacobi(head, block, choose)
    ids = next(trace)
    if passes != "auto":
        for _ in range(passes):
            ids = next(trace)
        return ids, torch.full((len(block),), passes), None
    used, settled = torch.full((len(block),), block.num_draft), torch.zeros(len(block), dtype=torch.long)
    for p in range(1, block.num_draft + 1):
        previous, ids = ids, next(trace)
        moved = (ids != previous).any(1).cpu()
        settled[moved] = p
        used[~moved & (used == block.num_draft)] = p
        if not moved.any():
            break
    return ids, used, settled


def _sequential(head, block, choose) -> Tensor:
    """Left to right, one readout row a step -> ids [N,G]"""
    ids = block.anchor.new_full((len(block), block.num_draft), -1)  # an impossible id: a slot never filled shows
    prepared, state = head.prepare(block.hidden), None
    for slot in range(block.layout.first_slot + block.num_draft):
        row = slot - block.layout.first_slot  # draft token row + 1
        prev = ids[:, row - 1] if row > 0 else block.prev_ids(ids)[:, slot]
        latent, state = head.step(prepared, prev, slot, state)
        if row >= 0:
            ids[:, row] = choose(latent[:, None], row, head)[:, 0]
    return ids


def check_passes(passes):
    """Raises ValueError unless `passes` is a whole number ≥ 0, 'auto' or 'sequential'."""
    if passes not in ("auto", "sequential") and not (type(passes) is int and passes >= 0):
        raise ValueError(f"passes={passes!r}: give a number of Jacobi passes from 0 up, 'auto' or 'sequential'")


def refine(
    head: CorrectionHead | None,
    block: Block,
    passes: int | str = 0,
    sampling: Sampling = GREEDY,
    noise: Noise | None = None,
) -> Draft:
    """Draft tokens of a block after `passes`: K passes, 'auto' (stop when a pass changes nothing in a block, at most
    G), or 'sequential'. head=None or passes=0 is the plain drafter. Raises ValueError for other passes, and for sampled
    drafts without noise for each block."""
    check_passes(passes)
    check_noise(block, sampling, noise)
    if head is None:
        passes = 0
    elif passes != "sequential" and fits(head, block, sampling):
        return fused(head, block, passes, sampling, noise)
    choose = chooser(block, sampling, noise)
    if passes == "sequential":
        ids, used, settled = _sequential(head, block, choose), torch.zeros(len(block), dtype=torch.long), None
    else:
        ids, used, settled = _jacobi(head, block, passes, choose)
    return Draft(ids, choose.drawn, used, block, settled)
