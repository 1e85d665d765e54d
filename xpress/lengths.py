"""How much of a draft is verified. A policy is any callable Draft -> kept [N], from 0 to the G draft tokens of a block.

The rest of a draft is thrown away before the target sees it, so what a policy may look at decides what is lossless. At
temperature 0, and under `match`, it may look at everything: the output is the target's own whatever is proposed. Under
rejection it must decide on token k without having seen it. A policy that keeps likely tokens and drops unlikely ones
changes the distribution of what is proposed, and q is then no longer what the tokens were drawn from.
"""

from __future__ import annotations

from torch import Tensor

from xpress.draft import Draft
from xpress.heads import ConfidenceHead, CorrectionHead
from xpress.heads.confidence import rows_of

POLICIES = ("full", "confidence")


def check_policy(policy: str, threshold: float | None):
    """Raises ValueError for a policy that is not known, and unless a threshold in [0, 1] is given where it is used and
    only there."""
    if policy not in POLICIES:
        raise ValueError(f"length_policy={policy}: known are {', '.join(POLICIES)}")
    if policy == "full":
        if threshold is not None:
            raise ValueError(f"threshold={threshold}: length_policy=full has none; drop it, or choose confidence")
    elif threshold is None:
        raise ValueError("length_policy=confidence needs threshold=<0 … 1>: drafts end before the first c_k below it")
    elif type(threshold) not in (int, float) or not 0 <= threshold <= 1:
        raise ValueError(f"threshold={threshold}: must be a probability from 0 (full drafts) to 1")


class ByConfidence:
    """DSpark's policy (arXiv 2607.05147): a draft ends before its first token with c_k < threshold.

    c_k = sigmoid(w · [h_k ; W₁[prev_k]] + b), the probability that draft token k is accepted after all before it were.
    It reads the slot's hidden state and the final draft's token before k, the anchor for k = 1; never draft token k nor
    a later one. So the cut is decided before token k is seen, and output under rejection sampling stays the target's.

    head: the correction head whose token_embed the confidence head was trained on, as it was loaded: some folded forms
    keep no such rows. Decoding may use head.folded() beside it. None where confidence reads hidden states alone.
    Raises ValueError without a confidence head, for a threshold outside [0, 1], and for a head without rows of the size
    that the confidence head reads.
    """

    def __init__(self, head: CorrectionHead | None, confidence: ConfidenceHead | None, threshold: float):
        check_policy("confidence", threshold)
        if confidence is None:
            raise ValueError("length_policy=confidence: there is no confidence head; choose length_policy=full")
        self.rows = None
        if confidence.rank:
            self.rows = rows_of(head)
            have = None if self.rows is None else self.rows.embedding_dim
            if have != confidence.rank:
                what = "no head" if head is None else type(head).__name__
                what += " has no token_embed" if have is None else f" has rows of {have} numbers"
                raise ValueError(
                    f"length_policy=confidence: the confidence head reads rows of {confidence.rank} numbers, and "
                    f"{what}; give the head that it was trained with, before head.folded(), or choose "
                    "length_policy=full"
                )
        self.confidence, self.threshold = confidence, threshold

    def of(self, draft: Draft) -> Tensor:
        """c [N,G] of every draft token"""
        block = draft.block
        prev = block.rows(block.prev_ids(draft.ids))
        return self.confidence(block.rows(block.hidden), None if self.rows is None else self.rows(prev))

    def __call__(self, draft: Draft) -> Tensor:
        """-> kept [N]: tokens before the first with c_k < threshold"""
        return (self.of(draft) >= self.threshold).long().cumprod(1).sum(1)
