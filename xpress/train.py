"""A training run: optimiser steps, evaluation on held-out rows, states that can be resumed, the finished checkpoint.

The loss of an optimiser step is divided by the sum of masked weights of the whole step, over micro-batches and ranks.
Anchors and data order are functions of (seed, epoch, row id), so a run can be resumed at any step.
"""

from __future__ import annotations

import json
import math
import shutil
import uuid
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError

from xpress import checkpoint, state
from xpress.anchors import Anchors, Batch, draw, lay_out
from xpress.batches import Order, collate
from xpress.data import Row
from xpress.files import append_text, write_json, write_text
from xpress.launch import interrupts, make_accelerator
from xpress.meter import Meter, Pace
from xpress.recipe import TrainSettings
from xpress.trainee import Trainee

HELD_OUT = -1  # the epoch whose anchors evaluation uses: always the same


class Run:
    """A training run in its folder: metrics.jsonl, states `step-N`, the best checkpoint, and at the end `checkpoint`.

    source: Batch -> (Features, log_norm). held_out: rows that are evaluated on. facts: what else a resumed run must
    have in common with this one (target, data, objective, …).
    """

    def __init__(
        self,
        out: Path,
        trainee: Trainee,
        rows: list[Row],
        source: Callable,
        settings: TrainSettings,
        held_out: list[Row] = (),
        facts: dict | None = None,
        device: str | torch.device = "cpu",
    ):
        self.out, self.rows, self.source, self.settings = Path(out), rows, source, settings
        self.held_out = list(held_out)
        self.accelerator = make_accelerator(settings.precision, torch.device(device).type == "cpu")
        head = [w for part in (trainee.head, trainee.confidence) if part is not None for w in part.parameters()]
        groups = [{"params": head, "scale": 1.0}] if head else []
        if settings.train_drafter:
            groups.append({"params": list(trainee.drafter.parameters()), "scale": settings.drafter_lr_scale})
        optimizer = torch.optim.AdamW(
            groups, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        trainee.to(self.accelerator.device)
        self.trainee = trainee
        if settings.compile:
            trainee.compile_parts()
        self.module, self.optimizer = self.accelerator.prepare(trainee, optimizer)
        processes = self.accelerator.num_processes
        per_step = settings.batch_size * settings.accumulation * processes
        self.order = Order(rows, per_step, settings.seed, settings.max_length, settings.packing)
        self.facts = {
            **(facts or {}),
            **{name: getattr(settings, name) for name in settings.__dataclass_fields__},
            "betas": list(settings.betas),
            "processes": processes,
            "sequences_per_step": per_step,
        }
        self.step, self.best, self.run_id, self.spent = 0, None, uuid.uuid4().hex[:12], 0.0
        self.asked: list[int] = []  # signals that arrived
        self.unlogged: list[str] = []  # lines that a full disk did not take
        torch.manual_seed(settings.seed * 1000 + 7 + self.accelerator.process_index)  # for heads that draw

    # --- one optimiser step -------------------------------------------------------------------------------------

    def micro_batches(self, step: int) -> list[tuple[Batch, Anchors]]:
        """This rank's batches of a step, with their blocks."""
        epoch, chosen = self.order.sequences(step)
        chosen = chosen[self.accelerator.process_index :: self.accelerator.num_processes]
        size = self.settings.batch_size
        return [self._batch(chosen[i : i + size], epoch) for i in range(0, len(chosen), size)]

    def _batch(self, sequences, epoch: int, span: int = 1) -> tuple[Batch, Anchors]:
        batch = collate(sequences, self.settings.max_length)
        index, valid = draw(batch, self.settings.max_anchors, self.settings.seed, epoch, span)
        return batch, lay_out(batch, index, valid, self.trainee.drafter.config.num_draft)

    def _forward(self, batch: Batch, anchors: Anchors, **options):
        batch, anchors = batch.to(self.accelerator.device), anchors.to(self.accelerator.device)
        features, log_norm = self.source(batch)
        with self.accelerator.autocast():
            return self.module(batch, anchors, features, log_norm, **options)

    def train_step(self, measure: bool = False) -> dict:
        """One optimiser step -> what happened in it. With `measure` a head that the objective never lets feed itself
        runs two passes more, so that its drafts are seen."""
        settings, trainee = self.settings, self.trainee
        batches = self.micro_batches(self.step)
        meter = Meter(trainee, self.accelerator)
        weights = sum(trainee.weight_sums(anchors) for _, anchors in batches).to(self.accelerator.device)
        weights = self.accelerator.reduce(weights, "sum")
        progress = self.step / settings.steps
        scale = [t.weight_at(progress) / max(w, 1e-12) for t, w in zip(trainee.terms, weights.tolist())]
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr_at(self.step) * group["scale"]
        for i, (batch, anchors) in enumerate(batches):
            last = i + 1 == len(batches)
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                outcome = self._forward(batch, anchors, scale=scale, passes=2 * measure)
                # gradients are averaged over ranks, the weight sums are global already
                self.accelerator.backward(outcome.total * self.accelerator.num_processes)
            meter.add(outcome, batch, anchors)
            del outcome  # and with it the gradients that the loss kept
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), settings.clip)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        facts = meter.facts(stop=bool(self.asked))
        if not all(map(math.isfinite, [norm, *(v for k, v in facts.items() if k.startswith("loss/"))])):
            self._stop_at_nonsense(facts, batches)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        place = {"step": self.step, "epoch": self.order.place(self.step - 1)[0], "lr": settings.lr_at(self.step - 1)}
        return {**place, "grad_norm": norm, **facts}

    def _stop_at_nonsense(self, facts: dict, batches):
        names = gather_object([name for batch, _ in batches for ids in batch.row_ids for name in ids])
        bad = [t.name for t in self.trainee.terms if not math.isfinite(facts[f"loss/{t.name}"])]
        raise FloatingPointError(
            f"step {self.step + 1}: {', '.join(bad) or 'the gradient'} is not finite, rows {names}; lower lr, or "
            "look at these rows"
        )

    # --- held-out rows ------------------------------------------------------------------------------------------

    def evaluate(self) -> dict:
        """Losses on held-out rows, and the free-running tau and accept rates of the head at its fixed point (G passes)
        and of the bare drafter, over blocks that lie whole in an answer. Leaves mode and random state as they were."""
        ranks, size, G = self.accelerator.num_processes, self.settings.batch_size, self.trainee.drafter.config.num_draft
        device = self.accelerator.device
        meter, training = Meter(self.trainee, self.accelerator), self.module.training
        # every process runs as many forwards as the others: a sharded one waits for them; what fills up counts nothing
        places = range(self.accelerator.process_index, -(-len(self.held_out) // ranks) * ranks, ranks)
        counts = [place < len(self.held_out) for place in places]
        rows = [self.held_out[place % len(self.held_out)] for place in places]
        self.module.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                for i in range(0, len(rows), size):
                    batch, anchors = self._batch(rows[i : i + size], HELD_OUT, G)
                    real = torch.tensor(counts[i : i + size])[:, None]
                    anchors = replace(anchors, valid=anchors.valid & real, mask=anchors.mask & real[..., None])
                    meter.add(self._forward(batch, anchors, passes=G), batch, anchors)
        finally:
            self.module.train(training)
        return {f"eval/{name}": value for name, value in meter.facts().items() if "/" in name}

    def _evaluate_and_keep_best(self, provenance: dict) -> dict:
        found = self.evaluate()
        score = found.get("eval/tau/head", found.get("eval/tau/drafter"))
        if self.step and score is not None and (self.best is None or score > self.best["tau"]):
            name = f"best-{self.step:07d}"
            if self._try_to_save("best", lambda: self._write(name, provenance | {"metrics": found})):
                self.best = {"step": self.step, "tau": score}
        return found

    # --- the whole run ------------------------------------------------------------------------------------------

    def fit(self, provenance: dict, on_step: Callable = lambda facts, total: None) -> Path:
        """Train to the last step -> the checkpoint's folder.

        Ctrl-C or SIGTERM ends the step, saves its state, and then raises KeyboardInterrupt. A disk that is full at a
        save costs that save, not the run; at the end it is an OSError, and the newest state still goes on.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        main, settings, facts = self.accelerator.is_main_process, self.settings, {}
        due = lambda every: every and self.step % every == 0  # noqa: E731
        self.module.train()
        if settings.eval_every and self.held_out and not self.step:
            self._log({"step": 0, "seconds": 0.0, **self.evaluate()})
        pace = Pace(self.spent)
        with interrupts() as self.asked:
            while self.step < settings.steps:
                next_step = self.step + 1
                measure = next_step % settings.log_every == 0 or next_step == settings.steps
                facts = self.train_step(measure)
                stop, unfinished = facts.pop("stop"), self.step < settings.steps
                facts |= pace(facts)
                self.spent = facts["seconds"]
                if self.held_out and settings.eval_every and (due(settings.eval_every) or not unfinished):
                    facts |= self._evaluate_and_keep_best(provenance)
                    pace.leave_out()
                if measure or any(name.startswith("eval/") for name in facts):
                    self._log(facts)
                if main:
                    on_step(facts, settings.steps)
                if unfinished and (stop or due(settings.save_every)):
                    self.save_state(provenance)
                if unfinished and stop:
                    raise KeyboardInterrupt
        facts = facts or self._last_line()  # killed after its last step: only the end is written
        metrics = {key: value for key, value in facts.items() if "/" in key}
        self.module.eval()
        try:
            self._finish({**provenance, "metrics": metrics})
        except (OSError, SafetensorError) as error:
            there = state.newest(self.out)
            remedy = f"make room there and go on from {there.name} with resume=true" if there else "give another out="
            raise OSError(f"out={self.out}: the end of the run could not be saved ({error}); {remedy}") from error
        return self.out / "checkpoint"

    def _finish(self, provenance: dict):
        """Everything that a finished run has; result.json, which says so, comes last."""
        name = f"step-{self.step:07d}"
        if not (self.out / name / state.POSITION).exists():
            self._write(name, provenance, resumable=True)
        self._write("checkpoint", provenance)
        if self.accelerator.is_main_process:
            if self.best is not None and (found := sorted(self.out.glob("best-*"))):
                state.prune(self.out, "best", keep=0)
                found[-1].rename(self.out / "best")
            state.prune(self.out, "step-*", keep=1)
            result = {**provenance, "steps": self.step, "best": self.best, "seconds": round(self.spent, 1)}
            write_json(self.out / "result.json", result)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train and its end is written."""
        path = self.out / "result.json"
        written = json.loads(path.read_text())["steps"] if path.exists() else None
        return self.step >= self.settings.steps and written == self.step

    def _log(self, facts: dict):
        """A line of metrics.jsonl; where the disk is full it waits for the next."""
        if not self.accelerator.is_main_process:
            return
        self.unlogged.append(json.dumps(facts) + "\n")
        try:
            append_text(self.out / "metrics.jsonl", "".join(self.unlogged))
        except OSError as error:
            text = f"step {self.step}: metrics.jsonl could not be written ({error}); training goes on. Make room in"
            warnings.warn(f"{text} {self.out}", stacklevel=2)
        else:
            self.unlogged.clear()

    def _last_line(self) -> dict:
        log = self.out / "metrics.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return json.loads(lines[-1]) if lines else {}

    def position(self) -> dict:
        """What a state says of the run besides weights and moments."""
        return {
            "step": self.step,
            "best": self.best,
            "run_id": self.run_id,
            "seconds": self.spent,
            "facts": self.facts,
        }

    def save_state(self, provenance: dict):
        """A checkpoint that can be resumed; the two newest stay."""
        self._try_to_save("state", lambda: self._write(f"step-{self.step:07d}", provenance, resumable=True))
        if self.accelerator.is_main_process:
            state.prune(self.out, "step-*", keep=2)

    def _write(self, name: str, provenance: dict, resumable: bool = False):
        if resumable:
            state.save(self.out / name, self, provenance)
            return
        drafter, head, confidence = self.trainee.drafter, self.trainee.head, self.trainee.confidence
        tensors = checkpoint.tensors_of(drafter, head, confidence)
        if self.accelerator.is_main_process:
            checkpoint.save(self.out / name, drafter, head, provenance, tensors, confidence)
            if name.startswith("best-"):
                state.prune(self.out, "best-*", keep=1)

    def _try_to_save(self, what: str, write: Callable) -> bool:
        """-> whether it is saved, the same on all processes"""
        saved = True
        try:
            write()
        except (OSError, SafetensorError) as error:
            saved = False
            there = state.newest(self.out)
            warnings.warn(
                f"step {self.step}: the {what} could not be saved ({error}); training goes on, the newest whole state "
                f"is {there.name if there else 'none yet'}. Make room in {self.out}",
                stacklevel=2,
            )
        return all(gather_object([saved]))

    def resume(self) -> list[str]:
        """Load the newest whole state -> what has changed since and may, as text; nothing happens where there is none.

        Raises ValueError where the run is not the one that was interrupted, or OSError where a state is incomplete.
        """
        folder, allowed = state.newest(self.out), []
        if folder is not None:
            saved = state.read(folder)
            allowed = state.check(folder, saved["facts"], json.loads(json.dumps(self.facts)))
            state.load(folder, self)
            self.step, self.best = saved["step"], saved["best"]
            self.run_id, self.spent = saved["run_id"], saved["seconds"]
        best = None if self.best is None else f"best-{self.best['step']:07d}"
        if best and not any((self.out / name).exists() for name in (best, "best")):
            self.best = None  # a better one had replaced it, in steps that come again
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self._drop_what_comes_again(best)
        return allowed

    def _drop_what_comes_again(self, best: str | None):
        """What a killed run logged and kept beyond its state, and what it left half-written."""
        state.clear(self.out)
        for path in self.out.glob("best-*"):
            if path.name != best:
                shutil.rmtree(path)
        log = self.out / "metrics.jsonl"
        if log.exists():
            lines = [line for line in log.read_text().splitlines() if _step_of(line) <= (self.step or -1)]
            write_text(log, "".join(line + "\n" for line in lines))


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:  # the half-written last line of a killed run
        return math.inf
