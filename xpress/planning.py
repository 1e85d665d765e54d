"""A training configuration as a plan: sizes from the settings' files or a local config.json, never from weights or the
hub."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from xpress import data, interop, parts
from xpress.drafter_config import DrafterConfig
from xpress.plan import Plan, Rows, check_sizes, meta_head, meta_target, plan
from xpress.recipe import TrainSettings


def make_plan(raw: dict, settings: TrainSettings, terms) -> Plan:
    """The plan of a run. Raises ValueError naming the section whose sizes are not known."""
    config, whose = target_config(raw["target"])
    drafter, started = drafter_config(raw["drafter"], config)
    head = meta_head(lambda drafter, target: parts.make_head(raw["head"], drafter, target), drafter)
    gpus = raw["gpus"] or 1
    rows = count_rows(raw, settings, settings.batch_size * settings.accumulation * gpus)
    return plan(
        meta_target(config),
        drafter,
        head,
        terms,
        settings,
        rows,
        raw["features"],
        gpus,
        raw["mfu"],
        raw["peak_tflops"],
        4 if raw["target"].get("dtype") in (None, "float32") else 2,
        "cpu" if raw["device"] == "cpu" else "cuda",
        {"target": whose, "drafter": started, "head": (raw["head"] or {}).get("_target_")},
    )


def target_config(section: dict):
    """-> transformers config, whose it is: a local folder's own, else what target.sizes says."""
    from transformers import AutoConfig

    parts.refuse_unknown("target", section, parts.TARGET_KEYS)
    name, sizes = section["name"], section.get("sizes")
    if (Path(parts.find(name)).expanduser() / "config.json").exists():
        return AutoConfig.from_pretrained(parts.find(name)).get_text_config(), name
    sizes = dict(check_sizes(sizes))
    whose = sizes.pop("of", name)
    kind = sizes.pop("model_type")
    try:
        config = AutoConfig.for_model(kind, **sizes)
    except (ValueError, TypeError) as error:
        raise ValueError(f"target.sizes: no {kind} can be made of them ({error})") from error
    return config, whose if whose == name else f"{name}, planned with the sizes of {whose}"


def drafter_config(section: dict, target) -> tuple[DrafterConfig, str]:
    """-> the drafter's config, where it starts: fresh, a local checkpoint's, or what drafter.sizes says."""
    section = dict(section)
    init, vocab, known = section.pop("init", None), section.pop("draft_vocab_size", None), section.pop("sizes", None)
    parts.refuse_unknown("drafter", section, {field.name for field in dataclasses.fields(DrafterConfig)})
    given = {key: value for key, value in section.items() if value is not None}
    if init is not None and Path(parts.find(init)).expanduser().exists():
        found = interop.plan(parts.find(init), SimpleNamespace(num_layers=target.num_hidden_layers)).config
        if vocab not in (None, found.draft_vocab_size):
            found = dataclasses.replace(found, draft_ids=None if vocab == found.vocab_size else tuple(range(vocab)))
        return found, init
    if init is not None and not known:
        raise ValueError(
            f"drafter.sizes: not known for drafter.init={init}, which is no local folder; write them down as "
            "configs/drafter/dflash_qwen3_8b.yaml does, or give a folder"
        )
    known = dict(known or {})
    whose = known.pop("of", init)
    given = {**(known if init is not None else {}), **given}
    shape = SimpleNamespace(
        config=target,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_hidden_layers,
        context_length=target.max_position_embeddings,
        tokenizer=None,
    )
    given.setdefault("mask_token_id", 0)  # which id it is costs nothing
    for key in ("num_hidden_layers", "block_size"):
        if key not in given:
            raise ValueError(f"drafter.{key} is not known; give drafter.{key}=… or write it into drafter.sizes")
    ids = None if vocab in (None, target.vocab_size) else tuple(range(vocab))
    started = "fresh" if init is None else init if whose == init else f"{init}, planned with the sizes of {whose}"
    return DrafterConfig.for_target(shape, **given, draft_ids=ids), started


def count_rows(raw: dict, settings: TrainSettings, per_step: int) -> Rows:
    """plan_rows and plan_tokens where they are given, else the rows of data.path, else as many as the steps take, each
    max_length long."""
    count, mean, longest = raw["plan_rows"], raw["plan_tokens"], settings.max_length
    for name, value in (("plan_rows", count), ("plan_tokens", mean)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if mean is not None and mean > longest:
        raise ValueError(f"plan_tokens={mean}: rows are cut at max_length={longest}; lower it, or raise max_length")
    path, said = parts.find(raw["data"]["path"]), []
    if count is None and Path(path).expanduser().exists():
        try:
            rows = data.load_rows(path, None, limit=raw["data"].get("limit"), max_length=longest, skipped=Counter())
        except ValueError as error:  # prompts as text cannot be counted without the target's tokenizer
            said = [f"data.path={raw['data']['path']} could not be counted: {error}"]
        else:
            lengths = [min(len(row.prompt_ids) + len(row.response_ids), longest) for row in rows]
            found = Rows(len(rows), mean or sum(lengths) / len(lengths), max(lengths), f"data.path={path}")
            return dataclasses.replace(found, longest=longest) if settings.packing else found
    said.append(f"plan_rows={count}" if count else "steps · sequences a step: every row once")
    said.append(f"plan_tokens={mean} a row" if mean else f"max_length={longest} a row, an upper bound")
    return Rows(count or settings.steps * per_step, float(mean or longest), longest, ", ".join(said))
