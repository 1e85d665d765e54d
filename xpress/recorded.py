"""A target that has answered already: tau of many methods for the price of one greedy answer.

At temperature 0 every method's output is the target's own greedy answer, and only how many rounds it takes differs. So
the answer is made once, its hidden states in one pass, and each method is decoded by the same loop against a target
that looks up what it would have said. Nothing here can tell whether an output is lossless, and no time means anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpress.decode import decode_batch
from xpress.sequences import on_device


class RecordedTarget:
    """Stands for `target` in decode_batch, for these prompts in this order, at temperature 0.

    answers: the greedy answers, as plain decoding gave them; ahead: draft tokens of a round at most. Drafts reach past
    the end of an answer, so the target goes on for so many tokens more, whatever ended it.
    """

    def __init__(self, target, prompts: list[list[int]], answers: list[list[int]], ahead: int):
        self._target, self._prompts = target, prompts
        self._states: dict[tuple, Tensor] = {}
        so_far = [[*prompt, *answer] for prompt, answer in zip(prompts, answers)]
        self._ids = [list(ids) for ids in so_far]
        fitting = [i for i, ids in enumerate(so_far) if len(ids) < (target.context_length or len(ids) + 1)]
        if ahead and fitting:
            for rounds in decode_batch(target, [so_far[i] for i in fitting], max_new_tokens=ahead):
                for row, step in rounds.items():
                    self._ids[fitting[row]] += step.tokens

    def __getattr__(self, name):
        return getattr(self._target, name)

    def prefill(self, prompts: list[list[int]], layer_ids=()) -> tuple[Tensor, Tensor | None]:
        """As Target's. Raises ValueError for other prompts than those that were answered."""
        if prompts != self._prompts:
            raise ValueError("a recorded target knows the prompts that it was made for, in their order; make another")
        self._rows, self._layer_ids = list(range(len(prompts))), tuple(layer_ids)
        if layer_ids and self._layer_ids not in self._states:
            self._states[self._layer_ids] = self._target.prefill(self._ids, layer_ids)[1]
        self._at = [len(prompt) for prompt in prompts]  # where each sequence's next token stands
        states = self._states[self._layer_ids][:, : max(self._at)] if layer_ids else None
        return self._says([[ids[at]] for ids, at in zip(self._ids, self._at)])[:, 0], states

    def score(self, anchor: Tensor, draft: Tensor) -> Tensor:
        """As Target's: [N,G+1,V], 1 for what the target would say after each token of a draft that is right so far."""
        said = []
        for row, at, own in zip(self._rows, self._at, draft.tolist()):
            known = self._ids[row][at + 1 : at + 2 + len(own)]
            unknown = [(token + 1) % self.vocab_size for token in [*own, 0][len(known) :]]  # past all: nothing matches
            said.append(known + unknown)
        return self._says(said)

    def keep(self, counts: list[int]) -> Tensor | None:
        """As Target's."""
        opened, self._at = self._at, [at + count for at, count in zip(self._at, counts)]
        if not self._layer_ids:
            return None
        states = self._states[self._layer_ids]
        places = on_device(opened, states.device)[:, None] + torch.arange(max(counts), device=states.device)
        rows = on_device(self._rows, states.device)[:, None]
        return states[rows, places.clamp(max=states.shape[1] - 1)]

    def select(self, rows: list[int]):
        """As Target's."""
        self._rows, self._at = [self._rows[i] for i in rows], [self._at[i] for i in rows]

    def _says(self, ids: list[list[int]]) -> Tensor:
        ids = torch.tensor(ids, device=self.device)
        return torch.zeros(*ids.shape, self.vocab_size, device=self.device).scatter_(-1, ids[..., None], 1.0)
