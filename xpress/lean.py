"""The target's decoder layers run by a short loop of our own: fused projections, states written in place.

The same weights and the same arithmetic as transformers' modules (RMSNorm in fp32 at least, rotary, grouped-query
attention, SwiGLU), without their per-layer overhead: q, k, v are one product, gate and up another. The fused weights are
the modules' own, laid out one behind the other, so nothing is held twice. For Llama, Mistral, Qwen2 and Qwen3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xpress.sequences import Sequences

KINDS = {"llama", "mistral", "qwen2", "qwen3"}


class LeanBody:
    """`LeanBody(model)(ids, sequences, layer_ids)` -> post-norm states [N,n,D], {layer id: its output [N,n,D]}.

    Raises ValueError naming what keeps a model from being run this way.
    """

    def __init__(self, model):
        body = model.get_decoder()
        self.config = config = model.config.get_text_config()
        devices = {p.device for p in model.parameters()}
        if config.model_type not in KINDS:
            raise ValueError(f"no lean loop for {config.model_type}; known are {', '.join(sorted(KINDS))}")
        if getattr(config, "hidden_act", "silu") != "silu" or len(devices) != 1:
            raise ValueError("the lean loop needs SwiGLU layers that lie on one device")
        self.embedding, self.rotary, self.norm = model.get_input_embeddings(), body.rotary_emb, body.norm
        self.head_dim = body.layers[0].self_attn.head_dim
        self.layers = [_Layer(layer) for layer in body.layers]

    def __call__(self, ids: Tensor, sequences: Sequences, layer_ids=()) -> tuple[Tensor, dict[int, Tensor]]:
        x, captured = self.embedding(ids), {}
        positions = sequences.positions(ids.device)
        cos, sin = self.rotary(x, positions)
        turn = cos[:, :, None], sin[:, :, None]
        mask = None
        if ids.shape[1] > 1 or not sequences.even:
            mask = sequences.visible(ids.device)[: 1 if sequences.even else None, None]
        for i, layer in enumerate(self.layers):
            x = layer(x, turn, mask, i, sequences, self.head_dim)
            if i in layer_ids:
                captured[i] = x
        return _rms(self.norm, x), captured


class _Layer:
    """One decoder layer: the modules' own parameters, those of parallel projections side by side."""

    def __init__(self, layer):
        a, m = layer.self_attn, layer.mlp
        self.norm, self.post, self.o, self.down = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            a.o_proj,
            m.down_proj,
        )
        self.qkv, self.sizes = fuse(a.q_proj, a.k_proj, a.v_proj)
        self.gate_up, _ = fuse(m.gate_proj, m.up_proj)
        self.q_norm, self.k_norm = getattr(a, "q_norm", None), getattr(a, "k_norm", None)
        self.scale = a.scaling

    def __call__(self, x: Tensor, turn, mask, index: int, sequences: Sequences, head_dim: int) -> Tensor:
        mixed = F.linear(_rms(self.norm, x), *self.qkv)
        q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in mixed.split(self.sizes, -1))
        if self.q_norm is not None:
            q, k = _rms(self.q_norm, q), _rms(self.k_norm, k)
        k = sequences.write(("k", index), _rotate(k, *turn))
        v = sequences.write(("v", index), v)
        q, k, v = _rotate(q, *turn).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.o(out.transpose(1, 2).flatten(2))
        gate, up = F.linear(_rms(self.post, x), *self.gate_up).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _rms(norm, x: Tensor) -> Tensor:
    """As the models' own: the mean of squares and the scaling in fp32 at least, then cast, then the weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return norm.weight * F.rms_norm(wide, wide.shape[-1:], eps=norm.variance_epsilon).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@torch.no_grad()
def fuse(*linears: nn.Linear) -> tuple[tuple[Tensor, Tensor | None], list[int]]:
    """(weight, bias) of parallel projections in one, and the rows of each. The modules keep views of the same memory."""
    sizes = [linear.weight.shape[0] for linear in linears]
    weight = torch.cat([linear.weight for linear in linears])
    for linear, part in zip(linears, weight.split(sizes)):
        linear.weight.data = part
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return (weight, None), sizes
    parts = [b if b is not None else weight.new_zeros(size) for b, size in zip(biases, sizes)]
    return (weight, torch.cat(parts)), sizes
