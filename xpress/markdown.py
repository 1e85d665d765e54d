"""A result as report.md: all its numbers, formatted as report.py prints them, with the plots that were drawn."""

from __future__ import annotations

from pathlib import Path

from xpress import figures, tables
from xpress.files import write_text
from xpress.tables import METRICS, NONE, TIMES, Table, number, percent, whole_number

NAME = "report.md"
MEANING = """- **accept_at[k]**: share of rounds that accept at least k draft tokens; tau = 1 + the sum of accept_at.
- **conditional**: share of rounds that accept draft token k among those that accepted all before it (their number
  stands below).
- **recall@k**: how often the target's token is among the k first of the drafter's own logits, where all before it were
  accepted: what a head could reach by reordering k candidates.
- **refined rank**: the place of the refined token in the drafter's own logits; 1 where the head changed nothing.
- **expected, observed**: acceptance that the distributions promise (the sum of the smaller of p and q) and that was
  seen; above temperature 0.
- **settled**: share of blocks that no pass after the K-th changes.
- **Intervals** are 95 % bootstraps over prompts; paired ones compare two methods on the same prompts."""


def write_report(result: dict, folder: Path) -> list[Path]:
    """Draws the plots into `folder` and writes report.md beside them -> the paths written, report.md last.

    Raises OSError where one cannot be written; each is whole or not there.
    """
    plots = figures.draw_all(result, folder)
    file = Path(folder) / NAME
    write_text(file, markdown(result, [plot.name for plot in plots]))
    return [*plots, file]


def markdown(result: dict, plots=()) -> str:
    """The text of a report of a result (format 1). plots: paths of pictures, relative to where the report will be."""
    result = tables.whole(result)
    parts = ["# Evaluation"]
    parts += [f"> **WARNING:** {plain(warning)}" for warning in result["warnings"]]
    protocol = Table("", [("setting", "left"), ("value", "left")])
    protocol.rows = [[str(key), tables.setting(value)] for key, value in result["protocol"].items()]
    parts += ["## Protocol", render(protocol)]
    throughput = tables.throughput_tables(result)
    if throughput:
        parts.append("## Throughput")
        parts += [f"### {plain(table.title)}\n\n{render(table)}" for table in throughput]
    if plots:
        parts += ["## Plots", *(f"![{Path(plot).stem.replace('_', ' ')}]({plot})" for plot in plots)]
    for cell in result["cells"]:
        parts += _cell(cell)
    meanings = "\n".join(f"- **{metric.title}**: {metric.meaning}." for metric in METRICS.values())
    parts += ["## What the numbers mean", f"{meanings}\n{MEANING}"]
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """Of a label or warning: nothing that Markdown would read as a table's border, a tag or a second line."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def render(table: Table) -> str:
    lines = ["| " + " | ".join(plain(name) for name, _ in table.columns) + " |"]
    lines.append("|" + "|".join("---" if side == "left" else "---:" for _, side in table.columns) + "|")
    lines += ["| " + " | ".join(plain(cell) for cell in row) + " |" for row in table.rows]
    return "\n".join(lines)


def _cell(cell: dict) -> list[str]:
    parts = [f"## {plain(tables.heading(cell))}", render(tables.main_table(cell))]
    parts += [plain(line) for line in tables.best_lines(cell)]
    if cell["paired"]:
        table = tables.paired_table(cell)
        parts += [f"### {table.title}", render(table)]
    lines = tables.lossless_lines(cell)
    if lines:
        items = [f"  - {plain(line)}" if line.startswith("  ") else f"- {plain(line)}" for line in lines]
        parts += ["### Against plain autoregression", "\n".join(items)]
    for table in (_times(cell), _settled(cell), *_slots(cell), _histogram(cell), tables.main_table(cell, tables.MORE)):
        if table.rows:
            title = "Counts" if table.title == tables.heading(cell) else table.title
            parts.append(f"<details><summary>{title}</summary>\n\n{render(table)}\n\n</details>")
    return parts


def _times(cell: dict) -> Table:
    table = Table("Time of a round, ms (share)", [("method", "left")])
    table.columns += [(name, "right") for name in (*TIMES.values(), "all")]
    for row in cell["methods"]:
        seconds = [row["time"].get(part) for part in TIMES]
        total = sum(part for part in seconds if part is not None)
        if any(part is not None for part in seconds):
            shown = [
                NONE if part is None else f"{number(1e3 * part)} ({percent(part / total if total else None)})"
                for part in seconds
            ]
            table.rows.append([row["label"], *shown, number(1e3 * total)])
    return table


def _numbered(title: str, rows: list[tuple[str, list]], first: int, form=percent, name: str = "") -> Table:
    """One column for each place of the longest list, counted from `first`; rows without values are left out."""
    rows = [(label, values) for label, values in rows if values]
    count = max((len(values) for _, values in rows), default=0)
    table = Table(title, [("method", "left"), *((f"{name}{place + first}", "right") for place in range(count))])
    table.rows = [[label, *map(form, values), *[NONE] * (count - len(values))] for label, values in rows]
    return table


def _settled(cell: dict) -> Table:
    rows = [(row["label"], row["settled"]) for row in cell["methods"]]
    return _numbered("Blocks settled after K passes", rows, 0, name="K = ")


def _histogram(cell: dict) -> Table:
    rows = [(row["label"], row["histogram"]) for row in cell["methods"]]
    return _numbered("Rounds by accepted draft tokens", rows, 0, whole_number)


def _slots(cell: dict) -> list[Table]:
    rows = cell["methods"]
    of = lambda get: [(row["label"], get(row)) for row in rows]  # noqa: E731
    conditional = [
        entry
        for row in rows
        for entry in (
            (row["label"], [percent(share) for share in row["conditional"]]),
            (f"{row['label']}, rounds", [whole_number(count) for count in row["conditional_count"]]),
        )
    ]
    found = [
        _numbered("accept_at[k] by draft token", of(tables.by_slot), 1),
        _numbered("Conditional acceptance by draft token", conditional, 1, str),
    ]
    for key in dict.fromkeys(key for row in rows for key in sorted(row["recall"], key=int)):
        title = f"recall@{key} of the drafter's logits by draft token"
        found.append(_numbered(title, of(lambda row, key=key: row["recall"].get(key, [])), 1))
    rank = "Rank of the refined token in the drafter's logits by draft token"
    found.append(_numbered(f"{rank}, mean", of(lambda row: row["refined_rank"].get("mean", [])), 1, number))
    found.append(_numbered(f"{rank}, share of rank 1", of(lambda row: row["refined_rank"].get("first", [])), 1))
    found.append(_numbered("Expected acceptance by draft token", of(lambda row: row["expected"]), 1))
    found.append(_numbered("Observed acceptance by draft token", of(lambda row: row["observed"]), 1))
    return found
