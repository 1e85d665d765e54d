"""What the numbers mean, against hand computation, and against the loop that produces them."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xpress import metrics
from xpress.decode import Response, Round
from xpress.metrics import Counts, bootstrap, difference, leading_run

ULPS = 1e-12  # order of a short fp64 sum


def counts(accepted, num_tokens=None, G=7, passes=None, seconds=0.0) -> Counts:
    """A response whose rounds were not cut, unless num_tokens says so."""
    full = 1 + sum(a + 1 for a in accepted)
    return Counts(accepted, full if num_tokens is None else num_tokens, G, passes or [0] * len(accepted), seconds)


some_counts = st.lists(
    st.lists(st.integers(0, 7), max_size=6).map(counts),
    min_size=1,
    max_size=6,
)

# --- by hand ----------------------------------------------------------------------------------------------------------

TWO = [counts([2, 0, 4], num_tokens=8, passes=[1, 3, 2]), counts([1], passes=[4])]  # 9 tokens possible, 8 returned


def test_two_responses_by_hand():
    assert metrics.tau(TWO) == 1 + 7 / 4
    assert metrics.tau_macro(TWO) == (3 + 2) / 2
    assert metrics.tokens_per_round(TWO) == (7 + 2) / 4  # the first token of a response belongs to no round
    assert metrics.accept_at(TWO) == {1: 3 / 4, 2: 2 / 4, 3: 1 / 4, 4: 1 / 4, 5: 0, 6: 0, 7: 0}
    assert metrics.histogram(TWO) == [1, 1, 1, 0, 1, 0, 0, 0]
    assert metrics.mean_passes(TWO) == 10 / 4


def test_rounds_that_end_early_count_for_tau_but_not_for_the_tokens():
    """Five drafts match in the last round and the third is a stop token: three tokens come out, and three are counted
    as emitted; tau, which is about the drafter, keeps five."""
    response = Response([9, *range(3)], [Round([0, 1, 2], num_accepted=5, num_draft=7, passes=2)])
    of = Counts.of(response, seconds=2.0)
    assert of == Counts([5], 4, 7, [2], 2.0) and of.as_dict()["num_tokens"] == 4
    assert metrics.tokens_per_round([of]) == 3 and metrics.tau([of]) == 6 and metrics.tokens_per_second([of]) == 1.5


@pytest.mark.parametrize("responses", [[], [Counts.of(Response())], [Counts.of(Response([5])), Counts.of(Response())]])
def test_no_round_at_all_has_defined_values(responses):
    """No token, or the first one alone: None, never 0/0."""
    summary = metrics.summary(responses, responses)
    for name in ("tau", "tau_interval", "tau_macro", "tokens_per_round", "passes_used", "tokens_per_second", "speedup"):
        assert summary[name] is None
    assert summary["rounds"] == 0 == sum(summary["histogram"]) and summary["accept_at"] == {}
    assert metrics.difference(metrics.tau)(responses, TWO) is None and all(r.tau is None for r in responses)


def test_responses_without_rounds_change_no_mean():
    empty = [Counts.of(Response([5])), Counts.of(Response())]
    for name in ("tau", "tau_macro", "tokens_per_round", "accept_at", "histogram", "mean_passes"):
        assert getattr(metrics, name)(TWO + empty) == getattr(metrics, name)(TWO)
    timed = [counts([3], seconds=2.0)]
    assert metrics.tokens_per_second(timed + empty) == metrics.tokens_per_second(timed) == 2


# --- identities -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(some_counts)
def test_identities(responses):
    """tau = 1 + the sum of accept_at, tokens returned = responses + rounds · tokens_per_round, and the histogram is the
    rounds; means over rounds are pooled, means over responses are not."""
    rounds = list(chain(*(r.accepted for r in responses)))
    histogram, accept_at = metrics.histogram(responses), metrics.accept_at(responses)
    assert len(histogram) == 8 and sum(histogram) == len(rounds)
    assert all(histogram[a] == rounds.count(a) for a in range(8))
    if not rounds:
        return
    assert list(accept_at) == list(range(1, 8))
    assert all(accept_at[k] == pytest.approx(sum(histogram[k:]) / len(rounds), abs=ULPS) for k in accept_at)
    assert metrics.tau(responses) == pytest.approx(1 + sum(accept_at.values()), abs=ULPS)
    assert metrics.tokens_per_round(responses) == pytest.approx(metrics.tau(responses), abs=ULPS)  # nothing was cut
    returned = len(responses) + len(rounds) * metrics.tokens_per_round(responses)
    assert sum(r.num_tokens for r in responses) == pytest.approx(returned, abs=1e-9)  # tens, in fp64
    each = [1 + sum(r.accepted) / len(r.accepted) for r in responses if r.accepted]
    assert metrics.tau_macro(responses) == pytest.approx(sum(each) / len(each), abs=ULPS)
    assert metrics.tau(responses) == metrics.tau([counts(rounds)])


RUNS = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]]).bool()  # leading runs 3, 2, 1, 0


@pytest.mark.parametrize("groups", [[4], [2, 2], [1, 1, 1, 1], [3, 1], [1, 3]])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0]])
def test_the_mean_run_does_not_depend_on_the_batches(groups, order):
    """Products of a batch's accuracies give 1.25 or 1.22 here; leading runs give 1.5 drafted however they are fed."""
    pairs = [leading_run(part) for part in RUNS[order].split(groups)]
    total, blocks = map(sum, zip(*pairs))
    assert (total, blocks) == (6, 4) and total / blocks == 1.5
    assert metrics.tau([counts([3, 2, 1, 0], G=3)]) == 2.5 == 1 + total / blocks  # with the bonus, the one convention


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), max_size=8), st.integers(0, 8))
def test_leading_runs_add_up(rows, cut):
    correct = torch.tensor(rows, dtype=torch.bool).view(-1, 5)
    by_hand = sum((row + [False]).index(False) for row in rows)
    assert leading_run(correct) == (by_hand, len(rows))
    assert tuple(map(sum, zip(leading_run(correct[:cut]), leading_run(correct[cut:])))) == (by_hand, len(rows))


