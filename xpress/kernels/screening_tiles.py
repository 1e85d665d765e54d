"""Triton code of screening: loaded on first use, by the launcher in screening.py.

Two launches. The first reads the quantised copy and leaves an upper bound for every tile and row, and a lower bound for
every row. The second looks at the bounds and computes, by the full kernel's code, the tiles that may hold the winner.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xpress.kernels.readout_tiles import LOWEST, dot, gumbel, own_rows, pack, tile_logits

INFINITE = tl.constexpr(float("inf"))


@triton.jit
def unpack_value(keys):
    """The fp32 value of a key that was packed from a number."""
    order = (keys >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def length(z):
    """‖z‖ of rows [BLOCK_M,R], rounded up: scaled, so that squares neither vanish nor overflow."""
    z = z.to(tl.float32)
    most = tl.max(tl.abs(z), 1)
    part = z / tl.where(most > 0, most, 1.0)[:, None]
    return most * tl.sqrt(tl.sum(part * part, 1)) * 1.0001


@triton.jit
def product(latent, codes, scale, v, V, mine, z_at, stride_c, BITS: tl.constexpr, R: tl.constexpr):
    """z·ŵ_v [BLOCK_M,BLOCK_V] in fp32."""
    inside = v < V
    far = v.to(tl.int64)[None, :] * stride_c
    if BITS == 4:
        r = tl.arange(0, R // 2)
        both = tl.load(codes + far + r[:, None], mask=inside[None, :], other=0).to(tl.int32)
        z = tl.load(latent + z_at[:, None] + r[None, :], mask=mine[:, None], other=0)
        found = dot(z, ((both & 15) - 8).to(z.dtype))
        z = tl.load(latent + z_at[:, None] + R // 2 + r[None, :], mask=mine[:, None], other=0)
        found += dot(z, ((both >> 4) - 8).to(z.dtype))
    else:
        r = tl.arange(0, R)
        z = tl.load(latent + z_at[:, None] + r[None, :], mask=mine[:, None], other=0)
        found = dot(z, tl.load(codes + far + r[:, None], mask=inside[None, :], other=0).to(z.dtype))
    if BITS < 16:
        found = found * tl.load(scale + v, mask=inside, other=0.0)[None, :]
    return found


@triton.jit
def screen_kernel(
    base,
    latent,
    codes,
    scale,
    error,
    norm,
    tile_norm,
    ids,
    address,
    active,
    upper,
    floor,
    counts,
    V,
    rows,
    slots,
    first,
    base_n,
    base_g,
    base_v,
    latent_n,
    latent_g,
    stride_c,
    times,
    gamma,
    BITS: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    DRAWN: tl.constexpr,
    SKIP: tl.constexpr,
    COUNTED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """upper [rows,tiles]: nothing of the tile lies above; floor [N,G], keys: something of the row lies at or above."""
    n, g, mine = own_rows(active, rows, slots, first, BLOCK_M, MASKED)
    if tl.max(mine.to(tl.int32), 0) == 0:
        return
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    z_at = n * latent_n + g * latent_g
    z = tl.load(latent + z_at[:, None] + tl.arange(0, R)[None, :], mask=mine[:, None], other=0)
    size = length(z)
    starts = base + n * base_n + g.to(tl.int64) * base_g
    if DRAWN:
        key = tl.load(address + 2 * n, mask=mine, other=0).to(tl.uint32)
        high = (tl.load(address + 2 * n + 1, mask=mine, other=0) + g).to(tl.uint32)
    best = tl.full([BLOCK_M], -INFINITE, tl.float32)
    skipped = tl.full([], 0, tl.int64)
    for tile in tl.range(tl.program_id(1), tl.cdiv(V, BLOCK_V), tl.num_programs(1), num_stages=STAGES):
        v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = v < V
        live = mine[:, None] & inside[None, :]
        s = tl.load(starts[:, None] + v.to(tl.int64)[None, :] * base_v, mask=live, other=-INFINITE).to(tl.float32)
        read = True
        if SKIP:
            most = tl.max(tl.where(s != s, INFINITE, s), 1)
            reach = (
                most + 1.001 * size * tl.load(tile_norm + tile) + 1e-6 * tl.where(most == -INFINITE, 0.0, tl.abs(most))
            )
            seen = tl.load(floor + n * slots + g, mask=mine, other=LOWEST, cache_modifier=".cg")
            reached = tl.maximum(best, tl.where(seen == LOWEST, -INFINITE, unpack_value(seen)))
            read = tl.max(((~(reach < reached)) & mine).to(tl.int32), 0) > 0
        top = tl.full([BLOCK_M], -INFINITE, tl.float32)
        if read:
            logits = s + product(latent, codes, scale, v, V, mine, z_at, stride_c, BITS, R)
            e = tl.load(error + v, mask=inside, other=0.0)[None, :]
            w = tl.load(norm + v, mask=inside, other=0.0)[None, :]
            # η of the product is γ; underflow takes no more than 1e-30
            spread = size[:, None] * ((1 + 2 * gamma) * e + 4 * gamma * w) + 1e-30
            spread = spread * 1.0001
            boundless = ~(size[:, None] * (w + e) < 1e36)
            if DRAWN:
                names = v
                if MAPPED:
                    names = tl.load(ids + v, mask=inside, other=0).to(tl.int32)
                noise = gumbel(key[:, None], names.to(tl.uint32)[None, :], high[:, None])
                logits = times * logits + noise
                spread = times * spread + 1.220703125e-04 + 9.5367431640625e-07 * tl.abs(logits)
            else:
                spread += 4.76837158203125e-07 * tl.abs(logits)
            # −inf is −inf in ℓ too; NaN and what has no bound is for the full arithmetic to judge
            odd = (logits != logits) | boundless | (logits == INFINITE)
            none = (logits == -INFINITE) & ~odd
            above = tl.where(none, -INFINITE, tl.where(odd, INFINITE, logits + spread))
            below = tl.where(none | odd, -INFINITE, logits - spread)
            top = tl.max(tl.where(live, above, -INFINITE), 1)
            found = tl.max(tl.where(live, below, -INFINITE), 1)
            best = tl.maximum(best, found)
            if SKIP:
                tl.atomic_max(floor + n * slots + g, pack(best, g * 0), mask=mine, sem="relaxed")
        else:
            skipped += 1
        tl.store(upper + row.to(tl.int64) * tl.cdiv(V, BLOCK_V) + tile, top, mask=mine)
    tl.atomic_max(floor + n * slots + g, pack(best, g * 0), mask=mine, sem="relaxed")
    if COUNTED:
        tl.atomic_add(counts, skipped, sem="relaxed")


@triton.jit
def recheck_kernel(
    base,
    latent,
    weight,
    ids,
    address,
    active,
    upper,
    floor,
    keys,
    counts,
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
    times,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES: tl.constexpr,
    MAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    DRAWN: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Grid (groups of rows, TILES tiles each): keys of the tiles whose upper bound reaches the floor, as argmax_kernel
    and sample_kernel make them: the same tile, the same product."""
    n, g, mine = own_rows(active, rows, slots, first, BLOCK_M, MASKED)
    if tl.max(mine.to(tl.int32), 0) == 0:
        return
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.arange(0, TILES)
    tile = tl.program_id(1) * TILES + at
    there = (tile < tl.cdiv(V, BLOCK_V))[:, None] & mine[None, :]
    bound = unpack_value(tl.load(floor + n * slots + g, mask=mine, other=LOWEST))
    own = upper + row.to(tl.int64)[None, :] * tl.cdiv(V, BLOCK_V)
    tops = tl.load(own + tile[:, None], mask=there, other=-INFINITE)
    need = tl.max((there & (tops >= bound[None, :])).to(tl.int32), 1)
    if tl.max(need, 0) == 0:
        return
    z = tl.load(latent + (n * latent_n + g * latent_g)[:, None] + tl.arange(0, R)[None, :], mask=mine[:, None], other=0)
    starts = base + n * base_n + g.to(tl.int64) * base_g
    if DRAWN:
        key = tl.load(address + 2 * n, mask=mine, other=0).to(tl.uint32)
        high = (tl.load(address + 2 * n + 1, mask=mine, other=0) + g).to(tl.uint32)
    for i in range(TILES):
        if tl.sum(tl.where(at == i, need, 0), 0) > 0:
            v = (tl.program_id(1) * TILES + i) * BLOCK_V + tl.arange(0, BLOCK_V)
            logits = tile_logits(starts, weight, z, v, mine, V, base_v, stride_w, R)
            names = v
            if MAPPED:
                names = tl.load(ids + v, mask=v < V, other=0).to(tl.int32)
            if DRAWN:
                logits = times * logits + gumbel(key[:, None], names.to(tl.uint32)[None, :], high[:, None])
            found = tl.max(tl.where((v < V)[None, :], pack(logits, names[None, :]), LOWEST), 1)
            tl.atomic_max(keys + n * slots + g, found, mask=mine, sem="relaxed")
    if COUNTED:
        tl.atomic_add(counts + 1, tl.sum(need, 0).to(tl.int64), sem="relaxed")
