"""A result's JSON as tables of text, which report.py prints and markdown.py writes: every number is formatted here.

Whatever is null or missing in a result shows as a dash or as no row; nothing here raises for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

NONE = "–"
GIVEN_K = re.compile(r"\bK ?= ?\S+|\b(sequential|auto)\b")  # a label that tells its passes
TIMES = {"draft": "drafter forward", "readout": "base readout", "refine": "refiner", "verify": "verification"} | {
    "harness": "harness"
}
ROW = dict.fromkeys(
    ("kind", "checkpoint", "head", "passes", "threshold", "note")
    + ("tau", "tau_interval", "tau_macro", "tau_macro_interval")
    + ("tau_without_loops", "loops", "tokens_per_round", "longest", "drafted", "passes_used", "harness_share")
    + ("tokens_per_second", "speedup", "speedup_interval", "peak_memory", "rounds", "tokens", "responses", "lossless")
)
LISTS = ("histogram", "conditional", "conditional_count", "settled", "expected", "observed", "differences")
DICTS = ("accept_at", "recall", "refined_rank", "time")


@dataclass
class Table:
    """Rows of text under a title. Columns are (heading, left or right)."""

    title: str
    columns: list[tuple[str, str]] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True)
class Metric:
    """A column: its heading, how a method's row becomes text, and what the number means."""

    title: str
    show: Callable[[dict], str]
    meaning: str


