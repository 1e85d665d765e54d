"""Results as eval_tau.py writes them, made up: for what reads them."""

import random

G = 7
RECALL = ("1", "2", "4", "8", "16", "64", "256")


def make_row(label, kind="head", head=None, passes=None, *, strength=0.6, speed=20.0, slowest=20.0, seed=0, **over):
    """A method's row in which every field has a value; `strength` is its acceptance of the first draft token."""
    draw = random.Random(f"{label} {seed}")
    conditional = [max(0.05, strength * (0.97**k) + draw.uniform(-0.02, 0.02)) for k in range(G)]
    accept, share = {}, 1.0
    for k, chance in enumerate(conditional, 1):
        share *= chance
        accept[str(k)] = share
    if kind == "ar":
        conditional, accept = [], {}  # a round of plain autoregression is one token
    rounds = 1000 + draw.randrange(1000)
    shares = [1.0, *accept.values(), 0.0]
    tau = 1 + sum(accept.values())
    used = {"auto": 3.2, "sequential": float(G)}.get(passes, passes or 0)
    speedup = speed / slowest
    row = {
        "label": label,
        "kind": kind,
        "checkpoint": None if kind in ("ar", "bare") else "my_run",
        "head": head,
        "passes": passes,
        "threshold": None,
        "note": None,
        "tau": tau,
        "tau_interval": [tau - 0.11, tau + 0.12],
        "tau_macro": tau + 0.03,
        "tau_macro_interval": [tau - 0.1, tau + 0.17],
        "tau_without_loops": tau - 0.04,
        "loops": draw.uniform(0, 0.1),
        "tokens_per_round": tau - 0.015,
        "accept_at": accept,
        "histogram": [round(rounds * (a - b)) for a, b in zip(shares, shares[1:])],
        "conditional": conditional,
        "conditional_count": [round(rounds * a) for a in shares[: len(conditional)]],
        "longest": len(conditional),
        "drafted": float(len(conditional)),
        "passes_used": used,
        "settled": [1 - 0.7 * 0.5**K for K in range(G + 1)] if passes == "auto" else None,
        "recall": {k: [min(1.0, c + 0.04 * i) for c in conditional] for i, k in enumerate(RECALL)},
        "refined_rank": {"mean": [1 + 0.31 * k for k in range(len(conditional))], "first": conditional[::-1]},
        "expected": [c * 0.98 for c in conditional],
        "observed": [c * 0.99 for c in conditional],
        "time": {
            "draft": 0.0 if kind == "ar" else 0.0121,
            "readout": 0.0 if kind == "ar" else 0.0043,
            "refine": 0.0011 * used,
            "verify": 0.0317,
            "harness": 0.0009,
        },
        "harness_share": 0.021,
        "tokens_per_second": speed,
        "speedup": speedup,
        "speedup_interval": [speedup * 0.94, speedup * 1.07],
        "peak_memory": 1_234_000_000 + draw.randrange(10**9),
        "rounds": rounds,
        "tokens": rounds * 2,
        "responses": 24,
        "lossless": True,
        "differences": [],
    }
    return {**row, **over}


def make_cell(bench="gsm8k", batch_size=1, *, checkpoint=None, lift=0.0, seed=0) -> dict:
    """Every kind of method. A near-tie is among the differences of `refiner K=1`."""
    grow = batch_size**0.8
    tag = f"{checkpoint}: " if checkpoint else ""

    def make(*args, speed=20.0, **how):
        return make_row(*args, speed=speed * grow, slowest=20 * grow, seed=f"{bench} {seed}", **how)

    rows = [
        make("ar", "ar", speed=20.0),
        make("bare", "bare", strength=0.45 + lift, speed=22.0),
        make(f"{tag}drafter", "drafter", strength=0.5 + lift, speed=24.0),
        make(f"{tag}markov sequential", head="MarkovHead", passes="sequential", strength=0.58 + lift, speed=27.0),
    ]
    for K in range(1, 9):
        gain = 0.62 + lift + 0.1 * (1 - 0.6**K)
        speed = 29 + 3 * lift * 10 - 0.6 * (K - 3) ** 2 / 3
        rows.append(make(f"{tag}refiner K={K}", head="Refiner", passes=K, strength=gain, speed=speed))
    rows.append(make(f"{tag}refiner K=auto", head="Refiner", passes="auto", strength=0.72 + lift, speed=28.3))
    tie = {"prompt": f"{bench}-7", "at": 41, "gap": 3.4e-4, "limit": 1e-3, "tie": True, "turn": 0}
    rows[4]["differences"] = [tie]
    validation = [{"passes": K, "tokens_per_second": 25.3 + K} for K in (1, 2, 4)]
    last = rows[-1]["label"]
    return {
        "bench": bench,
        "batch_size": batch_size,
        "prompts": 24,
        "truncated": 2,
        "best": {"passes": 4, "validation_prompts": 12, "validation": validation},
        "methods": rows,
        "paired": [
            {"a": last, "b": "bare", "metric": "tau", "value": 0.312, "interval": [0.204, 0.417]},
            {"a": last, "b": "bare", "metric": "speed", "value": 1.287, "interval": [1.119, 1.445]},
        ],
    }


def make_result(benches=("gsm8k",), sizes=(1,), *, checkpoint=None, warnings=(), **protocol) -> dict:
    cells = [
        make_cell(bench, size, checkpoint=checkpoint, lift=0.05 * place)
        for place, bench in enumerate(benches)
        for size in sizes
    ]
    facts = {"protocol": "free", "target": "SmolLM2-135M-Instruct", "target_sha256": "12ab" * 16}
    facts |= {"checkpoints": ["outputs/my_run"], "samples": 24, "temperature": 0.0, "top_k": None, "top_p": 1.0}
    facts |= {"accept": "exact", "max_new_tokens": 256, "thinking": False, "seed": 0, "turns": 1, "dtype": "float32"}
    facts |= {"device": "cpu", "threads": 2, "torch": "2.13.0", "transformers": "5.24.0", "commit": "abc1234"}
    return {"format": 1, "protocol": facts | protocol, "warnings": list(warnings), "cells": cells}
