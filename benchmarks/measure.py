"""What the speed benchmarks share: interleaved timing, the machine's measured rates, and a line that names the machine.

Torch is loaded by the functions that need it, so that a bad argument is told before that wait.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MIB = 2**20
_AHEAD = 2_000_000  # cycles a CUDA device is kept busy before a timing, a millisecond: launches wait in its queue


def interleaved(functions: dict[str, Callable], repeats: int, device="cpu", warm: int = 2) -> dict[str, list[float]]:
    """Calls every function once a turn -> seconds of each call, `repeats` for each name.

    What else the machine does meets all of them alike, and so does the state that a call leaves the caches in: each
    turn has its own order, the same in each run. The first `warm` turns are not counted. On CUDA seconds are the
    device's own, between two events: the device is busy while the call is queued, so the cost of launching shows only
    where a call waits for the device, or takes more than a millisecond to queue. Raises ValueError for repeats or warm
    out of range.
    """
    if repeats < 1 or warm < 0:
        raise ValueError(f"repeats={repeats}, warm={warm}: take at least 1 and 0")
    clock = _on_cuda if str(device).startswith("cuda") else _on_cpu
    names, seconds, order = list(functions), {name: [] for name in functions}, random.Random(0)
    for turn in range(-warm, repeats):
        order.shuffle(names)
        for name in names:
            spent = clock(functions[name], device)
            if turn >= 0:
                seconds[name].append(spent)
    return seconds


def _on_cpu(function: Callable, device) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _on_cuda(function: Callable, device) -> float:
    import torch

    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_AHEAD)
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000


def rotating(sets: Iterable, functions: int) -> Callable:
    """sets of inputs -> a function without arguments that gives the next one, for calls of so many interleaved
    functions, all of which share it: a set comes back only after all the others, and no function keeps to some sets.

    Raises ValueError where the number of sets and of functions have a common divisor: sets would be met by some only.
    """
    sets = list(sets)
    if len(sets) != count_sets(len(sets), functions):
        raise ValueError(f"{len(sets)} sets for {functions} functions: take {count_sets(len(sets), functions)} sets")
    return itertools.cycle(sets).__next__


def count_sets(least: int, functions: int) -> int:
    """The smallest number of sets from `least` on that shares no divisor with the number of functions."""
    return next(count for count in itertools.count(max(1, least)) if math.gcd(count, functions) == 1)


def cache_bytes(device="cpu") -> int:
    """The last cache that is a core's (on CUDA: the device's) own, in bytes: inputs that are to come from beyond it
    must exceed it. 2 MiB where the system does not say."""
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.get_device_properties(device).L2_cache_size
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 2 * MIB


def bandwidth(device="cpu", size: int | None = None, repeats: int = 9) -> float:
    """Bytes a second of memory, the better of a copy (bytes read and written) and of a sum (bytes read) of `size` bytes
    (None: 256 MiB, on CUDA 1 GiB), by torch's threads: a median of `repeats`."""
    import torch

    size = size or (1024 if str(device).startswith("cuda") else 256) * MIB
    x = torch.ones(max(1, size // 4), device=device)
    y = torch.empty_like(x)
    spent = interleaved({"copy": lambda: y.copy_(x), "sum": x.sum}, repeats, device)
    return max(2 * x.nbytes / statistics.median(spent["copy"]), x.nbytes / statistics.median(spent["sum"]))


def rate(device="cpu", dtype=None, repeats: int = 9) -> float:
    """Flop a second of a square product (1024, on CUDA 8192) in a torch dtype, None: fp32. A median of `repeats`."""
    import torch

    side = 8192 if str(device).startswith("cuda") else 1024
    a = torch.randn(side, side, device=device).to(dtype or torch.float32)
    b, out = a.T.contiguous(), torch.empty_like(a)
    spent = interleaved({"product": lambda: torch.mm(a, b, out=out)}, repeats, device)
    return 2 * side**3 / statistics.median(spent["product"])


def machine(device="cpu") -> dict:
    """What the numbers were taken on: date, commit, cpu, device, threads, and the versions of Python and libraries."""
    import torch

    found = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "cpu": cpu_name(), "device": str(device)}
    if str(device).startswith("cuda"):
        found |= {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found | {"threads": torch.get_num_threads(), "python": platform.python_version(), "versions": versions()}


def versions(names=("torch", "transformers", "triton")) -> dict[str, str]:
    """Versions of those of the distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(asked, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def show(columns: list[str], rows: list[list[str]]):
    """A table of aligned columns."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def ask_engine(python: str, request: dict, echo: bool = False) -> dict:
    """engine_worker.py's answer from an interpreter that has vLLM; echo: let its progress through to stderr. Raises
    OSError with the end of what it said where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(request))
        command = [python, str(Path(__file__).with_name("engine_worker.py")), str(asked), str(answer)]
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean) as done:
            said = []
            for line in done.stdout:
                said = [*said[-2:], line.strip()]
                if echo and "prompts" in line:
                    print(line, end="", file=sys.stderr, flush=True)
        if done.returncode or not answer.exists():
            raise OSError(f"--engine-python {python}: {' '.join(said)}")
        return json.loads(answer.read_text())
