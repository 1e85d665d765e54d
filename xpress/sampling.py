"""Temperature, top-k and top-p, and random numbers that depend on nothing but their address.

Noise is counter-based (Philox 2x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the
number for (seed, stream, round, slot, id) is a pure function of these five, so it is the same whatever was skipped,
chunked or computed before it, and a prompt's samples do not depend on the order of the prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
DRAFT, ACCEPT, TARGET = range(3)  # streams: Gumbel noise of the draft, acceptance tests, the target's own samples
MAX_SLOTS = 256  # a round's slots share one counter word with the round


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy; `accept` names the rule of verification above 0:

    rejection  draft from q, accept with min(1, p/q), resample from the positive part of p − q
    match      greedy draft, accepted where the target's own sample is the same token
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    accept: str = "rejection"

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):  # NaN fails every comparison
            raise ValueError(f"temperature={self.temperature}: must be 0 (greedy) or above")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be 0 (off) or a number of tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must lie in (0, 1]; 1 switches it off")
        if self.accept not in ("rejection", "match"):
            raise ValueError(f"accept={self.accept!r}: known rules are 'rejection' and 'match'")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def greedy_draft(self) -> bool:
        return self.greedy or self.accept == "match"

    def adjust(self, logits: Tensor) -> Tensor:
        """Logits [...,V] -> logits of the distribution that is sampled: ℓ/T, −inf outside top-k and top-p.

        Applied to target and draft alike, which keeps the acceptance rule exact. Needs temperature > 0.
        """
        logits = at_least_fp32(logits) / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            ranked = logits.sort(dim=-1, descending=True, stable=True).indices[..., self.top_k :]
            logits = logits.scatter(-1, ranked, float("-inf"))
        if self.top_p < 1:
            ranked, order = logits.sort(dim=-1, descending=True, stable=True)
            probs = ranked.softmax(-1)
            outside = probs.cumsum(-1) - probs >= self.top_p  # the token that crosses top_p stays in
            logits = ranked.masked_fill(outside, float("-inf")).gather(-1, order.argsort(-1))
        return logits


GREEDY = Sampling()


def at_least_fp32(x: Tensor) -> Tensor:
    """bf16 and fp16 to fp32; fp32 and fp64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def argmax(logits: Tensor) -> Tensor:
    """[...,V] -> [...]: the largest logit, the lowest id on equality (−0 equals +0).

    torch.argmax keeps the first of equal values on the CPU but does not promise it; this does, on every device.
    """
    if not logits.is_cuda:
        width = math.gcd(logits.shape[-1], 256)
        if width < 16:
            return logits.argmax(-1)
        runs = logits.unflatten(-1, (-1, width))  # amax is vectorised on the CPU, argmax is not: ten times faster
        first = runs.amax(-1).argmax(-1, keepdim=True)
        inner = runs.gather(-2, first[..., None].expand(*first.shape, width))[..., 0, :]
        return first[..., 0] * width + inner.argmax(-1)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return ids.where(logits == logits.amax(-1, keepdim=True), logits.shape[-1] - 1).amin(-1)


def philox(key: Tensor | int, low: Tensor, high: Tensor | int) -> tuple[Tensor, Tensor]:
    """Philox 2x32-10 on int64 tensors that hold 32-bit words: two words for each counter (low, high)."""
    for _ in range(10):
        product = low * 0xD256D193  # wraps in 64 bits; both halves are still exact
        low, high = ((product >> 32) & _MASK) ^ key ^ high, product & _MASK
        key = (key + 0x9E3779B9) & _MASK
    return low, high


def gumbel_of(word: Tensor) -> Tensor:
    """32-bit words (int64) -> Gumbel noise in fp32."""
    u = ((word >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))


def _mix(seed: int, stream: int) -> int:
    """(seed, stream) -> 32-bit key (splitmix64's finaliser)."""
    z = (seed * 4 + stream + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 32


@dataclass(frozen=True)
class Noise:
    """Random numbers of N responses in the same round, addressed by (seed, stream, round, slot, id).

    seeds: one for each response; a plain number stands for one response."""

    seeds: tuple[int, ...] | int
    round: int = 0

    def __post_init__(self):
        if isinstance(self.seeds, int):
            object.__setattr__(self, "seeds", (self.seeds,))

    def _words(self, stream: int, slots: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """slots and ids broadcast to [...] -> two words [N,...]"""
        slots, ids = torch.broadcast_tensors(slots, ids)
        key, counter = self.address(stream, slots.device).view(-1, 2, *[1] * slots.dim()).unbind(1)
        return philox(key, ids[None], counter + slots[None])

    @staticmethod
    def _slots(num_slots: int, device) -> Tensor:
        if num_slots > MAX_SLOTS:
            raise ValueError(f"blocks of more than {MAX_SLOTS} slots cannot be sampled")
        return torch.arange(num_slots, device=device)

    def address(self, stream: int = DRAFT, device=None) -> Tensor:
        """[N,2] int64 of a stream in this round, for code that computes the numbers where it uses them: the key word,
        and the counter word of slot 0. Word of (slot, id): philox(key, id, counter + slot)."""
        keys = [[_mix(seed, stream), self.round * MAX_SLOTS] for seed in self.seeds]
        # without waiting for the device
        return torch.tensor(keys, dtype=torch.long).view(-1, 2).to(device or "cpu", non_blocking=True)

    def gumbel(self, num_slots: int, ids: Tensor) -> Tensor:
        """Γ [N,num_slots,len(ids)] in fp32, frozen for this round; ids are TARGET ids (int64).

        −log(−log u) with u on a grid of 2⁻²³, so the noise lies in [−2.82, 16.64]: beyond that the tail is cut.
        """
        slots = self._slots(num_slots, ids.device)[:, None]
        word, _ = self._words(DRAFT, slots, ids[None, :])
        return gumbel_of(word)

    def uniform(self, stream: int, num_slots: int, device=None) -> Tensor:
        """u [N,num_slots] in fp64, strictly between 0 and 1, one for each slot of this round."""
        slots = self._slots(num_slots, device)
        low, high = self._words(stream, slots, torch.zeros_like(slots))
        return ((low << 20) + (high >> 12)).double().add(0.5) * 2.0**-52


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """One id for each row: probs [...,V] (need not sum to 1), u [...] in (0, 1) -> ids [...], by inversion in fp64."""
    steps = probs.double().cumsum(-1)
    ids = torch.searchsorted(steps, (u.to(steps.device) * steps[..., -1])[..., None], right=True).squeeze(-1)
    last = (probs > 0).double().cumsum(-1).argmax(-1)  # rounding may point behind the last possible token
    return torch.minimum(ids, last)
