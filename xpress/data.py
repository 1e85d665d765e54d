"""Training rows: ids, not text. Prompts in, the target's own answers out, and back as batches.

A row is the prompt's ids as rendered with the generation prompt, then the ids that the target generated, its stop token
included; exactly the generated ids are supervised. Neither the template nor `ids != pad` is asked for masks: templates
carry no marks, and in many targets end-of-text is pad.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig

from xpress.files import write_json, write_text
from xpress.prompts import Prompt, read_jsonl, render, stop_ids, template_facts, user

SETTINGS = "settings.json"


@dataclass(frozen=True)
class Row:
    """One turn: prompt ids, response ids (both as the target saw them)."""

    id: str
    prompt_ids: list[int]
    response_ids: list[int]


def row_id(prompt: Prompt) -> str:
    """Stable name of a prompt: its set and a hash of its text."""
    return f"{prompt.source}-{hashlib.blake2b(prompt.turns[0].encode(), digest_size=8).hexdigest()}"


# --- generating -----------------------------------------------------------------------------------------------------


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
    progress=lambda done, total: None,
) -> dict:
    """The target's answers to `prompts`, one shard a batch, each written whole or not at all -> counts.

    Resumable: rows that a shard already holds are not generated again. Raises ValueError when `out` was made with other
    settings, and for prompts that leave no room in the context.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "target": {"name": target.name, "fingerprint": target.fingerprint()},
        "template": template_facts(target.tokenizer, thinking),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
    }
    _claim(out, settings)
    done = {row["id"] for path in shards(out) for row in read_jsonl(path)}
    todo = {}
    for prompt in prompts:
        todo.setdefault(row_id(prompt), prompt)  # equal prompts are answered once
    total = len(todo)
    todo = {name: prompt for name, prompt in todo.items() if name not in done}
    rendered = {name: render(target.tokenizer, user(prompt.turns), thinking) for name, prompt in todo.items()}
    for name, ids in rendered.items():
        if target.context_length and len(ids) + max_new_tokens > target.context_length:
            raise ValueError(
                f"prompt {todo[name].id}: {len(ids)} tokens and max_new_tokens={max_new_tokens} exceed the target's "
                f"context of {target.context_length}"
            )
    names = sorted(rendered, key=lambda name: len(rendered[name]))  # equal lengths together: little padding
    counts = {"rows": total - len(todo), "tokens": 0, "stopped": 0, "empty": 0}
    progress(counts["rows"], total)
    for start in range(0, len(names), batch_size):
        part = names[start : start + batch_size]
        torch.manual_seed(int.from_bytes(hashlib.blake2b(f"{seed}/{part[0]}".encode(), digest_size=4).digest(), "big"))
        answers = _answer(target, [rendered[name] for name in part], max_new_tokens, temperature, top_p)
        rows = []
        for name, ids in zip(part, answers):
            if not ids:
                counts["empty"] += 1
                continue
            stopped = ids[-1] in stop_ids(target.tokenizer, target.model)
            counts["stopped"] += stopped
            counts["tokens"] += len(ids)
            rows.append(
                {
                    "id": name,
                    "source": todo[name].source,
                    "prompt_ids": rendered[name],
                    "response_ids": ids,
                    "finish": "stop" if stopped else "length",
                }
            )
        if rows:  # named by a row that it holds: that prompt is done, so no later shard can take the name
            write_text(out / f"shard-{rows[0]['id']}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        counts["rows"] += len(part)
        progress(counts["rows"], total)
    return counts


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
    return [_until_stop(row, stops) for row in new]


def _until_stop(ids: list[int], stops) -> list[int]:
    for i, token in enumerate(ids):
        if token in stops:
            return ids[: i + 1]
    return ids


def _claim(out: Path, settings: dict):
    path = out / SETTINGS
    if path.exists():
        old = json.loads(path.read_text())
        changed = [key for key in settings if old.get(key) != settings[key]]
        if changed:
            raise ValueError(f"out={out} holds rows made with other {', '.join(changed)}; choose another folder")
    elif any(out.iterdir()):
        raise ValueError(f"out={out}: the folder is not empty and holds no {SETTINGS}; choose another folder")
    else:
        write_json(path, settings)


def shards(path: Path) -> list[Path]:
    """The files that hold rows: the file itself, or the shards of a folder."""
    return [path] if path.is_file() else sorted(path.glob("shard-*.jsonl"))


# --- reading --------------------------------------------------------------------------------------------------------


def load_rows(
    path: str | Path, tokenizer=None, thinking: bool = False, limit: int | None = None, vocab_size: int | None = None
) -> list[Row]:
    """Rows of a folder or a JSONL file. A record has response_ids, and prompt_ids or a `prompt` text to render.

    Raises FileNotFoundError, or ValueError with file and record, also for ids outside 0 … vocab_size − 1.
    """
    path = Path(path).expanduser()
    files = shards(path) if path.exists() else []
    if not files:
        raise FileNotFoundError(f"data.path={path}: no rows there; make them with scripts/generate_data.py")
    rows = []
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
            if prompt_ids and response_ids:
                rows.append(Row(str(raw.get("id", f"{file.name}:{number}")), prompt_ids, response_ids))
            if limit and len(rows) >= limit:
                return rows
    if not rows:
        raise ValueError(f"data.path={path}: no usable row, every prompt or answer is empty")
    return rows


def check_made_for(path: str | Path, target, thinking: bool):
    """Raises ValueError where generate_data wrote these rows for another target or under another template."""
    file = Path(path).expanduser() / SETTINGS
    if not file.exists():
        return  # rows from elsewhere say nothing of how they were made
    made = json.loads(file.read_text())
    if made["target"]["fingerprint"] != target.fingerprint():
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
