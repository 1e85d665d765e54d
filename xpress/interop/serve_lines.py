"""How each format is served: the launch lines, what an engine cannot do with them, and where that is written.

One table for the README's "Serve it" and for model cards, so that the two say the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from xpress.block import INFILL, NEXT
from xpress.interop.base import DOMINO, MARKOV, REFINER

VLLM, SGLANG = "vLLM 0.32.0", "SGLang 0.5.23"
RUN, READ, NO_RUN, NO_READ, UNTRIED = "run", "read", "no, run", "no, read", "not tried"
SAYS = {
    RUN: "takes it; a small checkpoint of this format was run there",
    READ: "takes it by its code, which was read; it was not run",
    NO_RUN: "does not take it as released; tried",
    NO_READ: "does not take it by its code, which was read",
    UNTRIED: "was not tried",
}
KINDS = {REFINER: "refiner", DOMINO: "domino"} | {path: kind for kind, path in MARKOV.items()}
ANY, BOTH = "anything", f"{INFILL.name}, {NEXT.name}"

_VLLM = {
    method: f"vllm serve TARGET --speculative-config "
    f'\'{{"method": "{method}", "model": "CHECKPOINT", "num_speculative_tokens": NUM_DRAFT}}\''
    for method in ("dflash", "dspark", "xpress")
}
_SGLANG = "python -m sglang.launch_server --model-path TARGET --speculative-draft-model-path CHECKPOINT "
DFLASH = _SGLANG + "--speculative-algorithm DFLASH --speculative-num-draft-tokens WINDOW"
DSPARK = _SGLANG + "--speculative-algorithm DSPARK --speculative-dspark-block-size NUM_DRAFT"
OWN = "vllm serve CHECKPOINT"

XPRESS_RELEASE = "github.com/Supercomputing-System-AI-Lab/xPress, vllm_xpress/"
NOTES = {  # what an engine needs or cannot do, and the source
    "method": (
        "Name the method: without it, and without `dflash` in the folder's name, the folder is taken for an ordinary "
        "draft model.",
        "vllm/config/speculative.py; run",
    ),
    "length": (
        "Nothing holds the number of tokens to the block that was trained; a smaller one runs a shorter block.",
        "vllm/v1/spec_decode/dflash.py, vllm/v1/worker/gpu/spec_decode/dflash/speculator.py",
    ),
    "greedy": (
        "Drafts are greedy at any temperature unless `draft_sample_method` is `probabilistic`.",
        "vllm/config/speculative.py",
    ),
    "k_norm": (
        "On a CPU the context's keys of every layer are normed by the first layer's `k_norm`: the same text, tau moves "
        "in the second decimal.",
        "vllm/model_executor/models/qwen3_dflash.py, _normalize_context_k; run",
    ),
    "reduced": (
        "A reduced draft vocabulary is read from `d2t` and its rows of `lm_head`, which are written with target=.",
        "vllm/model_executor/models/qwen3_dflash.py, qwen3_dspark.py; run for dFlash",
    ),
    "gpu": (
        "Markov heads run in the V2 model runner alone, which needs Triton: on a CPU they are refused.",
        "vllm/config/vllm.py; run",
    ),
    "confidence": (
        "A confidence head is loaded, and used under `enable_adaptive_verification` only.",
        "vllm/model_executor/models/qwen3_dspark.py, vllm/config/speculative.py",
    ),
    "vanilla": (
        "Only the vanilla Markov head is there; the other tensors of gated and rnn heads have no place, which ends the "
        "loading.",
        "vllm/model_executor/models/qwen3_dspark.py, utils.py",
    ),
    "rank": (
        "A drafter without a head is written with `markov_rank` 0, which SGLang refuses; vLLM makes a head of width 0.",
        "sglang/srt/models/dspark.py; vllm/model_executor/models/qwen3_dspark.py",
    ),
    "domino": (
        "No Domino head: it is loaded as plain dFlash, and its tensors have no place, which ends the loading.",
        "vllm/model_executor/models/qwen3_dflash.py, utils.py; run",
    ),
    "patch": (
        "0.32.0 refuses `Qwen3XPressModel`. The line is for the authors' patch of vLLM 82ae4164; their pull request, "
        "open when last seen, selects it by method dflash instead.",
        f"{XPRESS_RELEASE}registration.patch at d1a1699; vllm-project/vllm, pull request 54448; the refusal run",
    ),
    "xpress": (
        "There: greedy drafts only, `num_speculative_tokens` is the block less one, the whole vocabulary, the head not "
        "sharded; slot 0 gets the anchor as its previous token, where training had the token before it; the pull "
        "request reads 512 candidates a slot unless `xpress_topc` is 0.",
        f"the same; {XPRESS_RELEASE}src/",
    ),
    "target": (
        "The target is the one that the folder's `speculators_config` names: a local name is found on its own machine "
        "only.",
        "vllm/transformers_utils/configs/speculators/base.py; run",
    ),
    "unknown": (
        "`speculators_model_type` xpress is not known, only eagle3, peagle, dflash, dflash2, dspark.",
        "vllm/transformers_utils/configs/speculators/algos.py; run",
    ),
    "anchor": (
        "A plain drafter of next tokens (`sample_from_anchor`): the V2 model runner refuses it, V1 does not look and "
        "reads the wrong slots.",
        "vllm/v1/worker/gpu/spec_decode/dflash/speculator.py, vllm/v1/spec_decode/dflash.py; V1 run",
    ),
    "convert": (
        "Training's own folder is not for engines: vLLM stops at a head's tensors, SGLang skips them and would draft "
        "without; write another format.",
        "vllm/model_executor/models/utils.py, run; sglang/srt/models/dflash.py",
    ),
    "device": (
        "CUDA, NPU or XPU, and one pipeline stage.",
        "sglang/srt/arg_groups/speculative_hook.py",
    ),
    "sgl_greedy": (
        "Drafts are greedy at any temperature.",
        "sglang/srt/speculative/dflash_worker_v2.py",
    ),
    "skipped": (
        "Tensors that are not known are skipped, `d2t` too: a reduced draft vocabulary becomes the target's whole one.",
        "sglang/srt/models/dflash.py",
    ),
    "whole": (
        "The head's tables have the target's vocabulary: no reduced one.",
        "sglang/srt/models/dspark.py, sglang/srt/speculative/domino_utils.py",
    ),
    "bf16": (
        "CUDA, target and head in bf16, `pure_draft_prefix_len` 1.",
        "sglang/srt/speculative/domino_utils.py, dflash_utils.py",
    ),
    "no_xpress": (
        "No refiner: the architecture is in no model file.",
        "sglang/srt/models/",
    ),
    "no_speculators": (
        "No reader for this config; write `zlab` or `dspark`.",
        "sglang/srt/ knows no `speculators_model_type`",
    ),
}


@dataclass(frozen=True)
class Way:
    """One engine: status (run: it answered here; read: its code was), the launch line, names of notes."""

    status: str
    line: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A format holding one kind of thing in one layout, and what each engine does with it."""

    format: str
    holds: tuple[str, ...]
    layout: str
    vllm: Way
    sglang: Way

    @property
    def ways(self) -> dict[str, Way]:
        return {VLLM: self.vllm, SGLANG: self.sglang}


