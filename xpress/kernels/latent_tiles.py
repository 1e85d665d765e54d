"""Triton code of the refiner's latents: loaded on first use, by the launcher in refiner_latent.py."""

from __future__ import annotations

import triton
import triton.language as tl

from xpress.kernels.readout_tiles import LOWEST, dot, narrow, unpack_ids


@triton.jit
def token(value, PACKED: tl.constexpr):
    """Target id of what the draft holds, keys or ids."""
    if PACKED:
        value = unpack_ids(value).to(tl.int64)
    return value


@triton.jit
def mixed(constant, table, mix, draft, n, G, c_n, c_b, t_v, m_c, m_k, m_j, R: tl.constexpr, ROWS: tl.constexpr,
          KNOWN: tl.constexpr, PACKED: tl.constexpr, MIXER: tl.constexpr):  # fmt: skip
    """u [ROWS,R] in fp32 of the slots that are read out: C + Σ_j M[:,k,j]·E[prev_j] over the slots that hold drafts."""
    g = tl.arange(0, ROWS)
    c = tl.arange(0, R)
    slot = KNOWN - 1 + g
    u = tl.load(constant + n * c_n + slot[:, None] * c_b + c[None, :], mask=(g < G)[:, None], other=0.0).to(tl.float32)
    if MIXER:
        for j in tl.range(KNOWN, KNOWN - 1 + G, loop_unroll_factor=4):
            e = tl.load(table + token(tl.load(draft + n * G + j - KNOWN), PACKED) * t_v + c).to(tl.float32)
            later = (slot >= j) & (g < G)
            m = tl.load(mix + (slot * m_k + j * m_j)[:, None] + (c * m_c)[None, :], mask=later[:, None], other=0.0)
            u += m.to(tl.float32) * e[None, :]
    else:
        drafted = (g > 0) & (g < G)
        ids = token(tl.load(draft + n * G + g - 1, mask=drafted, other=0), PACKED)
        u += tl.load(table + (ids * t_v)[:, None] + c[None, :], mask=drafted[:, None], other=0.0).to(tl.float32)
    return u


@triton.jit
def latent_kernel(
    constant,
    table,
    mix,
    gate,
    up,
    down,
    draft,
    out,
    partial,
    arrived,
    next_keys,
    active,
    passes,
    G,
    first,
    c_n,
    c_b,
    t_v,
    m_c,
    m_k,
    m_j,
    gate_h,
    up_h,
    down_r,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    KNOWN: tl.constexpr,
    PACKED: tl.constexpr,
    MIXER: tl.constexpr,
    MLP: tl.constexpr,
    PREPARE: tl.constexpr,
    MASKED: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """z of one block, CHUNK hidden units of the MLP a program: grid (chunks, N).

    The program that arrives last adds the partial sums in the order of the chunks, so the result does not depend on
    which one that was, and no second launch is needed. By then every other program has read next_keys, so it is also
    the one that may overwrite them.
    """
    n = tl.program_id(1).to(tl.int64)
    g = tl.arange(0, ROWS)
    c = tl.arange(0, R)
    row = n * G + g
    if MASKED:
        if tl.load(active + n) == 0:
            return
        if PREPARE:  # next_keys still hold the pass before the last: the same ids twice, and nothing will change again
            last = unpack_ids(tl.load(draft + row, mask=g < G, other=0))
            moved = last != unpack_ids(tl.load(next_keys + row, mask=g < G, other=0))
            if tl.max(moved.to(tl.int32), 0) == 0:
                tl.store(active + n, 0)
                return
    u = mixed(constant, table, mix, draft, n, G, c_n, c_b, t_v, m_c, m_k, m_j, R, ROWS, KNOWN, PACKED, MIXER)
    z = u
    finish = True
    if MLP:
        x = narrow(u, gate.dtype.element_ty)
        part = tl.zeros([ROWS, R], tl.float32)
        for start in tl.range(0, CHUNK, STEP):  # a few units at a time: all at once would spill registers
            h = tl.program_id(0) * CHUNK + start + tl.arange(0, STEP)
            a = dot(x, tl.load(gate + h[None, :] * gate_h + c[:, None]))
            b = dot(x, tl.load(up + h[None, :] * up_h + c[:, None]))
            hidden = narrow(a / (1 + tl.exp(-a)) * b, gate.dtype.element_ty)
            part += dot(hidden, tl.load(down + c[None, :] * down_r + h[:, None]))
        chunks = tl.num_programs(0)
        own = partial + n * chunks * ROWS * R + (g[:, None] * R + c[None, :])
        tl.store(own + tl.program_id(0) * ROWS * R, part)
        tl.debug_barrier()  # all of this program's sums are written before its arrival is announced
        finish = tl.atomic_add(arrived + n, 1, sem="acq_rel") == chunks - 1
        if finish:
            for chunk in tl.range(0, chunks):
                z += tl.load(own + chunk * ROWS * R, cache_modifier=".cg")
            tl.store(arrived + n, 0)
    if finish:
        new = (g >= first) & (g < G)
        tl.store(out + row[:, None] * R + c[None, :], narrow(z, out.dtype.element_ty), mask=new[:, None])
        if PREPARE:
            kept = tl.load(draft + row, mask=g < first, other=LOWEST)
            tl.store(next_keys + row, kept, mask=g < G)
        if COUNTED:
            tl.store(passes + n, tl.load(passes + n) + 1)
