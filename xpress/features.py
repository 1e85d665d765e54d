"""What training reads from the frozen target, made in the step; and the scale of each captured layer."""

from __future__ import annotations

import torch
from torch import Tensor

from xpress.anchors import PADDING, Batch
from xpress.target import Features


class OnlineFeatures:
    """Batch -> (Features, log_norm [S,T] in fp32, or None where the whole vocabulary is drafted).

    Runs the target in the step. Features pass through `dtype`, the type of the cache, so that both ways of training
    give equal numbers.
    """

    def __init__(self, target, layer_ids, reduced: bool, dtype: torch.dtype = torch.bfloat16):
        self.target, self.layer_ids, self.reduced, self.dtype = target, tuple(layer_ids), reduced, dtype

    @torch.no_grad()
    def __call__(self, batch: Batch) -> tuple[Features, Tensor | None]:
        found = self.target.features(batch.ids, batch.positions, self.layer_ids)
        found = Features(found.hidden.to(self.dtype), found.last.to(self.dtype))
        if not self.reduced:
            return found, None
        log_norm = torch.zeros(batch.ids.shape, device=batch.ids.device)
        judged = batch.supervised.roll(-1, 1)  # logits at t judge the token at t + 1; nothing else is asked for
        log_norm[judged] = self.target.log_norm(found.last[judged].to(self.target.dtype)).float()
        return found, log_norm


@torch.no_grad()
def feature_scale(target, batch: Batch, layer_ids) -> tuple[float, ...]:
    """One power of two a captured layer that brings its median token to about unit RMS.

    Residual streams grow by orders of magnitude from layer to layer; a fresh `fc` would hear the last one only.
    """
    hidden = target.features(batch.ids, batch.positions, layer_ids).hidden.float()
    rms = hidden.unflatten(-1, (len(layer_ids), -1)).square().mean(-1).sqrt()
    median = rms[batch.documents != PADDING].median(0).values.clamp(min=1e-6)
    return tuple(float(2.0 ** -round(x)) for x in median.log2().tolist())
