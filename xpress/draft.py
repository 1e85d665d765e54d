"""Draft tokens, how they are chosen from corrected logits, and what each was drawn from.

Greedy drafts need no logits: the readout's own argmax (xpress.kernels) names the ids. Sampled ones must tell
verification the q that drew them. Whole rows are kept where the processor has room for them and for their noise;
on a GPU the token's ℓ/T and its row's log-sum are kept, and the one row of the residual is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from xpress import kernels
from xpress.block import Block
from xpress.heads.base import CorrectionHead, corrected_logits
from xpress.kernels import TopC
from xpress.sampling import DRAFT, GREEDY, Noise, Sampling, argmax, at_least_fp32


@dataclass
class Kept:
    """logits [N,G,V_draft] that the tokens were drawn from."""

    logits: Tensor

    def rows(self) -> Tensor:
        """q [N,G,V_draft]"""
        return self.logits.softmax(-1)

    def first(self, length: int) -> Kept:
        """The same for the first tokens alone."""
        return Kept(self.logits[:, :length])


@dataclass
class Redrawn:
    """base [N,G,V_draft] and latent [N,G,R] of the pass that computed each row last; logit, lse [N,G] of ℓ/T. A row of
    q is computed again where it is asked for."""

    base: Tensor
    latent: Tensor
    weight: Tensor
    temperature: float
    logit: Tensor
    lse: Tensor

    def rows(self) -> Tensor:
        """q [N,G,V_draft]"""
        logits = kernels.q_row(self.base.flatten(0, 1), self.latent.flatten(0, 1), self.weight)
        return (logits / self.temperature).softmax(-1).view(self.base.shape)

    def of_tokens(self) -> Tensor:
        """q of the draft tokens [N,G]"""
        return (self.logit - self.lse).exp()

    def row(self, index: Tensor) -> Tensor:
        """index [N] -> q of that row of each block [N,V_draft]"""
        blocks = torch.arange(len(index), device=index.device)
        logits = kernels.q_row(self.base[blocks, index], self.latent[blocks, index], self.weight)
        return (logits / self.temperature).softmax(-1)

    def first(self, length: int) -> Redrawn:
        """The same for the first tokens alone."""
        parts = {name: getattr(self, name)[:, :length] for name in ("base", "latent", "logit", "lse")}
        return replace(self, **parts)


@dataclass
class Draft:
    """ids [N,G] (target ids); drawn: what each token was drawn from (None when greedy); passes [N]: Jacobi passes run
    for each block, the confirming one of `auto` included (0 for the serial solver); settled [N]: the pass that changed
    a block last, 0 for the seed (None where no one looked: all but `auto`); kept [N]: how many tokens of each block are
    verified (None: all). The rest counts as proposed by no one: no token matches it, and q cannot draw it."""

    ids: Tensor
    drawn: Kept | Redrawn | None
    passes: Tensor
    block: Block | None = None
    settled: Tensor | None = None
    kept: Tensor | None = None

    def cut(self, kept: Tensor, length: int) -> Draft:
        """Only the first kept[n] tokens of each block are verified; what stands behind `length`, the longest of them or
        more, is dropped."""
        drawn = self.drawn.first(length) if self.drawn is not None and length else None  # nothing drafted, or drawn
        return replace(self, ids=self.ids[:, :length], drawn=drawn, kept=kept.to(self.ids.device))

    @property
    def verified(self) -> Tensor | None:
        """Which tokens are [N,G]; None: all."""
        slots = torch.arange(self.ids.shape[1], device=self.ids.device)
        return None if self.kept is None else slots < self.kept[:, None]

    def proposed(self) -> Tensor:
        """ids [N,G] with an id that no target says in place of what is not verified"""
        return self.ids if self.kept is None else self.ids.where(self.verified, -1)

    def q(self) -> Tensor | None:
        """Draft distribution over the target's vocabulary [N,G,V], None for a greedy draft."""
        if self.drawn is None:
            return None
        q = self.block.over_target(self.drawn.rows())
        return q if self.kept is None else q * self.verified[..., None]

    def q_row(self, index: Tensor) -> Tensor:
        """index [N] -> that row of each block's q [N,V]"""
        q = self.block.over_target(self.drawn.row(index))
        return q if self.kept is None else q * (index < self.kept)[:, None]

    def q_of_tokens(self) -> Tensor:
        """q of the draft tokens [N,G], of a draft whose rows are computed again"""
        q = self.drawn.of_tokens()
        return q if self.kept is None else q * self.verified

    @classmethod
    def nothing(cls, num_blocks: int, device) -> Draft:
        """No draft: plain autoregression."""
        none = torch.zeros(num_blocks, 0, dtype=torch.long, device=device)
        return cls(none, None, torch.zeros(num_blocks, dtype=torch.long))


