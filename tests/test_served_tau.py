"""The comparison with a serving engine, on an engine that reads the written folder with our own loop."""

import json
import sys
from pathlib import Path

import pytest
from disk import fake_engine, saved_target
from toys import make_drafter, make_head

from xpress import checkpoint, generate, load
from xpress.prompts import stop_ids
from xpress.target import Target

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import served_tau  # noqa: E402

ENGINE = f"""
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import test_served_tau
json.dump(test_served_tau.answers_of(json.load(open(request))), open(answer, "w"))
"""


def answers_of(asked: dict) -> dict:
    """What an engine without a fault says: our own loop on the folder that it was given."""
    assert asked["ask"] == "rounds" and asked["speculative"]["method"] == "dflash" and not asked["mend"]
    target = Target.from_pretrained(asked["model"], asked["dtype"])
    found, answers = load(asked["speculative"]["model"], target, say=None), []
    assert found.head is None and found.format == "zlab"
    stops = stop_ids(target.tokenizer, target.model)
    for ids in asked["prompts"]:
        made = generate(target, ids, found.drafter, max_new_tokens=asked["tokens"], stop_ids=stops)
        answers.append({"ids": made.ids, "rounds": [len(step.tokens) for step in made.rounds]})
    return {"answers": answers, "counters": {"drafts": 10, "accepted_tokens": 5}, "version": "0"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint with a head and a target, on disk."""
    home = tmp_path_factory.mktemp("served")
    target, about = saved_target(home / "target")
    drafter = make_drafter(target)
    checkpoint.save(home / "made", drafter, make_head("refiner", drafter), about)
    return home / "made"


def run(trained, python: str, *more) -> int:
    how = ["--checkpoint", str(trained), "--engine-python", python, "--samples", "3", "--tokens", "9", "--threads", "1"]
    return served_tau.main([*how, *more])


def test_an_engine_that_reads_the_written_folder_as_we_do_has_our_tau(trained, tmp_path, capsys):
    assert run(trained, fake_engine(tmp_path, ENGINE), "--json", str(tmp_path / "out.json")) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads((tmp_path / "out.json").read_text())
    assert found["prompts"] == found["equal"] == found["equal_rounds"] == 3
    assert found["ours"] == found["engine"] >= 1 and found["counted"] == 1.5


def wide(answers):
    for made in answers:
        made["rounds"] = [n + 1 for n in made["rounds"]]


def other(answers):
    answers[0]["ids"][-1] += 1
    answers[0]["rounds"] = [9, 9]


def empty(answers):
    for made in answers:
        made["ids"] = []


@pytest.mark.parametrize("change, code, equal, more", [(wide, 1, 3, 1), (other, 0, 2, 0), (empty, 1, 0, None)])
def test_other_rounds_fail_and_other_answers_are_not_compared(trained, monkeypatch, capsys, change, code, equal, more):
    def engine(python, asked, echo):
        said = answers_of(asked)
        change(said["answers"])
        return said

    monkeypatch.setattr(served_tau.measure, "ask_engine", engine)
    assert run(trained, sys.executable) == code
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert found["equal"] == equal and found["equal_rounds"] == (0 if change is wide else equal)
    if more is None:
        assert "nothing is compared" in said.err
    else:
        assert found["engine"] == pytest.approx(found["ours"] + more)


def test_last_rounds_do_not_count():
    assert served_tau.tau([{"rounds": [3, 1, 9]}, {"rounds": [2, 9]}, {"rounds": []}]) == 2
    assert served_tau.tau([{"rounds": [4]}]) is None


@pytest.mark.parametrize(
    "arguments, error",
    [
        ("--engine-python nowhere", "no such program"),
        (f"--engine-python {sys.executable} --samples 0", "at least 1"),
        (f"--engine-python {sys.executable} --tokens 2", "at least 3"),
    ],
)
def test_bad_arguments_are_named(arguments, error, capsys):
    with pytest.raises(SystemExit):
        served_tau.read_arguments(["--checkpoint", "x", *arguments.split()])
    assert error in capsys.readouterr().err


def test_an_engine_that_fails_says_why(trained, tmp_path):
    with pytest.raises(SystemExit, match="no room here"):
        run(trained, fake_engine(tmp_path, "sys.exit('no room here')"))
