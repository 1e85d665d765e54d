"""What a run will cost, from its sizes: parameters, memory, floating-point operations, hours, disk. Nothing is loaded,
nothing is written; modules are built on the meta device, to be counted.

A GEMM of [m,k] and [k,n] counts 2·m·k·n operations, elementwise work nothing. What is not known is taken at its upper
end, and the plan says so: every sequence has `max_anchors` blocks, and where no rows are there to be counted, its full
length.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from xpress.attention import MAX_SCORES
from xpress.drafter import DFlashDrafter
from xpress.drafter_config import DrafterConfig
from xpress.footprint import Work, moments, peak, saved_by, widths
from xpress.heads.confidence import beside
from xpress.loss import CONFIDENCE, Term
from xpress.recipe import TrainSettings
from xpress.trainee import CHUNK

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("vocab_size",)


@dataclass(frozen=True)
class Rows:
    """The rows of a run as a plan sees them: how many, their mean and greatest length in tokens, and where these
    numbers come from."""

    count: int
    mean: float
    longest: int
    origin: str


@dataclass(frozen=True)
class Plan:
    """Everything in plain numbers, so that asdict(plan) is JSON.

    parameters {"trained"|"frozen": {part: count}}; memory {"one GPU"|"DDP"|"FSDP": {"moment", "parts": {part: bytes},
    "total"}} per GPU at the peak of a step; features and disk in bytes; flops {part: operations of one step over all
    GPUs}; time: steps, epochs, hours.
    """

    run: dict
    parameters: dict
    memory: dict
    features: dict
    step: dict
    flops: dict
    time: dict
    disk: dict

    def to_json(self) -> dict:
        return asdict(self)


def check_sizes(sizes: dict | None) -> dict:
    """Raises ValueError where a plan lacks a size of the target."""
    missing = [name for name in SIZES if not (sizes or {}).get(name)]
    if missing or not sizes.get("model_type"):
        missing += [] if (sizes or {}).get("model_type") else ["model_type"]
        raise ValueError(
            f"target.sizes: {', '.join(missing)} not known; write them into the target's file in configs/target as in "
            "its config.json (qwen3_8b.yaml shows how), or give target.name=<a local folder with a config.json>"
        )
    return sizes


def meta_target(config) -> SimpleNamespace:
    """Counts of a target from its transformers config: body, embedding and lm_head (0 where tied), and `matrices`, the
    body's numbers that every token is multiplied with."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    body = [w for w in model.get_decoder().parameters() if w is not embedding]
    tied = head is embedding or config.tie_word_embeddings
    return SimpleNamespace(
        body=sum(w.numel() for w in body),
        matrices=sum(w.numel() for w in body if w.dim() == 2),
        layers=sum(w.numel() for layer in model.get_decoder().layers for w in layer.parameters()),
        embedding=embedding.numel(),
        lm_head=0 if tied else head.numel(),
        config=config,
    )


def head_flops(head, D: int, B: int, train_drafter: bool) -> tuple[int, int]:
    """Operations of a head for one block, forward and backward: (prepare, each sweep). Counted, not derived: the head
    runs on the meta device."""
    hidden = torch.zeros(1, B, D, device="meta", requires_grad=train_drafter)
    ids = torch.zeros(1, B, dtype=torch.long, device="meta")

    def count(sweeps: int) -> int:
        with FlopCounterMode(display=False) as counter:
            prepared = head.prepare(hidden)
            sum(head.latent(prepared, ids).sum() for _ in range(sweeps)).backward()
        return counter.get_total_flops()

    one, two = count(1), count(2)
    return 2 * one - two, two - one


def tensors_of(terms: list[Term]) -> list[tuple[bool, bool, bool]]:
    """(fed by the head, ce, l1) of each logit tensor that a step makes, the drafter's own first."""
    loss = {term.feed: (bool(term.loss.get("ce")), bool(term.loss.get("l1"))) for term in terms}
    rounds = sum(term.rounds for term in terms if term.feed == "self")
    found = [(False, *loss.get("none", (False, False)))]
    found += [(True, *loss["gold"])] if "gold" in loss else []
    return found + [(True, *loss["self"])] * rounds if rounds else found


def drafter_flops(c: DrafterConfig, tokens: float, slots: float, seen: float, train: bool) -> dict[str, float]:
    """Operations of the drafter, forward, and backward where it is trained; `seen`: context tokens that a block's
    attention reads. fc's input needs no gradient; attention makes its scores again in backward, then four products."""
    D, q, kv, _, inner = widths(c)
    L, M = c.num_hidden_layers, len(c.target_layer_ids)
    layer = 2 * D * q + 2 * D * kv + 3 * D * inner
    return {
        "drafter, context": 2 * tokens * (M * D * D * (1 + train) + L * 2 * D * kv * (1 + 2 * train)),
        "drafter, blocks": 2 * slots * L * layer * (1 + 2 * train),
        "drafter, attention": slots * L * q * (seen + c.block_size) * (4 + 10 * train),
    }


def vocabulary_flops(rows: float, D: int, V: int, R: int, tensors, train: bool) -> dict[str, float]:
    """The wide GEMMs: base logits and the target's, the readout of each fed tensor; back, one product for all base
    logits and two for each fed tensor."""
    fed, sloped = sum(t[0] for t in tensors), sum(t[0] and (t[1] or t[2]) for t in tensors)
    down = any((t[0] or train) and (t[1] or t[2]) for t in tensors) and train
    return {
        "vocabulary, forward": 2 * rows * V * (2 * D + fed * R),
        "vocabulary, backward": 2 * rows * V * (down * D + 2 * sloped * R),
    }


