"""States of N sequences that end at different places, kept in tensors [N,T,…].

New states are written in place behind each sequence's own end. Committing, and rolling back what was rejected, only
moves the ends: what lies behind one is never read, since `visible` hides it until it is written over.
"""

from __future__ import annotations

import torch
from torch import Tensor

SPARE = 64  # positions allocated beyond the need, so that short runs never grow


def on_device(numbers, device) -> Tensor:
    """A few whole numbers of the host as int64 on a device, without waiting for it."""
    return torch.tensor(numbers, dtype=torch.long).to(device, non_blocking=True)


class Sequences:
    """lengths: committed tokens of each sequence, on the host. Opening a step fixes where its n new states go."""

    fixed = False  # whether states lie in buffers of a fixed length

    def __init__(self, lengths: list[int]):
        self.lengths = list(lengths)
        self.new = 0  # tokens of the step that is open
        self._states: dict = {}
        self._positions: dict = {}

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @property
    def even(self) -> bool:
        return len(set(self.lengths)) <= 1

    def open(self, new: int):
        """A step that writes `new` states behind the end of every sequence."""
        self.new = new
        self._positions.clear()

    def positions(self, device) -> Tensor:
        """[N,n]: where the open step's tokens stand."""
        found = self._positions.get(device)
        if found is None:
            starts = on_device(self.lengths, device)[:, None]
            found = self._positions[device] = starts + torch.arange(self.new, device=device)
        return found

    def write(self, name, states: Tensor) -> Tensor:
        """states [N,n,…] of the open step -> everything so far [N,T,…], T up to the longest sequence's new end."""
        need = self.longest + self.new
        kept = self._states.get(name)
        if kept is None or kept.shape[1] < need:
            grown = states.new_zeros(len(self), need + max(need, SPARE), *states.shape[2:])
            if kept is not None:
                grown[:, : kept.shape[1]] = kept
            kept = self._states[name] = grown
        if self.even:
            kept[:, self.longest : need] = states
        else:
            rows = torch.arange(len(self), device=states.device)[:, None]
            kept[rows, self.positions(states.device)] = states
        return kept[:, :need]

    def visible(self, device) -> Tensor:
        """[N,n,T] bool: token i of the open step sees what its own sequence holds up to and including itself."""
        return torch.arange(self.longest + self.new, device=device) <= self.positions(device)[..., None]

    def mask(self, device) -> tuple[bool, Tensor | None]:
        """(causal, mask [1 or N,1,n,T] bool or None): how the open step's tokens look at what `write` returned."""
        if self.longest == 0:  # padding stands on the right, where nothing looks: no mask, faster kernels
            return self.new > 1, None
        if self.new == 1 and self.even:
            return False, None
        return False, self.visible(device)[: 1 if self.even else None, None]

    def held(self, device) -> Tensor:
        """[N,T] bool: what is committed, T the longest sequence's length."""
        return torch.arange(self.longest, device=device) < on_device(self.lengths, device)[:, None]

    def read(self, name) -> Tensor:
        """Committed states [N,T,…], T the longest sequence's length."""
        return self._states[name][:, : self.longest]

    def commit(self, counts: list[int]):
        """Keeps the first counts[r] tokens of the open step in row r, and drops the rest."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts)]
        self.open(0)

    def select(self, rows: list[int]):
        """Keeps these sequences alone."""
        self.lengths = [self.lengths[r] for r in rows]
        self._states = {n: states.index_select(0, on_device(rows, states.device)) for n, states in self._states.items()}
        self.open(0)
