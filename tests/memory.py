"""What a computation keeps for its backward pass, and the largest tensor that it ever makes."""

from dataclasses import is_dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storages(thing, found=None) -> dict:
    """Every tensor reachable through containers and attributes: address -> bytes."""
    found = {} if found is None else found
    if isinstance(thing, torch.Tensor):
        found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, (list, tuple, dict)):
        for part in thing.values() if isinstance(thing, dict) else thing:
            storages(part, found)
    elif is_dataclass(thing):
        storages(vars(thing), found)
    return found


def kept_bytes(loss, inputs) -> int:
    """What forward leaves for backward beyond its inputs: saved tensors, and whatever hangs on the nodes themselves."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: storages(t, kept) and t, lambda t: t):
        sums = loss()
    nodes = [sums.grad_fn]
    while nodes:
        node = nodes.pop()
        storages(getattr(node, "__dict__", {}), kept)
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    return sum(size for address, size in kept.items() if address not in storages(inputs))


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.size = max(
            [self.size, *(t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, torch.Tensor))]
        )
        return out
