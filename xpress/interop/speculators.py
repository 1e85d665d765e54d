"""Checkpoints of vLLM's `speculators` package, 0.9.0: dflash, dspark, xpress.

Its layer ids are one higher than the others'; the shape of the layers is a diff against the class defaults of their
transformers config; the number of the target's layers is not written, so it comes from the target or from the
verifier's own config where that is a local folder.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig

from xpress import checkpoint
from xpress.block import NEXT
from xpress.interop import base
from xpress.interop.base import (
    DSPARK_NAMES,
    MARKOV,
    REFINER,
    Files,
    Plan,
    drafter_config,
    dtype_name,
    head_config,
    no_confidence,
    num_draft_kept,
    refiner_is_whole,
    renamed,
    scale_folded,
    vocabulary,
    whole,
)
from xpress.interop.dspark import markov_fields, markov_plan
from xpress.interop.layer_ids import INPUT, OUTPUT, PUBLISHED, layer_ids

NAME, ABOUT, WRITES = "speculators", "speculators 0.9 (dflash, dspark, xpress)", True
VERSION, PASSES = "0.9.0", 6
FROZEN = base.FROZEN | {"verifier_lm_head.weight": base.LM_HEAD}
DROPPED = {"verifier_norm.weight": "the target's final norm, used in training only"}
MASK = "refiner_head.causal_tril"
SHAPE = (
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("vocab_size", "rms_norm_eps", "max_position_embeddings", "initializer_range", "rope_theta", "rope_scaling"),
    *("rope_parameters", "layer_types", "sliding_window", "use_sliding_window", "attention_bias", "hidden_act"),
)


def _xpress(name: str) -> str:
    return f"refiner_{name}" if name.startswith("head.") else name


NAMES = {"dflash": renamed({}), "dspark": renamed(DSPARK_NAMES), "xpress": _xpress}


def recognise(source) -> bool:
    return "speculators_model_type" in source.config


def read(source, target) -> Plan:
    given = source.config
    kind = given["speculators_model_type"]
    if kind not in NAMES:
        raise ValueError(f"{source.place}: speculators_model_type={kind!r}: known are {', '.join(NAMES)}")
    raw = _shape(source)
    verifier = dict((given.get("speculators_config") or {}).get("verifier") or {})
    L = _num_target_layers(source, target, verifier)
    found = given.get("aux_hidden_state_layer_ids")
    if not isinstance(found, list) or not all(type(i) is int for i in found):
        raise ValueError(f"{source.place}: aux_hidden_state_layer_ids={found!r} is no list of layers; restore it")
    if given.get("target_hidden_size") not in (None, raw["hidden_size"]):
        raise ValueError(f"{source.place}: target_hidden_size={given['target_hidden_size']!r} is not the drafter's own")
    next_token = given.get("sample_from_anchor", kind == "dspark")
    raw |= {
        "num_target_layers": L,
        "block_size": given.get("block_size", 8),
        "num_draft": given.get("num_draft", 0),
        "sample_from_anchor": next_token,
        "dflash_config": {
            "mask_token_id": given.get("mask_token_id"),
            "target_layer_ids": list(layer_ids(found, INPUT, PUBLISHED, L)),
        },
    }
    config = drafter_config(source, raw, source.draft_ids(raw["vocab_size"], given.get("draft_vocab_size")))
    head = confidence = None
    if kind == "xpress":
        if given.get("xpress_mlp_ratio", 2) != 2:
            raise ValueError(f"{source.place}: xpress_mlp_ratio={given['xpress_mlp_ratio']!r}: only 2 is supported")
        head = head_config(REFINER, config, given.get("xpress_rank", 256))
    elif kind == "dspark":
        head, confidence = markov_plan(source, config, lambda key, default=None: given.get(key, default))
    facts = {"verifier": verifier, "passes": given.get("num_jacobi_passes", PASSES)}
    return Plan(NAME, config, head, NAMES[kind], confidence, FROZEN, (MASK,), DROPPED, facts)


def _shape(source) -> dict:
    given = source.config.get("transformer_layer_config")
    if not isinstance(given, dict):
        raise ValueError(f"{source.place}: transformer_layer_config={given!r} is no section; restore config.json")
    source.check_layers(given)  # before transformers makes a list of so many layer types
    try:
        default = AutoConfig.for_model(given.get("model_type", "qwen3"))
        whole_config = type(default)(**{key: given[key] for key in SHAPE if key in given}).to_dict()
    except Exception as error:  # transformers raises what its validators do
        raise ValueError(f"{source.place}: transformer_layer_config cannot be read ({error})") from error
    source.check_layers(whole_config)
    return {key: whole_config[key] for key in SHAPE if key in whole_config}


def _num_target_layers(source, target, verifier: dict) -> int:
    if target is not None:
        return target.num_layers
    if "num_target_layers" in source.config:
        return whole("num_target_layers", source.config["num_target_layers"])
    folder = Path(str(verifier.get("name_or_path"))).expanduser()
    if (folder / checkpoint.CONFIG).exists():
        return whole("num_hidden_layers", checkpoint.read_json(folder / checkpoint.CONFIG).get("num_hidden_layers"))
    raise ValueError(
        f"{source.place}: this format does not say how many layers the target has, and its verifier "
        f"{verifier.get('name_or_path')!r} is no local folder; give target=<folder or hub id>"
    )


def cannot(weights) -> str | None:
    if weights.head is None or weights.head_is(*MARKOV.values()) or refiner_is_whole(weights):
        return None
    return "it holds a refiner with all its parts, a Markov head or none; write format=ours, or drop=head"


def files(weights, target) -> Files:
    config, left_out = weights.config, []
    kind = "xpress" if weights.head_is(REFINER) else "dflash" if weights.head is None else "dspark"
    if weights.head is None and weights.confidence is not None:
        kind = "dspark"
    shape = {key: value for key, value in config.to_json().items() if key in SHAPE} | {"model_type": "qwen3"}
    next_token = config.layout == NEXT.name
    raw = {
        "architectures": [{"dflash": "DFlash", "dspark": "DSpark", "xpress": "XPress"}[kind] + "Speculator"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_draft}],
            "default_proposal_method": "greedy",
            "verifier": _verifier(weights, target, left_out),
        },
        "transformer_layer_config": shape,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(layer_ids(config.target_layer_ids, OUTPUT, INPUT, config.num_target_layers)),
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": False,
        "sample_from_anchor": next_token,
        "num_target_layers": config.num_target_layers,
        "dtype": dtype_name(weights),
    }
    num_draft_kept(weights, raw, config.block_size - 1 + next_token, left_out)
    scale_folded(config, left_out)
    tensors = weights.tensors if kind == "dspark" else no_confidence(weights, left_out)
    if kind == "dspark":
        raw |= markov_fields(weights)
    elif kind == "xpress":
        raw |= {"xpress_rank": weights.rank, "xpress_mlp_ratio": 2}
        raw["num_jacobi_passes"] = weights.facts.get("passes", PASSES)
    named = {NAMES[kind](name): t for name, t in tensors.items()}
    return Files(raw, named | vocabulary(weights, target, t2d=True), left_out)


def _verifier(weights, target, left_out: list[str]) -> dict:
    if target is not None:
        return {"name_or_path": target.name, "architectures": list(target.config.architectures or [])}
    known = weights.facts.get("verifier") or {}
    name = known.get("name_or_path") or (weights.provenance.get("target") or {}).get("name")
    if name is None:
        left_out.append("the verifier's name: the source does not say it; give target=, or serving needs it named")
    return {"name_or_path": name, "architectures": known.get("architectures") or []}
