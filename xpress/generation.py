"""The target's own answers to prompts, as shards of rows: resumable, split between processes, from weights or a server.

One row a turn: turn k is rendered with the target's answers to the turns before it. A shard is written whole or not at
all, and a row that a shard holds is never asked for again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import torch
from jinja2 import TemplateError
from transformers import GenerationConfig

from xpress.client import Answer, Failed, Server, Turn
from xpress.data import SETTINGS, row_id, shards
from xpress.files import write_json, write_text
from xpress.prompts import Prompt, answer_text, conversation, read_jsonl, render, stop_ids, template_facts

TURNS = ("first", "all")
COUNTS = ("rows", "earlier", "tokens", "stopped", "truncated", "dropped", "empty", "unreached", "failed")
ABSENT = {"backend": "hf", "drop_truncated": False}  # what a folder that does not say so was made with


def generate_data(
    target,
    prompts: list[Prompt],
    out: str | Path,
    *,
    max_new_tokens: int = 256,
    batch_size: int = 32,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    thinking: bool = False,
    turns: str = "all",
    drop_truncated: bool = False,
    skip_unusable: bool = False,
    server: Server | None = None,
    rank: int = 0,
    ranks: int = 1,
    wait=lambda: None,
    skipped: Counter | None = None,
    failed: dict | None = None,
    progress=lambda done, total: None,
) -> dict:
    """Answers to `prompts`, one shard for each `batch_size` of them -> counts by name (COUNTS).

    target: a Target, or client.Tokens with a `server` that answers. turns: the first of each prompt, or all.
    drop_truncated: answers without a stop token become no rows. skip_unusable: prompts that the template refuses or
    that leave no room are counted in `skipped` instead of raising. Of several `ranks` each answers its share, wait() is
    their barrier. `failed` gets {row id: reason}. Counts: rows that the folder now holds for these prompts, earlier
    ones among them; of the new answers: tokens, stopped, truncated, dropped (truncated and not kept), empty (not kept);
    unreached: turns whose earlier answer is missing; failed: not answered after all retries.

    Raises ValueError when `out` was made with other settings, and for prompts that leave no room in the context.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if turns not in TURNS:
        raise ValueError(f"turns={turns}: known are {', '.join(TURNS)}")
    out = Path(out)
    settings = {
        "target": {"name": target.name, "fingerprint": target.fingerprint()},
        "template": template_facts(target.tokenizer, thinking),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "drop_truncated": drop_truncated,
        **(server.settings if server else {"backend": "hf"}),
    }
    if rank == 0:
        _claim(out, settings)
    wait()
    how = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "thinking": thinking}
    stops = stop_ids(target.tokenizer, target.model)
    limits = [n for n in (target.context_length, server and server.context_length) if n]
    room = min(limits) - max_new_tokens if limits else None
    skipped, failed, counts = Counter() if skipped is None else skipped, {} if failed is None else failed, Counter()
    plan = Plan(prompts, turns, out)
    wait()  # every rank has read what is done before one writes more
    plan.take_share(rank, ranks)
    counts["rows"] = counts["earlier"] = len(plan.done)
    settled, total = len(plan.done | plan.settled & plan.ids.keys()), len(plan.ids)
    progress(settled, total)
    for depth in range(plan.depth):
        asked = []
        for name, prompt in plan.open(depth):
            messages = plan.messages(prompt, depth, target.tokenizer, stops)
            if messages is None:
                counts["unreached"] += 1
                continue
            try:
                ids = render(target.tokenizer, messages, thinking)
            except TemplateError as error:
                if not skip_unusable:
                    raise ValueError(f"prompt {prompt.id}: the chat template refuses it ({error})") from error
                skipped["refused by the chat template"] += 1
                continue
            if room is not None and len(ids) > room:
                if depth == 0 and not skip_unusable:
                    raise ValueError(
                        f"prompt {prompt.id}: {len(ids)} tokens and max_new_tokens={max_new_tokens} exceed the "
                        f"target's context of {room + max_new_tokens}"
                    )
                skipped["no room in the context"] += 1
                continue
            asked.append(Turn(name, ids, messages, row_seed(seed, name)))
        if server:
            answers = server.answers(asked, how, target.tokenizer, stops)
        else:
            answers = _batches(target, asked, batch_size, how, seed)
        writer = Writer(out, batch_size)
        try:
            for group in answers:
                for turn, answer in group:
                    if isinstance(answer, Failed):
                        failed[turn.id] = answer.why
                        counts["failed"] += 1
                    else:
                        row = plan.row(turn, answer, depth, stops, drop_truncated, counts)
                        writer.add(turn.id, row)
                settled += len(group)
                writer.flush(full=True)
                progress(settled, total)
        finally:  # after Ctrl-C or a refusal too: what is answered stays answered
            writer.flush()
    return {name: counts[name] for name in COUNTS}


