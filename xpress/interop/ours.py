"""Our own folder: it holds everything that the library has."""

from __future__ import annotations

from xpress import checkpoint
from xpress.drafter_config import DrafterConfig
from xpress.interop.base import Plan

NAME, ABOUT, WRITES = "ours", "our own folder", True


def recognise(source) -> bool:
    return "head" in source.config or "feature_scale" in source.config


def read(source, target) -> Plan:
    raw = source.config
    source.check_layers(raw)
    config = DrafterConfig.from_json(raw, source.draft_ids(raw.get("vocab_size"), raw.get("draft_vocab_size")))
    for key in ("head", "confidence"):
        if raw.get(key) is not None and not isinstance(raw[key], dict):
            raise ValueError(f"{source.place}: {key}={raw[key]!r} is no section of config.json; restore it")
    confidence = raw.get("confidence") and raw["confidence"].get("rank", 0)
    if confidence is not None and (type(confidence) is not int or confidence < 0):
        raise ValueError(f"{source.place}: confidence.rank={confidence!r} is no rank; restore config.json")
    return Plan(NAME, config, raw.get("head") or None, confidence=confidence)


def cannot(weights) -> str | None:
    return None


def write(weights, folder):
    """The folder as training writes it."""
    tensors = dict(weights.tensors) | checkpoint.id_map(weights.config.draft_ids)
    parts = weights.config, weights.head, tensors, weights.provenance, weights.confidence
    checkpoint.write_files(folder, *parts)
