"""Trackers: what reaches them, ids that live as long as the run, and failures that stop nothing."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from xpress import track
from xpress.track import tracker

ROOT = Path(__file__).resolve().parents[1]
FACTS = {"step": 3, "loss/refined": 0.5, "eval/accept/head": [0.5, 0.2], "note": "x", "done": True, "lr": 1}


class FakeRun:
    def __init__(self, fails=False):
        self.logged, self.finished, self.fails = [], 0, fails

    def log(self, facts, step):
        if self.fails:
            raise OSError("disk full")
        self.logged.append((facts, step))

    def finish(self):
        self.finished += 1


@pytest.fixture
def fake(monkeypatch):
    """wandb.init without wandb: records what it was given, returns a FakeRun."""
    import wandb

    calls = []

    def init(**given):
        calls.append(given)
        return FakeRun()

    monkeypatch.setattr(wandb, "init", init)
    return calls


def test_no_tracker_does_nothing(tmp_path):
    for kind in (None, False):
        nothing = tracker(kind, tmp_path / "out", {})
        nothing.log(FACTS, 3)
        nothing.finish()
        assert nothing.run_id is None and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "kind, mode, named",
    [
        ("wandbb", None, "tracker=wandbb: known are null, wandb and tensorboard"),
        ("wandb", "on", "wandb_mode=on: known"),
    ],
)
def test_bad_settings_are_named(tmp_path, kind, mode, named):
    with pytest.raises(ValueError, match=named):
        tracker(kind, tmp_path, {}, mode=mode)


@pytest.mark.parametrize("kind", track.KINDS)
def test_a_missing_package_is_named_before_any_work(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(track.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"tracker={kind}: the package {kind} is not installed") as caught:
        track.check(kind)
    assert ("[tensorboard]" in str(caught.value)) == (kind == "tensorboard")


def test_only_numbers_are_logged_under_their_own_names(tmp_path, fake):
    one = tracker("wandb", tmp_path, {"lr": 1e-3}, name="first", mode="offline")
    one.log(FACTS, 3)
    one.finish()
    assert one.run.logged == [({"step": 3, "loss/refined": 0.5, "lr": 1}, 3)] and one.run.finished == 1
    assert fake[0]["config"] == {"lr": 1e-3} and fake[0]["name"] == "first" and fake[0]["dir"] == str(tmp_path)


def test_a_resumed_run_keeps_its_id_and_others_have_their_own(tmp_path, fake):
    first, again = (tracker("wandb", tmp_path / "a", {}, mode="online") for _ in range(2))
    others = [tracker("wandb", tmp_path / name, {}, mode="online") for name in "bcd"]
    given = tracker("wandb", tmp_path / "a", {}, run_id="mine", mode="online")
    assert first.run_id == again.run_id and len({first.run_id, *(other.run_id for other in others)}) == 4
    assert given.run_id == "mine" == tracker("wandb", tmp_path / "a", {}, mode="online").run_id
    assert [call["id"] for call in fake[:2]] == [first.run_id] * 2
    assert {call["resume"] for call in fake} == {"allow"}


@pytest.mark.parametrize("setting, variable, used", [("online", "offline", "online"), (None, "offline", "offline")])
def test_the_setting_wins_over_the_environment(tmp_path, fake, monkeypatch, setting, variable, used):
    monkeypatch.setenv("WANDB_MODE", variable)
    tracker("wandb", tmp_path, {}, mode=setting)
    monkeypatch.delenv("WANDB_MODE")
    tracker("wandb", tmp_path, {})
    assert [call["mode"] for call in fake] == [used, "online"]


def test_a_log_that_fails_is_told_once_and_the_run_goes_on(tmp_path, fake):
    one = tracker("wandb", tmp_path, {}, mode="offline")
    one.run.fails = True
    with pytest.warns(RuntimeWarning, match="OSError: disk full.*the run goes on") as told:
        for step in range(3):
            one.log(FACTS, step)
    assert len(told) == 1
    one.run.fails = False
    one.log(FACTS, 4)
    assert [step for _, step in one.run.logged] == [4]


def test_wandb_that_cannot_start_at_all_is_told_once(tmp_path, monkeypatch):
    import wandb

    def refuse(**given):
        raise OSError("no space")

    monkeypatch.setattr(wandb, "init", refuse)
    for mode in ("offline", "online"):
        with pytest.warns(RuntimeWarning, match="wandb cannot start .OSError: no space") as told:
            one = tracker("wandb", tmp_path, {}, mode=mode)
            one.log(FACTS, 1)
            one.finish()
        assert len(told) == 1 and one.run_id


PROGRAM = """
import sys
from xpress import track
track.INIT_SECONDS = 1.0
one = track.tracker("wandb", sys.argv[1], {"lr": 1})
one.log({"loss/refined": 0.5}, 1)
one.finish()
print("id", one.run_id, one.run.settings.mode)
"""


def real(folder, **variables) -> subprocess.CompletedProcess:
    """The real wandb in a process of its own, as it keeps state, without a terminal or a home with a login."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    env |= {
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "WANDB_SILENT": "true",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
    }
    command = [sys.executable, "-c", PROGRAM, str(folder / "out")]
    return subprocess.run(
        command, env=env | variables, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120
    )


@pytest.mark.parametrize(
    "variables, warned",
    [
        ({"WANDB_MODE": "offline"}, None),
        ({}, "UsageError"),  # no login, and no terminal to ask for one
        ({"WANDB_API_KEY": "a" * 40}, "CommError"),  # nobody listens at that address
    ],
    ids=["offline", "no login", "no server"],
)
def test_the_real_wandb_ends_offline_below_the_run_s_folder(tmp_path, variables, warned):
    done = real(tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    _, run_id, mode = next(line for line in done.stdout.splitlines() if line.startswith("id ")).split()
    folder = next((tmp_path / "out" / "wandb").glob(f"offline-run-*-{run_id}"))
    assert mode == "offline" and (folder / f"run-{run_id}.wandb").stat().st_size > 0
    assert done.stderr.count("RuntimeWarning") == (1 if warned else 0)
    assert not warned or (warned in done.stderr and f"wandb sync {folder}" in done.stderr)


def test_tensorboard_has_every_number_and_drops_what_a_killed_run_was_ahead(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, value in ((range(1, 6), 1.0), (range(4, 7), 2.0)):  # killed after step 5, resumed from the state of 3
        one = tracker("tensorboard", tmp_path, {"lr": 1e-3})
        for step in steps:
            one.log({**FACTS, "loss/refined": value}, step)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            one.finish()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"loss/refined", "lr"}
    points = [(point.step, point.value) for point in found.Scalars("loss/refined")]
    assert points == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
