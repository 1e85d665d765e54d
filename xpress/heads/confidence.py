"""DSpark's confidence head (arXiv 2607.05147): how likely each slot's draft token is to be accepted.

c_k = sigmoid(w · [h_k ; W₁[prev_k]] + b), without the second part where the head reads the hidden state alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ConfidenceHead(nn.Module):
    """hidden_size D; rank: the R of the Markov head whose rows it reads too, 0 for none."""

    def __init__(self, hidden_size: int, rank: int = 0):
        super().__init__()
        self.rank = rank
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """hidden [...,D], rows of the Markov head's token_embed at prev_ids [...,R] -> probabilities [...]"""
        inputs = torch.cat([hidden, rows.to(hidden.dtype)], -1) if self.rank else hidden
        return torch.sigmoid(self.proj(inputs.to(self.proj.weight.dtype)).squeeze(-1))
