"""The whole library is this loop: draft, refine, verify, commit. Batch 1.

Baselines are the same function with a degenerate argument: head=None or passes=0 is the plain drafter, drafter=None is
plain autoregression. Nothing here is timed or logged; callers watch the rounds go by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from xpress.drafter import Context
from xpress.refine import Draft, check_passes, refine
from xpress.sampling import GREEDY, TARGET, Noise, Sampling, argmax, sample
from xpress.verify import verify


@dataclass(frozen=True)
class Round:
    """What one round did. tokens: emitted, after the cut at stop token and limit; num_accepted: before the cut, without
    bonus; num_draft: G (0 without a drafter); passes: Jacobi passes used; drafted: the G draft tokens, accepted or not.
    The opening round (the first token, which no round pays for) has num_draft None."""

    tokens: list[int]
    num_accepted: int = 0
    num_draft: int | None = None
    passes: int = 0
    drafted: list[int] = field(default_factory=list)


@torch.inference_mode()
def decode(
    target,
    prompt: list[int],
    drafter=None,
    head=None,
    passes: int | str = 0,
    *,
    max_new_tokens: int = 256,
    stop_ids=(),
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Iterator[Round]:
    """Yields the first token, then one Round after another until a stop token or the limit.

    drafter and head must be bound to `target`. Output depends on (prompt, seed) alone.
    """
    check_passes(passes)
    if max_new_tokens < 1:
        return
    logits, target_hidden = target.prefill(prompt, drafter.layer_ids if drafter else ())
    ids = [*prompt, _first_token(logits, sampling, Noise(seed))]
    if drafter:
        drafter.reset()
    yield Round(ids[-1:])
    num_rounds = 0
    while ids[-1] not in stop_ids and len(ids) - len(prompt) < max_new_tokens:
        num_rounds += 1
        noise = Noise(seed, num_rounds)
        if drafter:
            draft = refine(head, drafter.draft(Context(ids, target_hidden)), passes, sampling, noise)  # DRAFT, REFINE
        else:
            draft = Draft.nothing(target.device)
        scores = target.score(torch.tensor(ids[-1:], device=target.device), draft.ids)  # VERIFY
        verdict = verify(draft, scores, sampling, noise)
        accepted, drafted = int(verdict.num_accepted[0]), draft.ids[0].tolist()
        tokens = [*drafted[:accepted], int(verdict.bonus[0])]  # COMMIT
        target_hidden = target.keep(accepted + 1)
        tokens = cut(tokens, stop_ids, max_new_tokens - (len(ids) - len(prompt)))
        ids += tokens
        yield Round(tokens, accepted, len(drafted), int(draft.passes[0]), drafted)


def cut(tokens: list[int], stop_ids, room: int) -> list[int]:
    """Up to the first stop token, inclusive, and at most `room` tokens."""
    tokens = tokens[:room]
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: i + 1]
    return tokens


def _first_token(logits, sampling, noise) -> int:
    if sampling.greedy:
        return int(argmax(logits))
    return int(sample(sampling.adjust(logits).softmax(-1), noise.uniform(TARGET, 1, logits.device)[0]))


@dataclass
class Response:
    """A finished response: ids (new tokens only) and the rounds that made them, the opening one left out."""

    ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)


def generate(target, prompt: list[int], drafter=None, head=None, passes: int | str = 0, **settings) -> Response:
    """`decode` run to its end."""
    response = Response()
    for step in decode(target, prompt, drafter, head, passes, **settings):
        response.ids += step.tokens
        if step.num_draft is not None:
            response.rounds.append(step)
    return response
