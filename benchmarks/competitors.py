"""The three competitors of train_step.py: the same drafter, head, inputs and anchors, made from names and seeds alone.

The file runs in another interpreter too, one that has `speculators` and no xpress: only the classes of a competitor
import its library.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

# SmolLM2-135M and the drafter and head of configs/exp/smollm2_135m.yaml, over the full vocabulary.
HIDDEN, INNER, HEADS, KV, HEAD_DIM, ROPE = 576, 1536, 9, 3, 64, {"rope_theta": 1e5, "rope_type": "default"}
LAYERS, TARGET_LAYERS, CAPTURED, RANK, MASK, EPS = 2, 30, (1, 8, 14, 20, 27), 64, 16, 1e-5
CONTEXT = 512
OBJECTIVE = Path(__file__).resolve().parents[1] / "configs" / "objective" / "xpress.yaml"


@dataclass(frozen=True)
class Case:
    """blocks A of B slots over one sequence of 512 supervised tokens, V token ids."""

    blocks: int
    block_size: int
    vocab: int
    threads: int


def make_inputs(case: Case) -> SimpleNamespace:
    """ids [1,T], positions [1,T], hidden [1,T,M·D], last [1,T,D] (post-norm), table [V,D]: embedding and lm_head."""
    random = torch.Generator().manual_seed(0)
    last = torch.randn(1, CONTEXT, HIDDEN, generator=random)
    return SimpleNamespace(
        ids=torch.randint(case.vocab, (1, CONTEXT), generator=random),
        positions=torch.arange(CONTEXT)[None],
        hidden=torch.randn(1, CONTEXT, len(CAPTURED) * HIDDEN, generator=random),
        last=F.rms_norm(last, (HIDDEN,)),  # unit RMS: a competitor that norms once more changes nothing
        table=torch.randn(case.vocab, HIDDEN, generator=random) * 0.1,
    )


def canonical(name: str) -> str:
    """One name a weight, whoever holds it."""
    return name.removeprefix("drafter.").replace("refiner_head.", "head.")


@torch.no_grad()
def fill(model: torch.nn.Module):
    """The same trained weights in every competitor; norms stay at one, as all of them start."""
    for name, weight in model.named_parameters():
        if weight.requires_grad and weight.dim() > 1:
            random = torch.Generator().manual_seed(zlib.crc32(canonical(name).encode()))
            weight.copy_(torch.randn(weight.shape, generator=random) * 0.02)


class Ours:
    """xpress.trainee.Trainee under configs/objective/xpress.yaml."""

    def __init__(self, case: Case):
        from omegaconf import OmegaConf

        from xpress.anchors import Batch
        from xpress.drafter import DFlashDrafter
        from xpress.drafter_config import DrafterConfig
        from xpress.heads import Refiner
        from xpress.parts import make_terms
        from xpress.target import Features
        from xpress.trainee import Trainee

        self.case, inputs = case, make_inputs(case)
        rows = torch.nn.Linear(HIDDEN, case.vocab, bias=False).requires_grad_(False)
        rows.weight.data = inputs.table
        target = SimpleNamespace(  # all that a drafter borrows of its target
            name="random",
            hidden_size=HIDDEN,
            vocab_size=case.vocab,
            num_layers=TARGET_LAYERS,
            config={"rope_parameters": ROPE},
            embedding=torch.nn.Embedding.from_pretrained(inputs.table),
            lm_head=rows,
        )
        config = DrafterConfig(
            HIDDEN, INNER, LAYERS, HEADS, KV, HEAD_DIM, case.vocab, TARGET_LAYERS, CAPTURED, MASK, ROPE,
            block_size=case.block_size, rms_norm_eps=EPS,
        )  # fmt: skip
        objective = OmegaConf.to_container(OmegaConf.create({"objective": OmegaConf.load(OBJECTIVE)}), resolve=True)
        terms = make_terms(objective["objective"])
        head = Refiner(case.vocab, HIDDEN, case.block_size, RANK)
        self.model = Trainee(DFlashDrafter(config).bind(target), head, terms)
        self.coefficients = torch.tensor([term.weight_at(0.0) for term in terms])
        flat = torch.zeros_like(inputs.ids)
        self.batch = Batch(inputs.ids, inputs.positions, flat, flat == 0, [("row",)])
        self.features = Features(inputs.hidden, inputs.last)

    def anchors(self, blocks: int):
        """The draw that speculators makes from the same seed: any position but the last B, without replacement."""
        from xpress.anchors import lay_out

        index = torch.randperm(CONTEXT - self.case.block_size)[:blocks].sort().values[None]
        self.drawn = index[0].tolist()
        return lay_out(self.batch, index, torch.ones_like(index, dtype=torch.bool), self.model.drafter.config.num_draft)

    def loss(self, blocks: int) -> torch.Tensor:
        anchors = self.anchors(blocks)
        scale = (self.coefficients / self.model.weight_sums(anchors)).tolist()
        return self.model(self.batch, anchors, self.features, None, scale).total


class Plain(Ours):
    """The same drafter and head, the loss as one writes it down: whole [N,G,V] tensors, gradients by autograd."""

    def loss(self, blocks: int) -> torch.Tensor:
        from xpress.refine import sweep

        drafter, head, anchors = self.model.drafter, self.model.head, self.anchors(blocks)
        contexts = drafter.project(self.features.hidden, self.batch.positions)
        hidden = drafter(anchors.anchor_ids, anchors.positions, contexts, anchors.visible)
        block = drafter.block(hidden[0], anchors.anchor_ids[0], anchors.before_ids[0])
        base, prepared, labels = block.base_logits(), head.prepare(block.hidden), anchors.labels[0]
        p = F.linear(self.features.last[0, anchors.judge[0]], drafter.lm_rows).softmax(-1)
        total = 0.0
        for term, coefficient in zip(self.model.terms, self.coefficients):
            weights = term.slot_weights(block.num_draft) * anchors.mask[0]
            fed = labels if term.feed == "gold" else base.argmax(-1)
            for _ in range(term.rounds):
                z = base if term.feed == "none" else base + head.readout(sweep(head, prepared, block, fed))
                fed = z.argmax(-1)
                ce = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
                token = term.loss["ce"] * ce + term.loss["l1"] * (z.softmax(-1) - p).abs().sum(-1)
                total = total + coefficient / term.rounds * (weights * token).sum() / weights.sum()
        return total


class Theirs:
    """speculators' XPressDraftModel, eager attention and eager losses (its others need flex attention or Triton).

    Its objective nearest to ours: 0.1 CE on the data's tokens + 1.8 TV (= 0.9 L1), decay 4, three rounds at 0.3, anchor
    0.6. Two things differ: it divides by the number of rows instead of the sum of their weights, a constant that is
    multiplied back here, and its forward also computes acceptance metrics, which cannot be turned off.
    """

    def __init__(self, case: Case):
        from speculators.losses import resolve_loss_config
        from speculators.models.dflash import core
        from speculators.models.xpress import XPressDraftModel, XPressSpeculatorConfig
        from transformers import Qwen3Config

        self.case, inputs = case, make_inputs(case)
        layer = Qwen3Config(
            vocab_size=case.vocab,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV,
            head_dim=HEAD_DIM,
            rms_norm_eps=EPS,
            rope_parameters=ROPE,
        )
        layer._attn_implementation = "eager"
        config = XPressSpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=case.vocab,
            block_size=case.block_size,
            aux_hidden_state_layer_ids=list(CAPTURED),
            mask_token_id=MASK,
            xpress_rank=RANK,
        )
        self.model = XPressDraftModel(config).train()
        if self.model._attn_impl != "eager":
            raise RuntimeError(f"speculators runs {self.model._attn_impl} attention, eager was asked for")
        for frozen in (self.model.embed_tokens, self.model.lm_head, self.model.verifier_lm_head):
            frozen.weight.data.copy_(inputs.table)
        self.inputs = dict(
            hidden_states=inputs.hidden,
            input_ids=inputs.ids,
            loss_mask=torch.ones(1, CONTEXT),
            verifier_last_hidden_states=inputs.last,
            document_ids=torch.zeros_like(inputs.ids),
            position_ids=inputs.positions,
            loss_config=resolve_loss_config('{"ce": 0.1, "tv": 1.8}', "eager"),
            ce_from_data=True,
        )
        weights = torch.exp(-torch.arange(case.block_size - 1) / 4.0)
        self.rescale = float(len(weights) / weights.sum())
        select = core.select_anchors

        def count(*args):
            places, valid = select(*args)
            self.drawn = places[valid].tolist()
            return places, valid

        core.select_anchors = count

    def loss(self, blocks: int) -> torch.Tensor:
        return self.model(**self.inputs, max_anchors=blocks)[1] * self.rescale


KINDS = {"ours": Ours, "plain": Plain, "speculators": Theirs}
