"""A replay in the terminal: all methods under one clock, then the table.

Panes show the accepted tokens of a round at the moment at which it was known, and what was drafted and rejected struck
out until the next one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from xpress.replay import Recording, Replay, Token
from xpress.report import number, print_protocol, wide_console

STYLES = {"accepted": "green", "bonus": "bold", "rejected": "strike dim red", "cut": "dim"}
SIDE_BY_SIDE = 34  # columns that a pane needs
AROUND = {True: 6, False: 3}  # lines of a pane, beside others or above them, that are not text: border and numbers
FRAME = 1 / 12  # seconds


def printable(text: str) -> str:
    """Control characters as pictures: a model's escape sequence must not reach the terminal."""
    return re.sub("[\x00-\x08\x0b-\x1f]", lambda found: chr(0x2400 + ord(found[0])), text).replace("\x7f", "␡")


def on_one_line(token: Token) -> str:
    """Of a token that stands out of the text: its line breaks are shown, and so is a part of a character."""
    return printable(token.text).replace("\n", "⏎").replace("\t", "⇥") or "◌"


def pane_text(recording: Recording, t: float) -> Text:
    """The text so far, and in its place, until the next round, what was drafted in vain."""
    text, scenes = Text(), recording.visible(t)
    for scene in scenes:
        for token in scene.tokens:
            text.append(printable(token.text).expandtabs(4), STYLES[token.kind])
    if scenes and len(scenes) < len(recording.scenes):
        for token in scenes[-1].rejected:
            text.append(on_one_line(token), STYLES["rejected"])
    return text


def pane(recording: Recording, t: float, console: Console, width: int, lines: int | None, beside: bool) -> Panel:
    """One method after t seconds. lines: of text, the last ones are shown; None: all. beside: has neighbours."""
    now = recording.progress(t)
    wrapped = pane_text(recording, t).wrap(console, width - 4) or [Text()]
    if lines is not None:
        wrapped = [*wrapped[-lines:], *[Text()] * (lines - len(wrapped))]
    K = "" if recording.passes is None else f", K = {recording.passes}"
    passes = "" if recording.passes is None else f"   passes {number(now['passes_used'])}"
    rows = (
        f"tokens {now['tokens']}   rounds {now['rounds']}",
        f"tau {number(now['tau'])}{passes}",
        f"{number(now['tokens_per_second'], 1)} tokens/s",
    )
    numbers = Text("\n".join(["", *rows]) if beside else "   ".join(rows), "dim", no_wrap=True, overflow="ellipsis")
    clock = f"{now['seconds']:.2f} s"
    return Panel(
        Group(*wrapped, numbers),
        title=Text(f"{recording.name}{K}", "bold"),
        subtitle=Text(f"✓ done in {clock}", "bold green") if now["done"] else Text(clock),
        border_style="green" if now["done"] else "none",
        width=width,
    )


def picture(replay: Replay, t: float, console: Console, tall: bool = False) -> Group | Table:
    """All panes after t seconds: side by side, or stacked where the terminal is narrow. tall: the whole text, however
    many lines it has; else what fits the terminal."""
    number_of = len(replay.recordings)
    beside = console.width // number_of >= SIDE_BY_SIDE
    width = console.width // number_of if beside else console.width
    lines = None
    if not tall:
        longest = [pane_text(recording, replay.seconds).wrap(console, width - 4) for recording in replay.recordings]
        room = (console.height - 1) // (1 if beside else number_of) - AROUND[beside]
        lines = max(1, min(room, max(len(wrapped) for wrapped in longest) + 2))
    panes = [pane(recording, t, console, width, lines, beside) for recording in replay.recordings]
    if not beside:
        return Group(*panes)
    grid = Table.grid()
    grid.add_row(*panes)
    return grid


def play(
    replay: Replay,
    console: Console | None = None,
    speed: float = 1.0,
    clock: Callable = time.perf_counter,
    wait: Callable = time.sleep,
) -> bool:
    """Plays all methods under one clock that runs `speed` times as fast as it did; 0, or an output that is no terminal:
    only the end is printed. -> False where Ctrl-C ended it."""
    console = console or wide_console()
    if speed == 0 or not console.is_terminal:
        console.print(picture(replay, replay.seconds, console, tall=True))
        return True
    try:
        with Live(console=console, auto_refresh=False) as live:
            start = clock()
            while (t := (clock() - start) * speed) < replay.seconds:
                live.update(picture(replay, t, console), refresh=True)
                wait(FRAME)
            live.update(picture(replay, replay.seconds, console), refresh=True)
    except KeyboardInterrupt:
        return False
    return True


def print_summary(replay: Replay, console: Console | None = None):
    """The protocol, and one row for each method."""
    console = console or wide_console()
    print_protocol(replay.protocol, console)
    narrow = {"box": box.SIMPLE_HEAD, "padding": 0} if console.width < 100 else {}
    table = Table(**narrow)
    names = ("method", "K", "tokens", "rounds", "tau", "passes", "seconds", "tokens/s", "speed-up", "same text as ar")
    for name in names:
        table.add_column(name, justify="left" if name in (names[0], names[-1]) else "right", no_wrap=name != names[-1])
    for row in replay.summary():
        table.add_row(
            row["method"],
            "–" if row["passes"] is None else str(row["passes"]),
            str(row["tokens"]),
            str(row["rounds"]),
            number(row["tau"]),
            number(row["passes_used"]),
            number(row["seconds"]),
            number(row["tokens_per_second"], 1),
            number(row["speedup"]),
            row["same"],
        )
    console.print(table)
    if not replay.greedy:
        temperature = replay.protocol["temperature"]
        console.print(
            f"temperature {temperature}: the texts differ by design, each is a sample of the target's own distribution",
            highlight=False,
        )
