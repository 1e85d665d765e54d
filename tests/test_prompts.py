"""Prompt sets render as published; training and evaluation see the same ids; bad files are named with their line."""

import json
import re
from collections import Counter
from types import SimpleNamespace

import datasets
import pytest
from disk import TEMPLATE, byte_tokenizer
from toys import make_target

from xpress import evaluate as module
from xpress.data import load_rows
from xpress.decode import Response
from xpress.evaluate import Method, evaluate
from xpress.generation import generate_data
from xpress.metrics import Counts
from xpress.prompts import SAMPLES, SETS, load_prompts, read_jsonl, render, stop_ids, template_change, template_facts

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
PASSES = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
LIVE = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\nAdd two.\n\n### Format: "
)
CODE = "def f(x):\n    return x"
RECORDS = {  # set -> a record under the field names of the public data set, and the turns that it must give
    "gsm8k": ({"question": "1 + 1?", "answer": "#### 2"}, ["1 + 1?" + BOXED]),
    "math500": ({"problem": "1 + 1?", "solution": "2", "answer": "2", "level": 1}, ["1 + 1?" + BOXED]),
    "aime24": ({"id": 7, "problem": "1 + 1?", "answer": "002", "year": "2024"}, ["1 + 1?" + BOXED]),
    "aime25": ({"problem_idx": 1, "problem": "1 + 1?", "answer": 2}, ["1 + 1?" + BOXED]),
    "humaneval": ({"task_id": "T/0", "prompt": CODE, "test": "", "entry_point": "f"}, [PASSES + CODE + "\n```"]),
    "mbpp": ({"task_id": 11, "prompt": "Write f.", "code": CODE, "test_list": []}, ["Write f."]),
    "mt_bench": (
        {"prompt": ["Write.", "Now shorter."], "category": "writing", "prompt_id": 81},
        ["Write.", "Now shorter."],
    ),
    "livecodebench": (
        {"question_content": "Add two.", "starter_code": CODE},
        [
            f"{LIVE}Use the following code structure:\n```python\n{CODE}\n```\n\n"
            "### Answer: (use the provided format with backticks)"
        ],
    ),
    "alpaca": ({"instruction": "Sort.", "input": "3 1", "output": "1 3"}, ["Sort.\n\nInput:\n3 1"]),
    "sample": ({"prompt": "Hello"}, ["Hello"]),
    "sample_math": ({"prompt": "Hello"}, ["Hello"]),
    "train": ({"prompt": "Hello"}, ["Hello"]),
}
OTHER_BRANCH = {
    "livecodebench": (
        {"question_content": "Add two.", "starter_code": ""},
        [
            f"{LIVE}Write your code in the following format:\n```python\n# YOUR CODE HERE\n```\n\n"
            "### Answer: (use the provided format with backticks)"
        ],
    ),
    "alpaca": ({"instruction": "Sort.", "input": "", "output": ""}, ["Sort."]),
}


def write(folder, name, *records):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(folder)


# --- the sets -------------------------------------------------------------------------------------------------------


def test_every_set_has_a_record_here():
    assert set(RECORDS) == set(SETS)


@pytest.mark.parametrize("name, case", [*RECORDS.items(), *OTHER_BRANCH.items()])
def test_templates_are_the_published_ones(tmp_path, name, case):
    record, turns = case
    assert SETS[name].turns(record) == turns
    if SETS[name].hub:
        (prompt,) = load_prompts(name, data_dir=write(tmp_path, name, record))
        assert (prompt.id, prompt.source, prompt.turns) == (f"{name}/0", name, turns)


@pytest.mark.parametrize("samples", [1, 10, 39, 40, 99, None])
def test_a_part_of_a_set_is_the_head_of_the_published_shuffle(tmp_path, samples):
    records = [{"question": f"q{i}", "answer": ""} for i in range(40)]
    found = load_prompts("gsm8k", samples, write(tmp_path, "gsm8k", *records))
    expected = records
    if samples is not None and samples < 40:
        expected = datasets.Dataset.from_list(records).shuffle(seed=0).select(range(samples)).to_list()
    assert [p.turns for p in found] == [[r["question"] + BOXED] for r in expected]
    assert all(p.turns == [f"q{p.id.split('/')[1]}{BOXED}"] for p in found)  # ids name the record, not the place


