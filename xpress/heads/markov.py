"""The Markov heads of DSpark (arXiv 2607.05147): the bias of a slot from the token before it, at low rank.

vanilla  z_k = W₁[prev_k]
gated    z_k = sigmoid(G [h_k ; W₁[prev_k]] + b) ⊙ W₁[prev_k]
rnn      (γ, c, o) = J [s_{k−1} ; W₁[prev_k] ; h_k] + b,   s_k = σ(γ) ⊙ s_{k−1} + (1 − σ(γ)) ⊙ tanh c,   z_k = tanh o
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xpress.heads.base import CorrectionHead
from xpress.kernels import Folded

# our parameter -> its name in published DSpark checkpoints, below "markov_head."
PUBLIC_NAMES = {
    "token_embed.weight": "markov_w1.weight",
    "readout.weight": "markov_w2.weight",
    "gate_proj.weight": "gate_proj.weight",
    "gate_proj.bias": "gate_proj.bias",
    "joint_proj.weight": "joint_proj.weight",
    "joint_proj.bias": "joint_proj.bias",
}


class MarkovHead(CorrectionHead):
    """vanilla: one row of a table. Sizes as Refiner; hidden_size and block_size are not used by it."""

    def __init__(self, vocab_size: int, hidden_size: int, block_size: int, rank: int = 256, draft_vocab_size=None):
        super().__init__()
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.readout = nn.Linear(rank, draft_vocab_size or vocab_size, bias=False)
        self._more(hidden_size, rank)
        self.init_weights()

    def _more(self, hidden_size: int, rank: int):
        """Parameters beyond the two maps."""

    def latent(self, prepared: Tensor, prev_ids: Tensor) -> Tensor:
        return self.token_embed(prev_ids)

    def step(self, prepared, prev, k, state):
        return self.latent(prepared[:, k : k + 1], prev[:, None])[:, 0], None

    def constant(self, prepared: Tensor, known_ids: Tensor) -> Tensor:
        """As a refiner's: the rows of the known tokens, nothing else is there before a pass."""
        C = torch.zeros(*prepared.shape[:2], self.token_embed.weight.shape[1], device=prepared.device)
        C = C.to(torch.promote_types(C.dtype, self.token_embed.weight.dtype))
        C[:, : known_ids.shape[1]] = self.token_embed(known_ids)
        return C

    def weights(self) -> Folded | None:
        own = type(self).latent is not MarkovHead.latent  # a head of another kind built on this one
        return None if own else Folded(self.token_embed.weight)


class GatedMarkovHead(MarkovHead):
    """gated: the row, gated by the slot's hidden state."""

    def _more(self, hidden_size, rank):
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def latent(self, prepared, prev_ids):
        row = self.token_embed(prev_ids)
        return torch.sigmoid(self.gate_proj(torch.cat([prepared, row], -1))) * row


class RNNMarkovHead(MarkovHead):
    """rnn: a gated recurrence over the slots."""

    def _more(self, hidden_size, rank):
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(self, prepared, prev, k, state):
        row = self.token_embed(prev)
        state = torch.zeros_like(row) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([state, row, prepared[:, k]], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def latent(self, prepared, prev_ids):
        latents, state = [], None
        for k in range(prev_ids.shape[1]):
            z, state = self.step(prepared, prev_ids[:, k], k, state)
            latents.append(z)
        return torch.stack(latents, 1)
