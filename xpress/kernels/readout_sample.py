"""Sampling by the same readout: argmax of ℓ/T + Γ, and what verification needs to know of the row it was drawn from.

Γ is xpress.sampling's Gumbel noise, computed where it is used from the address (seed, round, slot, original id) and
never stored: the same words whatever the tile, the pass or the rows that are left out. Everything returned is of the
tempered logits ℓ/T: q of the token is exp(logit − lse), and `q_row` gives a whole row from the base row and the latent
that drew it. top-k and top-p need a sorted row and are not offered here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from xpress.kernels.readout_argmax import launch, on_device
from xpress.kernels.rows import UNSET, Rows, best_keys, pack, unpack
from xpress.sampling import MAX_SLOTS, argmax, gumbel_of, philox


class Drawn(NamedTuple):
    """ids [N,G]; logit [N,G]: ℓ/T of the token; lse [N,G]: log Σ_v exp(ℓ_v/T). All of fp32 but the ids."""

    ids: Tensor
    logit: Tensor
    lse: Tensor


def empty(N: int, G: int, device=None) -> tuple[Tensor, Tensor, Tensor]:
    """(keys, logit, lse) buffers [N,G] that readout_sample fills and leaves alone where rows are left out."""
    keys = torch.full((N, G), UNSET, dtype=torch.long, device=device)
    return keys, torch.full((N, G), float("nan"), device=device), torch.full((N, G), float("nan"), device=device)


def _checked(base, latent, weight, ids, address, temperature, first_row, active, state):
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature={temperature}: sampling needs a finite one above 0")
    if base.dim() != 3:
        raise ValueError(f"base {tuple(base.shape)}: sampling wants blocks [N,G,V], noise is addressed by slot")
    if address.shape != (len(base), 2) or address.dtype != torch.long:
        raise ValueError(f"address {tuple(address.shape)} {address.dtype}: want int64 [{len(base)},2], Noise.address")
    if base.shape[1] > MAX_SLOTS:
        raise ValueError(f"blocks of more than {MAX_SLOTS} slots cannot be sampled")
    if state is None and (first_row or active is not None):
        raise ValueError("rows can be left out only with state=: they keep the draw that stands there")
    state = state or empty(*base.shape[:2], device=base.device)
    return Rows(base, latent, weight, ids, first_row, active, state[0]), state


@torch.no_grad()
def readout_sample_ref(
    base: Tensor,
    latent: Tensor,
    weight: Tensor,
    ids: Tensor | None = None,
    *,
    address: Tensor,
    temperature: float = 1.0,
    first_row: int = 0,
    active: Tensor | None = None,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
    packed: bool = False,
    tile: int | None = None,
) -> Drawn:
    """One draw a row from softmax(ℓ/T): base [N,G,V], latent [N,G,R], weight [V,R], ids [V] as in readout_argmax.

    address [N,2] (int64): xpress.sampling's Noise.address. state: (keys, logit, lse) of `empty`; rows before
    `first_row` and blocks with active = 0 keep what stands there. packed=True: keys in the place of ids. NaN never
    wins; lse is NaN in a row that holds one. Raises ValueError for arguments that do not fit.
    """
    rows, (keys, logit, lse) = _checked(base, latent, weight, ids, address, temperature, first_row, active, state)
    open_, slots = rows.open(), torch.arange(first_row, rows.G, device=base.device)
    key, high = address[open_, 0, None, None], address[open_, 1, None, None] + slots[:, None]
    best, chosen, total = torch.full_like(keys[open_, first_row:], UNSET), None, None
    ascending = rows.ascending()
    for start, logits in rows.chunks():
        logits = logits / temperature
        names = rows.names(start, start + logits.shape[-1])
        noise = gumbel_of(philox(key, names, high)[0])
        found, at = _best(logits + noise, names, ascending)
        value, more = logits.gather(-1, at)[..., 0], logits.logsumexp(-1)
        chosen = value if chosen is None else torch.where(found > best, value, chosen)
        best, total = torch.maximum(best, found), more if total is None else torch.logaddexp(total, more)
    for out, new in zip((keys, logit, lse), (best, chosen, total)):
        out[open_, first_row:] = new.to(out.dtype)
    return Drawn(keys if packed else unpack(keys), logit, lse)


def _best(perturbed: Tensor, names: Tensor, ascending: bool) -> tuple[Tensor, Tensor]:
    """ℓ/T + Γ [...,V] -> the best key of each row and its place [...,1]. Only winners are packed where that is safe."""
    if ascending and not perturbed.is_cuda:
        at = argmax(perturbed)[..., None]
        top = perturbed.gather(-1, at)[..., 0]
        if not top.isnan().any():
            return pack(top, names[at[..., 0]]), at
    found = best_keys(perturbed, names)
    return found, (names == unpack(found)[..., None]).int().argmax(-1, keepdim=True)


def readout_sample(
    base: Tensor,
    latent: Tensor,
    weight: Tensor,
    ids: Tensor | None = None,
    *,
    address: Tensor,
    temperature: float = 1.0,
    first_row: int = 0,
    active: Tensor | None = None,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
    packed: bool = False,
    tile: int | None = None,
) -> Drawn:
    """The same on a GPU: partial answers of each program, then one small kernel that combines them in a fixed order."""
    rows, (keys, logit, lse) = _checked(base, latent, weight, ids, address, temperature, first_row, active, state)
    count = rows.N * (rows.G - first_row)
    if count:
        from xpress.kernels.readout_tiles import combine_kernel, sample_kernel

        arguments, shape = launch(rows, count, tile)
        grid = shape.pop("grid")
        parts = keys.new_empty(grid[1], count), *logit.new_empty(2, grid[1], count)
        flags = rows.active if rows.active is not None else keys
        with on_device(base):
            sample_kernel[grid](
                *arguments[:3],
                rows.ids if rows.ids is not None else keys,
                address.contiguous(),
                flags,
                *parts,
                *arguments[3:],
                1 / temperature,
                **shape,
            )
            combine_kernel[(count,)](
                *parts,
                flags,
                *(keys, logit, lse),
                *(count, rows.G, first_row, grid[1]),
                PROGRAMS=1 << (grid[1] - 1).bit_length(),
                MASKED=shape["MASKED"],
                num_warps=1,
                enable_fp_fusion=False,
            )
    return Drawn(keys if packed else unpack(keys), logit, lse)


@torch.no_grad()
def q_row_ref(base: Tensor, latent: Tensor, weight: Tensor) -> Tensor:
    """ℓ in fp32 of single rows, in kernel order: base [V] or [rows,V], latent [R] or [rows,R] -> as base.

    softmax(q_row(…)/T) is the q that a token was drawn from, given the latent of the pass that drew it."""
    one = base.dim() == 1
    rows = Rows(base[None] if one else base, latent[None] if one else latent, weight, None, 0, None, None)
    logits = torch.cat([logits.clone() for _, logits in rows.chunks()], -1)[0]
    return logits[0] if one else logits


def q_row(base: Tensor, latent: Tensor, weight: Tensor) -> Tensor:
    """The same on a GPU, by the sums that readout_sample compares."""
    from xpress.kernels.readout_tiles import logits_kernel

    one = base.dim() == 1
    rows = Rows(base[None] if one else base, latent[None] if one else latent, weight, None, 0, None, None)
    (base, latent, weight, *_), shape = launch(rows, rows.G)
    out = torch.empty(rows.G, rows.V, dtype=torch.float32, device=base.device)
    if rows.G:
        with on_device(base):
            logits_kernel[shape["grid"]](
                *(base, latent, weight, out, rows.V, rows.G),
                *(base.stride(1), base.stride(2), latent.stride(1), weight.stride(0)),
                **{
                    name: shape[name] for name in ("R", "BLOCK_M", "BLOCK_V", "STAGES", "num_warps", "enable_fp_fusion")
                },
            )
    return out[0] if one else out
