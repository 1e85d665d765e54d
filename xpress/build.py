"""From a Hydra configuration to objects and back out: the only module of the package that sees one.

Below this line everything takes plain keywords. Keys that nothing reads are refused here, since Hydra lets `+typo=1`
through.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from xpress import conversations, data, parts, prompts, replay_page, replay_record, sampling_check, track
from xpress.batches import Order
from xpress.client import Server
from xpress.feature_cache import CachedFeatures
from xpress.features import OnlineFeatures
from xpress.generation import generate_data
from xpress.measuring import EVAL_KEYS, Measurement
from xpress.parts import find, from_anywhere, refuse_unknown, versions
from xpress.plan import Plan
from xpress.planning import make_plan
from xpress.recipe import TrainSettings
from xpress.replay import Replay
from xpress.sampling import Sampling
from xpress.train import Run
from xpress.trainee import Trainee

RUN_CONFIG = "config.yaml"  # of a run's folder; a checkpoint has config.json
DATA_KEYS = {"path", "limit"}
TRAIN_KEYS = {"target", "drafter", "head", "objective", "data", "out", "resume", "device", "thinking"}
TRAIN_KEYS |= {"tracker", "wandb_mode", "features", "cache_dir"}
TRAIN_KEYS |= {"plan", "gpus", "plan_rows", "plan_tokens", "mfu", "peak_tflops"}
REPLAY_KEYS = {"checkpoint", "target", "prompt", "passes", "max_new_tokens", "speed", "html", "temperature", "top_k"}
REPLAY_KEYS |= {"top_p", "accept", "thinking", "seed", "dtype", "device"}
ANSWER_KEYS = {"max_new_tokens", "batch_size", "temperature", "top_p", "seed", "thinking", "turns", "drop_truncated"}
SERVER_KEYS = {"base_url", "endpoint", "model", "concurrency", "retries", "timeout"}
GENERATE_KEYS = {"target", "prompts", "data_dir", "samples", "out", "device", "backend"} | ANSWER_KEYS | SERVER_KEYS


def plain(cfg: DictConfig, known: set[str]) -> dict:
    """The configuration as a dict. Raises ValueError for keys that nothing reads, and for those still to be given."""
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ValueError(f"{missing[0]} is not given; add {missing[0]}=…")
    found = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    refuse_unknown("", found, known)
    return found


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


# --- the programs ---------------------------------------------------------------------------------------------------


def recipe(cfg: DictConfig) -> tuple[dict, TrainSettings, list]:
    """train.py's configuration -> as a dict, its numbers, its objective; everything that needs no file is checked."""
    fields = {field.name for field in dataclasses.fields(TrainSettings)}
    raw = plain(cfg, TRAIN_KEYS | fields)
    settings = TrainSettings(**{key: raw[key] for key in fields & raw.keys()})
    terms = parts.make_terms(raw["objective"])
    track.check(raw["tracker"], raw["wandb_mode"])
    refuse_unknown("data", raw["data"], DATA_KEYS)
    if raw["features"] not in ("online", "cached"):
        raise ValueError(f"features={raw['features']}: known are online (target in the step) and cached (on disk)")
    return raw, settings, terms


def planning(cfg: DictConfig) -> Plan:
    """train.py with plan=true: what the run would cost. Nothing is loaded or written, no folder is claimed."""
    return make_plan(*recipe(cfg))


def training(cfg: DictConfig, say: Callable = print, progress: Callable = lambda done, total: None) -> tuple[Run, dict]:
    """Everything that train.py needs: the run (resumed where asked) and the provenance of what it will write.

    say: what the user should know, in the main process; progress(done, total): rows whose features are written.
    """
    raw, settings, terms = recipe(cfg)
    state = PartialState(cpu=parts.device_of(raw["device"]) == "cpu")
    say = say if state.is_main_process else lambda text: None
    with state.main_process_first():  # one process claims the folder for all
        out = run_folder(raw["out"], raw["resume"] or not state.is_main_process)
    try:
        run, provenance = assemble(raw, settings, terms, out, state, say, progress)
        for text in run.resume() if raw["resume"] else []:
            say(f"resumed with a change: {text}")
        if raw["resume"] and not run.step:
            say(f"out={out}: no state to resume from, the run starts at its beginning")
        if run.finished:
            raise ValueError(f"out={out}: this run is finished, its checkpoint is in {out / 'checkpoint'}; raise steps")
        if run.step > settings.steps:
            raise ValueError(f"steps={settings.steps}: the newest state in {out} is of step {run.step}; raise steps")
    except BaseException:  # Ctrl-C while features are written, too
        if state.is_main_process and not raw["resume"]:  # nothing was done: the folder is free again
            (out / RUN_CONFIG).unlink(missing_ok=True)
        raise
    if state.is_main_process:
        OmegaConf.save(OmegaConf.create(raw), out / RUN_CONFIG)
    return run, provenance


