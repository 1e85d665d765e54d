"""G-tests of counts, the correction for many of them, and what they are able to see.

G = 2 Σ observed · ln(observed / expected) follows chi-square with cells − 1 degrees of freedom where every cell expects
enough; Pearson's X² is given beside it. Tails come from the incomplete gamma function, in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

SMALLEST = 20  # expected in a cell; at 20, G's mean exceeds that of chi-square by less than 1 %


@dataclass(frozen=True)
class GTest:
    """statistic G, degrees of freedom, p-value of G; Pearson's X² and its p-value. dof 0: nothing to compare, p = 1."""

    statistic: float
    dof: int
    p: float
    pearson: float
    p_pearson: float


def tail(x: float, dof: float | Tensor) -> Tensor:
    """P(chi-square ≥ x), at one number of degrees of freedom or at many."""
    half = torch.as_tensor(dof, dtype=torch.float64) / 2
    return torch.special.gammaincc(half, torch.full_like(half, max(x, 0.0) / 2))


def fit(counts: Tensor, probs: Tensor) -> GTest:
    """Do counts [C] follow probs [C] (which sum to 1)? Cells that expect fewer than 20 are pooled; one count in a cell
    of probability 0 is proof enough: p = 0."""
    impossible = bool(counts[probs == 0].any())
    counts, probs = counts[probs > 0].double(), probs[probs > 0].double()
    expected = probs * counts.sum()
    found = _pool(torch.stack([counts, expected]), expected < SMALLEST)
    test = _test(found[:1], found[1:])
    return GTest(test.statistic, test.dof, 0.0, test.pearson, 0.0) if impossible else test


def homogeneity(a: Tensor, b: Tensor) -> GTest:
    """Do counts a [C] and b [C] come from one distribution, whatever it is? Cells are pooled where either side would
    expect fewer than 20."""
    both = torch.stack([a, b]).double()
    expected = both.sum(1, keepdim=True) * both.sum(0) / both.sum()
    small = expected.amin(0) < SMALLEST
    return _test(_pool(both, small), _pool(expected, small))


def _pool(rows: Tensor, small: Tensor) -> Tensor:
    """[R,C] -> [R,C']: the small cells as one."""
    pooled = torch.cat([rows[:, ~small], rows[:, small].sum(1, keepdim=True)], 1)
    return pooled[:, pooled.sum(0) > 0]


def _test(observed: Tensor, expected: Tensor) -> GTest:
    cells = observed.shape[1]
    g = 2 * float(torch.xlogy(observed, observed / expected).sum())
    pearson = float(((observed - expected) ** 2 / expected).sum())
    dof = cells - 1
    if dof < 1:
        return GTest(0.0, 0, 1.0, 0.0, 1.0)
    return GTest(g, dof, float(tail(g, dof)), pearson, float(tail(pearson, dof)))


def holm(ps: list[float]) -> list[float]:
    """p-values adjusted for all of them (Holm 1979): those at most alpha are alarms, and the chance of even one false
    alarm is at most alpha, however the tests hang together."""
    adjusted, worst = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = worst
    return adjusted


def power(dof: int, alpha: float, shift: float) -> float:
    """P(alarm at level alpha) of a chi-square test whose statistic has non-centrality `shift`."""
    critical = _critical(dof, alpha)
    j = torch.arange(int(shift / 2 + 12 * math.sqrt(shift / 2) + 60), dtype=torch.float64)
    weights = (torch.xlogy(j, torch.tensor(shift / 2)) - shift / 2 - torch.lgamma(j + 1)).exp()  # Poisson mixture
    return float((weights * tail(critical, dof + 2 * j)).sum())


@lru_cache
def _critical(dof: int, alpha: float) -> float:
    return _solve(lambda x: alpha - float(tail(x, dof)), 2.0 * dof + 50)


@lru_cache
def smallest_distance(dof: int, alpha: float, draws: float, chance: float = 0.99) -> float:
    """The total-variation distance from which on a difference is found with at least this chance.

    A distance d has non-centrality draws · Σ δ²/p ≥ 4 · draws · d² (Cauchy-Schwarz), whichever cells it sits in. For
    two samples of n and m, draws is n·m / (n + m). The chi-square approximation, exact as draws grow.
    """
    if dof < 1:
        return 1.0
    shift = _solve(lambda x: power(dof, alpha, x) - chance, 100.0)
    return min(1.0, math.sqrt(shift / (4 * draws)))


def _solve(rising: Callable[[float], float], high: float) -> float:
    """Where a rising function of x ≥ 0 crosses 0, by halving."""
    low = 0.0
    while rising(high) < 0:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
