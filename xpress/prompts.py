"""Prompt sets, and the one render function of training and evaluation.

A set is one entry of the table: where it lives on the hub, and how a record becomes the user's turns. The templates
are those of the published dFlash and XPress protocols. `sample` and `train` are our own and ship with the package.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SAMPLES = Path(__file__).parent / "samples"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TESTS = "Write a solution to the following problem and make sure that it passes the tests:\n"
EXPERT = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program"
)
WITH_STARTER = "Use the following code structure:"
WITHOUT_STARTER = "Write your code in the following format:"


def _livecodebench(row: dict) -> list[str]:
    starter = row.get("starter_code")
    form, code = (WITH_STARTER, starter) if starter else (WITHOUT_STARTER, "# YOUR CODE HERE")
    parts = (
        EXPERT,
        f"### Question:\n{row['question_content']}",
        f"### Format: {form}\n```python\n{code}\n```",
        "### Answer: (use the provided format with backticks)",
    )
    return ["\n\n".join(parts)]


def _alpaca(row: dict) -> list[str]:
    extra = f"\n\nInput:\n{row['input']}" if row.get("input") else ""
    return [row["instruction"] + extra]


@dataclass(frozen=True)
class PromptSet:
    """hub id, configuration, split; turns: record -> the user's turns; category: records of this one alone."""

    hub: str | None
    config: str | None
    split: str
    turns: Callable[[dict], list[str]]
    data_files: tuple[str, ...] | None = None
    category: str | None = None


SETS = {
    "gsm8k": PromptSet("openai/gsm8k", "main", "test", lambda row: [row["question"] + BOXED]),
    "math500": PromptSet("HuggingFaceH4/MATH-500", None, "test", lambda row: [row["problem"] + BOXED]),
    "aime24": PromptSet("HuggingFaceH4/aime_2024", None, "train", lambda row: [row["problem"] + BOXED]),
    "aime25": PromptSet("MathArena/aime_2025", None, "train", lambda row: [row["problem"] + BOXED]),
    "humaneval": PromptSet(
        "openai/openai_humaneval", None, "test", lambda row: [f"{TESTS}```python\n{row['prompt']}\n```"]
    ),
    "mbpp": PromptSet("google-research-datasets/mbpp", "sanitized", "test", lambda row: [row["prompt"]]),
    "livecodebench": PromptSet(
        "livecodebench/code_generation_lite",
        None,
        "train",
        _livecodebench,
        ("test.jsonl", *(f"test{i}.jsonl" for i in range(2, 7))),
    ),
    "mt_bench": PromptSet("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: row["prompt"]),
    "alpaca": PromptSet("tatsu-lab/alpaca", None, "train", _alpaca),
    "sample": PromptSet(None, None, "sample", lambda row: [row["prompt"]]),
    "sample_math": PromptSet(None, None, "sample", lambda row: [row["prompt"]], category="math"),
    "train": PromptSet(None, None, "train", lambda row: [row["prompt"]]),
}


@dataclass(frozen=True)
class Prompt:
    """id: stable name; source: the set; turns: what the user says, first turn first; system: what stands before."""

    id: str
    source: str
    turns: list[str]
    system: str = ""


def load_prompts(name: str, samples: int | None = None, data_dir: str | None = None, shuffle_seed: int | None = 0):
    """Prompts of a set: the first `samples` after shuffling with `shuffle_seed` (None: file order) -> list[Prompt].

    From `data_dir`/<name>.jsonl where given, else from the hub; our own sets from the package, in file order. Raises
    ValueError naming file and line for malformed records, and where a set is unknown or empty.
    """
    if name not in SETS:
        raise ValueError(f"bench={name}: unknown set; known are {', '.join(SETS)}")
    if samples is not None and samples < 1:
        raise ValueError(f"samples={samples}: must be at least 1")
    entry = SETS[name]
    if entry.hub is None:
        rows, shuffle_seed = numbered_jsonl(SAMPLES / f"{entry.split}.jsonl"), None
        rows = [(at, row) for at, row in rows if entry.category in (None, row["category"])]
    elif data_dir is not None:
        rows = numbered_jsonl(Path(data_dir).expanduser() / f"{name}.jsonl")
    else:
        rows = [(f"{entry.hub}, record {i}", row) for i, row in enumerate(_from_hub(name, entry))]
    order = list(range(len(rows)))
    if shuffle_seed is not None and samples is not None and samples < len(rows):
        order = _shuffled(len(rows), shuffle_seed)
    prompts = []
    for index in order[:samples]:
        place, row = rows[index]
        try:
            turns = entry.turns(row)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{place}: not a record of {name}; field {error} is missing or of the wrong kind"
            ) from error
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise ValueError(f"{place}: the record's turns must be a list of non-empty texts")
        prompts.append(Prompt(f"{name}/{index}", name, turns))
    return prompts


