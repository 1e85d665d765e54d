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
        nn.init.normal_(self.proj.weight, std=0.02)
        nn.init.zeros_(self.proj.bias)

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """hidden [...,D], rows of the Markov head's token_embed at prev_ids [...,R] -> what sigmoid makes c of [...]"""
        inputs = torch.cat([hidden, rows.to(hidden.dtype)], -1) if self.rank else hidden
        return self.proj(inputs.to(self.proj.weight.dtype)).squeeze(-1)

    def forward(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """The same inputs -> probabilities [...]"""
        return torch.sigmoid(self.logits(hidden, rows))


def rows_of(head: nn.Module | None) -> nn.Embedding | None:
    """The table whose rows a confidence head may read: token_embed of a head that has one."""
    rows = getattr(head, "token_embed", None)
    return rows if isinstance(rows, nn.Embedding) else None


def beside(head: nn.Module | None, hidden_size: int) -> ConfidenceHead:
    """A fresh confidence head for a correction head: it reads that one's rows, where there are any."""
    rows = rows_of(head)
    return ConfidenceHead(hidden_size, 0 if rows is None else rows.embedding_dim)
