"""Lossless decoding: at temperature 0 in fp32 the output is plain autoregression, token for token, whatever drafts.

The truth here is not the library's own plain decoding, which is itself under test, but `toys.oracle`.
"""

import importlib
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import HEADS, SHAPES, ScriptedDrafter, ToyTokenizer, TutoredDrafter, V, make_drafter, make_head, oracle, plain
from toys import make_model as model_of
from toys import make_target as target_of

from xpress.block import LAYOUTS
from xpress.decode import Response, decode, generate
from xpress.heads import MarkovHead, Refiner
from xpress.lossless import first_difference, spacing
from xpress.metrics import Counts, accept_at, histogram, tau, tokens_per_round
from xpress.target import Target
from xpress.verify import Verdict

PROMPTS = [[5], [1, 7], [3, 4, 5, 6, 7, 8, 9]]
PASSES = [0, 1, 3, "G", "auto", "sequential"]
RIGHT = {  # G -> round -> tokens of the block that a scripted drafter gets right
    "oracle": lambda G: lambda i: G,
    "liar": lambda G: lambda i: 0,
    "mixed": lambda G: lambda i: i % (G + 1),
}
toy = lru_cache(None)(target_of)
known = lru_cache(None)(lambda kind, prompt, n: oracle(toy(kind).model, prompt, n))


def answer(prompt, kind="llama", n=32) -> list[int]:
    return list(known(kind, tuple(prompt), n))


def until(ids, n, stops=()) -> list[int]:
    """What may be returned of an endless answer."""
    end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
    return ids[: min(end, n)]


def lengths_of(drafter):
    return drafter.lengths if hasattr(drafter, "lengths") else drafter.sequences.lengths


def watch(target, prompt, drafter=None, head=None, passes=0, **settings) -> Response:
    """`decode` to its end. After every round both caches hold exactly what is committed, and the counts add up."""
    response, committed = Response(), len(prompt)
    for step in decode(target, prompt, drafter, head, passes, **settings):
        if step.num_draft is not None:
            assert 0 <= step.num_accepted <= step.num_draft and step.passes <= step.num_draft
            assert 1 <= len(step.tokens) <= step.num_accepted + 1
            assert drafter is None or lengths_of(drafter) == [committed - 1]  # all before the anchor, nothing else
            response.rounds.append(step)
        response.ids += step.tokens
        committed += step.num_accepted + 1
        assert target.sequences.lengths == [target.cache.get_seq_length()] == [committed - 1]
    rounds, counts = response.rounds, [Counts.of(response)]
    assert all(len(r.tokens) == r.num_accepted + 1 for r in rounds[:-1])  # only the last round may be cut
    assert sum(histogram(counts)) == len(rounds)
    if rounds:
        emitted = sum(len(r.tokens) for r in rounds)
        assert len(response.ids) == 1 + emitted and tokens_per_round(counts) == emitted / len(rounds)
        assert tau(counts) == pytest.approx(1 + sum(accept_at(counts).values()), abs=1e-12)  # order of a short sum
    else:
        assert tau(counts) is tokens_per_round(counts) is None and len(response.ids) <= 1
    return response


def scripted(prompt, G, script, layout="infill", target=None):
    right = RIGHT[script](G) if isinstance(script, str) else script
    return ScriptedDrafter(target or toy(), prompt, answer(prompt), G, right, LAYOUTS[layout])


def tutored(layout, prompt, kind="llama", n=32, **settings):
    """A dFlash drafter of 6 slots that gets 0, 1, …, G tokens right by turns, and a head's help or harm beyond."""
    drafter = make_drafter(toy(kind), block_size=6, layout=layout, **settings)
    return TutoredDrafter(drafter, prompt, answer(prompt, kind, n), RIGHT["mixed"](drafter.config.num_draft))


@pytest.mark.parametrize("kind", SHAPES)
def test_plain_decoding_is_the_model_itself(kind):
    for prompt in PROMPTS:
        assert watch(toy(kind), prompt, max_new_tokens=24).ids == answer(prompt, kind)[:24]


