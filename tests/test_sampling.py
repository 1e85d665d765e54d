"""Temperature above 0: noise that depends on its address alone, and output distributed exactly as the target's."""

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import make_drafter, make_head, make_target, random_block

from xpress import sampling as module
from xpress.block import Block
from xpress.decode import generate
from xpress.refine import refine, sweep
from xpress.sampling import ACCEPT, DRAFT, MAX_SLOTS, TARGET, Noise, Sampling, argmax, philox, sample
from xpress.verify import Verdict, accept_by_rejection, accept_matching, verify

LIMIT = 1e-4  # of a p-value; seeds are fixed, so a pass is a pass for ever
P, Q = torch.tensor([0.5, 0.2, 0.2, 0.1, 0.0]), torch.tensor([0.1, 0.1, 0.1, 0.1, 0.6])


def p_value(ids: torch.Tensor, probs: torch.Tensor) -> float:
    """Chi-square of samples [n] against probabilities over all their values; cells that expect < 5 are pooled."""
    counts = torch.bincount(ids, minlength=probs.numel()).double()
    expected = probs.double().flatten() / probs.sum() * len(ids)
    if counts[expected == 0].any():
        return 0.0
    small = expected < 5
    counts, expected = (torch.cat([x[~small], x[small].sum()[None]]) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(counts) == 1:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


def p_values(sequences: torch.Tensor, first: torch.Tensor, then) -> list[float]:
    """Joint of each pair of neighbours of sequences [n,L], of a chain with first [V] and then[i] [V,V]."""
    found, V = [], len(first)
    for i, pair in enumerate(pairwise(sequences.unbind(1))):
        joint = first[:, None] * then[i]
        found.append(p_value(pair[0] * V + pair[1], joint))
        first = joint.sum(0)
    return found


def complete(ids, verdict, chain: torch.Tensor, length: int, seed=5) -> torch.Tensor:
    """Committed tokens [n,length]: accepted drafts, the bonus, then what the target (chain [V,V]) draws itself."""
    torch.manual_seed(seed)
    ids = torch.cat([ids, ids[:, :1]], 1)[:, :length]
    for k in range(length):
        own = sample(chain[ids[:, k - 1]], torch.rand(len(ids), dtype=torch.float64)) if k else verdict.bonus
        ids[:, k] = torch.where(k < verdict.num_accepted, ids[:, k], own)
        ids[:, k] = torch.where(k == verdict.num_accepted, verdict.bonus, ids[:, k])
    return ids


def test_chi_square_tail():
    """A fair-coin test with 5 % by the tables: statistic 3.841 at one degree of freedom."""
    n, off = 10_000, 98  # (2·off)² / n = 3.8416
    ids = (torch.arange(n) < n / 2 + off).long()
    assert p_value(ids, torch.tensor([0.5, 0.5])) == pytest.approx(0.05, abs=1e-4)  # the table's digits
    assert p_value(torch.tensor([0, 0, 1]), torch.tensor([1.0, 0.0])) == 0.0


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_philox_known_answers(counter, key, words):
    found = philox(key, *(torch.tensor(c) for c in counter))
    assert tuple(int(word) for word in found) == words


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**63), st.integers(0, 2**20), st.lists(st.integers(0, 200_000), min_size=1, max_size=20))
def test_noise_is_a_function_of_its_address(seed, number, ids):
    """Any order, chunk, repetition or reduced vocabulary gives the same number for the same target id and slot."""
    ids = torch.tensor(ids)
    whole = Noise(seed, number).gumbel(5, ids)
    one_by_one = torch.cat([Noise(seed, number).gumbel(5, i[None]) for i in ids], 2)
    assert torch.equal(whole, one_by_one)
    assert torch.equal(whole.flip(2)[:, :2], Noise(seed, number).gumbel(2, ids.flip(0)))
    uniform = Noise(seed, number).uniform(TARGET, 9)
    assert torch.equal(uniform[:, :4], Noise(seed, number).uniform(TARGET, 4))
    three = Noise((5, seed, 6), number)
    assert torch.equal(three.gumbel(5, ids)[1:2], whole) and torch.equal(three.uniform(TARGET, 9)[1:2], uniform)


