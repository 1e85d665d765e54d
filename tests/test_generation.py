"""Making rows: greedy answers are plain autoregression's, whatever the batch, the server's faults or the interrupts."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from disk import save_model
from toys import PROMPTS, make_target, plain, stopping_target

from xpress import generation
from xpress.data import load_rows, row_id, shards
from xpress.generation import generate_data
from xpress.prompts import Prompt, conversation, load_prompts, render
from xpress.target import Target


def read(folder) -> dict[str, dict]:
    return {row["id"]: row for path in shards(folder) for row in map(json.loads, path.read_text().splitlines())}


@pytest.mark.parametrize("batch_size", [1, 4, 32])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_answers_are_those_of_plain_autoregression_whatever_the_padding(tmp_path, often, kind, batch_size):
    target = stopping_target(*often, kind=kind)
    counts = generate_data(target, PROMPTS, tmp_path, max_new_tokens=12, batch_size=batch_size)
    rows = read(tmp_path)
    for prompt in PROMPTS:
        row = rows.pop(row_id(prompt))
        assert row["prompt_ids"] == render(target.tokenizer, conversation(prompt, []))
        assert row["response_ids"] == plain(target, row["prompt_ids"], 12, often)
        assert (row["finish"] == "stop") == (row["response_ids"][-1] in often)
    assert not rows and counts["rows"] == len(PROMPTS)


def test_greedy_means_greedy_whatever_the_targets_own_generation_config_says(tmp_path):
    """Public chat models ship sampling and repetition penalties as defaults; they are not the target's argmax."""
    target = stopping_target()
    own = target.model.generation_config
    own.do_sample, own.temperature, own.top_k, own.repetition_penalty = True, 1.5, 20, 5.0
    own.no_repeat_ngram_size = 1
    generate_data(target, PROMPTS, tmp_path, max_new_tokens=10)
    for row in read(tmp_path).values():
        assert row["response_ids"] == plain(target, row["prompt_ids"], 10)
    assert target.model.generation_config is own


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, often, monkeypatch):
    target, settings = stopping_target(*often), dict(max_new_tokens=8, batch_size=2)
    generate_data(target, PROMPTS, tmp_path / "whole", **settings)
    answered, answer = [], generation._answer

    def counting(target, prompts, *rest):
        answered.extend(map(tuple, prompts))
        return answer(target, prompts, *rest)

    def interrupt(done, total):
        if done == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(generation, "_answer", counting)
    with pytest.raises(KeyboardInterrupt):
        generate_data(target, PROMPTS, tmp_path / "part", **settings, progress=interrupt)
    assert len(read(tmp_path / "part")) == 2
    (tmp_path / "part" / ".toy.1.tmp").write_text('{"id": "half')  # killed in the middle of a later shard
    seen = []
    counts = generate_data(target, PROMPTS, tmp_path / "part", **settings, progress=lambda *facts: seen.append(facts))
    assert seen == [(2, 6), (4, 6), (6, 6)] and counts["rows"] == 6
    assert len(answered) == len(set(answered)) == len(PROMPTS)
    assert read(tmp_path / "part") == read(tmp_path / "whole")
    generate_data(target, PROMPTS, tmp_path / "part", **settings)
    assert len(answered) == len(PROMPTS)  # a finished folder costs nothing


def test_equal_prompts_are_answered_once(tmp_path):
    counts = generate_data(stopping_target(), PROMPTS[:2] * 3, tmp_path, max_new_tokens=2)
    assert counts["rows"] == 2 and len(read(tmp_path)) == 2