def assemble(raw: dict, settings: TrainSettings, terms, out: Path, state, say, progress) -> tuple[Run, dict]:
    """Target, rows, drafter, head, objective and features as a run, with its provenance."""
    target = parts.make_target(raw["target"], str(state.device))
    rows, held_out, path, skipped = read_rows(raw, settings, target)
    per_step = settings.batch_size * settings.accumulation * state.num_processes
    Order(rows, per_step, settings.seed, settings.max_length, settings.packing)  # too few rows: said before any work
    drafter, origin = parts.make_drafter(raw["drafter"], target, rows, settings)
    torch.manual_seed(settings.seed + 1)
    before = (raw["head"] or {}).get("init")  # a head that was trained before
    head, head_origin = parts.make_head(raw["head"], drafter, target), None
    if before is not None:
        head, head_origin = parts.trained_head(raw["head"], drafter, target)
    confidence = parts.make_confidence(terms, head, drafter)
    dropped = origin and parts.left_behind(raw["drafter"]["init"], target, head, confidence, before is not None)
    if dropped:
        say(dropped)
    trainee = Trainee(drafter, head, terms, settings.train_drafter, settings.chunk, confidence)
    parts.check_room(out, trainee)
    reduced = drafter.draft_ids is not None
    template = prompts.template_facts(target.tokenizer, raw["thinking"])
    facts = {
        "target": target.fingerprint(),
        "drafter": drafter.config.to_json() | {"draft_ids": data.hash_of(drafter.config.draft_ids)},
        "head": None if head is None else head.config,
        "objective": [dataclasses.asdict(term) for term in terms],
        "data": data.data_facts(rows)["sha256"],
        "held_out": data.data_facts(held_out)["sha256"],
        "init": None if origin is None else origin["sha256"],
        "head_init": None if head_origin is None else head_origin["sha256"],
    }
    provenance = {
        "target": {"name": from_anywhere(raw["target"]["name"]), "fingerprint": target.fingerprint()},
        "template": template,
        "data": {"path": str(path), **data.data_facts(rows), "held_out": len(held_out), "skipped": dict(skipped)},
        "recipe": {key: raw[key] for key in sorted(raw.keys() & set(settings.__dataclass_fields__))},
        "init": origin,
        **({"head_init": head_origin} if head_origin else {}),
        "versions": versions(),
    }
    provenance["recipe"] |= {"objective": raw["objective"]}
    if reduced:
        on = held_out or rows
        share = provenance["data"]["coverage"] = data.coverage(on, drafter.config.draft_ids)
        where = "held-out" if held_out else "training"
        say(f"draft vocabulary: {len(drafter.draft_ids)} ids hold {share:.2%} of the {where} answers' tokens")
    source = OnlineFeatures(target, drafter.layer_ids, reduced)
    if raw["features"] == "cached":
        made_of = {"template": template, "tokenizer": prompts.tokenizer_hash(target.tokenizer)}
        source = CachedFeatures(find(raw["cache_dir"]), source, [*rows, *held_out], settings.max_length, made_of)
        size, left = source.num_tokens * source.bytes_per_token / 1e9, len(source.missing())
        say(f"features: {source.num_tokens} tokens, {size:.2f} GB in {source.folder}, {left} shards to write")
        source.build(state.process_index, state.num_processes, progress)
        state.wait_for_everyone()
        target.release_layers()
    return Run(out, trainee, rows, source, settings, held_out, facts, state.device), provenance