# --- time -------------------------------------------------------------------------------------------------------------


def test_speed_counts_from_the_first_token():
    """The clock starts when the first token is known, so a response of n tokens took n − 1 tokens' time."""
    ours, plain = [counts([3, 3], seconds=4.0), counts([1], seconds=1.0)], [counts([0] * 10, seconds=20.0)]
    assert metrics.tokens_per_second(ours) == (8 + 2) / 5 and metrics.tokens_per_second(plain) == 10 / 20
    assert metrics.summary(ours, plain)["speedup"] == (20 / 10) / (5 / 10)  # seconds per token, one over the other
    assert metrics.summary(plain, plain)["speedup"] == 1 and metrics.summary(ours)["speedup"] is None


# --- intervals --------------------------------------------------------------------------------------------------------


def test_the_bootstrap_is_deterministic_and_covers():
    responses = [counts([a, b]) for a, b in zip([0, 1, 2, 3, 4, 5, 6, 7] * 3, [7, 1, 0, 2, 5, 1] * 4)]
    low, high = bootstrap(metrics.tau, responses)
    assert bootstrap(metrics.tau, responses) == (low, high) == metrics.summary(responses)["tau_interval"]
    assert bootstrap(metrics.tau, responses, seed=1) != (low, high)
    assert low < metrics.tau(responses) < high
    narrow = bootstrap(metrics.tau, responses, level=0.5)
    assert low < narrow[0] < narrow[1] < high
    each = torch.tensor([r.tau for r in responses])
    normal = 2 * 1.96 * each.std(correction=0).item() / len(each) ** 0.5
    assert high - low == pytest.approx(normal, rel=0.15)  # 24 prompts, 2000 draws, against the normal interval


def test_the_bootstrap_of_too_little_is_none():
    assert bootstrap(metrics.tau, []) is bootstrap(metrics.tau, [counts([1])]) is None
    assert bootstrap(metrics.tau, [counts([]), counts([])]) is None


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=2, max_size=8))
def test_differences_are_paired(accepted):
    """The same prompts are drawn for both methods: one token more in every round is one token more in every draw."""
    worse = [counts(rounds) for rounds in accepted]
    better = [counts([a + 1 for a in rounds]) for rounds in accepted]
    low, high = bootstrap(difference(metrics.tau), better, worse, samples=50)
    assert low == pytest.approx(1, abs=ULPS) and high == pytest.approx(1, abs=ULPS)


def test_unpaired_intervals_would_not_tell_what_paired_ones_do():
    worse = [counts([a]) for a in (0, 6) * 8]
    better = [counts([a + 1]) for a in (0, 6) * 8]
    assert bootstrap(metrics.tau, worse)[1] > bootstrap(metrics.tau, better)[0]
    assert bootstrap(difference(metrics.tau), better, worse)[0] > 0
