"""The static loop is the plain one: eagerly, and through graphs that repeat launches on the same addresses."""

from __future__ import annotations

import contextlib
import sys
from copy import deepcopy

import pytest
import torch
from disk import save_model
from test_lean import ODD, PROMPTS, VARIANTS, model_of, odd, same
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import L, V, make_confidence, make_drafter, make_head, make_model, plain

from xpress import parts, static
from xpress.decode import decode_batch, generate
from xpress.drafter import Context
from xpress.kernels import graphs as graphs_file
from xpress.lengths import ByConfidence
from xpress.sampling import Sampling
from xpress.static import Buffers, StaticSequences, bucket
from xpress.static_draft import StaticDraft
from xpress.target import Target

decode_file = sys.modules["xpress.decode"]  # the package has a function of that name
WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "unique")


class Tape(TorchDispatchMode):
    """Every operation with the very tensors that it read and made."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(name in str(function) for name in WAITS):
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        made = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, made))
        return made


class Replayed:
    """A device whose graphs do what CUDA's do: the same operations on the same memory, whatever the host now says."""

    def __init__(self):
        self.captures = self.replays = 0

    def takes(self, tensor):
        return True

    def warm_up(self, run, device):
        run()

    def capture(self, run, device):
        self.captures += 1
        with Tape() as tape:
            outputs = run()
        calls = tape.calls

        def replay():
            self.replays += 1
            for function, args, kwargs, made in calls:
                for old, new in zip(tree_leaves(made), tree_leaves(function(*args, **kwargs))):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        for part in tree_leaves(outputs):  # a capture runs nothing: what it left shows if a replay does not fill it
            if isinstance(part, torch.Tensor):
                part.fill_(-7)
        return outputs, replay

    def ordered(self, device):
        return contextlib.nullcontext()

    def wait(self):
        pass


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Borders that a toy crosses."""
    monkeypatch.setattr(static, "SMALLEST", 8)


@pytest.fixture(params=["eager", "graphs"])
def device(request, monkeypatch):
    """None, or the device of every Graphs made in the test."""
    if request.param == "eager":
        return None
    made = Replayed()
    monkeypatch.setattr(graphs_file, "Device", lambda: made)
    return made


def both(variant: str, graphs=(1, 2, 3)) -> tuple[Target, Target]:
    model = model_of(variant)
    found = Target(deepcopy(model), loop="plain"), Target(model, loop="static", graphs=graphs)
    assert [target.loop for target in found] == ["plain", "static"]
    return found


def methods(target, kind: str, **settings):
    """Frozen, as a checkpoint's are."""
    drafter = None if kind == "ar" else make_drafter(target, **settings).requires_grad_(False)
    return drafter, make_head("refiner", drafter) if kind == "refiner" else None


# --- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_that_grows_rolls_back_and_shrinks_is_the_plain_loops(variant, device):
    """Uneven prompts, rows that keep different numbers and leave in another order, two borders; every layer captured;
    then again on the same buffers, with prompts longer and shorter."""
    (theirs, ours), layers = both(variant), (L - 1, 0, 2)
    random = torch.Generator().manual_seed(1)
    longer = [torch.randint(V, (n,), generator=random).tolist() for n in (3, 21, 1)]
    for prompts in (PROMPTS, longer, PROMPTS, [[4], [9], [9]]):
        (a, b), lengths = (target.prefill(prompts, layers) for target in (ours, theirs)), [len(p) for p in prompts]
        same(a[0], b[0], torch.float64)
        same(a[1], b[1], torch.float64, lengths)
        anchor = torch.tensor([11, 12, 13])
        steps = [([1, 4, 2], [0, 1, 2]), ([3, 0, 4], [2, 0]), ([2, 2], [0, 1]), ([1, 1], [1]), ([4], [0]), ([1], [0])]
        for turn, (kept, rows) in enumerate(steps):
            draft = torch.arange(20 + turn, 20 + turn + 3 * len(anchor)).view(-1, 3) % V
            same(ours.score(anchor, draft), theirs.score(anchor, draft), torch.float64)
            same(ours.keep(kept), theirs.keep(kept), torch.float64, kept)
            for target in (ours, theirs):
                target.select(rows)
            anchor = anchor[rows]
        assert ours.sequences.lengths == theirs.sequences.lengths
    if device:
        assert device.replays == 4 * len(steps) and len(ours._steps.graphs)
        assert device.captures < device.replays / 2


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8), Sampling(0.7, top_k=20, accept="match")])
@pytest.mark.parametrize("method", ["ar", "bare", "refiner"])
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_decoded_tokens_are_the_plain_loops(variant, method, sampling, device):
    """Rounds, scores and the drafter's states; rows stop at different times; prompts long and short in turn."""
    targets = both(variant)
    parts = [methods(target, method) for target in targets]
    batches = [PROMPTS, [[70], [8, 9, 3, 44, 51, 60, 71, 80, 2, 5, 9]], [[33]], PROMPTS]
    for prompts in batches:
        settings = dict(passes=2, max_new_tokens=14, sampling=sampling, seeds=[4, 5, 6][: len(prompts)])
        stops = decode_all(targets[0], prompts, *parts[0], **settings)[0][0][5:6]
        found = [decode_all(*pair, stop_ids=stops, **settings) for pair in zip(targets, [prompts] * 2, *zip(*parts))]
        (ids, rounds, seen), (own_ids, own_rounds, own_seen) = found
        assert own_ids == ids and own_rounds == rounds and len(rounds) > 1
        for theirs, ours in zip(seen, own_seen):
            same(ours, theirs, torch.float64)
    drafter = parts[1][0]
    assert drafter is None or isinstance(drafter.sequences, StaticSequences)
    if device:
        assert device.replays and (drafter is None or len(drafter._static.graphs))


