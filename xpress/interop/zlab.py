"""z-lab's dFlash folder: the drafter alone, in the infill layout. vLLM and SGLang load it directly."""

from __future__ import annotations

from xpress.block import INFILL
from xpress.interop.base import (
    FROZEN,
    Files,
    Plan,
    drafter_config,
    no_confidence,
    num_draft_kept,
    published,
    vocabulary,
)

NAME, ABOUT, WRITES = "zlab", "z-lab dFlash (DFlashDraftModel)", True
ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")


def recognise(source) -> bool:
    named = source.architecture
    return named in ARCHITECTURES or not named and ("dflash_config" in source.config or "fc.weight" in source.entries)


def read(source, target) -> Plan:
    return Plan(NAME, drafter(source), frozen=FROZEN)


def drafter(source):
    """The drafter that z-lab's fields describe; block_size, mask and layer ids at top level or in dflash_config."""
    raw = source.config
    return drafter_config(source, raw, source.draft_ids(raw.get("vocab_size"), raw.get("draft_vocab_size")))


def cannot(weights) -> str | None:
    if weights.head is not None:
        return "it holds a drafter alone; drop=head leaves the head out, another format keeps it"
    if weights.config.layout != INFILL.name:
        return "its slots predict their own place (infill), these the next one; write format=dspark or speculators"


def files(weights, target) -> Files:
    raw, left_out = published(weights, ARCHITECTURES[0])
    num_draft_kept(weights, raw, weights.config.block_size - 1, left_out)
    return Files(raw, no_confidence(weights, left_out) | vocabulary(weights, target), left_out)
