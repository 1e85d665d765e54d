"""A quantised copy of a readout with the error of each of its rows: what screening reads in the readout's place."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

U = 2.0**-24  # unit roundoff of fp32
KAPPA, KAPPA_NOISE, NOISE = 8 * U, 16 * U, 2.0**-13  # last roundings: of |l̂|, of |l̂/T + Γ|, of two noises
_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)


def round_up(x: Tensor) -> Tensor:
    """Nonnegative fp64 -> the fp32 at or above it, the error of a sum of fp64 terms included."""
    x = x * (1 + 2.0**-40)
    near = x.float()
    return torch.where(near.double() < x, torch.nextafter(near, torch.full_like(near, float("inf"))), near)


@dataclass(frozen=True)
class Screen:
    """Ŵ ≈ W [V,R] in fewer bytes.

    codes: bits 16, Ŵ itself in bf16 [V,R]; bits 8, int8 [V,R]; bits 4, uint8 [V,R/2], of each byte the low half for
    column r and the high half for column r + R/2, codes shifted by 8. scale [V] (fp32; bits 8 and 4): ŵ_v = scale_v ·
    code. error [V]: ‖w_v − ŵ_v‖, norm [V]: ‖w_v‖, both of fp32 rounded up; infinite where fp32 does not hold them.

    One scale a row, so that it can be applied after the product. At 4 bits it is the one of seven clips of the row's
    maximum that leaves the smallest error.

    The copy does not follow the weight: after a change of the weight make a new one, or answers are no longer exact.
    """

    bits: int
    codes: Tensor
    scale: Tensor | None
    error: Tensor
    norm: Tensor
    _tops: dict = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor, bits: int = 8) -> Screen:
        """The copy of weight [V,R] (fp32, bf16 or fp16), in 16, 8 or 4 bits. Raises ValueError for another dtype or
        number of bits, an odd R at 4 bits, or an R beyond 2¹⁶, where the bounds of fp32 sums end."""
        if weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"weight {tuple(weight.shape)} {weight.dtype}: a screen wants [V,R] in fp32, bf16 or fp16; use "
                "readout_argmax for others"
            )
        V, R = weight.shape
        if bits not in (4, 8, 16):
            raise ValueError(f"bits={bits}: a screen has 16, 8 or 4")
        if not V or not 0 < R <= 2**16 or bits == 4 and R % 2:
            raise ValueError(f"weight {tuple(weight.shape)}: a screen of {bits} bits wants V ≥ 1 and an R of 1 to 65536"
                             + (", even at 4 bits: take bits=8" if bits == 4 else ""))  # fmt: skip
        parts = [_quantise(part, bits) for part in weight.split(max(1, 2**22 // R))]  # fp64 copies of a part at a time
        codes, scale, error, norm = (None if p[0] is None else torch.cat(p) for p in zip(*parts))
        return cls(bits, codes, scale, error, norm)

    @property
    def shape(self) -> tuple[int, int]:
        """(V, R) of the weight."""
        return self.codes.shape[0], self.codes.shape[1] * (2 if self.bits == 4 else 1)

    @property
    def bytes(self) -> int:
        """Bytes of the copy with its scales and norms."""
        parts = self.codes, self.scale, self.error, self.norm
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def to(self, device) -> Screen:
        """The same on another device."""
        parts = (None if p is None else p.to(device) for p in (self.codes, self.scale, self.error, self.norm))
        return Screen(self.bits, *parts)

    def tops(self, tile: int) -> tuple[Tensor, Tensor]:
        """Largest error and norm of each `tile` rows [tiles]; kept, they never change."""
        if tile not in self._tops:
            V = self.shape[0]
            pad = torch.nn.functional.pad
            self._tops[tile] = tuple(
                pad(part, (0, -V % tile)).view(-1, tile).amax(1).contiguous() for part in (self.error, self.norm)
            )
        return self._tops[tile]

    def rows(self, start: int, stop: int) -> Tensor:
        """Codes [·,R] of some rows, unpacked: bf16 or int8."""
        return unpacked(self.codes[start:stop]) if self.bits == 4 else self.codes[start:stop]

    def dequantised(self) -> Tensor:
        """Ŵ [V,R] in fp64."""
        wide = self.rows(0, self.shape[0]).double()
        return wide if self.scale is None else wide * self.scale.double()[:, None]


def unpacked(codes: Tensor) -> Tensor:
    """uint8 [·,R/2] -> int8 [·,R] in −8…7."""
    return torch.cat([codes & 15, codes >> 4], -1).to(torch.int8) - 8


def _quantise(weight: Tensor, bits: int):
    exact = weight.double()
    norm = round_up(exact.norm(dim=1)).nan_to_num(nan=float("inf"))
    if bits == 16:
        codes = weight.to(torch.bfloat16)
        return codes, None, _error(exact, codes.double()), norm
    most = 2 ** (bits - 1) - 1
    best = None
    for clip in _CLIPS if bits == 4 else _CLIPS[:1]:
        scale = (exact.abs().amax(1) * (clip / most)).float().nan_to_num(0.0, posinf=0.0)
        step = torch.where(scale > 0, scale, 1.0).double()[:, None]
        codes = (exact / step).nan_to_num(0.0).round().clamp(-most, most)
        error = _error(exact, codes * scale.double()[:, None])
        found = codes.to(torch.int8), scale, error
        if best is None:
            best = found
        else:
            better = error < best[2]
            best = tuple(torch.where(better[:, None] if a.dim() == 2 else better, a, b) for a, b in zip(found, best))
    codes, scale, error = best
    if bits == 4:
        low, high = (codes + 8).to(torch.uint8).chunk(2, 1)
        codes = low | high << 4
    return codes, scale, error, norm


def _error(exact: Tensor, copy: Tensor) -> Tensor:
    return round_up((exact - copy).norm(dim=1)).nan_to_num(nan=float("inf"))


class Query:
    """Latents z [M,R] (fp32) as the CPU multiplies them with a screen: rounded to bf16, or to int8 with a scale a row.

    spread(e, w): how far base + ẑ·ŵ may be from the full readout's ℓ, but for what the last rounding of either adds."""

    def __init__(self, z: Tensor, screen: Screen):
        self.screen, exact = screen, z.double()
        if screen.bits == 16:
            self.codes, self.scale = z.bfloat16(), None
            copy, rounding = self.codes.double(), 2.0**-8  # the product is rounded to bf16 on its way out
        else:
            self.scale = (z.abs().amax(1) / 127).nan_to_num(0.0, posinf=0.0)
            step = torch.where(self.scale > 0, self.scale, 1.0)
            self.codes = (z / step[:, None]).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
            copy, rounding = self.codes.double() * self.scale.double()[:, None], 0.0
        size, away, found = exact.norm(dim=1), (exact - copy).norm(dim=1), copy.norm(dim=1)
        g = gamma(z.shape[1])
        own = away + (g + rounding) * found
        self.size = size  # fp64, ‖z‖
        self.of_error, self.of_norm = ((x * (1 + 2.0**-16)).float()[:, None] for x in (size + own, 2 * g * size + own))

    def spread(self, error: Tensor, norm: Tensor, row: Tensor | slice = slice(None)) -> Tensor:
        """A screen's errors and norms, [·] or one line [·,·] for each of `row` -> [·,·]."""
        return (self.of_error[row] * error).addcmul_(self.of_norm[row], norm).add_(2.0**-100)  # and underflow

    def product(self, start: int, stop: int, out: Tensor):
        """ẑ·ŵ_v of ids start…stop into out [M,stop − start] (fp32)."""
        codes = self.screen.rows(start, stop)
        # readout rows first: oneDNN reads them as they lie, where the other order repacks them at each call
        if self.scale is None:
            if fp32_sums():
                out.copy_(torch.mm(codes, self.codes.t()).t())
            else:
                torch.mm(self.codes.float(), codes.float().t(), out=out)
            return
        if whole_sums():
            out.copy_(torch._int_mm(codes, self.codes.t()).t())
        else:
            torch.mm(self.codes.float(), codes.float().t(), out=out)
        out.mul_(self.screen.scale[start:stop]).mul_(self.scale[:, None])


