"""F.linear, faster on a CPU for the few rows of a verification or a draft: x86 BLAS has poor kernels for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = range(3, 17)  # rows at which oneDNN beats BLAS in fp32
LARGE = 600_000  # numbers of a weight from which on that pays for changing the layout of x and back


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [...,D], weight [V,D], bias [V] or None -> [...,V]. For inference: not every way has a gradient."""
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    rows, shape = x.numel() // x.shape[-1], (*x.shape[:-1], len(weight))
    flat = x.reshape(rows, -1)  # of a block's slices as they lie, oneDNN takes 30 times as long in bf16
    if x.dtype in (torch.bfloat16, torch.float16) and rows <= 32:
        # weight · xᵀ reads the weight as it lies, for x · weightᵀ oneDNN reorders it each time, which costs up to 0.7
        # of the product, and a single row takes longer than two. Same sums, same bits; contiguous, so that what follows
        # adds in the same order too
        flat = flat.repeat(2, 1) if rows == 1 else flat
        out = weight @ flat.t() if bias is None else torch.addmm(bias[:, None], weight, flat.t())
        return out.t()[:rows].contiguous().view(shape)
    if x.dtype == torch.float32 and rows in FEW and weight.numel() >= LARGE and torch.backends.mkldnn.is_available():
        return F.linear(flat.to_mkldnn(), weight, bias).to_dense().view(shape)
    return F.linear(flat, weight, bias).view(shape)
