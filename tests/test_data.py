"""Training rows: the target's own greedy answers, written once, read back as exactly the ids that it generated."""

import json

import pytest
import torch
from toys import ToyTokenizer, V, make_target, plain

from xpress import data
from xpress.anchors import PADDING
from xpress.data import Row, check_made_for, collate, frequent_ids, generate_data, load_rows, row_id, shards
from xpress.prompts import Prompt, render, stop_ids, user

TEXTS = [
    "Hi",
    "Add two numbers, please.",
    "Why?",
    "Name a colour",
    "A much longer question, with more words in it",
    "No",
]
PROMPTS = [Prompt(f"toy/{i}", "toy", [text]) for i, text in enumerate(TEXTS)]


def stopping_target(*stops, **changes):
    """A toy whose answers end: `stops` are its end-of-text ids, the first one the tokenizer's and its pad too."""
    target = make_target(**changes)
    target.tokenizer = ToyTokenizer()
    target.tokenizer.eos_token_id = target.tokenizer.pad_token_id = stops[0] if stops else None
    target.model.generation_config.eos_token_id = list(stops) or None
    return target


@pytest.fixture(scope="module")
def often():
    """Two ids that the toy's answers to PROMPTS run into, the second one at different places."""
    target = stopping_target()
    answers = [plain(target, render(target.tokenizer, user([text])), 12) for text in TEXTS]
    return answers[0][4], answers[1][7]


def read(folder) -> dict[str, dict]:
    return {row["id"]: row for path in shards(folder) for row in map(json.loads, path.read_text().splitlines())}


# --- generating -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4, 32])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_answers_are_those_of_plain_autoregression_whatever_the_padding(tmp_path, often, kind, batch_size):
    target = stopping_target(*often, kind=kind)
    counts = generate_data(target, PROMPTS, tmp_path, max_new_tokens=12, batch_size=batch_size)
    rows = read(tmp_path)
    for prompt in PROMPTS:
        row = rows.pop(row_id(prompt))
        assert row["prompt_ids"] == render(target.tokenizer, user(prompt.turns))
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
    answered, answer = [], data._answer

    def counting(target, prompts, *rest):
        answered.extend(map(tuple, prompts))
        return answer(target, prompts, *rest)

    def interrupt(done, total):
        if done == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(data, "_answer", counting)
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


# --- reading and batching -------------------------------------------------------------------------------------------


def test_the_stop_token_is_supervised_even_where_it_is_pad(tmp_path, often):
    """Masks come from what was generated, never from `ids != pad`: with pad = eos that would lose every ending."""
    target = stopping_target(*often)
    generate_data(target, PROMPTS, tmp_path, max_new_tokens=12)
    rows = load_rows(tmp_path)
    stopped = [row for row in rows if row.response_ids[-1] in stop_ids(target.tokenizer, target.model)]
    assert stopped
    batch = collate(rows, 512)
    for i, row in enumerate(rows):
        assert batch.ids[i][batch.supervised[i]].tolist() == row.response_ids
        assert batch.ids[i][batch.documents[i] != PADDING].tolist() == row.prompt_ids + row.response_ids
        assert batch.supervised[i].nonzero()[0, 0] == len(row.prompt_ids)


@pytest.mark.parametrize("max_length", [1, 4, 5, 7, 100])
def test_collate_cuts_and_pads_on_the_right(max_length):
    rows = [Row("a", [5, 6, 7, 8], [2, 9, 2]), Row("b", [4], [3])]
    batch = collate(rows, max_length)
    assert batch.row_ids == ["a", "b"]
    for i, row in enumerate(rows):
        ids = (row.prompt_ids + row.response_ids)[:max_length]
        pad = batch.ids.shape[1] - len(ids)
        assert batch.ids[i].tolist() == ids + [0] * pad and batch.positions[i].tolist() == list(range(len(ids) + pad))
        assert batch.documents[i].tolist() == [0] * len(ids) + [PADDING] * pad
        assert batch.supervised[i].tolist() == [j >= len(row.prompt_ids) for j in range(len(ids))] + [False] * pad


GOOD = {"id": "g", "prompt_ids": [1, 2], "response_ids": [3, 4]}


def test_rows_of_files_folders_and_prompt_texts(tmp_path):
    file = tmp_path / "shard-a.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in (GOOD, {"prompt": "Hi", "response_ids": [3]}, GOOD | {"id": 7})))
    tokenizer = ToyTokenizer()
    for path in (tmp_path, file):
        rows = load_rows(path, tokenizer, vocab_size=V)
        assert [row.id for row in rows] == ["g", "shard-a.jsonl:2", "7"]
        assert rows[1].prompt_ids == render(tokenizer, user(["Hi"])) and rows[0] == Row("g", [1, 2], [3, 4])
        assert load_rows(path, tokenizer, limit=2) == rows[:2]
    (tmp_path / "shard-b.jsonl").write_text(json.dumps(GOOD | {"response_ids": []}))
    assert len(load_rows(tmp_path, tokenizer)) == 3


