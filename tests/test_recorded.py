"""A target that looks its answers up: every method does round for round what it does with the real one."""

import pytest
import torch
from toys import HEADS, TutoredDrafter, make_drafter, make_head, plain, stopping_target

from xpress.decode import decode_batch
from xpress.evaluate import Method, evaluate
from xpress.prompts import Prompt
from xpress.recorded import RecordedTarget

TURNS = [["Hi", "Why?", "Now?"], ["Add two"], ["No", "A colour"], ["Much longer"]]
PROMPTS = [Prompt(f"toy/{i}", "toy", turns) for i, turns in enumerate(TURNS)]
TIMED = ("seconds", "time", "steps", "memory")


@pytest.fixture(scope="module")
def target():
    return stopping_target(2, 40, dtype=torch.float64, num_hidden_layers=3)


def methods_of(target):
    """Every head at several K, and drafters that read other layers and draft other numbers of tokens."""
    made = [Method("ar")]
    for layout, layers in (("infill", 1), ("next", 2)):
        drafter = make_drafter(target, layout=layout, layers=layers, seed=layers)
        made.append(Method(f"drafter {layout}", "drafter", drafter))
        for name in HEADS:
            head = make_head(name, drafter, std=0.4)
            K = {"refiner": 1, "markov": "auto"}.get(name, "sequential")
            made.append(Method(f"{name} {layout} {K}", "head", drafter, head, K))
    return made


def measure(target, methods, **how) -> list[dict]:
    settings = {"max_new_tokens": 9, "turns": "all", **how}
    lines = [line for lines in evaluate(target, methods, PROMPTS, **settings) for line in lines]
    return [{key: value for key, value in line.items() if key not in TIMED} for line in lines]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_method_does_what_it_does_with_the_real_target(target, batch_size):
    """Rounds, passes, ranks, ids: also where a draft reaches past a stop token or the limit."""
    methods = methods_of(target)
    key = lambda line: (line["prompt"], line["turn"], line["method"])  # noqa: E731
    live = sorted(measure(target, methods, batch_size=batch_size), key=key)
    recorded = sorted(measure(target, methods, batch_size=batch_size, recorded=True), key=key)
    assert recorded == live
    accepted = [n for line in live for n in line["accepted"]]
    assert len(set(accepted)) > 1 and any(line["ids"][-1] in (2, 40) for line in live)  # else it shows little


@pytest.mark.parametrize("stop", [None, 2])
def test_drafts_that_reach_past_the_end(target, stop):
    """Of a round that is cut at a limit or a stop token, what was accepted before the cut counts; so the record must
    know how the target would have gone on."""
    drafter, prompt = make_drafter(target), [5, 9, 1, 7]
    onward = plain(target, prompt, 20)
    stops = () if stop is None else (onward[stop],)
    answer = plain(target, prompt, 8, stops)
    whose = RecordedTarget(target, [prompt], [answer], drafter.config.num_draft)
    for right in range(drafter.config.num_draft + 1):
        tutored = TutoredDrafter(drafter, prompt, onward, lambda i, n=right: n)
        live, recorded = (
            [rounds[0] for rounds in decode_batch(one, [prompt], tutored, max_new_tokens=8, stop_ids=stops)]
            for one in (target, whose)
        )
        assert recorded == live and [token for step in live for token in step.tokens] == answer
        if right == drafter.config.num_draft:
            assert len(live[-1].tokens) < live[-1].num_accepted + 1


def test_times_are_none(target):
    lines = [line for lines in evaluate(target, methods_of(target)[:3], PROMPTS, recorded=True) for line in lines]
    assert {(line["seconds"], line["steps"], line["memory"], str(line["time"])) for line in lines} == {
        (0.0, 0.0, None, "{}")
    }


def test_where_the_context_ends_so_does_the_record():
    target = stopping_target(dtype=torch.float64, num_hidden_layers=3, max_position_embeddings=12)
    drafter, prompt = make_drafter(target), [[5, 9, 1, 7]]
    answer = [step for rounds in decode_batch(target, prompt, max_new_tokens=20) for step in rounds[0].tokens]
    assert len(answer) == 8
    whose = RecordedTarget(target, prompt, [answer], drafter.config.num_draft)
    live, recorded = (list(decode_batch(one, prompt, drafter, max_new_tokens=20)) for one in (target, whose))
    assert [rounds[0].tokens for rounds in live] == [rounds[0].tokens for rounds in recorded]


def test_other_prompts_are_refused(target):
    whose = RecordedTarget(target, [[5, 9]], [[1, 2]], 3)
    with pytest.raises(ValueError, match="knows the prompts that it was made for"):
        whose.prefill([[5, 8]])