def test_sampled_answers_depend_on_the_seed_alone(tmp_path):
    target, settings = stopping_target(), dict(max_new_tokens=8, temperature=1.0, top_p=0.9)
    found = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        generate_data(target, PROMPTS, tmp_path / name, **settings, seed=seed)
        found[name] = {key: row["response_ids"] for key, row in read(tmp_path / name).items()}
        torch.rand(3)
    assert found["a"] == found["b"] != found["c"]


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"max_new_tokens": 5}, "max_new_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"seed": 1}, "seed"),
        ({"thinking": True}, "template"),
        ({"target": make_target(seed=4)}, "target"),
    ],
)
def test_a_folder_made_with_other_settings_is_refused(tmp_path, changes, named):
    settings = {"target": stopping_target(2), "max_new_tokens": 4}
    generate_data(prompts=PROMPTS[:1], out=tmp_path, **settings)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=f"holds rows made with other {named}; choose another folder"):
        generate_data(prompts=PROMPTS, out=tmp_path, **{**settings, **changes})
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_bad_input_is_refused_before_anything_is_generated(tmp_path):
    target = stopping_target(max_position_embeddings=45)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="out=.*foreign: the folder is not empty and holds no settings.json"):
        generate_data(target, PROMPTS, tmp_path / "foreign")
    with pytest.raises(
        ValueError, match="prompt toy/4: .* tokens and max_new_tokens=8 exceed the target's context of 45"
    ):
        generate_data(target, PROMPTS, tmp_path / "long", max_new_tokens=8)
    assert not shards(tmp_path / "long")
    for name in ("max_new_tokens", "batch_size"):
        with pytest.raises(ValueError, match=f"{name}=0: must be at least 1"):
            generate_data(target, PROMPTS, tmp_path / "zero", **{name: 0})
    target.tokenizer = type("Bare", (), {"chat_template": None})()
    with pytest.raises(ValueError, match="no chat template"):
        generate_data(target, PROMPTS, tmp_path / "bare")


def test_empty_answers_cost_no_other_row(tmp_path, monkeypatch):
    """A prompt whose answer is empty is asked again on resume, and the shard that it once opened keeps its rows."""
    target, empty = make_target(), [True]
    true_answers = generation._answer

    def answers(target, prompts, *rest):
        found = true_answers(target, prompts, *rest)
        return [[], *found[1:]] if empty[0] else found

    monkeypatch.setattr(generation, "_answer", answers)
    settings = {"max_new_tokens": 3, "batch_size": 3}
    assert generate_data(target, PROMPTS, tmp_path, **settings)["empty"] == 2
    before = read(tmp_path)
    assert len(before) == len(PROMPTS) - 2
    assert generate_data(target, PROMPTS, tmp_path, **settings)["empty"] == 1  # a batch of two: one empty again
    assert before.items() <= read(tmp_path).items()
    empty[0] = False
    generate_data(target, PROMPTS, tmp_path, **settings)
    assert before.items() <= read(tmp_path).items() and len(load_rows(tmp_path)) == len(PROMPTS)
    monkeypatch.setattr(generation, "_answer", lambda target, prompts, *rest: [[]] * len(prompts))
    for _ in range(2):
        assert generate_data(target, PROMPTS, tmp_path / "none", **settings)["empty"] == len(PROMPTS)


def test_dropped_truncated_answers_are_not_asked_again(tmp_path, often, monkeypatch):
    target, asked, answer = stopping_target(*often), [], generation._answer
    monkeypatch.setattr(generation, "_answer", lambda t, p, *rest: asked.extend(p) or answer(t, p, *rest))
    generate_data(target, PROMPTS, tmp_path / "all", max_new_tokens=6)
    kept = {name: row for name, row in read(tmp_path / "all").items() if row["finish"] == "stop"}
    assert 0 < len(kept) < len(PROMPTS)
    asked.clear()
    for _ in range(2):
        counts = generate_data(target, PROMPTS, tmp_path / "some", max_new_tokens=6, batch_size=2, drop_truncated=True)
        assert read(tmp_path / "some") == kept and counts["rows"] == len(kept) and len(asked) == len(PROMPTS)
    assert (counts["earlier"], counts["dropped"]) == (len(kept), 0)
    with pytest.raises(ValueError, match="other drop_truncated"):
        generate_data(target, PROMPTS, tmp_path / "some", max_new_tokens=6)


TALKS = [
    Prompt("talk/0", "talk", ["Hi", "And then?", "Why?"]),
    Prompt("talk/1", "talk", ["Hi", "And then?"]),  # the same two turns: answered once
    Prompt("talk/2", "talk", ["Hi", "Or else?"]),
    Prompt("talk/3", "talk", ["Hi", "Bye"], system="Be brief."),
    Prompt("talk/4", "talk", ["No"]),
]