def decode_all(target, prompts, drafter, head, **settings):
    """-> {row: ids}, rounds, [scores and drafter's states of every round]"""
    seen, ids = [], {row: [] for row in range(len(prompts))}

    def observe(draft, scores, verdict, rows):
        seen.append(scores.clone())
        if draft.block is not None:
            seen.append(draft.block.hidden.clone())

    rounds = list(decode_batch(target, prompts, drafter, head, observe=observe, **settings))
    for found in rounds:
        for row, step in found.items():
            ids[row] += step.tokens
    return ids, rounds, seen


@pytest.mark.parametrize("layout", ["infill", "next"])
@torch.no_grad()
def test_a_drafter_whose_blocks_are_all_accepted_keeps_step(layout, device):
    """The most that a round commits, G + 1 tokens a row and less in another, over borders; layouts differ in G."""
    targets = both("qwen3")
    drafters = [methods(target, "bare", layout=layout)[0] for target in targets]
    G = drafters[0].config.num_draft
    ids, states = [[*prompt, 7] for prompt in PROMPTS], []
    for target, drafter in zip(targets, drafters):
        drafter.reset()
        states.append(target.prefill(PROMPTS, drafter.layer_ids)[1])
    for turn in range(6):
        blocks = [drafter.draft(Context(ids, own)) for drafter, own in zip(drafters, states)]
        same(blocks[1].hidden, blocks[0].hidden, torch.float64)
        draft = torch.arange(3 * G).view(3, G) + turn
        for target in targets:
            target.score(torch.tensor([one[-1] for one in ids]), draft)
        counts = [G + 1, 1 + turn % G, G]
        states = [target.keep(counts) for target in targets]
        ids = [[*one, *(range(5, 5 + count))] for one, count in zip(ids, counts)]


# --- buffers --------------------------------------------------------------------------------------------------------


def test_buckets_double():
    assert [bucket(need) for need in (0, 1, 8, 9, 16, 17, 33, 64)] == [8, 8, 8, 16, 16, 32, 64, 64]


def test_buffers_grow_keep_what_is_used_and_take_rows():
    buffers, states = Buffers(), torch.randn(2, 3, 1, 2)
    buffers.reserve(2, 8)
    buffers.like("k", states)[:, :3] = states
    place = buffers.like("k", states).data_ptr()
    buffers.reserve(1, 4)
    assert buffers.like("k", states).data_ptr() == place  # smaller needs move nothing
    buffers.reserve(3, 16, used=3)
    grown = buffers.like("k", states)
    assert grown.shape == (3, 16, 1, 2) and torch.equal(grown[:2, :3], states) and not grown[2:].any()
    buffers.take([1, 0], 3)
    assert torch.equal(grown[:2, :3], states.flip(0))
    assert buffers.like("k", states.double()).dtype == torch.float64


def test_graphs_serve_the_next_prompts_too(device):
    target = both("llama")[1]
    drafter, head = methods(target, "refiner")
    for turn in range(4):
        generate(target, PROMPTS[0], drafter, head, 2, max_new_tokens=10)
        if turn == 1:  # the first one's buffers grew, and what was captured before that is captured again
            places = [t.data_ptr() for t in target._steps.buffers.tensors() + drafter._static.buffers.tensors()]
            captures = device and device.captures
    assert places == [t.data_ptr() for t in target._steps.buffers.tensors() + drafter._static.buffers.tensors()]
    assert device is None or device.captures == captures


