"""The objective as data, and its loss over the whole vocabulary, a chunk of rows at a time.

For every logit tensor z the same form, weighted over rows:

    L(z) = ce · CE(z, data token) + l1 · ‖softmax z − p_target‖₁          (the second part is twice the total variation)

A term says where z comes from: the drafter alone (feed `none`), the head under the data's previous tokens (`gold`), or
the head under its own argmax (`self`, some rounds). Softmaxes run in fp32 at least. The term `confidence` has no z: it
trains a confidence head on how likely the tokens of `gold` are to be accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from xpress.sampling import argmax, at_least_fp32

FEEDS = ("none", "gold", "self")
CONFIDENCE = "confidence"  # the feed of the term that is not one of logits


@dataclass(frozen=True)
class Term:
    """One term: its feed, rounds of self-feeding, weight (a number, or [from, to] linear over the first `over` share of
    the steps), token loss and decay: draft token k weighs exp(−(k − 1)/decay), None for no decay."""

    name: str
    feed: str
    weight: float | list = 1.0
    rounds: int = 1
    over: float = 1.0
    loss: dict = field(default_factory=lambda: {"ce": 0.1, "l1": 0.9})
    decay: float | None = 4.0

    def __post_init__(self):
        if self.feed == CONFIDENCE and self.loss:
            raise ValueError(
                f"objective term {self.name}: feed=confidence has no token loss; give objective.confidence"
            )
        if self.feed not in (*FEEDS, CONFIDENCE):
            raise ValueError(f"objective term {self.name}: feed={self.feed!r}, known feeds are {', '.join(FEEDS)}")
        if set(self.loss) - {"ce", "l1"}:
            raise ValueError(f"objective term {self.name}: loss={dict(self.loss)}, known token losses are ce and l1")
        if self.rounds < 1 or (self.rounds > 1 and self.feed != "self"):
            raise ValueError(f"objective term {self.name}: rounds={self.rounds}; 1, or more where feed=self")
        if not 0 < self.over <= 1:
            raise ValueError(f"objective term {self.name}: over={self.over}, must be a share of the steps in (0, 1]")
        if self.decay is not None and not self.decay > 0:
            raise ValueError(f"objective term {self.name}: decay={self.decay}, must be above 0, or null for none")
        ends = [self.weight] * 2 if isinstance(self.weight, (int, float)) else list(self.weight)
        if len(ends) != 2 or not all(math.isfinite(end) for end in ends):
            raise ValueError(f"objective term {self.name}: weight={self.weight}, must be a number or [from, to]")

    def weight_at(self, progress: float) -> float:
        """Weight after `progress` (0 … 1) of the steps."""
        if isinstance(self.weight, (int, float)):
            return float(self.weight)
        start, end = self.weight
        return start + (end - start) * min(1.0, progress / self.over)

    def slot_weights(self, num_draft: int, device=None) -> Tensor:
        """w_k for k = 1 … G in fp64."""
        k = torch.arange(num_draft, dtype=torch.float64, device=device)
        return torch.ones_like(k) if self.decay is None else torch.exp(-k / self.decay)


@dataclass(frozen=True)
class Rows:
    """The rows of one step, n = blocks · G, block by block.

    hidden [n,D] of the drafter, labels [n] as target ids, last [n,D] the target's post-norm states at `target_index`,
    log_norm [n] their log-normaliser over the WHOLE vocabulary (None: computed here, right where the draft vocabulary
    is the whole one), weights [F,n] of each row in each logit tensor, zero where it does not count.
    """

    hidden: Tensor
    labels: Tensor
    last: Tensor
    log_norm: Tensor | None
    weights: Tensor


@dataclass(frozen=True)
class Vocabulary:
    """lm_rows [V_draft,D] (frozen), readout [V_draft,R] or None, draft_ids [V_draft] or None."""

    lm_rows: Tensor
    readout: Tensor | None
    draft_ids: Tensor | None = None

    def labels(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Target ids -> draft ids and whether each lies in the draft vocabulary."""
        if self.draft_ids is None:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        place = torch.searchsorted(self.draft_ids, ids).clamp(max=len(self.draft_ids) - 1)
        return place, self.draft_ids[place] == ids