EVERY_HEAD = [("llama", name, passes) for name in (None, *HEADS) for passes in PASSES]
EVERY_KIND = [(kind, "refiner", passes) for kind in SHAPES if kind != "llama" for passes in (0, "auto")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind, name, passes", EVERY_HEAD + EVERY_KIND)
def test_lossless(kind, name, passes, layout):
    seen = []
    for prompt in PROMPTS:
        drafter = tutored(layout, prompt, kind)
        head = name and make_head(name, drafter.drafter, std=0.4)
        K = drafter.drafter.config.num_draft if passes == "G" else passes
        response = watch(toy(kind), prompt, drafter, head, K, max_new_tokens=16)
        assert response.ids == answer(prompt, kind)[:16]
        assert all(r.num_accepted >= i % (r.num_draft + 1) for i, r in enumerate(response.rounds))
        seen += [r.num_accepted for r in response.rounds]
    assert len(set(seen)) >= 3 and max(seen) > 1  # the law was not held by rejecting everything


@pytest.mark.parametrize("passes", [0, 2, "auto", "sequential"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lossless_with_a_reduced_draft_vocabulary_and_fewer_drafts_than_slots(layout, passes):
    for prompt in PROMPTS:
        drafter = tutored(layout, prompt, draft_ids=tuple(range(0, V, 2)), num_draft=3)
        head = make_head("refiner", drafter.drafter, std=0.4)
        response = watch(toy(), prompt, drafter, head, passes, max_new_tokens=16)
        assert response.ids == answer(prompt)[:16] and {r.num_draft for r in response.rounds} == {3}
        assert any(r.num_accepted for r in response.rounds)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [MarkovHead, Refiner])
def test_a_head_that_knows_the_next_token_earns_one_token_a_pass(kind, layout):
    """Without attention the greedy answer is a map token -> next token, and a head can hold it exactly. Then p passes
    make the first p drafts right, which breaks as soon as prev_ids, slots and positions disagree anywhere."""
    target = target_of("qwen3", seed=4)
    for layer in target.body.layers:
        layer.self_attn.o_proj.weight.zero_()
    follower = [oracle(target.model, [token], 1)[0] for token in range(V)]
    drafter = make_drafter(target, block_size=5, layout=layout)
    head, G = kind(V, drafter.config.hidden_size, 5, rank=V), {"infill": 4, "next": 5}[layout]
    with torch.no_grad():
        for weight in head.parameters():
            weight.zero_()
        head.token_embed.weight.copy_(torch.eye(V))
        head.readout.weight[follower, range(V)] = 1e3  # far above any base logit
        if kind is Refiner:
            head.in_proj.weight[:, 2 * V :] = torch.eye(V)
    for prompt in PROMPTS[1:]:
        for K, right in [(0, 0), (1, 1), (2, 2), (G, G), ("auto", G), ("sequential", G)]:
            response = watch(target, prompt, drafter, head, K, max_new_tokens=16)
            assert response.ids == oracle(target.model, prompt, 16)
            assert all(r.num_accepted >= right and r.num_draft == G for r in response.rounds)
            assert right == G or any(r.num_accepted < G for r in response.rounds)  # the passes were needed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("G", [1, 3, 7])
@pytest.mark.parametrize("script", RIGHT)
def test_every_number_of_accepted_tokens(script, G, layout):
    """A round commits what the script says and one token more; one-token prompts and liars included."""
    seen = set()
    for prompt in PROMPTS:
        response = watch(toy(), prompt, scripted(prompt, G, script, layout), max_new_tokens=24)
        assert response.ids == answer(prompt)[:24]
        accepted = [r.num_accepted for r in response.rounds]
        assert accepted == [RIGHT[script](G)(i) for i in range(len(accepted))]
        seen |= set(accepted)
    assert seen == {"oracle": {G}, "liar": {0}, "mixed": set(range(G + 1))}[script] or (G, script) == (7, "mixed")


# --- stop tokens and limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", range(8))
def test_a_stop_token_at_every_offset_of_a_block(offset):
    """Accepted in the middle of a run, a stop token must end it: the run's tail is never returned, nor counted."""
    found = 0
    for prompt in [*PROMPTS, *([t] for t in range(20, 26))]:
        ids = answer(prompt)
        for at in range(1 + offset, 24, 8):  # the oracle commits 8 tokens a round, after the first token
            if ids[at] in ids[:at]:
                continue
            found += 1
            for stops in ([ids[at]], [ids[at + 2], ids[at]], (V + 5, ids[at])):
                expected = until(ids, 24, stops)
                response = watch(toy(), prompt, scripted(prompt, 7, "oracle"), max_new_tokens=24, stop_ids=stops)
                assert response.ids == expected
                if len(expected) == at + 1:
                    assert len(response.rounds[-1].tokens) == offset + 1 and response.rounds[-1].num_accepted == 7
            mixed = scripted(prompt, 7, "mixed")
            assert watch(toy(), prompt, mixed, max_new_tokens=24, stop_ids=stops).ids == expected
    assert found >= 3
    assert plain(toy(), prompt, 24, stops) == until(ids, 24, stops)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stop_token_first_leaves_one_token_and_no_round(prompt):
    first, drafter = answer(prompt)[0], tutored("infill", prompt)
    for used in (None, drafter):
        response = watch(toy(), prompt, used, max_new_tokens=8, stop_ids=[0, first])
        assert response.ids == [first] and response.rounds == [] and not drafter.blocks


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9, 16, 17])
def test_the_limit_holds_around_block_edges(n):
    """Tokens behind the limit are neither returned nor counted, and no round at all is a defined value."""
    for prompt in PROMPTS:
        drafters = [None, tutored("infill", prompt), tutored("next", prompt)]
        for drafter in [*drafters, *(scripted(prompt, 7, script) for script in RIGHT)]:
            response = watch(toy(), prompt, drafter, max_new_tokens=n)
            assert response.ids == answer(prompt)[:n]
            assert bool(response.rounds) == (n > 1)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PROMPTS),
    st.integers(0, 24),
    st.sets(st.integers(0, 26), max_size=3),
    st.integers(1, 9),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.sampled_from(sorted(LAYOUTS)),
)
def test_any_stop_limit_and_run_of_acceptances(prompt, n, places, G, runs, layout):
    ids = answer(prompt)
    stops = {ids[i] for i in places}
    drafter = scripted(prompt, G, lambda i: min(runs[i % len(runs)], G), layout)
    assert watch(toy(), prompt, drafter, max_new_tokens=n, stop_ids=stops).ids == until(ids, n, stops)


