"""Experiment trackers: the facts of each step as curves in wandb or TensorBoard. None of them ever stops a run.

A run keeps one id for life (`tracker.json` in its folder), so that a resumed run goes on with the curve it began.
"""

from __future__ import annotations

import importlib.util
import json
import os
import uuid
import warnings
from numbers import Real
from pathlib import Path

from xpress.files import write_json

KINDS, MODES = ("wandb", "tensorboard"), ("offline", "online")
RUN_ID = "tracker.json"
INIT_SECONDS, FINISH_SECONDS = 20.0, 120.0  # the longest waits for a server


def check(kind: str | None, mode: str | None = None) -> None:
    """Raises ValueError for an unknown kind or wandb mode and for a package that is missing; loads none of them."""
    if kind not in (None, False, *KINDS):
        raise ValueError(f"tracker={kind}: known are null, {' and '.join(KINDS)}")
    if mode not in (None, *MODES):
        raise ValueError(f"wandb_mode={mode}: known are null, {' and '.join(MODES)}")
    if kind and importlib.util.find_spec(kind) is None:
        extra = " (the extra of that name: pip install -e '.[tensorboard]')" if kind == "tensorboard" else ""
        raise ValueError(f"tracker={kind}: the package {kind} is not installed{extra}; or leave out tracker=")


def tracker(kind, out, config: dict, run_id=None, name=None, mode=None) -> Tracker:
    """Start tracking a run that writes into the folder `out`.

    kind: None, "wandb" or "tensorboard". config: the run's settings, a plain dict. run_id: wandb's id of the run; None:
    the one that `out` keeps, else a new one. mode: "offline" or "online"; None: what WANDB_MODE says, else online.
    Raises ValueError as `check` does; a server that cannot be reached gives a warning and an offline run.
    """
    check(kind, mode)
    if not kind:
        return Tracker()
    Path(out).mkdir(parents=True, exist_ok=True)
    return (Wandb if kind == "wandb" else TensorBoard)(Path(out), config, run_id, name, mode)


def numbers(facts: dict) -> dict:
    """The entries that are numbers, as they are named."""
    return {key: value for key, value in facts.items() if isinstance(value, Real) and not isinstance(value, bool)}


class Tracker:
    """Tracks nothing. Others write in `_write` and close in `_close`; what fails there is told once, then forgotten."""

    run_id: str | None = None
    _warned = False

    def log(self, facts: dict, step: int) -> None:
        """One step's facts; only numbers are kept."""
        self._try(self._write, numbers(facts), step)

    def finish(self) -> None:
        self._try(self._close)

    def _write(self, facts: dict, step: int) -> None:
        pass

    def _close(self) -> None:
        pass

    def _try(self, act, *args) -> None:
        try:
            act(*args)
        except Exception as error:  # a tracker's library can raise anything, and training is worth more than a curve
            if not self._warned:
                self._warned = True
                _warn(
                    f"{type(self).__name__} failed ({_short(error)}); the run goes on, metrics.jsonl has every number"
                )


class Wandb(Tracker):
    """wandb; its files lie in `out`/wandb. Where init fails the run is tracked offline, under the same id."""

    def __init__(self, out: Path, config: dict, run_id, name, mode):
        self.run_id, self.run = run_id or _kept_id(out) or uuid.uuid4().hex, None
        write_json(out / RUN_ID, {"run_id": self.run_id})
        mode = mode or os.environ.get("WANDB_MODE") or "online"
        try:
            self.run = self._init(out, config, name, mode)
        except Exception as error:  # CommError, UsageError, AuthenticationError, ServerResponseError, …
            reason = _short(error)
            try:
                if mode != "offline":
                    self._forget()
                    self.run = self._init(out, config, name, "offline")
            except Exception as second:
                reason = f"{reason}; offline: {_short(second)}"
            if self.run is None:
                _warn(f"wandb cannot start ({reason}); the run goes on without it")
            else:
                _warn(
                    f"wandb cannot track this run online ({reason}); it is tracked offline. Send it later with: "
                    f"wandb sync {self.run.settings.sync_dir}"
                )

    def _init(self, out, config, name, mode):
        import wandb

        limits = {"init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS}
        known = {key: value for key, value in limits.items() if key in wandb.Settings.model_fields}
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "xpress"),
            dir=str(out),
            config=config,
            id=self.run_id,
            name=name,
            mode=mode,
            # Offline there is no server to ask for the old run: wandb would only warn that it cannot resume.
            resume=None if mode == "offline" else "allow",
            settings=wandb.Settings(**known),
        )

    @staticmethod
    def _forget():
        """wandb's service holds the id of an init that failed, and would refuse it to the next."""
        import wandb

        if wandb.run is None:
            wandb.teardown()

    def _write(self, facts, step):
        if self.run is not None:
            self.run.log(facts, step=step)

    def _close(self):
        if self.run is not None:
            self.run.finish()


class TensorBoard(Tracker):
    """TensorBoard; its files lie in `out`/tensorboard."""

    def __init__(self, out: Path, config: dict, run_id, name, mode):
        self.folder, self.config, self.writer = out / "tensorboard", config, None

    def _write(self, facts, step):
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # What a killed run logged beyond the state that it resumes from is dropped from the curves.
            self.writer = SummaryWriter(str(self.folder), purge_step=step)
            text = json.dumps(self.config, indent=2, default=str)
            self.writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), step)
        for key, value in facts.items():
            if key != "step":
                self.writer.add_scalar(key, float(value), step)

    def _close(self):
        if self.writer is not None:
            self.writer.close()


def _kept_id(out: Path) -> str | None:
    try:
        return json.loads((out / RUN_ID).read_text())["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)
