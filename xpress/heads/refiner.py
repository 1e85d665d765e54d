"""The XPress refiner: a causal mixer over the block and a small MLP (arXiv 2608.02438).

g   = mean of hidden over all B slots
x_k = in_proj [down_h h_k ; down_g g ; token_embed prev_k]
u_k = x_k + Σ_{j≤k} L[:,k,j] ⊙ x_j
z_k = u_k + mlp_down( silu(mlp_gate u_k) ⊙ mlp_up u_k )
ℓ_k = s_k + readout z_k
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xpress.heads.base import CorrectionHead


class _Mixed(CorrectionHead):
    """What the trained and the folded form share: x, then the mixer, then the MLP."""

    @abstractmethod
    def fuse(self, prepared: Tensor, prev_ids: Tensor) -> Tensor:
        """-> x [N,·,R] for the slots given"""

    @abstractmethod
    def mixer(self) -> Tensor:
        """-> I + tril(L) [R,B,B]"""

    def mlp(self, u: Tensor) -> Tensor:
        return u + self.mlp_down(F.silu(self.mlp_gate(u)) * self.mlp_up(u))

    def latent(self, prepared: Tensor, prev_ids: Tensor) -> Tensor:
        x = self.fuse(prepared, prev_ids)
        return self.mlp(torch.einsum("rkj,njr->nkr", self.mixer(), x))

    def step(self, prepared, prev, k, state):
        x = self.fuse(prepared[:, k : k + 1], prev[:, None])
        state = x if state is None else torch.cat([state, x], 1)
        u = torch.einsum("rj,njr->nr", self.mixer()[:, k, : k + 1], state)
        return self.mlp(u), state


class Refiner(_Mixed):
    """The trained form. Parameter names are those of the `speculators` package, so that weights move both ways.

    vocab_size V, hidden_size D, block_size B, rank R, draft_vocab_size V_draft (None: V). For V 151936, D 4096, B 16,
    R 256 it has 80.5 M parameters, 2.75 M of them outside the two vocabulary maps.
    """

    def __init__(self, vocab_size: int, hidden_size: int, block_size: int, rank: int = 256, draft_vocab_size=None):
        super().__init__()
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.down_h = nn.Linear(hidden_size, rank, bias=False)
        self.down_g = nn.Linear(hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, block_size, block_size))
        self.mlp_gate = nn.Linear(rank, 2 * rank, bias=False)
        self.mlp_up = nn.Linear(rank, 2 * rank, bias=False)
        self.mlp_down = nn.Linear(2 * rank, rank, bias=False)
        self.readout = nn.Linear(rank, draft_vocab_size or vocab_size, bias=False)
        self.init_weights()
        nn.init.zeros_(self.mix_l)  # the mixer starts as the identity

    def prepare(self, hidden: Tensor) -> Tensor:
        """hidden [N,B,D] -> in_proj's columns for h and g applied: [N,B,R]"""
        rank = self.mix_l.shape[0]
        pooled = self.down_g(hidden.mean(1, keepdim=True))
        both = torch.cat([self.down_h(hidden), pooled.expand(-1, hidden.shape[1], -1)], -1)
        return F.linear(both, self.in_proj.weight[:, : 2 * rank])

    def fuse(self, prepared, prev_ids):
        rank = self.mix_l.shape[0]
        return prepared + F.linear(self.token_embed(prev_ids), self.in_proj.weight[:, 2 * rank :])

    def mixer(self):
        return self.mix_l.tril() + torch.eye(self.mix_l.shape[1], dtype=self.mix_l.dtype, device=self.mix_l.device)

    def folded(self) -> FoldedRefiner:
        """The inference form: same function, linear maps multiplied out in fp64 and rounded once."""
        return FoldedRefiner(self)


class FoldedRefiner(_Mixed):
    """u = (I + tril L)(H h + S g + E[prev]), z = u + MLP(u): fuse and mix are linear, so they fold.

    E = W_e·W_in,tokᵀ [V,R], H = W_in,h·W_h [R,D], S = W_in,g·W_g [R,D]; MLP and readout are the refiner's own modules.
    """

    def __init__(self, refiner: Refiner):
        super().__init__()
        rank, dtype = refiner.mix_l.shape[0], refiner.mix_l.dtype
        per_slot, pooled, token = refiner.in_proj.weight.detach().double().split(rank, 1)

        def fold(left: Tensor, right: Tensor) -> nn.Parameter:
            return nn.Parameter((left @ right.detach().double()).to(dtype), requires_grad=False)

        self.table = fold(refiner.token_embed.weight.detach().double(), token.T)
        self.map_h = fold(per_slot, refiner.down_h.weight)
        self.map_g = fold(pooled, refiner.down_g.weight)
        self.mix = nn.Parameter(refiner.mixer().detach(), requires_grad=False)
        self.mlp_gate, self.mlp_up, self.mlp_down = refiner.mlp_gate, refiner.mlp_up, refiner.mlp_down
        self.readout = refiner.readout

    def prepare(self, hidden):
        return F.linear(hidden, self.map_h) + F.linear(hidden.mean(1, keepdim=True), self.map_g)

    def fuse(self, prepared, prev_ids):
        return prepared + F.embedding(prev_ids, self.table)

    def mixer(self):
        return self.mix