_ALONE = ("drafter",)
_NO_SPECULATORS = Way(NO_READ, None, ("no_speculators",))
CASES = (
    Case(
        "zlab",
        _ALONE,
        INFILL.name,
        Way(RUN, _VLLM["dflash"], ("method", "length", "greedy", "k_norm", "reduced")),
        Way(READ, DFLASH, ("device", "sgl_greedy", "skipped")),
    ),
    Case(
        "dspark",
        ("vanilla",),
        NEXT.name,
        Way(READ, _VLLM["dspark"], ("gpu", "confidence", "greedy", "reduced")),
        Way(READ, DSPARK, ("device", "whole")),
    ),
    Case(
        "dspark", ("gated", "rnn"), NEXT.name, Way(NO_READ, None, ("vanilla",)), Way(READ, DSPARK, ("device", "whole"))
    ),
    Case("dspark", _ALONE, NEXT.name, Way(UNTRIED, None, ("rank",)), Way(NO_READ, None, ("rank",))),
    Case(
        "domino",
        ("domino",),
        BOTH,
        Way(NO_RUN, None, ("domino",)),
        Way(READ, DFLASH, ("bf16", "sgl_greedy", "whole")),
    ),
    Case(
        "serving",
        ("refiner",),
        INFILL.name,
        Way(NO_RUN, _VLLM["xpress"], ("patch", "xpress")),
        Way(NO_READ, None, ("no_xpress",)),
    ),
    Case("speculators", _ALONE, INFILL.name, Way(RUN, OWN, ("target", "greedy", "k_norm", "reduced")), _NO_SPECULATORS),
    Case("speculators", _ALONE, NEXT.name, Way(NO_READ, None, ("anchor",)), _NO_SPECULATORS),
    Case(
        "speculators",
        ("vanilla",),
        BOTH,
        Way(READ, OWN, ("target", "gpu", "confidence", "greedy", "reduced")),
        _NO_SPECULATORS,
    ),
    Case("speculators", ("gated", "rnn"), BOTH, Way(NO_READ, None, ("vanilla",)), _NO_SPECULATORS),
    Case("speculators", ("refiner",), BOTH, Way(NO_RUN, None, ("unknown",)), _NO_SPECULATORS),
    Case("ours", (ANY,), BOTH, Way(NO_RUN, None, ("convert",)), Way(NO_READ, None, ("convert",))),
)


