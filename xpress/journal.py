"""The folder of one measurement, and the numbers of its lines.

settings.json     what the numbers depend on; a measurement that is resumed must have the same
responses.jsonl   a line for each method, prompt, turn and round, written as soon as a group of prompts is done
result.json       everything in all, made of the lines alone; last, so that it says "finished"
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import defaultdict
from pathlib import Path

from xpress.evaluate import Method
from xpress.files import append_text, write_json, write_text
from xpress.metrics import Counts, bootstrap, difference, quotient, summary, tau, tokens_per_second
from xpress.results import FORMAT, NAME

SETTINGS, LINES = "settings.json", "responses.jsonl"


class Journal:
    """Claims the folder: a new one, or with `resume` one whose settings are the same.

    Raises ValueError for a folder that holds anything else, for other settings, for a finished measurement, and while
    another one writes there: it is this one's until `close`, or until the process ends.
    """

    def __init__(self, folder: Path, settings: dict, resume: bool = False):
        self.folder = folder
        if not resume:
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.is_dir():
            raise ValueError(f"out={folder}: nothing to resume, there is no such folder; leave resume out")
        self._lock = locked(folder)
        try:
            self._claim(settings, resume)
            self.lines = self._read()
        except BaseException:
            self.close()
            raise

    def close(self):
        """Others may have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __del__(self):
        if hasattr(self, "_lock"):
            self.close()

    def _claim(self, settings: dict, resume: bool):
        folder = self.folder
        if (folder / NAME).exists():
            raise ValueError(f"out={folder}: this measurement is finished; give another out=")
        if not resume:
            if any(folder.iterdir()):
                raise ValueError(
                    f"out={folder}: the folder is not empty; give another out=, or resume=true to go on with it"
                )
            write_json(folder / SETTINGS, settings)
        elif not (folder / SETTINGS).exists():
            raise ValueError(f"out={folder}: nothing to resume, there is no {SETTINGS}; leave resume out")
        else:
            old = json.loads((folder / SETTINGS).read_text())
            now = json.loads(json.dumps(settings))
            keys = [key for key in sorted(old.keys() | now) if old.get(key) != now.get(key)]
            changed = [f"{key}: was {old.get(key)}, now {now.get(key)}" for key in keys]
            if changed:
                raise ValueError(f"out={folder} was begun with other settings: {'; '.join(changed)}; give another out=")

    def _read(self) -> list[dict]:
        """Whole groups; what a killed run left of one is cut off."""
        path, found, whole = self.folder / LINES, [], 0
        if not path.exists():
            return []
        text = path.read_text()
        for line in text.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
            whole = len(found) if found[-1]["last"] else whole
        kept = "".join(json.dumps(line) + "\n" for line in found[:whole])
        if kept != text:  # a last line without its end would swallow the next one
            write_text(path, kept)
        return found[:whole]

    def add(self, lines: list[dict]):
        """One group of prompts: all of its lines, or on a full disk none."""
        lines = [{**line, "last": i == len(lines) - 1} for i, line in enumerate(lines)]
        append_text(self.folder / LINES, "".join(json.dumps(line) + "\n" for line in lines))
        self.lines += lines

    def of(self, **facts) -> list[dict]:
        return [line for line in self.lines if all(line[key] == value for key, value in facts.items())]

    def write(self, protocol: dict, cells: list[dict], warnings: list[str]) -> dict:
        result = {"format": FORMAT, "protocol": protocol, "warnings": warnings, "cells": cells}
        write_json(self.folder / NAME, result)
        return result


def locked(folder: Path) -> int | None:
    """Locks a folder for this process -> what to close; None where the file system knows no locks. The lock leaves no
    file behind, and a killed process loses it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except BlockingIOError:
        os.close(handle)
        raise ValueError(f"out={folder}: another measurement is writing to this folder; give another out=") from None
    except OSError:
        os.close(handle)
        return None


def columns(lines: list[dict], by: str = "group") -> dict[str, list[list[Counts]]]:
    """{method: its responses, in lists of what is resampled together}: what was decoded together (`group`: the clock is
    theirs in common), or all turns and rounds of a `prompt`."""
    found: dict = defaultdict(lambda: defaultdict(list))
    for line in sorted(lines, key=lambda line: line["group"]):  # resumed or not, in one order
        found[line["method"]][line[by]].append(Counts.read(line))
    return {label: list(groups.values()) for label, groups in found.items()}


def cell(lines: list[dict], methods: list[Method], checked: bool) -> dict:
    """The numbers of one prompt set at one batch size. checked: outputs were held against plain autoregression's."""
    answers, batches, rows = columns(lines, "prompt"), columns(lines), []
    plain = batches[methods[0].label]
    for method in methods:
        row = method.facts()
        if method.note is None:
            own = [line for line in lines if line["method"] == method.label]
            found = [{"prompt": x["prompt"], "turn": x["turn"], **x["difference"]} for x in own if x["difference"]]
            found = [place for i, place in enumerate(found) if place not in found[:i]]  # every round repeats it
            row |= summary(answers[method.label], plain, batches[method.label])
            row |= {"differences": found, "lossless": all(d["tie"] for d in found) if checked else None}
        rows.append(row)
    compared = paired(methods, answers, batches)
    return {"prompts": len({line["prompt"] for line in lines}), "methods": rows, "paired": compared}


def paired(methods: list[Method], answers: dict, batches: dict) -> list[dict]:
    """Every row against the bare drafters before it, each head against its drafter without it, the last row of each
    checkpoint's head against those of the others: tau as a difference, speed as a ratio, over the same prompts."""
    present = [method for method in methods if method.label in answers and method.kind != "ar"]
    last, found = {method.checkpoint: method for method in present if method.kind == "head"}, []
    for i, a in enumerate(present):
        rivals = [m for m in present[:i] if m.kind == "bare"]
        if a.kind == "head":
            rivals += [m for m in present if m.kind == "drafter" and m.checkpoint == a.checkpoint]
            rivals += [m for name, m in last.items() if name != a.checkpoint and a is last[a.checkpoint]]
        for b in rivals:
            for metric, statistic, columns_of in (
                ("tau", difference(tau), answers),
                ("speed", quotient(tokens_per_second), batches),
            ):
                pair = columns_of[a.label], columns_of[b.label]
                value = statistic(*([r for group in column for r in group] for column in pair))
                interval = bootstrap(statistic, *pair)
                found.append({"a": a.label, "b": b.label, "metric": metric, "value": value, "interval": interval})
    return found
