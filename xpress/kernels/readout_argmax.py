"""argmax over the vocabulary of base + z·Wᵀ, without writing the logits: the reference and the Triton kernel.

What "the argmax" means: ℓ = float32(base) + z·w summed in fp32, not rounded before the comparison (fp64 inputs are
compared in fp64 by the reference where the ids are in order); the lowest original id on equality; −0 = +0; NaN never
wins, not even against −inf. In a row of NaN only no id wins: it gets the lowest original id, and `values(keys)` is NaN
there and nowhere else.

Rounding: two ways of summing z·w differ by at most 2γ·Σ|z_r·w_r| with γ = (R + 2)u/(1 − (R + 2)u), u = 2⁻²⁴, plus
u·|ℓ| of the final sum. Two implementations may name different ids only where both logits lie within that.

Time on a GPU, a prediction: the readout is read once, V·R·2 bytes in bf16 (78 MB at V 151936, R 256: 18 µs at
4.3 TB/s), base rows once (4.6 MB, 1 µs), nothing else that grows with V. Products are 1.2 Gflop for 15 rows, far from
the limit. So programs tile V alone, all rows of a block together, and each keeps STAGES tiles of 32 KB under way.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor

from xpress.kernels.rows import RUN, UNSET, Rows, best_keys, pack, unpack

SMALL = 2**17  # logits that are not worth taking the maxima of runs first
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def readout_argmax_ref(
    base: Tensor,
    latent: Tensor,
    weight: Tensor,
    ids: Tensor | None = None,
    *,
    first_row: int = 0,
    active: Tensor | None = None,
    keys: Tensor | None = None,
    reset: bool = True,
    packed: bool = False,
    tile: int | None = None,
) -> Tensor:
    """Token ids [N,G] of argmax over v of float32(base) + latent·weight[v].

    base [N,G,V] (any strides), latent [N,G,R], weight [V,R]; or [rows,V] and [rows,R] -> [rows]. ids [V]: original id
    of each row of `weight`, where the rows are stored in another order or belong to a reduced vocabulary; distinct.
    Rows before `first_row` and blocks with active [N] = 0 are not computed: they keep what stands in `keys` [N,G],
    which takes the packed answers of the others (None: a new tensor). packed=True returns keys, not ids. `reset` and
    `tile` matter to the kernel alone. Raises ValueError for shapes that do not fit.
    """
    rows = Rows(base, latent, weight, ids, first_row, active, keys)
    top, found = _quick(rows) if rows.ascending() and not base.is_cuda else (None, None)
    if found is None:
        _put(rows, _careful(rows))
    elif keys is None and not packed:
        return found if base.dim() == 3 else found[0]
    else:
        _put(rows, pack(top, found))
    return _answer(rows, base.dim(), packed)


def _quick(rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Best values and ids of the open rows, the rows of the readout being in order of ids; no ids if there is NaN."""
    tops, places = [], []
    for start, logits in rows.runs():
        cut = logits.shape[-1] % RUN if logits.numel() > SMALL and logits.shape[-1] > RUN else 0
        for part in (logits[..., :-cut], logits[..., -cut:]) if cut else (logits,):
            top, place = _best(part)
            tops.append(top)
            places.append(place + start if start else place)
            start += part.shape[-1]
    if len(tops) > 1:
        tops, places = torch.stack(tops), torch.stack(places)
        part = tops.argmax(0, keepdim=True)
        top, place = tops.gather(0, part)[0], places.gather(0, part)[0]
    if any(value != value for row in top.tolist() for value in row):
        return top, None
    return top, place if rows.ids is None else rows.ids[place]


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """ℓ as `Rows.runs` gives it, few or whole RUNs -> the largest [n,g], or NaN where there is one, its first place.

    max and argmax promise both on the CPU, but are scalar code: many logits are first reduced to the maxima of runs.
    """
    *k, n, g, c = logits.shape
    if logits.numel() <= SMALL or c % RUN:
        top, place = logits.max(-1)
        if k:
            top, run = top.max(0)
            place = place.gather(0, run[None])[0].add_(run, alpha=c)
        return top, place
    parts = logits.view(*k, n * g, c) if k else logits.flatten(0, 1).unflatten(-1, (-1, RUN))
    run, row = parts.amax(-1).argmax(0 if k else 1), torch.arange(n * g)
    top, place = parts[(run, row) if k else (row, run)].max(-1)
    return top.view(n, g), place.add_(run, alpha=RUN).view(n, g)