def read_jsonl(path: Path) -> list[dict]:
    """Records of a JSON-lines file. Raises FileNotFoundError, or ValueError with the line's number."""
    return [row for _, row in numbered_jsonl(path)]


def numbered_jsonl(path: Path) -> list[tuple[str, dict]]:
    """Records with their places ("file, line n"), blank lines skipped."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; data_dir must hold one <name>.jsonl for each set")
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # of JSON or of UTF-8
                raise ValueError(f"{path}, line {number}: not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a record must be a JSON object")
            rows.append((f"{path}, line {number}", row))
    if not rows:
        raise ValueError(f"{path}: the file holds no records")
    return rows


def _from_hub(name: str, entry: PromptSet):
    import datasets  # heavy, and not needed for the sets that ship

    try:
        files = list(entry.data_files) if entry.data_files else None
        if files:  # datasets 5 runs no loading scripts: the set's JSONL files are read as they are
            files = [f"hf://datasets/{entry.hub}/{file}" for file in files]
            return datasets.load_dataset("json", data_files=files, split="train")
        return datasets.load_dataset(entry.hub, entry.config, split=entry.split)
    except Exception as error:
        raise OSError(
            f"bench={name}: {entry.hub} could not be read from the hub ({type(error).__name__}). Without network, give "
            f"data_dir=<folder with {name}.jsonl>, or use bench=sample, which ships with the package"
        ) from error


def _shuffled(n: int, seed: int) -> list[int]:
    """The order that `datasets.Dataset.shuffle` gives, which the published protocols use."""
    import datasets

    return datasets.Dataset.from_dict({"index": range(n)}).shuffle(seed=seed)["index"][:]


# --- rendering ------------------------------------------------------------------------------------------------------


def render(tokenizer, messages: list[dict], thinking: bool = False) -> list[int]:
    """Messages -> prompt ids under the tokenizer's chat template, with the generation prompt.

    The one render function: training rows, evaluation and serving call it, so that they cannot differ.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ValueError("the target's tokenizer has no chat template; give a target with one, or prompt ids directly")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def conversation(prompt: Prompt, answers: list[str]) -> list[dict]:
    """The messages up to the user's next turn, with the answers so far."""
    found = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for said, answer in zip(prompt.turns, answers):
        found += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
    return [*found, {"role": "user", "content": prompt.turns[len(answers)]}]


def answer_text(tokenizer, ids: list[int], stops) -> str:
    """A generated turn as it is fed back: without its stop token and other marks."""
    return tokenizer.decode(ids[:-1] if ids and ids[-1] in stops else ids, skip_special_tokens=True)


def template_facts(tokenizer, thinking: bool) -> dict:
    """What must be equal between training and evaluation: flags, and a hash of the template and of rendered ids."""
    ids = render(tokenizer, [{"role": "user", "content": "Hello"}], thinking)
    return {
        "enable_thinking": thinking,
        "add_generation_prompt": True,
        "template_sha256": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        "rendered_sha256": hashlib.sha256(str(ids).encode()).hexdigest(),
    }


def template_change(tokenizer, thinking: bool, provenance: dict) -> str | None:
    """How prompts are rendered otherwise than a checkpoint's provenance says; None where they are not, or where it
    does not say."""
    trained = provenance.get("template")
    if not trained:
        return None
    now = template_facts(tokenizer, thinking)
    changed = [f"{key}: trained with {trained[key]}, now {now[key]}" for key in now if trained.get(key) != now[key]]
    if not changed:
        return None
    return "prompts are rendered otherwise than in training, so acceptance will suffer: " + "; ".join(changed)


def tokenizer_hash(tokenizer) -> str | None:
    """sha256 of everything that turns text into ids; None for a tokenizer without such a description."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else hashlib.sha256(backend.to_str().encode()).hexdigest()


def stop_ids(tokenizer, model=None) -> tuple[int, ...]:
    """Every id that ends a response: the tokenizer's, and those of the model's generation config."""
    found = [getattr(tokenizer, "eos_token_id", None)]
    listed = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found += listed if isinstance(listed, (list, tuple)) else [listed]
    return tuple(sorted({i for i in found if i is not None}))
