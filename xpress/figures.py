"""Plots of a result, from its JSON alone. A plot whose numbers are absent is not drawn.

A method has one colour in all plots; the K of one head are shades of its colour.
"""

from __future__ import annotations

from pathlib import Path

from xpress.panels import (
    SET_TITLE,
    SUBSET,
    all_rows,
    colours_of,
    drafter_of,
    families_of,
    family,
    finish,
    is_markov,
    measured,
    pair,
    panels,
    readable,
    smallest_cells,
    text,
)
from xpress.style import BLACK, DRAFTER, HEAD, ORANGE, new_figure, save, tidy
from xpress.tables import TIMES, by_slot, labels, whole

PARTS = {"draft": DRAFTER, "readout": ORANGE, "refine": HEAD}  # of the draft's time


def draw_all(result: dict, folder: Path) -> list[Path]:
    """Draws what `result` has numbers for into `folder`, PNGs 1500 px wide, each whole or not there -> their paths.

    Raises OSError where one cannot be written.
    """
    result = whole(result)
    colours = colours_of(result)
    smallest = smallest_cells(result["cells"])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw, cells in (
        ("tau", tau, smallest),
        ("speedup", speedup, smallest),
        ("throughput", throughput, result["cells"]),
        ("acceptance", acceptance, smallest),
        ("draft_time", draft_time, smallest),
        ("refiner_time", refiner_time, smallest),
        ("settled", settled, smallest),
    ):
        figure = draw(cells, colours)
        if figure is not None:
            save(figure, folder / f"{name}.png")
            written.append(folder / f"{name}.png")
    return written


def over_passes(cells, colours, value, band, *, with_drafter: bool):
    """Panels of `value(row)` over K: a head's counted K as a line with its band, auto as a star at its mean passes,
    sequential and Markov heads as horizontal lines. None where no cell has a head with such a number."""
    cells = [cell for cell in cells if any(value(row) is not None for row in measured(cell, "head"))]
    if not cells:
        return None
    figure, axes = panels(len(cells))
    for axis, cell in zip(axes, cells):
        ticks = {0} if with_drafter else set()
        for members in families_of(cell):
            members = [row for row in members if value(row) is not None]
            counted = sorted((row for row in members if isinstance(row["passes"], int)), key=lambda row: row["passes"])
            flat = [row for row in members if row["passes"] in ("sequential", None)]
            if members and is_markov(members[0]):
                flat, counted = flat or [max(members, key=value)], []
            points = [(row["passes"], row) for row in counted]
            start = drafter_of(cell, members) if with_drafter and counted else None
            if start is not None and value(start) is not None:
                points = [(0, start), *points]
            if points:
                ticks |= {x for x, _ in points}
                last = colours[points[-1][1]["label"]]
                name = text(family(counted[0]))
                axis.plot([x for x, _ in points], [value(row) for _, row in points], "o-", color=last, label=name)
                if all(band(row) for _, row in points):
                    low, high = zip(*(band(row) for _, row in points))
                    axis.fill_between([x for x, _ in points], low, high, color=last, alpha=0.15, linewidth=0)
            for row in members:
                if row["passes"] == "auto" and row["passes_used"] is not None and not is_markov(row):
                    look = dict(color=colours[row["label"]], zorder=4)
                    spread = [[value(row) - band(row)[0]], [band(row)[1] - value(row)]] if band(row) else None
                    axis.errorbar(row["passes_used"], value(row), spread, capsize=3, linewidth=1.2, **look)
                    name = text(f"{row['label']} at its mean passes")
                    axis.plot(row["passes_used"], value(row), "*", markersize=13, label=name, **look)
            for row in flat:
                axis.axhline(value(row), color=colours[row["label"]], linewidth=1.6, ls="-.", label=text(row["label"]))
        for row in measured(cell, "bare", "drafter") if with_drafter else ():
            if value(row) is not None and row["kind"] == "bare":
                axis.axhline(value(row), color=colours[row["label"]], linewidth=1.8, ls=":", label=text(row["label"]))
            elif value(row) is not None:
                look = dict(color=colours[row["label"]], markersize=7, zorder=5, clip_on=False)
                axis.plot(0, value(row), "s", label=text(f"{row['label']} (K = 0)"), **look)
        axis.set_title(text(cell["bench"]), **SET_TITLE)
        axis.set_xlabel("Jacobi passes K per block")
        axis.set_xticks(sorted(ticks) or [0])
    return figure, axes


