"""What the numbers mean, against hand computation, and against the loop that produces them."""

import json
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xpress import metrics
from xpress.decode import Response, Round
from xpress.metrics import Counts, Mean, bootstrap, difference, leading_run, quotient

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
    assert of == Counts([5], 4, 7, [2], 2.0, drafted=[7]) and of.as_dict()["num_tokens"] == 4
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
    ours, plain = [counts([3, 3], seconds=4.0), counts([1], seconds=1.0)], [counts([0] * 5, seconds=10.0)] * 2
    assert metrics.tokens_per_second(ours) == (8 + 2) / 5 and metrics.tokens_per_second(plain) == 10 / 20
    assert metrics.summary(ours, plain)["speedup"] == (20 / 10) / (5 / 10)  # seconds per token, one over the other
    assert metrics.summary(plain, plain)["speedup"] == 1 and metrics.summary(ours)["speedup"] is None
    assert metrics.quotient(metrics.tokens_per_second)(ours, plain) == 4
    assert metrics.summary([ours, ours], [plain, plain])["speedup"] == 4  # whatever is resampled together


def test_time_by_phase_is_per_step_and_the_harness_a_share_of_it():
    """A batch's responses carry its steps and seconds in equal shares, so sums are those of the batch."""
    part = dict(steps=2.0, time={"draft": 1.0, "verify": 2.5, "harness": 0.5}, memory=7)
    found = metrics.summary(
        [Counts([3], 5, 7, [1], 4.0, **part), Counts([1], 3, 7, [1], 4.0, **(part | {"memory": 9}))]
    )
    assert found["time"] == {"draft": 0.5, "harness": 0.25, "verify": 1.25} and found["harness_share"] == 1 / 8
    assert found["peak_memory"] == 9


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


def simulated(generator, prompts=25) -> list[list[Counts]]:
    """Responses to 25 prompts, three each, alike within a prompt: means 0 … 4 of 0.5 … -> groups; true tau 3."""
    ease = torch.randint(0, 5, (prompts,), generator=generator)
    jitter = torch.randint(-1, 2, (prompts, 3, 4), generator=generator)
    accepted = (ease[:, None, None] + jitter).clamp(min=0)
    return [[counts(own) for own in group] for group in accepted.tolist()]


def test_the_bootstrap_covers_where_a_prompts_responses_are_resampled_together():
    """Over 200 data sets a 95 % interval holds the true value in 88 to 99 %; with each response on its own it is far
    too narrow, for the answers to one prompt are alike."""
    generator = torch.Generator().manual_seed(0)
    truth = 1 + (0 + 1 / 3 + 1 + 2 + 3 + 4 - 0) / 5  # ease 0: jitter below 0 is cut, which leaves 1/3
    held = {"together": 0, "alone": 0}
    for _ in range(200):
        groups = simulated(generator)
        for how, columns in (("together", groups), ("alone", list(chain(*groups)))):
            low, high = bootstrap(metrics.tau, columns, samples=300)
            held[how] += low <= truth <= high
    assert 0.88 <= held["together"] / 200 <= 0.99 and held["alone"] / 200 < 0.85


def test_groups_are_resampled_whole():
    """A group in which one answer makes up for the other has no spread, and order within it does not count."""
    groups = [[counts([a]), counts([6 - a])] for a in (0, 1, 2, 3, 6)]
    assert bootstrap(metrics.tau, groups) == (4, 4) == bootstrap(metrics.tau, [group[::-1] for group in groups])
    low, high = bootstrap(metrics.tau, list(chain(*groups)))
    assert low < 4 < high
    assert metrics.tau(list(chain(*groups))) == metrics.summary(groups)["tau"] == 4


def test_what_was_decoded_together_is_timed_together():
    """Two batches of two prompts: tau has intervals over four prompts, speed over two batches."""
    ours = [counts([a], seconds=1.0) for a in (0, 4, 1, 3)]
    plain = [counts([0] * 4, seconds=4.0) for _ in ours]
    pairs = lambda column: [column[:2], column[2:]]  # noqa: E731
    found = metrics.summary(ours, pairs(plain), pairs(ours))
    assert found["speedup_interval"] == (3, 3) and found["tau_interval"][0] < 3 < found["tau_interval"][1]
    alone = metrics.summary(ours, [plain], [ours])
    assert alone["speedup_interval"] is None and alone["tau_interval"] == found["tau_interval"]


def test_columns_of_different_prompts_are_not_compared():
    with pytest.raises(ValueError, match="columns of 2, 1 prompts"):
        bootstrap(difference(metrics.tau), TWO, TWO[:1])