def plan(
    target,
    config: DrafterConfig,
    head,
    terms: list[Term],
    settings: TrainSettings,
    rows: Rows,
    features: str = "online",
    gpus: int = 1,
    mfu: float = 0.4,
    peak_tflops: float = 989.0,
    target_bytes: int = 2,
    device: str = "cuda",
    run: dict | None = None,
) -> Plan:
    """target: of `meta_target`; head: on the meta device, or None; mfu: share of peak_tflops that a step reaches; run:
    what else the plan should say of itself."""
    for name, value in (("gpus", gpus), ("mfu", mfu), ("peak_tflops", peak_tflops)):
        if not value > 0 or (name == "mfu" and value > 1):
            raise ValueError(f"{name}={value}: must be above 0" + (" and at most 1" if name == "mfu" else ""))
    with torch.device("meta"):
        drafter = sum(weight.numel() for weight in DFlashDrafter(config).parameters())
    D, B, V, G = config.hidden_size, config.block_size, config.draft_vocab_size, config.num_draft
    counted, rank, maps, block, sweeps = 0, 0, 0, (0, 0), (0, 0)
    tensors, train, online = tensors_of(terms), settings.train_drafter, features == "online"
    if head is not None:
        counted, rank = sum(weight.numel() for weight in head.parameters()), head.readout.in_features
        maps = sum(w.numel() for w in head.parameters() if w.dim() == 2 and w.shape[0] in (config.vocab_size, V))
        if any(term.feed == CONFIDENCE for term in terms):
            counted += sum(weight.numel() for weight in beside(head, D).parameters())
        block, sweeps = saved_by(head, D, B), head_flops(head, D, B, train)
    reduced = config.draft_ids is not None
    vocabulary = target.embedding + target.lm_head
    weights = {"target embedding + lm_head": target_bytes * vocabulary}
    weights["target body"] = target_bytes * (target.body if online else target.body - target.layers)
    if reduced:
        weights["rows of lm_head"] = target_bytes * V * D
    chunk = max(1, (settings.chunk or CHUNK[device == "cuda"] // V) // G) * G
    work = Work(
        config, drafter, counted, maps, settings.batch_size, rows.longest, settings.max_anchors, tuple(tensors), rank,
        block, chunk, settings.precision == "bf16", train, weights, len(config.target_layer_ids) * online,
        target.config.intermediate_size, settings.accumulation,
    )  # fmt: skip
    memory, ways = {}, {"one GPU": False} if gpus == 1 else {"DDP": False, "FSDP": True}
    for name, sharded in ways.items():
        moment, parts = peak(moments(work, gpus, sharded))
        memory[name] = {"moment": moment, "parts": parts, "total": sum(parts.values())}
    per_step = settings.batch_size * settings.accumulation * gpus
    length = rows.longest if settings.packing else rows.mean
    sequences = rows.count * rows.mean / length
    tokens, blocks = per_step * length, per_step * settings.max_anchors
    size = max(1, MAX_SCORES // (settings.batch_size * config.num_attention_heads * B * int(length + B)))
    parts = -(-settings.max_anchors // size)
    seen = length * (parts + 1) / (2 * parts)  # anchors spread evenly: a chunk of blocks reads up to its last anchor
    flops = {}
    if online:
        _, q, *_ = widths(config)
        attention = 2 * target.config.num_hidden_layers * q * length  # causal: half of the square
        flops["target, forward"] = tokens * (2 * target.matrices + attention + reduced * 2 * D * config.vocab_size)
    flops |= drafter_flops(config, tokens, blocks * B, seen, train)
    if head is not None:
        flops["head"] = blocks * (sweeps[0] + sum(t[0] for t in tensors) * sweeps[1])
    flops |= vocabulary_flops(blocks * G, D, V, rank, tensors, train)
    total = sum(flops.values())
    seconds = total / (gpus * peak_tflops * 1e12 * mfu)
    per_token = (len(config.target_layer_ids) + 1) * D * 2 + 4 * reduced
    state = 4 * (drafter + counted + 2 * work.trained)
    frozen = {} if train else {"drafter": drafter}
    trained = {"drafter": drafter} if train else {}
    if head is not None:
        trained |= {"head, vocabulary maps": maps, "head, the rest": counted - maps}
    frozen |= {"target body": target.body, "target embedding + lm_head": vocabulary}
    return Plan(
        run={**(run or {}), "gpus": gpus, "features": features, "precision": settings.precision},
        parameters={"trained": trained, "frozen": frozen},
        memory=memory,
        features={"bytes_per_token": per_token, "bytes": int(per_token * rows.count * rows.mean), **asdict(rows)},
        step={"sequences": per_step, "batch_size": settings.batch_size, "accumulation": settings.accumulation}
        | {"tokens": int(tokens), "blocks": blocks, "draft_tokens": blocks * G, "chunk_rows": min(chunk, work.rows)},
        flops={name: float(count) for name, count in flops.items()},
        time={"steps": settings.steps, "epochs": settings.steps * per_step / sequences, "seconds_a_step": seconds}
        | {"hours": settings.steps * seconds / 3600, "mfu": mfu, "peak_tflops": peak_tflops},
        disk={"state": state, "checkpoint": 4 * (drafter + counted), "run": 4 * state}
        | {"features": 0 if online else int(per_token * rows.count * rows.mean)},
    )


def meta_head(build, config: DrafterConfig):
    """`build(drafter, target)` -> a head, on the meta device and bound to an embedding there; None stays None."""
    with torch.device("meta"):
        target = SimpleNamespace(embedding=nn.Embedding(config.vocab_size, config.hidden_size))
        return build(SimpleNamespace(config=config), target)
