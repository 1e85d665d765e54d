"""The refiner's latents in the folded form, from draft tokens to z: the reference and the Triton kernel.

u = C + M·E[prev],  z = u + W_down( silu(W_gate u) ⊙ W_up u )

C [N,B,R] is everything that no pass changes: mixed hidden map, summary and known tokens. What is left of a pass is a
gather of G − 1 rows of E, a causal sum over slots in each channel, and the MLP. Rounding is the same in both: u and
the sums are fp32, the factors of each product are in the MLP's dtype (u and the gated units are rounded to it), z is
rounded once, to `out`'s dtype.

On a GPU the MLP's hidden units are split over 8 programs a block, one launch. Time, a prediction for R 256, B 16, bf16:
each program reads at most 131 KB of the mixer and 96 KB of the MLP from the L2 cache, which stays warm between passes,
and the last one adds 8 × 16 KB of partial sums: 3 to 5 µs in all, most of it latency.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from xpress.kernels.readout_argmax import on_device
from xpress.kernels.rows import UNSET, unpack
from xpress.sampling import at_least_fp32


class Folded(NamedTuple):
    """E [V,R]; M = I + tril L [R,B,B] or None (no mixer); gate, up [H,R], down [R,H] or None (no MLP)."""

    table: Tensor
    mix: Tensor | None = None
    gate: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None


@torch.no_grad()
def refiner_latent_ref(
    constant: Tensor,
    folded: Folded,
    draft: Tensor,
    num_known: int,
    *,
    first_row: int = 0,
    active: Tensor | None = None,
    out: Tensor | None = None,
    packed: bool = False,
    next_keys: Tensor | None = None,
    passes: Tensor | None = None,
    scratch: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Draft tokens [N,G] (target ids, or with packed=True the keys of readout_argmax) -> z [N,G,R] of the slots that
    are read out, in the dtype of `out`, else of the readout side of the head (the table's).

    constant [N,B,R]: C of `FoldedRefiner.constant`; num_known: the layout's, slot num_known − 1 + k belongs to draft
    token k (0-based). Rows before `first_row` and blocks with active [N] (int32) = 0 are not computed, their rows of
    `out` [N,G,R] stay as they are.

    next_keys [N,G]: the buffer that this pass's readout fills, made ready here: UNSET, and below first_row the keys of
    the draft. If `active` is given too, next_keys must hold the keys of the pass before the last (UNSET before the
    first): a block whose ids did not change between the two has settled, its active becomes 0 and nothing of it is
    touched; passes [N] (int32) counts the passes that were run. Needs packed=True. Raises ValueError for shapes that
    do not fit.
    """
    out = _checked(constant, folded, draft, num_known, first_row, active, out, packed, next_keys, passes)
    ids = unpack(draft) if packed else draft
    open_ = slice(None)  # copies nothing
    if active is not None:
        some = active.bool()
        if next_keys is not None:
            some &= (ids != unpack(next_keys)).any(1)
            active.copy_(some)
        if not some.all():
            open_ = some
            ids, constant = ids[open_], constant[open_]
    if next_keys is not None:
        next_keys[open_, :first_row] = draft[open_, :first_row]
        next_keys[open_, first_row:] = UNSET
    if passes is not None:
        passes[open_] += 1
    table, mix, gate, up, down = folded
    G, first = draft.shape[1], num_known - 1
    e = at_least_fp32(F.embedding(ids[:, : G - 1], table))  # the last token is before no slot that is read out
    u = at_least_fp32(constant[:, first + first_row : first + G])
    if mix is not None:
        m = at_least_fp32(mix[:, first + first_row : first + G, num_known : first + G])
        u = u + (m.permute(1, 2, 0) * e[:, None]).sum(2)  # channels lie next to each other: einsum would copy m
    else:
        u = u + F.pad(e, (0, 0, 1, 0))[:, first_row:]
    z = u
    if gate is not None:
        x = at_least_fp32(u.to(gate.dtype))
        hidden = F.silu(F.linear(x, at_least_fp32(gate))) * F.linear(x, at_least_fp32(up))
        z = u + F.linear(at_least_fp32(hidden.to(gate.dtype)), at_least_fp32(down))
    out[open_, first_row:] = z.to(out.dtype)
    return out


