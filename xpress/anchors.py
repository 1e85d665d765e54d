"""Training blocks: where they start, what they may see, what they are trained to say.

At most max_anchors a sequence are drawn without replacement from (seed, epoch, row id), never from the rank or from
what else shares the batch, among positions whose token and next token are supervised in the same document. A block
sees target features strictly before its anchor, by position, of its own document, and its own slots. Its labels stop
counting at the first unsupervised token.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from xpress.block import target_index

PADDING = -1  # document id of padding


@dataclass(frozen=True)
class Batch:
    """S sequences of T tokens. ids, positions, documents [S,T] (positions restart with each document; documents of
    padding are PADDING); supervised [S,T]: tokens that the target generated; row_ids: for each sequence the stable
    names of its documents."""

    ids: Tensor
    positions: Tensor
    documents: Tensor
    supervised: Tensor
    row_ids: list[tuple[str, ...]]

    def to(self, device) -> Batch:
        tensors = (t.to(device) for t in (self.ids, self.positions, self.documents, self.supervised))
        return Batch(*tensors, self.row_ids)


@dataclass(frozen=True)
class Anchors:
    """Blocks of a batch: index [S,A] of each anchor in its sequence, valid [S,A] (padding blocks are False), and for
    each draft token the index [S,A,G] of the target logits that judge it, its label and its mask [S,A,G]."""

    index: Tensor
    valid: Tensor
    judge: Tensor
    labels: Tensor
    mask: Tensor
    anchor_ids: Tensor
    before_ids: Tensor
    positions: Tensor
    visible: Tensor

    @property
    def num_blocks(self) -> int:
        return int(self.valid.sum())

    def to(self, device) -> Anchors:
        return Anchors(**{name: value.to(device) for name, value in vars(self).items()})


def candidates(batch: Batch, span: int = 1) -> Tensor:
    """[S,T]: positions that may open a block: supervised, as are the next `span` tokens of the same document."""
    good = batch.supervised & (batch.documents != PADDING)
    can = good.clone()
    for k in range(1, span + 1):
        can[:, -k:] = False
        can[:, :-k] &= good[:, k:] & (batch.documents[:, :-k] == batch.documents[:, k:])
    return can


def draw(batch: Batch, max_anchors: int, seed: int, epoch: int, span: int = 1) -> tuple[Tensor, Tensor]:
    """-> index [S,A] ascending, valid [S,A], A ≤ max_anchors the most that any sequence of the batch has.

    Every candidate of a document gets a random number from (seed, epoch, row id); a sequence keeps its smallest.
    """
    chosen = []
    for names, documents, can in zip(batch.row_ids, batch.documents.cpu(), candidates(batch, span).cpu()):
        places, numbers = [], []
        for d, name in enumerate(names):
            own = (can & (documents == d)).nonzero()[:, 0]
            key = hashlib.blake2b(f"{seed}/{epoch}/{name}".encode(), digest_size=8).digest()
            random = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
            places.append(own)
            numbers.append(torch.rand(len(own), generator=random, dtype=torch.float64))
        picked = torch.cat(numbers).argsort()[:max_anchors]
        chosen.append(torch.cat(places)[picked].sort().values)
    index = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1)
    return index.clamp(min=0).to(batch.ids.device), (index >= 0).to(batch.ids.device)


def lay_out(batch: Batch, index: Tensor, valid: Tensor, num_draft: int) -> Anchors:
    """Everything that the blocks at `index` [S,A] need. Labels and judges come from `target_index` alone."""
    S, A = index.shape
    T = batch.ids.shape[1]

    def at(values: Tensor, places: Tensor) -> Tensor:
        return values.gather(1, places.reshape(S, -1).clamp(0, T - 1)).view(places.shape)

    k = torch.arange(1, num_draft + 1, device=index.device)
    judge = target_index(index[..., None], k)
    label = judge + 1
    own = at(batch.documents, index)
    inside = (label < T) & (at(batch.documents, label) == own[..., None]) & at(batch.supervised, label)
    mask = (inside & valid[..., None]).long().cumprod(-1).bool()
    has_before = (index > 0) & (at(batch.documents, index - 1) == own)
    places = torch.arange(T, device=index.device)
    return Anchors(
        index=index,
        valid=valid,
        judge=judge.clamp(max=T - 1),
        labels=at(batch.ids, label),
        mask=mask,
        anchor_ids=at(batch.ids, index),
        before_ids=at(batch.ids, torch.where(has_before, index - 1, index)),
        positions=at(batch.positions, index),
        visible=(places < index[..., None]) & (batch.documents[:, None] == own[..., None]),
    )
