"""Milliseconds of the readout's argmax: ours, screened by int8 and int4 copies, plainly by base + latent @ W.T, argmax.

    python benchmarks/readout_argmax.py --threads 1

One block (N = 1) of 7 or 15 rows, random normal numbers; ours is xpress.kernels (the reference on a CPU, Triton on
CUDA), plain is eager, with --compile also compiled (on a CPU that needs a C++ compiler). Calls are interleaved and go
round several sets of inputs, more than the cache holds; a set's screens are made before. The floor of a size is the
larger of bytes / bandwidth (readout and base logits, read once) and of operations / rate of a large product, both
measured in this process. Prints the machine, a line a method, and one JSON line at the end. Exits with 1 where a
screened id is not ours, or where plain names another id than ours although its logit, in fp64, is clearly apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

from measure import bandwidth, cache_bytes, count_sets, interleaved, machine, rate, rotating

from xpress.files import write_text

SIZES = {"cpu": [49152, 8192, 4096], "cuda": [151936, 32000]}
APART = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}  # of two logits, relative to the larger, or to 1
HEAD = "     V    R rows  method      ms [least, most]  ×plain  ×floor   MB read  GB/s (share)  rechecked"


def plain(base, latent, weight):
    return (base + latent @ weight.T).argmax(-1)


def inputs(V: int, R: int, rows: int, dtype, device, seed: int):
    """base [1,rows,V], latent [1,rows,R], weight [V,R]: logits of the size of a language model's, corrections of 1."""
    import torch

    draw = torch.Generator(device).manual_seed(seed)
    base, latent, weight = (
        torch.randn(size, generator=draw, device=device) for size in ((1, rows, V), (1, rows, R), (V, R))
    )
    return (base * 2.5).to(dtype), latent.to(dtype), (weight / R**0.5).to(dtype)


