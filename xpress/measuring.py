"""eval_tau.py's settings as a measurement: what is compared, on which prompts, and into which folder.

Settings are a plain dict. All that can be wrong with them is found before the first token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import torch

from xpress import checkpoint, evaluate, interop, parts, prompts, tables
from xpress.evaluate import Method
from xpress.journal import Journal, cell, columns
from xpress.lengths import ByConfidence, check_policy
from xpress.metrics import Counts, tokens_per_second
from xpress.parts import find, refuse_unknown
from xpress.refine import check_passes
from xpress.results import short_names
from xpress.sampling import Sampling
from xpress.stopping import Stops

EVAL_KEYS = {"checkpoint", "target", "methods", "passes", "candidates", "bench", "data_dir", "samples", "turns"}
EVAL_KEYS |= {"protocol", "max_new_tokens", "temperature", "top_k", "top_p", "accept", "seed", "thinking", "dtype"}
EVAL_KEYS |= {"readout", "device", "rounds", "batch_size", "stop_strings", "metrics", "check", "out", "resume"}
EVAL_KEYS |= {"length_policy", "threshold", "answers"}
KINDS = ("ar", "bare", "drafter", "head")
PROTOCOLS = {
    "free": {},
    "published": {
        "max_new_tokens": 2048,
        "samples": 128,
        "thinking": False,
        "turns": "first",
        "top_k": 0,
        "top_p": 1.0,
        "stop_strings": [],
        "batch_size": 1,
    },
}
FALLBACK = {"max_new_tokens": 256, "turns": "first", "thinking": False, "top_k": 0, "top_p": 1.0, "stop_strings": []}
FALLBACK |= {"passes": [0, 2, "auto"]}


def listed(value) -> list:
    return value if isinstance(value, list) else [value]


def settle(raw: dict) -> dict:
    """Fills what the protocol decides, refuses what would make it another one, and checks whatever needs no file."""
    if raw["protocol"] not in PROTOCOLS:
        raise ValueError(f"protocol={raw['protocol']}: known are {', '.join(PROTOCOLS)}")
    if raw["protocol"] == "published" and raw["temperature"] not in (0, 1):
        raise ValueError(f"temperature={raw['temperature']}: protocol=published has 0 and 1")
    fixed = PROTOCOLS[raw["protocol"]]
    for key, value in fixed.items():
        if raw[key] not in (None, value):
            raise ValueError(f"{key}={raw[key]}: protocol=published fixes it at {value}; drop one of the two")
    raw = raw | {key: value for key, value in FALLBACK.items() if raw[key] is None} | fixed
    for key in ("bench", "candidates", "batch_size", "methods", "checkpoint", "stop_strings"):
        raw[key] = listed(raw[key])
    each = raw["passes"] if isinstance(raw["passes"], dict) else {None: raw["passes"]}
    raw["passes"] = {name: listed(K) for name, K in each.items()}  # of a checkpoint; None: of all
    for number in (*raw["batch_size"], raw["rounds"], raw["max_new_tokens"]):
        if not isinstance(number, int) or number < 1:
            key = next(k for k in ("batch_size", "rounds", "max_new_tokens") if number in listed(raw[k]))
            raise ValueError(f"{key}={number}: must be a whole number from 1 up")
    if raw["turns"] not in ("first", "all"):
        raise ValueError(f"turns={raw['turns']}: known are first, all")
    for K in all_passes(raw):
        if K != "best":
            check_passes(K)
    for K in raw["candidates"]:
        if type(K) is not int or K < 1:
            raise ValueError(f"candidates={K}: give whole numbers of Jacobi passes from 1 up")
    Stops((), tuple(raw["stop_strings"]), tokenizer=object())
    parts.check_readout(raw["readout"])
    check_policy(raw["length_policy"], raw["threshold"])
    if raw["answers"] not in ("live", "recorded"):
        raise ValueError(f"answers={raw['answers']}: known are live and recorded")
    if raw["answers"] == "recorded" and (raw["temperature"] or raw["rounds"] > 1 or "best" in all_passes(raw)):
        raise ValueError(
            "answers=recorded: one round at temperature 0, and no times to choose passes=best by; use live"
        )
    for name in raw["methods"]:
        if name.partition(":")[0] not in KINDS:
            raise ValueError(f"methods: {name} is unknown; known are ar, bare, bare:<path>, drafter, head")
    if raw["bench"] == ["all"]:
        raw["bench"] = [name for name, entry in prompts.SETS.items() if entry.hub]
    if raw["metrics"] is not None:
        tables.chosen(listed(raw["metrics"]))
    refuse_unknown("target", raw["target"], {"name", "loop", "graphs"})
    return raw


def all_passes(raw: dict) -> list:
    return [K for own in raw["passes"].values() for K in own]


class Measurement:
    """Everything that eval_tau.py needs, loaded and checked; `run` measures and writes."""

    def __init__(self, raw: dict, warn: Callable = lambda text: None):
        self.raw = raw = settle(raw)
        self.sampling = Sampling(raw["temperature"], raw["top_k"], raw["top_p"], raw["accept"])
        self.sets = {name: prompts.load_prompts(name, raw["samples"], raw["data_dir"]) for name in raw["bench"]}
        for name, chosen in self.sets.items() if "best" in all_passes(raw) else ():
            if len(chosen) < 4:
                raise ValueError(f"passes=best: half the prompts choose K, and {name} has {len(chosen)}; 4 at least")
        self.device = parts.device_of(raw["device"])
        self.dtype = parts.dtype_of(raw["dtype"], self.device)
        folders = [checkpoint.locate(find(path)) for path in raw["checkpoint"]]
        provenances = [checkpoint.provenance_of(folder) for folder in folders]
        name = parts.target_of(raw["target"]["name"], folders)
        self.target = parts.make_target({**raw["target"], "name": name}, self.device, self.dtype)
        self.warnings = []
        for folder, provenance in zip(folders, provenances):
            found = prompts.template_change(self.target.tokenizer, raw["thinking"], provenance)
            if found:
                self.warnings.append(f"{folder.name}: {found}")
                warn(self.warnings[-1])
        load = lambda path: interop.load(path, self.target, getattr(torch, self.dtype), self.device)  # noqa: E731
        self.checkpoints = {name: load(folder) for name, folder in zip(short_names(raw["checkpoint"]), folders)}
        heads = {name for name, found in self.checkpoints.items() if found.head is not None}
        if None not in raw["passes"] and raw["passes"].keys() != heads:
            given = ", ".join(map(str, raw["passes"]))
            raise ValueError(f"passes for {given}: give a list, or a list for each of {', '.join(sorted(heads))}")
        self.lengths = self._lengths() if raw["length_policy"] == "confidence" else {}
        for found in self.checkpoints.values():  # rows that confidence reads are those of heads as they were loaded
            found.head = found.head and parts.for_decoding(found.head, raw["readout"])
        self.candidates = self._candidates() if "best" in all_passes(raw) else []
        self.bare = self._bare(provenances)
        facts = self.facts(name)
        for chosen in self.sets.values():
            for prompt in chosen:
                evaluate.room(self.target, prompt, raw["thinking"], raw["max_new_tokens"])
        self.journal = Journal(folder_for(raw), facts, raw["resume"])
        now = {"date": f"{datetime.now():%Y-%m-%d %H:%M}", "threads": torch.get_num_threads(), **parts.versions()}
        self.protocol = facts | now | {"out": str(self.journal.folder)}

    def _lengths(self) -> dict[str, ByConfidence]:
        """The policy of each checkpoint's head. Raises ValueError where one has no confidence head, and where there is
        no head whose drafts it could cut."""
        heads = {name: found for name, found in self.checkpoints.items() if found.head is not None}
        if not heads or "head" not in self.raw["methods"]:
            why = "no checkpoint has one" if not heads else "methods leaves heads out"
            raise ValueError(f"length_policy=confidence: it cuts the drafts of heads, and {why}; choose full")
        made = {}
        for name, found in heads.items():
            try:
                made[name] = ByConfidence(found.head, found.confidence, self.raw["threshold"])
            except ValueError as error:
                raise ValueError(f"checkpoint={name}: {error}") from error
        return made

    def _candidates(self) -> list[int]:
        """The numbers of passes that a head can use. Raises ValueError where there is nothing to choose."""
        sizes = [found.drafter.config.num_draft for found in self.checkpoints.values() if found.head is not None]
        if not sizes or "head" not in self.raw["methods"]:
            why = "no checkpoint has one" if not sizes else "methods leaves heads out"
            raise ValueError(f"passes=best: K is a head's, and {why}; give numbers, or a head")
        chosen = [K for K in dict.fromkeys(self.raw["candidates"]) if K <= min(sizes)]
        if not chosen:
            asked = ", ".join(map(str, self.raw["candidates"]))
            raise ValueError(f"candidates={asked}: after {min(sizes)} passes nothing changes; give smaller ones")
        return chosen

    def _bare(self, provenances: list[dict]) -> list[Method]:
        """The drafters that training started from: those given as bare:<path>, else what the provenance names."""
        paths = [name.partition(":")[2] for name in self.raw["methods"] if name.startswith("bare:")]
        loaded = {path: parts.bare_drafter(path, {}, self.target, self.dtype, self.device) for path in paths}
        if "bare" in self.raw["methods"]:
            for provenance in provenances:
                path = (provenance.get("init") or {}).get("path")
                loaded.setdefault(path, parts.bare_drafter(None, provenance, self.target, self.dtype, self.device))
        if len(loaded) > 1:  # a checkpoint that names none says nothing beside one that does
            loaded = {path: found for path, found in loaded.items() if found} or {None: None}
        self.bare_files = [found and found.path for found in loaded.values()]
        names = ["bare"] if len(loaded) == 1 else [f"bare:{name}" for name in short_names(list(loaded))]
        rows = zip(names, loaded.values())
        return [
            Method(label, "bare", found.drafter) if found else Method(label, "bare", note="not given")
            for label, found in rows
        ]

    def methods(self, best: int | None = None, only=None) -> list[Method]:
        """ar, bare, then each checkpoint's drafter and head; K = `best` where passes says best."""
        wanted, rows = {name.partition(":")[0] for name in self.raw["methods"]}, [Method("ar")]
        if only is None:
            rows += self.bare
        for name, found in self.checkpoints.items():
            prefix = f"{name}: " if len(self.checkpoints) > 1 else ""
            asked = self.raw["passes"].get(name) or self.raw["passes"].get(None, [])
            head, passes = found.head, only or [best if K == "best" else K for K in asked]
            bare_head = head is None or 0 in passes or "drafter" in wanted
            if only is None and bare_head and wanted & {"drafter", "head"}:
                rows.append(Method(f"{prefix}drafter", "drafter", found.drafter, checkpoint=name))
            for K in passes if head is not None and "head" in wanted else ():
                lengths = self.lengths.get(name)
                cut = "" if lengths is None else f"c≥{lengths.threshold:g} "
                label = f"{prefix}{evaluate.head_name(head)} {cut}" + ("sequential" if K == "sequential" else f"K={K}")
                if K != 0 and label not in {row.label for row in rows}:
                    rows.append(Method(label, "head", found.drafter, head, K, name, lengths=lengths))
        return rows

    def facts(self, name: str) -> dict:
        """What the numbers depend on, and a resumed measurement must share."""
        raw, sampling, loaded = self.raw, self.sampling, self.checkpoints.values()
        kept = ("protocol", "samples", "turns", "max_new_tokens", "stop_strings", "thinking", "seed", "rounds")
        return {
            "bench": raw["bench"],
            "prompts_sha256": [digest([p.turns for p in chosen]) for chosen in self.sets.values()],
            "target": name,
            "target_sha256": self.target.fingerprint(),
            "checkpoint": raw["checkpoint"],
            "checkpoint_sha256": [checkpoint.weights_hash(found.path) for found in loaded],
            "head": [evaluate.head_name(found.head) for found in loaded],
            "answers": raw["answers"],
            "readout": raw["readout"],
            "length_policy": raw["length_policy"],
            "threshold": raw["threshold"],
            "block_size": [found.drafter.config.block_size for found in loaded],
            "num_draft": [found.drafter.config.num_draft for found in loaded],
            "methods": [method.label for method in self.methods("best")],
            "bare_sha256": [file and checkpoint.weights_hash(file) for file in self.bare_files],
            **{key: raw[key] for key in kept},
            **({"candidates": self.candidates} if self.candidates else {}),
            "batch_size": raw["batch_size"],
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "accept": "exact" if sampling.greedy else sampling.accept,
            "template": prompts.template_facts(self.target.tokenizer, raw["thinking"])["rendered_sha256"],
            "dtype": self.dtype,
            "device": self.device,
            "loop": self.target.loop,
        }

    def run(self, progress: Callable = lambda what, done, total, method: None) -> dict:
        """Measures what is not measured yet -> the result, written as result.json. The folder is free afterwards."""
        cells = []
        try:
            for bench, chosen in self.sets.items():
                for batch_size in self.raw["batch_size"]:
                    cells.append(self._cell(bench, chosen, batch_size, progress))
            return self.journal.write(self.protocol, cells, self.warnings)
        finally:
            self.journal.close()

    def _cell(self, bench, chosen, batch_size, progress) -> dict:
        best, reported = None, chosen
        if "best" in all_passes(self.raw):
            validation, reported = chosen[::2], chosen[1::2]
            best = self._choose(bench, validation, batch_size, progress)
        methods = self.methods(best and best["passes"])
        lines = self._measure(methods, bench, reported, batch_size, "report", progress)
        limit = self.raw["max_new_tokens"]
        cut = [evaluate.room(self.target, p, self.raw["thinking"], limit) < limit for p in reported]
        facts = {"bench": bench, "batch_size": batch_size, "truncated": sum(cut), "best": best}
        checked = self.sampling.greedy and self.raw["answers"] == "live"
        return facts | cell(lines, methods, checked)

    def _choose(self, bench, validation, batch_size, progress) -> dict:
        """K by tokens per second on the validation half; nothing of that half is reported."""
        methods = self.methods(only=self.candidates)
        found = columns(self._measure(methods, bench, validation, batch_size, "validation", progress))
        speeds: dict[int, list[Counts]] = {}
        for method in methods[1:]:
            speeds.setdefault(method.passes, []).extend(c for group in found[method.label] for c in group)
        table = [{"passes": K, "tokens_per_second": tokens_per_second(counts)} for K, counts in speeds.items()]
        K = max(table, key=lambda row: row["tokens_per_second"] or 0)["passes"]
        return {"passes": K, "validation_prompts": len(validation), "validation": table}

    def _measure(self, methods, bench, chosen, batch_size, phase, progress) -> list[dict]:
        raw, here = self.raw, {"bench": bench, "batch_size": batch_size, "phase": phase}
        what = " ".join([bench, *([f"batch {batch_size}"] if len(raw["batch_size"]) > 1 else [])])
        what += " validation" if phase == "validation" else ""
        for lines in evaluate.evaluate(
            self.target,
            methods,
            chosen,
            batch_size=batch_size,
            rounds=raw["rounds"],
            turns=raw["turns"],
            max_new_tokens=raw["max_new_tokens"],
            stop_strings=raw["stop_strings"],
            sampling=self.sampling,
            seed=raw["seed"],
            thinking=raw["thinking"],
            recorded=raw["answers"] == "recorded",
            done={(line["round"], line["group"]) for line in self.journal.of(**here)},
            progress=lambda done, total, method: progress(what, done, total, method),
        ):
            self.journal.add([{**here, **line} for line in lines])
        return self.journal.of(**here)


def digest(thing) -> str:
    return hashlib.sha256(json.dumps(thing).encode()).hexdigest()


def folder_for(raw: dict) -> Path:
    """`out`, or a new folder named by sets and time. An older one is never written to."""
    if raw["out"]:
        return Path(raw["out"]).expanduser()
    if raw["resume"]:
        raise ValueError("resume=true needs out=<the folder of the measurement>")
    sets = raw["bench"][0] if len(raw["bench"]) == 1 else f"{len(raw['bench'])}_sets"
    stem = Path("outputs/eval") / f"{sets}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (stem.with_name(stem.name + (f"-{i}" if i else "")) for i in range(1000))
    return next(path for path in names if not path.exists())
