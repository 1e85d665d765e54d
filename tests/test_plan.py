"""A plan's numbers against what is counted and measured: parameters, operations, and the peak memory of real steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from disk import save_model
from hydra import compose, initialize_config_dir
from torch.utils.flop_counter import FlopCounterMode
from toys import XPRESS, D, V, anchors_at, make_drafter, make_rows, make_target, make_trainee

from xpress import parts, plan
from xpress.batches import collate
from xpress.build import planning

ROOT = Path(__file__).resolve().parents[1]
NOWHERE = ["target.name=nobody/nothing", "data.path=nowhere"]


def composed(*overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return compose("train", overrides=["plan=true", *overrides])


# --- parameters -----------------------------------------------------------------------------------------------------


def test_parameters_of_qwen3_8b_are_the_published_ones():
    """The target's own count, z-lab's drafter by its published shapes, 80.5 M of head, 2.75 M outside its maps."""
    found = planning(composed("+exp=qwen3_8b", *NOWHERE)).parameters
    size, inner, q, kv, dim, captured, layers = 4096, 12288, 4096, 1024, 128, 5, 5
    layer = 2 * size * q + 2 * size * kv + 3 * size * inner + 2 * size + 2 * dim
    assert found["trained"]["drafter"] == captured * size * size + 2 * size + layers * layer
    assert found["trained"]["head, vocabulary maps"] == 2 * 151936 * 256
    assert round(found["trained"]["head, the rest"] / 1e6, 2) == 2.75
    head = found["trained"]["head, vocabulary maps"] + found["trained"]["head, the rest"]
    assert round(head / 1e6, 1) == 80.5
    assert sum(found["frozen"].values()) == 8_190_735_360


@pytest.mark.parametrize("exp, count", [("qwen3_4b", 4_022_468_096), ("smollm2_135m", 134_515_008)])
def test_a_tied_embedding_counts_once(exp, count):
    assert sum(planning(composed(f"+exp={exp}", *NOWHERE)).parameters["frozen"].values()) == count


def test_a_frozen_drafter_is_frozen():
    found = planning(composed("+exp=qwen3_4b", "train_drafter=false", *NOWHERE)).parameters
    assert "drafter" in found["frozen"] and "drafter" not in found["trained"]


@pytest.mark.parametrize("head", ["markov", "gated", "rnn", "domino", "none"])
def test_every_head_can_be_planned(head):
    objective = "dflash" if head == "none" else "xpress"
    found = planning(composed("+exp=qwen3_8b", f"head={head}", f"objective={objective}", *NOWHERE))
    assert ("head" in found.flops) == (head != "none") and json.loads(json.dumps(found.to_json())) == found.to_json()


# --- operations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [True, False], ids=["co-trained", "frozen"])
def test_operations_of_the_drafter_are_those_that_torch_counts(train):
    target = make_target()
    drafter = make_drafter(target).requires_grad_(train)
    S, A, T, c = 2, 3, 11, drafter.config
    features, positions = torch.randn(S, T, 2 * D), torch.arange(T).expand(S, T)
    with FlopCounterMode(display=False) as counter:
        contexts = drafter.project(features, positions)
        hidden = drafter(torch.ones(S, A, dtype=torch.long), torch.full((S, A), T), contexts)
        if train:
            hidden.sum().backward()
    ours = plan.drafter_flops(c, S * T, S * A * c.block_size, T, train)
    assert counter.get_total_flops() == sum(ours.values())


@pytest.mark.parametrize("train", [True, False], ids=["co-trained", "frozen"])
def test_operations_of_a_whole_step_are_those_that_torch_counts(train):
    """Drafter, head and loss together, forward and backward, one chunk. The context that a block's attention reads is
    taken from its mask."""
    target = make_target()
    trainee = make_trainee(target, train_drafter=train, chunk=10**6)
    c, batch = trainee.drafter.config, collate(make_rows(9, 9), 99)
    anchors = anchors_at(batch, [4, 6], c.num_draft)
    features = target.features(batch.ids, batch.positions, c.target_layer_ids)
    with FlopCounterMode(display=False) as counter:
        trainee(batch, anchors, features, None).total.backward()
    N, T = 4, batch.ids.shape[1]
    tensors = plan.tensors_of(XPRESS)
    ours = plan.drafter_flops(c, 2 * T, N * c.block_size, 6, train)
    ours |= plan.vocabulary_flops(N * c.num_draft, D, V, 8, tensors, train)
    head = plan.meta_head(lambda drafter, target: type(trainee.head)(V, D, c.block_size, 8), c)
    once, each = plan.head_flops(head, D, c.block_size, train)
    ours["head"] = N * (once + 4 * each)
    assert counter.get_total_flops() == pytest.approx(sum(ours.values()), rel=0.01)


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize(
    "overrides",
    [[], ["drafter.draft_vocab_size=null", "packing=true"]],
    ids=["recipe", "full, packed"],
)
def test_memory_is_what_two_real_steps_take(overrides):
    """The embedded recipe with random weights at its true sizes: predicted within 8 % of the measured peak."""
    cfg = composed("+exp=smollm2_135m", *NOWHERE, "device=cpu", *overrides)
    found = planning(cfg).memory["one GPU"]
    sizes = {k: v for k, v in cfg.target.sizes.items() if k in (*plan.SIZES, "head_dim")}
    fields = ("num_hidden_layers", "block_size", "mask_token_id", "target_layer_ids")
    drafter = {k: list(v) if k == "target_layer_ids" else v for k, v in cfg.drafter.items() if k in fields}
    case = dict(sizes=sizes, drafter=drafter, rank=cfg.head.rank, draft_vocab_size=cfg.drafter.draft_vocab_size)
    case |= dict(sequences=cfg.batch_size, anchors=cfg.max_anchors, length=cfg.max_length, precision=cfg.precision)
    # the heap gives large blocks back at once, so that what is resident is what is alive
    env = dict(os.environ, OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="262144", MALLOC_TRIM_THRESHOLD_="262144")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    worker = [sys.executable, str(ROOT / "tests" / "plan_worker.py"), json.dumps(case)]
    done = subprocess.run(worker, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])["peak"]
    print(f"predicted {found['total'] / 1e6:.1f} MB, measured {measured / 1e6:.1f} MB")
    assert found["total"] == pytest.approx(measured, rel=0.08)


def test_sharding_divides_weights_moments_and_gradients_alone():
    two, eight = (planning(composed("+exp=qwen3_8b", f"gpus={n}", *NOWHERE)).memory for n in (2, 8))
    assert two["DDP"] == eight["DDP"] and two["FSDP"]["total"] > eight["FSDP"]["total"]
    apart = {k for k, size in two["FSDP"]["parts"].items() if size != eight["FSDP"]["parts"][k]}
    assert apart == {"weights, fp32", "AdamW moments"}


def test_cached_features_drop_the_target():
    online, cached = (
        planning(composed("+exp=qwen3_8b", f"features={kind}", *NOWHERE)) for kind in ("online", "cached")
    )
    gone = online.memory["one GPU"]["total"] - cached.memory["one GPU"]["total"]
    assert gone > 13e9 and "target, forward" not in cached.flops
    assert cached.disk["features"] == cached.features["bytes"] > 0 == online.disk["features"]
    assert cached.features["bytes_per_token"] == 6 * 4096 * 2


# --- where numbers come from, and what is refused -------------------------------------------------------------------


def test_steps_hours_and_rows(tmp_path):
    found = planning(composed("+exp=qwen3_8b", "gpus=8", "accumulation=4", "plan_tokens=1000", *NOWHERE))
    assert found.step["sequences"] == 32 and round(found.time["epochs"], 2) == 10.0
    assert found.features["bytes"] == 1292832 * 1000 * 6 * 4096 * 2
    seconds = sum(found.flops.values()) / (8 * 989e12 * 0.4)
    assert found.time["hours"] == pytest.approx(404010 * seconds / 3600)
    lines = [{"id": str(n), "prompt_ids": [1] * n, "response_ids": [2, 3]} for n in (4, 8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    counted = planning(composed("+exp=smollm2_135m", f"data.path={tmp_path / 'rows.jsonl'}"))
    assert counted.features["count"] == 2 and counted.features["mean"] == 8 and counted.features["longest"] == 10


def test_a_local_target_has_its_own_sizes(tmp_path):
    save_model(tmp_path / "toy")
    found = planning(composed("+exp=tiny", f"target.name={tmp_path / 'toy'}", "data.path=nowhere"))
    assert (
        found.run["target"] == str(tmp_path / "toy") and found.parameters["frozen"]["target embedding + lm_head"] < 1e5
    )


@pytest.mark.parametrize(
    "override, message",
    [
        ("target.sizes=null", "target.sizes: hidden_size, .* not known"),
        ("~target.sizes.vocab_size", "target.sizes: vocab_size not known"),
        ("target.sizes.model_type=nothing", "target.sizes: no nothing can be made of them"),
        ("drafter.sizes=null", "drafter.sizes: not known for drafter.init=z-lab/"),
        ("gpus=-1", "gpus=-1: must be above 0"),
        ("mfu=1.5", "mfu=1.5: must be above 0 and at most 1"),
        ("peak_tflops=0", "peak_tflops=0: must be above 0"),
        ("plan_tokens=5000", "plan_tokens=5000: rows are cut at max_length=4096"),
        ("plan_rows=0", "plan_rows=0: must be at least 1"),
        ("+typo=1", "unknown key typo"),
    ],
)
def test_bad_settings_are_named(override, message):
    with pytest.raises(ValueError, match=message):
        planning(composed("+exp=qwen3_8b", *NOWHERE, override))


def test_sizes_are_held_to_the_weights_that_they_name(tmp_path):
    """The file's own target with other sizes is refused; another target on the command line is not."""
    name = str(save_model(tmp_path / "toy"))
    section = {"name": name, "dtype": "float32", "sizes": {"of": name, "hidden_size": D, "model_type": "llama"}}
    assert parts.make_target(section, "cpu").hidden_size == D
    wrong = section | {"sizes": section["sizes"] | {"hidden_size": 33}}
    with pytest.raises(ValueError, match=r"target.sizes: hidden_size=33 \(it has 32\): not those of"):
        parts.make_target(wrong, "cpu")
    wrong["sizes"]["of"] = "another/target"
    assert parts.make_target(wrong, "cpu").hidden_size == D


def test_the_real_command_writes_nothing(tmp_path):
    words = ["+exp=qwen3_8b", "plan=true", "gpus=8", "drafter.init=nobody/none", *NOWHERE]
    env = dict(os.environ, HF_HUB_OFFLINE="1", XPRESS_HOME=str(tmp_path / "home"))
    script = [sys.executable, str(ROOT / "scripts" / "train.py"), *words]
    done = subprocess.run(script, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "256 sequences (batch_size 1 · accumulation 32 · 8 GPUs)" in done.stdout and "mfu=0.4" in done.stdout
    assert "planned with the sizes of Qwen/Qwen3-8B" in done.stdout and not list(tmp_path.iterdir())
    missing = subprocess.run([*script, "target.sizes=null"], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert missing.returncode == 1 and missing.stderr.strip().startswith("error: target.sizes")