def test_addresses_do_not_collide():
    """Seeds, streams, rounds, slots: 4 096 addresses, as many numbers."""
    numbers = [Noise(s, r).uniform(t, 32) for s in range(8) for r in range(8) for t in (ACCEPT, TARGET)]
    assert len(torch.cat(numbers).unique()) == 8 * 8 * 2 * 32
    Noise(0).uniform(DRAFT, MAX_SLOTS)
    with pytest.raises(ValueError, match=str(MAX_SLOTS)):
        Noise(0).uniform(DRAFT, MAX_SLOTS + 1)


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_extreme_words_stay_inside(monkeypatch, word):
    """Uniforms never reach 0 or 1, and Gumbel noise is finite, at both ends of the generator's range."""
    monkeypatch.setattr(module, "philox", lambda key, low, high: (torch.full_like(low, word),) * 2)
    assert 0 < Noise(0).uniform(ACCEPT, 1) < 1
    assert -2.83 < Noise(0).gumbel(1, torch.tensor([0])) < 16.65


def test_gumbel_samples_follow_softmax():
    """argmax(ℓ + Γ) ~ softmax ℓ, and neighbouring slots are independent: the joint of both."""
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -3.0])
    ids = torch.arange(6) * 7919
    drawn = torch.cat([argmax(logits + Noise(1, r).gumbel(MAX_SLOTS, ids))[0] for r in range(160)])
    probs = logits.softmax(-1)
    pairs = drawn[::2] * 6 + drawn[1::2]
    assert p_value(pairs, probs[:, None] * probs) > LIMIT
    assert p_value(pairs, probs[:, None] * (logits / 1.2).softmax(-1)) < LIMIT  # the test sees another temperature


def test_inversion_never_draws_the_impossible():
    """Ids of probability 0 at both ends and in between, u at both ends of (0, 1); sums other than 1."""
    u = torch.tensor([2.0**-53, 0.299, 0.301, 1 - 2.0**-53], dtype=torch.float64)
    assert sample(torch.tensor([0.0, 0.6, 0.0, 1.4, 0.0]).expand(4, -1), u).tolist() == [1, 1, 3, 3]


# --- argmax -----------------------------------------------------------------------------------------------------------

SIZES = [1, 7, 16, 97, 1000, 1024, 1040, 4099, 49152]  # below, at, beside and above whole runs


