"""Functions as graphs: keys, buffers, fallbacks and streams on a pretended device; on a real one, graph = eager to the
bit."""

import contextlib
import logging
from typing import NamedTuple

import pytest
import torch
from test_kernels import bf16, block_to
from test_step import REDUCED, T, assert_refines, make, step_for

from xpress.kernels import Graphs
from xpress.kernels import graphs as file
from xpress.sampling import DRAFT, Noise

real = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's process has no CUDA device"),
]


class Pair(NamedTuple):
    total: torch.Tensor
    product: torch.Tensor | None


class Pretended:
    """Device without CUDA: a replay runs the function again and writes into the first run's outputs."""

    def __init__(self):
        self.log, self.broken = [], False

    def takes(self, tensor):
        return True

    def warm_up(self, run, device):
        self.log.append("warm up")
        run()

    def capture(self, run, device):
        self.log.append("capture")
        outputs = run()
        if self.broken:
            try:
                raise RuntimeError("operation not permitted when stream is capturing")
            except RuntimeError:
                raise RuntimeError("capture invalidated")  # noqa: B904 - as the end of a broken capture does

        def replay():
            self.log.append("replay")
            for out, new in zip(outputs, run()):
                if out is not None and out.data_ptr() != new.data_ptr():  # what the function keeps by itself
                    out.copy_(new)

        return outputs, replay

    def ordered(self, device):
        return contextlib.nullcontext()

    def wait(self):
        self.log.append("wait")


@pytest.fixture
def device(monkeypatch):
    """The device of every Graphs made in the test."""
    made = Pretended()
    monkeypatch.setattr(file, "Device", lambda: made)
    return made


def mixed(a, b=None, *, times=1, mode="sum"):
    return Pair(times * a if b is None or mode == "first" else times * a + b, None if b is None else a * b)


def assert_same(got, want):
    assert type(got) is type(want)
    assert all((a is b is None) or a.equal(b) for a, b in zip(got, want))


def test_each_shape_and_value_has_a_graph_and_inputs_are_copied(device):
    graphs = Graphs(mixed, sizes=(1, 3))
    calls = [((1, 4), {}), ((3, 4), {}), ((3, 5), {}), ((1, 4), {"times": 2}), ((1, 4), {"times": 2, "mode": "first"})]
    for turn in range(4):  # alternating keys, inputs that change, some of them strided
        for size, static in calls:
            for dtype in (torch.float32, torch.float64):
                a, b = torch.randn(*size, 2, dtype=dtype)[..., turn % 2], torch.randn(1, 1, dtype=dtype).expand(size)
                for part in ((a, b), (a,), (a, None)):
                    before = a.clone()
                    assert_same(graphs(*part, **static), mixed(*part, **static))
                    assert a.equal(before)
    assert len(graphs) == len(calls) * 2 * 3  # (a,) and (a, None) are two signatures
    assert device.log.count("warm up") == device.log.count("capture") == len(graphs)
    assert device.log.count("replay") == 4 * len(graphs)  # the first answer is a replay's too


def test_outputs_are_the_graphs_own(device):
    graphs, a = Graphs(mixed), torch.randn(1, 4)
    first = graphs(a)
    kept = first.total.clone()
    second = graphs(a + 1)
    assert second.total is first.total and not first.total.equal(kept)
    assert graphs(a, times=2).total is not first.total
    assert first.total.equal(a + 1)  # another key's buffers are other buffers


def test_sizes_that_were_not_asked_for_run_as_they_are(device):
    graphs = Graphs(mixed, sizes=(2,))
    for N in (1, 3):
        assert_same(graphs(torch.ones(N, 4)), mixed(torch.ones(N, 4)))
    assert device.log == [] and len(graphs) == 0


def test_a_cpu_runs_as_it_is():
    graphs, a = Graphs(mixed), torch.randn(1, 4)
    assert_same(graphs(a, a, times=3), mixed(a, a, times=3))
    assert len(graphs) == 0


