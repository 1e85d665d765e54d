"""Methods side by side: what an answer may depend on, what later turns are told, and which outputs are called wrong."""

import importlib
import io
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from toys import ScriptedDrafter, ToyTokenizer, make_drafter, make_head, oracle, stopping_target

from xpress import evaluate as evaluation
from xpress import report
from xpress.decode import generate
from xpress.evaluate import Method, evaluate
from xpress.journal import cell
from xpress.lossless import first_difference
from xpress.prompts import Prompt, answer_text, conversation, render
from xpress.sampling import GREEDY, Sampling, argmax
from xpress.stopping import Stops
from xpress.verify import Verdict

loop = importlib.import_module("xpress.decode")  # the package exports a function of that name
WAYS = [GREEDY, Sampling(1.0), Sampling(1.0, accept="match")]
ids_of = lambda way: "greedy" if way.greedy else way.accept  # noqa: E731
TURNS = [["Hi", "Why?", "Now?"], ["Add two"], ["No", "A colour"], ["Much longer"]]
PROMPTS = [Prompt(f"toy/{i}", "toy", turns) for i, turns in enumerate(TURNS)]


def small(*stops, **changes):
    return stopping_target(*stops, **{"dtype": torch.float64, "num_hidden_layers": 3, **changes})


def methods_of(target, *passes) -> list[Method]:
    drafter = make_drafter(target, layers=1)
    head = make_head("refiner", drafter, std=0.4)
    heads = [Method(f"refiner K={K}", "head", drafter, head, K) for K in passes]
    return [Method("ar"), Method("drafter", "drafter", drafter), *heads]


@pytest.fixture(scope="module")
def target():
    return small(2, 40)


@pytest.fixture(scope="module")
def methods(target):
    return methods_of(target, "auto")


def measure(target, methods, prompts=PROMPTS, **how) -> list[dict]:
    return [line for lines in evaluate(target, methods, prompts, **{"max_new_tokens": 6, **how}) for line in lines]


def facts(lines, *leave_out) -> dict:
    """{(round, method, prompt, turn): whatever may depend on nothing but these}"""
    keys = [k for k in ("ids", "accepted", "passes", "settled", "prompt_tokens", "seed", "loops") if k not in leave_out]
    return {(x["round"], x["method"], x["prompt"], x["turn"]): [x[key] for key in keys] for x in lines}


def recorded(monkeypatch) -> list:
    """[(label, prompts, settings)] of every call of `respond`."""
    calls, real = [], evaluation.respond
    log = lambda target, ids, method, **how: calls.append((method.label, ids, how)) or real(target, ids, method, **how)  # noqa: E731
    monkeypatch.setattr(evaluation, "respond", log)
    return calls


# --- what an answer may depend on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS, ids=ids_of)
def test_an_answer_does_not_depend_on_its_company(target, methods, how):
    """Not on the order of prompts or methods, on the batch size, or on what else is measured."""
    whole = facts(measure(target, methods, sampling=how, turns="all"))
    assert len(whole) == len(methods) * sum(map(len, TURNS)) and len({str(x[0]) for x in whole.values()}) > 4
    for batch_size in (2, 3, 5):
        prompts, others = (PROMPTS[::-1], methods[:0:-1]) if batch_size == 2 else (PROMPTS, methods[1:])
        found = measure(target, [methods[0], *others], prompts, sampling=how, turns="all", batch_size=batch_size)
        assert facts(found) == whole
    few = facts(measure(target, [methods[0], methods[2]], PROMPTS[1:4:2], sampling=how, batch_size=2))
    assert few.items() <= {k: v for k, v in whole.items() if k[3] == 1}.items() and len(few) == 4


