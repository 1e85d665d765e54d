"""Tables for people, in the terminal. What is shown of a result comes from its JSON alone."""

from __future__ import annotations

from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from xpress import tables
from xpress.tables import METRICS, interval, number

__all__ = ["METRICS", "interval", "number", "print_plan", "print_protocol", "print_report", "wide_console"]


def wide_console() -> Console:
    """A terminal's own width; a file or pipe gets room for every column."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def print_protocol(protocol: dict, console: Console | None = None):
    """Every setting that a number depends on."""
    console = console or wide_console()
    text = "  ".join(f"{key}={tables.setting(value)}" for key, value in protocol.items())
    console.print(text, highlight=False, markup=False, style="dim")


def print_report(result: dict, metrics=None, console: Console | None = None):
    """Of a result.json (format 1): its warnings, a table for each prompt set and batch size with the paired
    comparisons and what differed from plain autoregression below it, throughput over batch sizes.

    metrics: names of METRICS, the columns of the tables; ValueError that lists them where one is unknown.
    """
    if metrics is not None:
        metrics = tables.chosen(metrics)
    console = console or wide_console()
    say = lambda text, **how: console.print(text, highlight=False, markup=False, **how)  # noqa: E731
    result = tables.whole(result)
    for warning in result["warnings"]:
        say(f"WARNING: {warning}", style="bold red")
    for cell in result["cells"]:
        _print_table(console, tables.main_table(cell, metrics))
        for line in tables.best_lines(cell):
            say(line)
        if cell["paired"]:
            _print_table(console, tables.paired_table(cell))
        for line in tables.lossless_lines(cell):
            say(line, style="bold red" if "FAILURE" in line else None)
    for table in tables.throughput_tables(result):
        _print_table(console, table)


def _print_table(console: Console, table: tables.Table):
    shown = rich_table.Table(title=Text(table.title), title_justify="left")
    for name, side in table.columns:
        shown.add_column(Text(name), justify=side, no_wrap=side == "right")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    console.print(shown)


def print_plan(plan: dict, console: Console | None = None):
    """What a run will cost (Plan.to_json): parameters, memory per GPU at the peak, work, time, disk."""
    console = console or wide_console()
    step, time, features, disk, run = (plan[key] for key in ("step", "time", "features", "disk", "run"))
    say = lambda text: console.print(text, highlight=False, markup=False)  # noqa: E731
    say("  ".join(f"{key}={value}" for key, value in run.items()))
    table = rich_table.Table("parameters", title="counted on the meta device")
    table.add_column("M", justify="right")
    for kind, found in plan["parameters"].items():
        for part, count in found.items():
            table.add_row(f"{kind}: {part}", number(count / 1e6))
        table.add_row(f"{kind}, all", number(sum(found.values()) / 1e6), end_section=True)
    console.print(table)
    ways, digits = plan["memory"], lambda largest: 2 if largest >= 10 else 4
    places = digits(max(found["total"] for found in ways.values()) / 1e9)
    table = rich_table.Table(
        "memory per GPU at the peak of a step, GB", title="computed, not measured; without allocator and CUDA"
    )
    for way, found in ways.items():
        table.add_column(f"{way} (peak: {found['moment']})", justify="right")
    for part in dict.fromkeys(part for found in ways.values() for part in found["parts"]):
        sizes = [found["parts"].get(part) for found in ways.values()]
        table.add_row(part, *(number(None if size is None else size / 1e9, places) for size in sizes))
    table.add_section()
    table.add_row("all", *(number(found["total"] / 1e9, places) for found in ways.values()))
    console.print(table)
    table = rich_table.Table("one step over all GPUs", title="a GEMM of m·k·n counts 2·m·k·n")
    table.add_column("TFLOP", justify="right")
    table.add_column("share", justify="right")
    total = sum(plan["flops"].values())
    places = digits(total / 1e12)
    for part, count in plan["flops"].items():
        table.add_row(part, number(count / 1e12, places), f"{count / total:.1%}")
    table.add_section()
    table.add_row("all", number(total / 1e12, places), "")
    console.print(table)
    parts = f"batch_size {step['batch_size']} · accumulation {step['accumulation']} · {run['gpus']} GPUs"
    say(f"a step: {step['sequences']} sequences ({parts}), {step['tokens']} tokens, at most {step['blocks']} blocks")
    say(
        f"features: {features['bytes_per_token']} bytes a token, {features['bytes'] / 1e9:.1f} GB for "
        f"{features['count']} rows of {features['mean']:.0f} tokens ({features['origin']})"
        + (", in cache_dir" if disk["features"] else "; features=online keeps none of it on disk")
    )
    say(
        f"time: {time['steps']} steps, {time['epochs']:.2f} epochs, {time['seconds_a_step']:.3f} s a step, "
        f"{time['hours']:.1f} hours, if a step reaches mfu={time['mfu']} of peak_tflops={time['peak_tflops']}"
    )
    say(
        f"disk: {disk['state'] / 1e9:.1f} GB a state, {disk['checkpoint'] / 1e9:.1f} GB a checkpoint; out must hold "
        f"{disk['run'] / 1e9:.1f} GB"
    )
