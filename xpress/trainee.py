"""What is trained, as one module: drafter, correction head and objective.

Its forward returns (Σ w·ℓ, Σ w) for each term: that is what accelerate wraps, since a method called beside forward
would not be synchronised. The head's self-fed rounds unroll the very pass that decoding runs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xpress.anchors import Anchors, Batch
from xpress.loss import Rows, Term, Vocabulary, chunked_loss
from xpress.metrics import leading_run
from xpress.refine import jacobi, sweep
from xpress.target import Features


class Trainee(nn.Module):
    """Drafter, head (or None) and objective as one module."""

    def __init__(self, drafter, head, terms: list[Term], train_drafter: bool = True, chunk: int = 128):
        super().__init__()
        feeds = [term.feed for term in terms]
        if not terms or len(set(feeds)) < len(feeds):
            raise ValueError("objective: give at least one term, and each feed (none, gold, self) at most once")
        if head is None and set(feeds) != {"none"}:
            raise ValueError("objective: terms with feed gold or self need a head; choose one, or objective=dflash")
        if not train_drafter and (head is None or feeds == ["none"]):
            raise ValueError("train_drafter=false leaves nothing to train; choose a head and a term that feeds it")
        self.drafter, self.head, self.terms, self.chunk = drafter, head, terms, chunk
        self.train_drafter = train_drafter
        self.drafter.requires_grad_(train_drafter)

    def forward(self, batch: Batch, anchors: Anchors, features: Features, log_norm, measure: bool = False):
        """-> sums [terms], weights [terms], and (with `measure`) leading runs {"drafter": (sum, count), …}."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.train_drafter):
            contexts = self.drafter.project(features.hidden, batch.positions)
            hidden = self.drafter(anchors.anchor_ids, anchors.positions, contexts, anchors.visible)
        keep = anchors.valid
        block = self.drafter.block(hidden[keep], anchors.anchor_ids[keep], anchors.before_ids[keep])
        labels, mask = anchors.labels[keep], anchors.mask[keep]
        latents, runs = self._latents(block, labels, mask, measure)
        weights = torch.stack([term.slot_weights(block.num_draft, mask.device) * mask for term in self.terms])
        sums = self._loss(block, latents, labels, mask, weights, anchors, features, log_norm)
        return sums, weights.sum((1, 2)), runs

    def weight_sums(self, anchors: Anchors) -> Tensor:
        """Σ w of each term, from the masks alone: known before any forward."""
        mask = anchors.mask
        return torch.stack([(t.slot_weights(mask.shape[-1], mask.device) * mask).sum() for t in self.terms])

    def _rounds(self, feed: str) -> int:
        return sum(term.rounds for term in self.terms if term.feed == feed)

    def _latents(self, block, labels, mask, measure):
        """Latents [F,N,G,R] under gold, then under each self-fed round; leading runs of what was fed."""
        rounds = self._rounds("self")
        fed, runs = self._free_run(block, labels, mask, rounds, measure)
        if self.head is None:
            return None, runs
        prepared = self.head.prepare(block.hidden)
        fed = [labels] * self._rounds("gold") + fed[:rounds]
        latents = [sweep(self.head, prepared, block, ids) for ids in fed]
        return (torch.stack(latents) if latents else None), runs

    @torch.no_grad()
    def _free_run(self, block, labels, mask, rounds: int, measure: bool):
        """What decoding would feed: drafts after 0, 1, … passes [N,G], a few blocks at a time, without gradient."""
        count = rounds  # drafts to make; to measure the head, one pass more than it is fed, and two at least
        if measure:
            count = 1 if self.head is None else max(rounds + 1, 3)
        if not count:
            return [], {}
        size = max(1, self.chunk // block.num_draft)
        parts = []
        for i in range(0, max(len(block), 1), size):  # no block still makes drafts [0,G]
            trace = jacobi(self.head, block[i : i + size])
            parts.append([next(trace) for _ in range(count)])
        fed = [torch.cat(drafts) for drafts in zip(*parts)]
        if not measure:
            return fed, {}
        runs = {"drafter": leading_run((fed[0] == labels) & mask)}
        if self.head is not None:
            runs["head"] = leading_run((fed[-1] == labels) & mask)
        return fed, runs

    def _loss(self, block, latents, labels, mask, weights, anchors, features, log_norm) -> Tensor:
        keep = anchors.valid
        row = keep.nonzero()[:, :1].expand(-1, block.num_draft)[mask]  # sequence of each supervised row
        judge = anchors.judge[keep][mask]
        per_term, mix = {}, []
        for term, weight in zip(self.terms, weights):
            per_term[term.feed] = weight[mask] / (term.rounds if term.feed == "self" else 1), term.loss
        order = ["none"] + ["gold"] * self._rounds("gold") + ["self"] * self._rounds("self")
        blank = torch.zeros_like(weights[0][mask]), {}
        row_weights = torch.stack([per_term.get(feed, blank)[0] for feed in order])
        mix = [tuple(per_term.get(feed, blank)[1].get(name, 0.0) for name in ("ce", "l1")) for feed in order]
        empty = block.hidden.new_zeros(0, int(mask.sum()), 0)
        rows = Rows(
            hidden=block.rows(block.hidden)[mask],
            latents=empty if latents is None else latents[:, mask],
            labels=labels[mask],
            last=features.last[row, judge],
            log_norm=None if log_norm is None else log_norm[row, judge],
            weights=row_weights,
        )
        readout = None if latents is None else self.head.readout.weight
        vocabulary = Vocabulary(self.drafter.lm_rows, readout, self.drafter.draft_ids)
        with torch.autocast(rows.hidden.device.type, enabled=False):
            sums = chunked_loss(rows, vocabulary, mix, self.chunk)
        picks = [[i for i, feed in enumerate(order) if feed == term.feed] for term in self.terms]
        return torch.stack([sums[pick].sum() for pick in picks])
