"""Prompts from anywhere: one strange record costs itself alone, and is counted by its reason."""

import json
from collections import Counter

import pytest

from xpress.conversations import FIELDS, load_conversations
from xpress.data import row_id


def said(*turns, role="role", content="content"):
    return {"messages": [{role: who, content: what} for who, what in turns]}


HI = ("user", "Hi")
USED = {
    "plain": (said(HI, ("assistant", "Hello")), ["Hi"], ""),
    "only user": (said(HI), ["Hi"], ""),
    "two turns": (said(HI, ("assistant", "Hello"), ("user", "Why?")), ["Hi", "Why?"], ""),
    "system in front": (said(("system", "Be kind."), HI), ["Hi"], "Be kind."),
    "two system turns": (said(("system", "A"), ("developer", "B"), HI), ["Hi"], "A\n\nB"),
    "system without text": (said(("system", None), HI), ["Hi"], ""),
    "empty assistant": (said(HI, ("assistant", ""), ("user", "So?")), ["Hi", "So?"], ""),
    "assistant None": (said(HI, ("assistant", None)), ["Hi"], ""),
    "two assistants": (said(HI, ("assistant", "a"), ("assistant", "b"), ("user", "c")), ["Hi", "c"], ""),
    "text parts": (said(("user", [{"type": "text", "text": "H"}, "i"])), ["Hi"], ""),
    "ShareGPT": (
        {"conversations": said(("human", "Hi"), ("gpt", "x"), role="from", content="value")["messages"]},
        ["Hi"],
        "",
    ),
    "prompt of messages": ({"prompt": said(HI)["messages"]}, ["Hi"], ""),
    "prompt of turns": ({"prompt": ["Hi", "Why?"], "reference": []}, ["Hi", "Why?"], ""),
    "instruction, empty input": ({"instruction": "Add", "input": "", "output": "3"}, ["Add"], ""),
    "instruction and input": ({"instruction": "Add", "input": "1 2"}, ["Add\n\nInput:\n1 2"], ""),
    "instruction and context": ({"instruction": "Add", "context": "1 2"}, ["Add\n\nInput:\n1 2"], ""),
    "seed task": ({"instruction": "Add", "instances": [{"input": "1 2", "output": "3"}]}, ["Add\n\nInput:\n1 2"], ""),
    **{name: ({name: "Hi", "answer": "x"}, ["Hi"], "") for name in FIELDS},
}
SKIPPED = {
    "no list": ({"messages": "Hi"}, "messages that are no list of objects"),
    "texts": ({"messages": ["Hi"]}, "messages that are no list of objects"),
    "nothing": ({"messages": []}, "no messages"),
    "only system": (said(("system", "x")), "no user turn"),
    "only assistant": (said(("assistant", "x")), "no user turn"),
    "assistant first": (said(("assistant", "x"), HI), "the assistant speaks first"),
    "user None": (said(("user", None)), "a user turn without content"),
    "user blank": (said(("user", " \n")), "an empty user turn"),
    "no role": ({"messages": [{"content": "Hi"}]}, "a message without a role"),
    "tool": (said(HI, ("tool", "x")), "a message of an unknown role"),
    "odd role": (said((["user"], "Hi")), "a message of an unknown role"),
    "late system": (said(HI, ("system", "x")), "a system turn in the middle"),
    "two users": (said(HI, HI), "two user turns in a row"),
    "image": (said(("user", [{"type": "image_url", "image_url": "x"}])), "content that is not text alone"),
    "number": (said(("user", 7)), "content that is not text alone"),
    "foreign": ({"id": 1}, "neither messages nor a prompt field"),
    "blank prompt": ({"question": ""}, "an empty prompt"),
    "prompt number": ({"prompt": 3}, "a prompt that is not text"),
    "no JSON": ('{"messages": [', "a line that is not JSON"),
    "a list": ("[]", "a line that is no JSON object"),
}


def write(path, *records):
    path.write_text("\n\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return path


@pytest.mark.parametrize("kind", USED)
def test_a_usable_record(tmp_path, kind):
    record, turns, system = USED[kind]
    skipped = Counter()
    [prompt] = load_conversations(write(tmp_path / "my set.jsonl", record), skipped=skipped)
    assert (prompt.turns, prompt.system, prompt.source, skipped) == (turns, system, "my_set", {})
    assert row_id(prompt).startswith("my_set-")


def test_the_strange_ones_are_counted_and_the_good_ones_used(tmp_path):
    write(tmp_path / "a.jsonl", *(record for record, _ in SKIPPED.values()), USED["plain"][0])
    write(tmp_path / "b.jsonl", *(record for record, _ in SKIPPED.values()), USED["two turns"][0])
    (tmp_path / "notes.txt").write_text("mine")
    skipped = Counter()
    found = load_conversations(tmp_path, skipped=skipped)
    assert [(p.source, p.turns) for p in found] == [("a", ["Hi"]), ("b", ["Hi", "Why?"])]
    expected = Counter(reason for _, reason in SKIPPED.values())
    assert skipped == {reason: 2 * n for reason, n in expected.items()}


@pytest.mark.parametrize("kind", SKIPPED)
def test_a_file_without_a_usable_record_is_an_error_that_says_why(tmp_path, kind):
    record, reason = SKIPPED[kind]
    with pytest.raises(ValueError, match=f"prompts=.*odd.jsonl: no usable record .1× {reason}"):
        load_conversations(write(tmp_path / "odd.jsonl", record))


def test_a_sample_is_the_same_each_time_and_not_the_first_ones(tmp_path):
    path = write(tmp_path / "many.jsonl", *({"prompt": f"Question {i}"} for i in range(50)))
    one, two = load_conversations(path, 10), load_conversations(path, 10)
    assert one == two != load_conversations(path)[:10] and len({p.id for p in one}) == 10
    with pytest.raises(ValueError, match="samples=0"):
        load_conversations(path, 0)
    with pytest.raises(FileNotFoundError, match="prompts=.*no such file, and no folder with .jsonl"):
        load_conversations(tmp_path / "nowhere")
