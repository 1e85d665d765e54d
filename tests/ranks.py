"""Runs of the toy in fp64, alone or as one process of several: a straight one, half of one, the other half of one that
a single process began, and one whose loss is not finite on the last process.

torchrun --nproc_per_node 2 tests/ranks.py <folder> <batch_size> <accumulation>
"""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from toys import DSPARK, XPRESS, make_rows, make_target, make_trainee

from xpress.checkpoint import whole
from xpress.features import OnlineFeatures
from xpress.recipe import TrainSettings
from xpress.train import Run

STEPS, HALF = 5, 3
LENGTHS = [9, 14, 3, 11, 9, 8, 17, 5, 12, 6, 13, 7]


def make_run(out: Path, batch_size: int, accumulation: int = 1, steps: int = STEPS, **settings) -> Run:
    target = make_target(dtype=torch.float64)
    trainee = make_trainee(target, terms=[*XPRESS, DSPARK[-1]])  # every kind of term
    source = OnlineFeatures(target, trainee.drafter.layer_ids, False, target.dtype)
    rows = make_rows(*LENGTHS)
    options = {"max_anchors": 6, "lr": 1e-2, "weight_decay": 0.1, "eval_every": 2, "log_every": 1, **settings}
    chosen = TrainSettings(steps=steps, batch_size=batch_size, accumulation=accumulation, **options)
    return Run(out, trainee, rows[:-3], source, chosen, held_out=rows[-3:])  # 3: no multiple of the processes


def fit_until(run: Run, step: int):
    """Ends the run as SIGTERM in that step would: its state is saved."""
    train_step = run.train_step

    def interrupted(measure):
        if run.step + 1 == step:
            run.asked.append(signal.SIGTERM)
        return train_step(measure)

    run.train_step = interrupted
    try:
        run.fit({})
    except KeyboardInterrupt:
        assert run.step == step
    else:
        raise AssertionError(f"the run was not stopped after step {step}")


def weights_of(run: Run) -> dict:
    return {name: whole(weight) for name, weight in run.trainee.named_parameters()}


def what_stops_it(run: Run) -> dict:
    """Nonsense in the second step, on the last process alone."""
    run.train_step()
    source, before = run.source, weights_of(run)

    def broken(batch):
        features, log_norm = source(batch)
        last = run.accelerator.process_index == run.accelerator.num_processes - 1
        return replace(features, hidden=features.hidden * (float("nan") if last else 1.0)), log_norm

    run.source, said = broken, ""
    try:
        run.train_step()
    except FloatingPointError as error:
        said = str(error)
    after = weights_of(run)
    return {"said": said, "kept": all(torch.equal(before[name], after[name]) for name in before)}


def main():
    out, sizes = Path(sys.argv[1]), tuple(map(int, sys.argv[2:]))
    straight, resumed = make_run(out / "straight", *sizes), make_run(out / "resumed", *sizes)
    place, processes = straight.accelerator.process_index, straight.accelerator.num_processes
    changes = resumed.resume()
    for run in (straight, resumed):
        run.fit({})
        weights = weights_of(run)
        if place == 0:
            save_file(weights, run.out / "weights.safetensors")
    fit_until(make_run(out / "half", *sizes), HALF)
    facts = {
        "processes": processes,
        "module": type(straight.module).__name__,
        "parameters": sorted({type(weight).__name__ for weight in straight.trainee.parameters()}),
        "rows": [name for batch, _ in straight.micro_batches(0) for ids in batch.row_ids for name in ids],
        "changes": changes,
        **what_stops_it(make_run(out / "bad", *sizes)),
    }
    (out / f"rank-{place}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