def test_the_shipped_sets_are_large_balanced_and_disjoint():
    sample, train = load_prompts("sample"), load_prompts("train")
    assert len(sample) >= 60 and len(train) >= 400
    words = lambda prompt: " ".join(prompt.turns[0].lower().split())  # noqa: E731
    texts = {words(p) for p in sample}, {words(p) for p in train}
    assert [len(t) for t in texts] == [len(sample), len(train)] and not texts[0] & texts[1]
    kinds = [row["category"] for row in read_jsonl(SAMPLES / "sample.jsonl")]
    for n in (3, 6, 30, 60):  # the first n are balanced, so that a small sample is one of everything
        assert Counter(kinds[:n]) == dict.fromkeys(("math", "code", "chat"), n // 3)
    assert [p.turns for p in load_prompts("sample", 6)] == [p.turns for p in sample[:6]]
    own = [prompt.turns for prompt in load_prompts("sample_math")]
    assert own == [prompt.turns for prompt, kind in zip(sample, kinds) if kind == "math"] and len(own) >= 12


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, named",
    [
        (b'{"question": "a"}\n{"question": \n', "gsm8k.jsonl, line 2: not valid JSON"),
        (b'{"question": "a"}\n\n\xff\xfe\n', "gsm8k.jsonl, line 3: not valid JSON"),
        (b'{"question": "a"}\n[1]\n', "gsm8k.jsonl, line 2: a record must be a JSON object"),
        (b'{"question": "a"}\n\n{"text": "b"}\n', "gsm8k.jsonl, line 3: not a record of gsm8k; field 'question'"),
        (b'{"question": 3}\n', "gsm8k.jsonl, line 1: not a record of gsm8k"),
        (b'{"question": null}\n', "gsm8k.jsonl, line 1: not a record of gsm8k"),
        (b"", "gsm8k.jsonl: the file holds no records"),
        (b"\n\n", "gsm8k.jsonl: the file holds no records"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, content, named):
    (tmp_path / "gsm8k.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=named):
        load_prompts("gsm8k", data_dir=str(tmp_path))


@pytest.mark.parametrize("turns", [[], [""], ["a", 3], "text"])
def test_turns_that_are_no_text_are_refused(tmp_path, turns):
    with pytest.raises(ValueError, match="mt_bench.jsonl, line 1: .*turns"):
        load_prompts("mt_bench", data_dir=write(tmp_path, "mt_bench", {"prompt": turns}))


def test_other_bad_input_names_the_setting(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="bench=gsm9k: unknown set; known are gsm8k, .*sample_math, train"):
        load_prompts("gsm9k")
    for samples in (0, -1):
        with pytest.raises(ValueError, match=f"samples={samples}: must be at least 1"):
            load_prompts("sample", samples)
    with pytest.raises(FileNotFoundError, match="mbpp.jsonl: no such file; data_dir must hold"):
        load_prompts("mbpp", data_dir=str(tmp_path))
    for flag in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(flag, True)
    for name in ("math500", "livecodebench"):
        with pytest.raises(
            OSError, match=f"bench={name}: .*could not be read from the hub.*data_dir=<folder with {name}"
        ):
            load_prompts(name)


def test_a_target_without_a_chat_template_is_refused():
    with pytest.raises(ValueError, match="no chat template"):
        render(byte_tokenizer(template=None), [{"role": "user", "content": "Hello"}])


# --- rendering ------------------------------------------------------------------------------------------------------


def test_render_gives_the_templates_text_and_nothing_more():
    """No second begin-of-text beside the one that the template writes; the generation prompt is there."""
    tokenizer = byte_tokenizer()
    text = "<s>user: Hello</s><s>assistant: "
    assert tokenizer.decode(render(tokenizer, [{"role": "user", "content": "Hello"}], thinking=True)) == text
    assert tokenizer.decode(render(tokenizer, [{"role": "user", "content": "Hello"}])) == text + "<think></think>"


@pytest.mark.parametrize("thinking", [False, True])
def test_evaluation_prompts_are_prefixes_of_the_training_rows(tmp_path, monkeypatch, thinking):
    target, seen = make_target(), []
    prompts = load_prompts("train", 3)
    generate_data(target, prompts, tmp_path, max_new_tokens=3, thinking=thinking)
    rows = load_rows(tmp_path)

    def record(target, prompts, method, **settings):
        seen.extend(prompts)
        return [(Response([0]), Counts.of(Response([0]))) for _ in prompts]

    monkeypatch.setattr(module, "respond", record)
    assert len(list(evaluate(target, [Method("ar")], prompts, max_new_tokens=3, thinking=thinking))) == 3
    assert {tuple(ids) for ids in seen} == {tuple(row.prompt_ids) for row in rows}


def test_another_template_or_flag_than_in_training_is_told():
    """A drafter trained without thinking and measured with it looks like a bad drafter."""
    tokenizer = byte_tokenizer()
    trained = {"template": template_facts(tokenizer, False)}
    assert template_change(byte_tokenizer(), False, trained) is None
    assert template_change(tokenizer, True, {}) is None  # a published drafter says nothing of it
    assert re.search(
        "rendered otherwise .*enable_thinking: trained with False, now True", template_change(tokenizer, True, trained)
    )
    other = byte_tokenizer(TEMPLATE.replace("assistant", "model"))
    assert re.search("template_sha256.*rendered_sha256", template_change(other, False, trained))


# --- stop tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "listed, eos, expected",
    [(7, 2, (2, 7)), ([9, 7, 2], 2, (2, 7, 9)), ((5,), None, (5,)), (None, 2, (2,)), (None, None, ()), (0, 0, (0,))],
)
def test_stop_ids_are_the_tokenizers_and_the_generation_configs(listed, eos, expected):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=listed))
    assert stop_ids(SimpleNamespace(eos_token_id=eos), model) == expected
    assert stop_ids(SimpleNamespace(eos_token_id=eos)) == (() if eos is None else (eos,))