def case_of(format: str, head: str | None, layout: str) -> Case:
    """The case of a folder: its format, the import path of its head (None: none), its layout.

    Raises ValueError for a format that is not written.
    """
    kind = "drafter" if head is None else KINDS.get(head, "another head")
    for case in CASES:
        if case.format == format and layout in case.layout.split(", ") and (kind in case.holds or case.holds == (ANY,)):
            return case
    raise ValueError(f"format={format} with {kind}, {layout}: no such folder is written")


def launch(line: str, target: str, checkpoint: str, num_draft: int) -> str:
    """A launch line filled in. num_draft: draft tokens a round; an engine's window has the anchor besides."""
    words = {"TARGET": target, "CHECKPOINT": checkpoint, "NUM_DRAFT": num_draft, "WINDOW": num_draft + 1}
    return re.sub("|".join(words), lambda found: str(words[found[0]]), line)


def section(num_draft: int = 7) -> str:
    """The README's tables: who takes what, the lines, the notes with their sources; for so many draft tokens."""
    lines = list(dict.fromkeys(w.line for case in CASES for w in case.ways.values() if w.line))
    numbers = {name: i for i, name in enumerate(NOTES, 1)}

    def cell(way: Way) -> str:
        letter = f", line {'ABCDEFGH'[lines.index(way.line)]}" if way.line else ""
        return f"{way.status}{letter} ({', '.join(str(numbers[name]) for name in way.notes)})"

    rows = [f"| format | holds | layout | {VLLM} | {SGLANG} |", "|---|---|---|---|---|"]
    for case in CASES:
        cells = [f"`{case.format}`", ", ".join(case.holds), case.layout, *map(cell, case.ways.values())]
        rows.append(f"| {' | '.join(cells)} |")
    block = [f"{'ABCDEFGH'[i]}  {launch(line, 'TARGET', 'CHECKPOINT', num_draft)}" for i, line in enumerate(lines)]
    notes = [f"{numbers[name]}. {text} ({source})" for name, (text, source) in NOTES.items()]
    return "\n\n".join(["\n".join(rows), "\n".join(["```text", *block, "```"]), "\n".join(notes)])
