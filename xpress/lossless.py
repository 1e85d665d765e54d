"""Is the output that of plain autoregression? Only a prompt's first difference counts: it is a tie where the target's
two best logits lie closer than rounding can tell apart, and a failure otherwise."""

from __future__ import annotations

import math

import torch

from xpress.sampling import at_least_fp32

TIE_FP32 = 1e-3  # logit gap; one-token and eight-token steps of a 135M target differ by 6e-5


@torch.inference_mode()
def first_difference(target, prompt: list[int], plain: list[int], other: list[int]) -> dict | None:
    """None where both outputs are equal, else the place, the target's top-2 gap there, how far the other output's token
    lies behind the best (None where one output just ends), and whether that is within the limit: a tie. The verdict is
    the caller's."""
    if plain == other:
        return None
    at = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), min(len(plain), len(other)))
    logits, _ = target.prefill([[*prompt, *plain[:at]]])
    logits = at_least_fp32(logits[0])
    best = logits.topk(2).values
    gap = float(best[0] - best[1])
    limit = TIE_FP32 if target.dtype in (torch.float32, torch.float64) else 4 * spacing(float(best[0]), target.dtype)
    behind = float(best[0] - logits[other[at]]) if at < min(len(plain), len(other)) else None
    tie = behind is not None and behind <= limit
    return {"at": at, "gap": gap, "behind": behind, "limit": limit, "tie": tie}


def spacing(value: float, dtype: torch.dtype) -> float:
    """Distance from `value` to the next number that `dtype` holds."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(value), 1e-30)))
