"""DSpark folders: DeepSpec's flat config (Qwen3DSparkModel), read also as SpecForge nests it (DSparkDraftModel).

Next-token layout; a Markov head (vanilla, gated, rnn; rank 0: none) and often a confidence head.
"""

from __future__ import annotations

from xpress.block import NEXT
from xpress.interop.base import (
    DSPARK_NAMES,
    FROZEN,
    MARKOV,
    Files,
    Plan,
    drafter_config,
    head_config,
    num_draft_kept,
    published,
    renamed,
    vocabulary,
)

NAME, ABOUT, WRITES = "dspark", "DSpark (DeepSpec's Qwen3DSparkModel)", True
ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
theirs = renamed(DSPARK_NAMES)


def recognise(source) -> bool:
    if source.architecture in ARCHITECTURES:
        return True
    return source.inner().get("projector_type") == "dspark" or source.has("markov_head.")


def read(source, target) -> Plan:
    own = source.inner() | dict(source.config.get("dspark_config") or {})
    find = lambda key, default=None: own.get(key, source.config.get(key, default))  # noqa: E731
    if find("dspark_bonus_anchor"):
        raise ValueError(f"{source.place}: dspark_bonus_anchor=true is not supported; give its speculators checkpoint")
    layout = {"sample_from_anchor": True, "block_size": find("block_size"), "num_draft": find("num_draft", 0)}
    inner = {key: find(key) for key in ("mask_token_id", "target_layer_ids")}
    raw = source.config | layout | {"dflash_config": inner}
    config = drafter_config(source, raw, source.draft_ids(raw.get("vocab_size"), find("draft_vocab_size")))
    head, confidence = markov_plan(source, config, find)
    return Plan(NAME, config, head, theirs, confidence, FROZEN)


def markov_plan(source, config, find) -> tuple[dict | None, int | None]:
    """The heads that DSpark's fields describe -> the Markov head's config, the confidence head's rank."""
    rank, kind = find("markov_rank", 256), find("markov_head_type", "vanilla")
    if kind not in MARKOV:
        raise ValueError(f"{source.place}: markov_head_type={kind!r}: known are {', '.join(MARKOV)}")
    head = None if rank == 0 else head_config(MARKOV[kind], config, rank)
    if not find("enable_confidence_head", source.has("confidence_head.")):
        return head, None
    with_rows = find("confidence_head_with_markov", rank != 0)
    if with_rows and head is None:
        raise ValueError(f"{source.place}: confidence_head_with_markov=true needs markov_rank above 0")
    return head, rank if with_rows else 0


def markov_fields(weights) -> dict:
    """The same fields for weights whose head is none or a Markov head."""
    kinds = {path: kind for kind, path in MARKOV.items()}
    return {
        "markov_rank": 0 if weights.head is None else weights.rank,
        "markov_head_type": "vanilla" if weights.head is None else kinds[weights.head["_target_"]],
        "enable_confidence_head": weights.confidence is not None,
        "confidence_head_with_markov": bool(weights.confidence),
    }


def cannot(weights) -> str | None:
    if weights.head is not None and not weights.head_is(*MARKOV.values()):
        return "it holds a Markov head or none; write format=ours, or drop=head for the drafter alone"
    if weights.config.layout != NEXT.name:
        return "its slots predict the next token, these their own place (infill); write format=speculators"


def files(weights, target) -> Files:
    raw, left_out = published(weights, ARCHITECTURES[0])
    num_draft_kept(weights, raw, weights.config.block_size, left_out)
    raw |= raw.pop("dflash_config") | markov_fields(weights)
    tensors = {theirs(name): t for name, t in weights.tensors.items()} | vocabulary(weights, target)
    if target is not None:  # DeepSpec's own code wants its copies; engines take the target's
        dtype = weights.tensors["fc.weight"].dtype
        tensors["embed_tokens.weight"] = target.embedding.weight.detach().cpu().to(dtype).clone()
        if "lm_head.weight" not in tensors:
            tensors["lm_head.weight"] = target.lm_head.weight.detach().cpu().to(dtype).clone()
    return Files(raw, tensors, left_out)