def gamma(R: int) -> float:
    """Relative error of a sum of R fp32 products in any order, six more roundings allowed for."""
    return (R + 8) * U / (1 - (R + 8) * U)


@cache
def whole_sums() -> bool:
    """Is torch._int_mm exact here? Without VNNI or AMX pairs of int8 products may saturate at 16 bits."""
    signs = torch.tensor([[1], [-1]], dtype=torch.int8)
    left = signs.repeat(16, 64) * 127
    try:
        found = torch._int_mm(left, left[:7].t())
    except RuntimeError:
        return False
    return bool((found.long() == left.long() @ left[:7].long().t()).all())


@cache
def fp32_sums() -> bool:
    """Does the product of bf16 matrices sum in fp32 here? Sums in bf16 would lose each one beside 256."""
    left = torch.ones(32, 256, dtype=torch.bfloat16)
    left[:, 0] = 256
    right = torch.ones(7, 256, dtype=torch.bfloat16)
    return all(bool((torch.mm(left, right[:n].t()) == 512).all()) for n in (1, 7))  # 511, rounded


@dataclass
class Screened:
    """What screening did, summed over calls. rows; bytes_read of copy and readout (base logits are read in any case);
    ids_rechecked, computed from the readout itself: (row, id) pairs on a CPU, the lines of whole tiles on a GPU; tiles
    of the copy, and of those tiles_skipped; full_rows, which had no finite bound, and close_rows, decided by the full
    readout's own chunks (both on a CPU only)."""

    rows: int = 0
    bytes_read: int = 0
    ids_rechecked: int = 0
    tiles: int = 0
    tiles_skipped: int = 0
    full_rows: int = 0
    close_rows: int = 0
