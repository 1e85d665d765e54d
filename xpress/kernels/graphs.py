"""Functions as CUDA graphs: one launch in the place of dozens, whose time on the host is the step's time otherwise.

A graph repeats launches on the same addresses. So inputs are copied into buffers, outputs are the same tensors at each
call, weights are read where they lay at the capture, and what the host decides (numbers, names) is frozen: each
combination of shapes and such values has a graph of its own, made when it is first asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Captured(NamedTuple):
    """One graph: the buffers it reads, what it returns, and the call that runs it again."""

    inputs: tuple[Tensor | None, ...]
    outputs: Any
    replay: Callable[[], None]


class Graphs:
    """function(*tensors, **static) -> tensors (a tuple of them, say), by replays of CUDA graphs.

    The first tensor's length is the batch size; calls of a batch size in `sizes` run as graphs, others as they are, and
    so do calls on the CPU, inside a capture that is under way, and those whose capture failed: the log says why, once.
    Tensors may be None. static: hashable values, one graph for each combination with the tensors' shapes and dtypes.
    The function must not wait for the device, and must not depend on anything else that changes.

    Outputs of a graph are its own buffers, valid until the next call of any kind: read or clone them before. Gradients
    do not flow. All graphs of an object share one pool of memory, which works because none runs beside another; calls
    from several streams are put in order.

    weights: gives the tensors that the function reads by itself, as `head.parameters` does. Values changed in place are
    seen; should a tensor have moved, all graphs are made anew. Raises ValueError for sizes below 1, and for a tensor
    among the static values.
    """

    def __init__(
        self,
        function: Callable,
        sizes: Iterable[int] = (1,),
        name: str = "refine",
        weights: Callable[[], Iterable[Tensor]] = tuple,
    ):
        self.function, self.sizes, self.name, self.weights = function, frozenset(sizes), name, weights
        if not all(type(size) is int and size > 0 for size in self.sizes):
            raise ValueError(f"sizes={sorted(self.sizes, key=str)}: batch sizes to capture are whole numbers from 1 up")
        self._device = Device()
        self._made: dict[Hashable, Captured | None] = {}  # None: its capture failed
        self._places: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Graphs at hand."""
        return sum(made is not None for made in self._made.values())

    def __call__(self, *tensors: Tensor | None, **static):
        first = tensors[0]
        if len(first) not in self.sizes or not self._device.takes(first):
            return self.function(*tensors, **static)
        if any(isinstance(value, Tensor) for value in static.values()):
            raise ValueError(f"{self.name}: a tensor by name would be frozen into the graph, pass it by position")
        self._follow_weights()
        key = (*(t if t is None else (t.shape, t.dtype, t.device) for t in tensors), *sorted(static.items()))
        if key not in self._made:
            self._made[key] = self._capture(tensors, static)
        made = self._made[key]
        if made is None:
            return self.function(*tensors, **static)
        with torch.no_grad(), self._device.ordered(first.device):
            for buffer, tensor in zip(made.inputs, tensors):
                if buffer is not None and buffer is not tensor:
                    buffer.copy_(tensor, non_blocking=True)
            made.replay()
        return made.outputs

    def _follow_weights(self):
        places = tuple(weight.data_ptr() for weight in self.weights())
        if places != self._places and self._made:
            self._device.wait()  # a graph that still runs needs its memory
            self._made.clear()
        self._places = places

    def _capture(self, tensors, static) -> Captured | None:
        # Buffers made in inference mode could not be written to outside of it; a later call may well come from there.
        with torch.inference_mode(False), torch.no_grad():
            inputs = tuple(None if t is None else torch.empty_like(t, requires_grad=False).copy_(t) for t in tensors)

            def run():
                return self.function(*inputs, **static)

            self._device.warm_up(run, tensors[0].device)  # its errors are the function's own, and the caller's to see
            try:
                outputs, replay = self._device.capture(run, tensors[0].device)
            except RuntimeError as error:
                while error.__context__ is not None:  # the end of a broken capture hides what broke it
                    error = error.__context__
                log.warning("%s runs without a graph for %s %s: %s", self.name, _sizes(tensors), static, error)
                return None
        return Captured(inputs, outputs, replay)


class Device:
    """What Graphs asks of CUDA; tests put another in its place."""

    def __init__(self):
        self._pool = self._side = self._last = None

    def takes(self, tensor: Tensor) -> bool:
        """Can work on this tensor be captured here and now?"""
        return tensor.is_cuda and not torch.cuda.is_current_stream_capturing()

    def warm_up(self, run: Callable, device: torch.device):
        """One run on the stream of the capture: kernels are compiled, libraries and caches made."""
        with torch.cuda.device(device):
            if self._side is None or self._side.device != device:
                self._side = torch.cuda.Stream()
            with self.ordered(device):
                self._side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._side):
                    run()
                torch.cuda.current_stream().wait_stream(self._side)

    def capture(self, run: Callable, device: torch.device) -> tuple[Any, Callable]:
        """-> what run returned, which a replay fills, and the replay. Raises RuntimeError where the run cannot be
        captured; later captures have another pool then, as the broken one may hold this one open."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer block restores the caller's stream where the end of a broken capture raises before it does.
            with torch.cuda.device(device), torch.cuda.stream(self._side):
                # Other threads may go on allocating: "thread_local" breaks the capture for this thread's calls alone.
                with torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local"):
                    outputs = run()
        except BaseException:
            self._pool = None
            raise
        return outputs, graph.replay

    def ordered(self, device: torch.device):
        """Work of the block comes after that of the last such block, whatever its stream."""
        stream = torch.cuda.current_stream(device)
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream
        return torch.cuda.device(device)

    def wait(self):
        """Until all work is done."""
        torch.cuda.synchronize()


def _sizes(tensors) -> list:
    return [None if t is None else list(t.shape) for t in tensors]