def tau(cells, colours):
    made = over_passes(cells, colours, lambda row: row["tau"], lambda row: pair(row, "tau_interval"), with_drafter=True)
    if made is None:
        return None
    figure, axes = made
    for axis in axes:
        axis.set_ylabel("tau (tokens per round)")
    return finish(figure, "Acceptance length against passes, 95 % intervals over prompts")


def refiner_time(cells, colours):
    def value(row):
        seconds = row["time"].get("refine")
        return None if seconds is None else 1e3 * seconds

    made = over_passes(cells, colours, value, lambda row: None, with_drafter=False)
    if made is None:
        return None
    figure, axes = made
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.set_ylabel("refiner, ms per block")
    return finish(figure, "Time of the head against passes")


def draft_time(cells, colours):
    """Horizontal bars, so that long labels stand beside them: the draft's parts on the left, verification right."""
    timed = lambda row: any(row["time"].get(part) is not None for part in PARTS)  # noqa: E731
    few = len(cells) > 4  # with every K, the picture of nine sets would be as tall as five screens
    pick = readable if few else lambda cell: [row for row in measured(cell) if row["kind"] != "ar"]
    shown = [(cell, [row for row in pick(cell) if timed(row)]) for cell in cells]
    shown = [(cell, rows) for cell, rows in shown if rows]
    if not shown:
        return None
    heights = [0.27 * len(rows) + 1.1 for _, rows in shown]
    figure = new_figure(height=sum(heights) + 1.2)
    longest = [
        1e3 * max(sum(row["time"].get(part) or 0 for part in side) for _, rows in shown for row in rows)
        for side in (PARTS, ["verify"])
    ]
    # One scale for both sides where neither gets too narrow.
    ratio = min(3.0, max(1 / 3, longest[0] / longest[1])) if all(longest) else 1.0
    grid = figure.add_gridspec(len(shown), 2, width_ratios=(ratio, 1), height_ratios=heights)
    for place, (cell, rows) in enumerate(shown):
        left = figure.add_subplot(grid[place, 0])
        right = figure.add_subplot(grid[place, 1], sharey=left)
        ends = [0.0] * len(rows)
        for part, colour in PARTS.items():
            widths = [1e3 * (row["time"].get(part) or 0) for row in rows]
            left.barh(range(len(rows)), widths, left=ends, color=colour, label=TIMES[part])
            ends = [end + width for end, width in zip(ends, widths)]
        verify = [1e3 * (row["time"].get("verify") or 0) for row in rows]
        look = dict(color="#D9D9D9", edgecolor="#777777", hatch="///", linewidth=0.5)
        right.barh(range(len(rows)), verify, label=TIMES["verify"], **look)
        left.set_yticks(range(len(rows)), [text(row["label"]) for row in rows])
        left.invert_yaxis()
        right.tick_params(labelleft=False)
        left.set_title(text(f"{cell['bench']}: draft"), **SET_TITLE)
        right.set_title(text(f"{cell['bench']}: verification"), **SET_TITLE)
        for axis, totals, limit in ((left, ends, longest[0]), (right, verify, longest[1])):
            tidy(axis, grid="x")
            axis.bar_label(axis.containers[-1], [f"{total:.1f}" for total in totals], padding=3, fontsize=9)
            axis.set_xlim(0, 1.14 * limit or 1)
            axis.set_xlabel("ms per round")
    return finish(figure, "Where a round's time goes" + (f"\n{SUBSET}" if few else ""))


