"""Attention of block slots over a shared context and their own block, a few blocks at a time.

    out = softmax([q K_contextᵀ (masked), q K_ownᵀ]) [V_context; V_own]

Every block has its own B slots beside the context of its sequence, never other blocks'. Scores exist for one chunk of
blocks only, in the forward pass and again in the backward pass, which recomputes them; a chunk reads no more of the
context than its blocks can see.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_SCORES = 1 << 23  # numbers in one chunk's scores: 32 MiB in fp32, whatever the number of blocks


def chunks(visible: Tensor | None, num_blocks: int, length: int, rows: int, block_size: int) -> list[tuple]:
    """Slices of blocks, each with the slice of the context that any of them sees.

    visible [S,A,T] or None (all of it); rows: score rows of one block index over sequences and heads, S·heads·B.
    Computed once for all layers, since it reads the mask on the host.
    """
    size = max(1, MAX_SCORES // (rows * (length + block_size)))
    parts = [slice(i, min(i + size, num_blocks)) for i in range(0, num_blocks, size)]
    if visible is None or not length:
        return [(part, slice(0, length)) for part in parts]
    seen = visible.any(0)
    some, bits = seen.any(1), seen.byte()  # argmax takes no bool, and a long would be eight masks
    first = torch.where(some, bits.argmax(1), length).tolist()
    last = torch.where(some, length - bits.flip(1).argmax(1), 0).tolist()
    spans = ((min(first[part]), max(last[part])) for part in parts)
    return [(part, slice(min(lo, hi), hi)) for part, (lo, hi) in zip(parts, spans)]


def _weights(q, ctx_k, own_k, visible, part, span) -> Tensor:
    """Softmax of one chunk's scores in fp32 at least: [S,kv,a,B·g,t+B]."""
    a = q[:, :, part]
    to_ctx = (a.flatten(2, 3) @ ctx_k[:, :, span].transpose(-1, -2)).unflatten(2, a.shape[2:4])
    if visible is not None:
        to_ctx = to_ctx.masked_fill_(~visible[:, None, part, None, span], float("-inf"))
    scores = torch.cat([to_ctx, a @ own_k[:, :, part].transpose(-1, -2)], -1)
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


class _BlockAttention(torch.autograd.Function):
    """q [S,kv,A,B·g,d], ctx_k and ctx_v [S,kv,T,d], own_k and own_v [S,kv,A,B,d] -> [S,kv,A,B·g,d]. With P the
    weights: dV = Pᵀ dO, dS = P ⊙ (dO Vᵀ − rowsum(P ⊙ dO Vᵀ)), dQ = dS K, dK = dSᵀ Q."""

    @staticmethod
    def forward(ctx, q, ctx_k, ctx_v, own_k, own_v, visible, parts):
        ctx.save_for_backward(q, ctx_k, ctx_v, own_k, own_v, visible)
        ctx.parts = parts
        out = torch.empty_like(q)
        for part, span in parts:
            weights = _weights(q, ctx_k, own_k, visible, part, span).to(q.dtype)
            t = span.stop - span.start
            mixed = (weights[..., :t].flatten(2, 3) @ ctx_v[:, :, span]).unflatten(2, weights.shape[2:4])
            out[:, :, part] = mixed + weights[..., t:] @ own_v[:, :, part]
        return out

    @staticmethod
    def backward(ctx, grad):
        q, ctx_k, ctx_v, own_k, own_v, visible = ctx.saved_tensors
        d_q, d_own_k, d_own_v = torch.empty_like(q), torch.empty_like(own_k), torch.empty_like(own_v)
        wide = torch.promote_types(q.dtype, torch.float32)  # sums over many chunks
        d_ctx_k, d_ctx_v = torch.zeros_like(ctx_k, dtype=wide), torch.zeros_like(ctx_v, dtype=wide)
        for part, span in ctx.parts:
            weights, given, t = _weights(q, ctx_k, own_k, visible, part, span), grad[:, :, part], span.stop - span.start
            narrow = weights.to(q.dtype)
            flat = given.flatten(2, 3)
            d_ctx_v[:, :, span] += narrow[..., :t].flatten(2, 3).transpose(-1, -2) @ flat
            d_own_v[:, :, part] = narrow[..., t:].transpose(-1, -2) @ given
            to_ctx = (flat @ ctx_v[:, :, span].transpose(-1, -2)).unflatten(2, given.shape[2:4])
            slope = torch.cat([to_ctx, given @ own_v[:, :, part].transpose(-1, -2)], -1).to(weights.dtype)
            slope.sub_((weights * slope).sum(-1, keepdim=True)).mul_(weights)
            slope = slope.to(q.dtype)
            back = slope[..., :t].flatten(2, 3)
            asked = q[:, :, part]
            d_ctx_k[:, :, span] += back.transpose(-1, -2) @ asked.flatten(2, 3)
            d_own_k[:, :, part] = slope[..., t:].transpose(-1, -2) @ asked
            d_q[:, :, part] = (back @ ctx_k[:, :, span]).unflatten(2, asked.shape[2:4])
            d_q[:, :, part] += slope[..., t:] @ own_k[:, :, part]
        return d_q, d_ctx_k.to(ctx_k.dtype), d_ctx_v.to(ctx_v.dtype), d_own_k, d_own_v, None, None


def block_attention(q: Tensor, context, own, visible: Tensor | None, parts: list[tuple]) -> Tensor:
    """q [S,A,B,heads,d] (scaled), context (keys, values) [S,T,kv,d], own (keys, values) [S,A,B,kv,d], visible [S,A,T]
    or None, parts of `chunks` -> [S,A,B,heads·d]. Under autocast everything runs in its type, softmaxes in fp32."""
    kind = q.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
    B, kv = q.shape[2], own[0].shape[3]
    q = q.to(dtype).unflatten(3, (kv, -1)).permute(0, 3, 1, 2, 4, 5).flatten(3, 4)  # [S,kv,A,B·g,d]
    context = [x.to(dtype).transpose(1, 2) for x in context]  # [S,kv,T,d]
    own = [x.to(dtype).permute(0, 3, 1, 2, 4) for x in own]  # [S,kv,A,B,d]
    with torch.autocast(kind, enabled=False):
        mixed = _BlockAttention.apply(q, *context, *own, visible, parts)
    return mixed.unflatten(3, (B, -1)).permute(0, 2, 3, 1, 4, 5).flatten(3)
