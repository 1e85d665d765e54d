"""The benchmarks run, on toy sizes: what they compare is equal, and what they lack is said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "train_step.py"
sys.path.insert(0, str(SCRIPT.parent))

import train_step  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small run in an environment without speculators -> lines on stdout, the file of --json."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "speculators.py").write_text('raise ModuleNotFoundError("no speculators here")\n')
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    sizes = "--blocks 3 --block-sizes 4 --repeats 2 --vocab 64 --json".split()
    command = [sys.executable, str(SCRIPT), *sizes, str(folder / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines(), folder / "out.json"


def test_ours_and_the_plain_loss_take_the_same_step(run):
    lines, file = run
    found = json.loads(lines[-1])
    assert json.loads(file.read_text()) == found and found["agree"]
    ours, plain = found["rows"]
    assert [ours["competitor"], plain["competitor"]] == ["ours", "plain"]
    for row in (ours, plain):
        assert row["anchors"] == row["blocks"] == 3 and row["same_anchors"] and row["peak_bytes"] > 0
        assert len(row["all_seconds"]) == 2 and row["parameters"] == ours["parameters"]
    # fp32, another order of summation: 1e-6 was seen
    assert plain["loss"] == pytest.approx(ours["loss"], rel=1e-5) and plain["gradient_gap"] < 1e-4
    assert [one["step_bytes"] for one in found["loss_alone"]] == [ours["peak_bytes"]]


def test_absent_speculators_are_skipped_with_a_message(run):
    text = "\n".join(run[0][:-1])
    assert "speculators: skipped" in text and "no speculators here" in text and "--speculators-python" in text
    assert json.loads(run[0][-1])["protocol"]["versions"].keys() == {"ours"}


def test_other_gradients_show():
    ours = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}
    assert train_step.gradient_gap(ours, dict(ours)) == 0
    assert train_step.gradient_gap(ours, {**ours, "a": torch.tensor([3.0, 4.5])}) == pytest.approx(0.1)
    assert train_step.gradient_gap(ours, {**ours, "b": torch.ones(2)}) > 1
    with pytest.raises(ValueError, match="other weights"):
        train_step.gradient_gap(ours, {"a": ours["a"]})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--blocks 505", "--blocks 505: must be within 1 … 496"),
        ("--vocab 9", "--vocab 9: must be within"),
        ("--repeats 0", "--repeats 0: must be within"),
        ("--json nowhere/out.json", "--json nowhere/out.json: no folder"),
        ("--speculators-python nowhere/python", "no such program"),
    ],
)
def test_bad_settings_are_named_before_any_work(arguments, message, capsys):
    with pytest.raises(SystemExit):
        train_step.main(arguments.split())
    assert message in capsys.readouterr().err


def test_a_competitor_that_dies_is_a_row_not_a_crash():
    with train_step.Worker("ours", sys.executable, blocks=1, block_size=2, vocab=64, threads=1) as worker:
        worker.process.kill()
        assert worker.ask("versions") == {} and "killed" in worker.failed and not worker.missing
        assert worker.ask("step") == {}
