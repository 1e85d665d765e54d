"""A checkpoint while it has no format: `Plan`, what a config promises, and `Weights`, what was found of it.

Tensors have our own names (design of our folder): the drafter's are the published ones, `head.` and `confidence.` stand
before those of the heads. A format is a module with NAME, ABOUT, WRITES and

    recognise(source) -> bool                   is this folder or file of the format?
    read(source, target) -> Plan                from config and headers alone
    cannot(weights) -> str | None               why it cannot hold these weights, with the remedy
    files(weights, target) -> Files             the config and tensors to write
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from xpress.drafter_config import DrafterConfig
from xpress.heads import markov
from xpress.interop.layer_ids import OUTPUT, PUBLISHED, layer_ids

EMBEDDING, LM_HEAD = "embedding", "lm_head"
FROZEN = {"embed_tokens.weight": EMBEDDING, "lm_head.weight": LM_HEAD}
REFINER, DOMINO = "xpress.heads.refiner.Refiner", "xpress.heads.domino.DominoHead"
MARKOV = {  # the published type -> our class
    "vanilla": "xpress.heads.markov.MarkovHead",
    "gated": "xpress.heads.markov.GatedMarkovHead",
    "rnn": "xpress.heads.markov.RNNMarkovHead",
}
DSPARK_NAMES = {f"head.{ours}": f"markov_head.{theirs}" for ours, theirs in markov.PUBLIC_NAMES.items()}
DSPARK_NAMES |= {f"confidence.proj.{part}": f"confidence_head.proj.{part}" for part in ("weight", "bias")}


@dataclass
class Plan:
    """What a config promises. theirs: our name of a tensor -> the format's; confidence: the R that a confidence head
    reads beside the hidden state, None for no such head; frozen: tensors of the target that may be saved; masks: causal
    masks that may be; dropped: name -> why it is not needed."""

    format: str
    config: DrafterConfig
    head: dict | None = None
    theirs: Callable[[str], str] = lambda name: name
    confidence: int | None = None
    frozen: dict[str, str] = field(default_factory=dict)
    masks: tuple[str, ...] = ()
    dropped: dict[str, str] = field(default_factory=dict)
    facts: dict = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Weights:
    """A checkpoint without a format. `fc.weight` is as stored: feature_scale is folded in. lm_head: the rows
    [V_draft,D] of a reduced vocabulary where the source had them; facts: passes and verifier, where it names them."""

    format: str
    config: DrafterConfig
    head: dict | None
    confidence: int | None
    tensors: dict[str, Tensor]
    lm_head: Tensor | None = None
    facts: dict = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    provenance: dict = field(default_factory=dict)
    path: Path | None = None

    def head_is(self, *paths: str) -> bool:
        return self.head is not None and self.head.get("_target_") in paths

    @property
    def rank(self) -> int:
        return self.tensors["head.readout.weight"].shape[1]


@dataclass
class Files:
    """A format's files: config, tensors, and what the format could not say."""

    config: dict
    tensors: dict[str, Tensor]
    left_out: list[str] = field(default_factory=list)


def renamed(names: dict[str, str]) -> Callable[[str], str]:
    return lambda name: names.get(name, name)


def head_config(path: str, config: DrafterConfig, rank, **more) -> dict:
    """The `head` section that builds a head of the library on this drafter."""
    whole("rank", rank)
    reduced = config.draft_vocab_size if config.draft_ids else None
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "block_size": config.block_size}
    return {"_target_": path, **sizes, "rank": rank, "draft_vocab_size": reduced, **more}


def whole(name: str, value) -> int:
    """Raises ValueError unless `value` is a positive integer."""
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json: {name}={value!r} is no positive whole number; restore the published file")
    return value


def drafter_config(source, raw: dict, draft_ids) -> DrafterConfig:
    """A config.json of published fields -> DrafterConfig."""
    source.check_layers(raw)
    found, L = (raw.get("dflash_config") or raw).get("target_layer_ids"), raw.get("num_target_layers")
    if isinstance(found, list) and all(type(i) is int for i in [*found, L]):  # else from_json says what is wrong
        layer_ids(found, PUBLISHED, OUTPUT, L)  # which changes none: both count outputs from 0
    return DrafterConfig.from_json(raw, draft_ids)


def published(weights: Weights, architecture: str) -> tuple[dict, list[str]]:
    """The fields of z-lab's config.json -> config, what it cannot say."""
    config, left_out = weights.config, []
    raw = config.to_json() | {"architectures": [architecture], "dtype": dtype_name(weights)}
    whole_vocabulary = ("draft_vocab_size",) if config.draft_ids is None else ()
    for ours in ("sample_from_anchor", "feature_scale", "num_draft", *whole_vocabulary):
        del raw[ours]
    scale_folded(config, left_out)
    ids = layer_ids(config.target_layer_ids, OUTPUT, PUBLISHED, config.num_target_layers)
    raw["dflash_config"] = raw["dflash_config"] | {"target_layer_ids": list(ids)}
    return raw, left_out


def scale_folded(config: DrafterConfig, left_out: list[str]):
    if any(factor != 1 for factor in config.feature_scale):
        left_out.append("feature_scale: it is multiplied into fc.weight")


def dtype_name(weights: Weights) -> str:
    return str(weights.tensors["fc.weight"].dtype).removeprefix("torch.")


def num_draft_kept(weights: Weights, raw: dict, usual: int, left_out: list[str]):
    """Writes num_draft where it is not what the format's readers take by themselves."""
    if weights.config.num_draft != usual:
        raw["num_draft"] = weights.config.num_draft
        left_out.append(f"num_draft={weights.config.num_draft}: a key of ours; for an engine it is a launch setting")


def no_confidence(weights: Weights, left_out: list[str]) -> dict[str, Tensor]:
    """The tensors without the confidence head's, which never decides what is emitted."""
    if weights.confidence is not None:
        left_out.append("confidence head: this format has none; drafts are no longer truncated")
    return {name: t for name, t in weights.tensors.items() if not name.startswith("confidence.")}


def vocabulary(weights: Weights, target, t2d: bool = False) -> dict[str, Tensor]:
    """d2t (and t2d) and the rows of lm_head of a reduced vocabulary; {} for the whole one."""
    config = weights.config
    if config.draft_ids is None:
        return {}
    ids = torch.tensor(config.draft_ids)
    rows = weights.lm_head
    if target is not None:
        rows = target.lm_head.weight.detach()[ids.to(target.lm_head.weight.device)].cpu()
    if rows is None:
        raise ValueError(
            "a reduced draft vocabulary is written with rows of the target's lm_head; give target=<folder or hub id>"
        )
    tensors = {"d2t": ids - torch.arange(len(ids)), "lm_head.weight": rows.to(weights.tensors["fc.weight"].dtype)}
    if t2d:
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def refiner_is_whole(weights: Weights) -> bool:
    """With h, g, mixer and MLP: the only refiner that other formats know."""
    flags = ("use_h", "use_g", "use_mixer", "use_mlp")
    return weights.head_is(REFINER) and all(weights.head.get(flag, True) for flag in flags)