def number(value, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def interval(pair, digits: int = 2) -> str:
    return "" if not pair or None in pair else f"[{pair[0]:.{digits}f}, {pair[1]:.{digits}f}]"


def percent(share) -> str:
    return NONE if share is None else f"{share:.1%}"


def with_interval(value, pair, digits: int = 2) -> str:
    return f"{number(value, digits)} {interval(pair, digits)}".rstrip()


def whole_number(value) -> str:
    return NONE if value is None else str(value)


def setting(value) -> str:
    """Of the protocol."""
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def passes(row: dict) -> str:
    return whole_number(row["passes"])


def speedup(row: dict) -> str:
    shown = with_interval(row["speedup"], row["speedup_interval"])
    return f"{shown} (across runs)" if row.get("speedup_across_runs") else shown


def verdict(row: dict) -> str:
    ties = len(row["differences"]) if row["lossless"] else 0
    return {None: NONE, True: "yes", False: "NO"}[row["lossless"]] + (
        f" ({ties} tie{'s' * (ties > 1)})" if ties else ""
    )


def _field(key: str, title: str, meaning: str, form=number, *, pair: bool = False, **how) -> Metric:
    def show(row):
        return with_interval(row[key], row[f"{key}_interval"], **how) if pair else form(row[key], **how)

    return Metric(title, show, meaning)


METRICS: dict[str, Metric] = {
    "K": Metric("K", passes, "Jacobi passes over a block; auto stops where a pass changes nothing"),
    "tau": _field("tau", "tau [95 %]", "accepted draft tokens of a round + 1, mean over all rounds", pair=True),
    "tau_macro": _field("tau_macro", "tau_macro", "mean over responses of that response's tau"),
    "tau_macro_interval": _field("tau_macro", "tau_macro [95 %]", "the same with its interval", pair=True),
    "tau_without_loops": _field("tau_without_loops", "tau without loops", "tau over responses that do not loop"),
    "loops": _field("loops", "loops", "share of responses that repeat themselves to the end", percent),
    "tokens_per_round": _field(
        "tokens_per_round", "tokens/round", "tokens emitted by a round, cut at stop token and limit"
    ),
    "longest": _field("longest", "longest run", "most draft tokens accepted in one round", whole_number),
    "drafted": Metric(
        "drafted",
        lambda row: NONE if row["kind"] == "ar" else number(row["drafted"]),
        "draft tokens verified by a round, mean; less than a block's where drafts are cut by confidence",
    ),
    "passes": Metric(
        "passes",
        lambda row: NONE if row["kind"] in ("ar", "bare", "drafter") else number(row["passes_used"]),
        "passes used per block, mean; auto counts the confirming one",
    ),
    "tokens_per_second": _field(
        "tokens_per_second", "tokens/s", "tokens a second after the first one, over the batch", digits=1
    ),
    "speedup": Metric(
        "speed-up [95 %]",
        speedup,
        "seconds per token of plain autoregression (ar) over those of the method, same batch size, same process",
    ),
    "memory": Metric(
        "memory, GB",
        lambda row: number(None if row["peak_memory"] is None else row["peak_memory"] / 1e9),
        "peak memory of the device, 10^9 bytes",
    ),
    "harness_share": _field("harness_share", "harness", "share of the time that is our own bookkeeping", percent),
    "rounds": _field("rounds", "rounds", "rounds of draft and verification", whole_number),
    "tokens": _field("tokens", "tokens", "tokens returned", whole_number),
    "responses": _field("responses", "responses", "responses measured", whole_number),
    "lossless": Metric(
        "lossless",
        verdict,
        "every output is that of plain autoregression; a first difference at a near-tie of the target counts as a tie",
    ),
}
DEFAULT = ("tau", "tau_macro", "tokens_per_round", "passes", "tokens_per_second", "speedup", "memory", "lossless")
MORE = ("tau_macro_interval", "tau_without_loops", "loops", "longest", "harness_share", "rounds", "tokens") + (
    "responses",
)


def chosen(names) -> list[str]:
    """Columns by name; ValueError that lists the known ones. None: None, the default ones."""
    names = list(names)
    unknown = [name for name in names if name not in METRICS]
    if unknown or not names:
        raise ValueError(f"metrics={','.join(unknown)}: unknown; known are {', '.join(METRICS)}")
    return names


def whole(result: dict) -> dict:
    """A result in which every field that is read here is present: null, or an empty list or dict. Copies, no change."""
    cells = []
    for cell in result.get("cells") or []:
        given = {key: value for key, value in (cell or {}).items() if value is not None}
        best = given.get("best") or []
        filled = {"bench": "?", "batch_size": None, "prompts": None, "truncated": None, **given}
        filled["best"] = [best] if isinstance(best, dict) else [choice for choice in best if choice]
        filled["methods"] = [_row(row, place) for place, row in enumerate(given.get("methods") or [])]
        filled["paired"] = [pair for pair in given.get("paired") or [] if pair]
        cells.append(filled)
    return {
        "format": result.get("format"),
        "protocol": result.get("protocol") or {},
        "warnings": [warning for warning in result.get("warnings") or [] if warning],
        "cells": cells,
    }


def _row(row: dict | None, place: int) -> dict:
    given = {key: value for key, value in (row or {}).items() if value is not None}
    empty = {key: [] for key in LISTS} | {key: {} for key in DICTS}
    filled = {"label": f"method {place + 1}", **ROW, **empty, **given}
    filled["differences"] = [found for found in filled["differences"] if found]
    for key in ("recall", "refined_rank"):
        filled[key] = {name: values or [] for name, values in filled[key].items()}
    return filled


def by_slot(row: dict) -> list:
    """accept_at as a list over draft tokens 1 … G."""
    found = {int(k): share for k, share in row["accept_at"].items()}
    return [found.get(k) for k in range(1, max(found, default=0) + 1)]


def heading(cell: dict) -> str:
    parts = [str(cell["bench"])]
    parts += [f"batch size {cell['batch_size']}"] if cell["batch_size"] is not None else []
    parts += [f"{cell['prompts']} prompts"] if cell["prompts"] is not None else []
    parts += [f"{cell['truncated']} truncated"] if cell["truncated"] else []
    return " · ".join(parts)


def main_table(cell: dict, metrics=None) -> Table:
    """One row a method. K has a column of its own only where a label does not tell it, and `drafted` where drafts are
    cut."""
    names = chosen(metrics) if metrics is not None else list(DEFAULT)
    hidden = any(row["passes"] is not None and not GIVEN_K.search(row["label"]) for row in cell["methods"])
    if metrics is None and hidden:
        names = ["K", *names]
    if metrics is None and any(row["threshold"] is not None for row in cell["methods"]):
        names.insert(names.index("passes"), "drafted")
    table = Table(heading(cell), [("method", "left"), *((METRICS[name].title, "right") for name in names)])
    for row in cell["methods"]:
        shown = [METRICS[name].show(row) for name in names]
        table.rows.append([row["label"], *([str(row["note"])] + [""] * (len(names) - 1) if row["note"] else shown)])
    return table


def throughput_tables(result: dict) -> list[Table]:
    """Tokens a second over batch sizes, for each set that was measured at more than one."""
    benches: dict[str, list[dict]] = {}
    for cell in result["cells"]:
        if cell["batch_size"] is not None:
            benches.setdefault(cell["bench"], []).append(cell)
    tables = []
    for bench, cells in benches.items():
        sizes = sorted({cell["batch_size"] for cell in cells})
        if len(sizes) < 2:
            continue
        table = Table(
            f"{bench}: tokens/s (speed-up against ar at the same batch size)",
            [("method", "left"), *((f"batch size {size}", "right") for size in sizes)],
        )
        for label in labels(cells):
            found = {c["batch_size"]: row for c in cells for row in c["methods"] if row["label"] == label}
            shown = [NONE] * len(sizes)
            for place, size in enumerate(sizes):
                row = found.get(size)
                if row and row["tokens_per_second"] is not None:
                    ratio = number(row["speedup"]) + (", across runs" if row.get("speedup_across_runs") else "")
                    shown[place] = f"{number(row['tokens_per_second'], 1)} ({ratio})"
            table.rows.append([label, *shown])
        tables.append(table)
    return tables


def labels(cells: list[dict]) -> list[str]:
    """Of all methods with numbers, in order."""
    return list(dict.fromkeys(row["label"] for cell in cells for row in cell["methods"] if not row["note"]))


def paired_table(cell: dict) -> Table:
    """Methods two by two, what each is held against together: tau as a difference, speed as a ratio."""
    found: dict = {}
    for pair in cell["paired"]:
        key = pair.get("b") or "?", pair.get("a") or "?", bool(pair.get("across_runs"))
        found.setdefault(key, {})[pair.get("metric")] = pair
    table = Table("Compared, paired over prompts")
    table.columns = [("method", "left"), ("against", "left"), ("tau: difference [95 %]", "right")]
    table.columns += [("speed: ratio [95 %]", "right")]
    against = list(dict.fromkeys(b for b, _, _ in found))
    for (b, a, across), pairs in sorted(found.items(), key=lambda item: against.index(item[0][0])):
        shown = [pairs.get(metric, {}) for metric in ("tau", "speed")]
        values = [with_interval(pair.get("value"), pair.get("interval"), 3) for pair in shown]
        table.rows.append([a, b + " (across runs, not paired)" * across, *values])
    return table


def best_lines(cell: dict) -> list[str]:
    """How the number of passes was chosen on other prompts, one line a run."""
    lines = []
    for best in cell["best"]:
        tried = ", ".join(
            f"K = {whole_number(found.get('passes'))}: {number(found.get('tokens_per_second'), 1)} tokens/s"
            for found in filter(None, best.get("validation") or [])
        )
        who = f"{best['run']}: " if best.get("run") else ""
        lines.append(
            f"{who}best K = {whole_number(best.get('passes'))}, chosen on "
            f"{whole_number(best.get('validation_prompts'))} other prompts" + (f" ({tried})" if tried else "")
        )
    return lines


def lossless_lines(cell: dict) -> list[str]:
    """Which methods' outputs are all plain autoregression's own, and every place where another's is not."""
    lines, equal = [], {}
    for row in cell["methods"]:
        label, found, count = row["label"], row["differences"], whole_number(row["responses"])
        if row["kind"] == "ar" or row["note"]:
            continue
        if not found:
            said = f"all {count} outputs equal plain autoregression" if row["lossless"] else "not checked"
            said = "FAILURE, at a place that was not recorded" if row["lossless"] is False else said
            equal.setdefault(said, []).append(label)
            continue
        differ = len({str(d.get("prompt")) for d in found})
        lines.append(f"{label}: the outputs of {differ} of {whole_number(cell['prompts'])} prompts differ")
        for d in found:
            turn = f", turn {d['turn']}" if d.get("turn") is not None else ""
            gap, limit = ("?" if d.get(key) is None else f"{d[key]:.2e}" for key in ("gap", "limit"))
            gap += "" if d.get("behind") is None else f", its token {d['behind']:.2e} behind"
            kind = "tie" if d.get("tie") else "FAILURE"
            lines.append(f"  {kind}: {d.get('prompt')}{turn}, token {d.get('at')}: gap {gap}, limit {limit}")
    return [f"{said}: {', '.join(names)}" for said, names in equal.items()] + lines
