"""Methods side by side: the same prompts, one process, order rotated from prompt to prompt, every output checked.

At temperature 0 each output is compared with plain autoregression. Only a prompt's first difference counts: it is a tie
where the target's two best logits lie closer than rounding can tell apart, and a failure otherwise.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from xpress.decode import Response, decode
from xpress.metrics import Counts, bootstrap, difference, summary, tau
from xpress.prompts import Prompt, render, stop_ids, template_facts, user
from xpress.sampling import GREEDY, Sampling, at_least_fp32

TIE_FP32 = 1e-3  # logit gap; one-token and eight-token steps of a 135M target differ by 6e-5


@dataclass(frozen=True)
class Method:
    """A row of the table. drafter None: plain autoregression."""

    name: str
    drafter: object = None
    head: object = None
    passes: int | str = 0


@dataclass
class Result:
    """Of one method: counts and outputs a prompt, and the lossless verdict (None above temperature 0)."""

    method: Method
    counts: list[Counts]
    outputs: list[list[int]]
    differences: list[dict]

    @property
    def lossless(self) -> bool:
        return all(d["tie"] for d in self.differences)


def methods_for(checkpoint, passes: list, bare=None) -> list[Method]:
    """ar, the drafter that training started from (if given), and the checkpoint at each K."""
    rows = [Method("ar")]
    if bare is not None:
        rows.append(Method("bare", bare.drafter))
    head = checkpoint.head
    for K in passes:
        if head is None or K == 0:
            row = Method("drafter" if head is not None else "bare", checkpoint.drafter)
        else:
            row = Method(type(head).__name__.lower(), checkpoint.drafter, head, K)
        if row not in rows:
            rows.append(row)
    return rows


def timed(target, prompt: list[int], method: Method, **settings) -> tuple[Response, float]:
    """One response, and the seconds from its first token to its last."""
    response, start = Response(), None
    for step in decode(target, prompt, method.drafter, method.head, method.passes, **settings):
        response.ids += step.tokens
        if step.num_draft is not None:
            response.rounds.append(step)
        if start is None:
            _synchronize(target.device)
            start = time.perf_counter()
    _synchronize(target.device)
    return response, time.perf_counter() - (start or time.perf_counter())


def _synchronize(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def evaluate(
    target,
    methods: list[Method],
    prompts: list[Prompt],
    *,
    max_new_tokens: int = 256,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    thinking: bool = False,
    progress: Callable = lambda done, total, what: None,
) -> list[Result]:
    """Every method on every prompt -> one Result each, in the order given. The first method must be plain
    autoregression. Raises ValueError before any work for prompts that do not fit the target's context."""
    stops = stop_ids(target.tokenizer, target.model)
    rendered = [render(target.tokenizer, user(prompt.turns), thinking) for prompt in prompts]
    for prompt, ids in zip(prompts, rendered):
        if target.context_length and len(ids) + max_new_tokens > target.context_length:
            raise ValueError(
                f"prompt {prompt.id}: {len(ids)} tokens and max_new_tokens={max_new_tokens} exceed the target's "
                f"context of {target.context_length}; lower max_new_tokens or leave the prompt out"
            )
    settings = dict(max_new_tokens=max_new_tokens, stop_ids=stops, sampling=sampling)
    for method in methods:  # warm up: allocators and kernels, on nothing that is counted
        timed(target, rendered[0], method, **{**settings, "max_new_tokens": min(8, max_new_tokens)})
    results = [Result(method, [], [], []) for method in methods]
    total = len(prompts) * len(methods)
    for i, ids in enumerate(rendered):
        turn = i % len(methods)
        for result in results[turn:] + results[:turn]:
            response, seconds = timed(target, ids, result.method, seed=prompt_seed(seed, i), **settings)
            result.counts.append(Counts.of(response, seconds))
            result.outputs.append(response.ids)
            progress(sum(len(r.counts) for r in results), total, result.method.name)
        if sampling.greedy:
            for result in results[1:]:
                found = first_difference(target, ids, results[0].outputs[-1], result.outputs[-1])
                if found:
                    result.differences.append({"prompt": prompts[i].id, **found})
    return results


