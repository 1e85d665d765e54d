"""The whole library is this loop: draft, refine, verify, commit.

Baselines are the same function with a degenerate argument: head=None or passes=0 is the plain drafter, drafter=None is
plain autoregression. Nothing here is timed or logged; callers watch the rounds go by. Batch 1 is a batch of one: rows
accept different numbers of tokens, each stands at its own place, and a finished row leaves the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from xpress.draft import Draft
from xpress.drafter import Context
from xpress.refine import check_passes, refine
from xpress.sampling import GREEDY, TARGET, Noise, Sampling, argmax, sample
from xpress.sequences import on_device
from xpress.stopping import Stops
from xpress.verify import Verdict, verify


@dataclass(frozen=True)
class Round:
    """What one round did. tokens: emitted, after the cut at stop token and limit; num_accepted: before the cut, without
    bonus; num_draft: draft tokens that were verified, G unless the draft was cut (0 without a drafter); passes: Jacobi
    passes used; drafted: those num_draft tokens, accepted or not;
    settled: the pass that changed the block last (None where no one looked). The opening round (the first token, which
    no round pays for) has num_draft None."""

    tokens: list[int]
    num_accepted: int = 0
    num_draft: int | None = None
    passes: int = 0
    drafted: list[int] = field(default_factory=list)
    settled: int | None = None


def decode(target, prompt: list[int], drafter=None, head=None, passes: int | str = 0, *, seed: int = 0, **settings):
    """Yields the first token, then one Round after another until a stop token or the limit.

    drafter and head must be bound to `target`. Output depends on (prompt, seed) alone. settings: as of `decode_batch`.
    """
    for rounds in decode_batch(target, [prompt], drafter, head, passes, seeds=[seed], **settings):
        yield rounds[0]


@torch.inference_mode()
def decode_batch(
    target,
    prompts: list[list[int]],
    drafter=None,
    head=None,
    passes: int | str = 0,
    *,
    max_new_tokens: int = 256,
    stop_ids=(),
    stop_strings=(),
    sampling: Sampling = GREEDY,
    seeds: list[int] | None = None,
    lengths: Callable | None = None,
    observe: Callable | None = None,
) -> Iterator[dict[int, Round]]:
    """Yields {row: Round} of every row that is not finished: first tokens, then one round after another.

    A row ends at a stop id, at the token that completes one of `stop_strings` in its text, at max_new_tokens or where
    the target's context is full. seeds: one for each row (0 … N − 1 if left out), which with the prompt decide a row's
    output, whatever shares the batch. lengths: Draft -> kept [N], how many tokens of each draft are verified
    (xpress/lengths.py; None: all), at the price of one more wait for the device a round. Raises ValueError where it
    says less than 0 or more than G. observe(draft, scores, verdict, rows), if given, sees every round's tensors.
    """
    check_passes(passes)
    if max_new_tokens < 1:
        return
    stops = Stops(stop_ids, stop_strings, target.tokenizer if stop_strings else None)
    limits = [room_for(target, prompt, max_new_tokens) for prompt in prompts]
    seeds = list(range(len(prompts))) if seeds is None else seeds
    logits, target_hidden = target.prefill(prompts, drafter.layer_ids if drafter else ())
    first = _first_tokens(logits, sampling, Noise(tuple(seeds)))
    ids = [[*prompt, token] for prompt, token in zip(prompts, first)]
    if drafter:
        drafter.reset()
    yield {row: Round([token]) for row, token in enumerate(first)}
    rows, counts = list(range(len(prompts))), [len(prompt) for prompt in prompts]
    done = [stops.end([], [token]) or limits[row] == 1 for row, token in enumerate(first)]
    num_rounds = 0
    while True:
        if any(done[row] for row in rows):
            kept = [i for i, row in enumerate(rows) if not done[row]]
            rows, counts = [rows[i] for i in kept], [counts[i] for i in kept]
            if not rows:
                return
            target.select(kept)
            if drafter:
                drafter.select(kept)
                target_hidden = target_hidden.index_select(0, on_device(kept, target_hidden.device))[:, : max(counts)]
        num_rounds += 1
        verified = None
        noise = Noise(tuple(seeds[row] for row in rows), num_rounds)
        if drafter:
            context = Context([ids[row] for row in rows], target_hidden)
            draft = refine(head, drafter.draft(context), passes, sampling, noise)  # DRAFT, REFINE
            if lengths is not None:
                draft, verified = _cut(draft, lengths(draft), whole=target.loop == "static")
        else:
            draft = Draft.nothing(len(rows), target.device)
        anchors = on_device([ids[row][-1] for row in rows], target.device)
        scores = target.score(anchors, draft.ids)  # VERIFY
        verdict = verify(draft, scores, sampling, noise)
        if observe:
            observe(draft, scores, verdict, rows)
        accepted, bonus, used, settled, drafted = _read(verdict, draft)
        drafted = drafted if verified is None else [own[:n] for own, n in zip(drafted, verified)]
        counts = [number + 1 for number in accepted]
        target_hidden = target.keep(counts)  # COMMIT
        rounds = {}
        for i, row in enumerate(rows):
            new = ids[row][len(prompts[row]) :]
            tokens = [*drafted[i][: accepted[i]], bonus[i]][: limits[row] - len(new)]
            end = stops.end(new, tokens)
            tokens = tokens[:end]
            ids[row] += tokens
            done[row] = end is not None or len(new) + len(tokens) >= limits[row]
            rounds[row] = Round(tokens, accepted[i], len(drafted[i]), used[i], drafted[i], settled and settled[i])
        yield rounds


def room_for(target, prompt: list[int], max_new_tokens: int) -> int:
    """Tokens that may follow the prompt: the limit, or what the target's context leaves. Raises ValueError for a prompt
    that leaves no room."""
    room = (target.context_length or len(prompt) + max_new_tokens) - len(prompt)
    if room < 1:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens leaves no room in the target's context {target.context_length}"
        )
    return min(max_new_tokens, room)


def _cut(draft: Draft, kept: torch.Tensor, whole: bool) -> tuple[Draft, list[int]]:
    """-> the draft of which the first kept [N] tokens are verified, and these numbers on the host, which must know how
    many rows the target is to run. `whole`: all of them all the same; the static loop has a graph for each number of
    rows, and would capture G + 1 where it needs one."""
    G, numbers = draft.ids.shape[1], kept.tolist()
    if not all(0 <= n <= G for n in numbers):
        raise ValueError(f"lengths: a draft of {G} tokens cannot be cut to {numbers}; give numbers from 0 to {G}")
    return draft.cut(kept, G if whole else max(numbers)), numbers


def _read(verdict: Verdict, draft: Draft) -> tuple[list, list, list, list | None, list]:
    """num_accepted, bonus, passes, settled [N] and draft ids [N,G] as lists: the only time in a round that the host
    waits for the device, hence in one transfer. What the host has already takes no part in it."""
    numbers = {"accepted": verdict.num_accepted, "bonus": verdict.bonus, "used": draft.passes}
    numbers |= {} if draft.settled is None else {"settled": draft.settled}
    there = [name for name, column in numbers.items() if column.device == draft.ids.device]
    columns = torch.cat([*(numbers[name][:, None].to(draft.ids.dtype) for name in there), draft.ids], 1).T.tolist()
    found = {name: column.tolist() for name, column in numbers.items() if name not in there}
    found |= dict(zip(there, columns))
    drafted = [list(ids) for ids in zip(*columns[len(there) :])] or [[] for _ in found["accepted"]]
    return found["accepted"], found["bonus"], found["used"], found.get("settled"), drafted


def _first_tokens(logits, sampling, noise) -> list[int]:
    if sampling.greedy:
        return argmax(logits).tolist()
    return sample(sampling.adjust(logits).softmax(-1), noise.uniform(TARGET, 1, logits.device)[:, 0]).tolist()


@dataclass
class Response:
    """A finished response: ids (new tokens only) and the rounds that made them, the opening one left out."""

    ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    def add(self, step: Round):
        self.ids += step.tokens
        if step.num_draft is not None:
            self.rounds.append(step)


def generate(target, prompt: list[int], drafter=None, head=None, passes: int | str = 0, **settings) -> Response:
    """`decode` run to its end."""
    response = Response()
    for step in decode(target, prompt, drafter, head, passes, **settings):
        response.add(step)
    return response
