"""A few optimiser steps of the toy in fp64, alone or as one process of several; the first one writes what came out.

torchrun --nproc_per_node 2 tests/ranks.py <folder> <batch_size> <accumulation>
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from toys import make_rows, make_target, make_trainee

from xpress.features import OnlineFeatures
from xpress.recipe import TrainSettings
from xpress.state import whole
from xpress.train import Run

STEPS = 5
LENGTHS = [9, 14, 3, 11, 9, 8, 17, 5, 12, 6, 13, 4]


def make_run(out: Path, batch_size: int, accumulation: int = 1, steps: int = STEPS, **settings) -> Run:
    target = make_target(dtype=torch.float64)
    trainee = make_trainee(target)
    source = OnlineFeatures(target, trainee.drafter.layer_ids, False, target.dtype)
    rows = make_rows(*LENGTHS)
    options = {"max_anchors": 6, "lr": 1e-2, "weight_decay": 0.1, "eval_every": 2, "log_every": 1, **settings}
    chosen = TrainSettings(steps=steps, batch_size=batch_size, accumulation=accumulation, **options)
    return Run(out, trainee, rows[:-2], source, chosen, held_out=rows[-2:])


def main():
    out, batch_size, accumulation = Path(sys.argv[1]), *map(int, sys.argv[2:])
    run = make_run(out, batch_size, accumulation)
    accelerator = run.accelerator
    names = [name for batch, _ in run.micro_batches(0) for ids in batch.row_ids for name in ids]
    run.fit({})
    weights = {name: whole(weight) for name, weight in run.trainee.named_parameters()}
    kind = type(run.module).__name__, str(accelerator.distributed_type), accelerator.num_processes
    shards = {type(weight).__name__ for weight in run.trainee.parameters()}
    facts = {"kind": kind, "rows": names, "parameters": sorted(shards)}
    (out / f"rank-{accelerator.process_index}.json").write_text(json.dumps(facts))
    if accelerator.is_main_process:
        save_file(weights, out / "weights.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
