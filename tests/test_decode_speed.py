"""The decoding benchmark on toy sizes: imposed acceptance is what was stated, and what is lacking is said."""

import json
import sys
from pathlib import Path

import pytest
import torch
from disk import fake_engine
from toys import make_drafter, make_head, make_target

from xpress.evaluate import Method

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import decode_speed  # noqa: E402

PROMPTS = [[5, 17, 44], [9, 8, 7, 6]]


def toy_methods(target):
    drafter = make_drafter(target, block_size=8)
    head = make_head("refiner", drafter)
    return {
        "ar": Method("ar"),
        "bare": Method("bare", "bare", drafter),
        "2": Method("2", "head", drafter, head, 2),
    }


@pytest.mark.parametrize("tau", [1.0, 2.4, 3.7, 8.0])
def test_the_stated_tau_is_the_one_that_is_run(target, tau):
    """To less than one token over all rounds; and only where it was stated."""
    rows = decode_speed.speeds(target, PROMPTS, toy_methods(target), {"bare": tau, "2": tau}, 41, 2)
    assert [row["method"] for row in rows] == ["ar", "bare", "2"]
    assert [row["imposed"] for row in rows] == [False, True, True]
    rounds = 2 * 2 * 40 / tau
    assert all(abs(row["tau"] - tau) * rounds <= 2 for row in rows[1:]) and rows[0]["tau"] is None
    assert [row.get("passes") for row in rows] == [None, 0, 2]
    real = decode_speed.speeds(target, PROMPTS, toy_methods(target), {}, 41, 1)
    assert not any(row["imposed"] for row in real) and all(row["tau"] < 2 for row in real[1:])  # decode.py's own again
    for row in rows:
        assert row["tokens_per_second"] > 0 and row["ms_per_round"]["verify"] > 0


def test_steps_time_both_loops_and_leave_no_token_behind(target):
    rows = decode_speed.steps(target, [1, 5], PROMPTS[0], 2)
    assert [row["tokens"] for row in rows] == [1, 5]
    assert all(row["ratio"] == row["plain"] / row["lean"] > 0 for row in rows)


def test_random_weights_have_the_sizes_of_the_settings():
    changes = dict(num_hidden_layers=9, vocab_size=50, hidden_size=24, intermediate_size=20)
    target = decode_speed.random_target("qwen3_8b", torch.bfloat16, "cpu", **changes, head_dim=4)
    assert target.loop == "lean" and target.dtype == torch.bfloat16 and target.config.num_key_value_heads == 8
    drafter, head = decode_speed.random_parts(target, "qwen3_8b", None)
    assert drafter.config.block_size == 16 and len(drafter.layers) == 5 and head.rank == 256
    assert len(set(drafter.layer_ids)) == 5
    assert decode_speed.random_parts(target, "smollm2_135m", 5)[0].config.block_size == 5


def test_an_engine_is_asked_for_the_same_prompts_and_one_that_fails_says_why(tmp_path):
    echo = 'asked = json.load(open(request)); json.dump({"per_token": [0.1, 0.3], "version": asked}, open(answer, "w"))'
    row = decode_speed.engine(fake_engine(tmp_path, echo), "folder", PROMPTS, 12, "bfloat16", 1)
    asked = {"model": "folder", "prompts": PROMPTS, "tokens": 12, "dtype": "bfloat16", "threads": 1, "ask": "seconds"}
    assert row["method"] == f"ar, vLLM {asked}" and row["tokens_per_second"] == pytest.approx(5)
    with pytest.raises(OSError, match="--engine-python .*no such model"):
        decode_speed.engine(fake_engine(tmp_path, 'sys.exit("no such model")'), "folder", PROMPTS, 12, "bfloat16", 1)


def test_the_program_prints_a_table_and_one_json_line(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decode_speed, "make_target", lambda args, dtype, device: (make_target(), None))
    monkeypatch.setattr(decode_speed, "load_prompts", lambda name, n: decode_speed_prompts(n))
    sizes = [
        "--tokens",
        "6",
        "--repeats",
        "1",
        "--prompts",
        "2",
        "--json",
        str(tmp_path / "out.json"),
        "--threads",
        "1",
    ]
    monkeypatch.setattr(decode_speed, "make_methods", lambda args, target: toy_methods(target))
    assert decode_speed.main([*sizes, "--passes", "2", "--tau", "bare=2", "2=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert json.loads((tmp_path / "out.json").read_text()) == found and "engine: skipped" in "\n".join(lines)
    assert found["protocol"]["loop"] == "lean" and [row["method"] for row in found["rows"]] == ["ar", "bare", "2"]
    assert any(line.startswith("bare ") and "*" in line for line in lines)
    assert decode_speed.main([*sizes[2:], "--steps"]) == 0
    assert [row["tokens"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]] == [1, 8]


def decode_speed_prompts(n):
    from toys import PROMPTS as texts

    return texts[:n]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "random drafters accept nothing: state --tau bare=… 1=… 4=… auto=…"),
        ("--tau bare=2 7=3", "--tau 7=…: no such method"),
        ("--tau bare", "write METHOD=NUMBER"),
        ("--passes best", "--passes best: give whole numbers"),
        ("--steps --tokens 1", "--tokens 1: must be at least 2"),
        ("--shape qwen3_8b --checkpoint here", "drop --target, --checkpoint"),
        ("--steps --engine-python nowhere/python", "no such program"),
        ("--steps --json nowhere/out.json", "no folder"),
    ],
)
def test_bad_settings_are_named_before_any_work(arguments, message, capsys):
    with pytest.raises(SystemExit):
        decode_speed.main(arguments.split())
    assert message in capsys.readouterr().err


def test_a_tau_that_a_block_cannot_reach_is_refused(monkeypatch):
    monkeypatch.setattr(decode_speed, "make_target", lambda args, dtype, device: (make_target(), None))
    monkeypatch.setattr(decode_speed, "random_parts", lambda target, *_: (make_drafter(target, block_size=8), None))
    with pytest.raises(SystemExit, match="with 7 draft tokens it lies within 1 … 8"):
        decode_speed.main("--passes 1 --tau bare=8.5 1=2".split())
