"""What is seen from outside of decoding: ranks and expected acceptance, blocks that settle, and where the time goes."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import ScriptedDrafter, TutoredDrafter, V, make_drafter, make_head, make_target, oracle, random_block

from xpress import evaluate, watch
from xpress.decode import decode_batch, generate
from xpress.evaluate import Method, respond
from xpress.metrics import Counts, conditional, histogram, probed, settled
from xpress.probe import RECALL, Probe, rank
from xpress.refine import refine
from xpress.sampling import GREEDY, Noise, Sampling
from xpress.watch import Watch

PROMPTS = [[5], [1, 7], [3, 4, 5, 6, 7, 8, 9], [8] * 4]
REDUCED = tuple(range(0, V, 2))


@pytest.fixture(scope="module")
def target():
    return make_target(dtype=torch.float64, num_hidden_layers=3)


def head_method(target, passes, name="refiner", **drafter):
    drafter = make_drafter(target, layers=1, **drafter)
    return Method("head", "head", drafter, make_head(name, drafter, std=0.4), passes)


# --- ranks ------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_ranks_are_places_in_a_sorted_list(data):
    """By brute force, ties included: of equal logits the lower draft id is the drafter's choice and stands first."""
    draft_ids = data.draw(st.sampled_from([None, REDUCED, (3, 96, 41)]))
    block = random_block(2, 4, draft_ids=None if draft_ids is None else torch.tensor(draft_ids))
    known = list(range(V)) if draft_ids is None else list(draft_ids)
    base = torch.randint(0, data.draw(st.sampled_from([2, 9, 10**6])), (2, 3, len(known))).double()
    ids = torch.randint(0, V, (2, 3))
    ids[0] = torch.tensor(known)[base[0].argmax(-1)]
    found = rank(block, base, ids)
    for n, k in itertools.product(range(2), range(3)):
        order = sorted(range(len(known)), key=lambda c: (-float(base[n, k, c]), c))
        places = {known[c]: place for place, c in enumerate(order, 1)}
        assert found[n, k] == places.get(int(ids[n, k]), found[n, k])
        assert int(ids[n, k]) in places or found[n, k] > 10**9  # further off than any k that is asked for
    assert (found[0] == 1).all()


@pytest.mark.parametrize("draft_ids", [None, REDUCED])
def test_recall_at_1_of_the_plain_drafter_is_its_conditional_acceptance(target, draft_ids):
    """Slot by slot, and without a single draft token of the head's the refined rank is 1 everywhere. Recall grows with
    k, and reaches 1 where k is the whole vocabulary, of which a reduced draft vocabulary holds a part."""
    counts = []
    for prompt in PROMPTS:
        answer = oracle(target.model, prompt, 20)
        drafter = make_drafter(target, layers=1, block_size=5, draft_ids=draft_ids)
        tutored = TutoredDrafter(drafter, prompt, answer, lambda i: i % 5, hint=0.0)
        counts += [x for _, x in respond(target, [prompt], Method("d", "drafter", tutored), max_new_tokens=20)]
    found, (shares, reached) = probed(counts), conditional(counts)
    assert found["recall"]["1"] == pytest.approx(shares, abs=1e-12) and min(reached) >= 3
    assert any(0 < share < 1 for share in shares)
    assert found["refined_rank"] == {"mean": [1.0] * 4, "first": [1.0] * 4}
    grown = [[found["recall"][str(k)][slot] for k in RECALL] for slot in range(4)]
    assert all(row == sorted(row) for row in grown) and grown[0][0] < grown[0][-1]
    if draft_ids is None:
        assert all(row[-1] == 1 for row in grown)
    else:
        assert grown[0][-1] < 1  # ids outside cannot be drafted, however far one looks


def test_refined_ranks_are_those_of_the_tokens_that_were_drafted(target):
    seen, method = [], head_method(target, 2)
    ((_, counts),) = respond(target, PROMPTS[:1], method, max_new_tokens=12)
    look = lambda draft, scores, verdict, rows: seen.append((draft.block.base_logits()[0], draft.ids[0]))  # noqa: E731
    list(decode_batch(target, PROMPTS[:1], method.drafter, method.head, 2, max_new_tokens=12, observe=look))
    places = torch.tensor([[int((b > b[i]).sum()) + 1 for b, i in zip(base, ids)] for base, ids in seen]).double()
    found = probed([counts])["refined_rank"]
    assert found["mean"] == pytest.approx(places.mean(0).tolist()) and places.max() > 1
    assert found["first"] == pytest.approx((places == 1).double().mean(0).tolist())


# --- expected acceptance ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["rejection", "match"])
@pytest.mark.parametrize("passes", [0, 1, "auto"])
@pytest.mark.parametrize("settings_", [{}, {"top_k": 12, "top_p": 0.9}], ids=["whole", "cut"])
def test_observed_acceptance_is_the_expected_one(target, accept, passes, settings_):
    """Within 4 standard errors at every slot that enough rounds reached: Σ min(p, q) under rejection, p of the draft
    under match, given that all before it were accepted."""
    sampling = Sampling(3.0 if accept == "rejection" else 0.7, accept=accept, **settings_)
    method = head_method(target, passes, "markov")
    how = dict(sampling=sampling, max_new_tokens=10, seeds=list(range(120)))
    counts = [own for _, own in respond(target, [PROMPTS[i % 4] for i in range(120)], method, **how)]
    found, reached = probed(counts), [sum(own.probe["reached"][k] for own in counts if own.probe) for k in range(3)]
    assert reached[0] > 300 and 0.005 < found["expected"][0] < 0.98
    for n, expected, observed in zip(reached, found["expected"], found["observed"]):
        if n >= 20:
            assert abs(observed - expected) <= 4 * (expected * (1 - expected) / n) ** 0.5 + 1e-12
    bins = histogram(counts)
    assert found["observed"][0] == pytest.approx(1 - bins[0] / sum(bins))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(2.0)], ids=["greedy", "sampled"])