def test_a_failed_capture_is_logged_once_and_the_function_goes_on(device, caplog):
    graphs, a = Graphs(mixed, name="toy"), torch.randn(1, 4)
    device.broken = True
    with caplog.at_level(logging.WARNING):
        for turn in range(3):
            assert_same(graphs(a + turn, times=2), mixed(a + turn, times=2))
    (line,) = caplog.records
    assert "toy" in line.getMessage() and "not permitted" in line.getMessage()  # the cause, not what came of it
    assert device.log == ["warm up", "capture"] and len(graphs) == 0
    device.broken = False
    assert_same(graphs(a), mixed(a))
    assert len(graphs) == 1 and device.log[-1] == "replay"


def test_errors_of_the_function_are_the_callers(device, caplog):
    def refuses(a):
        raise RuntimeError("wrong rank")

    with pytest.raises(RuntimeError, match="wrong rank"):
        Graphs(refuses)(torch.ones(1, 2))
    assert device.log == ["warm up"] and not caplog.records


def test_gradient_and_inference_modes_may_change_between_calls(device):
    graphs = Graphs(mixed)
    with torch.inference_mode():
        a = torch.randn(1, 4)
        assert_same(graphs(a, a), mixed(a, a))
    b = torch.randn(1, 4, requires_grad=True)
    got = graphs(b, b)
    assert_same(got, mixed(b, b)) and not got.total.requires_grad
    with torch.inference_mode():
        assert_same(graphs(a, a), mixed(a, a))
    with torch.no_grad():
        assert_same(graphs(b, a), mixed(b, a))
    assert len(graphs) == 1


def test_moved_weights_make_graphs_anew_and_changed_ones_are_seen(device):
    linear = torch.nn.Linear(4, 3)
    graphs, a = Graphs(lambda x: (linear(x),), weights=linear.parameters), torch.randn(1, 4)
    graphs(a), graphs(a, **{})
    with torch.no_grad():
        linear.weight.mul_(2)
    assert graphs(a)[0].equal(linear(a)) and device.log.count("capture") == 1
    linear.double().float()  # other memory
    assert graphs(a)[0].equal(linear(a)) and device.log.count("capture") == 2
    assert device.log.index("wait") < len(device.log) - 3  # what ran had ended before its graph was given up
    linear.weight = torch.nn.Parameter(torch.ones(3, 4))  # another tensor in its place
    assert graphs(a)[0].equal(linear(a)) and device.log.count("capture") == 3 and len(graphs) == 1


def test_arguments_that_do_not_fit_are_named(device):
    for sizes in ((0,), (True,), (2, "1")):
        with pytest.raises(ValueError, match="sizes="):
            Graphs(mixed, sizes)
    with pytest.raises(ValueError, match="by position"):
        Graphs(mixed)(torch.ones(1, 2), b=torch.ones(1, 2))


def refinement(block, head, sampled=False, bits=None):
    """A step as a caller composes it: base logits and constant from the drafter's hidden state, all in one graph."""
    step, known = step_for(block, head, sampled, bits), block.layout.num_known

    def function(hidden, known_ids, address=None, *, passes, temperature=1.0, poll=False):
        constant = head.constant(head.prepare(hidden), known_ids)
        base = block.readout(block.rows(hidden))
        return step(base, constant, passes, address=address, temperature=temperature, poll=poll)

    def arguments(other, noise=None):
        ids = other.prev_ids(other.anchor[:, None])[:, :known]
        return other.hidden, ids, noise and noise.address(DRAFT, other.hidden.device)

    return function, arguments


