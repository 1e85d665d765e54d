"""The Domino head (arXiv 2605.29707): a GRU over the target's embeddings of the block so far.

s_k = GRU(s_{k−1}, E_target[prev_k]),   z_k = silu(W [h_k ; s_k]),   z_k = 0 for the first `pure_slots` slots
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xpress.heads.base import CorrectionHead

# our parameter -> its name in published Domino checkpoints (some prefix it with "logit_head.")
PUBLIC_NAMES = {
    "gru.weight_ih_l0": "prefix_gru.weight_ih_l0",
    "gru.weight_hh_l0": "prefix_gru.weight_hh_l0",
    "fuse.weight": "embed_proj.0.weight",
    "readout.weight": "embed_proj.2.weight",
}


class DominoHead(CorrectionHead):
    """Sizes as Refiner; gru_hidden_size H; pure_slots: leading slots that keep the plain drafter's logits.

    pure_slots is 1 for the published next-token layout, 2 for infill, where slot 0 predicts nothing.
    Needs `bind(target)`: the embedding is the target's own.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        block_size: int,
        rank: int = 256,
        draft_vocab_size=None,
        gru_hidden_size: int = 1024,
        pure_slots: int = 2,
    ):
        super().__init__()
        self.pure_slots = pure_slots
        self.gru = nn.GRU(hidden_size, gru_hidden_size, bias=False, batch_first=True)
        self.fuse = nn.Linear(hidden_size + gru_hidden_size, rank, bias=False)
        self.readout = nn.Linear(rank, draft_vocab_size or vocab_size, bias=False)
        nn.init.normal_(self.fuse.weight, std=0.02)
        nn.init.normal_(self.readout.weight, std=0.02)

    def bind(self, target):
        object.__setattr__(self, "_embedding", target.embedding)
        return self

    def _scan(self, prev_ids: Tensor, state):
        return self.gru(self._embedding(prev_ids).to(self.fuse.weight.dtype), state)

    def latent(self, prepared: Tensor, prev_ids: Tensor) -> Tensor:
        states, _ = self._scan(prev_ids, None)
        z = F.silu(self.fuse(torch.cat([prepared, states], -1)))
        corrected = torch.arange(z.shape[1], device=z.device) >= self.pure_slots
        return z * corrected[:, None]

    def step(self, prepared, prev, k, state):
        states, state = self._scan(prev[:, None], state)
        z = F.silu(self.fuse(torch.cat([prepared[:, k], states[:, 0]], -1)))
        return z * (k >= self.pure_slots), state
