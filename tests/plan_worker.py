"""Two optimiser steps of the embedded recipe in a process of their own: peak memory above what imports and a toy's
warm-up left. Prints bytes.

Usage: python tests/plan_worker.py '{"draft_vocab_size": 8192, "length": 512, …}' (see Case). Linux only.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from xpress.data import Row
from xpress.drafter import DFlashDrafter
from xpress.drafter_config import DrafterConfig
from xpress.heads import Refiner
from xpress.loss import Term
from xpress.recipe import TrainSettings
from xpress.target import Features
from xpress.train import Run
from xpress.trainee import Trainee

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from step_worker import peak_above, resident  # noqa: E402

OBJECTIVE = [Term("refined", "gold"), Term("consistency", "self", 0.3, rounds=3), Term("anchor", "none", [0.6, 0.2])]


@dataclass(frozen=True)
class Case:
    """Sizes of the target and drafter, and the batch; the defaults are a toy."""

    sizes: dict
    drafter: dict
    rank: int = 8
    draft_vocab_size: int | None = None
    sequences: int = 2
    anchors: int = 4
    length: int = 32
    precision: str = "bf16"
    train_drafter: bool = True
    accumulation: int = 1


def config_of(case: Case) -> DrafterConfig:
    sizes = {key: value for key, value in case.sizes.items() if key != "num_hidden_layers"}
    ids = None if case.draft_vocab_size is None else tuple(range(case.draft_vocab_size))
    rope = {"rope_theta": 1e5, "rope_type": "default"}
    layers = case.sizes["num_hidden_layers"]
    return DrafterConfig(num_target_layers=layers, rope_parameters=rope, draft_ids=ids, **sizes | case.drafter)


def steps(case: Case, count: int = 2):
    """A run with random weights and features given, as features=cached has them; `count` optimiser steps."""
    config, V, D = config_of(case), case.sizes["vocab_size"], case.sizes["hidden_size"]
    table = torch.empty(V, D, dtype=torch.bfloat16).normal_(std=0.1)
    target = SimpleNamespace(  # all that a drafter borrows of its target
        name="random",
        hidden_size=D,
        vocab_size=V,
        num_layers=config.num_target_layers,
        config={"rope_parameters": config.rope_parameters},
        embedding=nn.Embedding.from_pretrained(table),
        lm_head=nn.Linear(D, V, bias=False, device="meta").requires_grad_(False),
    )
    target.lm_head.weight = target.embedding.weight  # tied, as SmolLM2's
    head = Refiner(V, D, config.block_size, case.rank, config.draft_vocab_size)
    trainee = Trainee(DFlashDrafter(config).bind(target), head, OBJECTIVE, case.train_drafter)
    rows = [
        Row(f"row-{i}", [5, 6], torch.randint(V, (case.length - 2,)).tolist())
        for i in range(case.sequences * case.accumulation)
    ]

    def source(batch):
        S, T = batch.ids.shape
        hidden = torch.empty(S, T, len(config.target_layer_ids) * D, dtype=torch.bfloat16).normal_()
        last = torch.empty(S, T, D, dtype=torch.bfloat16).normal_()
        return Features(hidden, last), None if config.draft_ids is None else torch.full((S, T), 9.0)

    settings = TrainSettings(
        steps=count,
        batch_size=case.sequences,
        accumulation=case.accumulation,
        max_anchors=case.anchors,
        max_length=case.length,
        precision=case.precision,
        train_drafter=case.train_drafter,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), trainee, rows, source, settings)
        for _ in range(count):
            run.train_step()


def main():
    torch.set_num_threads(1)
    case = Case(**json.loads(sys.argv[1]))
    steps(case, 1)  # what imports, code and the BLAS library's own workspace take is no part of what is measured
    print(json.dumps({"before": resident("VmRSS"), "peak": peak_above(lambda: steps(case))}))


if __name__ == "__main__":
    main()
