"""Seconds and memory of one training step: ours, the same loss written plainly, and the `speculators` package.

    python benchmarks/train_step.py --speculators-python <an environment with speculators>/bin/python

One step is forward, backward and AdamW of drafter and head in fp32 on the CPU, target features given, at SmolLM2-135M's
sizes over the full vocabulary with random weights, under configs/objective/xpress.yaml; competitors.py holds the
three. Memory is what the first step of a fresh process adds to model, optimizer state and inputs; its loss and
gradients are compared with ours (same weights, inputs and anchors). Time is taken in processes of their own, a step of
each competitor in turn after one to warm up; CPU seconds stand beside it, for machines that others use too. Prints the
protocol, a line a measurement with its ratios, and one JSON line at the end. Exits with 1 where ours and the plain loss
disagree.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from measure import commit, cpu_name

from xpress.files import write_text

WORKER = Path(__file__).with_name("step_worker.py")
CONTEXT, MASK = 512, 16  # competitors.py's own, which loads torch
LOSS_GAP, GRADIENT_GAP = 1e-5, 1e-3  # relative, fp32; the gradient of L1 flips its sign where q and p meet
MIB = 2**20
HOW_TO_ADD = """speculators: skipped, {python} cannot import it ({reason})
  to add it: python -m venv spec && spec/bin/pip install speculators==0.9.0
  then give: --speculators-python spec/bin/python"""


class Worker:
    """A process of step_worker.py. Once something failed, `failed` says what, and every further answer is empty."""

    def __init__(self, kind: str, python: str, exact_memory: bool = False, **case):
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        env = {**os.environ, **dict.fromkeys(names, str(case["threads"])), "HF_HUB_OFFLINE": "1"}
        if exact_memory:  # every tensor its own mapping, returned when freed: how full the heap is does not show
            env["MALLOC_MMAP_THRESHOLD_"] = "65536"
        self.failed, self.missing, self.log = None, False, tempfile.TemporaryFile("w+")
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=env)
        self.process = subprocess.Popen([python, str(WORKER), kind, json.dumps(case)], **pipes)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        self.log.close()

    def ask(self, command: str) -> dict:
        if self.failed:
            return {}
        try:
            print(command, file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self.process.wait()
            self.log.seek(0)
            said = "killed, most likely for memory" if code < 0 else " ".join(self.log.read().splitlines()[-1:])
            line = json.dumps({"error": f"ended with status {code}: {said}", "missing": False})
        answer = json.loads(line)
        if "error" in answer:
            self.failed, self.missing = answer["error"], answer["missing"]
            return {}
        return answer


def gradient_gap(ours: dict, theirs: dict) -> float:
    """Gradients {name: tensor} of two competitors -> the largest ‖a − b‖ / ‖a‖ over the weights.

    Raises ValueError where they do not train the same weights.
    """
    shapes, others = ({name: tuple(w.shape) for name, w in found.items()} for found in (ours, theirs))
    if shapes != others:
        raise ValueError(f"other weights than ours: {sorted(set(shapes.items()) ^ set(others.items()))}")
    # where the loss does not reach a weight, both are zero
    return max(float((w - theirs[name]).norm() / w.norm().clamp(min=1e-30)) for name, w in ours.items())


def measure(pythons: dict[str, str], repeats: int, **case) -> list[dict]:
    """One case -> a row a competitor, "ours" first; a row of one that fails says why in `failed`."""
    from safetensors.torch import load_file  # torch only when the arguments are known to be good

    first, seconds, cpu, failed = {}, {name: [] for name in pythons}, {name: [] for name in pythons}, {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for name, python in pythons.items():
            with Worker(name, python, exact_memory=True, **case) as worker:
                first[name] = worker.ask(f"first {folder}/{name}")
            failed[name] = worker.failed
            if first[name] and len(first[name]["anchors"]) != case["blocks"]:
                failed[name] = f"drew {len(first[name]['anchors'])} anchors, {case['blocks']} were asked for"
        names = [name for name in pythons if not failed[name]]
        workers = {name: stack.enter_context(Worker(name, pythons[name], **case)) for name in names}
        for turn in range(1 + repeats):  # the first is a warm-up
            for name, worker in workers.items():
                found = worker.ask("step")
                failed[name] = worker.failed
                if turn and found:
                    seconds[name].append(found["seconds"])
                    cpu[name].append(found["cpu_seconds"])
        if failed["ours"]:
            raise RuntimeError(f"ours, {case}: {failed['ours']}")
        grads = {name: load_file(f"{folder}/{name}") for name, found in first.items() if found}
    rows = []
    for name in pythons:
        row = {key: case[key] for key in ("block_size", "blocks")} | {"competitor": name}
        rows.append(row)
        if failed[name]:
            row["failed"] = failed[name]
            continue
        ours, found = first["ours"], first[name]
        row["seconds_per_step"], row["all_seconds"] = statistics.median(seconds[name]), seconds[name]
        row["cpu_seconds_per_step"] = statistics.median(cpu[name])
        row["peak_bytes"], row["loss"], row["anchors"] = found["peak"], found["loss"], len(found["anchors"])
        row["time_over_ours"] = row["seconds_per_step"] / rows[0]["seconds_per_step"]
        row["peak_over_ours"] = found["peak"] / max(1, ours["peak"])
        row["same_anchors"] = found["anchors"] == ours["anchors"]
        row["loss_gap"] = abs(found["loss"] - ours["loss"]) / abs(ours["loss"])
        row["gradient_gap"] = gradient_gap(grads["ours"], grads[name])
        row["parameters"] = found["parameters"]
    return rows


def show(rows: list[dict]):
    for row in rows:
        start = f"{row['block_size']:>5} {row['blocks']:>6}  {row['competitor']:<11} "
        if "failed" in row:
            print(f"{start} failed: {row['failed']}", flush=True)
            continue
        print(
            f"{start} {row['anchors']:>7}{'' if row['same_anchors'] else '*'} {row['seconds_per_step']:>9.3f} "
            f"[{min(row['all_seconds']):.3f}, {max(row['all_seconds']):.3f}] {row['time_over_ours']:>6.2f} "
            f"{row['cpu_seconds_per_step']:>9.3f} "
            f"{row['peak_bytes'] / MIB:>9.0f} {row['peak_over_ours']:>6.2f}  "
            f"{row['loss_gap']:.1e} {row['gradient_gap']:.1e}",
            flush=True,
        )


def read_arguments(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--blocks", type=int, nargs="+", default=[64, 256], help="anchors of a step")
    add("--block-sizes", type=int, nargs="+", default=[8, 16], help="slots of a block")
    add("--threads", type=int, default=1)
    add("--repeats", type=int, default=5, help="timed steps of each competitor")
    add("--vocab", type=int, default=49152)
    add("--json", type=Path, metavar="FILE", help="write the JSON line there too")
    add("--speculators-python", metavar="PATH", default=sys.executable, help="an interpreter that has speculators")
    args = parser.parse_args(argv)
    room = CONTEXT - max(args.block_sizes)
    for name, values, low, high in (
        ("--blocks", args.blocks, 1, room),
        ("--block-sizes", args.block_sizes, 2, CONTEXT - 1),
        ("--threads", [args.threads], 1, os.cpu_count()),
        ("--repeats", [args.repeats], 1, 10**6),
        ("--vocab", [args.vocab], MASK + 1, 10**7),
    ):
        if any(not low <= value <= high for value in values):
            parser.error(f"{name} {' '.join(map(str, values))}: must be within {low} … {high}")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: no folder {args.json.absolute().parent}; make it first")
    if not os.access(args.speculators_python, os.X_OK):
        parser.error(f"--speculators-python {args.speculators_python}: no such program")
    return args


def main(argv=None) -> int:
    args = read_arguments(argv)
    fixed = dict(vocab=args.vocab, threads=args.threads)
    pythons = {"ours": sys.executable, "plain": sys.executable, "speculators": args.speculators_python}
    found = {"ours": {name: version(name) for name in ("torch", "transformers")}}
    with Worker("speculators", args.speculators_python, blocks=1, block_size=2, **fixed) as worker:
        if answer := worker.ask("versions"):
            found["speculators"] = answer
        elif worker.missing:
            print(HOW_TO_ADD.format(python=pythons.pop("speculators"), reason=worker.failed))
        else:
            raise RuntimeError(f"speculators in {args.speculators_python}: {worker.failed}")
    protocol = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "cpu": cpu_name(),
        "threads": args.threads,
        "python": platform.python_version(),
        "versions": found,
        "dtype": "float32",
        "vocab": args.vocab,
        "context": CONTEXT,
        "repeats": args.repeats,
    }
    print("\n".join(f"{key}: {value}" for key, value in protocol.items()))
    print(
        "block blocks  competitor   anchors  s a step [min, max]  ×ours   CPU s  peak MiB  ×ours  gaps: loss, gradients"
    )
    rows, alone = [], []
    for block_size in args.block_sizes:
        for blocks in args.blocks:
            case = dict(blocks=blocks, block_size=block_size, **fixed)
            new = measure(pythons, args.repeats, **case)
            show(new)
            rows += new
            with Worker("ours", sys.executable, exact_memory=True, **case) as worker:
                own = worker.ask("loss")
                if worker.failed:
                    raise RuntimeError(f"the loss alone, {case}: {worker.failed}")
            alone.append(dict(block_size=block_size, blocks=blocks, **own, step_bytes=new[0]["peak_bytes"]))
    print(
        "our loss alone, above its inputs and their gradients (in brackets the whole step, which grows with the blocks)"
    )
    for one in alone:
        sizes = f"{one['bytes'] / MIB:.0f} MiB ({one['step_bytes'] / MIB:.0f} MiB)"
        print(f"{one['block_size']:>5} {one['blocks']:>6}  {sizes}")
    plain = [row for row in rows if row["competitor"] == "plain" and "failed" not in row]
    agree = all(row["loss_gap"] <= LOSS_GAP and row["gradient_gap"] <= GRADIENT_GAP for row in plain)
    verdict = "agree" if agree else "DISAGREE"
    print(f"ours and the plain loss {verdict} in {len(plain)} cases (loss to {LOSS_GAP}, gradients to {GRADIENT_GAP})")
    result = {"benchmark": "train_step", "protocol": protocol, "agree": agree, "rows": rows, "loss_alone": alone}
    line = json.dumps(result)
    if args.json:
        write_text(args.json, line + "\n")
    print(line)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