def test_a_batch_size_without_graphs_runs_all_the_same(device):
    theirs, ours = both("llama", graphs=[2])
    settings = dict(max_new_tokens=6, seeds=[1, 2, 3])
    assert list(decode_batch(ours, PROMPTS, **settings)) == list(decode_batch(theirs, PROMPTS, **settings))
    assert device is None or device.captures == 0


def test_sequences_that_are_open_cannot_be_written_to():
    sequences = StaticSequences([0], Buffers())
    sequences.open(2)
    sequences.write("k", torch.zeros(1, 2, 1, 1))
    sequences.commit([2])
    with pytest.raises(RuntimeError, match="through a Window"):
        sequences.write("k", torch.zeros(1, 1, 1, 1))


# --- weights --------------------------------------------------------------------------------------------------------


def test_whatever_happens_to_the_weights_is_noticed(device):
    """Of target and drafter: changed in place within the graphs' reach, moved, converted."""
    theirs, ours = both("qwen2")
    (bare, _), (drafter, _) = methods(theirs, "bare"), methods(ours, "bare")
    changes = [
        lambda target, own: target.body.layers[1].mlp.up_proj.weight.mul_(-1),
        lambda target, own: own.fc.weight.mul_(1.5),
        lambda target, own: setattr(own.layers[0].mlp.up_proj, "weight", frozen(own.layers[0].mlp.up_proj.weight * 2)),
        lambda target, own: setattr(target.lm_head, "weight", frozen(target.lm_head.weight.flip(1))),
        lambda target, own: (target.model.to(torch.float32).to(torch.float64), own.float().double()),
    ]
    before = None
    for change in [lambda *_: None, *changes]:
        with torch.no_grad():
            change(theirs, bare), change(ours, drafter)
        settings = dict(passes=0, max_new_tokens=9, seeds=[1, 2, 3])
        want, got = (
            decode_all(theirs, PROMPTS, bare, None, **settings),
            decode_all(ours, PROMPTS, drafter, None, **settings),
        )
        assert got[0] == want[0]
        for a, b in zip(got[2], want[2]):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
        assert before is None or not all(torch.equal(a, b) for a, b in zip(before, got[2])) or change is changes[-1]
        before = got[2]


def frozen(weight):
    return torch.nn.Parameter(weight, requires_grad=False)


def test_a_drafter_in_training_stays_as_it_is_and_so_does_one_elsewhere():
    target = both("llama")[1]
    drafter = make_drafter(target)
    assert all(weight.requires_grad for weight in drafter.parameters())
    generate(target, PROMPTS[0], drafter, max_new_tokens=4)
    assert not isinstance(drafter.sequences, StaticSequences)
    drafter.requires_grad_(False)
    generate(target, PROMPTS[0], drafter, max_new_tokens=4)
    assert isinstance(drafter.sequences, StaticSequences)
    for loop in ("lean", "plain"):
        drafter.bind(Target(target.model, loop=loop))
        generate(drafter.target, PROMPTS[0], drafter, max_new_tokens=4)
        assert not isinstance(drafter.sequences, StaticSequences)


def test_copies_share_neither_states_nor_graphs(device):
    target = both("llama")[1]
    drafter, _ = methods(target, "bare")
    want = generate(target, PROMPTS[0], drafter, max_new_tokens=8).ids
    other = deepcopy(target)
    copied = deepcopy(drafter).bind(other)
    assert isinstance(copied._static, StaticDraft) and not copied._static.buffers.tensors()
    assert not other._steps.buffers.tensors()
    assert generate(other, PROMPTS[0], copied, max_new_tokens=8).ids == want
    assert set(copied.state_dict()) == set(drafter.state_dict())


# --- no waiting -----------------------------------------------------------------------------------------------------


