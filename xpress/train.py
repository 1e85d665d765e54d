"""A training run: data order, optimiser steps, states that can be resumed, the finished checkpoint.

The loss of an optimiser step is divided by the sum of masked weights of the whole step, over micro-batches and ranks.
Anchors and data order are functions of (seed, epoch, row id), so a run can be resumed at any step.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from xpress import checkpoint
from xpress.anchors import Anchors, Batch, candidates, draw, lay_out
from xpress.data import Row, collate
from xpress.features import FeatureSource
from xpress.files import write_json
from xpress.trainee import Trainee


@dataclass(frozen=True)
class TrainSettings:
    """batch_size: sequences a micro-batch and process; accumulation: micro-batches a step; lr for the head, times
    drafter_lr_scale for the drafter; warmup: share of the steps; every interval counts optimiser steps."""

    steps: int
    batch_size: int = 4
    accumulation: int = 1
    max_anchors: int = 32
    max_length: int = 4096
    lr: float = 6e-4
    drafter_lr_scale: float = 1.0
    weight_decay: float = 0.0
    betas: tuple = (0.9, 0.95)
    warmup: float = 0.04
    clip: float = 1.0
    precision: str = "no"
    chunk: int = 128
    log_every: int = 10
    save_every: int = 500
    keep_features: bool = False
    train_drafter: bool = True
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch_size", "accumulation", "max_anchors", "chunk", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.precision not in ("no", "bf16"):
            raise ValueError(f"precision={self.precision!r}: known are no (fp32) and bf16 (autocast over fp32 weights)")

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then cosine to 0; `step` counts finished steps."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))


class Run:
    """A training run in its folder: metrics.jsonl, resumable states `step-N`, and at the end `checkpoint`."""

    def __init__(self, out: Path, trainee: Trainee, rows: list[Row], source: FeatureSource, settings: TrainSettings):
        self.out, self.rows, self.source, self.settings = Path(out), rows, source, settings
        on_cpu = torch.device(source.target.device).type == "cpu"
        self.accelerator = Accelerator(mixed_precision=settings.precision, cpu=on_cpu)
        head = list(trainee.head.parameters()) if trainee.head is not None else []
        groups = [{"params": head, "scale": 1.0}] if head else []
        if settings.train_drafter:
            groups.append({"params": list(trainee.drafter.parameters()), "scale": settings.drafter_lr_scale})
        optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)
        trainee.to(self.accelerator.device)
        self.trainee = trainee
        self.module, self.optimizer = self.accelerator.prepare(trainee, optimizer)
        self.step = 0
        self.rows_per_step = settings.batch_size * settings.accumulation * self.accelerator.num_processes
        if len(rows) < self.rows_per_step:
            raise ValueError(
                f"data: {len(rows)} rows are fewer than one step takes ({self.rows_per_step}); lower batch_size or "
                "accumulation, or generate more"
            )

    # --- one optimiser step -------------------------------------------------------------------------------------

    def micro_batches(self, step: int) -> list[tuple[Batch, Anchors]]:
        """This rank's batches of a step, with their blocks; the same for every world size up to the order of rows."""
        steps_per_epoch = len(self.rows) // self.rows_per_step
        epoch, place = divmod(step, steps_per_epoch)
        order = torch.randperm(
            len(self.rows), generator=torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
        ).tolist()
        chosen = order[place * self.rows_per_step : (place + 1) * self.rows_per_step]
        chosen = chosen[self.accelerator.process_index :: self.accelerator.num_processes]
        size, batches = self.settings.batch_size, []
        for i in range(0, len(chosen), size):
            batch = collate([self.rows[j] for j in chosen[i : i + size]], self.settings.max_length)
            index, valid = draw(batch, self.settings.max_anchors, self.settings.seed, epoch)
            batches.append((batch, lay_out(batch, index, valid, self.trainee.drafter.config.num_draft)))
        return batches

    def train_step(self, measure: bool = False) -> dict:
        """One optimiser step -> what happened in it."""
        settings, device = self.settings, self.accelerator.device
        progress = self.step / settings.steps
        batches = self.micro_batches(self.step)
        totals = self.accelerator.reduce(sum(self.trainee.weight_sums(a) for _, a in batches).to(device), "sum")
        scale = torch.tensor([t.weight_at(progress) for t in self.trainee.terms], device=device) / totals.clamp(
            min=1e-12
        )
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr_at(self.step) * group["scale"]
        sums, runs = torch.zeros_like(totals), {}
        for i, (batch, anchors) in enumerate(batches):
            batch, anchors = batch.to(device), Anchors(**{k: v.to(device) for k, v in vars(anchors).items()})
            features, log_norm = self.source(batch)
            last = i + 1 == len(batches)
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                part, _, found = self.module(batch, anchors, features, log_norm, measure)
                # DDP averages gradients over ranks, the weight sums are global already
                self.accelerator.backward((part * scale).sum() * self.accelerator.num_processes)
            sums += part.detach()
            for name, (total, count) in found.items():
                old = runs.get(name, (0.0, 0))
                runs[name] = (old[0] + total, old[1] + count)
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), settings.clip)
        losses = self.accelerator.reduce(sums, "sum") / totals.clamp(min=1e-12)
        if not torch.isfinite(losses).all() or not math.isfinite(float(norm)):
            bad = [t.name for t, loss in zip(self.trainee.terms, losses) if not math.isfinite(float(loss))]
            names = [name for batch, _ in batches for name in batch.row_ids]
            raise FloatingPointError(
                f"step {self.step + 1}: {', '.join(bad) or 'the gradient'} is not finite, rows {names}; lower lr, or "
                "look at these rows"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        facts = {"step": self.step, "lr": settings.lr_at(self.step - 1), "grad_norm": float(norm)}
        facts |= {f"loss/{t.name}": float(loss) for t, loss in zip(self.trainee.terms, losses)}
        facts["blocks"] = sum(a.num_blocks for _, a in batches)
        facts |= {f"tau/{name}": 1 + total / count for name, (total, count) in runs.items() if count}
        return facts

    # --- the whole run ------------------------------------------------------------------------------------------

    def fit(self, provenance: dict, on_step: Callable = lambda facts, total: None) -> Path:
        """Train to the last step -> the checkpoint's folder.

        Ctrl-C or SIGTERM ends the step, saves its state, and then raises KeyboardInterrupt.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        started, log, facts = time.perf_counter(), self.out / "metrics.jsonl", {}
        self.module.train()
        with interrupts() as asked:
            while self.step < self.settings.steps:
                measure = (self.step + 1) % self.settings.log_every == 0 or self.step + 1 == self.settings.steps
                facts = self.train_step(measure)
                facts["seconds"] = round(time.perf_counter() - started, 3)
                if self.accelerator.is_main_process:
                    if measure:
                        with open(log, "a") as file:
                            file.write(json.dumps(facts) + "\n")
                    on_step(facts, self.settings.steps)
                unfinished = self.step < self.settings.steps
                if unfinished and (asked or self.step % self.settings.save_every == 0):
                    self.save_state(provenance)
                if unfinished and asked:
                    raise KeyboardInterrupt
        provenance = {**provenance, "metrics": {key: value for key, value in facts.items() if "/" in key}}
        self.module.eval()
        if self.accelerator.is_main_process:
            checkpoint.save(self.out / "checkpoint", self.trainee.drafter, self.trainee.head, provenance)
            result = {**provenance, "steps": self.step, "seconds": round(time.perf_counter() - started, 1)}
            write_json(self.out / "result.json", result)
            self._prune(keep=0)
        return self.out / "checkpoint"

    def save_state(self, provenance: dict):
        """A checkpoint that can be resumed: weights, AdamW's moments as safetensors, the step. The two newest stay."""
        if not self.accelerator.is_main_process:
            return
        folder = self.out / f"step-{self.step:07d}"
        checkpoint.save(folder, self.trainee.drafter, self.trainee.head, provenance)
        moments = {}
        for name, weight in self.trainee.named_parameters():
            for key, value in self.optimizer.state.get(weight, {}).items():
                moments[f"{key}.{name}"] = value.detach().cpu().contiguous()
        save_file(moments, folder / "optimizer.safetensors")
        write_json(folder / "trainer.json", {"step": self.step, "rows": len(self.rows)})
        self._prune(keep=2)

    def resume(self) -> int:
        """Load the newest whole state -> its step, 0 where there is none."""
        states = sorted(p.parent for p in self.out.glob("step-*/trainer.json"))
        if not states:
            return 0
        facts = json.loads((states[-1] / "trainer.json").read_text())
        if facts["rows"] != len(self.rows):
            raise ValueError(
                f"resume: the run had {facts['rows']} rows, now there are {len(self.rows)}; give its own data"
            )
        found = checkpoint.load(states[-1])
        self.trainee.drafter.load_state_dict(found.drafter.state_dict())
        if self.trainee.head is not None:
            self.trainee.head.load_state_dict(found.head.state_dict())
        moments = load_file(states[-1] / "optimizer.safetensors")
        for name, weight in self.trainee.named_parameters():
            own = {
                key: moments[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in moments
            }
            if own:
                self.optimizer.state[weight] = {
                    key: value if key == "step" else value.to(weight.device) for key, value in own.items()
                }
        self.step = facts["step"]
        return self.step

    def _prune(self, keep: int):
        states = sorted(self.out.glob("step-*"))
        for old in states[: len(states) - keep]:
            shutil.rmtree(old)


@contextmanager
def interrupts():
    """Yields a list that fills when Ctrl-C or SIGTERM arrives, so that a step is never cut in two. The second Ctrl-C
    acts at once."""
    asked: list[int] = []

    def note(number, frame):
        asked.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    main = threading.current_thread() is threading.main_thread()  # elsewhere Python takes no handlers
    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def usable(rows: list[Row], settings: TrainSettings) -> list[Row]:
    """Rows that can open a block within max_length. Raises ValueError where none is left."""
    good = [row for row in rows if candidates(collate([row], settings.max_length)).any()]
    if not good:
        raise ValueError("data: no row has two supervised tokens within max_length; nothing can be trained")
    return good
