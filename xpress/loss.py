"""The objective as data, and its loss over the whole vocabulary in chunks that keep nothing.

For every logit tensor z the same form, weighted over rows:

    L(z) = ce · CE(z, data token) + l1 · ‖softmax z − p_target‖₁          (the second part is twice the total variation)

A term says where z comes from: the drafter alone (feed `none`), the head under the data's previous tokens (`gold`), or
the head under its own argmax (`self`, some rounds). Softmaxes run in fp32 at least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from xpress.sampling import at_least_fp32

FEEDS = ("none", "gold", "self")


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
        if self.feed not in FEEDS:
            raise ValueError(f"objective term {self.name}: feed={self.feed!r}, known feeds are {', '.join(FEEDS)}")
        if set(self.loss) - {"ce", "l1"}:
            raise ValueError(f"objective term {self.name}: loss={dict(self.loss)}, known token losses are ce and l1")
        if self.rounds < 1 or (self.rounds > 1 and self.feed != "self"):
            raise ValueError(f"objective term {self.name}: rounds={self.rounds}; 1, or more where feed=self")
        if self.rounds > 1 and self.feed != "self":
            raise ValueError(f"objective term {self.name}: rounds={self.rounds}, only feed self has more than one")
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
    """Supervised rows n = blocks · G of one step, flattened.

    hidden [n,D] of the drafter, latents [F,n,R] of the head under each feed, labels [n] as target ids, last [n,D] the
    target's post-norm states at `target_index`, log_norm [n] their log-normaliser over the WHOLE vocabulary (None:
    computed here, right where the draft vocabulary is the whole one). weights [F+1,n]: row weights of the drafter's own
    logits first, then of each feed; zero where a term does not apply.
    """

    hidden: Tensor
    latents: Tensor
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


def token_loss(z: Tensor, label: Tensor, inside: Tensor, p: Tensor, ce: Tensor, l1: Tensor, grad: Tensor | None):
    """Weighted loss of rows z [n,V_draft]: Σ ce·CE + l1·‖softmax z − p‖₁, ce and l1 [n].

    CE counts where the label lies `inside` the draft vocabulary. With `grad` (a number, ∂/∂sum) returns ∂/∂z instead:
    ce·(q − onehot) + l1·q⊙(s − Σ q s), s = sign(q − p), sign 0 = 0.
    """
    log_q = z.log_softmax(-1)
    q = log_q.exp()
    gap = q - p
    ce = ce * inside
    if grad is None:
        nll = -log_q.gather(-1, label[:, None])[:, 0]
        return (ce * nll).sum() + (l1 * gap.abs().sum(-1)).sum()
    sign = gap.sign_()
    inner = (q * sign).sum(-1, keepdim=True)
    dz = sign.sub_(inner).mul_(q).mul_(l1[:, None]) if bool((l1 != 0).any()) else torch.zeros_like(q)
    dz.addcmul_(q, ce[:, None])
    dz.scatter_add_(-1, label[:, None], -ce[:, None])
    return dz.mul_(grad)


class ChunkedLoss(torch.autograd.Function):
    """Sums of weighted token losses, one a logit tensor: [F+1]. Nothing of size [n,V] is kept for backward, which
    recomputes chunk by chunk; only the inputs are saved. p_target is made once a chunk and shared by all terms."""

    @staticmethod
    def forward(ctx, hidden, latents, readout, rows: Rows, vocabulary: Vocabulary, mix, chunk: int):
        ctx.save_for_backward(hidden, latents, readout)
        ctx.rows, ctx.vocabulary, ctx.mix, ctx.chunk = rows, vocabulary, mix, chunk
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = torch.zeros(1 + len(latents), dtype=wide, device=hidden.device)
        for part in _chunks(len(hidden), chunk):
            label, inside, p, tensors = _logits(hidden, latents, readout, rows, vocabulary, part)
            for i, z in enumerate(tensors):
                if not any(mix[i]):  # no term reads this tensor
                    continue
                ce, l1 = (m * rows.weights[i, part] for m in mix[i])
                sums[i] += token_loss(z, label, inside, p, ce.to(z.dtype), l1.to(z.dtype), None)
        return sums

    @staticmethod
    def backward(ctx, grad):
        hidden, latents, readout = ctx.saved_tensors
        rows, vocabulary, mix = ctx.rows, ctx.vocabulary, ctx.mix
        need_hidden, need_latents, need_readout = ctx.needs_input_grad[:3]
        d_hidden = torch.zeros_like(hidden) if need_hidden else None
        d_latents = torch.zeros_like(latents) if need_latents else None
        d_readout = torch.zeros_like(readout, dtype=grad.dtype) if need_readout else None
        for part in _chunks(len(hidden), ctx.chunk):
            label, inside, p, tensors = _logits(hidden, latents, readout, rows, vocabulary, part)
            d_base = None
            for i, z in enumerate(tensors):
                if not any(mix[i]) or not (need_hidden or i):
                    continue
                ce, l1 = (m * rows.weights[i, part] for m in mix[i])
                dz = token_loss(z, label, inside, p, ce.to(z.dtype), l1.to(z.dtype), grad[i])
                if i:
                    dz_readout = dz.to(readout.dtype)
                    if need_latents:
                        d_latents[i - 1, part] = (dz_readout @ readout).to(latents.dtype)
                    if need_readout:
                        d_readout += (dz_readout.T @ latents[i - 1, part].to(readout.dtype)).to(d_readout.dtype)
                if need_hidden:
                    d_base = dz if d_base is None else d_base.add_(dz)
            if d_base is not None:
                d_hidden[part] = (d_base.to(vocabulary.lm_rows.dtype) @ vocabulary.lm_rows).to(hidden.dtype)
        d_readout = d_readout.to(readout.dtype) if need_readout else None
        return d_hidden, d_latents, d_readout, None, None, None, None


def _chunks(n: int, size: int):
    return (slice(i, min(i + size, n)) for i in range(0, n, size))


def target_probs(last: Tensor, log_norm: Tensor | None, lm_rows: Tensor) -> Tensor:
    """p of the target over the draft vocabulary [n,V_draft], normalised over the whole one."""
    logits = at_least_fp32(F.linear(last.to(lm_rows.dtype), lm_rows))
    return logits.softmax(-1) if log_norm is None else logits.sub_(log_norm[:, None]).exp_()


def _logits(hidden, latents, readout, rows: Rows, vocabulary: Vocabulary, part: slice):
    """-> labels, inside, p and an iterator over the logit tensors of one chunk, the drafter's own first."""
    label, inside = vocabulary.labels(rows.labels[part])
    log_norm = None if rows.log_norm is None else rows.log_norm[part]
    p = target_probs(rows.last[part], log_norm, vocabulary.lm_rows)
    base = at_least_fp32(F.linear(hidden[part].to(vocabulary.lm_rows.dtype), vocabulary.lm_rows))

    def tensors():
        yield base
        for latent in latents:
            yield base + F.linear(latent[part].to(readout.dtype), readout)

    return label, inside, p.to(base.dtype), tensors()


def chunked_loss(rows: Rows, vocabulary: Vocabulary, mix, chunk: int = 128) -> Tensor:
    """Σ of weighted losses for each logit tensor [F+1]; mix[i] = (ce, l1) of tensor i. Differentiable in rows.hidden,
    rows.latents and vocabulary.readout."""
    readout = vocabulary.readout
    if readout is None:
        readout = rows.hidden.new_zeros(0, 0)
    if vocabulary.draft_ids is not None and rows.log_norm is None:
        raise ValueError("a reduced draft vocabulary needs log_norm: p_target is normalised over the whole vocabulary")
    return ChunkedLoss.apply(rows.hidden, rows.latents, readout, rows, vocabulary, mix, chunk)
