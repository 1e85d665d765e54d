"""Sums of one step or one evaluation, over micro-batches and processes, and the numbers made of them.

Only additive pairs are summed: losses with their weights, accepted blocks with their count. So the numbers do not
depend on how the rows were split over batches and processes.
"""

from __future__ import annotations

import resource
import sys
import time

import torch

from xpress.anchors import PADDING, Anchors, Batch
from xpress.trainee import Outcome, Trainee


class Meter:
    """`add` each micro-batch, then read `facts` once, on all processes together."""

    def __init__(self, trainee: Trainee, accelerator):
        self.trainee, self.accelerator = trainee, accelerator
        self.parts: dict[str, torch.Tensor] = {}

    def add(self, outcome: Outcome, batch: Batch, anchors: Anchors):
        counts = {"blocks": anchors.valid.sum(), "tokens": (batch.documents != PADDING).sum()}
        found = {"sums": outcome.sums, "weights": outcome.weights, "rounds": outcome.rounds} | counts
        found |= {f"accepted/{name}": counted for name, counted in outcome.accepted.items()}
        for name, value in found.items():
            value = value.detach().double().to(self.accelerator.device)
            self.parts[name] = self.parts[name] + value if name in self.parts else value

    def facts(self, stop: bool = False) -> dict:
        """-> loss/<term>, loss/<term>/<round> of a self-fed term, tau/<who> and accept/<who> (share of blocks whose
        first k draft tokens equal the data's), blocks, tokens, peak_memory_gb, and whether a process wants to stop."""
        parts = self.parts | {"stop": torch.tensor(float(stop), dtype=torch.float64, device=self.accelerator.device)}
        flat = self.accelerator.reduce(torch.cat([value.reshape(-1) for value in parts.values()]), "sum").tolist()
        read = {}
        for name, value in parts.items():
            read[name], flat = flat[: value.numel()], flat[value.numel() :]
        found = {}
        for term, total, weight in zip(self.trainee.terms, read["sums"], read["weights"]):
            found[f"loss/{term.name}"] = total / max(weight, 1e-12)
            if term.feed == "self":
                rounds = enumerate(read["rounds"], 1)
                found |= {f"loss/{term.name}/{i}": total / max(weight, 1e-12) for i, total in rounds}
        blocks = max(read["blocks"][0], 1)
        for name in ("drafter", "head"):
            if f"accepted/{name}" in read:
                shares = [count / blocks for count in read[f"accepted/{name}"]]
                found |= {f"tau/{name}": 1 + sum(shares), f"accept/{name}": shares}
        return {
            **found,
            "blocks": int(read["blocks"][0]),
            "tokens": int(read["tokens"][0]),
            "peak_memory_gb": round(peak_memory(self.accelerator.device) / 1e9, 3),
            "stop": read["stop"][0] > 0,
        }


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak so far: of this GPU, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Pace:
    """Seconds of the run, and tokens and blocks a second since the last call."""

    def __init__(self, spent: float):
        self.start, self.last = time.perf_counter() - spent, time.perf_counter()

    def __call__(self, facts: dict) -> dict:
        now = time.perf_counter()
        took, self.last = max(now - self.last, 1e-9), now
        found = {"seconds": round(now - self.start, 3)}
        return found | {f"{name}_per_s": round(facts[name] / took, 1) for name in ("tokens", "blocks")}

    def leave_out(self):
        """The time since the last call counts for no step."""
        self.last = time.perf_counter()
