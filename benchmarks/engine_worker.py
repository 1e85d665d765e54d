"""What vLLM makes of given token ids, in an interpreter of its own; no import of ours.

    python engine_worker.py REQUEST.json ANSWER.json

REQUEST: model (a folder), prompts (lists of ids), tokens, dtype, threads, and ask:
seconds   plain autoregression -> per_token: seconds a token of each prompt, alone and one after another, taken between
          the first token and the last
rounds    with `speculative` (vLLM's speculative_config) -> for each prompt ids (the answer's) and rounds (how many of
          them each step emitted, the first token left out), and the engine's own counters over all of them; `mend`:
          see norm_by_layer
ANSWER: that, and the version.
"""

import json
import os
import sys
import time
from pathlib import Path


def seconds_a_token(vllm, llm, asked: dict) -> dict:
    def seconds(ids: list[int], tokens: int) -> float:
        how = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids}], how, use_tqdm=False)
        return time.perf_counter() - start

    seconds(asked["prompts"][0], 4)
    per_token = []
    for ids in asked["prompts"]:
        first = seconds(ids, 1)  # the prompt and the first token, which our clock leaves out as well
        per_token.append((seconds(ids, asked["tokens"]) - first) / (asked["tokens"] - 1))
    return {"per_token": per_token}


def rounds_of_prompts(vllm, llm, asked: dict) -> dict:
    engine, answers = llm.llm_engine, []
    # what each step adds, as it comes: the counters know sums over all prompts alone
    how = vllm.SamplingParams(
        temperature=0.0, max_tokens=asked["tokens"], output_kind=vllm.sampling_params.RequestOutputKind.DELTA
    )
    for number, ids in enumerate(asked["prompts"]):
        engine.add_request(str(number), {"prompt_token_ids": ids}, how)
        emitted = []
        while engine.has_unfinished_requests():
            emitted += [list(out.outputs[0].token_ids) for out in engine.step()]
        emitted = [new for new in emitted if new]
        answers.append({"ids": sum(emitted, []), "rounds": [len(new) for new in emitted[1:]]})
        print(f"{number + 1} of {len(asked['prompts'])} prompts", file=sys.stderr, flush=True)
    counters = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value"):
            counters[metric.name.removeprefix("vllm:spec_decode_num_")] = metric.value
    return {"answers": answers, "counters": counters}


def norm_by_layer():
    """In 0.32.0 dFlash norms the context's keys of all layers in one call, each layer by its own k_norm; on a CPU that
    call reads the first layer's weights for all of them. Here every layer gets a call."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize(self, keys):
        normed = torch.empty_like(keys)
        for out, own, weight in zip(normed, keys, self._k_norm_weights):
            ops.rms_norm(out, own.contiguous(), weight, self._rms_norm_eps)
        return normed

    DFlashQwen3Model._normalize_context_k = normalize


def main(request: Path, answer: Path):
    asked = json.loads(request.read_text())
    os.environ["OMP_NUM_THREADS"] = str(asked["threads"])
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{asked['threads'] - 1}" if asked["threads"] > 1 else "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: its steps are ours to call
    import vllm

    longest = max(map(len, asked["prompts"])) + asked["tokens"]
    more = {"speculative_config": asked["speculative"], "disable_log_stats": False} if asked["ask"] == "rounds" else {}
    if asked.get("mend"):
        norm_by_layer()
    llm = vllm.LLM(
        asked["model"],
        dtype=asked["dtype"],
        enforce_eager=True,
        max_model_len=longest + 32,
        max_num_seqs=1,
        enable_prefix_caching=False,
        **more,
    )
    found = (rounds_of_prompts if asked["ask"] == "rounds" else seconds_a_token)(vllm, llm, asked)
    answer.write_text(json.dumps(found | {"version": vllm.__version__}))


if __name__ == "__main__":  # vLLM starts processes that import this file
    main(*map(Path, sys.argv[1:]))
