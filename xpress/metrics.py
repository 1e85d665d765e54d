"""What the numbers mean. Pure functions over responses and their rounds.

num_accepted      matched draft tokens of a round, 0 … G, without the bonus
tau               mean over all rounds of num_accepted + 1 (pooled; the published convention) = 1 + Σ_k accept_at[k]
tau_macro         mean over responses of that response's tau
tokens_per_round  tokens emitted in rounds, cut at stop token and limit, per round
accept_at[k]      share of rounds with num_accepted ≥ k

Each mean is one sum over responses divided by another, so that parts add up exactly, whatever the batches, processes or
interruptions were; products of parts' accuracies do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields

import torch
from torch import Tensor

LOOP = 8, 4  # a response loops where some run of 8 tokens stands in it at least 4 times
Group = Sequence["Counts"]


@dataclass(frozen=True)
class Counts:
    """One response. accepted, passes: of each round; settled: the pass that changed a round's block last (empty where
    no one looked); num_tokens: returned, the first one included; num_draft: G, or the most that a round verified;
    drafted: draft tokens verified by each round.

    seconds: from the first token to the last; steps: rounds of the loop (of a batch, its share: 1/rows of the batch's
    seconds and steps); time: seconds by what was running; memory: peak bytes; probe: sums of `probe.Probe`.
    """

    accepted: list[int]
    num_tokens: int
    num_draft: int
    passes: list[int]
    seconds: float = 0.0
    settled: list[int] = field(default_factory=list)
    steps: float = 0.0
    loops: bool = False
    time: dict = field(default_factory=dict)
    memory: int | None = None
    probe: dict = field(default_factory=dict)
    drafted: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float | None:
        return None if not self.accepted else 1 + sum(self.accepted) / len(self.accepted)

    @classmethod
    def of(cls, response, seconds: float = 0.0, **measured) -> Counts:
        """Of a decoded Response."""
        rounds = response.rounds
        return cls(
            [r.num_accepted for r in rounds],
            len(response.ids),
            max((r.num_draft for r in rounds), default=0),
            [r.passes for r in rounds],
            seconds,
            [r.settled for r in rounds if r.settled is not None],
            loops=loops(response.ids),
            drafted=[r.num_draft for r in rounds],
            **measured,
        )

    @classmethod
    def read(cls, line: dict) -> Counts:
        """Of a line of responses.jsonl."""
        return cls(**{f.name: line[f.name] for f in fields(cls)})

    def as_dict(self) -> dict:
        return asdict(self)


def loops(ids: list[int]) -> bool:
    """Small models fall into repetition, which is easy to draft: numbers are given without such answers too."""
    size, times = LOOP
    seen: dict = {}
    for i in range(len(ids) - size + 1):
        run = tuple(ids[i : i + size])
        seen[run] = seen.get(run, 0) + 1
        if seen[run] >= times:
            return True
    return False


def leading_run(correct) -> tuple[float, int]:
    """correct [N,G] bool -> (sum of leading runs, N): an additive pair, so that batches and ranks add up exactly."""
    return float(correct.long().cumprod(-1).sum()), correct.shape[0]


# --- means: ratios of sums --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean:
    """plus + Σ top / Σ bottom over responses; None where nothing was counted."""

    top: Callable[[Counts], float]
    bottom: Callable[[Counts], float]
    plus: float = 0.0

    def __call__(self, responses: Sequence[Counts]) -> float | None:
        below = sum(self.bottom(r) for r in responses)
        return self.plus + sum(self.top(r) for r in responses) / below if below else None

    def sums(self, groups: Sequence) -> Tensor:
        """Responses, or groups of them that are resampled as one -> [n,2] in fp64."""
        parts = [group if isinstance(group, (list, tuple)) else [group] for group in groups]
        pairs = [(sum(self.top(r) for r in part), sum(self.bottom(r) for r in part)) for part in parts]
        return torch.tensor(pairs, dtype=torch.float64).view(-1, 2)

    def of_sums(self, sums: Tensor) -> Tensor:
        return self.plus + sums[..., 0] / sums[..., 1]


tau = Mean(lambda r: sum(r.accepted), lambda r: len(r.accepted), plus=1)
tau_macro = Mean(lambda r: r.tau or 0, lambda r: bool(r.accepted))
tokens_per_round = Mean(lambda r: (r.num_tokens - 1) * bool(r.accepted), lambda r: len(r.accepted))
mean_drafted = Mean(lambda r: sum(r.drafted), lambda r: len(r.drafted))
mean_passes = Mean(lambda r: sum(r.passes), lambda r: len(r.passes))
# the clock starts when the first token is known, so that token is not counted
tokens_per_second = Mean(lambda r: max(r.num_tokens - 1, 0) if r.seconds else 0, lambda r: r.seconds)


@dataclass(frozen=True)
class Paired:
    """Two columns of the same prompts compared by one mean."""

    mean: Mean
    compare: Callable

    def __call__(self, a: Sequence[Counts], b: Sequence[Counts]) -> float | None:
        left, right = self.mean(a), self.mean(b)
        return None if left is None or not right else self.compare(left, right)


def difference(mean: Mean) -> Paired:
    """mean(a) − mean(b), paired"""
    return Paired(mean, lambda a, b: a - b)


def quotient(mean: Mean) -> Paired:
    """mean(a) / mean(b), paired"""
    return Paired(mean, lambda a, b: a / b)


def bootstrap(statistic: Mean | Paired, *columns: Sequence, samples: int = 2000, level: float = 0.95, seed: int = 0):
    """Percentile interval over prompts -> (low, high), None where there is nothing to resample.

    An entry of a column is a response, or the list of all responses to one prompt. Columns are resampled together, so
    that comparisons of methods are paired.
    """
    n = len(columns[0])
    if any(len(column) != n for column in columns):
        raise ValueError(f"columns of {', '.join(str(len(c)) for c in columns)} prompts cannot be compared in pairs")
    if n < 2:
        return None
    chosen = torch.randint(n, (samples, n), generator=torch.Generator().manual_seed(seed))
    weights = torch.zeros(samples, n, dtype=torch.float64).scatter_add_(1, chosen, torch.ones_like(chosen).double())
    mean = getattr(statistic, "mean", statistic)
    values = [mean.of_sums(weights @ mean.sums(column)) for column in columns]
    found = statistic.compare(*values) if isinstance(statistic, Paired) else values[0]
    found = found[found.isfinite()].sort().values
    if not len(found):
        return None
    edge = (1 - level) / 2
    return float(found[int(edge * (len(found) - 1))]), float(found[round((1 - edge) * (len(found) - 1))])


# --- by draft token ---------------------------------------------------------------------------------------------------


def histogram(responses: Sequence[Counts]) -> list[int]:
    """Rounds with num_accepted = 0 … G; sums to the number of rounds."""
    bins = [0] * (max((r.num_draft for r in responses), default=0) + 1)
    for r in responses:
        for a in r.accepted:
            bins[a] += 1
    return bins


def accept_at(responses: Sequence[Counts]) -> dict[int, float]:
    """{k: share of rounds with num_accepted ≥ k} for k = 1 … G"""
    bins = histogram(responses)
    total = sum(bins)
    return {k: sum(bins[k:]) / total for k in range(1, len(bins))} if total else {}


def conditional(responses: Sequence[Counts]) -> tuple[list[float | None], list[int]]:
    """Of draft token k = 1 … G: the share accepted of the rounds that accepted all before it, and those rounds."""
    bins = histogram(responses)
    reached = [sum(bins[k:]) for k in range(len(bins))]
    return [b / a if a else None for a, b in zip(reached, reached[1:])], reached[:-1]


def settled(responses: Sequence[Counts]) -> list[float] | None:
    """Share of blocks that no pass after K changed, for K = 0 … G."""
    last = [s for r in responses for s in r.settled]
    num_draft = max([*last, *(r.num_draft for r in responses)], default=0)  # a cut draft may settle beyond its end
    return [sum(s <= K for s in last) / len(last) for K in range(num_draft + 1)] if last else None


def probed(responses: Sequence[Counts]) -> dict:
    """Recall, ranks and expected acceptance by draft token, from the sums of `probe.Probe`."""
    found = [r.probe for r in responses if r.probe]
    nothing = {"recall": {}, "refined_rank": None, "expected": None, "observed": None}
    if not found:
        return nothing
    total = {key: torch.tensor([p[key] for p in found]).double().sum(0) for key in found[0] if key != "recall"}
    hits = {k: torch.tensor([p["recall"][k] for p in found]).double().sum(0) for k in found[0]["recall"]}

    def share(part: Tensor, whole: Tensor) -> list[float | None]:
        return [float(a / b) if b else None for a, b in zip(part, whole)]

    shares = {"recall": {k: share(part, total["reached"]) for k, part in hits.items()}}
    shares["refined_rank"] = {key: share(total[key], total["rounds"]) for key in ("mean", "first")}
    if "expected" in total:
        shares["expected"] = share(total["expected"], total["reached"])
        shares["observed"] = share(total["accepted"], total["reached"])
    return nothing | shares


# --- all of one method ------------------------------------------------------------------------------------------------


def summary(groups: Sequence, baseline: Sequence | None = None, timed: Sequence | None = None) -> dict:
    """Every number of one method. groups: its responses, or for each prompt the list of them; timed: the same by what
    was decoded together, whose time can only be resampled as one (left out: as groups); baseline: those of plain
    autoregression, likewise, for the speed-up."""
    timed = groups if timed is None else timed
    flat = lambda column: [r for g in column for r in (g if isinstance(g, (list, tuple)) else [g])]  # noqa: E731
    responses, plain = flat(groups), flat(baseline or [])
    shares, reached = conditional(responses)
    memory = [r.memory for r in responses if r.memory is not None]
    steps, phases = sum(r.steps for r in responses), {key for r in responses for key in r.time}
    time = {key: sum(r.time.get(key, 0.0) for r in responses) for key in sorted(phases)}
    faster = quotient(tokens_per_second)
    return {
        "tau": tau(responses),
        "tau_interval": bootstrap(tau, groups),
        "tau_macro": tau_macro(responses),
        "tau_macro_interval": bootstrap(tau_macro, groups),
        "tau_without_loops": tau([r for r in responses if not r.loops]),
        "loops": sum(r.loops for r in responses) / len(responses) if responses else None,
        "tokens_per_round": tokens_per_round(responses),
        "accept_at": accept_at(responses),
        "histogram": histogram(responses),
        "conditional": shares,
        "conditional_count": reached,
        "longest": max((a for r in responses for a in r.accepted), default=None),
        "drafted": mean_drafted(responses),
        "passes_used": mean_passes(responses),
        "settled": settled(responses),
        **probed(responses),
        "time": {key: spent / steps for key, spent in time.items()} if steps else {},
        "harness_share": time.get("harness", 0.0) / sum(time.values()) if sum(time.values()) else None,
        "tokens_per_second": tokens_per_second(responses),
        "speedup": faster(responses, plain),
        "speedup_interval": bootstrap(faster, timed, baseline) if baseline else None,
        "peak_memory": max(memory, default=None),
        "rounds": sum(len(r.accepted) for r in responses),
        "tokens": sum(r.num_tokens for r in responses),
        "responses": len(responses),
    }
