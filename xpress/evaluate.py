"""Methods side by side: the same prompts, one process, order rotated from prompt to prompt, every output checked.

A round is every method over all prompts. Above temperature 0 each round draws with seeds of its own; at 0 it repeats
the outputs and measures time again. Where there are several rounds, one more is run first and thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from xpress import memory
from xpress.decode import Response, decode_batch, room_for
from xpress.generation import row_seed
from xpress.lengths import ByConfidence
from xpress.lossless import first_difference
from xpress.metrics import Counts
from xpress.probe import Probe
from xpress.prompts import Prompt, answer_text, conversation, render, stop_ids
from xpress.recorded import RecordedTarget
from xpress.sampling import GREEDY, Sampling
from xpress.watch import Watch, WatchedDrafter, WatchedTarget

WARM_UP = 8  # tokens of each method on the first prompts, where no whole round is thrown away


@dataclass(frozen=True)
class Method:
    """A row of the table. kind: ar (plain autoregression), bare (the drafter that training started from), drafter (the
    checkpoint's own, its head switched off), head. lengths: of a head whose drafts are cut. A note stands for numbers
    that cannot be had."""

    label: str
    kind: str = "ar"
    drafter: object = None
    head: object = None
    passes: int | str = 0
    checkpoint: str | None = None
    note: str | None = None
    lengths: ByConfidence | None = None

    def facts(self) -> dict:
        return {
            "label": self.label,
            "kind": self.kind,
            "checkpoint": self.checkpoint,
            "head": None if self.head is None else head_name(self.head),
            "passes": None if self.head is None else self.passes,
            "threshold": None if self.lengths is None else self.lengths.threshold,
            "note": self.note,
        }


def head_name(head) -> str:
    """refiner, markov, domino, …; none"""
    name = "none" if head is None else type(head).__name__.lower().removeprefix("folded")
    return name.removesuffix("head") or name


def respond(target, prompts: list[list[int]], method: Method, *, sampling: Sampling = GREEDY, **settings):
    """One response to each prompt, decoded together -> [(Response, Counts)]."""
    watch, probe, steps = Watch(target.device), Probe(sampling), -1
    drafter = WatchedDrafter(method.drafter, watch) if method.drafter else None

    def observe(*round_):
        watch.lap("harness")
        with watch.paused():
            probe(*round_)
        watch.lap("probe")

    responses = [Response() for _ in prompts]
    memory.reset_peak(target.device)
    watched = WatchedTarget(target, watch, drafter is not None)
    settings |= {"sampling": sampling, "lengths": method.lengths, "observe": observe if drafter else None}
    for rounds in decode_batch(watched, prompts, drafter, method.head, method.passes, **settings):
        for row, step in rounds.items():
            responses[row].add(step)
        steps += 1
        if not steps:
            watch.start()
    watch.lap("harness")
    # answers of one token have no rounds: what is left of their time is our own bookkeeping, and paid for no token
    time, share = watch.seconds() if steps > 0 else {}, 1 / len(prompts)
    time.pop("probe", None)
    measured = {
        "seconds": sum(time.values()) * share,
        "time": {name: spent * share for name, spent in time.items()},
        "steps": max(steps, 0) * share,
        "memory": memory.peak(target.device),
    }
    return [(r, Counts.of(r, **measured, probe=probe.of(row))) for row, r in enumerate(responses)]


def untimed(counts: Counts) -> Counts:
    """What stays of a response whose target was not run."""
    return replace(counts, seconds=0.0, time={}, steps=0.0, memory=None)


def evaluate(
    target,
    methods: list[Method],
    prompts: list[Prompt],
    *,
    batch_size: int = 1,
    rounds: int = 1,
    turns: str = "first",
    max_new_tokens: int = 256,
    stop_strings=(),
    sampling: Sampling = GREEDY,
    seed: int = 0,
    thinking: bool = False,
    recorded: bool = False,
    done=frozenset(),
    progress: Callable = lambda done, total, what: None,
) -> Iterator[list[dict]]:
    """Yields the lines of one group of `batch_size` prompts after another, {facts of the response} for each method,
    prompt and turn. The first method must be plain autoregression, whose answers are fed back in later turns to every
    method alike. recorded: the target answers each prompt once and every method is measured along that answer, without
    times (xpress/recorded.py; temperature 0). done: (round, group) pairs that are measured already.

    Raises ValueError before any work for a prompt that leaves no room in the target's context.
    """
    if methods[0].kind != "ar":
        raise ValueError("the first method must be plain autoregression: all others are held against it")
    methods = [method for method in methods if method.note is None]
    for prompt in prompts:
        room(target, prompt, thinking, max_new_tokens)
    groups = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    left = {(number, g) for number in range(rounds) for g in range(len(groups))} - done
    if not left:
        return
    stops, ahead = stop_ids(target.tokenizer, target.model), int(rounds > 1)
    settings = {"stop_ids": stops, "stop_strings": tuple(stop_strings), "sampling": sampling}
    settings["max_new_tokens"] = max_new_tokens
    if not ahead and not recorded:
        first = [render(target.tokenizer, conversation(prompt, []), thinking) for prompt in groups[0]]
        for method in methods:
            respond(target, first, method, **{**settings, "max_new_tokens": min(WARM_UP, max_new_tokens)})
    turns_of = lambda prompt: len(prompt.turns) if turns == "all" else 1  # noqa: E731
    count, end, total = 0, 0, sum(map(turns_of, prompts)) * len(methods) * (rounds + ahead)

    def said(answers: int, label: str):
        nonlocal count
        count += answers
        progress(count, total, label)

    for number in range(-ahead, rounds):
        for g, group in enumerate(groups):
            end += sum(map(turns_of, group)) * len(methods)
            if number < 0 or (number, g) in left:
                shift, depth = (g + number) % len(methods), max(map(turns_of, group))
                how = {"shift": 0 if recorded else shift, "recorded": recorded, "thinking": thinking}
                lines = converse(target, methods, group, depth, seed + max(number, 0), settings, said, **how)
                if number >= 0:  # before any more is said: whoever interrupts there keeps this group
                    yield [{"round": number, "group": g, **line} for line in lines]
            said(end - count, "")  # turns that found no room, or a group that was measured before


def converse(target, methods, group, depth, seed, settings, said, *, shift, recorded, thinking) -> list[dict]:
    """The first `depth` turns of one group of prompts, each answered by every method, beginning with number `shift`
    -> a line for each prompt, turn and method."""
    answers, lines, stops = {prompt.id: [] for prompt in group}, [], settings["stop_ids"]
    for turn in range(depth):
        asked = [p for p in group if len(p.turns) > turn == len(answers[p.id])]
        ids = [render(target.tokenizer, conversation(p, answers[p.id]), thinking) for p in asked]
        if turn and target.context_length:  # a first turn that leaves no room was refused
            fitting = [i for i, own in enumerate(ids) if len(own) < target.context_length]
            asked, ids = [asked[i] for i in fitting], [ids[i] for i in fitting]
        if not asked:
            break
        seeds, found, whose = [row_seed(seed, f"{p.id}/{turn}") for p in asked], {}, target
        for method in methods[shift:] + methods[:shift]:
            found[method] = respond(whose, ids, method, seeds=seeds, **settings)
            if recorded:
                found[method] = [(response, untimed(counts)) for response, counts in found[method]]
            if recorded and whose is target:
                ahead = max((m.drafter.config.num_draft for m in methods if m.drafter), default=0)
                whose = RecordedTarget(target, ids, [response.ids for response, _ in found[method]], ahead)
            said(len(asked), method.label)
        for i, prompt in enumerate(asked):
            plain = found[methods[0]][i][0].ids
            answers[prompt.id].append(answer_text(target.tokenizer, plain, stops))
            for method in methods:
                response, counts = found[method][i]
                differs = None
                if settings["sampling"].greedy:
                    differs = first_difference(target, ids[i], plain, response.ids)
                where = {"prompt": prompt.id, "turn": turn + 1, "seed": seeds[i], "method": method.label}
                facts = {"prompt_tokens": len(ids[i]), **counts.as_dict()}
                lines.append({**where, **facts, "ids": response.ids, "difference": differs})
    return lines


def room(target, prompt: Prompt, thinking: bool, max_new_tokens: int) -> int:
    """Tokens that may follow a prompt's first turn. Raises ValueError naming the prompt where there are none."""
    try:
        return room_for(target, render(target.tokenizer, conversation(prompt, []), thinking), max_new_tokens)
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id}: {error}; leave it out") from error