def test_methods_take_turns_and_the_first_round_is_thrown_away(target, methods, monkeypatch):
    """In the next group, and for the same group in the next round, the next method begins: none has the cold start or
    the warm caches for itself. With three rounds the prompts are answered four times."""
    calls = recorded(monkeypatch)
    lines = measure(target, methods, rounds=3, batch_size=2)
    labels, n = [method.label for method in methods], len(methods)
    orders = [[label for label, *_ in calls[i : i + n]] for i in range(0, len(calls), n)]
    assert len(orders) == 4 * 2 and {x["round"] for x in lines} == {0, 1, 2} and len(lines) == 3 * 4 * n
    starts = [labels.index(order[0]) for order in orders]
    assert all(order == labels[s:] + labels[:s] for order, s in zip(orders, starts))
    at = {(number, g): starts[2 * number + g] for number in range(4) for g in range(2)}
    assert all((s + 1) % n == at.get((number, 1 - g), (s + 1) % n) for (number, g), s in at.items() if not g)
    assert all(at[number + 1, g] == (at[number, g] + 1) % n for number in range(3) for g in range(2))
    assert set(Counter((label, tuple(map(tuple, ids))) for label, ids, _ in calls).values()) == {4}


def test_one_round_is_warmed_up_on_a_few_tokens_of_the_first_prompts(target, methods, monkeypatch):
    calls = recorded(monkeypatch)
    lines = measure(target, methods, batch_size=2, max_new_tokens=12)
    ahead, n = calls[: len(methods)], len(methods)
    assert {how["max_new_tokens"] for *_, how in ahead} == {8} and len({str(ids) for _, ids, _ in ahead}) == 1
    assert {how["max_new_tokens"] for *_, how in calls[n:]} == {12}
    assert len(calls) == n * (1 + 2) and len(lines) == 4 * n


@pytest.mark.parametrize("how", WAYS, ids=ids_of)
def test_rounds_repeat_at_temperature_0_and_draw_anew_above_it(target, methods, how):
    lines = measure(target, methods, PROMPTS[:2], sampling=how, rounds=2, batch_size=2, seed=5)
    each = [{k[1:]: v for k, v in facts(lines, "seed").items() if k[0] == number} for number in range(2)]
    assert (each[0] == each[1]) == how.greedy
    for number in range(2):
        alone = facts(measure(target, methods, PROMPTS[:2], sampling=how, seed=5 + number), "seed")
        assert {k[1:]: v for k, v in alone.items()} == each[number]


def test_what_is_measured_already_is_not_measured_again(target, methods, monkeypatch):
    whole = measure(target, methods, rounds=2, batch_size=2, turns="all")
    calls, done = recorded(monkeypatch), {(0, 0), (0, 1), (1, 1)}
    rest = measure(target, methods, rounds=2, batch_size=2, turns="all", done=done)
    assert {(x["round"], x["group"]) for x in rest} == {(r, g) for r in (0, 1) for g in (0, 1)} - done
    assert facts(rest) == {k: v for k, v in facts(whole).items() if k in facts(rest)}
    calls.clear()
    assert not measure(target, methods, batch_size=2, done={(0, 0), (0, 1)}) and not calls


@pytest.mark.parametrize("turns", ["first", "all"])
def test_progress_never_goes_back_and_ends_when_all_is_done(target, methods, turns):
    seen = []
    say = lambda done, total, what: seen.append((done, total))  # noqa: E731
    lines = measure(target, methods, rounds=2, batch_size=2, turns=turns, done={(0, 1)}, progress=say)
    done, totals = zip(*seen)
    assert len(set(totals)) == 1 and list(done) == sorted(done) and done[-1] == totals[0]
    per_round = len(methods) * (sum(map(len, TURNS)) if turns == "all" else len(TURNS))
    assert totals[0] == 3 * per_round and len(lines) == 2 * per_round - len(methods) * (3 if turns == "all" else 2)
    assert done.index(totals[0]) >= len(done) - 2  # a bar that closes there misses nothing


# --- turns ------------------------------------------------------------------------------------------------------------