@pytest.mark.parametrize("sampled", [False, True])
def test_a_step_within_a_graph_is_the_solver(device, sampled):
    block, head = make(N=2, dtype=torch.float64)
    function, arguments = refinement(block, head, sampled)
    graphs = Graphs(function, sizes=(2,), weights=head.parameters)

    def step(base, constant, passes, **draw):
        """assert_refines asks a step; this one takes what the graph takes."""
        part = arguments(other, noise)
        return graphs(*part, passes=passes, **({"temperature": T} if draw else {}))

    for seed, passes in enumerate([2, "auto", 0, "auto", 2, 6, 2]):
        other, noise = make(N=2, dtype=torch.float64, seed=seed)[0], Noise((seed, 7)) if sampled else None
        with torch.inference_mode() if seed % 2 else torch.no_grad():
            other = block.__class__(**{**vars(other), "readout": block.readout})
            assert_refines(step, other, head, passes, noise)
    assert len(graphs) == 4


# ---- the real Device, on a pretended CUDA


class Cuda:
    """What Device calls of torch.cuda, and the order in which it does."""

    def __init__(self):
        self.log, self.broken, self.made = [], False, 0
        cuda = self

        class Stream:
            device = torch.device("cpu")

            def __init__(self):
                cuda.made += 1
                self.name = f"side{cuda.made}"

            def wait_stream(self, other):
                cuda.log.append((self.name, "waits for", other.name))

        class Graph:
            def replay(self):
                cuda.log.append(("replay on", cuda.current.name))

        class Capture:
            def __init__(self, graph, pool, stream, capture_error_mode):
                self.pool, self.stream = pool, stream

            def __enter__(self):
                self.before, cuda.current = cuda.current, self.stream
                cuda.log.append(("capture on", self.stream.name, self.pool))

            def __exit__(self, *_):
                if cuda.broken:
                    raise RuntimeError("capture invalidated")  # and the stream is not restored
                cuda.current = self.before

        self.Stream, self.CUDAGraph, self.graph = Stream, Graph, Capture
        self.main, self.other = Stream(), Stream()
        self.main.name, self.other.name, self.made, self.pools = "main", "other", 0, 0
        self.current = self.main

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def device(self, device):
        return contextlib.nullcontext()

    def current_stream(self, device=None):
        return self.current

    def graph_pool_handle(self):
        self.pools += 1
        return f"pool{self.pools}"

    def is_current_stream_capturing(self):
        return False

    def synchronize(self):
        self.log.append(("all wait",))


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda()
    monkeypatch.setattr(torch, "cuda", made)
    monkeypatch.setattr(file.Device, "takes", lambda self, tensor: True)
    return made


def test_warm_up_and_capture_share_a_stream_and_captures_a_pool(cuda):
    ran = []
    graphs = Graphs(lambda x, **_: (ran.append(cuda.current.name), x + 1)[1:])
    graphs(torch.ones(1), n=1), graphs(torch.ones(1), n=2)
    once = [("side1", "waits for", "main"), ("main", "waits for", "side1"), ("capture on", "side1", "pool1")]
    assert cuda.log == [*once, ("replay on", "main")] * 2 and ran == ["side1"] * 4 and cuda.current is cuda.main


def test_a_broken_capture_leaves_the_stream_and_another_pool(cuda, caplog):
    cuda.broken = True
    graphs = Graphs(lambda x, **_: (x + 1,))
    assert graphs(torch.ones(1))[0].item() == 2 and cuda.current is cuda.main and len(caplog.records) == 1
    cuda.broken = False
    graphs(torch.ones(1), n=1)
    assert cuda.log[-2:] == [("capture on", "side1", "pool2"), ("replay on", "main")]


def test_calls_from_other_streams_are_put_in_order(cuda):
    graphs = Graphs(lambda x: (x + 1,))
    graphs(torch.ones(1))
    cuda.log.clear()
    graphs(torch.ones(1))
    with cuda.stream(cuda.other):
        graphs(torch.ones(1)), graphs(torch.ones(1))
    graphs(torch.ones(1))
    order = [("other", "waits for", "main"), ("replay on", "other"), ("replay on", "other")]
    assert cuda.log == [("replay on", "main"), *order, ("main", "waits for", "other"), ("replay on", "main")]


# ---- real graphs