# --- state that must not survive --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_rolling_back_is_exact_down_to_nothing(kept):
    """Cropping a cache to 0 is read as 'remove nothing' by the library below; ours must leave nothing."""
    target = toy("qwen2")
    with torch.no_grad():
        target.prefill([[9, 8, 7]])
    target.keep([kept - 3])
    assert target.cache.get_seq_length() == kept
    with torch.no_grad():
        again = target._run(torch.tensor([[9, 8, 7][kept:] + [4]]))[0, -1]
        fresh = target.body(input_ids=torch.tensor([[9, 8, 7, 4]]), use_cache=False).last_hidden_state[0, -1]
    assert torch.allclose(again, fresh, atol=1e-4)  # fp32 kernels of other shapes; a stale row moves it by far more


@pytest.mark.parametrize("abandoned", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_prompt_on_used_objects_equals_fresh_ones(layout, abandoned):
    """Outputs alone would hide a stale drafter cache (the target repairs them), so the drafts are compared too."""
    (short, *_, long), results = PROMPTS, []
    for used in (True, False):
        target = target_of("llama")
        drafter = make_drafter(target, block_size=6, layout=layout)
        if used:
            first = decode(target, long, TutoredDrafter(drafter, long, answer(long), lambda i: 2), max_new_tokens=16)
            for _ in zip(range(3 if abandoned else 99), first):
                pass
        tutor = TutoredDrafter(drafter, short, answer(short), lambda i: i % 3)
        response = watch(target, short, tutor, make_head("refiner", drafter), 2, max_new_tokens=16)
        results.append((response, torch.stack([block.hidden for block in tutor.blocks])))
    assert results[0][0] == results[1][0] and results[0][0].ids == answer(short)[:16]
    assert torch.equal(results[0][1], results[1][1])


# --- the gate: a tie is no failure, a failure is no tie ---------------------------------------------------------------


def random_prompts(n):
    draw = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, 13, (n,), generator=draw).tolist()
    return [torch.randint(V, (length,), generator=draw).tolist() for length in lengths]


def test_fifty_random_prompts():
    for i, (prompt, name) in enumerate(zip(random_prompts(50), [*HEADS] * 10)):
        drafter = tutored(["infill", "next"][i % 2], prompt, n=12)
        head = make_head(name, drafter.drafter)
        assert watch(toy(), prompt, drafter, head, i % 4, max_new_tokens=12).ids == answer(prompt, n=12)