def prompt_seed(seed: int, index: int) -> int:
    """A seed for each prompt, so that samples do not depend on the order of prompts or methods."""
    return seed * 1_000_003 + index


def first_difference(target, prompt: list[int], plain: list[int], other: list[int]) -> dict | None:
    """None where both outputs are equal, else the place, the top-2 gap of plain autoregression there, and whether that
    is a tie. Raises nothing: the verdict is the caller's."""
    if plain == other:
        return None
    at = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), min(len(plain), len(other)))
    context = [*prompt, *plain[:at]]
    logits, _ = target.prefill([context])
    best = at_least_fp32(logits[0]).topk(2).values
    gap = float(best[0] - best[1])
    limit = TIE_FP32 if target.dtype in (torch.float32, torch.float64) else 4 * spacing(float(best[0]), target.dtype)
    same_length = at < min(len(plain), len(other))
    return {"at": at, "gap": gap, "limit": limit, "tie": same_length and gap <= limit}


def spacing(value: float, dtype: torch.dtype) -> float:
    """Distance from `value` to the next number that `dtype` holds."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(value), 1e-30)))


def check_template(target, provenance: dict, thinking: bool) -> None:
    """Warns loudly where prompts are rendered otherwise than in training."""
    trained = provenance.get("template")
    if not trained:
        return
    now = template_facts(target.tokenizer, thinking)
    changed = [f"{key}: trained with {trained[key]}, now {now[key]}" for key in now if trained.get(key) != now[key]]
    if changed:
        warnings.warn(
            "prompts are rendered otherwise than in training, so acceptance will suffer: " + "; ".join(changed),
            stacklevel=2,
        )


def report(results: list[Result], prompts: list[Prompt], protocol: dict) -> dict:
    """Everything as JSON-able data: protocol, a summary for each method, paired differences of tau against every bare
    drafter, and what differed from autoregression."""
    greedy = protocol["temperature"] == 0
    rows = []
    for result in results:
        rows.append(
            {
                "method": result.method.name,
                "passes": result.method.passes if result.method.head is not None else None,
                **summary(result.counts, results[0].counts),
                "lossless": result.lossless if greedy else None,
                "differences": result.differences,
                "responses": [{"prompt": p.id, **count.as_dict()} for p, count in zip(prompts, result.counts)],
            }
        )
    pairs = []
    for base in results:
        if base.method.drafter is None or base.method.head is not None:
            continue
        for other in results:
            if other.method.head is not None:
                gap = difference(tau)
                pairs.append(
                    {
                        "a": other.method.name,
                        "passes": other.method.passes,
                        "b": base.method.name,
                        "tau_difference": gap(other.counts, base.counts),
                        "interval": bootstrap(gap, other.counts, base.counts),
                    }
                )
    return {"protocol": protocol, "methods": rows, "paired": pairs}


def settle_protocol(raw: dict) -> dict:
    """Fills what `protocol` decides; refuses settings that would make a published protocol another one."""
    fixed = {"free": {}, "published": {"max_new_tokens": 2048, "samples": 128, "thinking": False}}
    if raw["protocol"] not in fixed:
        raise ValueError(f"protocol={raw['protocol']}: known are {', '.join(fixed)}")
    for key, value in fixed[raw["protocol"]].items():
        if raw[key] not in (None, value):
            raise ValueError(f"{key}={raw[key]}: protocol=published fixes it at {value}; drop one of the two")
        raw[key] = value
    if raw["protocol"] == "published" and raw["temperature"] not in (0, 1):
        raise ValueError(f"temperature={raw['temperature']}: protocol=published has 0 and 1")
    raw["max_new_tokens"] = 256 if raw["max_new_tokens"] is None else raw["max_new_tokens"]
    if raw["max_new_tokens"] < 1:
        raise ValueError(f"max_new_tokens={raw['max_new_tokens']}: must be at least 1")
    return raw