@dataclass(frozen=True)
class Logits:
    """One logit tensor of F: its feed, ce and l1 of its token loss (both 0: only what it drafts is asked for), and the
    factor of its sum in what is minimised."""

    feed: str
    ce: float = 0.0
    l1: float = 0.0
    factor: float = 1.0


def token_loss(z: Tensor, top: Tensor, label: Tensor, inside: Tensor, p: Tensor, ce, l1, slope: bool):
    """Rows z [n,V_draft], the largest of each at top [n], p of the target (not read without l1), weights ce and l1 [n]
    or None -> Σ ce·CE + l1·‖softmax z − p‖₁, and with `slope` its gradient, else None:

        ∂/∂z = ce·(q − onehot) + l1·q⊙(s − Σ q s),  s = sign(q − p), sign 0 = 0

    CE counts where the label lies `inside` the draft vocabulary.
    """
    q, dz = z.softmax(-1), None
    value, pull = z.new_zeros(()), 0.0
    if ce is not None:
        ce = (ce * inside)[:, None]
        top = top[:, None]
        log_norm = z.gather(-1, top) - q.gather(-1, top).log()  # the largest q is far from 0
        value += (ce * (log_norm - z.gather(-1, label[:, None]))).sum()
        pull = ce
    if l1 is not None:
        l1, gap = l1[:, None], q - p
        value += (l1 * l1_norm(gap)).sum()
        if slope:
            sign = gap.sign_()
            pull = pull - l1 * (q * sign).sum(-1, keepdim=True)
            dz = sign.mul_(l1).add_(pull).mul_(q)
    elif slope:
        dz = q.mul_(pull)
    if slope and ce is not None:
        dz.scatter_add_(-1, label[:, None], -ce)
    return value, dz


def l1_norm(x: Tensor) -> Tensor:
    """Σ|x| over the last dimension [n,1]: runs first, then their sums. A running sum over a whole vocabulary would lose
    1e-5 of it in fp32."""
    width = math.gcd(x.shape[-1], 256)
    if width < 16:
        return x.abs().sum(-1, keepdim=True)
    return torch.linalg.vector_norm(x.unflatten(-1, (-1, width)), 1, dim=-1).sum(-1, keepdim=True)


def target_probs(last: Tensor, log_norm: Tensor | None, lm_rows: Tensor) -> Tensor:
    """p of the target over the draft vocabulary [n,V_draft], normalised over the whole one."""
    logits = at_least_fp32(F.linear(last.to(lm_rows.dtype), lm_rows))
    return logits.softmax(-1) if log_norm is None else logits.sub_(log_norm[:, None]).exp_()


