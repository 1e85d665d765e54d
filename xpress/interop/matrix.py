"""Every format on tiny random checkpoints: read, written, decoded without loss, the same after a round trip?"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from xpress import checkpoint, interop
from xpress.decode import generate
from xpress.drafter import DFlashDrafter
from xpress.drafter_config import DrafterConfig
from xpress.files import write_json
from xpress.heads import DominoHead, GatedMarkovHead, MarkovHead, Refiner, RNNMarkovHead
from xpress.interop.base import REFINER, Weights
from xpress.interop.research import MARKOV_NAMES
from xpress.interop.serving import RESEARCH_NAMES
from xpress.target import Target

V, D, B, R = 97, 32, 4, 8
PROMPT, NEW = [5, 17, 44, 3, 61, 80, 9], 12
CASES = [  # format, what it holds, layout, head, the rank of a confidence head
    ("zlab", "drafter", "infill", None, None),
    ("research", "XPress", "infill", Refiner, None),
    ("research", "Markov", "infill", MarkovHead, None),
    ("serving", "XPress", "infill", Refiner, None),
    ("dspark", "vanilla + confidence", "next", MarkovHead, R),
    ("dspark", "gated", "next", GatedMarkovHead, None),
    ("dspark", "rnn", "next", RNNMarkovHead, None),
    ("dspark", "drafter", "next", None, None),
    ("domino", "Domino", "next", DominoHead, None),
    ("domino", "Domino", "infill", DominoHead, None),
    ("speculators", "dflash", "infill", None, None),
    ("speculators", "dspark + confidence", "next", GatedMarkovHead, 0),
    ("speculators", "xpress", "infill", Refiner, None),
    ("speculators", "xpress, 40 ids", "infill", Refiner, None),
    ("ours", "XPress", "infill", Refiner, None),
    ("ours", "Domino, 40 ids", "next", DominoHead, None),
]


@dataclass
class Row:
    """One line: yes, no (by design) or FAILED and why, and the formats that hold the same weights."""

    format: str
    holds: str
    layout: str
    read: str = ""
    write: str = ""
    decode: str = ""
    trip: str = ""
    also: str = ""

    @property
    def failed(self) -> bool:
        return any("FAILED" in value for value in vars(self).values())


def tiny_target() -> Target:
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, hidden_size=D, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = AutoConfig.for_model(
        "llama",
        **sizes,
        num_key_value_heads=2,
        initializer_range=0.25,
        rope_parameters=rope,
        max_position_embeddings=512,
    )
    return Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32), name="tiny")


@torch.no_grad()
def tiny_weights(target, holds, layout, kind, confidence, seed: int) -> Weights:
    """Random weights, strong enough that heads and passes change the drafts."""
    torch.manual_seed(seed)
    ids = tuple(range(1, V, 2))[:40] if "40 ids" in holds else None
    more = {"mask_token_id": V - 1, "target_layer_ids": (0, 2), "layout": layout, "draft_ids": ids}
    more |= {"num_draft": B - 1 if kind is DominoHead else 0}
    drafter = DFlashDrafter(DrafterConfig.for_target(target, 2, B, **more))
    head = None
    if kind is not None:
        own = {"gru_hidden_size": 12, "pure_slots": 1 + drafter.layout.first_slot} if kind is DominoHead else {}
        head = kind(**checkpoint.head_sizes(drafter.config) | {"draft_vocab_size": ids and len(ids)}, rank=R, **own)
        for weight in head.parameters():
            weight.normal_(std=0.5)
    tensors = checkpoint.tensors_of(drafter, head)
    tensors.pop("d2t", None)
    if confidence is not None:
        tensors |= {"confidence.proj.weight": torch.randn(1, D + confidence), "confidence.proj.bias": torch.randn(1)}
    return Weights("ours", drafter.config, head and head.config, confidence, tensors)


def measure(say: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Runs every case in a temporary folder -> a row each; `say` gets a line before each."""
    target = tiny_target()
    plain = generate(target, PROMPT, max_new_tokens=NEW).ids
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed, (format, holds, layout, kind, confidence) in enumerate(CASES):
            say(f"{format}: {holds}, {layout}")
            row = Row(format, holds, layout)
            _try(
                row,
                target,
                plain,
                tiny_weights(target, holds, layout, kind, confidence, seed),
                Path(folder) / str(seed),
            )
            rows.append(row)
    return rows


def _try(row: Row, target, plain: list[int], weights: Weights, folder: Path):
    step = "write"
    try:
        place = folder / "made"
        if row.format == "research":
            place, row.write = _research_file(weights, place), "no"
        else:
            interop.write(place, weights, row.format, target)
            row.write = "yes"
        step = "read"
        first = interop.read(place, target)
        _same(weights, first)
        row.read = "yes"
        step = "decode"
        answer = _decode(target, place)
        if answer.ids != plain:
            raise ValueError("the output is not plain autoregression's")
        row.decode = f"yes, tau {sum(r.num_accepted + 1 for r in answer.rounds) / len(answer.rounds):.2f}"
        step, formats = "trip", interop.formats_for(first)
        for other in formats:  # into each format that can hold it, and back into the first
            interop.write(folder / other, first, other, target)
            second = interop.read(folder / other, target)
            _same(weights, second)
            if _decode(target, folder / other) != answer:
                raise ValueError(f"{other}: other tokens or rounds")
            if row.format in formats:
                interop.write(folder / f"{other}-back", second, row.format, target)
                _same(weights, interop.read(folder / f"{other}-back", target))
        row.trip, row.also = "yes", ", ".join(name for name in formats if name != row.format)
    except (ValueError, OSError) as error:
        setattr(row, step, f"FAILED: {error}")


def _decode(target, place):
    found = interop.load(place, target, say=None)
    return generate(target, PROMPT, found.drafter, found.head, "auto", max_new_tokens=NEW)


def _same(a: Weights, b: Weights):
    if set(a.tensors) != set(b.tensors) or a.head != b.head or a.confidence != b.confidence:
        raise ValueError("other tensors or another head came back")
    if odd := [name for name, t in a.tensors.items() if not torch.equal(t, b.tensors[name])]:
        raise ValueError(f"{odd[0]} came back changed")


def _research_file(weights: Weights, folder: Path) -> Path:
    """As the research trainer saves it: two state dicts and an argparse Namespace, the drafter's config beside it."""
    folder.mkdir(parents=True)
    drafter = {name: t for name, t in weights.tensors.items() if not name.startswith("head.")}
    names = RESEARCH_NAMES if weights.head_is(REFINER) else MARKOV_NAMES
    head = {theirs: weights.tensors[f"head.{ours}"] for ours, theirs in names.items()}
    if names is RESEARCH_NAMES:
        head["mix.tril"] = torch.ones(B, B).tril()
    args = argparse.Namespace(markov_rank=R, mlp_ratio=2)
    file = folder / checkpoint.RESEARCH
    torch.save({"refiner_state_dict": head, "draft_state_dict": drafter, "args": args, "global_step": 1}, file)
    write_json(folder / checkpoint.CONFIG, weights.config.to_json())
    return file


def table(rows: list[Row]) -> str:
    """One line a case."""
    names = ("format", "holds", "layout", "read", "write", "decode", "round trip", "also held by")
    lines = [names, *[tuple(vars(row).values()) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
