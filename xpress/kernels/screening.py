"""The readout's argmax from a quantised copy of the readout: fewer bytes, the same ids to the last.

Law. Let ℓ_v be what the full readout compares: readout_argmax's float32(base_v) + z·w_v, in its own order of sums. With
a copy ŵ_v of each row, e_v ≥ ‖w_v − ŵ_v‖, and ẑ the latent as it is multiplied (rounded too on the CPU, z itself on a
GPU), the screen computes

    l̂_v = base_v + ẑ·ŵ_v
    δ_v = ‖z‖·(e_v + 2γ‖w_v‖) + (‖z − ẑ‖ + η‖ẑ‖)·(‖w_v‖ + e_v) + 8u|l̂_v|,   γ = (R + 8)u/(1 − (R + 8)u), u = 2⁻²⁴

keeps v where l̂_v + δ_v ≥ max_u (l̂_u − δ_u), and lets those ids compete in ℓ itself. The winner is the full one's.

Proof. (1) |z·w_v − ẑ·ŵ_v| ≤ |z·(w_v − ŵ_v)| + |(z − ẑ)·ŵ_v| ≤ ‖z‖e_v + ‖z − ẑ‖‖ŵ_v‖, and ‖ŵ_v‖ ≤ ‖w_v‖ + e_v. (2) An
fp32 sum of R products, in any order and with or without fused multiplication, lies within γ Σ_r|z_r w_r| ≤ γ‖z‖‖w_v‖ of
z·w_v; the screen's within η‖ẑ‖‖ŵ_v‖ of ẑ·ŵ_v, where η = γ, + 2⁻⁸ where the product leaves as bf16. (3) Each final sum
x + y, rounded to f, lies within u|f| of it; |ℓ_v| ≤ |l̂_v| + |ℓ_v − l̂_v| turns u|ℓ_v| + u|l̂_v| into 2u|l̂_v| and a
factor 1 + 2u on the rest. The rest of 8u|l̂_v|, the surplus of γ and a factor 1 + 2⁻¹⁶ pay for computing the bounds in
fp32, and 2⁻¹⁰⁰ for underflow. So |ℓ_v − l̂_v| ≤ δ_v for each v. Let v be the full winner. For all u, l̂_v + δ_v ≥ ℓ_v ≥
ℓ_u ≥ l̂_u − δ_u: v is kept, and so is each id that ties with it. Any superset of the kept ids, decided in ℓ, has the
same winner. ∎

Superset, so bounds of whole tiles serve as well (largest l̂, e and ‖w‖ of a tile: x + 8u|x| grows with x). The argmax of
ℓ/T + Γ is the law with l̂_v/T + Γ_v, δ_v/T, 16u in the place of 8u and 2⁻¹³ for two computations of the noise; q is not
offered. Where the law has no finite bound (NaN, infinities, products near the end of fp32), ids are decided by the full
readout.

"In ℓ itself". On a GPU a tile that is kept is computed by the full kernel's own code on the same tile. On a CPU an
element of a BLAS product may depend on the shape of the whole, so kept ids are summed in fp64 and decided where any
fp32 sum would decide alike, the gap being above both rounding bounds; only what is closer runs the full readout's own
chunk, the same call on the same operands.

Tile skipping (skip=True): a tile with max base + ‖z‖·max‖w‖ below a bound that is already reached is not read. It pays
where rows are ordered so that tiles are sharp, by frequency (`ids` names them), and ‖z‖·max‖w‖ is below the spread of
the base logits. Draws skip nothing: noise spreads wider than that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from xpress.kernels.readout_argmax import _answer, _put, launch, on_device
from xpress.kernels.rows import UNSET, Rows, best_keys, pack
from xpress.kernels.screen import KAPPA, KAPPA_NOISE, NOISE, Query, Screen, Screened, gamma
from xpress.sampling import gumbel_of, philox

TILE, GRAIN, CHUNK = 64, 512, 8192  # ids under one bound; read or skipped together; whose products stay in the cache
MEMORY = 2**23  # numbers of l̂ that are held at a time, unless one block has more
_INF = float("inf")


class Draw(NamedTuple):
    """ℓ/T + Γ of the open rows: key, high [n,g,1] of the noise, and T; None in its place is ℓ."""

    key: Tensor
    high: Tensor
    temperature: float

    @classmethod
    def of(cls, rows: Rows, address: Tensor | None, temperature: float) -> Draw | None:
        if address is None:
            return None
        if not 0 < temperature < _INF:
            raise ValueError(f"temperature={temperature}: sampling needs a finite one above 0")
        if address.shape != (rows.N, 2) or address.dtype != torch.long:
            raise ValueError(f"address {tuple(address.shape)} {address.dtype}: want int64 [{rows.N},2], Noise.address")
        slots, address = torch.arange(rows.first, rows.G, device=address.device), address[rows.open()]
        high = address[:, 1, None, None] + slots[:, None]
        return cls(address[:, 0, None, None].expand_as(high), high, temperature)

    def noise(self, names: Tensor) -> Tensor:
        return gumbel_of(philox(self.key, names, self.high)[0])

    def at(self, row: Tensor, names: Tensor) -> Tensor:
        """Noise of (row, id) pairs."""
        return gumbel_of(philox(self.key.flatten()[row], names, self.high.flatten()[row])[0])


@torch.no_grad()
def screened_argmax_ref(
    base: Tensor,
    latent: Tensor,
    weight: Tensor,
    screen: Screen,
    ids: Tensor | None = None,
    *,
    first_row: int = 0,
    active: Tensor | None = None,
    keys: Tensor | None = None,
    reset: bool = True,
    packed: bool = False,
    address: Tensor | None = None,
    temperature: float = 1.0,
    skip: bool = False,
    stats: Screened | None = None,
) -> Tensor:
    """Token ids of readout_argmax, arguments as there; screen: `Screen.of(weight)`. With address [N,2] the ids that
    readout_sample draws: argmax of ℓ/T + Γ. skip: tiles that cannot win are not read. stats: counts are added to it.

    Values in keys are within rounding of the full readout's on a CPU, its own on a GPU. Raises ValueError for shapes
    that do not fit, fp64 operands, and a screen of another weight's shape or device.
    """
    rows = _checked(base, latent, weight, screen, ids, first_row, active, keys, address)
    draw = Draw.of(rows, address, temperature)
    open_ = rows.open()
    z = rows.latent[open_, rows.first :].float()
    if z.numel():
        blocks = max(1, MEMORY // (rows.V * z.shape[1]))
        row, place, value, closed = [], [], [], []
        for start in range(0, len(z), blocks):
            part = slice(start, start + blocks)
            found = _survivors(rows, z, part, screen, draw, skip, stats)
            row.append(found[0] + start * z.shape[1])
            for out, new in zip((place, value, closed), found[1:]):
                out.append(new)
        z = z.flatten(0, 1)
        best = _decide(rows, z, torch.cat(row), torch.cat(place), torch.cat(value), draw, stats)
        lost = torch.cat(closed)
        if lost.any():
            best = torch.where(lost, _full(rows, draw), best)
            if stats is not None:
                stats.full_rows += int(lost.sum())
                stats.bytes_read += weight.numel() * weight.element_size()
        if stats is not None:
            stats.rows += len(z)
        _put(rows, best.view(-1, rows.G - rows.first))
    return _answer(rows, base.dim(), packed)


def _checked(base, latent, weight, screen, ids, first_row, active, keys, address) -> Rows:
    rows = Rows(base, latent, weight, ids, first_row, active, keys)
    if screen.shape != tuple(weight.shape) or screen.codes.device != weight.device:
        raise ValueError(
            f"a screen of {screen.shape} on {screen.codes.device} for a weight {tuple(weight.shape)} on "
            f"{weight.device}: make it of this weight, Screen.of(weight), or move it, screen.to(device)"
        )
    if torch.float64 in (base.dtype, latent.dtype, weight.dtype):
        raise ValueError("screening compares in fp32: use readout_argmax for fp64")
    if address is not None and base.dim() != 3:
        raise ValueError(f"base {tuple(base.shape)}: sampling wants blocks [N,G,V], noise is addressed by slot")
    return rows


def _survivors(rows: Rows, z: Tensor, part: slice, screen: Screen, draw: Draw | None, skip: bool, stats):
    """Rows of some blocks -> (row, place) pairs that the screen leaves, base of each, and which rows have no bound."""
    z, V, tiles, device = z[part], rows.V, -(-rows.V // TILE), z.device
    (n, g), blocks = z.shape[:2], part
    if rows.active is not None:
        blocks = rows.active.nonzero()[:, 0][part]
    if draw is not None:
        draw = Draw(draw.key[part], draw.high[part], draw.temperature)
    query = Query(z.flatten(0, 1), screen)
    high = torch.empty(n * g, tiles * TILE, device=device)
    high[:, V:] = -_INF
    top = torch.full((n * g, tiles), -_INF, device=device)
    read = 0
    for start, stop in _runs(rows, blocks, z.flatten(0, 1), query, screen) if skip and draw is None else _chunks(0, V):
        query.product(start, stop, high[:, start:stop])
        logits = high.view(n, g, -1)[..., start:stop].add_(rows.base[blocks, rows.first :, start:stop])
        if draw is not None:
            logits.div_(draw.temperature).add_(draw.noise(rows.names(start, stop)))
        first, last = start // TILE, -(-stop // TILE)
        top[:, first:last] = high[:, first * TILE : last * TILE].view(n * g, -1, TILE).amax(-1)
        read += last - first
    if stats is not None:
        stats.tiles += tiles
        stats.tiles_skipped += tiles - read
        stats.bytes_read += screen.bytes * read // tiles
    scale = 1.0 if draw is None else 1 / draw.temperature
    spread = query.spread(*screen.tops(TILE)).mul_(scale).add_(_rounding(top, draw))
    floor = (top - spread).amax(1)
    closed = ~(floor.isfinite() & (query.size * screen.tops(TILE)[1].amax() < 2.0**120))
    row, tile = ((top + spread >= floor[:, None]) & ~closed[:, None]).nonzero().unbind(1)
    logits = high.view(n * g, tiles, TILE)[row, tile]
    place = (tile[:, None] * TILE + torch.arange(TILE, device=device)).clamp_(max=V - 1)
    spread = query.spread(screen.error[place], screen.norm[place], row).mul_(scale).add_(_rounding(logits, draw))
    floor = floor.fill_(-_INF).scatter_reduce(0, row, (logits - spread).amax(1), "amax")
    kept = logits + spread >= floor[row, None]
    row, place = row[:, None].expand_as(kept)[kept], place[kept]
    block = torch.arange(rows.N, device=device)[blocks][row // g]
    return row, place, rows.base[block, rows.first + row % g, place], closed


def _rounding(logits: Tensor, draw: Draw | None) -> Tensor:
    """What the last roundings add to a bound; −inf is exact."""
    size = logits.abs().masked_fill_(logits == -_INF, 0.0)
    return size * KAPPA if draw is None else (size * KAPPA_NOISE).add_(NOISE)


def _chunks(start: int, stop: int):
    return [(at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)]


def _runs(rows: Rows, blocks, z: Tensor, query: Query, screen: Screen) -> list[tuple[int, int]]:
    """What has to be read: chunks whose base logits, with all that a correction may add, reach ℓ of the id that has the
    largest base logit."""
    base = rows.base[blocks, rows.first :]
    whole = rows.V // GRAIN * GRAIN
    parts = [base[..., :whole].unflatten(-1, (-1, GRAIN)).amax(-1)] if whole else []
    parts += [base[..., whole:].amax(-1, keepdim=True)] if whole < rows.V else []
    most = torch.cat(parts, -1).flatten(0, 1).float()
    grain, row = most.argmax(1), torch.arange(len(z), device=z.device)
    place = (grain[:, None] * GRAIN + torch.arange(GRAIN, device=z.device)).clamp_(max=rows.V - 1)
    n, g = base.shape[:2]
    near = base[(row // g)[:, None], (row % g)[:, None], place].float()
    best = near.argmax(1, keepdim=True)
    place, near = place.gather(1, best)[:, 0], near.gather(1, best)[:, 0]
    size, R = query.size.float() * (1 + 2.0**-16), z.shape[1]
    slack = 4 * gamma(R) * size * screen.norm[place]
    reached = near + (z * rows.weight[place]).sum(1)
    reached = reached - slack - 2 * KAPPA * (reached.abs() + near.abs())
    reach = most + (1 + 2.0**-10) * size[:, None] * screen.tops(GRAIN)[1] + 2 * KAPPA * most.abs()
    out = []
    for at in (~(reach < reached[:, None])).any(0).nonzero()[:, 0].tolist():  # a NaN is smaller than nothing
        start, stop = at * GRAIN, min((at + 1) * GRAIN, rows.V)
        if out and out[-1][1] == start and stop - out[-1][0] <= CHUNK:
            start = out.pop()[0]
        out.append((start, stop))
    return out


def _decide(rows: Rows, z: Tensor, row: Tensor, place: Tensor, base: Tensor, draw: Draw | None, stats) -> Tensor:
    """Kept (row, place) pairs -> the best key of each row; UNSET for a row without any."""
    weight, base = rows.weight[place], base.double()
    product = z[row].double() * weight
    value = base + product.sum(1)
    slack = gamma(rows.R) * product.abs().sum(1) + KAPPA * value.abs() + 2.0**-100
    if draw is not None:
        value = value / draw.temperature + draw.at(row, rows.names(0, rows.V)[place])
        slack = slack / draw.temperature + KAPPA_NOISE * value.abs() + NOISE
    floor = value.new_full((len(z),), -_INF).scatter_reduce_(0, row, value - slack, "amax")
    left = value + slack >= floor[row]
    close = left & (torch.bincount(row[left], minlength=len(z)) > 1)[row]
    value = value.float()
    reread = 0
    if close.any():
        for start, logits in rows.chunks(only=place[close].unique().tolist()):
            stop = start + logits.shape[-1]
            reread += stop - start
            mine = (close & (place >= start) & (place < stop)).nonzero()[:, 0]
            if len(mine):
                logits = _compared(rows, start, logits, draw).flatten(0, 1)
                value[mine] = logits[row[mine], place[mine] - start].float()
    if stats is not None:
        stats.ids_rechecked += len(row)
        stats.close_rows += int(row[close].unique().numel())
        stats.bytes_read += (len(row) + reread) * rows.R * weight.element_size()
    keys = pack(value, rows.names(0, rows.V)[place])
    return keys.new_full((len(z),), UNSET).scatter_reduce_(0, row[left], keys[left], "amax")


def _compared(rows: Rows, start: int, logits: Tensor, draw: Draw | None) -> Tensor:
    """A chunk of ℓ as the full readout compares it: as it is, or as readout_sample_ref draws from it."""
    if draw is None:
        return logits
    return logits / draw.temperature + draw.noise(rows.names(start, start + logits.shape[-1]))


def _full(rows: Rows, draw: Draw | None) -> Tensor:
    """Keys of all open rows by the full readout."""
    found = []
    for start, logits in rows.chunks():
        names = rows.names(start, start + logits.shape[-1])
        found.append(best_keys(_compared(rows, start, logits, draw), names))
    return torch.stack(found).amax(0).flatten()


def screened_argmax(
    base: Tensor,
    latent: Tensor,
    weight: Tensor,
    screen: Screen,
    ids: Tensor | None = None,
    *,
    first_row: int = 0,
    active: Tensor | None = None,
    keys: Tensor | None = None,
    reset: bool = True,
    packed: bool = False,
    address: Tensor | None = None,
    temperature: float = 1.0,
    skip: bool = False,
    stats: Screened | None = None,
) -> Tensor:
    """The same on a GPU, two launches. reset=False as in readout_argmax. R is a power of two from 16 (32 at 4 bits) to
    256; `stats` waits for the device."""
    rows = _checked(base, latent, weight, screen, ids, first_row, active, keys, address)
    Draw.of(rows, address, temperature)
    if screen.bits == 4 and rows.R < 32:
        raise ValueError(f"rank R = {rows.R}: the kernel of 4 bits takes 32 to 256, use a screen of 8 bits")
    if keys is not None and reset:
        kept = torch.full_like(rows.keys[:, first_row:], UNSET)
        if active is not None:
            kept = torch.where(active.bool()[:, None], kept, rows.keys[:, first_row:])
        rows.keys[:, first_row:] = kept
    count = rows.N * (rows.G - first_row)
    if count:
        _launch(rows, count, screen, address, temperature, skip, stats)
    return _answer(rows, base.dim(), packed)


def _launch(rows: Rows, count: int, screen: Screen, address, temperature: float, skip: bool, stats):
    from xpress.kernels.screening_tiles import recheck_kernel, screen_kernel

    (base, latent, weight, *sizes), shape = launch(rows, count)
    (groups, programs), block_v = shape.pop("grid"), shape["BLOCK_V"]
    tiles, keys = -(-rows.V // block_v), rows.keys
    upper = torch.empty(count, tiles, dtype=torch.float32, device=base.device)
    floor, counts = torch.full_like(keys, UNSET), keys.new_zeros(2)
    wide = latent.float() if screen.bits == 16 and latent.dtype == torch.float16 else latent  # bf16 fits no fp16
    common = [part if part is not None else keys for part in (rows.ids, address, rows.active)]
    common[1] = common[1].contiguous()
    how = {name: shape[name] for name in ("R", "BLOCK_M", "BLOCK_V", "MAPPED", "MASKED", "num_warps")}
    how |= {"enable_fp_fusion": False, "DRAWN": address is not None, "COUNTED": stats is not None}
    with on_device(base):
        screen_kernel[(groups, programs)](
            *(base, wide, screen.codes, screen.codes if screen.scale is None else screen.scale),
            *(screen.error, screen.norm, screen.tops(block_v)[1], *common, upper, floor, counts),
            *(*sizes[:-1], screen.codes.stride(0), 1 / temperature, gamma(rows.R)),
            **(how | {"BITS": screen.bits, "SKIP": skip and address is None, "STAGES": shape["STAGES"]}),
        )
        recheck_kernel[(groups, -(-tiles // 16))](
            *(base, latent, weight, *common, upper, floor, keys, counts, *sizes, 1 / temperature),
            **(how | {"TILES": 16}),
        )
    if stats is not None:
        skipped, checked = counts.tolist()
        lines = (groups * tiles - skipped) * block_v
        stats.rows += count
        stats.tiles += groups * tiles
        stats.tiles_skipped += skipped
        stats.ids_rechecked += checked * block_v
        stats.bytes_read += lines * screen.bytes // rows.V + checked * block_v * rows.R * weight.element_size()