def test_every_method_is_told_what_plain_autoregression_answered(target, methods, monkeypatch):
    """Above temperature 0 the methods' own answers differ, and none of them is fed back."""
    calls = recorded(monkeypatch)
    lines = measure(target, methods, sampling=Sampling(1.0), turns="all", batch_size=3)
    plain = {(x["prompt"], x["turn"]): x["ids"] for x in lines if x["method"] == "ar"}
    wanted = []
    for prompt in PROMPTS:
        said = [answer_text(target.tokenizer, plain[prompt.id, turn + 1], (2, 40)) for turn in range(len(prompt.turns))]
        for turn in range(len(prompt.turns)):
            wanted.append(tuple(render(target.tokenizer, conversation(prompt, said[:turn]))))
    assert len(set(wanted)) == sum(map(len, TURNS)) == len(plain)
    for method in methods:
        given = [tuple(ids) for label, batch, _ in calls[len(methods) :] if label == method.label for ids in batch]
        assert sorted(given) == sorted(wanted)
    own = {(x["prompt"], x["turn"]): x["ids"] for x in lines if x["method"] == "drafter"}
    assert any(own[key] != plain[key] for key in own if key[1] == 1)
    assert {x["turn"] for x in measure(target, methods[:1])} == {1}


def test_a_stop_token_is_not_fed_back(target):
    stops = oracle(target.model, render(target.tokenizer, conversation(PROMPTS[0], [])), 4)
    ending = small(stops[3])
    lines = measure(ending, [Method("ar")], PROMPTS[:1], turns="all")
    first = next(i for i, token in enumerate(stops) if token == stops[3])
    assert lines[0]["ids"] == stops[: first + 1]
    second = render(ending.tokenizer, conversation(PROMPTS[0], [ending.tokenizer.decode(stops[:first], True)]))
    assert lines[1]["prompt_tokens"] == len(second)


def test_a_conversation_ends_where_a_turn_leaves_no_room():
    """Others in its batch go on; a first turn without room is refused by name, before anything is decoded."""
    target = small(max_position_embeddings=48)
    talk = [Prompt("long", "toy", ["Hi", "x" * 30, "y"]), Prompt("short", "toy", ["Hi", "No", "a"])]
    lines = measure(target, methods_of(target, 1), talk, turns="all", batch_size=2, max_new_tokens=5)
    turns = Counter((x["method"], x["prompt"]) for x in lines)
    assert {turns[label, "long"] for label in ("ar", "drafter", "refiner K=1")} == {1}
    assert {turns[label, "short"] for label in ("ar", "drafter", "refiner K=1")} == {3} and len(turns) == 6
    with pytest.raises(ValueError, match="prompt big: a prompt of 69 tokens leaves no room .* leave it out"):
        measure(target, [Method("ar")], [*talk, Prompt("big", "toy", ["z" * 60])])


# --- odd inputs -------------------------------------------------------------------------------------------------------


class Bare(ToyTokenizer):
    """No template: a prompt is its letters, one id each."""

    def apply_chat_template(self, messages, **_):
        return "".join(message["content"] for message in messages)


def bare_target(*stops, **changes):
    target = small(*stops, **changes)
    eos = target.tokenizer.eos_token_id
    target.tokenizer = Bare()
    target.tokenizer.eos_token_id = eos
    return target


@pytest.mark.parametrize("how", WAYS, ids=ids_of)
def test_prompts_of_one_token_and_prompts_that_fill_the_context(how):
    target = bare_target(max_position_embeddings=16)
    sizes = [1, 15, 14, 3]
    prompts = [Prompt(f"{n}", "toy", ["abcdefghijklmnopqrst"[:n]]) for n in sizes]
    lines = measure(target, methods_of(target, 1), prompts, batch_size=4, sampling=how, max_new_tokens=5)
    assert [(x["prompt_tokens"], len(x["ids"])) for x in lines[::3]] == [(1, 5), (15, 1), (14, 2), (3, 5)]
    for line in lines if how.greedy else []:
        ids = render(target.tokenizer, conversation(next(p for p in prompts if p.id == line["prompt"]), []))
        assert line["ids"] == oracle(target.model, ids, len(line["ids"])) and line["difference"] is None