def on_cuda(seed=3, dtype=torch.float32, **how):
    block, head = make(N=2, dtype=dtype, seed=seed, **how)
    rows = block.readout(torch.eye(block.hidden.shape[2], dtype=dtype)).to("cuda")
    block = block_to(block, "cuda")
    return block.__class__(**{**vars(block), "readout": lambda hidden: hidden @ rows}), head.to("cuda")


@pytest.mark.parametrize("how", [{}, {"sampled": True}, {"bits": 8}, {"bits": 4}], ids=str)
@pytest.mark.parametrize("layout,drafts", [("infill", None), ("next", REDUCED)])
@pytest.mark.parametrize("kind,dtype", [("refiner", torch.float32), ("refiner", bf16), ("markov", bf16)])
class TestReal:
    pytestmark = real

    def test_a_graph_is_the_eager_step_to_the_bit(self, how, layout, drafts, kind, dtype):
        """Over changing inputs, alternating passes, streams and modes; weights change in place on the way."""
        setting = dict(layout=layout, drafts=drafts, kind=kind, dtype=dtype, rank=32)
        block, head = on_cuda(**setting)
        function, arguments = refinement(block, head, **how)
        graphs = Graphs(function, sizes=(2,), weights=head.parameters)
        side = torch.cuda.Stream()
        for seed, passes in enumerate(["auto", 0, 2, "auto", 2, 0, "auto", 9, "auto", 2]):
            other = on_cuda(seed=seed, **setting)[0]
            noise = Noise((seed, seed + 9)) if how.get("sampled") else None
            static = {"passes": passes, **({"temperature": T} if noise else {})}
            if seed == 4:
                with torch.no_grad():
                    head.readout.weight.mul_(0.5)
                if "bits" in how:  # a screen does not follow its weight
                    function, arguments = refinement(block, head, **how)
                    graphs = Graphs(function, sizes=(2,), weights=head.parameters)
            side.wait_stream(torch.cuda.current_stream())
            with (
                torch.inference_mode(seed % 3 == 1),
                torch.cuda.stream(side if seed % 2 else torch.cuda.current_stream()),
            ):
                part = arguments(other, noise)
                got = [None if out is None else out.clone() for out in graphs(*part, **static)]
                want = function(*part, **static)
                polled = function(*part, **static, poll=True) if passes == "auto" else want
                for mine, theirs, looked in zip(got, want, polled):
                    assert (mine is theirs is None) or mine.equal(theirs) and mine.equal(looked)
                torch.cuda.current_stream().synchronize()
        assert len(graphs) == 4


@pytest.mark.gpu
@real[1]
def test_a_function_that_waits_for_the_device_runs_without_a_graph(caplog):
    graphs = Graphs(lambda x: (x * int(x.sum()),))
    for turn in range(3):
        assert graphs(torch.full((1,), 3.0 + turn, device="cuda"))[0].item() == (3.0 + turn) ** 2
    assert len(caplog.records) == 1 and len(graphs) == 0
    fine = Graphs(lambda x: (x + 1,))
    assert fine(torch.ones(1, device="cuda"))[0].item() == 2 and len(fine) == 1


@pytest.mark.gpu
@real[1]
def test_moved_weights_are_followed_on_a_device():
    linear = torch.nn.Linear(8, 8, device="cuda")
    graphs, x = Graphs(lambda x: (linear(x),), weights=linear.parameters), torch.randn(1, 8, device="cuda")
    assert torch.equal(graphs(x)[0], linear(x))
    linear.double().float()
    linear.weight.data.mul_(3)
    assert torch.equal(graphs(x)[0], linear(x)) and len(graphs) == 1


@pytest.mark.gpu
@real[1]
def test_within_another_capture_the_function_is_part_of_it():
    inner = Graphs(lambda x: (x + 1,))
    outer = Graphs(lambda x: (2 * inner(x)[0],))
    for value in (1.0, 5.0):
        assert outer(torch.full((1,), value, device="cuda"))[0].item() == 2 * (value + 1)
    assert len(outer) == 1
