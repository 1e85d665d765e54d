"""A run ends the same however it was split over processes, cut short and resumed; and a fault costs what it must."""

import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
from disk import save_model
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import fit_until, weights_of
from safetensors.torch import load_file
from toys import XPRESS, count_batch, make_drafter, make_rows, make_run, make_target, make_trainee

from xpress import load, state
from xpress.heads import Refiner
from xpress.launch import make_accelerator
from xpress.loss import Term
from xpress.meter import Meter
from xpress.recipe import TrainSettings
from xpress.target import Target
from xpress.trainee import Outcome, Trainee, leading

ROOT = Path(__file__).resolve().parents[1]
EXACT = dict(rtol=0, atol=1e-10)  # fp64, sums in another order
PASSING = ("seconds", "tokens_per_s", "blocks_per_s", "peak_memory_gb")  # what no two runs have in common


class WetHead(Refiner):
    """A head that draws: dropout on its latents, so that the random state matters."""

    def latent(self, prepared, prev_ids):
        return torch.nn.functional.dropout(super().latent(prepared, prev_ids), 0.5, self.training)


def wet_trainee(target, seed=1, terms=XPRESS) -> Trainee:
    drafter, torch_seed = make_drafter(target, seed=seed), torch.manual_seed(seed + 1)
    config = drafter.config
    head = WetHead(config.vocab_size, config.hidden_size, config.block_size, 8).bind(target)
    torch.nn.init.normal_(head.mlp_down.weight, generator=torch_seed)
    return Trainee(drafter, head.to(target.dtype), terms, chunk=5)


@pytest.fixture
def make(tmp_path, target):
    """make("folder", …) -> a run of six steps, two an epoch, that evaluates every second one and draws dropout."""

    def made(folder, init=1, **changes):
        rows = make_rows(9, 14, 7, 11, 9, 8)
        options = {"warmup": 4 / 6, "eval_every": 2, "log_every": 1, "weight_decay": 0.1, "lr": 1e-2, **changes}
        held_out = [replace(row, id=f"held-{row.id}") for row in make_rows(9, 12, seed=5)]
        return make_run(tmp_path / folder, wet_trainee(target, init), target, rows, held_out, **options)

    return made


@pytest.fixture(scope="module")
def wide():
    """The toy target in fp64, so that equal means equal."""
    return make_target(dtype=torch.float64)


