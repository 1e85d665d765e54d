"""The numbers of a training run, and which of them a resumed run may change."""

from __future__ import annotations

import math
from dataclasses import dataclass

FREE = ("steps", "batch_size", "accumulation", "processes", "chunk", "compile", "log_every", "eval_every", "save_every")


@dataclass(frozen=True)
class TrainSettings:
    """batch_size: sequences a micro-batch and process; accumulation: micro-batches a step; lr for the head, times
    drafter_lr_scale for the drafter; warmup: share of the steps; every interval counts optimiser steps, 0 is never.

    Raises ValueError naming the setting that makes no sense.
    """

    steps: int
    batch_size: int = 4
    accumulation: int = 1
    max_anchors: int = 32
    max_length: int = 4096
    packing: bool = False
    lr: float = 6e-4
    drafter_lr_scale: float = 1.0
    weight_decay: float = 0.0
    betas: tuple = (0.9, 0.95)
    warmup: float = 0.04
    clip: float = 1.0
    precision: str = "no"
    compile: bool = False
    chunk: int | None = None
    log_every: int = 10
    eval_every: int = 0
    eval_rows: int = 32
    save_every: int = 500
    train_drafter: bool = True
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch_size", "accumulation", "max_anchors", "max_length", "chunk", "log_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("save_every", "eval_every", "eval_rows", "lr", "drafter_lr_scale", "weight_decay", "warmup"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be 0 or more")
        if self.warmup > 1:
            raise ValueError(f"warmup={self.warmup}: is a share of the steps, at most 1")
        if not self.clip > 0:
            raise ValueError(f"clip={self.clip}: must be above 0; inf for no clipping")
        if self.precision not in ("no", "bf16"):
            raise ValueError(f"precision={self.precision!r}: known are no (fp32) and bf16 (autocast over fp32 weights)")

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then cosine to 0; `step` counts finished steps."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))


def differences(old: dict, new: dict) -> tuple[list[str], list[str]]:
    """What a resumed run changes -> (refused, allowed), each "name: was x, now y"; nested names are dotted.

    Sequences of a step may be split otherwise over processes, batch_size and accumulation, as long as their product
    `sequences_per_step` stays: the data order and the loss's normaliser know that product alone.
    """
    refused, allowed = [], []
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name), new.get(name)
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            inner = differences(was, now)
            refused += [f"{name}.{text}" for text in inner[0]]
            allowed += [f"{name}.{text}" for text in inner[1]]
        else:
            (allowed if name in FREE else refused).append(f"{name}: was {was}, now {now}")
    return refused, allowed
