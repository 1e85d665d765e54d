"""Does an engine accept as many tokens as we say? A drafter written as a z-lab folder, served by vLLM, beside our loop.

    python benchmarks/served_tau.py --checkpoint outputs/my_run --engine-python vllm/bin/python --bench gsm8k

Both sides read the very folder that is written here and the same target, greedily, one prompt at a time, in the same
dtype. Engines part from us at near-ties of the target, and a text that parts has other rounds, so tau is compared on
prompts whose answers are equal, over all rounds but each answer's last, which limit and stop token cut. Prints a table,
then one JSON line; exits with 1 where the two differ by more than --within.

vLLM 0.32.0 on a CPU norms the context's keys of every drafter layer by the first layer's k_norm, which moves hidden
states by some percent and about one round in twenty; with --mend it norms each layer by its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import measure
import torch
from tqdm import tqdm

from xpress import checkpoint, interop, parts
from xpress.decode import generate
from xpress.files import write_text
from xpress.interop import zlab
from xpress.prompts import load_prompts, render, stop_ids


def ours(target, drafter, prompts: list[list[int]], tokens: int) -> list[dict]:
    """-> ids of each answer and what each of its rounds emitted, as the engine's worker has them."""
    stops, answers = stop_ids(target.tokenizer, target.model), []
    for ids in tqdm(prompts, desc="ours", disable=not sys.stderr.isatty()):
        found = generate(target, ids, drafter, max_new_tokens=tokens, stop_ids=stops)
        answers.append({"ids": found.ids, "rounds": [len(step.tokens) for step in found.rounds]})
    return answers


def tau(answers: list[dict]) -> float | None:
    """Tokens a round over all rounds but each answer's last; None where there is no such round."""
    kept = [answer["rounds"][:-1] for answer in answers]
    rounds = sum(map(len, kept))
    return sum(map(sum, kept)) / rounds if rounds else None


def compared(our: list[dict], engine: list[dict]) -> dict:
    """Both sides' tau on the answers that are equal, and on all."""
    equal = [pair for pair in zip(our, engine) if pair[0]["ids"] == pair[1]["ids"]]
    first, second = ([pair[side] for pair in equal] for side in (0, 1))
    return {
        "prompts": len(our),
        "equal": len(equal),
        "equal_rounds": sum(a["rounds"][:-1] == b["rounds"][:-1] for a, b in equal),
        "rounds": sum(len(answer["rounds"][:-1]) for answer in first),
        "ours": tau(first),
        "engine": tau(second),
        "ours_all": tau(our),
        "engine_all": tau(engine),
    }


def read_arguments(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--checkpoint", metavar="FOLDER", required=True, help="of any format; its head is left out")
    add("--engine-python", metavar="PATH", required=True, help="an interpreter that has vLLM")
    add("--target", metavar="FOLDER", help="default: the checkpoint's")
    add("--bench", default="sample")
    add("--data-dir", metavar="FOLDER")
    add("--samples", type=int, default=32)
    add("--tokens", type=int, default=96, help="new tokens of each prompt at most")
    add("--dtype", default="float32")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--mend", action="store_true", help="norm context keys by layer, which vLLM 0.32.0 on a CPU does not")
    add("--within", type=float, default=0.02, help="the difference of tau that is let pass")
    add("--json", type=Path, metavar="FILE", help="write the JSON line there too")
    args = parser.parse_args(argv)
    for name, least in (("samples", 1), ("tokens", 3), ("threads", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: must be at least {least}")
    if not os.access(args.engine_python, os.X_OK):
        parser.error(f"--engine-python {args.engine_python}: no such program")
    return args


def main(argv=None) -> int:
    args = read_arguments(argv)
    torch.set_num_threads(args.threads)
    try:
        place = checkpoint.locate(parts.find(args.checkpoint))
        name = parts.target_of(args.target, [place])
        target = parts.make_target({"name": name}, "cpu", parts.dtype_of(args.dtype, "cpu"))
        chosen = load_prompts(args.bench, args.samples, args.data_dir)
        prompts = [render(target.tokenizer, [{"role": "user", "content": p.turns[0]}], False) for p in chosen]
        with tempfile.TemporaryDirectory() as home:
            folder = Path(home, "drafter")
            weights = interop.plan(place, target)
            drop = [part for part in interop.DROPS if getattr(weights, part) is not None]
            interop.convert(place, folder, zlab.NAME, target, drop=drop)
            drafter = interop.load(folder, target, target.dtype, say=None).drafter
            ask = {"method": "dflash", "model": str(folder), "num_speculative_tokens": drafter.config.num_draft}
            request = {"ask": "rounds", "model": str(parts.find(name)), "speculative": ask, "dtype": args.dtype}
            request |= {"prompts": prompts, "tokens": args.tokens, "threads": args.threads, "mend": args.mend}
            found = measure.ask_engine(args.engine_python, request, echo=True)
        our = ours(target, drafter, prompts, args.tokens)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    row, counters = compared(our, found["answers"]), found["counters"]
    row |= {"counted": 1 + counters["accepted_tokens"] / counters["drafts"]} if counters.get("drafts") else {}
    number = lambda value: "–" if value is None else f"{value:.3f}"  # noqa: E731
    columns = ["", "prompts", "rounds", "ours", f"vLLM {found['version']}"]
    same = ["equal answers, last rounds left out", str(row["equal"]), str(row["rounds"])]
    every = ["all answers, last rounds left out", str(row["prompts"]), ""]
    measure.show(
        columns,
        [
            [*same, number(row["ours"]), number(row["engine"])],
            [*every, number(row["ours_all"]), number(row["engine_all"])],
            ["all rounds, as the engine counts", "", "", "", number(row.get("counted"))],
        ],
    )
    print(f"answers whose every round is equal: {row['equal_rounds']} of {row['equal']}")
    protocol = {name: getattr(args, name) for name in ("bench", "tokens", "dtype", "checkpoint", "mend")}
    line = json.dumps({"benchmark": "served_tau", "protocol": protocol | measure.machine(), **row})
    if args.json:
        write_text(args.json, line + "\n")
    print(line)
    if row["ours"] is None:
        print("no answer is equal: nothing is compared", file=sys.stderr)
        return 1
    return int(abs(row["ours"] - row["engine"]) > args.within)


if __name__ == "__main__":
    sys.exit(main())
