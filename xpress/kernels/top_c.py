"""The best of few candidates: fast, NOT exact. For exact ids read less of the readout by screening."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from xpress.sampling import at_least_fp32


class TopC(NamedTuple):
    """Of each row the C ids with the largest base logits, for all passes of a block: places [N,G,C] in the order of
    their original ids, base [N,G,C], weight [N,G,C,R]."""

    places: Tensor
    base: Tensor
    weight: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, base: Tensor, weight: Tensor, C: int, ids: Tensor | None = None) -> TopC:
        """base [N,G,V], weight [V,R], ids [V] as in readout_argmax. Raises ValueError for C below 1."""
        if C < 1:
            raise ValueError(f"C={C}: at least one candidate a row")
        places = base.topk(min(C, base.shape[-1]), dim=-1, sorted=False).indices
        names = places if ids is None else ids[places]
        places = places.gather(-1, names.argsort(-1))  # so that the first of equal logits has the lowest id
        return cls(places, base.gather(-1, places), weight[places])


@torch.no_grad()
def top_c(
    base: Tensor, latent: Tensor, weight: Tensor, C: int, ids: Tensor | None = None, *, chosen: TopC | None = None
) -> Tensor:
    """Token ids [N,G] of argmax of float32(base) + latent·weight[v] over the C largest base logits of each row: NOT the
    readout's argmax where a correction lifts another id above them. chosen: `TopC.of(base, weight, C, ids)`, made once
    a block, leaves C·R products a row and pass. Raises ValueError for C below 1.
    """
    places, near, rows = chosen or TopC.of(base, weight, C, ids)
    latent = at_least_fp32(latent)
    logits = at_least_fp32(near) + (at_least_fp32(rows) @ latent[..., None])[..., 0]
    logits = logits.masked_fill(logits.isnan(), float("-inf"))
    best = places.gather(-1, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1, keepdim=True))[..., 0]
    return best if ids is None else ids[best]
