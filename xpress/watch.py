"""Where the time of a decoding loop goes, seen from outside: target and drafter are wrapped, the loop knows nothing.

draft     the drafter's parallel pass           readout  base logits of the block
refine    the head: seed, passes, choices       verify   the target's forward
harness   everything else in a round            probe    measurements that are no part of decoding, and never counted
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace

import torch


class Watch:
    """Laps of one response, by name. On a GPU laps are events in the stream, so that measuring waits for nothing."""

    def __init__(self, device):
        self.stream = torch.cuda.current_stream(device) if torch.device(device).type == "cuda" else None
        self.marks: list = []
        self._paused = False

    @contextmanager
    def paused(self):
        """Laps inside are not taken."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def lap(self, name: str):
        """Ends the lap that ran until now, under this name."""
        if self._paused:
            return
        if self.stream:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record(self.stream)
        else:
            mark = time.perf_counter()
        self.marks.append((name, mark))

    def start(self):
        """The clock starts here: what was before is not counted."""
        self.marks.clear()
        self.lap("start")

    def seconds(self) -> dict[str, float]:
        """Seconds by name since `start`."""
        if self.stream:
            self.stream.synchronize()
        spent: dict = defaultdict(float)
        for (_, before), (name, now) in zip(self.marks, self.marks[1:]):
            spent[name] += before.elapsed_time(now) / 1000 if self.stream else now - before
        return dict(spent)


class WatchedDrafter:
    """A drafter whose passes and base readouts are timed."""

    def __init__(self, drafter, watch: Watch):
        self._drafter, self._watch = drafter, watch

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def draft(self, context):
        self._watch.lap("harness")
        block = self._drafter.draft(context)
        self._watch.lap("draft")
        return replace(block, readout=lambda hidden: self._readout(block, hidden))

    def _readout(self, block, hidden):
        self._watch.lap("refine")
        logits = block.readout(hidden)
        self._watch.lap("readout")
        return logits


class WatchedTarget:
    """A target whose verifications are timed; before one stands the refiner's work, or nothing in plain decoding."""

    def __init__(self, target, watch: Watch, drafts: bool):
        self._target, self._watch, self._before = target, watch, "refine" if drafts else "harness"

    def __getattr__(self, name):
        return getattr(self._target, name)

    def score(self, anchor, draft):
        self._watch.lap(self._before)
        scores = self._target.score(anchor, draft)
        self._watch.lap("verify")
        return scores