def test_stop_ids_end_every_method_at_the_same_token(target):
    """The first token itself, several ids at once."""
    answers = [oracle(target.model, render(target.tokenizer, conversation(p, [])), 6) for p in PROMPTS]
    stops = {answers[0][0], answers[1][3], answers[2][4]}
    ending = small(*stops)
    for batch_size in (1, 5):
        lines = measure(ending, methods_of(ending, 2), batch_size=batch_size)
        for line in lines:
            full = answers[int(line["prompt"][-1])]
            end = next((i + 1 for i, token in enumerate(full) if token in stops), 6)
            assert line["ids"] == full[:end] and line["difference"] is None
        assert any(len(x["ids"]) == 1 and not x["accepted"] for x in lines)


class Halves(ToyTokenizer):
    """Ids are halves of two-byte characters: a token alone is not text."""

    def decode(self, ids, skip_special_tokens=False):
        return b"".join((b"\xc3", b"\xa9", b"\xa8", b"b")[i % 4] for i in ids).decode(errors="replace")


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("text", ["é", "è", "bb", "\ufffd", "bé"])
def test_stop_strings_cross_tokens_and_characters(text, at):
    """Of a run that is accepted whole, what plain decoding would have kept: it looked after every single token, where
    half of a character is still a replacement character."""
    target = small(seed=at)
    target.tokenizer = Halves()
    target.tokenizer.eos_token_id = None
    ids = render(target.tokenizer, conversation(PROMPTS[0], []))
    answer = oracle(target.model, ids, 16)
    end = next((i for i in range(1, 17) if text in target.tokenizer.decode(answer[:i])), 16)
    for right in (4, at % 4):
        drafter = ScriptedDrafter(target, ids, answer, 4, lambda i, right=right: right)
        methods = [Method("ar"), Method("script", "drafter", drafter)]
        lines = measure(target, methods, [PROMPTS[0]], stop_strings=[text], max_new_tokens=16)
        assert [x["ids"] for x in lines] == [answer[:end]] * 2 and not any(x["difference"] for x in lines)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=5), st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
def test_a_run_ends_where_its_tokens_one_by_one_would(before, new, data):
    strings = data.draw(st.lists(st.sampled_from(["é", "\ufffd", "b", "èb", "\ufffdb"]), max_size=2))
    stops = Stops(tuple(data.draw(st.sets(st.integers(0, 3), max_size=1))), tuple(strings), Halves())
    one_by_one = (i + 1 for i in range(len(new)) if stops.end([*before, *new[:i]], new[i : i + 1]))
    assert stops.end(before, new) == next(one_by_one, None)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("how", WAYS, ids=ids_of)
def test_answers_without_rounds_have_defined_numbers(target, methods, how, batch_size):
    """One new token is the target's own: no round, no time, nothing to divide by; tables print."""
    lines = measure(target, methods, max_new_tokens=1, sampling=how, batch_size=batch_size)
    assert all(len(x["ids"]) == 1 and not x["accepted"] and x["seconds"] == 0 == x["steps"] for x in lines)
    found = cell(lines, methods, how.greedy)
    for row in found["methods"]:
        for name in ("tau", "tau_interval", "tau_macro", "tokens_per_round", "tokens_per_second", "speedup", "settled"):
            assert row[name] is None, name
        assert (row["rounds"], row["tokens"], row["responses"], row["time"]) == (0, 4, 4, {})
        assert row["lossless"] is (True if how.greedy else None)
    assert found["paired"] and all(pair["value"] is pair["interval"] is None for pair in found["paired"])
    console = Console(file=io.StringIO(), width=160)
    report.print_report({"cells": [{"bench": "toy", "batch_size": 1, **found}]}, console=console)
    assert "refiner K=auto" in console.file.getvalue()


