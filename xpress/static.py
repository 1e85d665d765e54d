"""Decoding in buffers that never move: what CUDA graphs can repeat.

The states of N sequences lie in tensors of a fixed length, and a step reads and writes them at places that it is given
as a tensor. So a step is a pure function of (ids, lengths) over these buffers, the same launches whatever the lengths
are. Its attention covers the T positions of a bucket (512, 1024, 2048, …), which is up to twice what the sequences
hold: that is the price of never asking the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xpress.kernels import Graphs
from xpress.linear import linear
from xpress.sequences import Sequences, on_device

SMALLEST = 512  # positions of the first bucket
SIZES = (1, 2, 4, 8)  # batch sizes that have graphs unless others are asked for


def bucket(need: int) -> int:
    """Positions that a step covers which needs so many: SMALLEST, or twice that, four times, …"""
    length = SMALLEST
    while length < need:
        length *= 2
    return length


class Buffers:
    """States by name, [rows, length, …], kept from one decoding to the next so that graphs find them where they were.

    They grow where more sequences or longer ones come, and then move.
    """

    def __init__(self):
        self.rows = self.length = 0
        self._kept: dict = {}

    def tensors(self) -> list[Tensor]:
        return list(self._kept.values())

    def reserve(self, rows: int, length: int, used: int = 0):
        """Room for so many sequences of that length; the first `used` positions of all are kept."""
        if rows <= self.rows and length <= self.length:
            return
        self.rows, self.length = max(rows, self.rows), max(length, self.length)
        for name, old in self._kept.items():  # one after another: never two copies of everything
            grown = self._kept[name] = self._made(old)
            grown[: len(old), :used] = old[:, :used]

    def like(self, name, states: Tensor) -> Tensor:
        """The buffer of these states [N,n,…], made where there is none or where they have become of another kind."""
        kept = self._kept.get(name)
        facts = states.shape[2:], states.dtype, states.device
        if kept is None or (kept.shape[2:], kept.dtype, kept.device) != facts:
            kept = self._kept[name] = self._made(states)
        return kept

    def _made(self, states: Tensor) -> Tensor:
        with torch.inference_mode(False):  # else nothing could be written to them outside of it, as captures do
            return torch.zeros(self.rows, self.length, *states.shape[2:], dtype=states.dtype, device=states.device)

    def take(self, rows: list[int], used: int):
        """These rows become the first ones."""
        for kept in self._kept.values():
            kept[: len(rows), :used] = kept.index_select(0, on_device(rows, kept.device))[:, :used]


class StaticSequences(Sequences):
    """Sequences whose states lie in Buffers. Their opening step is written here, later ones through a Window."""

    def __init__(self, lengths: list[int], buffers: Buffers):
        super().__init__(lengths)
        self.buffers = buffers

    def open(self, new: int):
        super().open(new)
        self.buffers.reserve(len(self), self.length, self.longest)

    @property
    def length(self) -> int:
        """T of the open step."""
        return bucket(self.longest + self.new)

    def write(self, name, states: Tensor) -> Tensor:
        """states [N,n,…] of the opening step -> the same, which are all there is."""
        if self.longest:
            raise RuntimeError(f"sequences of {self.lengths} tokens go on through a Window, not by write")
        self.buffers.like(name, states)[: len(self), : self.new] = states
        return states

    def select(self, rows: list[int]):
        self.buffers.take(rows, self.longest)
        super().select(rows)


class Window:
    """One step's view of Buffers, of tensors alone: n new states behind starts [N] in each of the first N rows, of T
    positions in all. Stands for Sequences in the layers of that step."""

    fixed = True

    def __init__(self, buffers: Buffers, starts: Tensor, new: int, length: int):
        self.buffers, self.length, N, device = buffers, length, len(starts), starts.device
        self._places = starts[:, None] + torch.arange(new, device=device)
        self._flat = (self._places + torch.arange(N, device=device)[:, None] * buffers.length).flatten()

    def positions(self, device=None) -> Tensor:
        """[N,n]: where the new states stand."""
        return self._places

    def mask(self, device=None) -> tuple[bool, Tensor]:
        """As Sequences.mask."""
        seen = torch.arange(self.length, device=self._places.device) <= self._places[..., None]
        return False, seen[:, None]

    def write(self, name, states: Tensor) -> Tensor:
        """states [N,n,…] -> all T positions [N,T,…], what lies behind the new ones included."""
        kept = self.buffers.like(name, states)
        kept.flatten(0, 1).index_copy_(0, self._flat, states.flatten(0, 1))
        return kept[: len(states), : self.length]


def additive(seen: Tensor, dtype: torch.dtype, groups: int) -> Tensor:
    """seen [N,1,n,T] bool -> what packed_attention adds to the scores, [N,1,g·n,T]: made once, not in every layer."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, float("-inf")).repeat(1, 1, groups, 1)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [N,n,kv·g,d], k and v [N,T,kv,d], mask of `additive` -> [N,n,kv·g·d].

    The g query heads of one key head are rows of one product: with a mask, not every backend has grouped queries, and
    torch would then take the one that writes all scores down."""
    n, kv = q.shape[1], k.shape[2]
    q = q.unflatten(2, (kv, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return out.unflatten(2, (-1, n)).permute(0, 3, 1, 2, 4).flatten(2)


class StaticSteps:
    """A target's verification passes, embedding to logits, one graph for each (N, n, T) on a GPU.

    sizes: batch sizes that have graphs. Raises ValueError for what is no list of whole numbers from 1 up.
    """

    def __init__(self, sizes=SIZES):
        if not isinstance(sizes, (list, tuple)) or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"target.graphs={sizes}: give a list of batch sizes from 1 up, [1,2,4,8] say")
        self.sizes, self.buffers = tuple(sizes), Buffers()
        self.graphs = Graphs(self._step, self.sizes, "verification", self._tensors)
        self._weights: list[Tensor] = []

    def __deepcopy__(self, memo) -> StaticSteps:
        """A copied target starts with nothing: states and graphs are those of one."""
        return StaticSteps(self.sizes)

    def open(self, body, lm_head, num_rows: int) -> StaticSequences:
        """body: the target's LeanBody. Weights may have moved since the last sequences."""
        self._body, self._lm_head = body, lm_head
        self._weights = [*body.tensors(), *lm_head.parameters()]
        return StaticSequences([0] * num_rows, self.buffers)

    def __call__(self, ids: Tensor, sequences: StaticSequences, layer_ids) -> tuple[Tensor, Tensor | None]:
        """ids [N,n] -> logits [N,n,V], hidden [N,n,M·D] of `layer_ids` (None without any). On a GPU they are a graph's
        own: the next call overwrites them."""
        sequences.open(ids.shape[1])
        starts = on_device(sequences.lengths, ids.device)
        return self.graphs(ids, starts, length=sequences.length, layer_ids=tuple(layer_ids))

    def _step(self, ids: Tensor, starts: Tensor, *, length: int, layer_ids: tuple):
        last, captured = self._body(ids, Window(self.buffers, starts, ids.shape[1], length), layer_ids)
        scores = linear(last, self._lm_head.weight, self._lm_head.bias)
        return scores, torch.cat([captured[l] for l in layer_ids], -1) if layer_ids else None

    def _tensors(self) -> list[Tensor]:
        return self._weights + self.buffers.tensors()