def test_sums_of_a_batch_are_those_of_its_rows(target, sampling):
    method = head_method(target, "auto")
    how = dict(sampling=sampling, max_new_tokens=8)
    together = respond(target, PROMPTS, method, seeds=[4, 5, 6, 7], **how)
    alone = [respond(target, [p], method, seeds=[4 + i], **how)[0] for i, p in enumerate(PROMPTS)]
    for (one, a), (other, b) in zip(together, alone):
        assert one == other and a.probe.keys() == b.probe.keys()
        assert a.probe.pop("recall") == b.probe.pop("recall")
        assert all(a.probe[key] == pytest.approx(b.probe[key], abs=1e-9) for key in a.probe)


# --- blocks that settle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["refiner", "rnn"])
def test_settled_is_the_share_that_k_passes_would_have_got_right(target, name, sampling):
    """On the very blocks that `auto` refined: those with settled ≤ K are those where K passes reach its fixed point."""
    method, blocks = head_method(target, "auto", name, block_size=5), []

    class Recorder(Probe):
        def __call__(self, draft, scores, verdict, rows):
            blocks.append((draft, len(blocks) + 1, list(rows)))
            super().__call__(draft, scores, verdict, rows)

    seeds, how = [3, 4, 5, 6], dict(sampling=sampling, max_new_tokens=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "Probe", Recorder)
        counts = [own for _, own in respond(target, PROMPTS, method, seeds=seeds, **how)]
    G = method.drafter.config.num_draft
    hits = [0] * (G + 1)
    for draft, number, rows in blocks:
        noise = Noise(tuple(seeds[row] for row in rows), number)
        for K in range(G + 1):
            with torch.inference_mode():
                ids = refine(method.head, draft.block, K, sampling, noise).ids
            hits[K] += int((ids == draft.ids).all(1).sum())
    total = sum(len(draft.ids) for draft, *_ in blocks)
    assert total == sum(len(own.settled) for own in counts) > 12
    assert settled(counts) == [count / total for count in hits] and hits[0] < total == hits[G]


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by one at every look, and by `at.now += …`."""
    at = SimpleNamespace(now=0.0)

    def look():
        at.now += 1
        return at.now

    monkeypatch.setattr(watch.time, "perf_counter", look)
    return at


def test_laps_add_up_and_pauses_take_none(clock):
    stop = Watch("cpu")
    stop.lap("before")
    stop.start()
    begun = clock.now
    for name in ("a", "b", "a"):
        clock.now += 5
        stop.lap(name)
    with stop.paused():
        stop.lap("a")
        clock.now += 100
    stop.lap("probe")
    spent = stop.seconds()
    assert spent == {"a": 12, "b": 6, "probe": 101} and sum(spent.values()) == clock.now - begun
    with pytest.raises(RuntimeError), stop.paused():
        raise RuntimeError
    clock.now += 1
    stop.lap("a")
    assert stop.seconds()["a"] == 14
    assert Watch("cpu").seconds() == {}


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("passes", [0, 2, "auto", "sequential"])
def test_watching_changes_nothing_and_probing_costs_nothing(target, passes, sampling, clock, monkeypatch):
    """Rounds are those of the bare loop; a probe that takes an hour moves no number; the parts add up to the whole."""
    method = head_method(target, passes)
    how = dict(sampling=sampling, max_new_tokens=10)
    ((found, counts),) = respond(target, PROMPTS[2:3], method, seeds=[7], **how)
    assert found == generate(target, PROMPTS[2], method.drafter, method.head, passes, seed=7, **how)
    assert counts.steps == len(found.rounds) and counts.num_tokens == len(found.ids)
    assert set(counts.time) == {"draft", "readout", "refine", "verify", "harness"} and min(counts.time.values()) > 0
    assert counts.seconds == pytest.approx(sum(counts.time.values()))
    real = Probe.__call__

    def slow(*round_):
        clock.now += 3600
        real(*round_)

    monkeypatch.setattr(Probe, "__call__", slow)
    ((_, again),) = respond(target, PROMPTS[2:3], method, seeds=[7], **how)
    assert again == Counts(**{**counts.as_dict(), "memory": again.memory})


@pytest.mark.parametrize("rows", [1, 3])
def test_a_batch_shares_its_time_and_plain_decoding_has_no_drafter(target, rows, clock):
    found = [own for _, own in respond(target, PROMPTS[:rows], Method("ar"), max_new_tokens=9)]
    assert {key for own in found for key in own.time} == {"verify", "harness"}
    assert len({own.seconds for own in found}) == 1 and sum(own.steps for own in found) == pytest.approx(8)
    assert all(own.probe == {} and own.settled == [] for own in found)


def test_time_is_never_negative(target):
    for method in (Method("ar"), head_method(target, "auto")):
        for _, own in respond(target, PROMPTS, method, max_new_tokens=5):
            assert own.seconds >= 0 and all(spent >= 0 for spent in own.time.values())
            assert own.memory is None or own.memory > 0


def test_a_scripted_drafter_is_probed_by_what_it_was_told(target):
    """Right for two of three: the first two slots are always recalled, the third never."""
    answer = oracle(target.model, PROMPTS[0], 19)
    script = ScriptedDrafter(target, PROMPTS[0], answer, 3, lambda i: 2)
    ((response, counts),) = respond(target, PROMPTS[:1], Method("s", "drafter", script), max_new_tokens=19)
    assert response.ids == answer and counts.accepted == [2] * 6
    assert probed([counts])["recall"]["1"] == [1.0, 1.0, 0.0]
