"""From a Hydra configuration to objects and back out: the only module of the package that sees one.

Below this line everything takes plain keywords. Keys that nothing reads are refused here, since Hydra lets `+typo=1`
through.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import platform
import subprocess
from datetime import datetime
from pathlib import Path

import torch
from accelerate import PartialState
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from xpress import checkpoint, data, evaluate, prompts
from xpress.anchors import Batch
from xpress.drafter import DFlashDrafter
from xpress.drafter_config import DrafterConfig
from xpress.features import FeatureSource, feature_scale
from xpress.files import file_hash, write_json
from xpress.loss import Term
from xpress.refine import check_passes
from xpress.sampling import Sampling
from xpress.target import Target
from xpress.train import Run, TrainSettings, usable
from xpress.trainee import Trainee

REPO = Path(__file__).resolve().parents[1]
HOME = Path(os.environ.get("XPRESS_HOME", "~/.cache/xpress")).expanduser()

RUN_CONFIG = "config.yaml"  # of a run's folder; a checkpoint has config.json
TARGET_KEYS = {"name", "dtype", "revision"}
DATA_KEYS = {"path", "limit"}
TRAIN_KEYS = {"target", "drafter", "head", "objective", "data", "out", "resume", "device", "thinking", "wandb"}
EVAL_KEYS = {"checkpoint", "bare", "target", "bench", "data_dir", "samples", "passes", "protocol", "out", "device"}
EVAL_KEYS |= {"max_new_tokens", "temperature", "top_k", "top_p", "accept", "seed", "thinking", "dtype"}
GENERATE_KEYS = {"target", "prompts", "data_dir", "samples", "out", "max_new_tokens", "batch_size", "temperature"}
GENERATE_KEYS |= {"top_p", "seed", "thinking", "device"}


def plain(cfg: DictConfig, known: set[str]) -> dict:
    """The configuration as a dict. Raises ValueError for keys that nothing reads."""
    found = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    refuse_unknown("", found, known)
    return found


def refuse_unknown(section: str, found, known):
    unknown = sorted(set(found or ()) - set(known))
    if unknown:
        where = f"{section}." if section else ""
        raise ValueError(f"unknown key {where}{unknown[0]}; known are {', '.join(sorted(known))}")


def find(path: str | None) -> str | None:
    """A relative path as the user's, else as the repository's, else in XPRESS_HOME; anything else unchanged."""
    if path is None or Path(path).expanduser().exists():
        return path
    for root in (REPO, HOME):
        if (root / path).exists():
            return str(root / path)
    return path


def from_anywhere(path: str) -> str:
    """A folder that only the present working folder finds as an absolute path; all else as it was given."""
    local = Path(path).expanduser()
    return str(local.resolve()) if local.exists() and not any((root / path).exists() for root in (REPO, HOME)) else path


def run_folder(out: str, resume: bool = False) -> Path:
    """The folder of this run, claimed: refused where it is not empty and resume was not asked for. A sweep's jobs get
    one each."""
    folder = Path(out).expanduser()
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        folder = folder / str(HydraConfig.get().job.num)
    folder.mkdir(parents=True, exist_ok=True)
    if resume:
        return folder
    if any(folder.iterdir()):
        raise ValueError(
            f"out={folder}: the folder is not empty; give another out=, or resume=true to go on with that run"
        )
    try:
        (folder / RUN_CONFIG).touch(exist_ok=False)  # of two runs that start together, one gets the folder
    except FileExistsError:
        raise ValueError(f"out={folder}: another run has just claimed this folder; give another out=") from None
    return folder


def device_of(name: str | None) -> str:
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def make_target(section: dict, device: str, dtype: str | None = None) -> Target:
    refuse_unknown("target", section, TARGET_KEYS)
    name = section["name"]
    if name == "smollm2-135m-instruct" and find(name) == name:
        raise FileNotFoundError(f"target.name={name} is not in {HOME}; run: python scripts/get_smollm2.py")
    target = Target.from_pretrained(
        find(name), dtype or section.get("dtype") or "float32", device, section.get("revision")
    )
    target.name = name
    return target


def make_drafter(section: dict, target: Target, rows, settings: TrainSettings) -> tuple[DFlashDrafter, dict | None]:
    """A fresh drafter for the target, or the one that `drafter.init` names -> drafter, where it came from."""
    section = dict(section)
    init, vocab = section.pop("init", None), section.pop("draft_vocab_size", None)
    fields = {field.name for field in dataclasses.fields(DrafterConfig)}
    refuse_unknown("drafter", section, fields)
    if init is not None:
        found = checkpoint.load(find(init), target, device=target.device)
        for key, wanted in {**section, "draft_vocab_size": vocab}.items():
            have = getattr(found.drafter.config, key)
            if wanted is not None and (list(have) if isinstance(have, tuple) else have) != wanted:
                raise ValueError(f"drafter.{key}={wanted}, but drafter.init={init} has {have}; drop one of the two")
        origin = {"path": from_anywhere(init), "sha256": file_hash(found.path / checkpoint.WEIGHTS)}
        return found.drafter, origin
    config = DrafterConfig.for_target(target, **section)
    if vocab is not None:
        always = prompts.stop_ids(target.tokenizer, target.model)
        ids = data.frequent_ids(rows, vocab, target.vocab_size, always)
        config = dataclasses.replace(config, draft_ids=tuple(ids))
    if config.feature_scale == (1.0,) * len(config.target_layer_ids):
        sample: Batch = data.collate(rows[:16], settings.max_length).to(target.device)
        config = dataclasses.replace(config, feature_scale=feature_scale(target, sample, config.target_layer_ids))
    torch.manual_seed(settings.seed)
    return DFlashDrafter(config).bind(target), None


def make_head(section: dict | None, drafter: DFlashDrafter, target: Target):
    """The head that `_target_` names; sizes come from the drafter. None for head=none."""
    if not section or section.get("_target_") is None:
        return None
    sizes = checkpoint.head_sizes(drafter.config)
    checkpoint.check_head(section, drafter.config)
    kind = checkpoint.head_class(section["_target_"])
    accepted = inspect.signature(kind.__init__).parameters
    arguments = {key: value for key, value in sizes.items() if key in accepted}
    return checkpoint.build_head({**section, **arguments}).bind(target)


def make_terms(section: dict) -> list[Term]:
    refuse_unknown("objective", section, {"terms"})
    terms = []
    for term in section["terms"]:
        refuse_unknown("objective.terms", term, {field.name for field in dataclasses.fields(Term)})
        terms.append(Term(**term))
    return terms


def versions() -> dict:
    """What a number was measured with."""
    import transformers

    try:
        commit = subprocess.run(
            ["git", "-C", str(REPO), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


# --- the programs ---------------------------------------------------------------------------------------------------


def training(cfg: DictConfig) -> tuple[Run, dict]:
    """Everything that train.py needs: the run (resumed where asked) and the provenance of what it will write."""
    fields = {field.name for field in dataclasses.fields(TrainSettings)}
    raw = plain(cfg, TRAIN_KEYS | fields)
    settings = TrainSettings(**{key: raw[key] for key in fields & raw.keys()})
    terms = make_terms(raw["objective"])
    refuse_unknown("data", raw["data"], DATA_KEYS)
    state = PartialState(cpu=device_of(raw["device"]) == "cpu")
    with state.main_process_first():  # one process claims the folder for all
        out = run_folder(raw["out"], raw["resume"] or not state.is_main_process)
    if raw["resume"] and (out / "checkpoint").exists():
        raise ValueError(f"out={out}: this run is finished, its checkpoint is in {out / 'checkpoint'}")
    try:
        target = make_target(raw["target"], str(state.device))
        path = find(raw["data"]["path"])
        limit = raw["data"].get("limit")
        rows = data.load_rows(path, target.tokenizer, raw["thinking"], limit, target.vocab_size)
        data.check_made_for(path, target, raw["thinking"])
        rows = usable(rows, settings)
        drafter, origin = make_drafter(raw["drafter"], target, rows, settings)
        torch.manual_seed(settings.seed + 1)
        head = make_head(raw["head"], drafter, target)
        trainee = Trainee(drafter, head, terms, settings.train_drafter, settings.chunk)
        source = FeatureSource(target, drafter.layer_ids, drafter.draft_ids is not None, keep=settings.keep_features)
        run = Run(out, trainee, rows, source, settings)
        provenance = {
            "target": {"name": from_anywhere(raw["target"]["name"]), "fingerprint": target.fingerprint()},
            "template": prompts.template_facts(target.tokenizer, raw["thinking"]),
            "data": {"path": str(raw["data"]["path"]), **data.data_facts(rows)},
            "recipe": {key: raw[key] for key in sorted(fields & raw.keys())} | {"objective": raw["objective"]},
            "init": origin,
            "versions": versions(),
        }
        if raw["resume"]:
            run.resume()
    except Exception:
        if state.is_main_process and not raw["resume"]:  # nothing was done: the folder is free again
            (out / RUN_CONFIG).unlink(missing_ok=True)
        raise
    if state.is_main_process:
        OmegaConf.save(OmegaConf.create(raw), out / RUN_CONFIG)
    return run, provenance


def evaluation(cfg: DictConfig, progress) -> list[dict]:
    """eval_tau.py: one report for each set of `bench`, each written to its own JSON file."""
    raw = plain(cfg, EVAL_KEYS)
    raw = settle_protocol(raw)
    passes = raw["passes"] if isinstance(raw["passes"], list) else [raw["passes"]]
    for K in passes:
        check_passes(K)
    sampling = Sampling(raw["temperature"], raw["top_k"], raw["top_p"], raw["accept"])
    names = raw["bench"] if isinstance(raw["bench"], list) else [raw["bench"]]
    if names == ["all"]:
        names = [name for name, entry in prompts.SETS.items() if entry.hub]
    sets = {name: prompts.load_prompts(name, raw["samples"], raw["data_dir"]) for name in names}
    folder = checkpoint.locate(find(raw["checkpoint"]))
    provenance = (
        json.loads((folder / checkpoint.PROVENANCE).read_text()) if (folder / checkpoint.PROVENANCE).exists() else {}
    )
    device = device_of(raw["device"])
    dtype = raw["dtype"] or ("float32" if device == "cpu" else "bfloat16")
    refuse_unknown("target", raw["target"], {"name"})
    name = raw["target"]["name"] or (provenance.get("target") or {}).get("name")
    if name is None:
        raise ValueError(f"checkpoint={folder} does not name its target; give target.name=<folder or hub id>")
    target = make_target({"name": name}, device, dtype)
    evaluate.check_template(target, provenance, raw["thinking"])
    found = checkpoint.load(folder, target, getattr(torch, dtype), device)
    bare = bare_drafter(raw["bare"], provenance, target, dtype, device)
    methods = evaluate.methods_for(found, passes, bare)
    reports = []
    for bench, chosen in sets.items():
        protocol = {
            "bench": bench,
            "samples": len(chosen),
            "protocol": raw["protocol"],
            "target": name,
            "checkpoint": str(raw["checkpoint"]),
            "head": type(found.head).__name__ if found.head is not None else "none",
            "block_size": found.drafter.config.block_size,
            "num_draft": found.drafter.config.num_draft,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "accept": sampling.accept if not sampling.greedy else "exact",
            "max_new_tokens": raw["max_new_tokens"],
            "thinking": raw["thinking"],
            "seed": raw["seed"],
            "dtype": dtype,
            "device": device,
            "threads": torch.get_num_threads(),
            **versions(),
        }
        results = evaluate.evaluate(
            target,
            methods,
            chosen,
            max_new_tokens=raw["max_new_tokens"],
            sampling=sampling,
            seed=raw["seed"],
            thinking=raw["thinking"],
            progress=lambda done, total, what, bench=bench: progress(bench, done, total, what),
        )
        report = evaluate.report(results, chosen, protocol)
        report["path"] = str(write_result(Path(raw["out"]).expanduser(), bench, report))
        reports.append(report)
    return reports


def settle_protocol(raw: dict) -> dict:
    """Fills what `protocol` decides; refuses settings that would make a published protocol another one."""
    fixed = {"free": {}, "published": {"max_new_tokens": 2048, "samples": 128, "thinking": False}}
    if raw["protocol"] not in fixed:
        raise ValueError(f"protocol={raw['protocol']}: known are {', '.join(fixed)}")
    for key, value in fixed[raw["protocol"]].items():
        if raw[key] not in (None, value):
            raise ValueError(f"{key}={raw[key]}: protocol=published fixes it at {value}; drop one of the two")
        raw[key] = value
    if raw["protocol"] == "published" and raw["temperature"] not in (0, 1):
        raise ValueError(f"temperature={raw['temperature']}: protocol=published has 0 and 1")
    raw["max_new_tokens"] = 256 if raw["max_new_tokens"] is None else raw["max_new_tokens"]
    if raw["max_new_tokens"] < 1:
        raise ValueError(f"max_new_tokens={raw['max_new_tokens']}: must be at least 1")
    return raw


def bare_drafter(path: str | None, provenance: dict, target, dtype: str, device: str):
    """The drafter that training started from: the one given, else the one that the provenance names, if it is there
    and unchanged."""
    origin = provenance.get("init") or {}
    if path is None:
        start = find(origin.get("path"))
        try:
            weights = checkpoint.locate(start) / checkpoint.WEIGHTS if start and Path(start).exists() else None
        except FileNotFoundError:
            weights = None
        if weights is None or file_hash(weights) != origin.get("sha256"):
            return None
        path = start
    return checkpoint.load(find(path), target, getattr(torch, dtype), device)


def write_result(folder: Path, bench: str, report: dict) -> Path:
    """A new JSON file; never over an older one."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{bench}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in range(1000):
        path = folder / (f"{stem}.json" if number == 0 else f"{stem}-{number}.json")
        if not path.exists():
            break
    write_json(path, report)
    return path


def generation(cfg: DictConfig, progress) -> dict:
    """generate_data.py: answers of the target to a set's prompts."""
    raw = plain(cfg, GENERATE_KEYS)
    chosen = prompts.load_prompts(raw["prompts"], raw["samples"], raw["data_dir"])
    target = make_target(raw["target"], device_of(raw["device"]))
    names = ("max_new_tokens", "batch_size", "temperature", "top_p", "seed", "thinking")
    return data.generate_data(target, chosen, raw["out"], **{key: raw[key] for key in names}, progress=progress)