def test_later_turns_follow_the_targets_own_answers(tmp_path, often):
    target = stopping_target(*often)
    counts = generate_data(target, TALKS, tmp_path / "all", max_new_tokens=8, batch_size=2)
    rows = read(tmp_path / "all")
    assert counts["rows"] == len(rows) == 7 and counts["unreached"] == 0
    for prompt in TALKS:
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        for turn, text in enumerate(prompt.turns):
            row = rows[row_id(prompt, turn)]
            messages.append({"role": "user", "content": text})
            assert row["prompt_ids"] == render(target.tokenizer, messages)
            assert row["response_ids"] == plain(target, row["prompt_ids"], 8, often)
            assert row.get("turn", 1) == turn + 1 and row["id"].endswith(f"#{turn + 1}") == bool(turn)
            said = row["response_ids"][:-1] if row["finish"] == "stop" else row["response_ids"]
            answer = target.tokenizer.decode(said, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
    generate_data(target, TALKS, tmp_path / "part", max_new_tokens=8, batch_size=2, turns="first")
    assert len(read(tmp_path / "part")) == 3
    generate_data(target, TALKS, tmp_path / "part", max_new_tokens=8, batch_size=2)  # first turns come from the shards
    assert read(tmp_path / "part") == rows
    with pytest.raises(ValueError, match="turns=some: known are first, all"):
        generate_data(target, TALKS, tmp_path / "bad", turns="some")


def test_a_turn_after_a_missing_answer_is_not_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "_answer", lambda target, prompts, *rest: [[]] * len(prompts))
    counts = generate_data(make_target(), TALKS, tmp_path, max_new_tokens=3)
    assert (counts["rows"], counts["empty"], counts["unreached"]) == (0, 3, 4)


def test_prompts_from_elsewhere_without_room_are_counted(tmp_path):
    long, skipped = Prompt("toy/long", "toy", ["x" * 600]), Counter()
    with pytest.raises(ValueError, match="prompt toy/long: .* exceed"):
        generate_data(make_target(), [long, *PROMPTS], tmp_path / "a", max_new_tokens=2)
    counts = generate_data(
        make_target(), [long, *PROMPTS], tmp_path / "b", max_new_tokens=2, skip_unusable=True, skipped=skipped
    )
    assert counts["rows"] == len(PROMPTS) and skipped == {"no room in the context": 1}


def test_the_shares_of_several_ranks_are_whole_conversations_and_all_of_them(tmp_path):
    parts = []
    for rank in range(3):
        plan = generation.Plan([*TALKS, *PROMPTS], "all", tmp_path)
        plan.take_share(rank, 3)
        parts.append(plan.ids)
    whole = generation.Plan([*TALKS, *PROMPTS], "all", tmp_path).ids
    assert sum(map(len, parts)) == len(whole) and {name for part in parts for name in part} == set(whole)
    roots = [{row_id(prompt) for prompt, _ in part.values()} for part in parts]
    assert all(roots) and not roots[0] & roots[1] | roots[0] & roots[2] | roots[1] & roots[2]


SPY = """
import json, os, runpy, sys
from xpress import generation
answer = generation._answer
def spy(target, prompts, *rest):
    with open(f"asked-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}-{os.getpid()}", "a") as file:
        file.writelines(json.dumps(prompt) + "\\n" for prompt in prompts)
    return answer(target, prompts, *rest)
generation._answer = spy
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_two_processes_share_the_prompts(tmp_path):
    """The real command under torchrun: two processes, other prompts each, together the rows of one."""
    save_model(tmp_path / "toy")
    (tmp_path / "spy.py").write_text(SPY)
    script = Path(__file__).resolve().parents[1] / "scripts" / "generate_data.py"
    sets = [
        "target.name=toy",
        "prompts=train",
        "samples=10",
        "max_new_tokens=6",
        "batch_size=2",
        "out=rows",
        "target.dtype=float32",
    ]
    env = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "spy.py"]
    command = [*launch, str(script), *sets]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    asked = {path.name.rpartition("-")[0]: path.read_text().splitlines() for path in tmp_path.glob("asked-*")}
    assert asked.keys() == {"asked-0-of-2", "asked-1-of-2"} and all(len(lines) == 5 for lines in asked.values())
    assert len({line for lines in asked.values() for line in lines}) == 10  # nothing twice
    assert done.stdout.count("rows: 10 rows") == 1  # the main process talks, for both
    target = Target.from_pretrained(str(tmp_path / "toy"))
    generate_data(target, load_prompts("train", 10), tmp_path / "alone", max_new_tokens=6, batch_size=2)
    rows = read(tmp_path / "rows")
    assert rows == read(tmp_path / "alone")
    for path in shards(tmp_path / "rows")[:2]:
        path.unlink()
    for path in tmp_path.glob("asked-*"):
        path.unlink()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and read(tmp_path / "rows") == rows
    again = [line for path in tmp_path.glob("asked-*") for line in path.read_text().splitlines()]
    assert len(again) == len(set(again)) == 10 - int(re.search(r"(\d+)  earlier", done.stdout)[1])