def read_rows(raw: dict, settings: TrainSettings, target):
    """-> training rows, held-out rows, where they lie, why others were skipped."""
    skipped, path = Counter(), find(raw["data"]["path"])
    limit = raw["data"].get("limit")
    rows = data.load_rows(
        path, target.tokenizer, raw["thinking"], limit, target.vocab_size, settings.max_length, skipped
    )
    data.check_made_for(path, target, raw["thinking"])
    return *data.hold_out(rows, settings.eval_rows if settings.eval_every else 0), path, skipped


def evaluation(cfg: DictConfig, say: Callable = print) -> Measurement:
    """What eval_tau.py is to measure, loaded and checked; its folder is claimed."""
    return Measurement(plain(cfg, EVAL_KEYS), say)


def checking(cfg: DictConfig, progress: Callable) -> dict:
    """eval_tau.py with check=sampling: nothing of the configuration but the seed plays a part."""
    raw = plain(cfg, EVAL_KEYS)
    if raw["check"] != "sampling":
        raise ValueError(f"check={raw['check']}: known is sampling")
    return sampling_check.check_sampling(
        seed=raw["seed"], progress=lambda done, total, what: progress("sampling", done, total, what)
    )


def replaying(cfg: DictConfig, say: Callable = print) -> Replay:
    """replay.py: one prompt decoded by every method. `speed` and `html` are checked here too, before any work."""
    raw = plain(cfg, REPLAY_KEYS)
    refuse_unknown("target", raw["target"], {"name", "loop"})
    replay_record.check_number("speed", raw.pop("speed"), 0)
    replay_page.check_page(raw.pop("html"))
    rule = {key: raw.pop(key) for key in ("temperature", "top_k", "top_p", "accept")}
    for name in ("temperature", "top_k", "top_p"):
        replay_record.check_number(name, rule[name])
    sampling, target, path = Sampling(**rule), raw.pop("target"), raw.pop("checkpoint")
    chosen = {"target": target["name"], "loop": target.get("loop", "auto")}
    return replay_record.make_replay(path, sampling=sampling, say=say, **chosen, **raw)


def generation(cfg: DictConfig, progress) -> dict:
    """generate_data.py: answers of the target to the prompts of a set or of files.

    -> the counts over all processes, and beside them `skipped` {reason: count} and `failed_rows` {row id: reason}.
    """
    raw = plain(cfg, GENERATE_KEYS)
    if raw["backend"] not in ("hf", "openai"):
        raise ValueError(f"backend={raw['backend']}: known are hf (the weights, here) and openai (a server)")
    served, skipped, failed = raw["backend"] == "openai", Counter(), {}
    path = Path(parts.find(raw["prompts"])).expanduser()
    elsewhere = raw["prompts"] not in prompts.SETS and path.exists()
    if elsewhere:
        chosen = conversations.load_conversations(path, raw["samples"], skipped)
    else:
        chosen = prompts.load_prompts(raw["prompts"], raw["samples"], raw["data_dir"])
    # whoever has finished waits for the slowest: the usual ten minutes would end the run
    state = PartialState(cpu=served or parts.device_of(raw["device"]) == "cpu", timeout=timedelta(days=7))
    if not state.is_main_process:
        skipped = Counter()  # every process has read the same files; one counts what is no use in them
    target = parts.make_tokens(raw["target"]) if served else parts.make_target(raw["target"], str(state.device))
    counts = generate_data(
        target,
        chosen,
        Path(raw["out"]).expanduser(),
        **{key: raw[key] for key in ANSWER_KEYS},
        skip_unusable=elsewhere,
        server=Server(**{key: raw[key] for key in SERVER_KEYS}) if served else None,
        rank=state.process_index,
        ranks=state.num_processes,
        wait=state.wait_for_everyone,
        skipped=skipped,
        failed=failed,
        progress=progress,
    )
    found = gather_object([(counts, skipped, failed)])
    return {
        **{name: sum(own[0][name] for own in found) for name in counts},
        "skipped": dict(sum((own[1] for own in found), Counter())),
        "failed_rows": {name: why for own in found for name, why in own[2].items()},
    }