def measure(V: int, R: int, rows: int, args, speed: float, flops: float, compiled) -> list[dict]:
    """One size -> a row a method."""
    import torch

    from xpress.kernels import Screen, Screened, readout_argmax, screened_argmax

    def screened(bits):
        return lambda base, latent, weight, screens, **rest: screened_argmax(
            base, latent, weight, screens[bits], **rest
        )

    methods = {"plain": lambda *parts: plain(*parts[:3]), "ours": lambda *parts: readout_argmax(*parts[:3])}
    methods |= {"int8": screened(8), "int4": screened(4)}
    if compiled:
        methods["compiled"] = lambda *parts: compiled(*parts[:3])
    element = torch.empty((), dtype=getattr(torch, args.dtype)).element_size()
    full, base_bytes = (V * R + rows * V) * element, rows * V * element
    sets = []
    for seed in range(count_sets(max(3, 4 * cache_bytes(args.device) // full), len(methods))):
        parts = inputs(V, R, rows, getattr(torch, args.dtype), args.device, seed)
        sets.append((*parts, {bits: Screen.of(parts[2], bits) for bits in (8, 4)}))
    differ = compare(methods, sets[0], args.dtype)
    stats = {"int8": Screened(), "int4": Screened()}
    for name, counted in stats.items():
        for one in sets[:3]:
            methods[name](*one, stats=counted)
    following = rotating(sets, len(methods))
    calls = {name: (lambda run=run: run(*following())) for name, run in methods.items()}
    seconds = interleaved(calls, args.repeats, args.device)
    floor, found = max(full / speed, 2 * V * R * rows / flops), []
    middle = {name: statistics.median(spent) for name, spent in seconds.items()}
    for name, spent in seconds.items():
        counted = stats.get(name)
        moved = full if counted is None else base_bytes + counted.bytes_read / 3
        row = {"V": V, "R": R, "rows": rows, "method": name, "seconds": middle[name], "all_seconds": spent}
        row |= {"over_plain": middle[name] / middle["plain"], "floor": floor, "over_floor": middle[name] / floor}
        row |= {"bytes": moved, "share_of_bandwidth": moved / middle[name] / speed, "sets": len(sets)}
        row["ids_differ"] = differ[name]
        if counted is not None:
            row |= {"ids_rechecked": counted.ids_rechecked / 3, "close_rows": counted.close_rows / 3}
            row["full_rows"] = counted.full_rows / 3
        found.append(row)
    return found


def compare(methods: dict, parts: tuple, dtype: str) -> dict[str, int]:
    """Rows of one set in which a method names another id than ours: any for screens, clearly worse ones for others."""
    base, latent, weight, _ = parts
    ours, differ = methods["ours"](*parts), {}
    logits = base.double() + latent.double() @ weight.double().T
    for name, run in methods.items():
        ids = run(*parts)
        found, best = (logits.gather(-1, one[..., None])[..., 0] for one in (ids, ours))
        apart = (found - best).abs() > APART[dtype] * best.abs().clamp(min=1)
        differ[name] = int((ids != ours if name in ("int8", "int4") else apart).sum())
    return differ


def show(row: dict):
    rechecked = f"{row['ids_rechecked']:.0f} ids" if "ids_rechecked" in row else ""
    if row.get("close_rows") or row.get("full_rows"):
        rechecked += f", {row['close_rows']:.1f} close and {row['full_rows']:.1f} full rows"
    every = [1000 * second for second in row["all_seconds"]]
    print(
        f"{row['V']:>6} {row['R']:>4} {row['rows']:>4}  {row['method']:<8} {1000 * row['seconds']:>7.3f} "
        f"[{min(every):.3f}, {max(every):.3f}] {row['over_plain']:>6.2f} {row['over_floor']:>7.2f} "
        f"{row['bytes'] / 1e6:>9.1f} {row['bytes'] / row['seconds'] / 1e9:>7.1f} ({row['share_of_bandwidth']:.0%})  "
        f"{rechecked}{'  DIFFERS' if row['ids_differ'] else ''}",
        flush=True,
    )


def read_arguments(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add("--sizes", type=int, nargs="+", metavar="V", help=f"vocabularies; by default {SIZES}")
    add("--ranks", type=int, nargs="+", default=[64, 256], metavar="R")
    add("--rows", type=int, nargs="+", default=[7, 15])
    add("--dtype", choices=list(APART), help="float32 on a CPU and bfloat16 on CUDA by default")
    add("--repeats", type=int, default=21, help="timed calls of each method")
    add("--threads", type=int, help="torch's threads on a CPU; its own choice by default")
    add("--compile", action="store_true", help="measure plain under torch.compile too")
    add("--json", type=Path, metavar="PATH", help="write the JSON line there too")
    args = parser.parse_args(argv)
    kind = args.device.split(":")[0]
    if kind not in SIZES:
        parser.error(f"--device {args.device}: take one of {', '.join(SIZES)}")
    args.sizes, args.dtype = args.sizes or SIZES[kind], args.dtype or ("bfloat16" if kind == "cuda" else "float32")
    for name, values, low, high in (
        ("--sizes", args.sizes, 1, 2**31 - 1),
        ("--ranks", args.ranks, 2, 2**16),
        ("--rows", args.rows, 1, 4096),
        ("--repeats", [args.repeats], 1, 10**6),
        ("--threads", [args.threads or 1], 1, os.cpu_count()),
    ):
        if any(not low <= value <= high for value in values):
            parser.error(f"{name} {' '.join(map(str, values))}: must be within {low} … {high}")
    if any(rank % 2 for rank in args.ranks):
        parser.error(f"--ranks {' '.join(map(str, args.ranks))}: a copy of 4 bits wants even ones")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: no folder {args.json.absolute().parent}; make it first")
    return args


def main(argv=None) -> int:
    args = read_arguments(argv)
    import torch

    if args.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit(f"--device {args.device}: torch sees no CUDA device here; take --device cpu")
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = []
    with torch.no_grad():
        speed, flops = bandwidth(args.device), rate(args.device, getattr(torch, args.dtype))
        protocol = machine(args.device) | {"dtype": args.dtype, "repeats": args.repeats}
        protocol |= {"bytes_per_second": speed, "flop_per_second": flops}
        print("\n".join(f"{key}: {value}" for key, value in protocol.items()))
        print(HEAD)
        for V in args.sizes:
            for R in args.ranks:
                for count in args.rows:
                    compiled = torch.compile(plain, dynamic=False) if args.compile else None
                    new = measure(V, R, count, args, speed, flops, compiled)
                    for row in new:
                        show(row)
                    rows += new
    agree = not any(row["ids_differ"] for row in rows)
    line = json.dumps({"benchmark": "readout_argmax", "protocol": protocol, "agree": agree, "rows": rows})
    if args.json:
        write_text(args.json, line + "\n")
    print(line)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
