"""What the readouts share: a row's answer as one key, checked arguments, and their logits a few at a time on a CPU.

A key is an int64, so that maxima of tiles combine by an integer maximum and the next kernel reads one number: high word
the fp32 value as an integer of the same order (NaN −2³¹, below −inf), low word 2³¹ − 1 − id.
"""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

RUN = 512  # ids of a short product; ids whose maximum is taken first
UNSET = -(2**63)  # a key that no row has: below all, names the impossible id 2³¹ − 1
_LAST_ID, _NAN = 2**31 - 1, -(2**31)


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
