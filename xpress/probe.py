"""What no clock sees: where the target's token stands among the base logits, and what acceptance was to be expected.

All sums run over rounds and are additive. Of draft token k only rounds count that accepted all tokens before it, since
the target judges k under the draft's own prefix, and of drafts that are cut only tokens that were verified.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.nn.functional import pad

from xpress.sampling import Sampling, argmax, at_least_fp32

RECALL = (1, 2, 4, 8, 16, 64, 256)
NOWHERE = torch.iinfo(torch.long).max


class Probe:
    """`observe` for decode_batch. For each row, sums by draft token:

    reached    rounds that accepted all tokens before it; rounds: all that verified it; accepted: of the reached, how
               many it was accepted in
    recall[k]  reached rounds whose target token is among the k largest base logits (never outside a draft vocabulary)
    mean       rank of the refined token in the base logits, from 1; first: how often it is 1
    expected   acceptance that the rule promises: Σ_x min(p, q) under rejection, p of the draft token under match
    """

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self.sums: dict = defaultdict(dict)

    def __call__(self, draft, scores: Tensor, verdict, rows: list[int]):
        G = draft.ids.shape[1]
        if not G:
            return
        block, slots = draft.block, torch.arange(G, device=scores.device)
        accepted = verdict.num_accepted.to(scores.device)[:, None]
        judged = torch.ones_like(draft.ids, dtype=torch.bool) if draft.kept is None else draft.verified
        reached = judged & (slots <= accepted)
        base = at_least_fp32(block.base_logits(0, G))
        wanted, drafted = rank(block, base, argmax(scores[:, :G])), rank(block, base, draft.ids)
        found = {"reached": reached, "rounds": judged, "accepted": slots < accepted}
        found |= {("recall", k): reached & (wanted <= k) for k in RECALL}
        found |= {"mean": drafted * judged, "first": judged & (drafted == 1)}
        if not self.sampling.greedy:
            p = self.sampling.adjust(scores[:, :G]).softmax(-1)
            q = draft.q()
            promised = p.gather(-1, draft.ids[..., None])[..., 0] if q is None else torch.minimum(p, q).sum(-1)
            found["expected"] = promised * reached
        for key, value in found.items():
            whole = pad(value.double(), (0, block.num_draft - G))  # drafts that were cut are shorter
            for row, own in zip(rows, whole):
                sums = self.sums[row]
                sums[key] = sums[key] + own if key in sums else own

    def of(self, row: int) -> dict:
        """JSON-able sums of a row; {} where it had no round."""
        found: dict = {"recall": {}}
        for key, value in self.sums.get(row, {}).items():
            where = (found["recall"], str(key[1])) if isinstance(key, tuple) else (found, key)
            where[0][where[1]] = value.tolist()
        return found if found["recall"] else {}


def rank(block, base: Tensor, ids: Tensor) -> Tensor:
    """Ranks from 1 of target ids [N,G] in base logits [N,G,V_draft]: 1 is the drafter's argmax, so of equal logits the
    first stands before the others. Ids that cannot be drafted stand behind everything, however far one looks."""
    if block.draft_ids is None:
        places, known = ids, torch.ones_like(ids, dtype=torch.bool)
    else:
        order = block.draft_ids.argsort()
        places = torch.searchsorted(block.draft_ids[order], ids).clamp(max=len(order) - 1)
        places = order[places]
        known = block.draft_ids[places] == ids
    own, columns = base.gather(-1, places[..., None]), torch.arange(base.shape[-1], device=base.device)
    before = (base > own) | ((base == own) & (columns < places[..., None]))
    return (before.sum(-1) + 1).where(known, NOWHERE)
