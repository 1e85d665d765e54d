"""Rows of an embedding table, looked up many times in a step, with the table's gradient made once.

Autograd's embedding fills a gradient of the whole table for every lookup and adds them up. Where a head looks up chunk
by chunk, and again in each round that it feeds itself, that is dozens of passes over [V,R] a step, more than the head's
own work. Here a lookup leaves its rows' gradients aside; when the last of them has, one pass makes the table's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn


class _Table(torch.autograd.Function):
    """A number that stands for the table in the graph: its gradient is asked for after that of every lookup."""

    @staticmethod
    def forward(ctx, weight, left: list):
        ctx.left, ctx.like = left, weight.detach()
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        grad = torch.zeros_like(ctx.like)
        for ids, rows in ctx.left:
            grad.index_add_(0, ids, rows.to(grad.dtype))
        ctx.left.clear()
        return grad, None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, weight, ids, left: list):
        ctx.left, ctx.ids = left, ids
        ctx.nothing = torch.zeros_like(table)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.left.append((ctx.ids.flatten(), grad.flatten(0, -2)))
        return ctx.nothing, None, None, None


@contextmanager
def gathered(module: nn.Module | None) -> Iterator[None]:
    """Inside, lookups in the trained nn.Embedding tables of `module` share one gradient each. The same numbers, to the
    order of a sum; tables that do more than look up (padding_idx, max_norm, …) are left alone."""
    tables = [m for m in module.modules() if _plain(m)] if module is not None and torch.is_grad_enabled() else []
    for table in tables:
        left: list = []
        stands = _Table.apply(table.weight, left)
        table.forward = _lookup(stands, table.weight.detach(), left)
    try:
        yield
    finally:
        for table in tables:
            del table.forward


def _lookup(stands, weight, left):
    return lambda ids: _Lookup.apply(stands, weight, ids, left)


def _plain(module: nn.Module) -> bool:
    return (
        type(module) is nn.Embedding
        and module.weight.requires_grad
        and module.padding_idx is None
        and module.max_norm is None
        and not (module.scale_grad_by_freq or module.sparse or "forward" in vars(module))
    )