def rows_with_ties(vocab: int) -> torch.Tensor:
    """Rows of few distinct values: ties within a run, across runs and everywhere, the largest value first or last,
    below zero, −inf alone, zeros of both signs."""
    few = torch.randint(-3, 4, (6, vocab)).float()
    first, last = torch.full((2, vocab), -5.0)
    first[0], last[-1] = 1.0, 1.0
    signs = torch.where(torch.arange(vocab) % 3 == 0, -0.0, 0.0)
    twice = torch.randn(vocab)
    twice[[vocab // 3, vocab // 2, vocab - 1]] = 9.0
    same = [torch.full((vocab,), x) for x in (-2.0, float("-inf"), float("inf"))]
    return torch.stack([*few, first, last, signs, signs.flip(0), -signs - 0.0, twice, *same])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("vocab", SIZES)
def test_argmax_is_the_lowest_id_of_the_largest(vocab, dtype):
    """Against Python's own search, at any leading shape and stride."""
    rows = rows_with_ties(vocab).to(dtype)
    wanted = [values.index(max(values)) for values in rows.tolist()]
    assert argmax(rows).tolist() == wanted and argmax(rows[0]).item() == wanted[0]
    shaped = rows.repeat(2, 1).view(2, 3, -1, vocab)
    assert argmax(shaped).tolist() == torch.tensor(wanted).repeat(2).view(shaped.shape[:3]).tolist()
    columns = rows.T.contiguous().T
    spaced = torch.full((len(rows), 2 * vocab), 99.0, dtype=dtype)
    spaced[:, ::2] = rows
    wide = torch.full((len(rows), vocab + 5), 99.0, dtype=dtype)
    wide[:, 3 : 3 + vocab] = rows
    for other in (
        columns,
        spaced[:, ::2],
        wide[:, 3 : 3 + vocab],
        rows.flip(0)[:, None].expand(-1, 2, -1)[:, 1].flip(0),
    ):
        assert argmax(other).tolist() == wanted
    assert argmax(rows[:0]).shape == (0,) and argmax(shaped[:, :0]).shape == (2, 0, shaped.shape[2])


@pytest.mark.parametrize("vocab", SIZES)
def test_argmax_of_nan_is_that_of_torch(vocab):
    """The first NaN, wherever it stands; ids stay inside."""
    rows = rows_with_ties(vocab)
    for place in {0, vocab // 3, vocab // 2, vocab - 1}:
        spoilt = rows.clone()
        spoilt[:, place] = float("nan")
        assert argmax(spoilt).tolist() == [place] * len(rows) == spoilt.argmax(-1).tolist()
        spoilt[:, vocab - 1] = float("nan")
        assert argmax(spoilt).tolist() == [place] * len(rows)
    assert argmax(torch.full((2, vocab), float("nan"))).tolist() == [0, 0]


# --- acceptance, hand-made distributions ------------------------------------------------------------------------------

N = 30_000


def uniforms(rows, seed=7):
    torch.manual_seed(seed)
    return torch.rand(N, rows, dtype=torch.float64), torch.rand(N, rows + 1, dtype=torch.float64)


def rolls(row: torch.Tensor, step: int) -> torch.Tensor:
    """[V,V]: a distribution for each previous token."""
    return torch.stack([row.roll(step * i) for i in range(len(row))])


def test_rejection_reproduces_the_target():
    """The joint of two tokens of a chain; a wrong q, even in one slot of two, shows."""
    chain, draft = rolls(P, 1), rolls(Q, 2)
    u, v = uniforms(2)
    one = sample(Q.expand(N, -1), torch.rand(N))
    ids = torch.stack([one, sample(draft[one], torch.rand(N))], 1)
    q = torch.stack([Q.expand(N, -1), draft[one]], 1)
    p = torch.stack([P.expand(N, -1), chain[ids[:, 0]], chain[ids[:, 1]]], 1)

    def found(q):
        return p_values(complete(ids, accept_by_rejection(ids, q, p, u, v), chain, 3), P, [chain, chain])

    assert min(found(q)) > LIMIT
    assert max(found(torch.full_like(q, 0.2))) < LIMIT  # a q that the tokens were not drawn from
    assert found(torch.stack([q[:, 0], Q.expand(N, -1)], 1))[0] < LIMIT  # right for token 1, wrong for token 2


def test_matching_reproduces_the_target():
    chain = rolls(P, 1)
    _, v = uniforms(2)
    ids = torch.tensor([[0, 1]]).expand(N, -1)
    p = torch.stack([P.expand(N, -1), chain[ids[:, 0]], chain[ids[:, 1]]], 1)
    verdict = accept_matching(ids, sample(p, v))
    assert min(p_values(complete(ids, verdict, chain, 3), P, [chain, chain])) > LIMIT
    assert set(verdict.num_accepted.tolist()) == {0, 1, 2}


def test_p_equal_to_q_accepts_all():
    """The residual is zero everywhere: nothing is rejected, nothing is NaN, the bonus still follows p."""
    u, v = uniforms(1)
    ids = sample(P.expand(N, -1), torch.rand(N))[:, None]
    verdict = accept_by_rejection(ids, P.expand(N, 1, -1), P.expand(N, 2, -1), u, v)
    assert (verdict.num_accepted == 1).all()
    assert p_value(verdict.bonus, P) > LIMIT


@pytest.mark.parametrize("token", [0, 2, 3, 4])
def test_one_hot_q_leaves_p_without_that_token(token):
    """A greedy drafter's q: accepted with p(token); else a draw from p without it, though q is zero where p is not."""
    u, v = uniforms(1)
    q = torch.nn.functional.one_hot(torch.tensor(token), 5).float().expand(N, 1, -1)
    verdict = accept_by_rejection(torch.full((N, 1), token), q, P.expand(N, 2, -1), u, v)
    rejected = verdict.bonus[verdict.num_accepted == 0]
    assert not (rejected == token).any()
    rest = P.clone()
    rest[token] = 0
    assert p_value(rejected, rest) > LIMIT
    assert p_value(verdict.num_accepted, torch.stack([1 - P[token], P[token]])) > LIMIT


def test_a_token_q_cannot_draw_is_rejected():
    u, v = uniforms(1)
    q, p = torch.tensor([0, 1.0]).expand(N, 1, -1), P[:2].expand(N, 2, -1)
    assert not accept_by_rejection(torch.zeros(N, 1).long(), q, p, u, v).num_accepted.any()


# --- acceptance, real heads before the fixed point --------------------------------------------------------------------

V, G, TRIALS = 5, 3, 1000
ONE, SOME = Sampling(1.0), Sampling(0.7, top_k=4, top_p=0.93)
CASES = {
    "refiner, K=0": ("refiner", 0, "infill", ONE, None),
    "refiner, K=1": ("refiner", 1, "infill", ONE, None),
    "refiner, K=2": ("refiner", 2, "infill", ONE, None),
    "refiner, auto": ("refiner", "auto", "next", ONE, None),
    "markov, K=1": ("markov", 1, "next", ONE, None),
    "rnn, sequential": ("rnn", "sequential", "infill", ONE, None),
    "top-k and top-p": ("refiner", 1, "infill", SOME, None),
    "reduced vocabulary": ("refiner", 1, "infill", ONE, (0, 1, 3)),
    "match": ("refiner", 1, "infill", Sampling(1.0, accept="match"), None),
}


@lru_cache
@torch.inference_mode()
def trial(name, passes, layout, how, draft_ids, n=TRIALS):
    """The same block under n seeds -> block, head, ids [n,G], p [n,G+1,V], Verdict of all, chain [V,V]."""
    target = make_target(vocab_size=V, num_hidden_layers=2)
    settings = {"target_layer_ids": (0,), "mask_token_id": 0, "draft_ids": draft_ids}
    drafter = make_drafter(target, G + (layout == "infill"), layout, 1, **settings)
    head = make_head(name, drafter, std=0.65)
    torch.manual_seed(11)
    readout, table = torch.randn(drafter.config.draft_vocab_size, 32) * 1.5, torch.randn(V, V)
    hidden, anchor = torch.randn(1, drafter.config.block_size, 32) * 0.1, torch.tensor([1])
    block = Block(hidden, anchor, anchor + 1, drafter.layout, G, lambda h: h @ readout.T, V, drafter.draft_ids)
    ids, scores, verdicts = [], [], []
    for seed in range(n):
        draft = refine(head, block, passes, how, Noise(seed))
        scores.append(table[torch.cat([anchor, draft.ids[0]])][None])  # logits by the token before
        verdicts.append(verify(draft, scores[-1], how, Noise(seed)))
        ids.append(draft.ids)
    whole = Verdict(*(torch.cat([getattr(v, name) for v in verdicts]) for name in ("num_accepted", "bonus")))
    return block, head, torch.cat(ids), how.adjust(torch.cat(scores)).softmax(-1), whole, how.adjust(table).softmax(-1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_refined_drafts_reproduce_the_target(case):
    """Any head, layout and K, at the fixed point or before it: neighbours of the committed tokens follow the target."""
    _, _, ids, _, verdict, chain = trial(*case)
    assert len(verdict.num_accepted.unique()) > 2  # drafts are neither all good nor all bad
    assert min(p_values(complete(ids, verdict, chain, G), chain[1], [chain] * G)) > LIMIT


@pytest.mark.parametrize("passes", [1, 2])
def test_another_q_than_the_drawing_one_is_caught(passes):
    """The same test fails when q is recomputed from the final tokens, and when it is the seed's."""
    block, head, ids, p, _, chain = trial("refiner", passes, "infill", ONE, None)
    noise = Noise(tuple(range(TRIALS)))
    u, v = (noise.uniform(stream, G + 1) for stream in (ACCEPT, TARGET))
    wide = {name: getattr(block, name).repeat_interleave(TRIALS, 0) for name in ("hidden", "anchor", "before")}
    many = replace(block, **wide)
    base = many.base_logits()
    with torch.no_grad():
        final = base + head.readout(sweep(head, head.prepare(many.hidden), many, ids))
    for wrong in (final, base):
        verdict = accept_by_rejection(ids, wrong.softmax(-1), p, u[:, :-1], v)
        assert min(p_values(complete(ids, verdict, chain, G), chain[1], [chain] * G)) < LIMIT


@torch.inference_mode()
@pytest.mark.parametrize("name", ["refiner", "markov", "rnn"])
def test_frozen_noise_has_one_fixed_point(name):
    """G passes, `auto` and the serial solver draw the same tokens from the same q."""
    block, head, *_ = trial(name, 1, "next", ONE, None, n=1)
    for seed in range(20):
        drafts = [refine(head, block, passes, ONE, Noise(seed)) for passes in (G, "auto", "sequential")]
        assert all(torch.equal(drafts[0].ids, other.ids) for other in drafts[1:])
        assert all(torch.allclose(drafts[0].q(), other.q(), atol=1e-5) for other in drafts[1:])  # fp32 logits near 10


def test_reduced_vocabulary_is_the_whole_one_with_nothing_outside():
    """Noise goes by target id: the same seed draws what −inf outside the set would draw, and q is zero there."""
    block = random_block(N=1, draft_ids=torch.tensor([3, 17, 40, 96]))
    outside = torch.full((1, 4, block.vocab_size), float("-inf"), dtype=torch.float64)
    wide = lambda hidden: outside.index_copy(-1, block.draft_ids, block.readout(hidden))  # noqa: E731
    whole = replace(block, readout=wide, draft_ids=None)
    for seed in range(20):
        few, all_ = (refine(None, b, 0, ONE, Noise(seed)) for b in (block, whole))
        assert torch.equal(few.ids, all_.ids)
        assert torch.allclose(few.q(), all_.q(), rtol=1e-12, atol=0)  # fp64, sums of 4 and of 97 numbers


# --- the whole loop ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy():
    """A target of five tokens that is sure of little, a drafter, a head strong enough to matter."""
    target = make_target(vocab_size=V, num_hidden_layers=1, initializer_range=0.15)
    drafter = make_drafter(target, 3, layers=1, target_layer_ids=(0,), mask_token_id=0)
    return target, drafter, make_head("refiner", drafter, rank=4, std=0.5)


@pytest.mark.parametrize("accept", ["rejection", "match"])
def test_decoding_reproduces_the_target(toy, accept):
    """Three tokens of `generate` under many seeds against exact probabilities: (1,2) and (2,3) follow the joint."""
    target, drafter, head = toy
    prompt, how = [1, 2, 3], Sampling(1.0, accept=accept)
    with torch.no_grad():
        pairs = torch.cartesian_prod(torch.arange(V), torch.arange(V))
        ids = torch.cat([torch.tensor(prompt).expand(V * V, -1), pairs], 1)
        first, second, third = target.model(ids).logits[:, 2:].softmax(-1).unflatten(0, (V, V)).unbind(2)
    second = first[0, 0, :, None] * second[:, 0]
    then = torch.einsum("ab,abc->bc", second, third) / second.sum(0)[:, None]  # averaged over token 1
    runs = [generate(target, prompt, drafter, head, 1, max_new_tokens=3, sampling=how, seed=s) for s in range(600)]
    found = torch.tensor([run.ids for run in runs])
    accepted = torch.tensor([run.rounds[0].num_accepted for run in runs])
    assert accepted.unique().tolist() == [0, 1, 2]
    assert min(p_values(found, first[0, 0], [second / first[0, 0, :, None], then])) > LIMIT


@pytest.mark.parametrize("accept", ["rejection", "match"])
def test_seed_fixes_the_output(target, accept):
    """The same for any order of the prompts, and another for another seed; as T falls to 0 it is the greedy output."""
    drafter = make_drafter(target)
    head = make_head("refiner", drafter)
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6], [5, 3]]

    def run(i, temperature=1.0, seed=0):
        how = Sampling(temperature, accept=accept)
        return generate(target, prompts[i], drafter, head, 1, max_new_tokens=12, sampling=how, seed=seed).ids

    forward, backward = [run(i) for i in range(4)], [run(i) for i in (3, 2, 1, 0)][::-1]
    assert forward == backward
    assert all(run(i, seed=1) != forward[i] for i in range(4))
    assert [run(i, 0.0) for i in range(4)] == [run(i, 1e-5) for i in range(4)]  # top-2 gaps are far above 17 T


# --- settings ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-2, 3), min_size=1, max_size=8),
    st.integers(0, 9),
    st.sampled_from([0.0123, 0.377, 0.71, 0.913, 1.0]),  # never on the border of a set of equal logits
)
def test_adjust_keeps_exact_sets(values, top_k, top_p):
    """The k most likely, of them the fewest that reach top_p; ties go to the lower id; odds stay as they were."""
    logits = torch.tensor(values).double()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[: top_k or None]
    probs = (logits[order] / 0.7).softmax(0)
    size = next(n for n in range(1, len(order) + 1) if probs[:n].sum() >= top_p - 1e-12)  # fp64 sums to 1 − 1e-16
    adjusted = Sampling(0.7, top_k, top_p).adjust(logits)
    assert set(adjusted.isfinite().nonzero()[:, 0].tolist()) == set(order[:size])
    assert torch.equal(adjusted[order[:size]], (logits / 0.7)[order[:size]])


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}, {"accept": "x"}],
)
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)
