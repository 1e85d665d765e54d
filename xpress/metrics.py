"""What the numbers mean. Pure functions over the rounds of responses.

num_accepted      matched draft tokens of a round, 0 … G, without the bonus
tau               mean over all rounds of num_accepted + 1 (pooled; the published convention) = 1 + Σ_k accept_at[k]
tau_macro         mean over responses of that response's tau
tokens_per_round  tokens emitted in rounds, cut at stop token and limit, per round
accept_at[k]      share of rounds with num_accepted ≥ k
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Counts:
    """One response: accepted[i] of each round, tokens returned (the first token included), draft tokens a round, Jacobi
    passes of each round, seconds from the first token to the last."""

    accepted: list[int]
    num_tokens: int
    num_draft: int
    passes: list[int]
    seconds: float = 0.0

    @property
    def tau(self) -> float | None:
        return None if not self.accepted else 1 + sum(self.accepted) / len(self.accepted)

    @classmethod
    def of(cls, response, seconds: float = 0.0) -> Counts:
        """Of a decoded Response."""
        rounds = response.rounds
        return cls(
            [r.num_accepted for r in rounds],
            len(response.ids),
            max((r.num_draft for r in rounds), default=0),
            [r.passes for r in rounds],
            seconds,
        )

    def as_dict(self) -> dict:
        return asdict(self)


def leading_run(correct) -> tuple[float, int]:
    """correct [N,G] bool -> (sum of leading runs, N): an additive pair, so that batches and ranks add up exactly."""
    return float(correct.long().cumprod(-1).sum()), correct.shape[0]


def tau(responses: Sequence[Counts]) -> float | None:
    rounds = sum(len(r.accepted) for r in responses)
    return None if rounds == 0 else 1 + sum(sum(r.accepted) for r in responses) / rounds


def tau_macro(responses: Sequence[Counts]) -> float | None:
    each = [r.tau for r in responses if r.tau is not None]
    return sum(each) / len(each) if each else None


def tokens_per_round(responses: Sequence[Counts]) -> float | None:
    """The first token of a response belongs to no round."""
    rounds = sum(len(r.accepted) for r in responses)
    return None if rounds == 0 else sum(r.num_tokens - 1 for r in responses if r.accepted) / rounds


def accept_at(responses: Sequence[Counts]) -> dict[int, float]:
    """{k: share of rounds with num_accepted ≥ k} for k = 1 … G"""
    accepted = [a for r in responses for a in r.accepted]
    num_draft = max((r.num_draft for r in responses), default=0)
    return {k: sum(a >= k for a in accepted) / len(accepted) for k in range(1, num_draft + 1)} if accepted else {}


def histogram(responses: Sequence[Counts]) -> list[int]:
    """Rounds with num_accepted = 0 … G; sums to the number of rounds."""
    bins = [0] * (max((r.num_draft for r in responses), default=0) + 1)
    for r in responses:
        for a in r.accepted:
            bins[a] += 1
    return bins


def mean_passes(responses: Sequence[Counts]) -> float | None:
    passes = [p for r in responses for p in r.passes]
    return sum(passes) / len(passes) if passes else None


def tokens_per_second(responses: Sequence[Counts]) -> float | None:
    """Pooled; the clock starts when the first token is known, so that token is not counted."""
    tokens, seconds = sum(r.num_tokens - 1 for r in responses if r.num_tokens), sum(r.seconds for r in responses)
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def bootstrap(statistic: Callable, *paired: Sequence, samples: int = 2000, level: float = 0.95, seed: int = 0):
    """Percentile interval of `statistic(*resampled)` over prompts: the sequences are resampled together, so that
    differences of methods are paired -> (low, high), None where nothing can be resampled."""
    n = len(paired[0])
    if n < 2:
        return None
    draw = random.Random(seed)
    values = []
    for _ in range(samples):
        chosen = [draw.randrange(n) for _ in range(n)]
        value = statistic(*([column[i] for i in chosen] for column in paired))
        if value is not None:
            values.append(value)
    if not values:
        return None
    values.sort()
    edge = (1 - level) / 2
    return values[int(edge * (len(values) - 1))], values[round((1 - edge) * (len(values) - 1))]


def difference(statistic: Callable) -> Callable:
    """statistic -> paired difference statistic(a) − statistic(b)"""

    def paired(a, b):
        left, right = statistic(a), statistic(b)
        return None if left is None or right is None else left - right

    return paired


def summary(responses: Sequence[Counts], baseline: Sequence[Counts] | None = None) -> dict:
    """Every number of one method; speedup against `baseline` (plain autoregression on the same prompts)."""
    speed, plain = tokens_per_second(responses), tokens_per_second(baseline) if baseline else None
    return {
        "tau": tau(responses),
        "tau_interval": bootstrap(tau, responses),
        "tau_macro": tau_macro(responses),
        "tokens_per_round": tokens_per_round(responses),
        "accept_at": accept_at(responses),
        "histogram": histogram(responses),
        "passes_used": mean_passes(responses),
        "tokens_per_second": speed,
        "speedup": speed / plain if speed and plain else None,
        "rounds": sum(len(r.accepted) for r in responses),
        "tokens": sum(r.num_tokens for r in responses),
        "prompts": len(responses),
    }
