"""argmax over the vocabulary of base + z·Wᵀ, without writing the logits: the reference and the Triton kernel.

What "the argmax" means: ℓ = float32(base) + z·w summed in fp32, not rounded before the comparison (fp64 inputs are
compared in fp64 by the reference where the ids are in order); the lowest original id on equality; −0 = +0; NaN never
wins, not even against −inf. In a row of NaN only no id wins: it gets the lowest original id, and `values(keys)` is NaN
there and nowhere else.

A row's answer is one int64 key, so that maxima of tiles combine by an integer maximum and the next kernel reads one
number: high word the fp32 value as an integer of the same order (NaN −2³¹, below −inf), low word 2³¹ − 1 − id.

Rounding: two ways of summing z·w differ by at most 2γ·Σ|z_r·w_r| with γ = (R + 2)u/(1 − (R + 2)u), u = 2⁻²⁴, plus
u·|ℓ| of the final sum. Two implementations may name different ids only where both logits lie within that.

Time on a GPU, a prediction: the readout is read once, V·R·2 bytes in bf16 (78 MB at V 151936, R 256: 18 µs at
4.3 TB/s), base rows once (4.6 MB, 1 µs), nothing else that grows with V. Products are 1.2 Gflop for 15 rows, far from
the limit. So programs tile V alone, all rows of a block together, and each keeps STAGES tiles of 32 KB under way.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cache, reduce

import torch
from torch import Tensor

RUN, SMALL = 512, 2**17  # ids whose maximum is taken first; logits that are not worth it
UNSET = -(2**63)  # a key that no row has: below all, names the impossible id 2³¹ − 1
_LAST_ID, _NAN = 2**31 - 1, -(2**31)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def pack(values: Tensor, ids: Tensor) -> Tensor:
    """Values (read as fp32) and ids (int64, below 2³¹) -> keys, any shape."""
    values = values.float()
    bits = values.where(values != 0, values.new_zeros(())).view(torch.int32).long()
    order = torch.where(values.isnan(), _NAN, bits ^ ((bits >> 31) & _LAST_ID))
    return (order << 32) | (_LAST_ID - ids)


def unpack(keys: Tensor) -> Tensor:
    """Keys -> ids (int64)."""
    return _LAST_ID - (keys & _LAST_ID)


def values(keys: Tensor) -> Tensor:
    """Keys -> the winning logits (fp32), NaN where the row held nothing but NaN."""
    order = keys >> 32
    bits = (order ^ ((order >> 31) & _LAST_ID)).int().view(torch.float32)
    return bits.masked_fill(order == _NAN, float("nan"))


class Rows:
    """The checked arguments of a readout as blocks: base [N,G,V], latent [N,G,R]; two dimensions are one block."""

    def __init__(self, base, latent, weight, ids, first_row, active, keys):
        if base.dim() == 2:
            base, latent = base[None], latent[None]
            keys = None if keys is None else keys[None]
        shape = base.shape
        if len(shape) != 3 or latent.shape != (*shape[:2], *weight.shape[1:]) or weight.shape[:1] != shape[2:]:
            raise ValueError(
                f"base {tuple(base.shape)}, latent {tuple(latent.shape)}, weight {tuple(weight.shape)}: "
                "want [N,G,V], [N,G,R] and [V,R]"
            )
        N, G, V = shape
        if not 0 < V < 2**31:
            raise ValueError(f"a vocabulary of {V} ids: ids must fit 31 bits and there must be one")
        if ids is not None and (ids.shape != (V,) or ids.dtype != torch.long):
            raise ValueError(f"ids {tuple(ids.shape)} {ids.dtype}: want one int64 original id for each of {V} rows")
        if not 0 <= first_row <= G:
            raise ValueError(f"first_row={first_row}: rows run from 0 to {G}")
        if keys is None and (first_row or active is not None):
            raise ValueError("rows can be left out only with keys=: they keep the token that stands there")
        if keys is not None and (keys.shape != (N, G) or keys.dtype != torch.long or not keys.is_contiguous()):
            raise ValueError(f"keys {tuple(keys.shape)} {keys.dtype}: want contiguous int64 [{N},{G}]")
        if active is not None and active.shape != (N,):
            raise ValueError(f"active {tuple(active.shape)}: want one flag for each of {N} blocks")
        if torch.is_grad_enabled():  # detached, not under no_grad, which is dearer than a small product's other parts
            base, latent, weight = (x.detach() if x.requires_grad else x for x in (base, latent, weight))
        self.base, self.latent, self.weight, self.ids = base, latent, weight, ids
        self.first, self.active, self._keys = first_row, active, keys
        self.N, self.G, self.V, self.R = N, G, V, weight.shape[1]
        kinds = {base.dtype, latent.dtype, weight.dtype, torch.float32}
        self.dtype = torch.float32 if len(kinds) == 1 else reduce(torch.promote_types, kinds)
        self.wide = weight.dtype != self.dtype

    @property
    def keys(self) -> Tensor:
        """[N,G]: the caller's, or new ones, made when they are asked for."""
        if self._keys is None:
            self._keys = self.base.new_full((self.N, self.G), UNSET, dtype=torch.long)
        return self._keys

    def pieces(self, rows: int) -> tuple[int, int]:
        """(ids of a product, products of one call) for so many rows.

        One product, but for a few rows of a high rank: there BLAS packs operands that it reads hardly more than once,
        and a batch of short products, which it does not pack, takes half the time. The logits of a call have a fixed
        bound, so no memory grows with V; so has the copy of a readout that must be widened first.
        """
        room = 2**20 // max(1, rows)
        if self.wide:
            room = min(room, 2**19 // max(1, self.R))
        few = self.R > 64 and 1 < rows <= 10
        if few and self.V >= RUN:
            return RUN, max(1, min(room, self.V) // RUN)
        return (self.V if self.V <= room else max(RUN, room // RUN * RUN)), 1

    def runs(self, only=None):
        """Yields (first id, ℓ of the open blocks), each time in the same memory: of consecutive ids [n,G−first,c], or
        of k times RUN consecutive ids [k,n,G−first,RUN]. only: places whose logits are wanted, by the same calls as if
        all were, so that their sums are the same to the bit."""
        latent = self.cut(self.latent)
        latent = (latent if latent.dtype == self.dtype else latent.to(self.dtype)).contiguous()
        n, g, R = latent.shape
        rows = n * g
        size, count = self.pieces(rows)
        memory, stop = None, 0
        wide = self.weight.new_empty(size * count, R, dtype=self.dtype) if self.wide else None
        while stop < self.V:
            start, left = stop, self.V - stop
            k, c = min(count, max(1, left // size)), min(size, left)
            stop = start + k * c
            if only is not None and not any(start <= place < stop for place in only):
                continue
            part, base, out = self.weight, self.base, None
            if k * c < self.V:  # a small readout is one call, and each operation that it does without shows
                part, base = part[start:stop], base[..., start:stop]
                memory = latent.new_empty(rows * size * count) if memory is None else memory
                out = memory[: rows * k * c].view(k, rows, c)
            part, base = part if wide is None else wide[: k * c].copy_(part), self.cut(base)
            if k > 1:
                many = latent.view(rows, R).expand(k, rows, R)
                logits = torch.bmm(many, part.view(k, c, R).mT, out=out).view(k, n, g, c)
                base = base.unflatten(-1, (k, c)).permute(2, 0, 1, 3)
            elif out is None:
                logits = torch.matmul(latent, part.T)  # one product of all blocks, because latent is contiguous
            else:
                logits = torch.mm(latent.view(rows, R), part.T, out=out[0]).view(n, g, c)
            yield start, logits.add_(base)

    def chunks(self, only=None):
        """Yields (first id, ℓ [n,G−first,·]), a copy of what `runs` yields in the order of ids, no more at a time than
        leaves room in the cache for what is computed of it."""
        for start, logits in self.runs(only):
            *k, n, g, c = logits.shape
            width = max(1, 2**15 // max(1, n * g * RUN)) * RUN
            for at in range(0, math.prod(k) * c, width):
                if k:
                    yield start + at, logits[at // c : (at + width) // c].permute(1, 2, 0, 3).flatten(2)
                else:
                    yield start + at, logits[..., at : at + width].clone()

    def cut(self, tensor: Tensor) -> Tensor:
        """The rows of [N,G,·] that are to be computed: of the open blocks, from the first on."""
        open_ = self.open()
        return tensor if not self.first and isinstance(open_, slice) else tensor[open_, self.first :]

    def open(self):
        """Index of the blocks that are still open: where all are, a slice, which copies nothing."""
        if self.active is None or not self.base.is_cuda and bool(self.active.all()):
            return slice(None)
        return self.active.bool()

    def ascending(self) -> bool:
        """Whether the rows of the readout are in the order of ids, so that the first of equals has the lowest."""
        return self.ids is None or bool((self.ids[1:] > self.ids[:-1]).all())

    def names(self, start: int, stop: int) -> Tensor:
        """Original ids of kernel rows."""
        return torch.arange(start, stop, device=self.base.device) if self.ids is None else self.ids[start:stop]


def best_keys(logits: Tensor, names: Tensor) -> Tensor:
    """ℓ [...,V], original ids [V] -> keys [...] by the rule, with no care for speed."""
    bad = logits.isnan()
    top = logits.masked_fill(bad, float("-inf")).amax(-1, keepdim=True)
    wins = (logits == top) | bad.all(-1, keepdim=True)  # −inf may be the maximum: NaN is not equal to it
    ids = names.where(wins, _LAST_ID).amin(-1)
    return pack(top[..., 0].masked_fill(bad.all(-1), float("nan")), ids)


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
