"""What is trained, as one module: drafter, correction head and objective.

Its forward returns (Σ w·ℓ, Σ w) of each term and the number to minimise: that is what accelerate wraps, since a method
called beside forward would not be synchronised. The head's self-fed rounds are the very sweeps that decoding runs.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from xpress.anchors import Anchors, Batch
from xpress.heads.confidence import rows_of
from xpress.lookups import gathered
from xpress.loss import CONFIDENCE, Logits, Pass, Rows, Term, Vocabulary, attach, token_loss
from xpress.refine import sweep
from xpress.sampling import at_least_fp32
from xpress.target import Features

CHUNK = (1 << 22, 1 << 26)  # logits of one tensor at a time, on the CPU and on a GPU


class Outcome(NamedTuple):
    """sums and weights [terms]: Σ w·ℓ and Σ w; total: Σ scale·sums, the one to differentiate; rounds: Σ w·ℓ of each
    self-fed round; accepted: {"drafter": [G], "head": [G]} blocks whose first k draft tokens equal the data's."""

    sums: Tensor
    weights: Tensor
    total: Tensor
    rounds: Tensor
    accepted: dict[str, Tensor]


class Trainee(nn.Module):
    """Drafter, head (or None) and objective as one module. confidence: the head of the objective's confidence term,
    None where it has none. `chunk`: rows of the vocabulary-wide loss at a time; None:
    what makes a few tens of MB of logits on the CPU, a few hundred on a GPU."""

    def __init__(
        self, drafter, head, terms: list[Term], train_drafter: bool = True, chunk: int | None = None, confidence=None
    ):
        super().__init__()
        feeds = [term.feed for term in terms]
        if (CONFIDENCE in feeds) != (confidence is not None):
            raise ValueError("objective: a confidence head and a confidence term belong together; give both or none")
        if confidence is not None and "gold" not in feeds:
            raise ValueError(
                "objective.confidence: it is trained on what the term with feed gold would have accepted, and there is "
                "none; add one, or objective.confidence=0"
            )
        if not terms or len(set(feeds)) < len(feeds):
            raise ValueError("objective: give at least one term, and each feed (none, gold, self) at most once")
        if head is None and set(feeds) != {"none"}:
            raise ValueError("objective: terms with feed gold or self need a head; choose one, or objective=dflash")
        if head is not None and feeds == ["none"]:
            raise ValueError("objective: no term feeds the head, so nothing would train it; choose head=none")
        if not train_drafter and head is None:
            raise ValueError("train_drafter=false leaves nothing to train; choose a head and a term that feeds it")
        self.drafter, self.head, self.terms, self.chunk = drafter, head, terms, chunk
        self.train_drafter, self.token_loss, self.confidence = train_drafter, token_loss, confidence
        self.drafter.requires_grad_(train_drafter)

    def forward(self, batch: Batch, anchors: Anchors, features: Features, log_norm, scale=None, passes: int = 0):
        """-> Outcome. scale: the factor of each term's sum in `total` (None: 1). passes: measure what the head drafts
        after so many Jacobi passes; 0: after the rounds that the objective runs anyway."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.train_drafter):
            contexts = self.drafter.project(features.hidden, batch.positions)
            hidden = self.drafter(anchors.anchor_ids, anchors.positions, contexts, anchors.visible)
        keep = anchors.valid
        block = self.drafter.block(hidden[keep], anchors.anchor_ids[keep], anchors.before_ids[keep])
        labels, mask = anchors.labels[keep], anchors.mask[keep]
        weights = torch.stack([term.slot_weights(block.num_draft, mask.device) * mask for term in self.terms])
        tensors, owners = self._tensors(scale, passes)
        rows = self._rows(block, labels, weights, owners, anchors, features, log_norm)
        found, total = self._loss(block, rows, tensors)
        per_term = [[i for i, owner in enumerate(owners) if owner == t] for t in range(len(self.terms))]
        rounds = [i for i, tensor in enumerate(tensors) if tensor.feed == "self" and owners[i] is not None]
        drafts = {"drafter": found.drafts[0]} | ({"head": found.drafts[-1]} if len(found.drafts) > 1 else {})
        sums = torch.stack([found.sums[pick].sum() for pick in per_term])
        if self.confidence is not None:
            t = [term.feed for term in self.terms].index(CONFIDENCE)
            own = (weights[t] * self._surprise(block, labels, found.accepted.view_as(labels))).sum()
            total = total + own * (1.0 if scale is None else float(scale[t]))
            sums[t] = own.detach()
        accepted = {name: leading((ids.view_as(labels) == labels) & mask) for name, ids in drafts.items()}
        return Outcome(
            sums,
            weights.sum((1, 2)),
            total,
            found.sums[rounds] * max(1, len(rounds)),
            accepted,
        )

    def _surprise(self, block, labels: Tensor, accepted: Tensor) -> Tensor:
        """BCE [N,G] of c_k, under the data's tokens, against how likely token k of the gold pass is to be accepted. The
        gradient goes into hidden states and rows too, as in DSpark; none comes from what is predicted."""
        rows = rows_of(self.head) if self.confidence.rank else None
        with torch.autocast(block.hidden.device.type, enabled=False):
            prev = block.rows(block.prev_ids(labels))
            logits = self.confidence.logits(block.rows(block.hidden), rows and rows(prev))
            logits = at_least_fp32(logits)
            return binary_cross_entropy_with_logits(logits, accepted.to(logits.dtype), reduction="none")

    def compile_parts(self):
        """torch.compile where elementwise work dominates and shapes are simple: the token loss, the drafter's MLPs."""
        self.token_loss = torch.compile(token_loss, dynamic=True)
        for layer in self.drafter.layers:
            layer.mlp.compile(dynamic=True)

    def weight_sums(self, anchors: Anchors) -> Tensor:
        """Σ w of each term, from the masks alone: known before any forward."""
        mask = anchors.mask
        return torch.stack([(t.slot_weights(mask.shape[-1], mask.device) * mask).sum() for t in self.terms])

    def _tensors(self, scale, passes: int) -> tuple[list[Logits], list[int | None]]:
        """The logit tensors of a step, the drafter's own first, and the term that each belongs to (None: only what it
        drafts is wanted)."""
        place = {term.feed: i for i, term in enumerate(self.terms)}
        rounds = self.terms[place["self"]].rounds if "self" in place else 0
        feeds = ["none"] + ["gold"] * ("gold" in place) + ["self"] * rounds
        owners = [place.get(feed) for feed in feeds]
        tensors = []
        for feed, owner in zip(feeds, owners):
            loss = {} if owner is None else self.terms[owner].loss
            factor = 1.0 if owner is None or scale is None else float(scale[owner])
            tensors.append(Logits(feed, loss.get("ce", 0.0), loss.get("l1", 0.0), factor))
        more = max(0, passes - rounds) if self.head is not None else 0
        return tensors + [Logits("self")] * more, owners + [None] * more

    def _rows(self, block, labels, weights, owners, anchors, features, log_norm) -> Rows:
        keep = anchors.valid
        row = keep.nonzero()[:, :1].expand(-1, block.num_draft).flatten()  # sequence of each row
        judge = anchors.judge[keep].flatten()
        blank = torch.zeros_like(weights[0])
        per_tensor = [blank if t is None else weights[t] / self.terms[t].rounds for t in owners]
        return Rows(
            hidden=block.rows(block.hidden).flatten(0, 1),
            labels=labels.flatten(),
            last=features.last[row, judge],
            log_norm=None if log_norm is None else log_norm[row, judge],
            weights=torch.stack(per_tensor).flatten(1),
        )

    def _loss(self, block, rows: Rows, tensors: list[Logits]) -> tuple[Pass, Tensor]:
        """The pass asks for latents chunk by chunk; they are made here, on the graph, by the sweep of decoding."""
        kind = rows.hidden.device.type
        chunk = self.chunk or CHUNK[kind == "cuda"] // self.drafter.config.draft_vocab_size
        size = max(1, chunk // block.num_draft)
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        readout = None if self.head is None else self.head.readout.weight
        readout = readout if readout is None or narrow is None else readout.to(narrow)
        slope, made, prepared = torch.is_grad_enabled(), [[] for _ in tensors], {}
        parts = [
            replace(block, hidden=hidden, anchor=block.anchor[i : i + size], before=block.before[i : i + size])
            for i, hidden in zip(range(0, len(block), size), block.hidden.split(size))
        ]

        def latents_of(i: int, fed: Tensor, part: slice) -> Tensor:
            n = part.start // (size * block.num_draft)
            trained = tensors[i].ce or tensors[i].l1
            # what is only measured leaves the random state of a head that draws as it was
            aside = nullcontext() if trained else torch.random.fork_rng([fed.device] if fed.is_cuda else [])
            with aside, torch.set_grad_enabled(slope), torch.autocast(kind, narrow, enabled=narrow is not None):
                if n not in prepared:
                    prepared.clear()
                    prepared[n] = self.head.prepare(parts[n].hidden)
                latent = sweep(self.head, prepared[n], parts[n], fed.view(-1, block.num_draft)).flatten(0, 1)
            if trained:
                made[i].append(latent)
            return latent.detach()

        with torch.autocast(kind, enabled=False), gathered(self.head):
            vocabulary = Vocabulary(self.drafter.lm_rows, readout, self.drafter.draft_ids)
            judge = self.confidence is not None
            found = Pass(rows, vocabulary, tensors, self.train_drafter, slope, self.token_loss, judge)
            found.run(latents_of, size * block.num_draft)
            total = attach(found, rows.hidden, readout, [torch.cat(latents) for latents in made if latents])
        return found, total


def leading(correct: Tensor) -> Tensor:
    """correct [N,G] -> [G]: blocks whose first k tokens are all right. Adds up over batches and ranks; divided by the
    number of blocks it is the share accepted at k, and 1 + its sum is tau."""
    return correct.long().cumprod(-1).sum(0)
