"""Triton code of the readout: loaded on first use, by the launchers beside it, never by `import xpress`.

A program walks over tiles of the vocabulary and holds the latents of its rows all the while, so the readout is read
once for every BLOCK_M rows. Values and ids travel as one 64-bit key, ordered as integers: NaN and ties need no care
after `pack`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOWEST = tl.constexpr(-(2**63))  # below every key
NAN_ORDER = tl.constexpr(-(2**31))  # below the order of −inf


@triton.jit
def dot(a, b):
    """a·b summed in fp32. The interpreter's own product of bf16 operands is garbage, so they are widened there."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 to the nearest of dtype. The interpreter cuts bf16 off instead, so its last bits are rounded away first."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def pack(value, ids):
    """fp32 values and int32 ids -> int64 keys: the larger value first, then the lower id; NaN below −inf; −0 = +0."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    order = tl.where(value != value, NAN_ORDER, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def unpack_ids(keys):
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def gumbel(key, low, high):
    """xpress.sampling's noise: the first Philox 2x32-10 word of (key; low, high), all uint32, as −log(−log u)."""
    for _ in tl.static_range(10):
        product = low.to(tl.uint64) * 0xD256D193
        low = (product >> 32).to(tl.uint32) ^ key ^ high
        high = product.to(tl.uint32)
        key = (key.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
    u = ((low >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2⁻²³
    if INTERPRETED:
        return -tl.log(-tl.log(u))
    # tl.log is the fast one, whose error near 1 is absolute: the largest noise, which wins, would be all error.
    return -libdevice.log(-libdevice.log(u))


@triton.jit
def own_rows(active, rows, slots, first, BLOCK_M: tl.constexpr, MASKED: tl.constexpr):
    """Rows of this program -> block n [BLOCK_M] (int64), slot g, and whether the row exists and is still open."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    count = slots - first
    n = (row // count).to(tl.int64)
    mine = row < rows
    if MASKED:
        mine = mine & (tl.load(active + n, mask=mine, other=0) != 0)
    return n, first + row % count, mine


@triton.jit
def tile_logits(base, weight, z, v, mine, V, stride_v, stride_w, R: tl.constexpr):
    """float32(base) + z·Wᵀ [BLOCK_M,BLOCK_V] of ids v; base points at each row's start. Past V: zero, for the caller
    to mask."""
    inside = v < V
    r = tl.arange(0, R)
    far = v.to(tl.int64)[None, :]
    w = tl.load(weight + far * stride_w + r[:, None], mask=inside[None, :], other=0.0)
    s = tl.load(base[:, None] + far * stride_v, mask=mine[:, None] & inside[None, :], other=0.0)
    return s.to(tl.float32) + dot(z, w.to(z.dtype))


@triton.jit
def argmax_kernel(
    base,
    latent,
    weight,
    ids,
    keys,
    active,
    V,
    rows,
    slots,
    first,
    base_n,
    base_g,
    base_v,
    latent_n,
    latent_g,
    stride_w,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """keys [N,slots] = max(keys, key of the row's best id): grid (row tiles, programs), rows of slots first…"""
    n, g, mine = own_rows(active, rows, slots, first, BLOCK_M, MASKED)
    if tl.max(mine.to(tl.int32), 0) == 0:
        return
    z = tl.load(latent + (n * latent_n + g * latent_g)[:, None] + tl.arange(0, R)[None, :], mask=mine[:, None], other=0)
    starts = base + n * base_n + g.to(tl.int64) * base_g
    best = tl.full([BLOCK_M, BLOCK_V], LOWEST, tl.int64)
    for tile in tl.range(tl.program_id(1), tl.cdiv(V, BLOCK_V), tl.num_programs(1), num_stages=STAGES):
        v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        logits = tile_logits(starts, weight, z, v, mine, V, base_v, stride_w, R)
        names = v
        if MAPPED:
            names = tl.load(ids + v, mask=v < V, other=0).to(tl.int32)
        best = tl.maximum(best, tl.where((v < V)[None, :], pack(logits, names[None, :]), LOWEST))
    tl.atomic_max(keys + n * slots + g, tl.max(best, 1), mask=mine, sem="relaxed")


@triton.jit
def sample_kernel(
    base,
    latent,
    weight,
    ids,
    address,
    active,
    part_key,
    part_logit,
    part_lse,
    V,
    rows,
    slots,
    first,
    base_n,
    base_g,
    base_v,
    latent_n,
    latent_g,
    stride_w,
    scale,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Best key of ℓ·scale + Γ, its ℓ·scale, and log Σ exp(ℓ·scale), each [programs,rows], over a program's tiles."""
    n, g, mine = own_rows(active, rows, slots, first, BLOCK_M, MASKED)
    if tl.max(mine.to(tl.int32), 0) == 0:
        return
    z = tl.load(latent + (n * latent_n + g * latent_g)[:, None] + tl.arange(0, R)[None, :], mask=mine[:, None], other=0)
    starts = base + n * base_n + g.to(tl.int64) * base_g
    key = tl.load(address + 2 * n, mask=mine, other=0).to(tl.uint32)
    high = (tl.load(address + 2 * n + 1, mask=mine, other=0) + g).to(tl.uint32)
    best = tl.full([BLOCK_M], LOWEST, tl.int64)
    chosen = tl.full([BLOCK_M], float("-inf"), tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(V, BLOCK_V), tl.num_programs(1), num_stages=STAGES):
        v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        logits = scale * tile_logits(starts, weight, z, v, mine, V, base_v, stride_w, R)
        logits = tl.where((v < V)[None, :], logits, float("-inf"))
        names = v
        if MAPPED:
            names = tl.load(ids + v, mask=v < V, other=0).to(tl.int32)
        noise = gumbel(key[:, None], names.to(tl.uint32)[None, :], high[:, None])
        keys = tl.where((v < V)[None, :], pack(logits + noise, names[None, :]), LOWEST)
        tile_best = tl.max(keys, 1)
        tile_chosen = tl.max(tl.where(keys == tile_best[:, None], logits, float("-inf")), 1)
        chosen = tl.where(tile_best > best, tile_chosen, chosen)
        best = tl.maximum(best, tile_best)
        higher = tl.maximum(top, tl.max(logits, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # a row of −inf so far: exp(−inf − 0), not NaN
        total = total * tl.exp(top - finite) + tl.sum(tl.exp(logits - finite[:, None]), 1)
        top = higher
    place = tl.program_id(1).to(tl.int64) * rows + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(part_key + place, best, mask=mine)
    tl.store(part_logit + place, chosen, mask=mine)
    tl.store(part_lse + place, top + tl.log(total), mask=mine)


@triton.jit
def combine_kernel(
    part_key,
    part_logit,
    part_lse,
    active,
    keys,
    logit,
    lse,
    rows,
    slots,
    first,
    programs,
    PROGRAMS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One row a program: the best of the partial keys, in a fixed order, so that a rerun gives the same bits."""
    row = tl.program_id(0)
    n = row // (slots - first)
    if MASKED:
        if tl.load(active + n) == 0:
            return
    p = tl.arange(0, PROGRAMS)
    place = p.to(tl.int64) * rows + row
    partial = tl.load(part_key + place, mask=p < programs, other=LOWEST)
    best = tl.max(partial, 0)
    chosen = tl.load(part_logit + place, mask=p < programs, other=float("-inf"))
    chosen = tl.max(tl.where(partial == best, chosen, float("-inf")), 0)
    sums = tl.load(part_lse + place, mask=p < programs, other=float("-inf"))
    top = tl.max(sums, 0)
    finite = tl.where(top == float("-inf"), 0.0, top)
    out = n.to(tl.int64) * slots + first + row % (slots - first)
    tl.store(keys + out, best)
    tl.store(logit + out, tl.where((best >> 32) == NAN_ORDER, float("nan"), chosen))
    tl.store(lse + out, top + tl.log(tl.sum(tl.exp(sums - finite), 0)))


@triton.jit
def logits_kernel(
    base,
    latent,
    weight,
    out,
    V,
    rows,
    base_row,
    base_v,
    latent_row,
    stride_w,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ℓ [rows,V] in fp32, written out: for the few rows whose whole distribution is asked for."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = row < rows
    row = row.to(tl.int64)
    z = tl.load(latent + (row * latent_row)[:, None] + tl.arange(0, R)[None, :], mask=mine[:, None], other=0)
    for tile in tl.range(tl.program_id(1), tl.cdiv(V, BLOCK_V), tl.num_programs(1), num_stages=STAGES):
        v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        logits = tile_logits(base + row * base_row, weight, z, v, mine, V, base_v, stride_w, R)
        tl.store(out + (row * V)[:, None] + v[None, :], logits, mask=mine[:, None] & (v < V)[None, :])