@settings(max_examples=30, deadline=None)
@given(some_counts, some_counts)
def test_means_are_sums_over_sums(left, right):
    """What `sums` makes of a column in parts gives the mean of the whole; a pair compares two such means."""
    for mean in (metrics.tau, metrics.tau_macro, metrics.tokens_per_round, metrics.mean_passes):
        for column in (left, [left, right], [*left, *right]):
            flat = list(chain(*(part if isinstance(part, list) else [part] for part in column)))
            sums, value = mean.sums(column).sum(0), mean(flat)
            assert (value is None) == (sums[1] == 0)
            assert value is None or float(mean.of_sums(sums)) == pytest.approx(value, abs=ULPS)
    a, b = metrics.tau(left), metrics.tau(right)
    both = a is not None and b is not None
    assert difference(metrics.tau)(left, right) == (a - b if both else None)
    assert quotient(metrics.tau)(left, right) == (a / b if both else None)


def test_a_mean_of_ones_own():
    longest = Mean(lambda r: max(r.accepted), lambda r: 1)
    assert longest(TWO) == 2.5 and longest([]) is None and bootstrap(longest, TWO) == (1, 4)


# --- by draft token, settled blocks, loops, probes --------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(some_counts)
def test_conditional_acceptance_multiplies_to_accept_at(responses):
    shares, reached = metrics.conditional(responses)
    accept_at, rounds = metrics.accept_at(responses), sum(len(r.accepted) for r in responses)
    assert len(shares) == len(reached) == 7 and reached[0] == rounds
    product = 1.0
    for k, (share, count) in enumerate(zip(shares, reached), 1):
        assert count == sum(a >= k - 1 for r in responses for a in r.accepted)
        assert (share is None) == (count == 0)
        product *= share or 0.0
        assert product == pytest.approx(accept_at.get(k, 0.0), abs=ULPS)


def test_conditional_by_hand():
    assert metrics.conditional([counts([2, 0, 4, 1], G=4)]) == ([3 / 4, 2 / 3, 1 / 2, 1.0], [4, 3, 2, 1])
    assert metrics.conditional([counts([0], G=2)]) == ([0.0, None], [1, 0])
    assert metrics.conditional([]) == ([], []) and metrics.conditional([counts([0, 0], G=0)]) == ([], [])


def test_settled_by_hand():
    looked = [Counts([1, 1], 5, 3, [2, 3], settled=[1, 3]), Counts([0, 2], 5, 3, [1, 1], settled=[0, 0])]
    assert metrics.settled(looked) == [2 / 4, 3 / 4, 3 / 4, 1.0]
    assert metrics.settled([counts([1])]) is None and metrics.settled([*looked, counts([1], G=3)]) == [
        0.5,
        0.75,
        0.75,
        1,
    ]
    assert metrics.settled([Counts([0, 0], 3, 1, [3, 1], settled=[3, 0])]) == [0.5, 0.5, 0.5, 1]  # cut to one token


@pytest.mark.parametrize("times, found", [(3, False), (4, True), (9, True)])
def test_an_answer_loops_where_a_run_of_eight_stands_four_times(times, found):
    ids = [*range(100, 120), *list(range(8)) * times, 7, 7]
    assert metrics.loops(ids) is found
    assert not metrics.loops([]) and not metrics.loops(list(range(500)))
    assert metrics.loops([5] * 11) and not metrics.loops([5] * 10)  # runs may overlap


def test_numbers_without_loops_leave_looping_answers_out():
    both = [counts([2, 2]), Counts([7] * 5, 41, 7, [0] * 5, loops=True)]
    found = metrics.summary(both)
    assert (found["tau"], found["tau_without_loops"], found["loops"]) == (1 + 39 / 7, 3, 0.5)
    assert metrics.summary(both[1:])["tau_without_loops"] is None


def probe_sums(reached, accepted, hits, **more) -> Counts:
    sums = {"reached": reached, "rounds": [4.0] * 3, "accepted": accepted, "recall": {"1": hits, "256": reached}}
    return Counts([1], 3, 3, [0], probe=sums | {"mean": [8.0, 12.0, 4.0], "first": [2.0, 1.0, 4.0]} | more)


def test_probes_are_sums_over_sums():
    """Not means of the responses' shares; rows that nothing reached have none."""
    one = probe_sums([4.0, 2.0, 0.0], [2.0, 0.0, 0.0], [2.0, 1.0, 0.0], expected=[1.0, 0.5, 0.0])
    two = probe_sums([1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], expected=[1.0, 0.25, 0.0])
    found = metrics.probed([one, counts([2], G=3), two])
    assert found["recall"] == {"1": [3 / 5, 1 / 3, None], "256": [1.0, 1.0, None]}
    assert found["expected"] == [2 / 5, 0.25, None] and found["observed"] == [3 / 5, 0.0, None]
    assert found["refined_rank"] == {"mean": [2, 3, 1], "first": [0.5, 0.25, 1.0]}
    assert metrics.probed([counts([1])]) == {"recall": {}, "refined_rank": None, "expected": None, "observed": None}
    assert metrics.summary([one, two])["recall"] == found["recall"]


def test_counts_come_back_from_their_line():
    of = probe_sums([4.0, 2.0, 0.0], [2.0, 0.0, 0.0], [2.0, 1.0, 0.0])
    line = json.loads(json.dumps({"method": "m", "ids": [1], **of.as_dict()}))
    assert Counts.read(line) == of
