"""The XPress refiner: a causal mixer over the block and a small MLP (arXiv 2608.02438).

g   = mean of hidden over all B slots
x_k = in_proj [down_h h_k ; down_g g ; token_embed prev_k]
u_k = x_k + Σ_{j≤k} L[:,k,j] ⊙ x_j
z_k = u_k + mlp_down( silu(mlp_gate u_k) ⊙ mlp_up u_k )
ℓ_k = s_k + readout z_k

Four flags take a part away for ablations: without h or g its columns of in_proj are gone too, without the mixer u = x,
without the MLP z = u.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xpress.heads.base import CorrectionHead
from xpress.kernels import Folded
from xpress.sampling import at_least_fp32


class _Mixed(CorrectionHead):
    """What the trained and the folded form share: x, then the mixer, then the MLP; the last two only where used."""

    use_mixer: bool
    use_mlp: bool

    @abstractmethod
    def fuse(self, prepared: Tensor, prev_ids: Tensor) -> Tensor:
        """-> x [N,·,R] for the slots given"""

    @abstractmethod
    def mixer(self) -> Tensor:
        """-> I + tril(L) [R,B,B]; asked for only with use_mixer"""

    def mlp(self, u: Tensor) -> Tensor:
        return u + self.mlp_down(F.silu(self.mlp_gate(u)) * self.mlp_up(u)) if self.use_mlp else u

    def latent(self, prepared: Tensor, prev_ids: Tensor) -> Tensor:
        x = self.fuse(prepared, prev_ids)
        # einsum leaves channels apart in memory, and products of such rows are several times slower on a CPU
        return self.mlp(torch.einsum("rkj,njr->nkr", self.mixer(), x).contiguous() if self.use_mixer else x)

    def step(self, prepared, prev, k, state):
        x = self.fuse(prepared[:, k : k + 1], prev[:, None])
        if not self.use_mixer:
            return self.mlp(x[:, 0]), None
        state = x if state is None else torch.cat([state, x], 1)
        u = torch.einsum("rj,njr->nr", self.mixer()[:, k, : k + 1], state)
        return self.mlp(u), state


class Refiner(_Mixed):
    """The trained form. Parameter names are those of the `speculators` package, so that weights move both ways.

    vocab_size V, hidden_size D, block_size B, rank R, draft_vocab_size V_draft (None: V). For V 151936, D 4096, B 16,
    R 256 it has 80.5 M parameters, 2.75 M of them outside the two vocabulary maps. use_h, use_g, use_mixer, use_mlp:
    a part that is off has no parameters; with all four off this is MarkovHead with W₁ = W_e·W_in,tokᵀ.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        block_size: int,
        rank: int = 256,
        draft_vocab_size: int | None = None,
        use_h: bool = True,
        use_g: bool = True,
        use_mixer: bool = True,
        use_mlp: bool = True,
    ):
        super().__init__()
        self.rank, self.use_h, self.use_g, self.use_mixer, self.use_mlp = rank, use_h, use_g, use_mixer, use_mlp
        # The order below is the order of the random draws: one seed, one start.
        self.token_embed = nn.Embedding(vocab_size, rank)
        if use_h:
            self.down_h = nn.Linear(hidden_size, rank, bias=False)
        if use_g:
            self.down_g = nn.Linear(hidden_size, rank, bias=False)
        self.in_proj = nn.Linear((use_h + use_g + 1) * rank, rank, bias=False)
        if use_mixer:
            self.mix_l = nn.Parameter(torch.zeros(rank, block_size, block_size))
        if use_mlp:
            self.mlp_gate = nn.Linear(rank, 2 * rank, bias=False)
            self.mlp_up = nn.Linear(rank, 2 * rank, bias=False)
            self.mlp_down = nn.Linear(2 * rank, rank, bias=False)
        self.readout = nn.Linear(rank, draft_vocab_size or vocab_size, bias=False)
        self.init_weights()
        if use_mixer:
            nn.init.zeros_(self.mix_l)  # the mixer starts as the identity

    def prepare(self, hidden: Tensor) -> Tensor:
        """hidden [N,B,D] -> in_proj's columns for h and g applied: [N,B,R]"""
        inputs = [self.down_h(hidden)] if self.use_h else []
        if self.use_g:
            inputs.append(self.down_g(hidden.mean(1, keepdim=True)).expand(-1, hidden.shape[1], -1))
        if not inputs:
            return _nothing(hidden, self.rank)
        return F.linear(torch.cat(inputs, -1), self.in_proj.weight[:, : -self.rank])

    def fuse(self, prepared, prev_ids):
        return prepared + F.linear(self.token_embed(prev_ids), self.in_proj.weight[:, -self.rank :])

    def mixer(self):
        return self.mix_l.tril() + torch.eye(self.mix_l.shape[1], dtype=self.mix_l.dtype, device=self.mix_l.device)

    def folded(self) -> CorrectionHead:
        """The inference form: same function, linear maps multiplied out in fp64 and rounded once. A head built on this
        one that changes what is folded stays as it is."""
        parts = ("latent", "prepare", "fuse", "mixer", "mlp")
        return FoldedRefiner(self) if all(getattr(type(self), p) is getattr(Refiner, p) for p in parts) else self