class Asking(TorchDispatchMode):
    """Refuses what reads a number of the device, the kernels' own references aside (a GPU runs others)."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(name in str(function) for name in WAITS) and not in_reference():
            raise AssertionError(f"the host waits: {function}")
        return function(*args, **(kwargs or {}))


def in_reference() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if "xpress/kernels/" in frame.f_code.co_filename and "graphs" not in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8), Sampling(0.7, accept="match")])
@pytest.mark.parametrize("method", ["ar", "bare", "refiner", "cut"])
def test_a_round_reads_the_device_once(method, sampling, monkeypatch, device):
    """And once more where drafts are cut, for their lengths."""
    target = both("qwen3")[1]
    drafter, head = methods(target, method.replace("cut", "refiner"))
    lengths = ByConfidence(head, make_confidence(head, drafter), 0.5) if method == "cut" else None
    allowed, reads = [], []

    def once(name):
        real = getattr(decode_file, name)

        def ask(*args, **kwargs):
            allowed.append(True)
            reads.append(name)
            with torch.utils._python_dispatch._disable_current_modes():
                found = real(*args, **kwargs)
            allowed.pop()
            return found

        monkeypatch.setattr(decode_file, name, ask)

    def guarded(name):
        real = getattr(torch.Tensor, name)

        def ask(self, *args, **kwargs):
            assert allowed or in_reference(), f"the host waits: Tensor.{name}"
            return real(self, *args, **kwargs)

        return ask

    def make(*args, device=None, **kwargs):
        assert device is None or in_reference(), "torch.tensor(…, device=…) waits for the copy"
        return build(*args, **kwargs)

    build = torch.tensor
    once("_read"), once("_cut")
    settings = dict(max_new_tokens=12, seeds=[1, 2, 3], sampling=sampling, lengths=lengths)
    rounds = decode_batch(target, PROMPTS, drafter, head, 2, **settings)
    next(rounds)
    next(rounds)  # the drafter takes up the prompts, which opens its buffers
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "new_tensor"):
        monkeypatch.setattr(torch.Tensor, name, guarded(name))
    monkeypatch.setattr(torch, "tensor", make)
    number = 0
    with Asking():
        for _ in rounds:
            number += 1
    assert number > 2 and reads == [*(["_cut"] if lengths else []), "_read"] * (number + 1)
    with pytest.raises(AssertionError, match="waits"):
        bool(torch.ones(1))


# --- the setting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["stablelm", "hook"])
def test_a_model_that_the_loop_does_not_know_is_refused_by_name(what):
    with pytest.raises(ValueError, match=f"target.loop=static: target odd cannot run that way, .*{ODD[what]}"):
        Target(odd(what), name="odd", loop="static")


def test_the_sizes_reach_target_and_drafter_from_the_settings(tmp_path):
    section = {"name": str(save_model(tmp_path / "target")), "loop": "static"}
    assert parts.make_target(section, "cpu").graphs == static.SIZES
    target = parts.make_target({**section, "graphs": [3, 5]}, "cpu")
    drafter, _ = methods(target, "bare")
    generate(target, PROMPTS[0], drafter, max_new_tokens=3)
    assert target._steps.graphs.sizes == drafter._static.graphs.sizes == {3, 5}


@pytest.mark.parametrize("sizes", [[0], [1, True], "12", 4])
def test_sizes_that_are_none_are_named(sizes):
    with pytest.raises(ValueError, match=r"target.graphs=.*batch sizes from 1 up"):
        Target(make_model(), graphs=sizes)


# --- on a device ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestReal:
    @pytest.fixture(scope="class")
    def targets(self):
        model = make_model("qwen3").to("cuda")
        return [Target(model, loop="plain"), Target(model, graphs=[1, 2, 3])]

    @pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)])
    @pytest.mark.parametrize("method", ["ar", "bare", "refiner"])
    def test_graphs_decode_what_the_modules_do(self, targets, method, sampling):
        answers = []
        for target in targets:
            drafter, head = methods(target, method)
            parts = [part and part.to("cuda") for part in (drafter, head)]
            settings = dict(passes=2, max_new_tokens=40, sampling=sampling, seeds=[4, 5, 6])
            answers.append([decode_all(target, prompts, *parts, **settings)[0] for prompts in (PROMPTS, PROMPTS)])
        assert answers[0] == answers[1] and targets[1].loop == "static" and len(targets[1]._steps.graphs)

    def test_a_round_waits_once(self, targets, monkeypatch):
        target, read = targets[1], decode_file._read
        drafter, head = (part.to("cuda") for part in methods(target, "refiner"))
        drafter.requires_grad_(False)

        def once(*args):
            torch.cuda.set_sync_debug_mode("default")
            found = read(*args)
            torch.cuda.set_sync_debug_mode("error")
            return found

        plain(target, PROMPTS[0], 40)
        for strict in (False, True):  # first captures and compiles
            if strict:
                monkeypatch.setattr(decode_file, "_read", once)
            try:
                rounds = decode_batch(target, PROMPTS, drafter, head, 2, max_new_tokens=24)
                next(rounds), next(rounds)
                torch.cuda.set_sync_debug_mode("error" if strict else "default")
                assert len(list(rounds)) > 2
            finally:
                torch.cuda.set_sync_debug_mode("default")
