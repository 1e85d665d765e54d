"""A whole refine step, base logits to draft tokens, in buffers that never move: what one CUDA graph can hold.

    seed      keys = argmax of base, or the draw from base
    pass p    z = latents of the tokens so far, rows p … (1-based: the first p − 1 tokens are final)
              keys = argmax of base + z·Wᵀ, or the draw, of the same rows

One latent and one readout a pass and nothing between them: the keys lie in two buffers, the latents' launch prepares
the one that the readout fills, and under "auto" it compares the two and closes a block that did not change. Closed
blocks cost launches that return at once, so the host need not look.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from xpress.kernels.dispatch import fewest_columns, readout_argmax, readout_sample, refiner_latent, screened_argmax
from xpress.kernels.refiner_latent import Folded, scratch_for
from xpress.kernels.rows import UNSET, unpack
from xpress.kernels.screen import Screen


class Refined(NamedTuple):
    """ids [N,G] (target ids, int64); passes [N] (int64): passes run, the confirming one of "auto" included; settled [N]
    (int64): the pass that changed a block last, 0 for the seed (None where no one looked: all but "auto"); latent
    [N,G,R]: z of the pass that computed each row last (zero: the seed's); logit, lse [N,G] (fp32): ℓ/T of the token and
    log Σ exp(ℓ/T) of its row in that pass (None when greedy).

    latent, logit and lse are the step's own buffers: the next call overwrites them."""

    ids: Tensor
    passes: Tensor
    settled: Tensor | None
    latent: Tensor
    logit: Tensor | None
    lse: Tensor | None


class RefineStep:
    """Buffers for N blocks of G draft tokens, and the launches from base logits to tokens.

    folded: a pass's weights (`FoldedRefiner.weights`; a vanilla Markov head is `Folded(table)`), weight [V,R]: the
    readout, num_known: the layout's; ids [V]: target id of each row of the readout (None: its place); screen:
    `Screen.of(weight)`, greedy steps read it in the readout's place; sampled: draws from softmax(ℓ/T).

    Weights are referred to, not copied: values changed in place are seen. A capture around a call needs one call before
    it, which compiles kernels and makes a screen's bounds. Raises ValueError for sizes that do not fit,
    and for a screen with sampled, which knows no q.
    """

    def __init__(
        self,
        folded: Folded,
        weight: Tensor,
        *,
        num_blocks: int,
        num_draft: int,
        num_known: int,
        ids: Tensor | None = None,
        screen: Screen | None = None,
        sampled: bool = False,
    ):
        N, G, (V, R), device = num_blocks, num_draft, weight.shape, weight.device
        if N < 1 or G < 1:
            raise ValueError(f"num_blocks={N}, num_draft={G}: a step refines one token of one block at least")
        if folded.table.shape[1] != R or folded.table.device != device:
            raise ValueError(
                f"a table {tuple(folded.table.shape)} on {folded.table.device}, a readout {(V, R)} on {device}: want "
                "one rank and one device"
            )
        if ids is not None and (ids.shape != (V,) or ids.dtype != torch.long):
            raise ValueError(f"ids {tuple(ids.shape)} {ids.dtype}: want one int64 target id for each of {V} rows")
        if screen is not None and sampled:
            raise ValueError("a screen gives no q: draw without it (screen=None), or draft greedily (sampled=False)")
        self.folded, self.weight, self.ids, self.screen, self.sampled = folded, weight, ids, screen, sampled
        self.N, self.G, self.num_known = N, G, num_known
        with torch.inference_mode(False):  # buffers made in inference mode could not be written to outside of it
            # One piece of memory, so that one copy makes all of it new. Parts begin at multiples of 16 bytes, else
            # Triton would compile a second form of each kernel for the buffer that does not.
            slots, flags = N * G + N * G % 2, N + -N % 4
            self._state = torch.full((2 * slots + flags,), UNSET, dtype=torch.long, device=device)
            self._keys = self._state[: 2 * slots].view(2, slots)[:, : N * G].unflatten(1, (N, G))
            marks = self._state[2 * slots :].view(torch.int32).view(2, flags)
            self._active, self._used = marks[0, :N], marks[1, :N]
            marks[0], marks[1] = 1, 0
            self._fresh = self._state.clone()
            self._latent = torch.zeros(N, G, R, dtype=weight.dtype, device=device)
            self._zero = self._latent.new_zeros(1, 1, R).expand(N, G, R)
            self._row = tuple(torch.zeros(2, N, G, device=device)) if sampled else None
            self._counts = torch.arange(G + 1, device=device)[:, None].repeat(1, N)
            self._scratch = scratch_for(N, G, R, device)
            # The seed's readout: columns of zeros, and a single line of them for all of the vocabulary.
            self._no_latent = torch.zeros(N, G, 16, dtype=torch.bfloat16, device=device)
            self._no_weight = torch.zeros(1, 16, dtype=torch.bfloat16, device=device).expand(V, 16)

    @torch.no_grad()
    def __call__(
        self,
        base: Tensor,
        constant: Tensor,
        passes: int | str,
        *,
        address: Tensor | None = None,
        temperature: float = 1.0,
        poll: bool | None = None,
    ) -> Refined:
        """base [N,G,V], constant [N,B,R] (`FoldedRefiner.constant`), passes: K or "auto" (at most G, stopping for each
        block where a pass changed nothing) -> Refined, as xpress.refine's solver has it.

        address [N,2], temperature: of a sampled step, as in readout_sample. poll: under "auto" the host looks whether
        any block is open after each pass and stops there (None: on the CPU alone; it waits for the device and cannot
        be captured). Raises ValueError for arguments that do not fit.
        """
        auto = passes == "auto"
        if not auto and not (type(passes) is int and passes >= 0):
            raise ValueError(f"passes={passes!r}: a step runs a number of passes from 0 up, or 'auto'")
        if base.shape != (self.N, self.G, len(self.weight)):
            raise ValueError(f"base {tuple(base.shape)}: this step is for [{self.N},{self.G},{len(self.weight)}]")
        if self.sampled == (address is None):
            raise ValueError("address= belongs to a step with sampled=True, and to no other: Noise.address")
        if poll is None:
            poll = not base.is_cuda
        draw = {"address": address, "temperature": temperature} if self.sampled else {}
        active, used = (self._active, self._used) if auto else (None, None)
        columns = fewest_columns(base)
        keys, at = self._keys.unbind(0), 0
        self._state.copy_(self._fresh)
        self._choose(base, self._no_latent[..., :columns], self._no_weight[:, :columns], None, keys[0], draw)
        for p in range(self.G if auto else min(passes, self.G)):
            rows = {"first_row": p, "active": active}
            buffers = {"out": self._latent, "next_keys": keys[1 - at], "passes": used, "scratch": self._scratch}
            refiner_latent(constant, self.folded, keys[at], self.num_known, packed=True, **buffers, **rows)
            if auto and poll and not active.any():
                break
            at = 1 - at
            self._choose(base, self._latent, self.weight, self.screen, keys[at], draw, **rows)
        ids, settled = unpack(self._keys), None
        if auto:
            counted = used.long()
            # A block that was closed, or that the last pass confirmed, has the same ids in both buffers.
            settled = counted - (ids[0] == ids[1]).all(1).long()
        elif passes <= self.G:
            counted = self._counts[passes]  # no launch, but a pass too many is no reason to refuse
        else:
            counted = self._counts.new_full((self.N,), passes)
        latent = self._zero if passes == 0 else self._latent
        return Refined(ids[at], counted, settled, latent, *(self._row or (None, None)))

    def _choose(self, base, latent, weight, screen, keys, draw, **rows):
        """One readout into keys."""
        if self.sampled:
            readout_sample(base, latent, weight, self.ids, state=(keys, *self._row), packed=True, **draw, **rows)
            return
        how = {"keys": keys, "reset": False, "packed": True, **rows}
        if screen is None:
            readout_argmax(base, latent, weight, self.ids, **how)
        else:
            screened_argmax(base, latent, weight, screen, self.ids, **how)