class FoldedRefiner(_Mixed):
    """u = (I + tril L)(H h + S g + E[prev]), z = u + MLP(u): fuse and mix are linear, so they fold.

    E = W_e·W_in,tokᵀ [V,R], H = W_in,h·W_h [R,D], S = W_in,g·W_g [R,D]; MLP and readout are the refiner's own modules.
    A part that the refiner does not use is not here either.
    """

    def __init__(self, refiner: Refiner):
        super().__init__()
        dtype = refiner.in_proj.weight.dtype
        *columns, token = refiner.in_proj.weight.detach().double().split(refiner.rank, 1)
        for name in ("rank", "use_h", "use_g", "use_mixer", "use_mlp"):
            setattr(self, name, getattr(refiner, name))

        def fold(left: Tensor, right: Tensor) -> nn.Parameter:
            return nn.Parameter((left @ right.detach().double()).to(dtype), requires_grad=False)

        self.table = fold(refiner.token_embed.weight.detach().double(), token.T)
        if self.use_h:
            self.map_h = fold(columns[0], refiner.down_h.weight)
        if self.use_g:
            self.map_g = fold(columns[-1], refiner.down_g.weight)
        if self.use_mixer:
            # Channels lie next to each other in memory, as the kernel reads them; the shape is [R,B,B] all the same.
            mix = refiner.mixer().detach().permute(1, 2, 0).contiguous().permute(2, 0, 1)
            self.mix = nn.Parameter(mix, requires_grad=False)
        if self.use_mlp:
            self.mlp_gate, self.mlp_up, self.mlp_down = refiner.mlp_gate, refiner.mlp_up, refiner.mlp_down
        self.readout = refiner.readout

    def prepare(self, hidden):
        prepared = F.linear(hidden, self.map_h) if self.use_h else _nothing(hidden, self.rank)
        return prepared + F.linear(hidden.mean(1, keepdim=True), self.map_g) if self.use_g else prepared

    def fuse(self, prepared, prev_ids):
        return prepared + F.embedding(prev_ids, self.table)

    def mixer(self):
        return self.mix

    def constant(self, prepared: Tensor, known_ids: Tensor) -> Tensor:
        """C [N,B,R] in fp32 at least: what no pass changes of u = C + M·E[prev]; known_ids [N,·]: the tokens (before,
        anchor) or (anchor) that open prev_ids."""
        x = at_least_fp32(prepared).clone()
        x[:, : known_ids.shape[1]] += F.embedding(known_ids, self.table)
        return torch.einsum("rkj,njr->nkr", at_least_fp32(self.mix), x).contiguous() if self.use_mixer else x

    def weights(self) -> Folded:
        """What a pass needs beside C, as xpress.kernels.refiner_latent takes it."""
        mlp = [part.weight for part in (self.mlp_gate, self.mlp_up, self.mlp_down)] if self.use_mlp else []
        return Folded(self.table, self.mix if self.use_mixer else None, *mlp)


def _nothing(hidden: Tensor, rank: int) -> Tensor:
    """[N,B,R] of zeros that take no memory: what a head without h and g prepares."""
    return hidden.new_zeros(()).expand(*hidden.shape[:2], rank)