def with_twin(step, dtype=torch.float32):
    """A target whose first answer token shares its lm_head row with the next (or last) id -> target, both ids."""
    model = model_of(dtype=dtype)
    first = oracle(model, PROMPTS[2], 1)[0]
    model.lm_head.weight.data[first + step] = model.lm_head.weight.data[first]
    return Target(model, ToyTokenizer()), sorted([first, first + step])


@pytest.mark.parametrize("step", [1, -1])
def test_an_exact_tie_goes_to_the_lower_id_on_both_paths(step):
    target, (lower, upper) = with_twin(step)
    expected = oracle(target.model, PROMPTS[2], 24)
    assert lower in expected and upper not in expected
    for script in (None, *RIGHT):
        drafter = script and ScriptedDrafter(target, PROMPTS[2], expected, 7, RIGHT[script](7))
        assert watch(target, PROMPTS[2], drafter, max_new_tokens=24).ids == expected


@pytest.mark.parametrize("value, steps", [(1.0, 1), (1.99, 1), (2.0, 2), (-7.9, 4), (8.0, 8)])
def test_spacing_is_the_distance_to_the_next_number(value, steps):
    """bf16 keeps 7 bits behind the leading one."""
    assert spacing(value, torch.bfloat16) == steps * 2**-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_difference_is_judged_by_the_gap_where_it_starts(dtype):
    """Two equal rows are a tie; elsewhere the first two logits decide, against 1e-3 in fp32 and 4 steps in bf16."""
    (target, (lower, _)), prompt, verdicts = with_twin(1, dtype), PROMPTS[2], {}
    ids = plain(target, prompt, 24)
    assert first_difference(target, prompt, ids, list(ids)) is None
    for at, token in enumerate(ids):
        found = first_difference(target, prompt, ids, [*ids[:at], token + 1, *ids[:0:-1]][:24])
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([prompt + ids[:at]]), use_cache=False).logits[0, -1].float()
        top, second = logits.topk(2).values.tolist()
        limit = 1e-3 if dtype == torch.float32 else 4 * spacing(top, dtype)
        behind = top - float(logits[token + 1])  # of the other output's own token
        assert found["at"] == at and (found["tie"] == (behind <= limit) or abs(behind - limit) <= limit)
        assert found["gap"] <= found["limit"] or not found["tie"]
        assert limit / 2 <= found["limit"] <= limit * 2  # the logit itself, to a bf16 step at a power of two
        assert found["gap"] == pytest.approx(top - second, abs=limit)  # kernels of other shapes
        assert found["gap"] < 1e-4 if token == lower else True  # equal rows, to summation order
        verdicts[token] = found["tie"]
    assert verdicts[lower] and not all(verdicts.values())
    for other in ([], ids[:-1], [*ids, 3]):  # an output of another length is no tie, not even where the gap is nil
        assert not first_difference(target, prompt, ids, other)["tie"]


class ShiftedTarget(Target):
    """A real bug: verification runs one position too far right."""

    def score(self, anchor, draft):
        ids = torch.cat([anchor[:, None], draft], 1)
        where = torch.arange(ids.shape[1])[None] + self.sequences.longest + 1
        self.sequences.open(ids.shape[1])
        out = self.body(input_ids=ids, position_ids=where, use_cache=True, **{self._cache_argument: self.cache})
        return self.lm_head(out.last_hidden_state)


def accept_everything(draft, scores, *_):
    return Verdict(torch.tensor([draft.ids.shape[1]]), scores[:, -1].argmax(-1))


def differences(target, used):
    """What first_difference says of `used` against plain decoding of `target`, prompt by prompt."""
    found = []
    for prompt in random_prompts(20):
        ids = plain(target, prompt, 12)
        drafter = ScriptedDrafter(used, prompt, ids, 3, RIGHT["mixed"](3))
        found.append(first_difference(target, prompt, ids, generate(used, prompt, drafter, max_new_tokens=12).ids))
    return [difference for difference in found if difference]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bug", ["positions", "accept all"])
def test_a_real_bug_is_a_failure_and_rounding_is_not(bug, dtype, monkeypatch):
    target = target_of("llama", dtype=dtype)
    sound = differences(target, target)
    assert all(found["tie"] for found in sound) and (dtype == torch.bfloat16 or not sound)
    broken = ShiftedTarget(target.model, ToyTokenizer(), loop="plain") if bug == "positions" else target
    if bug == "accept all":
        monkeypatch.setattr(importlib.import_module("xpress.decode"), "verify", accept_everything)
    failures = [difference for difference in differences(target, broken) if not difference["tie"]]
    assert len(failures) > 8
