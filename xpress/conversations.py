"""Prompts from conversations of any origin: what the users said, for the target to answer anew.

Answers in the files are never read, so an empty or missing one, or two in a row, spoils nothing. A record that is no
use as a prompt is skipped with a counted reason.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

from xpress.prompts import Prompt

ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user", "prompter": "user"}
ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bard", "bing", "model", "bot"), "assistant")
FIELDS = ("prompt", "turns", "question", "instruction", "problem", "text")


class Unusable(ValueError):
    """A record that is no prompt; the message is the reason that is counted."""


def load_conversations(
    path: str | Path, samples: int | None = None, skipped: Counter | None = None, shuffle_seed: int = 0
) -> list[Prompt]:
    """Prompts of a .jsonl file or of a folder's .jsonl files; `samples` of them after shuffling with `shuffle_seed`.

    A record has `messages` or `conversations` (role and content, or from and value), or one of FIELDS, with `input` or
    `context` beside an instruction. Reasons for skipping are counted in `skipped`. Raises FileNotFoundError where there
    is no such file, ValueError where no record is usable.
    """
    skipped = Counter() if skipped is None else skipped
    if samples is not None and samples < 1:
        raise ValueError(f"samples={samples}: must be at least 1")
    path = Path(path).expanduser()
    files = [path] if path.is_file() else sorted(path.glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"prompts={path}: no such file, and no folder with .jsonl files")
    found = []
    for file in files:
        source = re.sub(r"[^\w.-]+", "_", file.stem)  # it becomes part of row ids and of file names
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    system, turns = conversation(_record(line))
                except Unusable as reason:
                    skipped[str(reason)] += 1
                else:
                    found.append(Prompt(f"{file.name}:{number}", source, turns, system))
    if not found:
        told = ", ".join(f"{n}× {reason}" for reason, n in skipped.most_common()) or "the files are empty"
        raise ValueError(f"prompts={path}: no usable record ({told})")
    if samples is not None and samples < len(found):
        random.Random(shuffle_seed).shuffle(found)
    return found[:samples]


def conversation(record: dict) -> tuple[str, list[str]]:
    """A record -> (system text or "", the user's turns). Raises Unusable."""
    for name in ("messages", "conversations", "conversation"):
        if record.get(name) is not None:
            return _messages(record[name])
    name = next((name for name in FIELDS if record.get(name) is not None), None)
    if name is None:
        raise Unusable("neither messages nor a prompt field")
    value = record[name]
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        return _messages(value)
    turns = value if isinstance(value, list) else [value]
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise Unusable("a prompt that is not text")
    if not all(turn.strip() for turn in turns):
        raise Unusable("an empty prompt")
    extra = record.get("input") or record.get("context") or _first_instance(record)
    if name == "instruction" and isinstance(extra, str) and extra.strip():
        turns = [f"{turns[0]}\n\nInput:\n{extra}", *turns[1:]]
    return "", turns


def _messages(messages) -> tuple[str, list[str]]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Unusable("messages that are no list of objects")
    if not messages:
        raise Unusable("no messages")
    system, turns, before = [], [], "system"
    for message in messages:
        name = message.get("role", message.get("from"))
        if name is None:
            raise Unusable("a message without a role")
        role = ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise Unusable("a message of an unknown role")
        if role == "system" and before != "system":
            raise Unusable("a system turn in the middle")
        if role == "assistant" and not turns and any(ROLES.get(_role(m)) == "user" for m in messages):
            raise Unusable("the assistant speaks first")
        if role == "user" and before == "user":
            raise Unusable("two user turns in a row")
        if role != "assistant":
            (turns if role == "user" else system).append(_text(message.get("content", message.get("value")), role))
        before = role
    if not turns:
        raise Unusable("no user turn")
    return "\n\n".join(text for text in system if text), turns


def _role(message: dict):
    name = message.get("role", message.get("from"))
    return name if isinstance(name, str) else None


def _text(content, role: str) -> str:
    """A text, or a list of text parts joined. Only a system turn may be empty."""
    if isinstance(content, list):
        parts = [
            part if isinstance(part, str) else part.get("text") for part in content if isinstance(part, (str, dict))
        ]
        if len(parts) < len(content) or not all(isinstance(part, str) for part in parts):
            raise Unusable("content that is not text alone")
        content = "".join(parts)
    if content is None and role == "system":
        return ""
    if content is None:
        raise Unusable("a user turn without content")
    if not isinstance(content, str):
        raise Unusable("content that is not text alone")
    if role == "user" and not content.strip():
        raise Unusable("an empty user turn")
    return content


def _first_instance(record: dict):
    """The input beside a Self-Instruct seed task."""
    instances = record.get("instances")
    first = instances[0] if isinstance(instances, list) and instances else None
    return first.get("input") if isinstance(first, dict) else None


def _record(line: bytes) -> dict:
    try:
        record = json.loads(line)
    except ValueError as error:  # of JSON or of UTF-8
        raise Unusable("a line that is not JSON") from error
    if not isinstance(record, dict):
        raise Unusable("a line that is no JSON object")
    return record
