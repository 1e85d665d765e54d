"""Which draft tokens the target accepts: a pure function, lossless by construction.

temperature 0   the longest prefix that equals the target's argmax, then the target's own token
rejection       accept token x_k with probability min(1, p_k(x_k) / q_k(x_k)); at the first rejection draw from the
                positive part of p_k − q_k; after G acceptances draw from p_{G+1}   (arXiv 2211.17192)
match           draw the target's token at every row; accept while the draft equals it

Of a draft that was cut (Draft.kept) no more is accepted than was kept, and after all of it the bonus comes from the
target's next row as it is: the first token of the rest has q = 0 everywhere, so it is rejected and p − q is p.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from xpress.draft import Draft, Redrawn
from xpress.sampling import ACCEPT, GREEDY, TARGET, Noise, Sampling, argmax, sample


@dataclass(frozen=True)
class Verdict:
    """num_accepted [N]: matched draft tokens, 0 … G, without the bonus; bonus [N]: the token the target adds itself."""

    num_accepted: Tensor
    bonus: Tensor


def verify(draft: Draft, scores: Tensor, sampling: Sampling = GREEDY, noise: Noise | None = None) -> Verdict:
    """scores [N,G+1,V]: target logits, row k − 1 for draft token k -> Verdict."""
    if sampling.greedy:
        return accept_matching(draft.proposed(), argmax(scores))
    num_rows = scores.shape[1]
    p = sampling.adjust(scores).softmax(-1)
    if draft.drawn is None:
        return accept_matching(draft.proposed(), sample(p, noise.uniform(TARGET, num_rows, p.device)))
    u, v = (noise.uniform(stream, num_rows, p.device) for stream in (ACCEPT, TARGET))
    if isinstance(draft.drawn, Redrawn):
        return _accept(draft.ids, draft.q_of_tokens(), draft.q_row, p, u[:, :-1], v)
    return accept_by_rejection(draft.ids, draft.q(), p, u[:, :-1], v)


def accept_matching(ids: Tensor, own: Tensor) -> Verdict:
    """Draft ids [N,G], the target's own tokens [N,G+1] -> the run of equal ones and the target's next token."""
    num_accepted = (ids == own[:, :-1]).long().cumprod(1).sum(1)
    return Verdict(num_accepted, own.gather(1, num_accepted[:, None])[:, 0])


def accept_by_rejection(ids: Tensor, q: Tensor, p: Tensor, u: Tensor, v: Tensor) -> Verdict:
    """Draft ids [N,G], q [N,G,V], p [N,G+1,V]; uniforms u [N,G] for the tests and v [N,G+1] for the draws -> Verdict.

    u·q < p is u < p/q without a division. A token that q cannot draw is rejected. Where p equals q every token is
    accepted (u < 1), and should rounding leave no residual, p itself is drawn from.
    """
    q_of = q.gather(-1, ids[..., None])[..., 0]
    return _accept(ids, q_of, lambda row: q.gather(1, _whole(row, q))[:, 0], p, u, v)


def _accept(ids: Tensor, q_of: Tensor, q_row: Callable, p: Tensor, u: Tensor, v: Tensor) -> Verdict:
    """The same from q of the tokens [N,G] and q_row(index [N]) -> [N,V], asked for one row of each block."""
    num_draft = ids.shape[1]
    p_of = p[:, :num_draft].gather(-1, ids[..., None])[..., 0]
    accepted = (u * q_of.double() < p_of.double()) & (q_of > 0)
    num_accepted = accepted.long().cumprod(1).sum(1)
    p_row = p.gather(1, _whole(num_accepted, p))[:, 0]
    q = q_row(num_accepted.clamp(max=num_draft - 1))
    q = torch.where((num_accepted < num_draft)[:, None], q, torch.zeros_like(q))  # after G acceptances p itself
    residual = (p_row - q).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_row)
    return Verdict(num_accepted, sample(residual, v.gather(1, num_accepted[:, None])[:, 0]))


def _whole(row: Tensor, of: Tensor) -> Tensor:
    """row [N] -> index that gathers whole rows [N,1,V] of [N,·,V]"""
    return row[:, None, None].expand(-1, 1, of.shape[-1])
