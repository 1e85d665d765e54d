"""The one law of a correction head.

A head maps (hidden [N,B,D], prev_ids [N,B]) to a logit bias [N,B,V_draft], and the bias at slot k depends on
prev_ids[:, :k+1] only. On `hidden` it may depend freely: the drafter's pass is over. It knows nothing of how slots
align with tokens, how the fixed point is solved or how it is trained.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xpress.kernels import Folded, Screen
from xpress.sampling import at_least_fp32


class CorrectionHead(nn.Module, ABC):
    """Base of every head. A new one is a file with `__init__` (which makes `readout`) and `latent`.

    readout: nn.Linear(R, V_draft, bias=False). A slot that is not corrected has latent zero, hence bias zero.
    """

    readout: nn.Linear
    screen: Screen | None = None  # greedy drafts read this copy of the readout instead, with the same result
    top_c: int = 0  # greedy drafts look at so many candidates only: fast, not exact
    graph_sizes: tuple[int, ...] = (1,)  # batch sizes whose refinement runs as a CUDA graph

    def __new__(cls, *args, **kwargs):
        head = super().__new__(cls)
        try:
            given = inspect.signature(cls.__init__).bind(None, *args, **kwargs)
        except TypeError:  # a copy, which gets its config with its state; or `__init__` says what is wrong
            return head
        given.apply_defaults()
        arguments = dict(list(given.arguments.items())[1:])
        arguments.update(arguments.pop("kwargs", {}))
        object.__setattr__(head, "config", {"_target_": f"{cls.__module__}.{cls.__qualname__}", **arguments})
        return head

    def __getstate__(self) -> dict:
        """Copies begin without the buffers and graphs of decoding."""
        return {name: value for name, value in self.__dict__.items() if name != "_steps"}

    def bind(self, target) -> CorrectionHead:
        """Borrow frozen parts of the target, outside parameters and state dict -> self."""
        return self

    def prepare(self, hidden: Tensor) -> Tensor:
        """hidden [N,B,D] -> what no pass changes, computed once for a block."""
        return hidden

    @abstractmethod
    def latent(self, prepared: Tensor, prev_ids: Tensor) -> Tensor:
        """prepared, prev_ids [N,B] (target ids) -> [N,B,R], causal in prev_ids."""

    def step(self, prepared: Tensor, prev: Tensor, k: int, state):
        """One slot of `latent`: prev [N] at slot k (0-based), state of slot k − 1 (None at 0) -> [N,R], state.

        The default runs the whole block and keeps one slot; heads override it to make the serial solver O(B).
        """
        if state is None:
            state = prev.new_zeros(prepared.shape[0], prepared.shape[1])
        state = state.clone()
        state[:, k] = prev
        return self.latent(prepared, state)[:, k], state

    def forward(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """hidden [N,B,D], prev_ids [N,B] -> logit bias [N,B,V_draft]"""
        return self.readout(self.latent(self.prepare(hidden), prev_ids))

    def folded(self) -> CorrectionHead:
        """The inference form of the same function; a head without one decodes as it is."""
        return self

    def weights(self) -> Folded | None:
        """What xpress.kernels needs beside `constant` to run a pass of this head; None: `latent` runs it."""
        return None

    def init_weights(self, std: float = 0.02):
        """N(0, std) for every matrix, zero for every bias."""
        for weight in self.parameters():
            nn.init.normal_(weight, std=std) if weight.dim() > 1 else nn.init.zeros_(weight)


def corrected_logits(base: Tensor, latent: Tensor, readout: nn.Linear) -> Tensor:
    """ℓ = s + W_r z in fp32 (fp64 where everything is fp64): base [...,V_draft], latent [...,R] -> [...,V_draft].

    bf16 factors are widened before the product, so that the sum is never rounded before it is compared.
    """
    weight, base = at_least_fp32(readout.weight), at_least_fp32(base)
    return base + F.linear(latent.to(weight.dtype), weight).to(torch.promote_types(base.dtype, weight.dtype))
