"""The real commands, end to end on toys: data, training, evaluation, sweeps; and every bad setting named in time."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from disk import published_drafter, save_model
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from safetensors.torch import load_file

from xpress import Target, build, load, parts, prompts, tables

ROOT = Path(__file__).resolve().parents[1]
TOY = ["+exp=tiny", "drafter.mask_token_id=299", "max_length=512", "steps=2"]
ENOUGH = ["bench=sample", "samples=2", "max_new_tokens=8", "passes=[0,1,auto]", "device=cpu"]


class Commands:
    """Starts real commands in a scratch folder; one thread each, no hub, trackers offline."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.env = dict(
            os.environ, HF_HUB_OFFLINE="1", WANDB_MODE="offline", WANDB_DIR=str(folder), WANDB_SILENT="true"
        )
        self.env |= {"OMP_NUM_THREADS": "1", "XPRESS_HOME": str(folder / "home")}

    def together(self, *commands, cwd=None) -> list[subprocess.CompletedProcess]:
        """All at once: (script, argument, …) each -> what they printed, in order."""
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env, cwd=cwd or self.folder)
        started = [
            subprocess.Popen([sys.executable, str(ROOT / "scripts" / script), *map(str, args)], **pipes)
            for script, *args in commands
        ]
        return [subprocess.CompletedProcess(p.args, p.wait(), *output) for p in started for output in [p.communicate()]]


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    return Commands(tmp_path_factory.mktemp("commands"))


@pytest.fixture(scope="session")
def toys(commands):
    """A tiny Llama, a tiny Qwen3 with a published drafter, and a target without a chat template; rows of the Llama."""
    at = commands.folder
    save_model(at / "llama")
    save_model(at / "bare", template=None)
    save_model(at / "qwen3", "qwen3", seed=3)
    published_drafter(at / "z-lab", Target.from_pretrained(str(at / "qwen3")), dtype=torch.bfloat16)
    (at / "elsewhere").mkdir()
    return SimpleNamespace(
        llama=at / "llama", qwen3=at / "qwen3", bare=at / "bare", drafter=at / "z-lab", at=at, loose=at / "loose.jsonl"
    )


@pytest.fixture(scope="session")
def ran(commands, toys):
    """Every real command, run once, two or three at a time. Relative paths are those of the caller's folder."""
    generate = ("generate_data.py", f"target.name={toys.llama}", "prompts=train", "samples=8", "max_new_tokens=12")
    data, lost = commands.together((*generate, "out=rows", "batch_size=4"), ("eval_tau.py", "checkpoint=nowhere"))
    loose = "".join(path.read_text() for path in sorted((toys.at / "rows").glob("shard-*.jsonl")))
    (toys.at / "loose.jsonl").write_text(loose)  # rows from elsewhere: they do not say which target made them
    qwen3 = ("+exp=qwen3_8b", "target.name=qwen3", "target.dtype=float32", "drafter.init=z-lab")
    small = (
        "data.path=loose.jsonl",
        "steps=2",
        "precision=no",
        "accumulation=1",
        "max_anchors=8",
        "max_length=512",
        "eval_every=0",
    )
    toy = ("train.py", *TOY, f"target.name={toys.llama}", f"data.path={toys.at / 'rows'}")
    train, published = commands.together(
        ("train.py", *TOY, "target.name=llama", "data.path=rows", "out=run"),
        ("train.py", *qwen3, *small, "log_every=1", "save_every=1", "out=z-run"),
    )
    sweep, found = commands.together(
        (*toy, "out=sweep", "lr=1e-3,1e-4", "seed=0,1", "tracker=wandb", "wandb_mode=offline", "--multirun"),
        ("eval_tau.py", "checkpoint=../run", "out=results", *ENOUGH),
        cwd=toys.at / "elsewhere",
    )
    z_found, *contest = commands.together(
        ("eval_tau.py", "checkpoint=../z-run", "out=z-results", *ENOUGH),
        *[(*toy, "out=contested")] * 2,
        cwd=toys.at / "elsewhere",
    )
    done = dict(data=data, train=train, published=published, sweep=sweep, eval=found, z_eval=z_found)
    return SimpleNamespace(**done, lost=lost, contest=sorted(contest, key=lambda each: each.returncode))