class Plan:
    """Which turns there are, which of them the folder holds, and what the target said in those that lead on."""

    def __init__(self, prompts: list[Prompt], turns: str, out: Path):
        self.ids: dict[str, tuple[Prompt, int]] = {}  # equal turns after equal turns are answered once
        for prompt in prompts:
            for depth in range(len(prompt.turns) if turns == "all" else 1):
                self.ids.setdefault(row_id(prompt, depth), (prompt, depth))
        leading = {row_id(p, depth - 1) for p, depth in self.ids.values() if depth}
        self.leading: dict[str, list[int] | None] = dict.fromkeys(leading)
        self.done, self.settled = set(), set()
        for path in shards(out):
            for row in read_jsonl(path):
                if row["id"] in self.ids:
                    self.done.add(row["id"])
                    if row["id"] in self.leading:
                        self.leading[row["id"]] = row["response_ids"]
        for path in out.glob("dropped-*.jsonl"):
            self.settled |= {row["id"] for row in read_jsonl(path)}

    def take_share(self, rank: int, ranks: int):
        """Whole conversations, since a turn needs the answers before it; those that are open are dealt out in turn.

        Of the finished rows the first rank keeps count, for all.
        """
        root = {name: row_id(prompt) for name, (prompt, _) in self.ids.items()}
        open_roots = sorted({root[name] for name in self.ids if name not in self.done | self.settled})
        mine = set(open_roots[rank::ranks])
        self.ids = {
            name: entry
            for name, entry in self.ids.items()
            if (rank == 0 if name in self.done else root[name] in mine or name in self.settled and rank == 0)
        }
        if rank:
            self.done = set()

    @property
    def depth(self) -> int:
        return max((depth + 1 for _, depth in self.ids.values()), default=0)

    def open(self, depth: int) -> list[tuple[str, Prompt]]:
        return [
            (name, prompt)
            for name, (prompt, own) in self.ids.items()
            if own == depth and name not in self.done and name not in self.settled
        ]

    def messages(self, prompt: Prompt, depth: int, tokenizer, stops) -> list[dict] | None:
        """The conversation up to the user's turn `depth`, with the target's own answers; None where one is missing."""
        earlier = [self.leading[row_id(prompt, turn)] for turn in range(depth)]
        return conversation(prompt, [answer_text(tokenizer, ids, stops) for ids in earlier]) if all(earlier) else None

    def row(self, turn: Turn, answer: Answer, depth: int, stops, drop_truncated: bool, counts: Counter) -> dict | None:
        """The row to be written, counted; {} for an answer that is dropped for good, None for an empty one."""
        if not answer.ids:
            counts["empty"] += 1
            return None
        ids = until_stop(answer.ids, stops)
        stopped = ids[-1] in stops
        counts["tokens"] += len(ids)
        counts["stopped" if stopped else "truncated"] += 1
        if drop_truncated and not stopped:
            counts["dropped"] += 1
            return {}
        counts["rows"] += 1
        if turn.id in self.leading:
            self.leading[turn.id] = ids
        return {
            "id": turn.id,
            "source": self.ids[turn.id][0].source,
            **({"turn": depth + 1, "conversation": row_id(self.ids[turn.id][0])} if depth else {}),
            "prompt_ids": turn.prompt_ids,
            "response_ids": ids,
            "finish": "stop" if stopped else "length",
            **answer.facts,
        }


class Writer:
    """Rows that wait for their shard to be full."""

    def __init__(self, out: Path, size: int):
        self.out, self.size, self.rows, self.dropped, self.count = out, size, [], [], 0

    def add(self, name: str, row: dict | None):
        self.count += 1
        if row:
            self.rows.append(row)
        elif row is not None:
            self.dropped.append({"id": name, "why": "truncated"})

    def flush(self, full: bool = False):
        """Files are named by a row that they hold: that turn is done, so no later file can take the name."""
        if full and self.count < self.size:
            return
        for kind, rows in (("shard", self.rows), ("dropped", self.dropped)):
            if rows:
                lines = "".join(json.dumps(row) + "\n" for row in rows)
                write_text(self.out / f"{kind}-{rows[0]['id']}.jsonl", lines)
        self.rows, self.dropped, self.count = [], [], 0


def row_seed(seed: int, name: str) -> int:
    """The seed of one row's sampling, 32 bits of a hash of (seed, row id)."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "big")


def _batches(target, turns: list[Turn], batch_size: int, how: dict, seed: int):
    turns = sorted(turns, key=lambda turn: len(turn.prompt_ids))  # equal lengths together: little padding
    for start in range(0, len(turns), batch_size):
        part = turns[start : start + batch_size]
        torch.manual_seed(part[0].seed)
        prompts = [turn.prompt_ids for turn in part]
        answers = _answer(target, prompts, how["max_new_tokens"], how["temperature"], how["top_p"])
        yield [(turn, Answer(ids)) for turn, ids in zip(part, answers)]


@torch.inference_mode()
def _answer(target, prompts: list[list[int]], max_new_tokens, temperature, top_p) -> list[list[int]]:
    """Batched generation with left padding -> generated ids, cut after the first stop token."""
    stops = stop_ids(target.tokenizer, target.model)
    width = max(map(len, prompts))
    pad = stops[0] if stops else 0
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    sampled = dict(temperature=temperature, top_p=top_p, top_k=0) if temperature > 0 else {}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=list(stops) or None,
        pad_token_id=pad,
        **sampled,
    )
    model, own = target.model, target.model.generation_config
    model.generation_config = config  # else repetition_penalty and the like of the target's own would slip in
    try:
        new = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
    finally:
        model.generation_config = own
    return [until_stop(row, stops) for row in new]


def until_stop(ids: list[int], stops) -> list[int]:
    for i, token in enumerate(ids):
        if token in stops:
            return ids[: i + 1]
    return ids


def _claim(out: Path, settings: dict):
    """The folder is ours: new, or made with the same settings. A server's address may have changed meanwhile."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / SETTINGS
    if path.exists():
        old = json.loads(path.read_text())
        changed = [key for key in settings if key != "base_url" and old.get(key, ABSENT.get(key)) != settings[key]]
        if changed:
            raise ValueError(f"out={out} holds rows made with other {', '.join(changed)}; choose another folder")
    elif any(out.iterdir()):
        raise ValueError(f"out={out}: the folder is not empty and holds no {SETTINGS}; choose another folder")
    else:
        write_json(path, settings)
