"""One competitor of train_step.py in a fresh process, driven by lines on stdin; every answer is one JSON line.

Peak memory is the kernel's own high-water mark of the resident set (VmHWM), reset through /proc/self/clear_refs right
before what is measured, less the resident set at that moment. Unlike a sampling thread it misses no short peak and
takes no time from a single core. Model, inputs, AdamW's moments and one small pass (which loads the libraries' code
and buffers) come before the reset, so they are not counted. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
from competitors import HIDDEN, KINDS, RANK, Case, canonical, fill


def resident(field: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS now, VmHWM at its highest since the last reset."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def peak_above(work) -> int:
    """Highest resident set while `work()` runs, in bytes above the one before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed heap that is used again would not show
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return resident("VmHWM") - before


class Step:
    """Forward, backward and AdamW of one competitor."""

    def __init__(self, kind: type, case: Case):
        self.case, self.competitor = case, kind(case)
        fill(self.competitor.model)
        self.weights = {canonical(n): w for n, w in self.competitor.model.named_parameters() if w.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.weights.values(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.competitor.loss(1).backward()
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight)
        self.optimizer.step()  # gradients of zero make the moments and move nothing
        self.optimizer.zero_grad()

    def run(self):
        torch.manual_seed(1)  # the same anchors in every step and competitor
        loss = self.competitor.loss(self.case.blocks)
        loss.backward()
        self.optimizer.step()
        self.value = float(loss.detach())

    def first(self, path: str) -> dict:
        """The first step: its peak memory, anchors and loss; its gradients go to `path`."""
        from safetensors.torch import save_file

        peak = peak_above(self.run)
        save_file({n: w.grad.contiguous() for n, w in self.weights.items() if w.grad is not None}, path)
        self.optimizer.zero_grad()
        parameters = sum(weight.numel() for weight in self.weights.values())
        return {"peak": peak, "loss": self.value, "anchors": self.competitor.drawn, "parameters": parameters}

    def timed(self) -> dict:
        start, cpu = time.perf_counter(), time.process_time()
        self.run()
        found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
        self.optimizer.zero_grad()
        return found


def loss_alone(case: Case) -> dict:
    """Peak of the loss, forward and backward, above its inputs and less their gradients, in bytes."""
    from xpress.loss import Logits, Pass, Rows, Vocabulary, attach
    from xpress.trainee import CHUNK

    tensors = [Logits("none", 0.1, 0.9)] + [Logits("gold", 0.1, 0.9)] * 4  # one gold feed, three rounds
    vocabulary = Vocabulary(torch.randn(case.vocab, HIDDEN) * 0.1, torch.randn(case.vocab, RANK).requires_grad_())

    def make(n: int):
        hidden, last = torch.randn(n, HIDDEN).requires_grad_(), torch.randn(n, HIDDEN)
        weights = torch.ones(5, n, dtype=torch.float64)
        rows = Rows(hidden, torch.randint(case.vocab, (n,)), last, None, weights)
        return rows, [torch.randn(n, RANK).requires_grad_() for _ in range(4)]

    def both(rows, latents):
        found = Pass(rows, vocabulary, tensors, train_hidden=True, slope=True)
        found.run(lambda i, fed, part: latents[i - 1].detach()[part], max(1, CHUNK[0] // case.vocab))
        attach(found, rows.hidden, vocabulary.readout, latents).backward()

    both(*make(1))
    vocabulary.readout.grad = None
    rows, latents = make(case.blocks * (case.block_size - 1))
    peak = peak_above(lambda: both(rows, latents))
    return {"bytes": peak - sum(tensor.nbytes for tensor in (rows.hidden, vocabulary.readout, *latents))}


def speculators_versions() -> dict:
    """What the interpreter of that competitor has. Raises ImportError where it lacks it."""
    __import__("speculators.models.xpress")
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "speculators")}


def hide_broken_extras():
    """pip pairs a CPU build of torch with a torchvision and a torchaudio that cannot load, and transformers then fails
    with them; a text model needs neither."""
    for name in ("torchvision", "torchaudio"):
        try:
            __import__(name)
        except Exception:
            sys.modules[name] = None


def limit_memory() -> int:
    """A competitor that needs more than the machine has fails alone, and with a message -> the limit in bytes."""
    free = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    limit = int(int(free.split()[1]) * 1024 * 0.9)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def main():
    kind, case = sys.argv[1], Case(**json.loads(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    limit = limit_memory()
    torch.set_num_threads(case.threads)
    if kind == "speculators":
        hide_broken_extras()
    step = None
    for line in sys.stdin:
        word, _, path = line.strip().partition(" ")
        try:
            if word == "versions":
                answer = speculators_versions()
            elif word == "loss":
                answer = loss_alone(case)
            else:
                step = step or Step(KINDS[kind], case)
                answer = step.first(path) if word == "first" else step.timed()
        except Exception as error:
            short = isinstance(error, MemoryError) or "allocate memory" in str(error)
            reason = f"needs more than the {limit / 2**30:.1f} GiB that are free" if short else repr(error)
            answer = {"error": reason, "missing": isinstance(error, ImportError)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
