"""The XPress serving folder: z-lab's drafter and fields, the refiner under `xpress_head.` with a raw mixer."""

from __future__ import annotations

from xpress.block import INFILL
from xpress.interop import zlab
from xpress.interop.base import (
    FROZEN,
    REFINER,
    Files,
    Plan,
    head_config,
    no_confidence,
    num_draft_kept,
    published,
    refiner_is_whole,
    renamed,
)

NAME, ABOUT, WRITES = "serving", "XPress serving folder (Qwen3XPressModel)", True
ARCHITECTURES = ("Qwen3XPressModel", "Qwen3XPressForCausalLM", "DFlashQwen3XPressModel")
PASSES = 6  # what published configs carry
RESEARCH_NAMES = {  # our parameter of the refiner -> its name in research files and under xpress_head.
    "token_embed.weight": "w1.weight",
    "readout.weight": "w2.weight",
    "down_h.weight": "down_h.weight",
    "down_g.weight": "down_g.weight",
    "in_proj.weight": "in_proj.weight",
    "mix_l": "mix.L",
    "mlp_gate.weight": "mlp.gate_proj.weight",
    "mlp_up.weight": "mlp.up_proj.weight",
    "mlp_down.weight": "mlp.down_proj.weight",
}
theirs = renamed({f"head.{ours}": f"xpress_head.{name}" for ours, name in RESEARCH_NAMES.items()})


def recognise(source) -> bool:
    return source.architecture in ARCHITECTURES or source.has("xpress_head.")


def read(source, target) -> Plan:
    raw = source.config
    for key, usual in (("logit_scale", 1.0), ("sample_from_anchor", False), ("xpress_selector", False)):
        if raw.get(key, usual) != usual:
            raise ValueError(f"{source.place}: {key}={raw[key]!r} is not supported, only {usual!r}")
    if raw.get("draft_vocab_size", raw.get("vocab_size")) != raw.get("vocab_size"):
        raise ValueError(
            f"{source.place}: draft_vocab_size={raw['draft_vocab_size']!r}: this format has no reduced one"
        )
    config, rank = zlab.drafter(source), raw.get("xpress_rank", 256)
    head = head_config(REFINER, config, rank)
    for key, ours in (("xpress_block_size", config.block_size), ("xpress_mlp_hidden", 2 * rank)):
        if raw.get(key, ours) != ours:
            raise ValueError(f"{source.place}: {key}={raw[key]!r}, but its drafter and rank need {ours}")
    facts = {"passes": raw.get("xpress_num_passes", PASSES)}
    return Plan(NAME, config, head, theirs, frozen=FROZEN, masks=("xpress_head.mix.tril",), facts=facts)


def cannot(weights) -> str | None:
    if not refiner_is_whole(weights):
        return (
            "it holds a refiner with all its parts; write format=ours, or drop=head format=zlab for the drafter alone"
        )
    if weights.config.layout != INFILL.name or weights.config.draft_ids is not None:
        return "it needs the infill layout and the whole vocabulary; write format=speculators"


def files(weights, target) -> Files:
    raw, left_out = published(weights, ARCHITECTURES[0])
    num_draft_kept(weights, raw, weights.config.block_size - 1, left_out)
    rank = weights.rank
    raw |= {
        "xpress_rank": rank,
        "xpress_mlp_hidden": 2 * rank,
        "xpress_block_size": weights.config.block_size,
        "xpress_num_passes": weights.facts.get("passes", PASSES),
        "sample_from_anchor": False,
    }
    return Files(raw, {theirs(name): t for name, t in no_confidence(weights, left_out).items()}, left_out)
