"""Domino folders: z-lab's fields with projector_type "domino"; older ones put `logit_head.` before the head's names.

shift_label true is the next-token layout, of which Domino drafts the first B − 1 slots; the first pure_draft_prefix_len
drafted tokens are the plain drafter's. SpecForge calls the architecture DominoDraftModel; it is written as the authors
have it, DFlashDraftModel, the only name under which SGLang finds a Domino drafter.
"""

from __future__ import annotations

from xpress.block import LAYOUTS, NEXT
from xpress.heads import domino
from xpress.interop.base import (
    DOMINO,
    FROZEN,
    Files,
    Plan,
    drafter_config,
    head_config,
    no_confidence,
    num_draft_kept,
    published,
    renamed,
    vocabulary,
    whole,
)

NAME, ABOUT, WRITES = "domino", "Domino (dFlash with projector_type domino)", True
ARCHITECTURE, WRITTEN, OLD = "DominoDraftModel", "DFlashDraftModel", "logit_head."
FIELDS = ("projector_type", "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label")


def recognise(source) -> bool:
    if source.architecture == ARCHITECTURE or source.inner().get("projector_type") == "domino":
        return True
    return source.has("prefix_gru.") or source.has(f"{OLD}prefix_gru.")


def names(prefix: str = ""):
    return renamed({f"head.{ours}": prefix + theirs for ours, theirs in domino.PUBLIC_NAMES.items()})


def read(source, target) -> Plan:
    inner = source.inner()
    rank, width, prefix, shift = (inner.pop(key, default) for key, default in zip(FIELDS[1:], (256, 1024, 1, None)))
    inner.pop("projector_type", None)
    if type(shift) is not bool:
        raise ValueError(
            f"{source.place}: dflash_config.shift_label={shift!r}: give true (next token) or false (infill)"
        )
    whole("gru_hidden_dim", width)
    if type(prefix) is not int or prefix < 0:
        raise ValueError(f"{source.place}: dflash_config.pure_draft_prefix_len={prefix!r} is no count")
    find = lambda key, default=None: inner.get(key, source.config.get(key, default))  # noqa: E731
    usual = whole("block_size", find("block_size")) - 1
    raw = source.config | {"dflash_config": inner, "sample_from_anchor": shift, "num_draft": find("num_draft", usual)}
    config = drafter_config(source, raw, source.draft_ids(raw.get("vocab_size"), raw.get("draft_vocab_size")))
    pure = prefix + LAYOUTS[config.layout].first_slot
    head = head_config(DOMINO, config, rank, gru_hidden_size=width, pure_slots=pure)
    return Plan(NAME, config, head, names(OLD if source.has(OLD) else ""), frozen=FROZEN)


def cannot(weights) -> str | None:
    if not weights.head_is(DOMINO):
        return "it holds a Domino head; write format=ours, or drop=head for the drafter alone"
    if weights.head.get("pure_slots", 2) < LAYOUTS[weights.config.layout].first_slot:
        return "its head corrects a slot that predicts nothing; write format=ours"


def files(weights, target) -> Files:
    raw, left_out = published(weights, WRITTEN)
    num_draft_kept(weights, raw, weights.config.block_size - 1, left_out)
    raw["dflash_config"] |= {
        "projector_type": "domino",
        "emb_dim": weights.rank,
        "gru_hidden_dim": weights.tensors["head.gru.weight_hh_l0"].shape[1],
        "pure_draft_prefix_len": weights.head.get("pure_slots", 2) - LAYOUTS[weights.config.layout].first_slot,
        "shift_label": weights.config.layout == NEXT.name,
    }
    own = no_confidence(weights, left_out) | vocabulary(weights, target)
    return Files(raw, {names()(name): t for name, t in own.items()}, left_out)
