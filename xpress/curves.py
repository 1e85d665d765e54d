"""One picture of a training run, from its metrics.jsonl: losses, tau, accept rate by slot, learning rate and speed."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

from xpress.style import DRAFTER, HEAD, OTHERS, new_figure, save, tidy

LOSS_COLOURS = {"refined": HEAD, "anchor": DRAFTER, "base": DRAFTER}  # the head's loss and the drafter's own
DASHES = (":", "--", "-.")  # of the rounds
WHO = {"head": ("head", HEAD), "drafter": ("bare drafter", DRAFTER)}


def draw(metrics: Path, png: Path) -> None:
    """Read a run's metrics.jsonl and write the picture (1500 px wide), whole or not at all.

    Raises FileNotFoundError where there is no such file, ValueError where it has no whole line yet.
    """
    metrics, png = Path(metrics), Path(png)
    lines = read(metrics)
    if not lines:
        raise ValueError(f"metrics={metrics}: no whole line with a step yet; wait for the run's first log_every steps")
    save(figure(lines), png)


def ending(metrics: Path, png: Path) -> str:
    """What the losses did and where the picture is, or why there is none: at the end of a run a full disk must hide
    nothing that matters."""
    try:
        draw(metrics, png)
    except (OSError, ValueError) as error:
        return f"curves: not drawn ({error})"
    return "\n".join([*losses(read(metrics)), f"curves: {png}"])


def losses(lines: list[dict]) -> list[str]:
    """What each term's training loss did, in one line: means over the first and the last tenth of the logged steps.
    No line where nothing was logged twice."""
    found = []
    keys = dict.fromkeys(key for facts in lines for key in facts if key.startswith("loss/"))
    for key in (key for key in keys if key.count("/") == 1):
        _, values = curve(lines, key)
        n = max(1, len(values) // 10)
        if len(values) > 1:
            found.append(f"{key[5:]} {sum(values[:n]) / n:.3f} → {sum(values[-n:]) / n:.3f}")
    return [f"loss, first → last tenth of the steps: {', '.join(found)}"] if found else []


def read(metrics: Path) -> list[dict]:
    """The lines of a metrics.jsonl by step. A half-written line is left out; where a resumed run wrote a step
    again, the later line wins, key by key."""
    by_step: dict[int, dict] = {}
    for line in Path(metrics).read_text(errors="replace").splitlines():
        try:
            facts = json.loads(line)
        except ValueError:  # the run was killed while it wrote
            continue
        if isinstance(facts, dict) and isinstance(facts.get("step"), int):
            by_step[facts["step"]] = by_step.get(facts["step"], {}) | facts
    return [by_step[step] for step in sorted(by_step)]


def curve(lines: list[dict], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one key, where it is there."""
    found = [(facts["step"], facts[key]) for facts in lines if isinstance(facts.get(key), (int, float))]
    return [step for step, _ in found], [value for _, value in found]


def figure(lines: list[dict]):
    """The lines of `read` -> a matplotlib Figure of four panels."""
    made = new_figure(height=8)
    (losses, tau), (slots, rates) = made.subplots(2, 2)
    _losses(losses, lines)
    _tau(tau, lines)
    _slots(slots, lines)
    _rates(rates, lines)
    for axes in (losses, tau, slots, rates):
        tidy(axes)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, fontsize=9)
        elif not axes.has_data():
            axes.text(0.5, 0.5, "nothing measured yet", ha="center", transform=axes.transAxes, color="#777777")
    return made


def _losses(axes, lines):
    keys = dict.fromkeys(key for facts in lines for key in facts if key.removeprefix("eval/").startswith("loss/"))
    terms = dict.fromkeys(key.split("loss/", 1)[1] for key in keys)
    whole = [term for term in terms if "/" not in term]  # consistency/1 … are shades of consistency
    free = cycle(OTHERS)
    dashes = cycle(DASHES)
    colours = {term: LOSS_COLOURS.get(term) or next(free) for term in whole}
    for term in terms:
        name, _, part = term.partition("/")
        colour = colours.get(name) or colours.setdefault(name, next(free))
        label = f"{name}, round {part}" if part else name
        steps, values = curve(lines, f"loss/{term}")
        held_out, held_out_values = curve(lines, f"eval/loss/{term}")
        style = dict(linewidth=1.2) if not part else dict(linewidth=0.9, linestyle=next(dashes))
        if steps:
            axes.plot(steps, values, color=colour, alpha=0.45, label=None if held_out else label, **style)
        if held_out:
            style["linewidth"] += 0.8
            axes.plot(held_out, held_out_values, color=colour, marker="o", markersize=4, label=label, **style)
    both = any(key.startswith("eval/") for key in keys)
    axes.set(
        title="Loss (faint: training, points: held out)" if both else "Loss", xlabel="step", ylabel="loss per token"
    )


def _tau(axes, lines):
    both = False
    for who, (label, colour) in WHO.items():
        held_out, held_out_values = curve(lines, f"eval/tau/{who}")
        steps, values = curve(lines, f"tau/{who}")
        if steps:
            shown = None if held_out else label
            axes.plot(steps, values, ".", color=colour, alpha=0.35, markersize=6, markeredgewidth=0, label=shown)
        if held_out:
            both = True
            axes.plot(held_out, held_out_values, color=colour, linewidth=2, marker="o", markersize=4, label=label)
            if who == "drafter":  # below this line co-training has eroded the drafter
                start = held_out_values[0]
                axes.axhline(start, color=colour, linewidth=1.2, linestyle=":", label=f"{label} at first, {start:.2f}")
    title = "Acceptance length (faint: training, points: held out)" if both else "Acceptance length in training"
    axes.set(title=title, xlabel="step", ylabel="tau (tokens per round)")


def _slots(axes, lines):
    measured = [facts for facts in lines if any(facts.get(f"eval/accept/{who}") for who in WHO)]
    title = "Accept rate by draft token"
    if measured:
        last, title = measured[-1], f"{title}, step {measured[-1]['step']}"
        for who, (label, colour) in WHO.items():
            shares = last.get(f"eval/accept/{who}")
            if shares:
                slots = range(1, len(shares) + 1)
                axes.plot(slots, shares, color=colour, linewidth=2, marker="o", markersize=4, label=label)
                axes.set_xticks(slots)
        axes.set_ylim(0, 1)
    axes.set(title=title, xlabel="draft token k", ylabel="accept rate")


def _rates(axes, lines):
    """Learning rate on the left, tokens per second on the right."""
    steps, values = curve(lines, "lr")
    if steps:
        axes.plot(steps, values, color="black", linewidth=1.6)
    axes.set(title="Learning rate and throughput", xlabel="step", ylabel="learning rate")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.set_ylim(bottom=0)
    steps, values = curve(lines, "tokens_per_s")
    if steps:
        right = axes.twinx()
        right.plot(steps, values, color=OTHERS[0], linewidth=1.2)
        right.set_ylim(0, 1.15 * max(values))
        right.set_ylabel("tokens per second", color=OTHERS[0])
        right.tick_params(axis="y", colors=OTHERS[0])
        right.spines["top"].set_visible(False)
