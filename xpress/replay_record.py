"""Recording a replay: one prompt decoded by each method alone, one after the other.

Methods that ran at once would slow each other down, so they are only played together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from xpress import checkpoint, interop, parts
from xpress.decode import decode, room_for
from xpress.evaluate import Method, head_name
from xpress.lossless import first_difference
from xpress.prompts import render, stop_ids, template_change
from xpress.refine import check_passes
from xpress.replay import Recording, Replay, make_scenes
from xpress.sampling import Sampling

WARM_UP = 8  # tokens of each method before its clock counts


def record(target, prompt: list[int], method: Method, about: str = "", **settings) -> Recording:
    """Prompt ids -> the response of one method, watched. settings: those of `decode`."""
    rounds, at, start = [], [], 0.0
    for step in decode(target, prompt, method.drafter, method.head, method.passes, **settings):
        if target.device.type == "cuda":  # a round is over when its work is, not when it was queued
            torch.cuda.synchronize(target.device)
        now = time.perf_counter()
        start = start if rounds else now
        rounds.append(step)
        at.append(now - start)
    ids = [token for step in rounds for token in step.tokens]
    scenes = make_scenes(target.tokenizer, rounds, at)
    text = "".join(token.text for scene in scenes for token in scene.tokens)
    return Recording(method.label, about, method.passes if method.head else None, ids, text, scenes)


def methods_of(drafter, head, passes: int | str) -> list[tuple[Method, str]]:
    """Plain autoregression, the drafter with its head off, and, where there is a head, the head; each with a line that
    says what it is."""
    found = [
        (Method("ar"), "the target alone, one token a step"),
        (Method("drafter", "drafter", drafter), "head switched off"),
    ]
    if head is not None:
        found.append((Method(head_name(head), "head", drafter, head, passes), f"head on, K = {passes}"))
    return found


def record_all(
    target,
    prompt: list[int],
    methods: list[tuple[Method, str]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed=0,
    say,
) -> list[Recording]:
    """One method after another, each warmed up first; at temperature 0 each is compared with the first, which must be
    plain autoregression."""
    settings = dict(stop_ids=stop_ids(target.tokenizer, target.model), sampling=sampling, seed=seed)
    found = []
    for method, about in methods:
        say(f"decoding: {method.label}, {about}")
        record(target, prompt, method, max_new_tokens=min(WARM_UP, max_new_tokens), **settings)
        found.append(record(target, prompt, method, about, max_new_tokens=max_new_tokens, **settings))
    if sampling.greedy:
        for recording in found[1:]:
            recording.difference = first_difference(target, prompt, found[0].ids, recording.ids)
    return found


def make_replay(
    path: str,
    prompt: str,
    passes: int | str = "auto",
    *,
    max_new_tokens: int = 96,
    sampling: Sampling,
    seed: int = 0,
    thinking: bool = False,
    target: str | None = None,
    loop: str = "auto",
    dtype: str | None = None,
    device: str | None = None,
    say: Callable = print,
) -> Replay:
    """A checkpoint and a prompt's text -> its replay. path: a run, a checkpoint, a hub id; target None: the one that
    the checkpoint names; dtype None: float32 on a CPU, bfloat16 on a GPU; say: what the user should know.

    Raises ValueError or OSError naming the setting, before anything is decoded.
    """
    check_prompt(prompt)
    check_passes(passes)
    if passes == 0:
        raise ValueError("passes=0: that is the drafter alone, which has a pane anyway; give 1 or more, or auto")
    check_number("max_new_tokens", max_new_tokens, 1, whole=True)
    check_number("seed", seed, whole=True)
    device = parts.device_of(device)
    dtype = parts.dtype_of(dtype, device)
    folder = checkpoint.locate(parts.find(path))
    name = parts.target_of(target, [folder])
    model = parts.make_target({"name": name, "loop": loop}, device, dtype)
    changed = template_change(model.tokenizer, thinking, checkpoint.provenance_of(folder))
    if changed:
        say(f"WARNING: {changed}")
    ids = render(model.tokenizer, [{"role": "user", "content": prompt}], thinking)
    room_for(model, ids, max_new_tokens)
    found = interop.load(folder, model, getattr(torch, dtype), device)
    if found.head is None:
        say("the checkpoint has no head: plain autoregression and the drafter alone")
    methods = methods_of(found.drafter, found.head and parts.for_decoding(found.head), passes)
    recordings = record_all(model, ids, methods, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, say=say)
    protocol = {
        "target": name,
        "checkpoint": str(path),
        "head": head_name(found.head),
        "passes": passes,
        "num_draft": found.drafter.config.num_draft,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "accept": "exact" if sampling.greedy else sampling.accept,
        "max_new_tokens": max_new_tokens,
        "prompt_tokens": len(ids),
        "thinking": thinking,
        "seed": seed,
        "dtype": dtype,
        "device": device,
        "loop": model.loop,
        "threads": torch.get_num_threads(),
        **parts.versions(),
    }
    return Replay(prompt, recordings, protocol)


# --- bad input -------------------------------------------------------------------------------------------------------


def check_prompt(prompt):
    if not isinstance(prompt, str):
        raise ValueError(f"""prompt={prompt}: must be text; quote it twice: 'prompt="{prompt}"'""")
    if not prompt.strip():
        raise ValueError("prompt is empty; give the user's words, prompt=…")


def check_number(name: str, value, least: float = -math.inf, whole: bool = False):
    """Raises ValueError naming the setting unless it is a finite number from `least` up."""
    kinds = int if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value) or value < least:
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{name}={value}: must be {kind}" + (f" from {least} up" if math.isfinite(least) else ""))
