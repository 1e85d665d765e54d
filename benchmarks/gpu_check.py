"""One run on a new GPU: is everything right on it, and how fast is it? At most 8 minutes, compiling included.

    python benchmarks/gpu_check.py                      # wants torch, triton and transformers, nothing else
    python benchmarks/gpu_check.py --device cpu --small # the same on toy sizes with the references: are there typos?

First the laws of gpu_laws.py, one line each, ok or FAILED. Then readouts, passes and whole refine steps beside what
bytes over bandwidth predict and what was published; then the tables of the other benchmarks. Parts run as processes
with time limits of their own, so that one that hangs or dies leaves the others their time. The last line is JSON,
which $OUT/gpu_check.json gets too. Exit code 1 where a law or a part failed; a table that was cut off is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from measure import bandwidth, interleaved, machine, show  # noqa: E402

ALL = 470  # seconds: what does not fit any more is left out, with a line
ASSUMED = 4.3e12  # bytes a second of an H200, where none can be measured
NODE, LATENT = (
    1.5e-6,
    5e-6,
)  # seconds between two launches of a graph; of the latents of a pass, whose weights lie in L2
PAPER = {"pass": 75e-6, "K=4": 379e-6, "K=6": 530e-6, "K=8": 681e-6}  # published, for V 151936, R 256, B 16
AIM = {("bf16", "pass"): 25e-6, ("int8", "pass"): 12e-6, ("int8", "K=6"): 90e-6}
KS = (0, 4, 6, 8, "auto")
AT_ONCE = 10  # calls between two looks at the clock: the device, not the host, should be what is timed


# --- passes and steps -----------------------------------------------------------------------------------------------


def predicted(form: str, size: dict, rate: float) -> dict:
    """Seconds of a readout, a pass and K passes: bytes over bandwidth, and what launches cost."""
    base = size["rows"] * size["V"] * 2
    readout = (size["bytes"][form] + base) / rate
    launches = 1 if form == "bf16" else 4  # two more buffers to set and the second look of a screen
    step = readout + launches * NODE + LATENT + NODE
    seed = base / rate + 2 * NODE
    return {"readout": readout, "pass": step, **{f"K={K}": seed + K * step for K in KS if K != "auto"}}


@torch.inference_mode()
def passes(device: str, small: bool) -> dict:
    """Measured and predicted seconds of readouts, passes and steps; prints the table."""
    from gpu_laws import Case, block_and_head

    from xpress import kernels
    from xpress.kernels import Graphs, RefineStep, Screen

    case, cuda = Case.small(device) if small else Case(device), device.startswith("cuda")
    rate = bandwidth(device, 2**20 if small else 2**28)
    used = rate if cuda else ASSUMED
    print(f"bandwidth: {rate / 1e12:.3f} TB/s measured, predictions with {used / 1e12:.3f}")
    repeats, at_once, found = *((1, 1) if small else (15, AT_ONCE)), []
    for V in case.vocabularies:
        parts = [block_and_head(case, V, 1, torch.bfloat16, seed) for seed in range(1 if small else 3)]
        size = {"V": V, "rows": case.B - 1, "bytes": {}}
        functions, timed = {}, {}
        for form, bits in (("bf16", None), ("int8", 8), ("int4", 4)):
            turns = []
            for block, head in parts:
                weight = head.readout.weight
                screen = None if bits is None else Screen.of(weight, bits)
                size["bytes"][form] = weight.numel() * 2 if screen is None else screen.bytes
                latent = block.rows(
                    head.latent(head.prepare(block.hidden), block.prev_ids(block.base_logits().argmax(-1)))
                )
                sizes = {"num_blocks": 1, "num_draft": block.num_draft, "num_known": 2}
                step = RefineStep(head.weights(), weight, **sizes, screen=screen)
                known = block.prev_ids(block.anchor[:, None])[:, :2]
                constant = head.constant(head.prepare(block.hidden), known)
                keys = torch.zeros(1, block.num_draft, dtype=torch.long, device=device)
                turns.append((block.base_logits(), latent.contiguous(), weight, screen, keys, constant, step))

            def readouts(base, *, turns=turns):
                for _ in range(at_once):
                    for base, latent, weight, screen, keys, *_ in turns:
                        how = {"keys": keys, "reset": False, "packed": True}
                        if screen is None:
                            kernels.readout_argmax(base, latent, weight, **how)
                        else:
                            kernels.screened_argmax(base, latent, weight, screen, **how)
                return (base,)

            # each set has graphs of its own, and one graph holds all readouts in turn
            whole = Graphs(lambda base, *, readouts=readouts: readouts(base), name="readouts")
            call = lambda whole=whole, turns=turns: whole(turns[0][0])  # noqa: E731
            functions[form, "readout"], timed[form, "readout"] = call, at_once * len(turns)
            steps = [
                Graphs(lambda base, constant, *, passes, step=turn[-1]: step(base, constant, passes, poll=False))
                for turn in turns
            ]
            for K in KS:

                def run(K=K, steps=steps, turns=turns):
                    for _ in range(at_once):
                        for graphs, turn in zip(steps, turns):
                            graphs(turn[0], turn[5], passes=K)

                functions[form, f"K={K}"], timed[form, f"K={K}"] = run, at_once * len(turns)
        times = interleaved(functions, repeats, device)
        seconds = {key: sorted(values)[len(values) // 2] / timed[key] for key, values in times.items()}
        for form in size["bytes"]:
            seconds[form, "pass"] = (seconds[form, "K=8"] - seconds[form, "K=4"]) / 4
            model, rows = predicted(form, size, used), []
            for what in ("readout", "pass", "K=0", "K=4", "K=6", "K=8", "K=auto"):
                row = {
                    "V": V,
                    "form": form,
                    "what": what,
                    "prediction": model.get(what),
                    "measured": seconds[form, what],
                }
                if V == 151936:
                    row |= {"paper": PAPER.get(what), "aim": AIM.get((form, what))}
                if what == "readout":
                    row["bytes"] = size["bytes"][form] + size["rows"] * V * 2
                    row["of_bandwidth"] = row["bytes"] / row["measured"] / rate
                rows.append(row)
            found += rows
    cell = lambda value: "" if value is None else f"{value * 1e6:.1f}"  # noqa: E731
    print(
        "µs from base logits to tokens, one block; measured: medians of calls in a row" + ("" if cuda else ", of a CPU")
    )
    table = [
        [str(row["V"]), row["form"], row["what"], cell(row["prediction"]), cell(row["measured"])]
        + [cell(row.get("paper")), cell(row.get("aim"))]
        + [f"{row['bytes'] / 1e6:.1f} MB, {row['of_bandwidth']:.2f}" if "bytes" in row else ""]
        for row in found
    ]
    show(["V", "form", "what", "prediction", "measured", "paper", "aim", "bytes, share of the bandwidth"], table)
    return {"benchmark": "gpu_check passes", "bandwidth": rate, "predicted_with": used, "rows": found}


# --- parts as processes ---------------------------------------------------------------------------------------------


class Part:
    """A process whose lines are printed as they come. answer: its last line that is JSON."""

    def __init__(self, name: str, command: list[str], limit: float):
        self.name, self.answer, self.lines = name, None, []
        start = time.monotonic()
        # a group of its own, so that what it started goes with it
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, **streams, env=env, start_new_session=True)
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        try:
            self.code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            self.code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(timeout=5)
        self.seconds = time.monotonic() - start

    def _read(self, process):
        for line in process.stdout:
            line = line.rstrip("\n")
            self.lines.append(line)
            if line.startswith('{"benchmark"'):
                self.answer = json.loads(line)
            elif not line.startswith("begin "):
                print(line, flush=True)

    def facts(self) -> dict:
        return {"code": self.code, "seconds": round(self.seconds, 1), "answer": self.answer}


def laws(arguments, limit: float) -> dict:
    """{check: [verdict, what it said]}; a process that dies or hangs fails the check at which it stood, and another
    goes on behind it."""
    found: dict = {}
    end = time.monotonic() + limit
    while True:
        command = [sys.executable, str(HERE / "gpu_laws.py"), "--device", arguments.device, "--skip", *found]
        part = Part("laws", command + ["--small"] * arguments.small, max(1.0, end - time.monotonic()))
        began = None
        for line in part.lines:
            verdict, _, said = line.partition(" ")
            name, _, said = said.strip().partition(": ")
            if verdict == "begin":
                began = name
            elif verdict in ("ok", "FAILED") and name == began:
                found[name], began = [verdict, said], None
        if part.code == 0:
            return found
        if began is not None:
            why = "no answer in time" if part.code is None else f"the process ended with {part.code}"
            found[began] = ["FAILED", why]
            print(f"FAILED {began}: {why}", flush=True)
        elif not any(line.startswith("begin ") for line in part.lines):
            found["start"] = ["FAILED", " ".join(part.lines[-3:])]  # as it could not even begin, another could not
            return found
        if time.monotonic() > end - 5:
            found["rest"] = ["FAILED", "no time left for the other checks"]
            print("FAILED rest: no time left for the other checks", flush=True)
            return found


def tables(arguments) -> list[tuple[str, list[str], float]]:
    """(name, command, limit in seconds) of what is measured, the most telling first."""
    script = lambda name, *more: [sys.executable, str(HERE / f"{name}.py"), *more]  # noqa: E731
    here = ["--device", arguments.device]
    taus = ["--tau", "bare=4.0", "4=5.0", "auto=5.0", "--passes", "4", "auto"]
    shape = ["--shape", "qwen3_8b", "--dtype", "bfloat16"]
    shape += ["--loop", "static"] if arguments.device.startswith("cuda") else []
    speed, steps = ["--tokens", "64", "--prompts", "2", "--repeats", "3"], ["--steps", "--repeats", "9"]
    latency = ["--repeats", "7"]
    if arguments.small:
        shape, taus = ["--shape", "toy"], ["--tau", "bare=1.5", "1=2.0", "--passes", "1"]
        speed, steps = ["--tokens", "4", "--prompts", "1", "--repeats", "1"], ["--steps", "--repeats", "1"]
        latency = ["--repeats", "1", "--sets", "1", "--sizes", "64:16:4:32"]
    found = [
        ("passes", script("gpu_check", "--part", "passes", *here, *["--small"] * arguments.small), 80),
        ("decode_speed", script("decode_speed", *shape, *here, *speed, *taus), 110),
        ("steps", script("decode_speed", *shape, *here, *steps), 70),
        ("refine_latency", script("refine_latency", *here, *latency), 100),
    ]
    few = ["--sizes", "1000", "--ranks", "64", "--rows", "7", "--repeats", "3"] if arguments.small else []
    found.append(("readout_argmax", script("readout_argmax", *here, *few), 60))
    return found


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    parser.add_argument("--part", choices=("passes",), help=argparse.SUPPRESS)
    parser.add_argument("--without", nargs="*", default=[], metavar="PART", help="laws, or names of tables")
    arguments = parser.parse_args(argv)
    cuda = arguments.device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        sys.exit(
            f"error: --device {arguments.device}: torch {torch.__version__} sees no GPU; --device cpu --small tries"
        )
    if arguments.part:
        print(json.dumps(passes(arguments.device, arguments.small)))
        return 0
    end, facts = time.monotonic() + ALL, machine(arguments.device)
    if cuda:
        own = torch.cuda.get_device_properties(arguments.device)
        facts |= {"l2_bytes": own.L2_cache_size, "multiprocessors": own.multi_processor_count}
        facts |= {"memory_bytes": own.total_memory, "cuda": torch.version.cuda}
    print(" | ".join(f"{key}: {value}" for key, value in facts.items()), flush=True)
    result = {"benchmark": "gpu_check", "small": arguments.small, **facts, "laws": {}, "parts": {}}
    failed = []
    if "laws" not in arguments.without:
        result["laws"] = laws(arguments, 170)
        failed += [name for name, (verdict, _) in result["laws"].items() if verdict != "ok"]
    for name, command, limit in tables(arguments):
        limit = min(limit, end - time.monotonic())
        if name in arguments.without or limit < 5:
            print(f"\n{name}: left out" + ("" if name in arguments.without else ", no time left"))
            continue
        print(f"\n--- {name}, at most {limit:.0f} s: {' '.join(command[1:])}", flush=True)
        part = Part(name, command, limit)
        result["parts"][name] = part.facts()
        if part.code is None:
            print(f"{name}: cut off after {part.seconds:.0f} s")
        elif part.code or part.answer is None:
            print(f"FAILED {name}: ended with {part.code}")
            failed.append(name)
    result["failed"] = failed
    print(f"\n{'FAILED: ' + ', '.join(failed) if failed else 'all laws hold, all tables were made'}")
    line = json.dumps(result)
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "gpu_check.json").write_text(line + "\n")
    print(line)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
