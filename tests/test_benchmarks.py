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

import measure  # noqa: E402
import readout_argmax  # noqa: E402
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


def test_interleaved_calls_share_the_sets_fairly():
    met, count = {"a": [], "b": [], "c": []}, measure.count_sets(3, 3)
    assert count == 4
    following = measure.rotating(range(count), 3)
    calls = {name: (lambda seen=seen: seen.append(following())) for name, seen in met.items()}
    seconds = measure.interleaved(calls, 20, warm=2)
    assert {name: len(spent) for name, spent in seconds.items()} == dict.fromkeys("abc", 20)
    assert all(len(seen) == 22 and set(seen) == set(range(count)) for seen in met.values())
    with pytest.raises(ValueError, match="take 4 sets"):
        measure.rotating(range(3), 3)
    with pytest.raises(ValueError, match="repeats=0"):
        measure.interleaved(calls, 0)


def test_readout_argmax_compares_and_counts(tmp_path, capsys):
    sizes = "--sizes 700 --ranks 16 --rows 3 --repeats 2 --json".split()
    assert readout_argmax.main([*sizes, str(tmp_path / "out.json")]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "out.json").read_text()) == found and found["agree"]
    rows = {row["method"]: row for row in found["rows"]}
    assert rows.keys() == {"plain", "ours", "int8", "int4"}
    assert rows["plain"]["bytes"] == rows["ours"]["bytes"] == 4 * (700 * 16 + 3 * 700)
    assert rows["int8"]["ids_rechecked"] >= 3 and rows["int4"]["bytes"] > 4 * 3 * 700
    for row in rows.values():
        assert len(row["all_seconds"]) == 2 and row["floor"] > 0 and row["ids_differ"] == 0


def test_a_screen_that_is_wrong_shows():
    parts = readout_argmax.inputs(300, 16, 5, torch.float32, "cpu", 0)
    methods = {"ours": lambda base, latent, weight, _: readout_argmax.plain(base, latent, weight)}
    methods |= {"int8": lambda base, *_: base.argmax(-1), "plain": lambda *_: torch.zeros(1, 5, dtype=torch.long)}
    changed = int((readout_argmax.plain(*parts) != parts[0].argmax(-1)).sum())
    assert changed and readout_argmax.compare(methods, (*parts, None), "float32") == {
        "ours": 0,
        "int8": changed,
        "plain": 5,
    }


def test_settings_of_readout_argmax_are_named(capsys):
    for wrong, name in (
        (["--device", "tpu"], "--device"),
        (["--ranks", "3"], "--ranks"),
        (["--repeats", "0"], "--repeats"),
        (["--json", "/nowhere/out.json"], "--json"),
    ):
        with pytest.raises(SystemExit):
            readout_argmax.main(wrong)
        assert name in capsys.readouterr().err
