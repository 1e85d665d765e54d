"""Training rows: ids, not text. Read from shards, dropped with a reason where unusable, laid out as batches.

A row is the prompt's ids as rendered with the generation prompt, then the ids that the target generated, its stop token
included; exactly the generated ids are supervised. Neither the template nor `ids != pad` is asked for masks: templates
carry no marks, and in many targets end-of-text is pad.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from xpress.prompts import Prompt, read_jsonl, render, template_facts

SETTINGS = "settings.json"


@dataclass(frozen=True)
class Row:
    """One turn: prompt ids, response ids (both as the target saw them). conversation: the id of its first turn, ""
    where that is this one."""

    id: str
    prompt_ids: list[int]
    response_ids: list[int]
    conversation: str = ""


def row_id(prompt: Prompt, turn: int = 0) -> str:
    """Stable name of a turn: its set, a hash of all that was said to the target up to there, and "#2", "#3", … from the
    second turn on: conversations that open alike and part later do not share a name. Turn 0 names the conversation."""
    said = [*([prompt.system] if prompt.system else []), *prompt.turns[: turn + 1]]
    digest = hashlib.blake2b("\0".join(said).encode(), digest_size=8).hexdigest()
    return f"{prompt.source}-{digest}" + (f"#{turn + 1}" if turn else "")


def shards(path: Path) -> list[Path]:
    """The files that hold rows: the file itself, or the shards of a folder."""
    return [path] if path.is_file() else sorted(path.glob("shard-*.jsonl"))


def load_rows(
    path: str | Path,
    tokenizer=None,
    thinking: bool = False,
    limit: int | None = None,
    vocab_size: int | None = None,
    max_length: int | None = None,
    skipped: Counter | None = None,
) -> list[Row]:
    """Rows of a folder or a JSONL file. A record has response_ids, and prompt_ids or a `prompt` text to render.

    Rows that nothing can be learnt from are dropped, the reasons counted in `skipped`; with max_length (tokens of
    prompt and answer) also those that open no block within it. limit: usable rows. Raises FileNotFoundError, or
    ValueError with file and record, also for ids outside 0 … vocab_size − 1.
    """
    skipped = Counter() if skipped is None else skipped
    path = Path(path).expanduser()
    files = shards(path) if path.exists() else []
    if not files:
        raise FileNotFoundError(f"data.path={path}: no rows there; make them with scripts/generate_data.py")
    rows, seen = [], Counter()
    for file in files:
        for number, raw in enumerate(read_jsonl(file), 1):
            prompt_ids, response_ids = raw.get("prompt_ids"), raw.get("response_ids")
            if prompt_ids is None and isinstance(raw.get("prompt"), str) and tokenizer is not None:
                prompt_ids = render(tokenizer, [{"role": "user", "content": raw["prompt"]}], thinking)
            for name, ids in (("prompt_ids", prompt_ids), ("response_ids", response_ids)):
                if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
                    raise ValueError(f"{file}, record {number}: {name} must be a list of token ids")
                odd = [i for i in ids if i < 0 or (vocab_size is not None and i >= vocab_size)]
                if odd:
                    raise ValueError(
                        f"{file}, record {number}: {name} holds {odd[0]}, which is no row of the target's embedding "
                        f"({vocab_size} rows); the rows were made with another target"
                    )
            if reason := unusable(prompt_ids, response_ids, max_length):
                skipped[reason] += 1
                continue
            given = name = str(raw.get("id", f"{file.name}:{number}"))
            while seen[name]:  # anchors and features are kept by name
                seen[given] += 1
                name = f"{given}~{seen[given]}"
            seen[name] = 1
            talk = str(raw.get("conversation") or given)
            rows.append(Row(name, prompt_ids, response_ids, "" if talk == name else talk))
            if limit and len(rows) >= limit:
                return rows
    if not rows:
        told = ", ".join(f"{n}× {reason}" for reason, n in skipped.most_common())
        raise ValueError(f"data.path={path}: no usable row ({told})")
    return rows


def unusable(prompt_ids: list[int], response_ids: list[int], max_length: int | None = None) -> str | None:
    """Why a row teaches nothing, or None. A block needs two supervised tokens: its anchor and one to draft."""
    if not prompt_ids:
        return "empty prompt"
    if not response_ids:
        return "empty answer"
    if max_length is None:
        return None
    if len(response_ids) < 2:
        return "answer of one token: no block"
    return "answer cut away by max_length" if len(prompt_ids) + 2 > max_length else None


def check_made_for(path: str | Path, target, thinking: bool):
    """Raises ValueError where generate_data wrote these rows for another target or under another template."""
    file = Path(path).expanduser() / SETTINGS
    if not file.exists():
        return  # rows from elsewhere say nothing of how they were made
    made = json.loads(file.read_text())
    known = made["target"]["fingerprint"]  # null where a server answered: its weights were not seen
    if known is not None and known != target.fingerprint():
        raise ValueError(
            f"data.path={path}: the rows are answers of {made['target']['name']}, whose weights are not those of "
            f"target {target.name}; generate this target's own"
        )
    if made["template"] != template_facts(target.tokenizer, thinking):
        raise ValueError(f"data.path={path}: the rows were rendered under another chat template or thinking flag")


def data_facts(rows: list[Row]) -> dict:
    """Counts and a hash of the ids, for the provenance."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row.id}{row.prompt_ids}{row.response_ids}".encode())
    tokens = sum(len(row.response_ids) for row in rows)
    return {"rows": len(rows), "response_tokens": tokens, "sha256": digest.hexdigest()}


def hash_of(ids) -> str | None:
    """Short hash of a list of ids."""
    return None if ids is None else hashlib.sha256(str(list(ids)).encode()).hexdigest()[:16]


def hold_out(rows: list[Row], count: int) -> tuple[list[Row], list[Row]]:
    """-> rows to train on, at least `count` rows to evaluate on: a choice by name, the same whatever the order, and
    never the turns of one conversation, or several rows of one name, on both sides.

    Raises ValueError where more than half would be held out.
    """

    def talk(row: Row) -> bytes:
        return hashlib.blake2b((row.conversation or row.id).encode()).digest()

    order, asked = sorted(rows, key=lambda row: (talk(row), row.id)), count
    held = order[:count]
    while count and count < len(order) and talk(order[count]) == talk(held[-1]):  # the rest of the last conversation
        held.append(order[count])
        count += 1
    if 2 * count > len(rows):
        raise ValueError(
            f"eval_rows={asked}: with the rest of its conversations more than half of the {len(rows)} rows ({count}); "
            "lower it, or set eval_every=0"
        )
    names = {row.id for row in held}
    return [row for row in rows if row.id not in names], held


def coverage(rows: list[Row], draft_ids) -> float:
    """Share of the answers' tokens that lie in a reduced draft vocabulary."""
    known = set(draft_ids)
    tokens = [i for row in rows for i in row.response_ids]
    return sum(i in known for i in tokens) / max(1, len(tokens))


def frequent_ids(rows: list[Row], size: int, vocab_size: int, always=()) -> list[int]:
    """A reduced draft vocabulary: `always`, then the `size` most frequent ids of answers and prompts, ascending.

    Prompts count too, since answers repeat their words; ties go to the lower id.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"draft_vocab_size={size}: must lie between 1 and the target's vocabulary of {vocab_size}")
    ids = torch.tensor([i for row in rows for i in (*row.prompt_ids, *row.response_ids)])
    counts = torch.bincount(ids, minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    return sorted(counts.sort(descending=True, stable=True).indices[:size].tolist())
