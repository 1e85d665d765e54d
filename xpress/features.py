"""What training reads from the frozen target, computed in the step or kept in memory after the first time."""

from __future__ import annotations

import torch

from xpress.anchors import PADDING, Batch
from xpress.target import Features


class FeatureSource:
    """Batch -> (Features, log_norm [S,T] in fp32, or None where the whole vocabulary is drafted).

    Both ways of running pass through `dtype`, so they give equal numbers. keep=True holds every row in memory:
    (M + 1)·D numbers a token.
    """

    def __init__(self, target, layer_ids, reduced: bool, dtype: torch.dtype = torch.bfloat16, keep: bool = False):
        self.target, self.layer_ids, self.reduced, self.dtype = target, layer_ids, reduced, dtype
        self.kept: dict[str, tuple] | None = {} if keep else None

    def __call__(self, batch: Batch) -> tuple[Features, torch.Tensor | None]:
        if self.kept is None:
            return self._compute(batch)
        lengths = (batch.documents != PADDING).sum(1).tolist()
        keys = [f"{name}/{length}" for name, length in zip(batch.row_ids, lengths)]
        for i, (key, n) in enumerate(zip(keys, lengths)):
            if key not in self.kept:  # alone, so that what is kept does not depend on the batch it came in
                row = (t[i : i + 1, :n] for t in (batch.ids, batch.positions, batch.documents, batch.supervised))
                features, log_norm = self._compute(Batch(*row, [key]))
                self.kept[key] = (features.hidden[0], features.last[0], None if log_norm is None else log_norm[0])
        rows = [self.kept[key] for key in keys]
        stack = lambda column: torch.nn.utils.rnn.pad_sequence(column, batch_first=True)  # noqa: E731
        hidden, last, norms = zip(*rows)
        return Features(stack(hidden), stack(last)), stack(norms) if self.reduced else None

    @torch.no_grad()
    def _compute(self, batch: Batch):
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
