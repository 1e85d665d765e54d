"""One block of draft tokens, and the alignment that hides the two conventions of public checkpoints.

The alphabet of the library, written once:

    N  blocks                     B  slots of a block, anchor slot included
    G  drafted tokens             D  hidden size of the drafter
    M  captured target layers     R  rank of a head
    V  vocabulary (V_draft: the drafter's, possibly reduced)
    T  positions of a sequence    A  anchors per sequence      S  sequences
    K  Jacobi passes              Γ  frozen sampling noise     k  draft token, counted from 1

Draft token k is always the token at position anchor + k; the target's distribution for it stands at `target_index`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def target_index(anchor, k):
    """Position whose target logits judge draft token k: anchor + k − 1. The token itself stands one further.

    The only place where the shift between a token and the logits that predict it is written down: labels, target
    distributions, decoding and metrics all call it. Works on ints and on tensors.
    """
    return anchor + k - 1


@dataclass(frozen=True)
class Layout:
    """How the B slots of a block map to the tokens after the anchor.

    `num_known` tokens open `prev_ids`: (before, anchor) for infill, (anchor) for next. Slot num_known − 1 is the first
    that predicts a draft token.
    """

    name: str
    num_known: int

    @property
    def first_slot(self) -> int:
        return self.num_known - 1

    def max_draft(self, block_size: int) -> int:
        """Most tokens that a block of `block_size` slots can draft: B − 1 (infill) or B (next)."""
        return block_size - self.first_slot


INFILL = Layout("infill", 2)  # dFlash, XPress: slot j predicts the token at anchor + j; slot 0 is the anchor itself
NEXT = Layout("next", 1)  # DSpark, Domino: slot j predicts the token at anchor + j + 1
LAYOUTS = {layout.name: layout for layout in (INFILL, NEXT)}


@dataclass(frozen=True)
class Block:
    """N drafted blocks before correction.

    hidden [N,B,D]: the drafter's final states; anchor, before [N]: target ids of the last committed token and of the
    one before it; readout: hidden [...,D] -> base logits [...,V_draft]; draft_ids [V_draft]: target id of each draft
    id, None where both vocabularies are the same.
    """

    hidden: Tensor
    anchor: Tensor
    before: Tensor
    layout: Layout
    num_draft: int
    readout: Callable[[Tensor], Tensor]
    vocab_size: int
    draft_ids: Tensor | None = None

    def __len__(self) -> int:
        return len(self.anchor)

    def __getitem__(self, part: slice) -> Block:
        """The same for some of the N blocks."""
        return replace(self, hidden=self.hidden[part], anchor=self.anchor[part], before=self.before[part])

    def rows(self, slots: Tensor) -> Tensor:
        """[N,B,...] -> [N,G,...]: the slots that predict draft tokens 1…G."""
        first = self.layout.first_slot
        return slots[:, first : first + self.num_draft]

    @property
    def known_ids(self) -> Tensor:
        """The tokens that open prev_ids, (before, anchor) or (anchor): [N,num_known]."""
        return torch.stack([self.before, self.anchor][-self.layout.num_known :], 1)

    def prev_ids(self, draft: Tensor) -> Tensor:
        """Draft tokens [N,G] (target ids) -> token before what each slot predicts [N,B]."""
        room = self.hidden.shape[1] - self.layout.num_known
        prev = torch.cat([self.known_ids, draft[:, :room]], 1)
        missing = self.hidden.shape[1] - prev.shape[1]  # slots past the last draft token feed nothing that is read
        return torch.nn.functional.pad(prev, (0, missing)) if missing else prev

    def base_logits(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Logits of the plain drafter for draft tokens start + 1 … stop: [N, stop − start, V_draft]."""
        return self.readout(self.rows(self.hidden)[:, start:stop])

    def to_target(self, ids: Tensor) -> Tensor:
        """Draft ids -> target ids, any shape."""
        return ids if self.draft_ids is None else self.draft_ids[ids]

    def over_target(self, probs: Tensor) -> Tensor:
        """Probabilities [...,V_draft] -> [...,V], zero outside the draft vocabulary."""
        if self.draft_ids is None:
            return probs
        return probs.new_zeros(*probs.shape[:-1], self.vocab_size).index_copy_(-1, self.draft_ids, probs)
