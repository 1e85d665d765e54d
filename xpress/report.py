"""Tables for people. What is drawn here comes from a result's JSON alone."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def wide_console() -> Console:
    """A terminal's own width; a file or pipe gets room for every column."""
    console = Console()
    return console if console.is_terminal else Console(width=132)


def number(value, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def interval(pair, digits: int = 2) -> str:
    return "" if pair is None else f"[{pair[0]:.{digits}f}, {pair[1]:.{digits}f}]"


def print_protocol(protocol: dict, console: Console | None = None):
    """Every setting that a number depends on."""
    console = console or wide_console()
    console.print("  ".join(f"{key}={value}" for key, value in protocol.items()), highlight=False, style="dim")


def print_report(result: dict, console: Console | None = None):
    """One row a method, then the paired differences, then what differed from plain autoregression."""
    console = console or wide_console()
    table = Table(title=result["protocol"].get("bench"))
    columns = ("method", "K", "tau [95 %]", "tau_macro", "tokens/round", "passes", "tokens/s", "speed-up", "lossless")
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in result["methods"]:
        verdict = {None: "–", True: "yes", False: "NO"}[row["lossless"]]
        ties = len(row["differences"]) if row["lossless"] else 0
        table.add_row(
            row["method"],
            "–" if row["passes"] is None else str(row["passes"]),
            f"{number(row['tau'])} {interval(row['tau_interval'])}",
            number(row["tau_macro"]),
            number(row["tokens_per_round"]),
            number(row["passes_used"] if row["passes"] is not None else None),
            number(row["tokens_per_second"], 1),
            number(row["speedup"]),
            verdict + (f" ({ties} ties)" if ties else ""),
        )
    console.print(table)
    for pair in result["paired"]:
        console.print(
            f"tau of {pair['a']} (K = {pair['passes']}) − {pair['b']}: {number(pair['tau_difference'], 3)} "
            f"{interval(pair['interval'], 3)}, paired over prompts",
            highlight=False,
        )
    for row in result["methods"]:
        for found in row["differences"]:
            kind = "tie" if found["tie"] else "FAILURE"
            console.print(
                f"{kind}: {row['method']} differs from ar on {found['prompt']} at token {found['at']}, top-2 gap "
                f"{found['gap']:.2e} (limit {found['limit']:.0e})",
                highlight=False,
            )


def print_plan(plan: dict, console: Console | None = None):
    """What a run will cost (Plan.to_json): parameters, memory per GPU at the peak, work, time, disk."""
    console = console or wide_console()
    step, time, features, disk, run = (plan[key] for key in ("step", "time", "features", "disk", "run"))
    say = lambda text: console.print(text, highlight=False, markup=False)  # noqa: E731
    say("  ".join(f"{key}={value}" for key, value in run.items()))
    table = Table("parameters", title="counted on the meta device")
    table.add_column("M", justify="right")
    for kind, found in plan["parameters"].items():
        for part, count in found.items():
            table.add_row(f"{kind}: {part}", number(count / 1e6))
        table.add_row(f"{kind}, all", number(sum(found.values()) / 1e6), end_section=True)
    console.print(table)
    ways, digits = plan["memory"], lambda largest: 2 if largest >= 10 else 4
    places = digits(max(found["total"] for found in ways.values()) / 1e9)
    table = Table(
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
    table = Table("one step over all GPUs", title="a GEMM of m·k·n counts 2·m·k·n")
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