def refiner_latent(
    constant: Tensor,
    folded: Folded,
    draft: Tensor,
    num_known: int,
    *,
    first_row: int = 0,
    active: Tensor | None = None,
    out: Tensor | None = None,
    packed: bool = False,
    next_keys: Tensor | None = None,
    passes: Tensor | None = None,
    scratch: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The same on a GPU. scratch: what `scratch_for` made; a captured graph must own it."""
    from xpress.kernels.latent_tiles import latent_kernel

    out = _checked(constant, folded, draft, num_known, first_row, active, out, packed, next_keys, passes)
    table, mix, gate, up, down = folded
    (N, G), R = draft.shape, table.shape[1]
    if not N or not G:
        return out
    for name, tensor in zip(("constant", "table", "gate", "up", "down"), (constant, table, gate, up, down)):
        if tensor is not None and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} along its last dimension: pass it contiguous")
    if R & (R - 1) or not 16 <= R <= 256:
        raise ValueError(f"rank R = {R}: the kernel takes a power of two, 16 to 256")
    if not draft.is_contiguous() or not out.is_contiguous():
        raise ValueError("draft and out must be contiguous")
    if gate is not None and (gate.shape[0] != 2 * R or len({gate.dtype, up.dtype, down.dtype}) > 1):
        raise ValueError(f"an MLP of {gate.shape[0]} hidden units, {gate.dtype}: the kernel takes 2R, one dtype")
    chunks, rows = _chunks(R), 16 if G <= 16 else 32
    partial, arrived = scratch or scratch_for(N, G, R, draft.device)
    none = draft  # a pointer that is never read
    with on_device(draft):
        latent_kernel[(chunks if gate is not None else 1, N)](
            *(constant, table),
            *(none if tensor is None else tensor for tensor in (mix, gate, up, down)),
            *(draft, out, partial, arrived),
            *(none if tensor is None else tensor for tensor in (next_keys, active, passes)),
            *(G, first_row, *constant.stride()[:2], table.stride(0)),
            *((0, 0, 0) if mix is None else mix.stride()),
            *((0, 0, 0) if gate is None else (gate.stride(0), up.stride(0), down.stride(0))),
            R=R,
            ROWS=rows,
            CHUNK=2 * R // chunks,
            STEP=min(2 * R // chunks, 16 if table.dtype == torch.float32 else 32),
            KNOWN=num_known,
            PACKED=packed,
            MIXER=mix is not None,
            MLP=gate is not None,
            PREPARE=next_keys is not None,
            MASKED=active is not None,
            COUNTED=passes is not None,
            num_warps=8 if R >= 128 else 4,
            enable_fp_fusion=False,
        )
    return out


def scratch_for(N: int, G: int, R: int, device) -> tuple[Tensor, Tensor]:
    """Partial sums [N,chunks,rows,R] and arrival counts [N], zero between launches."""
    partial = torch.empty(N, _chunks(R), 16 if G <= 16 else 32, R, device=device)
    return partial, torch.zeros(N, dtype=torch.int32, device=device)


def _chunks(R: int) -> int:
    """Parts of the 2R hidden units, 16 at least for a matrix unit; the same for every N, so a block's sums never
    depend on its neighbours."""
    return min(8, 2 * R // 16)


def _checked(constant, folded, draft, num_known, first_row, active, out, packed, next_keys, passes) -> Tensor:
    (N, G), R, B = draft.shape, folded.table.shape[1], constant.shape[1]
    if constant.shape != (N, B, R) or not 0 < num_known <= B or num_known - 1 + G > B or B > 32:
        raise ValueError(
            f"constant {tuple(constant.shape)}, draft {tuple(draft.shape)}, num_known={num_known}: want C [{N},B,{R}] "
            "with a slot for each draft token and at most 32 slots"
        )
    if folded.mix is not None and folded.mix.shape != (R, B, B):
        raise ValueError(f"mix {tuple(folded.mix.shape)}: want [{R},{B},{B}]")
    if not 0 <= first_row <= G:
        raise ValueError(f"first_row={first_row}: rows run from 0 to {G}")
    if out is None and (first_row or active is not None):
        raise ValueError("rows can be left out only with out=: they keep the latent that stands there")
    if out is not None and out.shape != (N, G, R):
        raise ValueError(f"out {tuple(out.shape)}: want [{N},{G},{R}]")
    for name, tensor, shape, dtype in (
        ("draft", draft, (N, G), torch.long),
        ("next_keys", next_keys, (N, G), torch.long),
        ("active", active, (N,), torch.int32),
        ("passes", passes, (N,), torch.int32),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous()):
            raise ValueError(f"{name} {tuple(tensor.shape)} {tensor.dtype}: want contiguous {dtype} {list(shape)}")
    if not packed and (next_keys is not None):
        raise ValueError("next_keys= needs packed=True: keys are compared with keys")
    return constant.new_empty(N, G, R, dtype=folded.table.dtype) if out is None else out