@pytest.mark.parametrize(
    "record, named",
    [
        ({"prompt_ids": [1]}, "record 2: response_ids must be a list of token ids"),
        ({"response_ids": [1]}, "record 2: prompt_ids must be"),
        ({"prompt": "Hi", "response_ids": "there"}, "record 2: (prompt|response)_ids must be"),
        (GOOD | {"response_ids": [1.5]}, "record 2: response_ids must be"),
        (GOOD | {"prompt_ids": [[1]]}, "record 2: prompt_ids must be"),
        (GOOD | {"response_ids": [3, V]}, f"record 2: response_ids holds {V}, which is no row .*{V} rows"),
        (GOOD | {"prompt_ids": [-1]}, "record 2: prompt_ids holds -1"),
        ("{", "line 2: not valid JSON"),
    ],
)
def test_a_bad_row_is_named_with_file_and_record(tmp_path, record, named):
    second = record if isinstance(record, str) else json.dumps(record)
    (tmp_path / "shard-a.jsonl").write_text(json.dumps(GOOD) + "\n" + second + "\n")
    with pytest.raises(ValueError, match=f"shard-a.jsonl, {named}"):
        load_rows(tmp_path, vocab_size=V)


def test_no_rows_at_all_name_the_setting_and_the_remedy(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            FileNotFoundError, match="data.path=.*: no rows there; make them with scripts/generate_data"
        ):
            load_rows(path)
    (tmp_path / "shard-a.jsonl").write_text(json.dumps(GOOD | {"response_ids": []}))
    with pytest.raises(ValueError, match="data.path=.*: no usable row"):
        load_rows(tmp_path)


def test_frequent_ids_are_ascending_with_ties_to_the_lower_id():
    rows = [Row("a", [9, 9, 7], [9, 5, 5]), Row("b", [3], [5, 9, 2])]  # 9 ×4, 5 ×3, then 2, 3, 7 once each
    assert [frequent_ids(rows, n, 12) for n in (1, 2, 3, 4)] == [[9], [5, 9], [2, 5, 9], [2, 3, 5, 9]]
    assert frequent_ids(rows, 2, 12, always=[11]) == [9, 11] and frequent_ids(rows, 12, 12) == list(range(12))
    for size in (0, 13):
        with pytest.raises(ValueError, match=f"draft_vocab_size={size}: must lie between 1 and .*12"):
            frequent_ids(rows, size, 12)


def test_rows_of_another_target_or_template_are_refused(tmp_path):
    """Answers of other weights are no answers of this target; rows from elsewhere say nothing of how they were made."""
    target = make_target()
    check_made_for(tmp_path, target, False)
    generate_data(target, PROMPTS[:1], tmp_path, max_new_tokens=2)
    check_made_for(tmp_path, target, False)
    with pytest.raises(ValueError, match="data.path=.*weights are not those of"):
        check_made_for(tmp_path, make_target(seed=1), False)
    with pytest.raises(ValueError, match="data.path=.*template or thinking flag"):
        check_made_for(tmp_path, target, True)


def test_empty_answers_cost_no_other_row(tmp_path, monkeypatch):
    """A prompt whose answer is empty is asked again on resume, and the shard that it once opened keeps its rows."""
    target, empty = make_target(), [True]
    true_answers = data._answer

    def answers(target, prompts, *rest):
        found = true_answers(target, prompts, *rest)
        return [[], *found[1:]] if empty[0] else found

    monkeypatch.setattr(data, "_answer", answers)
    settings = {"max_new_tokens": 3, "batch_size": 3}
    assert generate_data(target, PROMPTS, tmp_path, **settings)["empty"] == 2
    before = read(tmp_path)
    assert len(before) == len(PROMPTS) - 2
    assert generate_data(target, PROMPTS, tmp_path, **settings)["empty"] == 1  # a batch of two: one empty again
    assert before.items() <= read(tmp_path).items()
    empty[0] = False
    generate_data(target, PROMPTS, tmp_path, **settings)
    assert before.items() <= read(tmp_path).items() and len(load_rows(tmp_path)) == len(PROMPTS)
    monkeypatch.setattr(data, "_answer", lambda target, prompts, *rest: [[]] * len(prompts))
    for _ in range(2):
        assert generate_data(target, PROMPTS, tmp_path / "none", **settings)["empty"] == len(PROMPTS)