def _careful(rows: Rows) -> Tensor:
    """Keys of the open rows where anything may happen: ids in any order, NaN."""
    keys = [best_keys(logits, rows.names(start, start + logits.shape[-1])) for start, logits in rows.chunks()]
    return torch.stack(keys).amax(0)


def _put(rows: Rows, keys: Tensor):
    """Packed answers of the open rows into rows.keys."""
    rows.keys[rows.open(), rows.first :] = keys


def _answer(rows: Rows, dims: int, packed: bool) -> Tensor:
    keys = rows.keys if dims == 3 else rows.keys[0]
    return keys if packed else unpack(keys)


def readout_argmax(
    base: Tensor,
    latent: Tensor,
    weight: Tensor,
    ids: Tensor | None = None,
    *,
    first_row: int = 0,
    active: Tensor | None = None,
    keys: Tensor | None = None,
    reset: bool = True,
    packed: bool = False,
    tile: int | None = None,
) -> Tensor:
    """The same on a GPU. reset=False: `keys` of the rows to compute already hold UNSET (refiner_latent can see to it);
    that and packed=True save launches in a graph. tile: ids that a program reads at a time (None: chosen by size)."""
    rows = Rows(base, latent, weight, ids, first_row, active, keys)
    if keys is not None and reset:
        kept = torch.full_like(rows.keys[:, first_row:], UNSET)
        if active is not None:
            kept = torch.where(active.bool()[:, None], kept, rows.keys[:, first_row:])
        rows.keys[:, first_row:] = kept
    count = rows.N * (rows.G - first_row)
    if count:
        from xpress.kernels.readout_tiles import argmax_kernel

        arguments, shape = launch(rows, count, tile)
        with on_device(base):
            argmax_kernel[shape.pop("grid")](
                *arguments[:3],
                rows.ids if rows.ids is not None else rows.keys,
                rows.keys,
                rows.active if rows.active is not None else rows.keys,
                *arguments[3:],
                **shape,
            )
    return _answer(rows, base.dim(), packed)


def fits(base: Tensor, weight: Tensor) -> bool:
    """Can the kernels work on a readout like this one, and on these base logits or ids?"""
    R, kinds = weight.shape[1], {weight.dtype, base.dtype} - {torch.long}
    return 16 <= R <= 256 and R & (R - 1) == 0 and weight.stride(1) == 1 and kinds <= set(_FLOATS)


def launch(rows: Rows, count: int, tile: int | None = None) -> tuple[list, dict]:
    """Checked rows -> (base, latent, weight, sizes and strides; grid and compile-time settings) of the tile kernels."""
    weight, base = rows.weight, rows.base
    R = rows.R
    if R & (R - 1) or not 16 <= R <= 256 or weight.stride(1) != 1:
        raise ValueError(f"rank R = {R}, stride {weight.stride(1)}: the kernels take a power of two, 16 to 256, packed")
    kinds = base.dtype, rows.latent.dtype, weight.dtype
    if not set(kinds) <= set(_FLOATS):
        raise ValueError(f"base, latent, weight of {kinds}: the kernels take {_FLOATS}")
    latent = rows.latent.to(torch.promote_types(rows.latent.dtype, weight.dtype))
    latent = latent if latent.stride(2) == 1 else latent.contiguous()
    half = latent.element_size() == 2
    # 32 KB of the readout a stage, and no more logits a thread than its registers hold; fp32 has no matrix unit.
    block_m = 16 if count <= 16 or not half else 32 if count <= 32 else 64
    block_v = tile or min(2**15 // (R * latent.element_size()), 4096 // block_m if half else 64)
    tiles = -(-rows.V // block_v)
    settings = {
        "grid": (-(-count // block_m), min(tiles, programs(base.device, block_m))),
        **{"R": R, "BLOCK_M": block_m, "BLOCK_V": block_v, "STAGES": 3, "num_warps": 4},
        "enable_fp_fusion": False,  # ℓ/T is rounded before Γ is added, as in the reference; products are fused anyway
        **{"MAPPED": rows.ids is not None, "MASKED": rows.active is not None},
    }
    sizes = [rows.V, count, rows.G, rows.first, *base.stride(), *latent.stride()[:2], weight.stride(0)]
    return [base, latent, weight, *sizes], settings


@cache
def programs(device: torch.device, block_m: int = 16) -> int:
    """Programs that fill the device: with 16 rows two fit on one multiprocessor (3 stages of 32 KB and the latents).
    Under the interpreter a few, so that their answers have to be combined."""
    if device.type != "cuda":
        return 3
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return count * (2 if block_m <= 16 else 1)


def on_device(tensor: Tensor):
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
