"""What the benchmarks share: interleaved timing, and what the machine itself can do."""

from __future__ import annotations

import platform
import statistics
import time
from importlib.metadata import PackageNotFoundError, version

import torch


def interleaved(functions: dict, repeats: int, device: str = "cpu", warm_up: int = 2) -> dict:
    """Seconds of each call, [repeats] a function: all functions once, then again, so that what slows the machine down
    for a while slows all of them. On a GPU by events in the stream."""
    times = {name: [] for name in functions}
    for turn in range(-warm_up, repeats):
        for name, function in functions.items():
            seconds = _timed(function, device)
            if turn >= 0:
                times[name].append(seconds)
    return times


def _timed(function, device: str) -> float:
    if not device.startswith("cuda"):
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def median(times: dict) -> dict:
    return {name: statistics.median(values) for name, values in times.items()}


def bandwidth(device: str = "cpu", size: int = 2**28) -> float:
    """Bytes a second. On a GPU of a copy, read and written; on a CPU of a product with a vector, which reads a matrix
    once, with the threads that torch has."""
    if device.startswith("cuda"):
        source = torch.empty(4 * size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return 2 * source.numel() / min(interleaved({"copy": lambda: target.copy_(source)}, 20, device)["copy"])
    matrix, vector = torch.ones(size // 4096, 1024), torch.ones(1024)
    return size / min(interleaved({"read": lambda: matrix @ vector}, 10, device)["read"])


def rate(device: str = "cpu", dtype: torch.dtype = torch.float32, size: int = 1024) -> float:
    """Operations a second of a square product."""
    size = size if device == "cpu" else 8 * size
    a, b = torch.randn(2, size, size, device=device).to(dtype).unbind()
    out = torch.empty_like(a)
    return 2 * size**3 / min(interleaved({"mm": lambda: torch.mm(a, b, out=out)}, 10, device)["mm"])


def machine(device: str = "cpu") -> dict:
    """What a table must say of where it was measured."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else _cpu()
    found = {"date": time.strftime("%Y-%m-%d"), "device": name, "threads": torch.get_num_threads()}
    for package in ("torch", "triton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return found


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def show(columns: list[str], rows: list[list[str]]):
    """A table of aligned columns."""
    widths = [max(len(str(row[i])) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip())
