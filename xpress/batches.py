"""Rows -> sequences -> batches: packing, and which sequences an optimiser step takes.

A sequence holds one row, or with packing as many as fit into max_length, back to back as documents of their own. The
order is a function of (seed, epoch) alone, so a run can be resumed at any step and shared by any number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from xpress.anchors import PADDING, Batch
from xpress.data import Row

OPEN = 64  # sequences that packing holds open; more fill the last gaps and cost time


def collate(sequences: Sequence[Row | Sequence[Row]], max_length: int) -> Batch:
    """Rows, or lists of rows that share a sequence -> Batch, padded on the right; each row is cut at max_length.

    Positions restart with each document; the generated ids are what is supervised.
    """
    sequences = [[rows] if isinstance(rows, Row) else list(rows) for rows in sequences]
    cut = [[(row.prompt_ids + row.response_ids)[:max_length] for row in rows] for rows in sequences]
    T = max(sum(map(len, ids)) for ids in cut)
    full = lambda value: torch.full((len(sequences), T), value)  # noqa: E731
    tokens, documents, supervised, positions = full(0), full(PADDING), full(False), full(0)
    for s, (rows, documents_ids) in enumerate(zip(sequences, cut)):
        start = 0
        for d, (row, own) in enumerate(zip(rows, documents_ids)):
            place = slice(start, start + len(own))
            tokens[s, place] = torch.tensor(own)
            documents[s, place] = d
            positions[s, place] = torch.arange(len(own))
            supervised[s, start + len(row.prompt_ids) : place.stop] = True
            start = place.stop
        last = int(positions[s, start - 1])
        positions[s, start:] = torch.arange(last + 1, last + 1 + T - start)  # padding stays in the last document
    return Batch(tokens, positions, documents, supervised, [tuple(row.id for row in rows) for rows in sequences])


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First fit in the order given: indices of documents that share a sequence of at most `capacity` tokens."""
    done: list[list[int]] = []
    filling: list[tuple[int, list[int]]] = []  # (room left, documents)
    for index, length in enumerate(lengths):
        length = min(length, capacity)
        for i, (room, documents) in enumerate(filling):
            if length <= room:
                documents.append(index)
                filling[i] = (room - length, documents)
                break
        else:
            if len(filling) == OPEN:  # the fullest has the least to gain
                done.append(filling.pop(min(range(OPEN), key=lambda i: filling[i][0]))[1])
            filling.append((capacity - length, [index]))
    return done + [documents for _, documents in filling]


class Order:
    """Which sequences each optimiser step takes, over epochs without end.

    per_step: sequences of one step over all processes. Raises ValueError where an epoch holds fewer than one step.
    """

    def __init__(self, rows: list[Row], per_step: int, seed: int, max_length: int, packing: bool):
        self.rows, self.per_step, self.seed, self.max_length, self.packing = rows, per_step, seed, max_length, packing
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        self._steps = [len(self._epoch(0)) // per_step]  # of each epoch that is known
        if not self._steps[0]:
            raise ValueError(
                f"data: {len(rows)} rows make {len(self._epoch(0))} sequences, fewer than one step takes ({per_step} = "
                "batch_size · accumulation · processes); lower batch_size or accumulation, or generate more"
            )

    def _make_epoch(self, epoch: int) -> list[list[int]]:
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.rows), generator=random).tolist()
        if not self.packing:
            return [[i] for i in order]
        lengths = [len(self.rows[i].prompt_ids) + len(self.rows[i].response_ids) for i in order]
        packed = pack(lengths, self.max_length)
        shuffled = torch.randperm(len(packed), generator=random).tolist()
        return [[order[i] for i in packed[s]] for s in shuffled]

    def place(self, step: int) -> tuple[int, int]:
        """-> epoch of a step, and its number in that epoch"""
        epoch = 0
        while step >= self._steps[epoch]:
            step -= self._steps[epoch]
            epoch += 1
            if epoch == len(self._steps):
                # packing fills each epoch's sequences a little otherwise
                self._steps.append(len(self._epoch(epoch)) // self.per_step if self.packing else self._steps[0])
        return epoch, step

    def sequences(self, step: int) -> tuple[int, list[list[Row]]]:
        """-> epoch, and the sequences of that step"""
        epoch, place = self.place(step)
        chosen = self._epoch(epoch)[place * self.per_step : (place + 1) * self.per_step]
        return epoch, [[self.rows[i] for i in sequence] for sequence in chosen]
