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