class Pass:
    """One pass over the rows, a chunk at a time: losses, what decoding would draft, and the gradient.

    sums [F]: weighted token losses of each tensor; drafts: target ids [n] of the seed argmax(s), then after each
    self-fed tensor. Self-fed tensors follow one another as in decoding: the argmax of one feeds the next. accepted [n],
    with `judge`: Σ_x min(p, q) under the gold tensor, which is 1 − ½‖q − p‖₁ over the whole vocabulary, also where q
    knows a part of it.

    The gradient of Σ factor·sum in hidden, latents and readout is taken while the chunk's logits are there, so nothing
    of the vocabulary's size outlives its chunk; what is kept has the size of the inputs, which are not kept. p_target
    is made once a chunk and shared by all tensors.
    """

    def __init__(
        self,
        rows: Rows,
        vocabulary: Vocabulary,
        tensors: list[Logits],
        train_hidden: bool,
        slope: bool,
        token_loss: Callable = token_loss,
        judge: bool = False,
    ):
        if vocabulary.draft_ids is not None and rows.log_norm is None:
            raise ValueError("a reduced draft vocabulary needs log_norm: p_target is normalised over the whole one")
        self.rows, self.vocabulary, self.tensors, self.slope = rows, vocabulary, tensors, slope
        self.token_loss, self.judge, self.accepted = token_loss, judge, []
        self.asks_target = judge or any(tensor.l1 for tensor in tensors)  # CE alone knows the data's tokens
        wide = torch.promote_types(rows.hidden.dtype, torch.float32)
        self.sums = torch.zeros(len(tensors), dtype=wide, device=rows.hidden.device)
        self.drafts: list = [[] for _ in tensors]
        self.d_latents: list = [[] for _ in tensors]
        self.d_hidden = torch.zeros_like(rows.hidden) if slope and train_hidden else None
        readout = vocabulary.readout
        self.d_readout = torch.zeros_like(readout, dtype=wide) if slope and readout is not None else None

    @torch.no_grad()
    def run(self, latents_of: Callable[[int, Tensor, slice], Tensor], chunk: int) -> Pass:
        """latents_of(tensor, previous draft tokens [·], rows) -> latents [·,R] of those rows."""
        for start in range(0, len(self.rows.hidden), chunk):
            self._chunk(latents_of, slice(start, min(start + chunk, len(self.rows.hidden))))
        nothing = self.rows.labels[:0]
        drafting = [ids for ids, tensor in zip(self.drafts, self.tensors) if tensor.feed != "gold"]
        self.drafts = [torch.cat([nothing, *ids]) for ids in drafting]
        self.accepted = torch.cat([self.sums[:0], *self.accepted])
        self.d_latents = [torch.cat(parts) for parts in self.d_latents if parts]
        return self

    def _chunk(self, latents_of, part: slice):
        rows, lm_rows, readout = self.rows, self.vocabulary.lm_rows, self.vocabulary.readout
        label, inside = self.vocabulary.labels(rows.labels[part])
        base = at_least_fp32(F.linear(rows.hidden[part].to(lm_rows.dtype), lm_rows))
        log_norm = None if rows.log_norm is None else rows.log_norm[part]
        p = target_probs(rows.last[part], log_norm, lm_rows).to(base.dtype) if self.asks_target else None
        ids = d_base = None
        for i, tensor in enumerate(self.tensors):
            latent, z = None, base
            if tensor.feed != "none":
                fed = rows.labels[part] if tensor.feed == "gold" else ids
                latent = latents_of(i, fed, part).to(readout.dtype)
                z = base + F.linear(latent, readout)
            if self.judge and tensor.feed == "gold":
                self.accepted.append(torch.minimum(p, z.softmax(-1)).sum(-1).clamp(max=1))
            top = argmax(z)
            if tensor.ce or tensor.l1:
                slope = self.slope and (latent is not None or self.d_hidden is not None)
                weight = rows.weights[i, part]
                ce, l1 = ((weight * m).to(z.dtype) if m else None for m in (tensor.ce, tensor.l1))
                value, dz = self.token_loss(z, top, label, inside, p, ce, l1, slope)
                self.sums[i] += value
                if slope:
                    d_base = self._descend(i, dz, latent, d_base)
                    del dz  # else it lives until the next tensor's is made
            if tensor.feed != "gold":
                ids = top if self.vocabulary.draft_ids is None else self.vocabulary.draft_ids[top]
                self.drafts[i].append(ids)
        if d_base is not None:
            self.d_hidden[part] = (d_base.to(lm_rows.dtype) @ lm_rows).to(self.d_hidden.dtype)

    def _descend(self, i: int, dz: Tensor, latent: Tensor | None, d_base: Tensor | None) -> Tensor | None:
        """Down through the readout at once; what goes through lm_head is summed over the tensors first."""
        factor, readout = self.tensors[i].factor, self.vocabulary.readout
        if latent is not None:
            narrow = dz.to(readout.dtype)
            self.d_latents[i].append((narrow @ readout).mul_(factor))
            self.d_readout.add_(narrow.T @ latent, alpha=factor)
        if self.d_hidden is None:
            return None
        return dz.mul_(factor) if d_base is None else d_base.add_(dz, alpha=factor)


class _Attach(torch.autograd.Function):
    """The number that is minimised, with the gradient that its pass has found already."""

    @staticmethod
    def forward(ctx, found: Pass, hidden, readout, *latents):
        ctx.gradients = found.d_hidden, found.d_readout, *found.d_latents
        ctx.types = [None if x is None else x.dtype for x in (hidden, readout, *latents)]
        return found.sums @ found.sums.new_tensor([tensor.factor for tensor in found.tensors])

    @staticmethod
    def backward(ctx, grad):
        scaled = (None if d is None else (d * grad).to(t) for d, t in zip(ctx.gradients, ctx.types))
        return None, *scaled


def attach(found: Pass, hidden: Tensor, readout: Tensor | None, latents: list[Tensor]) -> Tensor:
    """Σ factor·sum as a number that can be differentiated in hidden [n,D], readout and latents [n,R]."""
    return _Attach.apply(found, hidden, readout, *latents)