def speedup(cells, colours):
    cells = [cell for cell in cells if any(row["speedup"] is not None for row in measured(cell) if row["kind"] != "ar")]
    names = [name for name in labels(cells) if any(r["label"] == name and r["kind"] != "ar" for r in all_rows(cells))]
    if not cells:
        return None
    a_line = max(1, min(len(cells), 60 // (len(names) + 2)))  # narrower bars could not be told apart
    lines = [cells[start : start + a_line] for start in range(0, len(cells), a_line)]
    figure = new_figure(height=3.6 * len(lines) + 1.8)
    width = 0.86 / len(names)
    for place, line in enumerate(lines):
        axis = figure.add_subplot(len(lines), 1, place + 1)
        tidy(axis)
        for number, name in enumerate(names):
            found = [(x, row) for x, cell in enumerate(line) for row in measured(cell) if row["label"] == name]
            found = [(x + (number - (len(names) - 1) / 2) * width, r) for x, r in found if r["speedup"] is not None]
            at, rows = [x for x, _ in found], [row for _, row in found]
            hatches = ["//" if row.get("speedup_across_runs") else "" for row in rows]
            look = dict(color=colours[name], hatch=hatches, edgecolor="white", linewidth=0)
            axis.bar(at, [row["speedup"] for row in rows], 0.92 * width, label=text(name), **look)
            for x, row in found:
                if (ends := pair(row, "speedup_interval")) is not None:
                    axis.vlines(x, *ends, color="#333333", linewidth=1.2)
        axis.axhline(1, color=BLACK, linewidth=1.2, ls="--", label="ar")
        axis.set_xticks(range(len(line)), [text(cell["bench"]) for cell in line])
        axis.set_xlim(-0.5, a_line - 0.5)
        axis.set_ylabel("speed-up over ar (×)")
    across = any(row.get("speedup_across_runs") for row in all_rows(cells))
    note = "; hatched: over that of another run" if across else ""
    return finish(figure, f"Speed-up over plain autoregression, 95 % intervals over prompts{note}")


def acceptance(cells, colours):
    cells = [cell for cell in cells if any(by_slot(row) or row["conditional"] for row in readable(cell))]
    if not cells:
        return None
    figure, axes = panels(len(cells))
    for axis, cell in zip(axes, cells):
        slots = 1
        for row in readable(cell):
            shares, conditional = by_slot(row), row["conditional"]
            slots = max(slots, len(shares), len(conditional))
            look = dict(color=colours[row["label"]], markersize=4)
            for values, dash, name in ((shares, "o-", text(row["label"])), (conditional, "--", None)):
                there = [(k + 1, share) for k, share in enumerate(values) if share is not None]
                axis.plot([k for k, _ in there], [share for _, share in there], dash, label=name, **look)
        axis.set_title(text(cell["bench"]), **SET_TITLE)
        axis.set(xlabel="draft token k", ylabel="share of rounds", ylim=(0, 1.02))
        axis.set_xticks(range(1, slots + 1, 1 + slots // 17))
    title = "Acceptance by draft token: accepted (solid), given that those before it were (dashed)"
    return finish(figure, f"{title}\n{SUBSET}")


def throughput(cells, colours):
    benches: dict[str, list[dict]] = {}
    for cell in cells:
        if cell["batch_size"] is not None and any(r["tokens_per_second"] is not None for r in measured(cell)):
            benches.setdefault(cell["bench"], []).append(cell)
    benches = {bench: found for bench, found in benches.items() if len({c["batch_size"] for c in found}) > 1}
    if not benches:
        return None
    figure, axes = panels(len(benches))
    for axis, (bench, found) in zip(axes, benches.items()):
        lines: dict[str, list] = {}
        for cell in sorted(found, key=lambda cell: cell["batch_size"]):
            for row in readable(cell, ar=True):
                if row["tokens_per_second"] is not None:
                    lines.setdefault(row["label"], []).append((cell["batch_size"], row["tokens_per_second"]))
        for name, points in lines.items():
            axis.plot(*zip(*points), "o-", color=colours[name], markersize=5, label=text(name))
        sizes = sorted({cell["batch_size"] for cell in found})
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, list(map(str, sizes)))
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_title(text(bench), **SET_TITLE)
        axis.set(xlabel="batch size", ylabel="tokens per second")
    return finish(figure, f"Throughput\n{SUBSET}")


def settled(cells, colours):
    cells = [cell for cell in cells if any(row["settled"] for row in measured(cell))]
    if not cells:
        return None
    figure, axes = panels(len(cells))
    for axis, cell in zip(axes, cells):
        for row in measured(cell):
            there = [(K, share) for K, share in enumerate(row["settled"]) if share is not None]
            if there:
                axis.plot(*zip(*there), "o-", color=colours[row["label"]], markersize=5, label=text(row["label"]))
                axis.set_xticks(range(0, len(row["settled"]), 1 + len(row["settled"]) // 17))
        axis.set_title(text(cell["bench"]), **SET_TITLE)
        axis.set(xlabel="Jacobi passes K", ylabel="share of blocks settled", ylim=(0, 1.02))
    return finish(figure, "Blocks that no further pass changes")
