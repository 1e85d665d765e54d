"""Training rows: read back as exactly the ids that the target generated, or dropped with a reason."""

import hashlib
import json
from collections import Counter

import pytest
from toys import PROMPTS, ToyTokenizer, V, make_target, stopping_target

from xpress.anchors import PADDING, candidates
from xpress.batches import collate
from xpress.data import Row, check_made_for, frequent_ids, load_rows, row_id
from xpress.generation import generate_data
from xpress.prompts import Prompt, conversation, render, stop_ids, template_facts


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
    assert batch.row_ids == [("a",), ("b",)]
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
        assert rows[1].prompt_ids == render(tokenizer, conversation(Prompt("x", "x", ["Hi"]), [])) and rows[0] == Row(
            "g", [1, 2], [3, 4]
        )
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


def test_unusable_rows_are_dropped_with_counted_reasons(tmp_path):
    rows = {
        "good": ([1, 2], [3, 4]),
        "no prompt": ([], [3, 4]),
        "no answer": ([1, 2], []),
        "one token": ([1, 2], [3]),
        "just fits": ([1] * 6, [3, 4, 5]),
        "one too long": ([1] * 7, [3, 4, 5]),
        "cut away": ([1] * 9, [3, 4]),
    }
    lines = (json.dumps({"id": k, "prompt_ids": p, "response_ids": r}) for k, (p, r) in rows.items())
    (tmp_path / "shard-a.jsonl").write_text("\n".join(lines))
    skipped = Counter()
    found = load_rows(tmp_path, max_length=8, skipped=skipped)
    assert [row.id for row in found] == ["good", "just fits"]
    assert skipped == {
        "empty prompt": 1,
        "empty answer": 1,
        "answer of one token: no block": 1,
        "answer cut away by max_length": 2,
    }
    for row in found:  # what is kept can open a block
        assert candidates(collate([row], 8)).any()
    skipped = Counter()
    assert len(load_rows(tmp_path, skipped=skipped)) == 5 and skipped == {"empty prompt": 1, "empty answer": 1}
    with pytest.raises(ValueError, match="no usable row .*2× answer cut away by max_length"):
        (tmp_path / "shard-a.jsonl").write_text(
            "\n".join([json.dumps({"prompt_ids": [1] * 9, "response_ids": [3, 4]})] * 2)
        )
        load_rows(tmp_path, max_length=8)


def test_rows_that_a_server_answered_are_held_to_the_template_alone(tmp_path):
    """Its weights were not seen, so no fingerprint can be compared; the prompts were rendered here all the same."""
    target = make_target()
    made = {"target": {"name": "toy", "fingerprint": None}, "template": template_facts(target.tokenizer, False)}
    (tmp_path / "settings.json").write_text(json.dumps(made))
    check_made_for(tmp_path, target, False)
    with pytest.raises(ValueError, match="data.path=.*template or thinking flag"):
        check_made_for(tmp_path, target, True)


def test_row_ids_of_first_turns_are_those_of_single_prompts():
    """Folders that were made before conversations had several turns go on being resumed."""
    one, two = Prompt("a", "toy", ["Hi"]), Prompt("b", "toy", ["Hi", "And?"])
    assert row_id(one) == row_id(two) == "toy-" + hashlib.blake2b(b"Hi", digest_size=8).hexdigest()
    assert row_id(two, 1).endswith("#2") and row_id(two, 1) != row_id(Prompt("c", "toy", ["Hi", "Why?"]), 1)
    assert row_id(Prompt("d", "toy", ["Hi"], "Be brief.")) != row_id(one)
