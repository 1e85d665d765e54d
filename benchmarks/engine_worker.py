"""Plain autoregression of vLLM on given token ids, in an interpreter of its own; no import of ours.

    python engine_worker.py REQUEST.json ANSWER.json

REQUEST: model (a folder), prompts (lists of ids), tokens, dtype, threads. ANSWER: seconds a token of each prompt, alone
and one after another, taken between the first token and the last; the version.
"""

import json
import os
import sys
import time
from pathlib import Path


def main(request: Path, answer: Path):
    asked = json.loads(request.read_text())
    os.environ["OMP_NUM_THREADS"] = str(asked["threads"])
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{asked['threads'] - 1}" if asked["threads"] > 1 else "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import vllm

    longest = max(map(len, asked["prompts"])) + asked["tokens"]
    llm = vllm.LLM(
        asked["model"],
        dtype=asked["dtype"],
        enforce_eager=True,
        max_model_len=longest + 8,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )

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
    answer.write_text(json.dumps({"per_token": per_token, "version": vllm.__version__}))


if __name__ == "__main__":  # vLLM starts processes that import this file
    main(*map(Path, sys.argv[1:]))
