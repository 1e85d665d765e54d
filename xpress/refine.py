"""Solvers of ids = argmax(s + head(hidden, prev_ids(ids))): parallel Jacobi passes, or slot by slot.

The head is causal, so after p passes the first p draft tokens are final: pass p + 1 need not read them out again, and
G passes give exactly what the serial solver gives. Above temperature 0 the argmax runs over ℓ/T + Γ with one noise
tensor Γ frozen for the block (Gumbel-max), which makes the same fixed point a sample of the serial distribution.

Losslessness needs the q of the very pass that drew a token: inputs of row k depend on Γ of earlier slots only, so that
token is distributed as softmax of THOSE logits. Rows that later passes skip keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xpress.block import Block
from xpress.heads.base import CorrectionHead, corrected_logits
from xpress.sampling import GREEDY, Noise, Sampling, argmax, at_least_fp32


@dataclass
class Draft:
    """ids [N,G] (target ids); q_logits [N,G,V_draft]: logits that each token was drawn from (None when greedy);
    passes [N]: Jacobi passes run for each block, the confirming one of `auto` included (0 for the serial solver);
    settled [N]: the pass that changed a block last, 0 for the seed (None where no one looked: all but `auto`)."""

    ids: Tensor
    q_logits: Tensor | None
    passes: Tensor
    block: Block | None = None
    settled: Tensor | None = None

    def q(self) -> Tensor | None:
        """Draft distribution over the target's vocabulary [N,G,V], None for a greedy draft."""
        return None if self.q_logits is None else self.block.over_target(self.q_logits.softmax(-1))

    @classmethod
    def nothing(cls, num_blocks: int, device) -> Draft:
        """No draft: plain autoregression."""
        none = torch.zeros(num_blocks, 0, dtype=torch.long, device=device)
        return cls(none, None, torch.zeros(num_blocks, dtype=torch.long))


class Chooser:
    """Turns logits of draft tokens start + 1 … into ids, and keeps the logits that they were drawn from."""

    def __init__(self, block: Block, sampling: Sampling = GREEDY, noise: Noise | None = None):
        self.block, self.sampling = block, sampling
        self.noise = self.q_logits = None
        if not sampling.greedy_draft:
            if noise is None or len(noise.seeds) != len(block):
                raise ValueError("sampled drafts need noise, one seed for each block")
            ids = block.draft_ids
            ids = torch.arange(block.vocab_size, device=block.hidden.device) if ids is None else ids
            self.noise = noise.gumbel(block.num_draft, ids)

    def __call__(self, logits: Tensor, start: int) -> Tensor:
        """logits [N,·,V_draft] of rows start … -> target ids [N,·]"""
        if self.noise is None:
            return self.block.to_target(argmax(logits))
        logits = self.sampling.adjust(logits)
        if self.q_logits is None:
            self.q_logits = logits.new_full((len(logits), self.block.num_draft, logits.shape[-1]), float("nan"))
        stop = start + logits.shape[1]
        self.q_logits[:, start:stop] = logits
        return self.block.to_target(argmax(logits + self.noise[:, start:stop]))


def sweep(head: CorrectionHead, prepared: Tensor, block: Block, ids: Tensor) -> Tensor:
    """One Jacobi pass up to the readout: draft tokens [N,G] -> latents [N,G,R]. Training unrolls this very function."""
    return block.rows(head.latent(prepared, block.prev_ids(ids)))


def jacobi(head: CorrectionHead | None, block: Block, choose: Chooser | None = None) -> Iterator[Tensor]:
    """Yields draft tokens [N,G] after the seed (the plain drafter's own choice), then after each pass, without end."""
    choose = choose or Chooser(block)
    base = at_least_fp32(block.base_logits())
    ids = choose(base, 0)
    yield ids
    prepared = head.prepare(block.hidden)
    final = 0  # rows whose inputs can change no more, counted after the pass that read them out
    while True:
        latent = sweep(head, prepared, block, ids)[:, final:]
        ids = ids.clone()
        if latent.shape[1]:
            ids[:, final:] = choose(corrected_logits(base[:, final:], latent, head.readout), final)
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
    base = at_least_fp32(block.base_logits())
    ids = block.anchor.new_full((len(block), block.num_draft), -1)  # an impossible id: a slot never filled shows
    prepared, state = head.prepare(block.hidden), None
    for slot in range(block.layout.first_slot + block.num_draft):
        row = slot - block.layout.first_slot  # draft token row + 1
        prev = ids[:, row - 1] if row > 0 else block.prev_ids(ids)[:, slot]
        latent, state = head.step(prepared, prev, slot, state)
        if row >= 0:
            logits = corrected_logits(base[:, row : row + 1], latent[:, None], head.readout)
            ids[:, row] = choose(logits, row)[:, 0]
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
    G), or 'sequential'. head=None or passes=0 is the plain drafter."""
    check_passes(passes)
    choose = Chooser(block, sampling, noise)
    if head is None:
        passes = 0
    if passes == "sequential":
        ids, used, settled = _sequential(head, block, choose), torch.zeros(len(block), dtype=torch.long), None
    else:
        ids, used, settled = _jacobi(head, block, passes, choose)
    return Draft(ids, choose.q_logits, used, block, settled)