class Greedy:
    """argmax of the corrected logits, no row of them written: the head's readout whole, screened, or its top C."""

    drawn = None

    def __init__(self, block: Block):
        self.block, self.base, self.best = block, block.base_logits(), None

    def seed(self) -> Tensor:
        """-> the plain drafter's own choice [N,G], target ids"""
        return self.block.to_target(argmax(self.base))

    def __call__(self, latent: Tensor, start: int, head: CorrectionHead) -> Tensor:
        """latent [N,·,R] of rows start … -> target ids [N,·]"""
        weight, ids, stop = head.readout.weight, self.block.draft_ids, start + latent.shape[1]
        base = self.base[:, start:stop]
        if head.top_c:
            self.best = self.best or TopC.of(self.base, weight, head.top_c, ids)
            best = TopC(*(part[:, start:stop] for part in self.best))
            return kernels.top_c(base, latent, weight, head.top_c, ids, chosen=best)
        if head.screen is not None:
            return kernels.screened_argmax(base, latent, weight, head.screen, ids)
        return kernels.readout_argmax(base, latent, weight, ids)


class Rows:
    """Whole rows of tempered logits, top-k and top-p if asked for, and noise made once for the block."""

    def __init__(self, block: Block, sampling: Sampling, noise: Noise):
        self.block, self.sampling = block, sampling
        self.base = at_least_fp32(block.base_logits())
        self.noise = noise.gumbel(block.num_draft, _names(block))
        self.q_logits = self.base.new_full(self.base.shape, float("nan"))

    def seed(self) -> Tensor:
        return self.draw(self.base, 0)

    def __call__(self, latent: Tensor, start: int, head: CorrectionHead) -> Tensor:
        return self.draw(corrected_logits(self.base[:, start : start + latent.shape[1]], latent, head.readout), start)

    def draw(self, logits: Tensor, start: int) -> Tensor:
        """logits [N,·,V_draft] of rows start … -> target ids [N,·]; they replace the logits kept for these rows"""
        logits = self.sampling.adjust(logits)
        stop = start + logits.shape[1]
        self.q_logits[:, start:stop] = logits
        return self.block.to_target(argmax(logits + self.noise[:, start:stop]))

    @property
    def drawn(self) -> Kept:
        return Kept(self.q_logits)


class Drawing:
    """The sampling form of the readout: noise is computed where it is used and no row is written."""

    def __init__(self, block: Block, sampling: Sampling, noise: Noise):
        self.block, self.temperature = block, sampling.temperature
        self.base, self.address = block.base_logits(), noise.address(DRAFT, block.hidden.device)
        self.latent = self.weight = None
        self.logit, self.lse = torch.empty(2, *self.base.shape[:2], device=self.base.device)

    def seed(self) -> Tensor:
        width = kernels.fewest_columns(self.base)
        self.latent = self.base.new_zeros(*self.base.shape[:2], width)
        self.weight = self.base.new_zeros(self.base.shape[2], width)
        return self._draw(0, self.base.shape[1])

    def __call__(self, latent: Tensor, start: int, head: CorrectionHead) -> Tensor:
        if self.weight is not head.readout.weight:  # the first corrected rows: what was read before has latent zero
            self.weight = head.readout.weight
            self.latent = latent.new_zeros(*self.base.shape[:2], latent.shape[2])
        stop = start + latent.shape[1]
        self.latent[:, start:stop] = latent
        return self._draw(start, stop)

    def _draw(self, start: int, stop: int) -> Tensor:
        address = torch.stack([self.address[:, 0], self.address[:, 1] + start], 1)
        part = self.base[:, start:stop], self.latent[:, start:stop], self.weight, self.block.draft_ids
        ids, self.logit[:, start:stop], self.lse[:, start:stop] = kernels.readout_sample(
            *part, address=address, temperature=self.temperature
        )
        return ids

    @property
    def drawn(self) -> Redrawn:
        return Redrawn(self.base, self.latent, self.weight, self.temperature, self.logit, self.lse)


def check_noise(block: Block, sampling: Sampling, noise: Noise | None):
    """Raises ValueError for sampled drafts without noise for each block."""
    if not sampling.greedy_draft and (noise is None or len(noise.seeds) != len(block)):
        raise ValueError("sampled drafts need noise, one seed for each block")


def chooser(block: Block, sampling: Sampling = GREEDY, noise: Noise | None = None):
    """What turns latents into draft tokens."""
    if sampling.greedy_draft:
        return Greedy(block)
    cut = sampling.top_k or sampling.top_p < 1
    return (Rows if cut or kernels.backend(block.hidden) == "reference" else Drawing)(block, sampling, noise)


def _names(block: Block) -> Tensor:
    """Target id of each draft id."""
    return torch.arange(block.vocab_size, device=block.hidden.device) if block.draft_ids is None else block.draft_ids
