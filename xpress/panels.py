"""What the plots of a result are made of: which methods belong together, their colours, panels and legends."""

from __future__ import annotations

import re

from xpress import style
from xpress.style import BLACK, DRAFTER, GREEN, GREY, HEAD, ORANGE, OTHERS, PURPLE, SKY, blend

GIVEN_K = re.compile(r"\s*\(?(K ?= ?\S+|\bsequential|\bauto)\)?$")  # the end of a label that tells its passes
SET_TITLE = dict(fontsize=12)
SUBSET = "of each head auto, else its largest K; of Markov heads sequential"  # what `readable` picks


def smallest_cells(cells: list[dict]) -> list[dict]:
    """One cell a set: that of its smallest batch size."""
    found: dict[str, dict] = {}
    for cell in cells:
        other = found.get(cell["bench"])
        if other is None or (cell["batch_size"] or 0) < (other["batch_size"] or 0):
            found[cell["bench"]] = cell
    return list(found.values())


def family(row: dict) -> str:
    """The label without its K: what the rows of one head share."""
    return GIVEN_K.sub("", row["label"]) or row["label"]


def is_markov(row: dict) -> bool:
    return "markov" in (row["head"] or row["label"]).lower()


def colours_of(result: dict) -> dict[str, str]:
    """{label: #rrggbb}"""
    families: dict[str, list[dict]] = {}
    for cell in result["cells"]:
        for row in cell["methods"]:
            rows = families.setdefault(family(row), [])
            if row["label"] not in [other["label"] for other in rows]:
                rows.append(row)
    chosen: dict[str, str] = {}
    for name, (first, *_) in families.items():
        wanted = {"ar": BLACK, "bare": SKY, "drafter": DRAFTER}.get(first["kind"])
        wanted = wanted or (GREEN if is_markov(first) else HEAD if (first["head"] or "Refiner") == "Refiner" else None)
        if wanted and wanted not in chosen.values():
            chosen[name] = wanted
    known = dict.fromkeys((PURPLE, ORANGE, GREY, HEAD, DRAFTER, *OTHERS))
    spare = [colour for colour in known if colour not in chosen.values()]
    spare += [blend(colour, BLACK, 0.45) for colour in (PURPLE, ORANGE, GREEN, DRAFTER, HEAD, GREY, SKY)]
    for place, name in enumerate(name for name in families if name not in chosen):
        chosen[name] = spare[place % len(spare)]
    colours = {}
    for name, rows in families.items():
        counts = sorted(row["passes"] for row in rows if isinstance(row["passes"], int))
        for row in rows:
            colour, K = chosen[name], row["passes"]
            if isinstance(K, int) and len(rows) > 1:
                colour = blend(colour, "#FFFFFF", 0.65 * (1 - (counts.index(K) + 1) / len(counts)))
            elif len(rows) > 1:
                colour = blend(colour, BLACK, {"auto": 0.4}.get(K, 0.2))
            colours[row["label"]] = colour
    return colours


def measured(cell: dict, *kinds: str) -> list[dict]:
    return [row for row in cell["methods"] if not row["note"] and (not kinds or row["kind"] in kinds)]


def families_of(cell: dict) -> list[list[dict]]:
    """The rows of each head, in order."""
    found: dict[str, list[dict]] = {}
    for row in measured(cell, "head"):
        found.setdefault(family(row), []).append(row)
    return list(found.values())


def readable(cell: dict, *, ar: bool = False) -> list[dict]:
    """Few enough for one panel: of each head auto, else its largest K, else what it has; of Markov heads sequential."""
    rows = measured(cell, "bare", "drafter", *(["ar"] if ar else []))
    for members in families_of(cell):
        order = ("sequential", "auto") if is_markov(members[0]) else ("auto", "sequential")
        rank = {name: 1000 - place for place, name in enumerate(order)}
        counted = [row for row in members if isinstance(row["passes"], int)]
        named = [row for row in members if row["passes"] == order[0]] or counted
        named = named or members
        rows.append(max(named, key=lambda row: rank.get(row["passes"], row["passes"] or 0)))
    return rows


def panels(count: int, row_height: float = 4.2):
    """A figure and its `count` axes: one to three in a row."""
    columns = count if count <= 3 else 2 if count == 4 else 3
    lines = -(-count // columns)
    figure = style.new_figure(height=row_height * lines + (1.6 if count == 1 else 1.0))
    axes = [figure.add_subplot(lines, columns, place + 1) for place in range(count)]
    for axis in axes:
        style.tidy(axis)
    return figure, axes


def text(label: str) -> str:
    """A label as matplotlib shows it: no formula between dollars, no leading underscore, which hides from legends."""
    return ("\u200b" if label.startswith("_") else "") + label.replace("$", r"\$")


def finish(figure, title: str):
    """Title on top, one legend for all panels below them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.suptitle(title, fontsize=14)
    entries = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    renderer = FigureCanvasAgg(figure).get_renderer()
    for columns in range(min(len(entries), 7), 0, -1):  # as many columns as the picture is wide
        legend = figure.legend(entries.values(), entries, loc="outside lower center", ncols=columns, frameon=False)
        if legend.get_window_extent(renderer).width < 0.97 * figure.bbox.width or columns == 1:
            break
        legend.remove()
    return figure


def drafter_of(cell: dict, members: list[dict]) -> dict | None:
    """The drafter that a head's line starts from: of the same run and checkpoint, or the only one."""
    drafters = measured(cell, "drafter")
    run = family(members[0]).rpartition(": ")[0]
    same = [row for row in drafters if row["label"].rpartition(": ")[0] == run]
    same = [row for row in same if row["checkpoint"] == members[0]["checkpoint"]] or same
    return same[0] if same else drafters[0] if len(drafters) == 1 else None


def pair(row: dict, key: str):
    found = row[key]
    return found if found and None not in found else None


def all_rows(cells) -> list[dict]:
    return [row for cell in cells for row in measured(cell)]