def lines_of(out: Path) -> list[dict]:
    """metrics.jsonl without times and memory."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in PASSING} for line in lines]


def same_end(ours: Path, theirs: Path):
    """Two folders hold the same finished run, to the bit."""
    for name in ("checkpoint", "best"):
        assert (ours / name / "model.safetensors").read_bytes() == (theirs / name / "model.safetensors").read_bytes()
    states = [list(out.glob("step-*")) for out in (ours, theirs)]
    assert [len(found) for found in states] == [1, 1] and states[0][0].name == states[1][0].name
    for name in ("model", "optimizer", "random"):
        one, other = (load_file(found[0] / f"{name}.safetensors") for found in states)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), name
    assert lines_of(ours) == lines_of(theirs)
    results = [json.loads((out / "result.json").read_text()) for out in (ours, theirs)]
    assert results[0]["best"] == results[1]["best"] and results[0]["steps"] == results[1]["steps"]
    assert {k: v for k, v in results[0]["metrics"].items() if k not in PASSING} == {
        k: v for k, v in results[1]["metrics"].items() if k not in PASSING
    }
    assert left_over(ours) == left_over(theirs) == []


def left_over(out: Path) -> list[str]:
    """Half-written files and folders."""
    return [path.name for path in out.rglob(".*") if path.suffix in (".tmp", ".old")]


# --- one step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size, lengths, slots", [(2, (11, 3), [2, 10]), (5, (5, 3), [3, 10])])
def test_accumulation_is_a_big_batch(tmp_path, wide, block_size, lengths, slots):
    """Micro-batches with many and with few supervised slots: the gradient of one batch with both."""
    found = []
    for size in (2, 1):
        options = {"batch_size": size, "accumulation": 2 // size, "max_anchors": 99, "clip": math.inf}
        run = make_run(tmp_path, make_trainee(wide, block_size=block_size), wide, make_rows(*lengths), **options)
        run.optimizer.step = run.optimizer.zero_grad = lambda: None
        run.train_step()
        found.append([weight.grad for weight in run.trainee.parameters()])
    assert sorted(int(a.mask.sum()) for _, a in run.micro_batches(0)) == slots
    assert all(torch.allclose(whole, parts, **EXACT) and whole.any() for whole, parts in zip(*found))


def test_frozen_drafter_stays_as_it_is(tmp_path, target):
    """No gradient, not a bit changed, weight decay or not; the head learns. Co-trained, both change."""
    for train_drafter in (False, True):
        trainee = make_trainee(target, train_drafter=train_drafter)
        before = {name: weight.clone() for name, weight in trainee.named_parameters()}
        run = make_run(tmp_path, trainee, target, make_rows(9, 9), weight_decay=0.1)
        run.optimizer.zero_grad = lambda: None
        for _ in range(2):
            run.train_step()
        for name, weight in trainee.named_parameters():
            moves = train_drafter or name.startswith("head.")
            assert (weight.grad is not None) == moves and torch.equal(weight, before[name]) != moves
    assert not any(weight.requires_grad for weight in target.model.parameters())


def test_loss_that_is_not_finite_stops_the_run(tmp_path, target):
    """The message names the step, the terms concerned and the rows; the weights stay those of the step before."""
    trainee = make_trainee(target)
    run = make_run(tmp_path, trainee, target, make_rows(9, 9))
    run.train_step()
    with torch.no_grad():
        trainee.head.mlp_up.weight[0, 0] = float("nan")
    before = trainee.drafter.fc.weight.clone()
    with pytest.raises(FloatingPointError, match="step 2: refined, consistency is not finite.*row-") as caught:
        run.train_step()
    assert "anchor" not in str(caught.value) and all(f"row-{i}" in str(caught.value) for i in range(2))
    assert torch.equal(trainee.drafter.fc.weight, before) and run.step == 1


# --- numbers ----------------------------------------------------------------------------------------------------------


def fed(meter_of, groups) -> dict:
    meter = Meter(SimpleNamespace(terms=[Term("anchor", "none")]), make_accelerator("no", True))
    for group in groups:
        outcome, batch, anchors = meter_of(group)
        meter.add(outcome, batch, anchors)
    return meter.facts()


@pytest.mark.parametrize("groups", [[[3, 1], [2, 0]], [[3, 2, 1, 0]], [[3], [2], [1], [0]], [[0], [1, 2, 3]]])
def test_tau_counts_leading_runs(groups):
    """Four blocks whose first 3, 2, 1 and 0 draft tokens are right, with right ones behind a gap: 2.5 with the bonus
    token, however they are batched. Products of rates would give less and move with the batch."""

    def outcome_of(runs):
        correct = torch.tensor([[k != run for k in range(3)] for run in runs])
        accepted = {"drafter": leading(correct)}
        zero = torch.zeros(1)
        outcome = Outcome(zero, zero, zero, torch.zeros(0), accepted)
        return outcome, count_batch(), SimpleNamespace(valid=torch.ones(len(runs), dtype=torch.bool))

    facts = fed(outcome_of, groups)
    assert facts["tau/drafter"] == 2.5 and facts["accept/drafter"] == [0.75, 0.5, 0.25] and facts["blocks"] == 4


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_numbers_do_not_depend_on_how_blocks_are_split(tmp_path_factory, wide, groups):
    """Losses, rounds, tau and accept rates of six rows, all at once and in any groups."""
    trainee = make_trainee(wide)
    run = make_run(tmp_path_factory.getbasetemp() / "split", trainee, wide, rows := make_rows(9, 14, 7, 11, 3, 8))

    def measured(parts):
        meter = Meter(trainee, run.accelerator)
        with torch.no_grad():
            for part in parts:
                batch, anchors = run._batch([rows[i] for i in part], 0)
                meter.add(run._forward(batch, anchors), batch, anchors)
        return {key: value for key, value in meter.facts().items() if key not in PASSING}

    split = [[i for i in range(6) if groups[i] == g] for g in sorted(set(groups))]
    whole, parts = measured([range(6)]), measured(split)
    assert {"loss/refined", "loss/consistency/3", "tau/head", "accept/drafter"} <= whole.keys() == parts.keys()
    assert all(parts[key] == pytest.approx(value, abs=1e-10) for key, value in whole.items())


# --- processes --------------------------------------------------------------------------------------------------------

KINDS = {"ddp": ({}, (1, 2)), "fsdp": ({"ACCELERATE_USE_FSDP": "true"}, (2, 1))}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The same runs by one process and by two: straight, half, and the half that one process saved gone on with."""
    folder = tmp_path_factory.mktemp("ranks")
    one = ranks.make_run(folder / "one", 4)
    one.fit({})
    fit_until(ranks.make_run(folder / "half", 4), ranks.HALF)
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    for kind, (more, sizes) in KINDS.items():
        shutil.copytree(folder / "half", folder / kind / "resumed")
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command = [*start, ROOT / "tests" / "ranks.py", folder / kind, *sizes]
        done = subprocess.run(list(map(str, command)), env=env | more, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
    return SimpleNamespace(folder=folder, weights=weights_of(one), lines=lines_of(folder / "one"))


def facts_of(world, kind) -> list[dict]:
    return [json.loads((world.folder / kind / f"rank-{i}.json").read_text()) for i in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_really_two(world, kind):
    first, second = facts_of(world, kind)
    assert first["processes"] == second["processes"] == 2
    assert len(first["rows"]) == len(second["rows"]) == 2 and not set(first["rows"]) & set(second["rows"])
    wanted = {"ddp": ("DistributedDataParallel", ["Parameter"]), "fsdp": ("FSDPTrainee", ["DTensor"])}[kind]
    assert (first["module"], first["parameters"]) == wanted


def close_lines(ours: list[dict], theirs: list[dict]):
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    for one, other in zip(ours, theirs):
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=0, abs=1e-9), (one["step"], key)


@pytest.mark.parametrize("what", ["straight", "resumed"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one(world, kind, what):
    """Weights after five steps and every number on the way, held-out ones too; also where one process made the first
    three steps."""
    found = load_file(world.folder / kind / what / "weights.safetensors")
    assert found.keys() == world.weights.keys()
    for name, weight in found.items():
        assert torch.allclose(weight, world.weights[name], **EXACT), name
    lines = lines_of(world.folder / kind / what)
    assert [line["step"] for line in lines] == list(range(ranks.STEPS + 1)) and "eval/tau/head" in lines[4]
    close_lines(lines, world.lines)


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on_where_two_stopped(world, kind):
    sizes = KINDS[kind][1]
    run = ranks.make_run(world.folder / kind / "half", 4)
    wanted = {f"batch_size: was {sizes[0]}, now 4", "processes: was 2, now 1"}
    wanted |= {f"accumulation: was {sizes[1]}, now 1"} - {"accumulation: was 1, now 1"}
    assert set(run.resume()) == wanted and run.step == ranks.HALF
    assert facts_of(world, kind)[0]["changes"]  # and the other way round it is said as well
    run.fit({})
    for name, weight in weights_of(run).items():
        assert torch.allclose(weight, world.weights[name], **EXACT), name
    close_lines(lines_of(run.out), world.lines)


@pytest.mark.parametrize("kind", KINDS)
def test_nonsense_on_one_process_stops_both(world, kind):
    """Both name the step, the terms and the rows of all processes, and both keep their weights."""
    first, second = facts_of(world, kind)
    assert first["said"] == second["said"] and first["kept"] and second["kept"]
    assert first["said"].startswith("step 2: refined, consistency, anchor, confidence is not finite")
    assert first["said"].count("row-") == 4


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 3, 4])
def test_resumed_run_is_the_straight_run(make, tmp_path, at):
    """Cut in the first step, in the warm-up, at its end: everything that follows is the same, to the bit."""
    straight = make("a")
    straight.fit({})
    first = make("b")
    fit_until(first, at)
    second = make("b", init=7)
    assert second.resume() == [] and (second.step, second.run_id) == (at, first.run_id)
    assert second.best == first.best and (second.best is None) == (at == 1)
    second.fit({})
    same_end(tmp_path / "b", tmp_path / "a")
    for (name, ours), theirs in zip(second.trainee.named_parameters(), straight.trainee.parameters()):
        assert torch.equal(ours, theirs), name
        moments = straight.optimizer.state[theirs]
        assert moments and moments.keys() == second.optimizer.state[ours].keys()
        assert all(torch.equal(moments[key], second.optimizer.state[ours][key]) for key in moments), name
    rates = [line["lr"] for line in lines_of(tmp_path / "a")[1:]]
    assert rates == [straight.settings.lr_at(i) for i in range(6)] and rates[:4] == [0.0025, 0.005, 0.0075, 0.01]


def test_the_random_state_matters(make, tmp_path):
    """The test above would not see a lost random state if nothing were drawn."""
    make("a").fit({})
    fit_until(make("b"), 3)
    second = make("b")
    second.resume()
    torch.manual_seed(99)
    second.fit({})
    assert lines_of(tmp_path / "a")[:4] == lines_of(tmp_path / "b")[:4]
    assert lines_of(tmp_path / "a")[4]["loss/refined"] != lines_of(tmp_path / "b")[4]["loss/refined"]


def test_steps_can_be_raised(make, tmp_path):
    """In the middle and after the end: said, and the schedule is from there on that of the longer run."""
    fit_until(make("a", steps=4), 2)
    make("b", steps=4).fit({})
    for folder, start in (("a", 2), ("b", 4)):
        run = make(folder, steps=8)
        assert run.resume() == ["steps: was 4, now 8"] and run.step == start and not run.finished
        run.fit({})
        lines = [line for line in lines_of(tmp_path / folder) if line["step"]]
        assert [line["step"] for line in lines] == list(range(1, 9))
        longer = TrainSettings(8, lr=1e-2, warmup=4 / 6)
        assert [line["lr"] for line in lines[start:]] == [longer.lr_at(i) for i in range(start, 8)]
        assert [path.name for path in (tmp_path / folder).glob("step-*")] == ["step-0000008"]
        assert len(list((tmp_path / folder).glob("best*"))) == 1 and run.finished


@pytest.mark.parametrize("name", ["optimizer.safetensors", "random.safetensors", "trainer.json", "model.safetensors"])
@pytest.mark.parametrize("fault", ["cut", "gone"])
def test_a_damaged_state_is_named_and_nothing_is_loaded(make, tmp_path, name, fault):
    run = make("a")
    for _ in range(2):
        run.train_step()
        run.save_state({})
    path = tmp_path / "a" / "step-0000002" / name
    path.write_bytes(path.read_bytes()[:-9]) if fault == "cut" else path.unlink()
    again = make("a", init=7)
    before = {key: weight.clone() for key, weight in weights_of(again).items()}
    if (name, fault) != ("trainer.json", "gone"):  # this one makes a folder a state
        with pytest.raises((ValueError, OSError), match=f"{path.parent.name}.*{name}|{name}.*{path.parent.name}"):
            again.resume()
        assert again.step == 0 and all(torch.equal(before[key], w) for key, w in weights_of(again).items())
        shutil.rmtree(path.parent)
    assert again.resume() == [] and again.step == 1


def test_what_must_stay_is_refused_with_every_difference(make, tmp_path):
    """All of them at once, and beside them those that may change; another split of the same step is one of these."""
    fit_until(make("a"), 2)
    with pytest.raises(ValueError) as caught:
        make("a", lr=1e-3, seed=3, batch_size=1, log_every=2, clip=9.0, packing=True).resume()
    refused, _, fine = str(caught.value).partition(" These may change: ")
    for text in ("lr: was 0.01, now 0.001", "seed: was 0, now 3", "clip: was 1.0, now 9.0"):
        assert text in refused
    assert "sequences_per_step: was 2, now 1" in refused and "packing: was False, now True" in refused
    assert "batch_size: was 2, now 1" in fine and "log_every: was 1, now 2" in fine and "out=" in fine
    assert set(make("a", batch_size=1, accumulation=2).resume()) == {
        "accumulation: was 1, now 2",
        "batch_size: was 2, now 1",
    }


def test_without_a_state_the_run_starts_anew(make, tmp_path):
    """What a run killed before its first state has logged and kept comes again, once."""
    make("a").fit({})
    run = make("b")
    with pytest.raises(RuntimeError):
        run.fit({}, lambda facts, total: _fail() if facts["step"] == 3 else None)
    assert [line["step"] for line in lines_of(tmp_path / "b")] == [0, 1, 2, 3] and list(run.out.glob("best-*"))
    again = make("b")
    assert again.resume() == [] and again.step == 0 and not lines_of(again.out) and not list(again.out.glob("best-*"))
    again.fit({})
    same_end(tmp_path / "b", tmp_path / "a")


def _fail():
    raise RuntimeError("the machine is gone")


# --- interrupts and kills ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_step_and_can_be_resumed(make, tmp_path, number):
    """Ctrl-C or SIGTERM in the middle of a step: the step is finished, its state saved, and the rest is as if nothing
    had happened; the handlers are those from before."""
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    make("a").fit({})
    cut, batches = make("b"), []
    step = cut.micro_batches

    def interrupted(n):
        batches.append(n)
        if n == 2:
            os.kill(os.getpid(), number)
        return step(n)

    cut.micro_batches = interrupted
    with pytest.raises(KeyboardInterrupt):
        cut.fit({})
    assert batches == [0, 1, 2] and cut.step == 3 and not (tmp_path / "b" / "checkpoint").exists()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    again = make("b")
    assert again.resume() == [] and again.step == 3
    again.fit({})
    same_end(tmp_path / "b", tmp_path / "a")


class Killed(BaseException):
    """Passes every handler of the library."""


@contextmanager
def killed_at(place: int, monkeypatch):
    """A process that dies just before its file operation number `place`; what `finally` would clean up stays as well.
    Yields the list of operations."""
    done, (rename, rmtree, unlink) = [], (Path.rename, shutil.rmtree, Path.unlink)

    def watched(act):
        def operation(*args, **kwargs):
            done.append(act.__name__)
            if len(done) > place:
                raise Killed
            return act(*args, **kwargs)

        return operation

    with monkeypatch.context() as patched:
        for owner, act in ((Path, rename), (shutil, rmtree), (Path, unlink)):
            patched.setattr(owner, act.__name__, watched(act))
        try:
            yield done
        except Killed:
            pass


def test_killed_at_any_file_operation_it_ends_as_if_nothing_had_happened(make, tmp_path, monkeypatch):
    """States and best checkpoints at every step, and a kill before every third rename or removal, at the end of the run
    too. Every state that is there is whole."""
    often = dict(steps=2, eval_every=1, save_every=1)
    with killed_at(10**9, monkeypatch) as operations:
        make("a", **often).fit({})
    assert {"rename", "rmtree", "unlink"} <= set(operations)
    for place in range(0, len(operations), 3):
        out = tmp_path / f"b{place}"
        with killed_at(place, monkeypatch):
            make(out.name, **often).fit({})
        if (folder := state.newest(out)) is not None:
            assert load(folder).head is not None and state.read(folder)["step"] == int(folder.name[5:])
        again = make(out.name, **often)
        again.resume()
        assert left_over(out) == []
        if not again.finished:
            again.fit({})
        same_end(out, tmp_path / "a")
        shutil.rmtree(out)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """script(out, …) starts scripts/train.py on toys in a scratch folder."""
    folder = tmp_path_factory.mktemp("script")
    size = len(Target.from_pretrained(str(save_model(folder / "target"))).tokenizer)
    rows = make_rows(20, 14, 9, 25, 11, 17, 8, 30)
    assert max(max(row.prompt_ids + row.response_ids) for row in rows) < size
    texts = [json.dumps({"id": r.id, "prompt_ids": r.prompt_ids, "response_ids": r.response_ids}) + "\n" for r in rows]
    (folder / "rows.jsonl").write_text("".join(texts))
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    settings = ["+exp=tiny", "target.name=target", "data.path=rows.jsonl", "drafter.mask_token_id=299", "device=cpu"]
    settings += ["steps=30", "save_every=1", "max_anchors=2"]

    def start(out, *more):
        command = [sys.executable, str(ROOT / "scripts" / "train.py"), *settings, f"out={out}", *more]
        return subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    return SimpleNamespace(folder=folder, start=start)


def test_killed_again_and_again_it_ends_as_if_nothing_had_happened(script):
    """SIGKILL at random moments of the real script, and SIGTERM at last: the newest state is whole each time, and the
    run that was resumed is the run that was not."""
    straight = script.start("straight")
    printed = straight.communicate(timeout=120)
    assert straight.returncode == 0, printed[1]
    out, moments, resume = script.folder / "killed", random.Random(3), []
    for number in [signal.SIGKILL] * 3 + [signal.SIGTERM]:
        run, before, seen = script.start("killed", *resume), state.newest(out), []
        while len(seen) < 2 and run.poll() is None:
            if (now := state.newest(out)) not in (before, *[folder for folder, _ in seen]):
                seen.append((now, time.perf_counter()))
            time.sleep(0.002)
        # In steps, not seconds: a fast machine would be through with its thirty before a fixed wait is over.
        time.sleep(moments.uniform(0, 2) * (seen[1][1] - seen[0][1]) if len(seen) == 2 else 0)
        run.send_signal(number)
        _, said = run.communicate(timeout=120)
        assert run.returncode == (130 if number == signal.SIGTERM else -number), said
        folder, resume = state.newest(out), ["resume=true"]
        assert load(folder).head is not None and state.read(folder)["step"] == int(folder.name[5:]) < 30
        assert folder != before  # it went on
    assert f"interrupted after step {int(folder.name[5:])}; go on with the same command and resume=true" in said
    last = script.start("killed", *resume)
    _, said = last.communicate(timeout=120)
    assert last.returncode == 0, said
    same_end(out, script.folder / "straight")


# --- evaluation and intervals -----------------------------------------------------------------------------------------


def test_evaluation_and_measuring_leave_no_trace(make, tmp_path):
    """With dropout: the same losses with an evaluation after every step, with none, and where fewer steps are measured;
    training mode, gradients and random state are as before."""
    make("a", eval_every=0).fit({})
    make("b", eval_every=1).fit({})
    make("c", eval_every=0, log_every=3).fit({})
    losses = [{k: v for k, v in line.items() if k.startswith("loss/")} for line in lines_of(tmp_path / "a")]
    with_eval = lines_of(tmp_path / "b")[1:]
    assert [{k: line[k] for k in losses[0]} for line in with_eval] == losses and "eval/loss/refined" in with_eval[0]
    assert [{k: line[k] for k in losses[0]} for line in lines_of(tmp_path / "c")] == [losses[2], losses[5]]
    run = make("d")
    run.module.train()
    run.optimizer.zero_grad = lambda: None
    run.train_step()
    gradients, random_state = [w.grad.clone() for w in run.trainee.parameters()], torch.get_rng_state()
    first, again = run.evaluate(), run.evaluate()
    assert first == again and all(part.training for part in run.module.modules())
    assert torch.equal(torch.get_rng_state(), random_state) and torch.is_grad_enabled()
    assert all(torch.equal(w.grad, g) for w, g in zip(run.trainee.parameters(), gradients))
    run.module.eval()
    run.evaluate()
    assert not run.module.training


def test_intervals_count_optimiser_steps(make, tmp_path):
    """Four micro-batches a step: states, lines and evaluations bear the numbers of steps."""
    run = make("a", steps=3, batch_size=1, accumulation=4, save_every=1, log_every=1, eval_every=2)
    saved, write = [], run._write
    run._write = lambda name, *rest, **more: saved.append(name) or write(name, *rest, **more)
    run.fit({})
    assert [name for name in saved if name.startswith("step")] == ["step-0000001", "step-0000002", "step-0000003"]
    lines = lines_of(tmp_path / "a")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert ["eval/tau/head" in line for line in lines] == [True, False, True, True]


def scripted(run, taus):
    """Evaluations with these results, in order; the first one is that of step 0."""
    left = iter(taus)
    run.evaluate = lambda: {"eval/tau/head": next(left), "eval/loss/refined": 1.0}


def test_best_is_the_best_and_last_the_last(make, tmp_path):
    """A high score before the first step counts nothing, the first of equal ones stays, older ones go."""
    run, kept = make("a", eval_every=1, save_every=2), []
    scripted(run, [9.0, 1.5, 1.2, 1.8, 1.8, 1.7, 1.1])
    run.fit({}, lambda facts, total: kept.append([path.name for path in run.out.glob("best-*")]))
    names = ["best-0000001"] * 2 + ["best-0000003"] * 4
    assert kept == [[name] for name in names]
    assert {path.name for path in run.out.iterdir() if path.is_dir()} == {"best", "checkpoint", "step-0000006"}
    best, last = load(run.out / "best"), load(run.out)
    assert best.provenance["metrics"]["eval/tau/head"] == 1.8 and last.provenance["metrics"]["eval/tau/head"] == 1.1
    assert not torch.equal(best.head.readout.weight, last.head.readout.weight)
    result = json.loads((run.out / "result.json").read_text())
    assert result["best"] == {"step": 3, "tau": 1.8} and result["steps"] == 6


def test_the_best_score_survives_a_resume(make, tmp_path):
    run = make("a", eval_every=1)
    scripted(run, [1.0, 1.1, 1.9, 1.2])
    fit_until(run, 3)
    again = make("a", eval_every=1)
    assert again.resume() == [] and again.best == {"step": 2, "tau": 1.9}
    scripted(again, [1.3, 1.8, 1.4])
    again.fit({})
    assert load(again.out / "best").provenance["metrics"]["eval/tau/head"] == 1.9


def test_a_best_checkpoint_of_steps_that_come_again_is_not_kept(make):
    """Killed after a best one that its newest state does not know: what the resumed run finds decides."""
    run = make("a", eval_every=1, save_every=3)
    scripted(run, [1.0, 1.1, 1.2, 1.3, 1.9])
    with pytest.raises(RuntimeError):
        run.fit({}, lambda facts, total: _fail() if facts["step"] == 4 else None)
    assert [path.name for path in run.out.glob("best-*")] == ["best-0000004"]
    again = make("a", eval_every=1, save_every=3)
    again.resume()
    assert again.step == 3 and again.best is None and not list(again.out.glob("best-*"))
    scripted(again, [1.2, 1.4, 1.1])
    again.fit({})
    assert again.best == {"step": 5, "tau": 1.4}
    assert load(again.out / "best").provenance["metrics"]["eval/tau/head"] == 1.4


# --- a full disk ------------------------------------------------------------------------------------------------------


@contextmanager
def no_file_above(size: int):
    """Real writes that fail, with EFBIG where a full disk gives ENOSPC."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def full_in(run, steps, size=20_000):
    """In these steps no file grows beyond `size`."""
    save, best = run.save_state, run._evaluate_and_keep_best

    def within(act):
        def limited(*args):
            if run.step not in steps:
                return act(*args)
            with no_file_above(size):
                return act(*args)

        return limited

    run.save_state, run._evaluate_and_keep_best = within(save), within(best)


def test_a_full_disk_costs_the_save_not_the_run(make, tmp_path):
    """A warning with step, folder and the newest whole state; nothing half-written; the numbers go on as they were; and
    a best checkpoint that could not be written does not count as one."""
    make("a", eval_every=1, save_every=1).fit({})
    run, seen = make("b", eval_every=1, save_every=1), []
    scripted(run, [1.0, 1.1, 1.5, 1.4, 1.2, 1.2, 1.2])
    full_in(run, steps=(2, 3))

    def look(facts, total):
        seen.append(sorted(path.name for path in run.out.iterdir() if path.is_dir()))

    with pytest.warns(UserWarning) as told:
        run.fit({}, look)
    texts = [str(each.message) for each in told if "could not be saved" in str(each.message)]
    assert [text.split(" could")[0] for text in texts] == [
        f"step {n}: the {what}" for n in (2, 3) for what in ("best", "state")
    ]
    assert all(str(run.out) in text and "step-0000001" in text for text in texts)
    assert seen[1] == seen[2] == ["best-0000001", "step-0000001"] and run.best == {"step": 4, "tau": 1.2}
    losses = [[line["loss/refined"] for line in lines_of(tmp_path / name)[1:]] for name in "ab"]
    assert losses[0] == losses[1] and left_over(run.out) == []
    assert load(run.out / "best").provenance["metrics"]["eval/tau/head"] == 1.2


def test_lines_that_a_full_disk_refused_come_later(make, tmp_path):
    make("a").fit({})
    run = make("b")
    log = run._log

    def limited(facts):
        path = run.out / "metrics.jsonl"
        if facts["step"] not in (2, 3):
            return log(facts)
        with no_file_above(path.stat().st_size + 40):
            log(facts)
        assert path.read_text().endswith("}\n")

    run._log = limited
    with pytest.warns(UserWarning, match="step 3: metrics.jsonl could not be written.*Make room in"):
        run.fit({})
    assert lines_of(tmp_path / "a") == lines_of(tmp_path / "b")


def test_a_disk_that_is_full_at_the_end_is_an_error_with_a_way_on(make, tmp_path):
    make("a", save_every=2).fit({})
    run = make("b", save_every=2)
    finish = run._finish

    def limited(provenance):
        with no_file_above(20_000):
            finish(provenance)

    run._finish = limited
    with pytest.raises(OSError, match=f"out={run.out}: .*could not be saved.*step-0000004 with resume=true"):
        run.fit({})
    assert left_over(run.out) == [] and not (run.out / "checkpoint").exists()
    again = make("b", save_every=2)
    assert again.resume() == [] and again.step == 4 and not again.finished
    again.fit({})
    same_end(tmp_path / "b", tmp_path / "a")
