"""The dFlash drafter: a few transformer layers that draft a whole block in one parallel pass (arXiv 2602.06036).

Keys and values come from two sources: the target's hidden states of the committed tokens (projected once by `fc` and
`hidden_norm`, the same for every layer) and the block's own slots [anchor, MASK, …, MASK]. A slot sees the whole
context and the whole block; there is no mask inside a block. Positions are absolute. Embedding and readout are the
frozen target's own.

One attention serves both ways of running: in decoding the context is a cache that grows by what each round commits,
in training it is the whole sequence, of which a block sees what lies strictly before its anchor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from xpress.attention import block_attention, chunks
from xpress.block import LAYOUTS, Block
from xpress.drafter_config import DrafterConfig
from xpress.linear import linear
from xpress.sequences import Sequences, on_device
from xpress.static import StaticSequences
from xpress.static_draft import StaticDraft
from xpress.target import check_layer_ids, rope_parameters


@dataclass(frozen=True)
class Context:
    """What a drafter may read in decoding, of N sequences: ids so far, the anchor last; target_hidden [N,c,M·D], whose
    row r holds the tokens committed to sequence r since the last draft and padding after them, or None where the target
    captures nothing."""

    ids: list[list[int]]
    target_hidden: Tensor | None


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Rotary(nn.Module):
    """Rotate-half rotary embedding with the scaling of the config; cos and sin are made in fp32 (or wider)."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.register_buffer("inv_freq", None, persistent=False)
        self.scale = 1.0
        rope, dim = dict(config.rope_parameters), config.head_dim
        if rope["rope_type"] == "default":
            self.inv_freq = rope["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        else:
            shape = AutoConfig.for_model(
                "qwen3", head_dim=dim, rope_parameters=rope, max_position_embeddings=config.max_position_embeddings
            )
            self.inv_freq, self.scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](shape, torch.device("cpu"))

    def _apply(self, fn, recurse=True):
        """Follows the module to a device, never to a narrower dtype: bf16 positions would be wrong from 257 on."""
        frequencies = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = frequencies.to(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [...] -> cos, sin [...,1,head_dim]"""
        angles = positions[..., None, None].to(self.inv_freq.dtype) * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        heads, kv, dim, size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.hidden_size,
        )
        self.q_proj = nn.Linear(size, heads * dim, bias=False)
        self.k_proj = nn.Linear(size, kv * dim, bias=False)
        self.v_proj = nn.Linear(size, kv * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, size, bias=False)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)
        self.kv, self.dim = kv, dim

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [...,D] -> keys, values [...,kv,d], keys normed and turned; the same weights for context and block."""
        k = self.k_proj(x).unflatten(-1, (self.kv, self.dim))
        v = self.v_proj(x).unflatten(-1, (self.kv, self.dim))
        return rotate(self.k_norm(k), cos, sin), v

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [...,D] -> queries [...,heads,d], normed, turned and scaled"""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))), cos, sin) * self.dim**-0.5

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: tuple[Tensor, Tensor], visible, parts):
        """x [S,A,B,D]; context keys and values [S,T,kv,d]; visible [S,A,T] (None: all of it) -> [S,A,B,D]."""
        q = self.queries(x, cos, sin)
        return self.o_proj(block_attention(q, context, self.keys_values(x, cos, sin), visible, parts))


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, context, visible, parts):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context, visible, parts)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDrafter(nn.Module):
    """Parameter names are the published ones, so that z-lab checkpoints load as they are.

    A drafter works once it is bound to its target, whose embedding and lm_head it borrows: `bind(target)`.
    Raises ValueError where sizes, vocabulary, mask id or layer ids do not fit the target.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.layout = LAYOUTS[config.layout]
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        ids = None if config.draft_ids is None else torch.tensor(config.draft_ids)
        self.register_buffer("draft_ids", ids, persistent=False)
        self._static = StaticDraft()
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=config.initializer_range)
        self.reset()

    # --- the frozen parts of the target -----------------------------------------------------------------------------

    def bind(self, target) -> DFlashDrafter:
        """Borrow the target's embedding and lm_head (they stay outside parameters and state dict) -> self."""
        config = self.config
        for setting, ours, theirs in (
            ("hidden_size", config.hidden_size, target.hidden_size),
            ("vocab_size", config.vocab_size, target.vocab_size),
            ("num_target_layers", config.num_target_layers, target.num_layers),
        ):
            if ours != theirs:
                raise ValueError(
                    f"drafter {setting}={ours}, target {target.name} has {theirs}: they do not belong together"
                )
        check_layer_ids(config.target_layer_ids, target.num_layers)
        if getattr(target.lm_head, "bias", None) is not None:
            raise ValueError(f"target {target.name}: an lm_head with a bias is not supported")
        config.warn_if_rope_differs(rope_parameters(target.config), target.name)
        self.target, self._lm_rows = target, None  # a Target is no module: nothing of it enters parameters
        return self

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @property
    def lm_rows(self) -> Tensor:
        """[V_draft, D]: the rows of the target's lm_head that base logits are read with, where the drafter is."""
        weight, device = self.target.lm_head.weight, self.rotary.inv_freq.device
        if self.draft_ids is None and weight.device == device:
            return weight
        if self._lm_rows is None or self._lm_rows.device != device:
            with torch.inference_mode(False):  # rows first read while decoding serve training too
                rows = weight.detach() if self.draft_ids is None else weight.detach()[self.draft_ids.to(weight.device)]
                self._lm_rows = rows.to(device)
        return self._lm_rows

    def readout(self, hidden: Tensor) -> Tensor:
        """hidden [...,D] -> base logits [...,V_draft]"""
        return linear(hidden.to(self.lm_rows.dtype), self.lm_rows)

    def block(self, hidden: Tensor, anchor: Tensor, before: Tensor) -> Block:
        """hidden [N,B,D], anchor and before [N] (target ids) -> Block"""
        config = self.config
        return Block(
            hidden, anchor, before, self.layout, config.num_draft, self.readout, config.vocab_size, self.draft_ids
        )

    # --- the parallel pass ------------------------------------------------------------------------------------------

    def project(self, target_hidden: Tensor, positions: Tensor, scale=None) -> list[tuple[Tensor, Tensor]]:
        """target_hidden [S,T,M·D], positions [S,T] -> per layer, keys and values [S,T,kv,d]. scale [M]: the config's
        feature_scale, for callers that have it on the device."""
        scaled = target_hidden.to(self.fc.weight.dtype).unflatten(-1, (len(self.layer_ids), -1))
        scale = scaled.new_tensor(self.config.feature_scale) if scale is None else scale
        scaled = (scaled * scale[:, None]).flatten(-2)
        context = self.hidden_norm(self.fc(scaled))
        cos, sin = self.rotary(positions)
        return [layer.self_attn.keys_values(context, cos, sin) for layer in self.layers]

    def embed(self, anchor: Tensor) -> Tensor:
        """anchor ids [...] -> the target's embedding of [anchor, MASK, …, MASK], [...,B,D]"""
        ids = anchor[..., None].repeat(*[1] * anchor.dim(), self.config.block_size)
        ids[..., 1:] = self.config.mask_token_id
        return self.target.embedding(ids.to(self.target.embedding.weight.device)).to(ids.device, self.fc.weight.dtype)

    def forward(self, anchor: Tensor, positions: Tensor, contexts, visible: Tensor | None = None) -> Tensor:
        """anchor ids [S,A], their positions [S,A], per-layer contexts, visible [S,A,T] -> hidden [S,A,B,D]."""
        B, x = self.config.block_size, self.embed(anchor)
        cos, sin = self.rotary(positions[..., None] + torch.arange(B, device=positions.device))
        S, A = anchor.shape
        length = contexts[0][0].shape[1]
        parts = chunks(visible, A, length, S * self.config.num_attention_heads * B, B)
        for layer, context in zip(self.layers, contexts):
            x = layer(x, cos, sin, context, visible, parts)
        return self.norm(x)

    # --- decoding ---------------------------------------------------------------------------------------------------

    def reset(self):
        """Forget the context; the next draft starts new sequences."""
        self.sequences: Sequences | None = None

    def select(self, rows: list[int]):
        """Goes on with these sequences alone."""
        if self.sequences is not None:
            self.sequences.select(rows)

    def _open(self, num_rows: int) -> Sequences:
        weight, target = self.fc.weight, self.target
        static = getattr(target, "loop", None) == "static" and target.device == weight.device
        if static and not any(parameter.requires_grad for parameter in self.parameters()):
            return self._static.open(self, num_rows)
        return Sequences([0] * num_rows)

    def draft(self, context: Context) -> Block:
        """One parallel pass over the N blocks that open with the last id of each sequence.

        Only committed tokens ever enter the cache; the block's own keys and values live for this pass alone, which is
        what cropping the cache after each round would leave. Where the target decodes in static buffers, so does a
        drafter whose weights are frozen; on a GPU its block's hidden states are then valid until the next call.
        """
        device, new = self.fc.weight.device, context.target_hidden
        if self.sequences is None:
            self.sequences = self._open(len(context.ids))
        rows, starts = self.sequences, [len(ids) - 1 for ids in context.ids]
        counts = [start - have for start, have in zip(starts, rows.lengths)]
        if new is None or len(rows) != len(starts) or min(counts) < 0 or max(counts) != new.shape[1]:
            have = "nothing" if new is None else f"{new.shape[1]} new states"
            raise RuntimeError(
                f"the drafter's context holds {rows.lengths} tokens, gets {have}, and the anchors stand at {starts}: "
                "out of step"
            )
        anchor = on_device([ids[-1] for ids in context.ids], device)
        before = on_device([ids[-2:][0] for ids in context.ids], device)
        if isinstance(rows, StaticSequences):
            return self.block(self._static(rows, new, counts, anchor), anchor, before)
        rows.open(new.shape[1])
        for layer, pair in enumerate(self.project(new, rows.positions(device))):
            for kind, states in zip("kv", pair):
                rows.write((kind, layer), states)
        rows.commit(counts)
        contexts = [tuple(rows.read((kind, layer)) for kind in "kv") for layer in range(len(self.layers))]
        visible = None if rows.even else rows.held(device)[:, None]
        positions = on_device(starts, device)
        hidden = self(anchor[:, None], positions[:, None], contexts, visible)
        return self.block(hidden[:, 0], anchor, before)