# --- losslessness -----------------------------------------------------------------------------------------------------


def believe_everything(draft, scores, sampling=GREEDY, noise=None):
    n = draft.ids.shape[1]
    return Verdict(torch.full((len(scores),), n), argmax(scores[:, n]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["verify", "score"])
def test_a_wrong_output_is_found(monkeypatch, fault, dtype):
    """Every draft accepted, or the target's rows shifted by one: plain autoregression stays right, and each first
    difference is named with its place and the gap of the target's two best logits there."""
    target = small(dtype=dtype)
    methods = methods_of(target, 1)
    assert all(x["lossless"] for x in cell(measure(target, methods, batch_size=4), methods, True)["methods"])
    real = target.score
    if fault == "verify":
        monkeypatch.setattr(loop, "verify", believe_everything)
    else:
        monkeypatch.setattr(target, "score", lambda anchor, draft: real(anchor, draft).roll(1, 1))
    lines = measure(target, methods, PROMPTS[1:], turns="all", batch_size=3, rounds=2)
    rows = {row["label"]: row for row in cell(lines, methods, True)["methods"]}
    assert {label: row["lossless"] for label, row in rows.items()} == {
        "ar": True,
        "drafter": False,
        "refiner K=1": False,
    }
    plain = {(x["prompt"], x["turn"]): x["ids"] for x in lines if x["method"] == "ar"}
    for label in ("drafter", "refiner K=1"):
        named = {(d["prompt"], d["turn"]): d for d in rows[label]["differences"]}
        own = {(x["prompt"], x["turn"]): x["ids"] for x in lines if x["method"] == label}
        assert set(named) == {key for key in own if own[key] != plain[key]}
        assert len(named) == len(rows[label]["differences"])  # not once a round
        assert any(key[1] > 1 for key in named)
        for key, found in named.items():
            a, b = plain[key], own[key]
            assert a[: found["at"]] == b[: found["at"]] and a[found["at"]] != b[found["at"]]
            assert found["tie"] == (found["behind"] <= found["limit"]) and 0 <= found["gap"] <= found["behind"]
    first = next(d for d in rows["drafter"]["differences"] if d["turn"] == 1)
    ids = render(target.tokenizer, conversation(next(p for p in PROMPTS if p.id == first["prompt"]), []))
    ids = [*ids, *plain[first["prompt"], 1][: first["at"]]]
    best = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float().topk(2).values
    assert first["gap"] == pytest.approx(float(best[0] - best[1]), abs=1e-5 if dtype != torch.bfloat16 else 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exact_tie_is_no_failure_and_both_take_the_lower_id(dtype):
    target = small(dtype=dtype)
    ids = render(target.tokenizer, conversation(PROMPTS[0], []))
    low, high = sorted((generate(target, ids, max_new_tokens=1).ids[0], 90))
    weight = target.lm_head.weight
    with torch.no_grad():
        twin = weight[generate(target, ids, max_new_tokens=1).ids[0]].clone()
        weight[low], weight[high] = twin, twin
    lines = measure(target, methods_of(target, 1), PROMPTS[:1])
    assert lines[0]["ids"][0] == low and not any(x["difference"] for x in lines)
    plain = lines[0]["ids"]
    found = first_difference(target, ids, plain, [high, *plain[1:]])
    assert found["at"] == 0 and found["gap"] == 0 and found["tie"]
    lines[1]["difference"] = found
    row = cell(lines, methods_of(target, 1), True)["methods"][1]
    assert row["lossless"] is True and row["differences"][0]["prompt"] == PROMPTS[0].id
    assert not first_difference(target, ids, plain, plain[:-1])["tie"]  # an answer that ends early is never a tie


def test_plain_autoregression_comes_first(target, methods):
    with pytest.raises(ValueError, match="first method must be plain autoregression"):
        measure(target, methods[1:])