def result(done, cwd: Path) -> dict:
    assert done.returncode == 0, done.stderr
    found = json.loads((cwd / re.search(r"^result: (\S+)$", done.stdout, re.M)[1]).read_text())
    return found | found["cells"][0]


# --- end to end -----------------------------------------------------------------------------------------------------


def test_generate_then_train(ran, toys):
    for done, bar in ((ran.data, "8/8"), (ran.train, "2/2")):
        assert done.returncode == 0, done.stderr
        assert bar in done.stderr  # progress is shown
    assert sum(len(path.read_text().splitlines()) for path in (toys.at / "rows").glob("shard-*.jsonl")) == 8
    for said in ("6 rows", "2 held out", "parameters to train", "lr=0.001", "checkpoint: run/checkpoint"):
        assert said in ran.train.stdout
    metrics = [json.loads(line) for line in (toys.at / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [0, 1, 2] and all("eval/tau/head" in metrics[i] for i in (0, 2))
    left = {build.RUN_CONFIG, "metrics.jsonl", "curves.png", "result.json", "checkpoint", "best", "step-0000002"}
    assert {path.name for path in (toys.at / "run").iterdir()} == left
    assert {"loss/refined", "loss/consistency", "loss/anchor", "tau/drafter", "tau/head", "lr"} <= metrics[-1].keys()
    facts = load(toys.at / "run", Target.from_pretrained(str(toys.llama))).provenance
    assert {"target", "template", "data", "recipe", "init", "versions", "metrics"} <= facts.keys()
    assert (facts["recipe"]["steps"], facts["data"]["rows"], facts["init"]) == (2, 6, None)
    assert (facts["data"]["held_out"], facts["data"]["skipped"]) == (2, {})


@pytest.mark.parametrize("name, rows", [("eval", 5), ("z_eval", 5)])
def test_evaluation_is_lossless_and_its_numbers_agree(ran, toys, name, rows):
    """From another folder than the training, which was given relative paths: the target is found, and where the run
    started from a drafter, that one too."""
    done = getattr(ran, name)
    found = result(done, toys.at / "elsewhere")
    methods, printed = found["methods"], "".join(done.stdout.split())
    assert len(methods) == rows and "sample: 100%" in done.stderr and found["prompts"] == 2
    for row in methods:
        if row["note"]:
            assert (row["label"], row["note"], name) == ("bare", "not given", "eval")
            continue
        assert row["lossless"] is True and row["responses"] == 2
        assert row["tau"] == pytest.approx(1 + sum(row["accept_at"].values()))
        assert row["tokens"] == pytest.approx(row["responses"] + row["rounds"] * row["tokens_per_round"])
        assert sum(row["histogram"]) == row["rounds"]
    assert [row["passes"] for row in methods[-2:]] == [1, "auto"] and methods[0]["tau"] == 1
    for key in ("bench", "samples", "target", "head", "temperature", "max_new_tokens", "thinking", "seed", "dtype"):
        assert "".join(f"{key}={tables.setting(found['protocol'][key])}".split()) in printed
    assert (found["protocol"]["samples"], found["protocol"]["max_new_tokens"]) == (2, 8)
    compared = {row["label"] for row in methods[2:] if row["kind"] == "head" or not methods[1]["note"]}
    assert {pair["a"] for pair in found["paired"]} == compared
    left = {path.name for path in (toys.at / "elsewhere" / {"eval": "results", "z_eval": "z-results"}[name]).iterdir()}
    assert left >= {"settings.json", "responses.jsonl", "result.json", "report.md", "tau.png", "acceptance.png"}


def test_the_published_recipe_starts_from_a_published_drafter(ran, toys):
    assert ran.published.returncode == 0, ran.published.stderr
    found, start = load(toys.at / "z-run"), load(toys.drafter)
    assert found.drafter.config == start.drafter.config and type(found.head).__name__ == "Refiner"
    assert found.provenance["init"]["path"].endswith("z-lab") and len(found.provenance["init"]["sha256"]) == 64
    assert not torch.equal(found.drafter.fc.weight, start.drafter.fc.weight)  # co-trained
    recipe = found.provenance["recipe"]
    assert (recipe["lr"], recipe["warmup"], recipe["seed"]) == (6e-4, 0.04, 42) and found.head.config["rank"] == 256
    published, ours = (load_file(path / "model.safetensors") for path in (toys.drafter, toys.at / "z-run/checkpoint"))
    assert published.keys() == {name for name in ours if not name.startswith("head.")}


def test_a_sweep_leaves_four_runs_apart(ran, toys):
    assert ran.sweep.returncode == 0, ran.sweep.stderr
    folders = [toys.at / "elsewhere" / "sweep" / str(i) for i in range(4)]
    for folder in folders:
        assert {build.RUN_CONFIG, "metrics.jsonl", "checkpoint"} <= {path.name for path in folder.iterdir()}
    recipes = [load(folder).provenance["recipe"] for folder in folders]
    assert {(r["lr"], r["seed"]) for r in recipes} == {(1e-3, 0), (1e-3, 1), (1e-4, 0), (1e-4, 1)}
    assert {json.loads((folder / "tracker.json").read_text())["run_id"] for folder in folders} == {
        path.name.rpartition("-")[2] for path in toys.at.rglob("offline-run-*")
    }
    assert all((folder / "curves.png").stat().st_size > 10_000 for folder in folders)
    tracked = {path.name.rpartition("-")[2] for path in toys.at.rglob("offline-run-*")}
    assert len(tracked) == 4


def test_of_two_runs_that_start_together_one_wins(ran, toys):
    winner, loser = ran.contest
    assert (winner.returncode, loser.returncode) == (0, 1) and (toys.at / "elsewhere/contested/checkpoint").exists()
    assert re.search("error: out=contested: (the folder is not empty|another run has just claimed)", loser.stderr)


def test_two_runs_that_both_saw_an_empty_folder_do_not_share_it(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(()))
    assert build.run_folder(str(tmp_path / "out")) == tmp_path / "out"
    with pytest.raises(ValueError, match="out=.*: another run has just claimed this folder; give another out="):
        build.run_folder(str(tmp_path / "out"))


def test_an_error_is_one_line_and_a_status(ran):
    for done, said in (
        (ran.lost, "error: checkpoint=nowhere: no config.json"),
        (ran.contest[1], "error: out=contested"),
    ):
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


# --- bad settings, in this process ----------------------------------------------------------------------------------


def configured(name: str, *overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return compose(name, list(overrides))


@pytest.fixture
def program(toys, ran, monkeypatch, tmp_path):
    """program("train", overrides…) runs what the script runs, on the toys, writing below tmp_path."""
    monkeypatch.chdir(toys.at)
    usual = {
        "train": [*TOY, f"target.name={toys.llama}", "data.path=rows", f"out={tmp_path / 'out'}", "device=cpu"],
        "eval_tau": ["checkpoint=run", f"out={tmp_path / 'out'}", *ENOUGH],
        "generate_data": [f"target.name={toys.llama}", f"out={tmp_path / 'out'}", "samples=1", "max_new_tokens=2"],
    }
    call = {"train": build.training, "eval_tau": build.evaluation, "generate_data": build.generation}

    def run(name, *overrides):
        cfg = configured(name, *usual[name], *(o.format(**vars(toys)) for o in overrides))
        return call[name](cfg, *([] if name == "train" else [lambda *_: None]))

    return run


BAD = [
    ("train", "+typo=1", "unknown key typo; known are"),
    ("train", "+drafter.typo=1", "unknown key drafter.typo"),
    ("train", "+target.typo=1", "unknown key target.typo"),
    ("train", "+data.typo=1", "unknown key data.typo"),
    ("train", "+objective.typo=1", "unknown key objective.typo"),
    ("train", "+head.typo=1", "Refiner.*typo"),
    ("train", "objective.terms=[{{name: a, feed: gold, wheight: 1}}]", "unknown key objective.terms.wheight"),
    (
        "train",
        "objective.terms=[{{name: a, feed: gold}}]",
        "objective.rounds=3: no term has it as its rounds; drop the",
    ),
    ("train", "objective.rounds=-1", "objective term consistency: rounds=-1"),
    ("train", "objective.anchor=[1]", "objective term anchor: weight=.1."),
    ("train", "objective.loss={{ce: 0, l1: 0.0}}", "objective term refined: loss=.* is zero; give ce or l1 a weight"),
    ("train", "head=own", "head._target_ is not given; add head._target_="),
    ("train", "tracker=wandbb", "tracker=wandbb: known are null, wandb and tensorboard"),
    ("train", "wandb_mode=maybe", "wandb_mode=maybe: known are null, offline and online"),
    ("train", "data.path=nowhere", "data.path=nowhere: no rows there"),
    ("train", "target.name={qwen3}", "data.path=rows: the rows are answers of .*llama"),
    ("train", "target.name=nowhere", "target=nowhere: no such folder"),
    ("train", "target.name={bare}", "no chat template"),
    ("train", "drafter.mask_token_id=null", "drafter.mask_token_id="),
    ("train", "drafter.mask_token_id=300", "mask_token_id=300: outside the target's embedding of 300 rows"),
    ("train", "drafter.mask_token_id=-1", "mask_token_id=-1: outside"),
    ("train", "drafter.block_size=1", "block_size=1"),
    ("train", "+drafter.target_layer_ids=[0,4]", "4 is no decoder layer"),
    ("train", "drafter.draft_vocab_size=301", "draft_vocab_size=301"),
    ("train", "+head.block_size=5", "head.block_size=5, but the drafter has 4"),
    ("train", "+head.hidden_size=33", "head.hidden_size=33, but the drafter has 32"),
    ("train", "head._target_=torch.nn.Linear", "not a CorrectionHead"),
    ("train", "drafter.init=nowhere", "checkpoint=nowhere: no config.json"),
    ("train", "head.init=nowhere", "checkpoint=nowhere: no config.json"),
    ("train", "head.init={drafter}", "was trained for|do not belong|no head there"),
    ("train", "steps=0", "steps=0: must be at least 1"),
    ("train", "batch_size=9", "6 rows make 6 sequences, fewer than one step takes"),
    ("train", "max_length=4", "no usable row .*answer cut away by max_length"),
    ("train", "precision=fp8", "precision='fp8'"),
    ("train", "head=none", "objective"),
    ("eval_tau", "+typo=1", "unknown key typo"),
    ("eval_tau", "passes=-1", "passes=-1: give a number of Jacobi passes from 0 up"),
    ("eval_tau", "passes=[0,-1]", "passes=-1"),
    ("eval_tau", "passes=[1.5]", "passes=1.5"),
    ("eval_tau", "checkpoint=nowhere", "checkpoint=.*nowhere: no config.json there"),
    ("eval_tau", "checkpoint=nobody/none", "checkpoint=nobody/none: no such folder, and the hub cannot be read"),
    ("eval_tau", "checkpoint={drafter}", "does not name its target; give target.name=<"),
    ("eval_tau", "+target.typo=1", "unknown key target.typo"),
    ("eval_tau", "target.name={qwen3}", "was trained for target .*llama"),
    ("eval_tau", "batch_size=[1,0]", "batch_size=0: must be a whole number from 1 up"),
    ("eval_tau", "rounds=0", "rounds=0"),
    ("eval_tau", "readout=int9", "readout=int9: give full, int8, int4, bf16, or top<C>"),
    ("eval_tau", "answers=none", "answers=none: known are live and recorded"),
    ("eval_tau", "turns=last", "turns=last: known are first, all"),
    ("eval_tau", "methods=[ar,eagle]", "methods: eagle is unknown; known are ar, bare, bare:<path>, drafter, head"),
    ("eval_tau", "methods=['bare:nowhere']", "checkpoint=nowhere: no config.json"),
    ("eval_tau", "metrics=[tau,speed]", "metrics=speed: unknown; known are K, tau"),
    ("eval_tau", "dtype=float33", "dtype=float33"),
    ("eval_tau", "stop_strings=['']", "stop_strings"),
    ("eval_tau", "resume=true", "nothing to resume"),
    ("eval_tau", "passes=[best]", "passes=best: half the prompts choose K"),
    ("eval_tau", "max_new_tokens=0", "max_new_tokens=0"),
    ("eval_tau", "samples=0", "samples=0"),
    ("eval_tau", "bench=gsm9k", "bench=gsm9k: unknown set"),
    ("eval_tau", "protocol=public", "protocol=public: known are free, published"),
    ("eval_tau", "temperature=-1", "temperature=-1"),
    ("generate_data", "+typo=1", "unknown key typo"),
    ("generate_data", "prompts=trian", "trian: unknown set"),
    ("generate_data", "target.name={bare}", "no chat template"),
    ("generate_data", "prompts={loose}", "no usable record .8× neither messages nor a prompt field"),
    ("generate_data", "backend=vllm", "backend=vllm: known are hf .* and openai"),
    ("generate_data", "turns=last", "turns=last: known are first, all"),
    ("generate_data", "backend=openai", "base_url=None: backend=openai needs the server's address"),
    ("generate_data", "max_new_tokens=1020", "prompt train/.* exceed the target's context of 1024"),
]


@pytest.mark.parametrize("name, override, named", BAD, ids=[f"{name} {override}" for name, override, _ in BAD])
def test_a_bad_setting_is_named(program, tmp_path, monkeypatch, name, override, named):
    """By one readable error, before any work; and the output folder stays free for the next try."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises((ValueError, OSError), match=named):
        program(name, override)
    left = [path.name for path in (tmp_path / "out").glob("*")]
    assert not left or name == "generate_data" and left == ["settings.json"]


def test_a_published_protocol_cannot_be_changed_in_passing(program):
    for override in ("max_new_tokens=8", "samples=2", "thinking=true", "temperature=0.5"):
        rest = [o for o in ("samples=null", "max_new_tokens=null") if o.split("=")[0] != override.split("=")[0]]
        with pytest.raises(ValueError, match=f"{override.replace('true', 'True')}: protocol=published"):
            program("eval_tau", "protocol=published", *rest, override)


def test_only_known_checks_run(toys, monkeypatch):
    monkeypatch.setattr(build.sampling_check, "check_sampling", lambda seed, progress: {"passed": True, "seed": seed})
    assert build.checking(configured("eval_tau", "check=sampling", "seed=3"), None) == {"passed": True, "seed": 3}
    with pytest.raises(ValueError, match="check=speed: known is sampling"):
        build.checking(configured("eval_tau", "check=speed"), None)


def test_hydra_refuses_a_key_that_no_config_has():
    for override in ("lr_typo=1", "drafter.typo=1"):
        with pytest.raises(ConfigCompositionException, match=override.partition("=")[0]):
            configured("train", override)


# --- ablations: one key each ------------------------------------------------------------------------------------------


def terms_of(*overrides) -> dict:
    """The terms that training would use, by name."""
    return {term.name: term for term in parts.make_terms(build.plain(configured("train", *overrides).objective, ALL))}


ALL = {"terms", "confidence", *parts.TERM_VALUES}
XPRESS = ("refined", "consistency", "anchor")


def test_the_xpress_objective_is_the_published_one():
    terms = terms_of()
    assert tuple(terms) == XPRESS and [term.feed for term in terms.values()] == ["gold", "self", "none"]
    assert [term.weight for term in terms.values()] == [1.0, 0.3, [0.6, 0.2]] and terms["consistency"].rounds == 3
    assert {(term.loss["ce"], term.loss["l1"], term.decay) for term in terms.values()} == {(0.1, 0.9, 4.0)}


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_rounds_of_self_feeding_are_one_key(rounds):
    terms = terms_of(f"objective.rounds={rounds}")
    assert tuple(terms) == XPRESS and [term.rounds for term in terms.values()] == [1, rounds, 1]


@pytest.mark.parametrize(
    "override, left",
    [
        ("objective.rounds=0", ("refined", "anchor")),
        ("objective.anchor=0", ("refined", "consistency")),
        ("objective.anchor=[0,0.0]", ("refined", "consistency")),
        ("objective.anchor=[0.5,0]", XPRESS),
    ],
)
def test_a_term_that_never_counts_is_left_out(override, left):
    assert tuple(terms_of(override)) == left


@pytest.mark.parametrize("ce, l1", [(1.0, 0.0), (0.0, 1.0)])
def test_one_key_changes_the_loss_of_every_term(ce, l1):
    terms = terms_of(f"objective.loss={{ce: {ce}, l1: {l1}}}", "objective.decay=null")
    assert tuple(terms) == XPRESS and all(t.loss == {"ce": ce, "l1": l1} and t.decay is None for t in terms.values())


@pytest.mark.parametrize("objective", [path.stem for path in (ROOT / "configs" / "objective").glob("*.yaml")])
def test_every_objective_can_be_made_and_none_takes_a_value_that_it_does_not_use(objective):
    assert terms_of(f"objective={objective}")
    if objective != "xpress":
        with pytest.raises(ValueError, match="objective.rounds=2: no term has it as its rounds"):
            terms_of(f"objective={objective}", "+objective.rounds=2")


def test_an_objective_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no term is left"):
        parts.make_terms(
            {"terms": [{"name": "a", "feed": "self", "rounds": 0}, {"name": "b", "feed": "gold", "weight": 0}]}
        )
    with pytest.raises(ValueError, match="objective term b: rounds=0"):
        parts.make_terms({"terms": [{"name": "b", "feed": "gold", "rounds": 0}]})
    with pytest.raises(ValueError, match="objective term a: feed='silver'"):
        parts.make_terms({"terms": [{"name": "a", "feed": "silver", "weight": 0}]})


@pytest.mark.parametrize("head", ["xpress", "xpress_r64", "xpress_tiny"])
def test_parts_of_the_refiner_are_keys_that_no_other_head_sees(head):
    flags = ("use_h", "use_g", "use_mixer", "use_mlp")
    for flag in flags:
        chosen = configured("train", "+exp=smollm2_135m", f"head={head}", f"head.{flag}=false").head
        assert {name: chosen[name] for name in flags} == {name: name != flag for name in flags}
        assert chosen.rank == {"xpress": 256, "xpress_r64": 64, "xpress_tiny": 8}[head]
    for other in {path.stem for path in (ROOT / "configs" / "head").glob("*.yaml")} - {
        "xpress",
        "xpress_r64",
        "xpress_tiny",
    }:
        assert not set(flags) & set(configured("train", "+exp=smollm2_135m", f"head={other}").head)


def test_a_used_folder_needs_resume_and_a_finished_run_has_nothing_to_resume(program, toys):
    with pytest.raises(ValueError, match="out=.*run: the folder is not empty; give another out=, or resume=true"):
        program("train", "out=run")
    with pytest.raises(ValueError, match="out=run: this run is finished, its checkpoint is in run/checkpoint"):
        program("train", "out=run", "resume=true")


def test_a_resumed_run_must_be_the_same_run(program, toys, tmp_path):
    """Data, head, target and objective too; every difference at once, and what may change beside them."""
    shutil.copytree(toys.at / "run", tmp_path / "out")
    other = ("head=markov", "data.limit=7", "objective.rounds=1", "lr=2e-3", "seed=5", "batch_size=1")
    with pytest.raises(ValueError, match="resume: .* was made by another run") as caught:
        program("train", "resume=true", *other)
    refused, _, fine = str(caught.value).partition(" These may change: ")
    for name in ("data: was", "head.*: was", "objective: was", "lr: was 0.001, now 0.002", "seed: was 0, now 5"):
        assert re.search(name, refused), name
    assert "sequences_per_step: was 2, now 1" in refused and "batch_size: was 2, now 1" in fine
    with pytest.raises(ValueError, match="These must stay as they were: .*target: was"):
        program("train", "resume=true", "target.name={qwen3}", "data.path=loose.jsonl")
    with pytest.raises(ValueError, match="this run is finished"):  # another split of the same step is no difference
        program("train", "resume=true", "batch_size=1", "accumulation=2")


def test_a_disk_without_room_is_refused_before_the_start(program, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="out=.*keeps up to .* GB of states and checkpoints.*give another out"):
        program("train")
    assert not list((tmp_path / "out").iterdir())


def test_drafter_and_target_of_other_sizes_do_not_start(program, toys):
    """A published drafter on a target with another depth: refused at the start of training and of evaluation."""
    deep = save_model(toys.at / "deep", num_hidden_layers=5)
    fresh = ("drafter.init={drafter}", "drafter.mask_token_id=null", "drafter.num_hidden_layers=null")
    with pytest.raises(ValueError, match="num_target_layers=4, target .*deep has 5: they do not belong together"):
        program("train", *fresh, f"target.name={deep}", "data.path=loose.jsonl")
    with pytest.raises(ValueError, match="num_target_layers=4, target .*deep has 5"):
        program("eval_tau", "checkpoint={drafter}", f"target.name={deep}")
    with pytest.raises(ValueError, match="drafter.block_size=8, but drafter.init=.* has 4; drop one of the two"):
        program("train", *fresh, "target.name={qwen3}", "drafter.block_size=8", "data.path=loose.jsonl")


def test_a_trained_head_is_trained_further(program, toys, tmp_path, capsys):
    """Alone or with its drafter; and only the head that is there, on a drafter of its vocabulary."""
    trained = load_file(toys.at / "run" / "checkpoint" / "model.safetensors")
    both = ("drafter.init=run", "head.init=run")
    run, provenance = program("train", *both, "train_drafter=false", "eval_every=0")
    assert all(torch.equal(trained[f"head.{name}"], t) for name, t in run.trainee.head.state_dict().items())
    assert "will not be used" not in capsys.readouterr().out
    assert provenance["head_init"] == provenance["init"] != {}
    run.fit(provenance)
    after = load_file(tmp_path / "out" / "checkpoint" / "model.safetensors")
    assert {name.partition(".")[0] for name, t in after.items() if not torch.equal(t, trained[name])} == {"head"}
    asked = {
        ("head.rank=4", *both): "head.rank=4, but head.init=run has 8; choose the head that is there",
        ("head=none", "objective=dflash", *both): "head.init=run: head=none asks for none",
        ("drafter.draft_vocab_size=300", "head.init=run"): "head.init=run: its draft vocabulary is not the drafter.s",
    }
    for i, (overrides, named) in enumerate(asked.items()):
        with pytest.raises(ValueError, match=named):
            program("train", *overrides, f"out={tmp_path / str(i)}")


def test_every_shipped_set_is_known_to_the_scripts():
    assert configured("eval_tau").bench in prompts.SETS and configured("generate_data").prompts in prompts.SETS
    assert configured("eval_tau").bench != configured("generate_data").prompts  # trained on one, measured on another


def test_ctrl_c_before_the_first_step_frees_the_folder(ran, toys, monkeypatch):
    """While features are written nothing is lost but the shard in work: the same command goes on."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "assemble", interrupted)
    monkeypatch.chdir(toys.at)
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        cfg = compose("train", overrides=["+exp=tiny", f"out={toys.at / 'early'}"])
    with pytest.raises(KeyboardInterrupt):
        build.training(cfg)
    assert not list((toys.at / "early").iterdir())
