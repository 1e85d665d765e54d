"""The refine step in static buffers: the solver's tokens, passes and q, call after call, in so many launches.

Laws of the Triton side carry the mark `gpu` and run under the interpreter as those of test_kernels.py.
"""

import dataclasses
import sys

import interpreted
import pytest
import torch
from test_kernels import DEVICE, INTERPRETED, Recorder, bf16, block_to, compile_for_h200, fp32, on_triton
from torch.utils._python_dispatch import TorchDispatchMode
from toys import D, V, random_block

from xpress import kernels
from xpress.draft import Redrawn
from xpress.heads import MarkovHead, Refiner
from xpress.kernels import Folded, RefineStep, Screen
from xpress.kernels import step as file
from xpress.kernels.readout_argmax import programs
from xpress.refine import refine
from xpress.sampling import DRAFT, GREEDY, Noise, Sampling

T = 0.7
PASSES = (0, 1, 2, 5, 9, "auto")
REDUCED = torch.arange(0, V, 3)


def make(kind="refiner", dtype=fp32, N=3, B=7, layout="infill", num_draft=None, drafts=None, rank=16, seed=3):
    """A block and the inference form of a random head. Base logits are small beside the corrections, so that passes
    change tokens to the last; both are small enough for a q with more than one token in it."""
    block = random_block(N, B, layout, num_draft, dtype, seed, drafts)
    plain = block.readout
    head = {"refiner": Refiner, "markov": MarkovHead}[kind](V, D, B, rank, None if drafts is None else len(drafts))
    for name, weight in head.to(dtype).named_parameters():
        torch.nn.init.normal_(weight, std={"token_embed.weight": 1.0, "readout.weight": 0.4}.get(name, 0.2))
    return dataclasses.replace(block, readout=lambda hidden: 0.3 * plain(hidden)), head.folded().eval()


def step_for(block, head, sampled=False, bits=None):
    weight = head.readout.weight
    screen = None if bits is None else Screen.of(weight.detach(), bits)
    sizes = dict(num_blocks=len(block), num_draft=block.num_draft, num_known=block.layout.num_known)
    return RefineStep(head.weights(), weight, **sizes, ids=block.draft_ids, screen=screen, sampled=sampled)


def inputs(block, head, noise=None):
    """What a step is called with."""
    base, known = block.base_logits(), block.layout.num_known
    constant = head.constant(head.prepare(block.hidden), block.prev_ids(block.anchor[:, None])[:, :known])
    draw = {} if noise is None else {"address": noise.address(DRAFT, base.device), "temperature": T}
    return (base, constant), draw


def assert_refines(step, block, head, passes, noise=None, **how):
    """The solver's answer by the step, where the block lies and by the kernels in force."""
    with kernels.use("reference"):
        want = refine(head, block, passes, GREEDY if noise is None else Sampling(T), noise)
    (base, constant), draw = inputs(block, head, noise)
    got = step(base, constant, passes, **draw, **how)
    assert got.ids.equal(want.ids) and got.ids.dtype == got.passes.dtype == torch.long
    assert got.passes.tolist() == want.passes.tolist()
    assert (got.settled is None) if passes != "auto" else got.settled.tolist() == want.settled.tolist()
    if noise is None:
        assert got.logit is None and got.lse is None
        return got
    q = want.q().gather(-1, got.ids[..., None])[..., 0]
    assert torch.allclose((got.logit - got.lse).to(q.dtype), q.log(), atol=1e-4)
    weight = head.readout.weight.detach()
    again = Redrawn(base, got.latent, weight, T, got.logit, got.lse)  # base and latent give the whole row back
    with kernels.use("reference"):
        assert torch.allclose(again.rows().to(q.dtype), want.drawn.rows(), atol=1e-4)
        lse = kernels.q_row(base.flatten(0, 1), got.latent.flatten(0, 1), weight).div(T).logsumexp(-1)
    assert torch.allclose(got.lse.flatten(), lse.float(), atol=1e-4)
    return got


# ---- the solver's answers


@pytest.mark.parametrize("kind", ["refiner", "markov"])
@pytest.mark.parametrize("layout", ["infill", "next"])
@pytest.mark.parametrize("dtype", [torch.float64, fp32])
def test_a_step_is_the_solver(kind, layout, dtype):
    """All passes up to beyond G, auto with and without the host's look, greedy and sampled, all by one step."""
    for N, num_draft, drafts in ((1, None, None), (3, None, REDUCED), (3, 4, None)):
        block, head = make(kind, dtype, N, layout=layout, num_draft=num_draft, drafts=drafts)
        noise = Noise(tuple(range(5, 5 + N)), round=2)
        greedy, sampled = step_for(block, head), step_for(block, head, sampled=True)
        for passes in PASSES:
            for how in ({}, {"poll": False}) if passes == "auto" else ({},):
                assert_refines(greedy, block, head, passes, **how)
                assert_refines(sampled, block, head, passes, noise, **how)


def test_blocks_of_a_batch_settle_at_their_own_pass():
    """The case above would be empty if every block ran equally long."""
    block, head = make(N=3, seed=1)
    base = block.readout(block.hidden)
    base[0] *= 1e3  # beyond any correction: the seed stays
    block = dataclasses.replace(block, readout=lambda _: block.rows(base))
    got = assert_refines(step_for(block, head), block, head, "auto", poll=False)
    assert got.settled[0] == 0 and got.passes[0] == 1 and got.passes.max() > 2


@pytest.mark.parametrize("off", ["use_h", "use_g", "use_mixer", "use_mlp"])
def test_refiners_with_a_part_off(off):
    block = random_block(B=7)
    head = Refiner(V, D, 7, 8, **{off: False}).double()
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    for passes in (2, "auto"):
        assert_refines(step_for(block, head.folded()), block, head.folded(), passes)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("drafts", [None, REDUCED], ids=["whole", "reduced"])
def test_screens_change_nothing(bits, drafts):
    block, head = make(drafts=drafts)
    screened, plain = step_for(block, head, bits=bits), step_for(block, head)
    for passes in PASSES:
        got = assert_refines(screened, block, head, passes)
        assert got.latent.equal(plain(*inputs(block, head)[0], passes).latent)


def leaks(passes_and_seeds, sampled, bits=None, device="cpu"):
    """One step over changing inputs and passes gives what a fresh one gives, to the bit."""
    block, head = make(N=2)
    head = head.to(device)
    kept = step_for(block_to(block, device), head, sampled, bits)
    for seed, passes in enumerate(passes_and_seeds):
        other = block_to(make(N=2, seed=seed)[0], device)
        part, draw = inputs(other, head, Noise((seed, seed + 9)) if sampled else None)
        got, fresh = (step(*part, passes, **draw) for step in (kept, step_for(other, head, sampled, bits)))
        for mine, theirs in zip(got, fresh):
            assert (mine is theirs is None) or mine.equal(theirs)


@pytest.mark.parametrize("sampled", [False, True])
def test_nothing_is_left_over_from_earlier_calls(sampled):
    leaks(["auto", 0, 6, 1, "auto", "auto", 3, 0, 2, "auto"] * 3, sampled)


def test_weights_changed_in_place_are_seen():
    block, head = make("markov")
    step = step_for(block, head)
    before = assert_refines(step, block, head, 3).ids.clone()
    with torch.no_grad():
        head.token_embed.weight.mul_(-1)
        head.readout.weight.mul_(1.5)
    assert not assert_refines(step, block, head, 3).ids.equal(before)


def test_a_step_made_in_inference_mode_works_outside_and_back():
    block, head = make()
    with torch.inference_mode():
        step = step_for(block, head)
        assert_refines(step, block, head, 2)
    assert_refines(step, block, head, "auto")
    with torch.inference_mode():
        assert_refines(step, block, head, 1)


def test_arguments_that_do_not_fit_are_named():
    block, head = make()
    good, weight = dict(num_blocks=3, num_draft=6, num_known=2), head.readout.weight
    with pytest.raises(ValueError, match="gives no q"):
        step_for(block, head, sampled=True, bits=8)
    with pytest.raises(ValueError, match="num_draft=0"):
        RefineStep(head.weights(), weight, **{**good, "num_draft": 0})
    with pytest.raises(ValueError, match="rank"):
        RefineStep(Folded(torch.zeros(V, 8)), weight, **good)
    with pytest.raises(ValueError, match="target id"):
        RefineStep(head.weights(), weight, **good, ids=torch.arange(V - 1))
    (base, constant), draw = inputs(block, head, Noise((1, 2, 3)))
    step, sampled = step_for(block, head), step_for(block, head, sampled=True)
    for call, word in (
        (lambda: step(base, constant, -1), "passes=-1"),
        (lambda: step(base, constant, True), "passes=True"),
        (lambda: step(base, constant, "sequential"), "passes="),
        (lambda: step(base[:2], constant, 1), "base"),
        (lambda: step(base, constant[:2], 1), "constant"),
        (lambda: step(base, constant, 1, **draw), "address="),
        (lambda: sampled(base, constant, 1), "address="),
        (lambda: sampled(base, constant, 1, **{**draw, "temperature": 0.0}), "temperature="),
    ):
        with pytest.raises(ValueError, match=word):
            call()


# ---- what is launched


class Operations(TorchDispatchMode):
    """Names of the tensor operations that were run, in order, views left out."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not function.is_view and name not in ("detach", "lift_fresh"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def launches(monkeypatch, step, block, head, passes, noise=None):
    """Kernels and tensor operations of one call, the kernels themselves left out."""
    seen = []
    for name in ("readout_argmax", "readout_sample", "screened_argmax", "refiner_latent"):
        monkeypatch.setattr(file, name, lambda *a, _name=name, **k: seen.append((_name, k.get("first_row", None))))
    part, draw = inputs(block, head, noise)
    with Operations() as operations:
        step(*part, passes, **draw, poll=False)
    monkeypatch.undo()
    return seen, operations.names


@pytest.mark.parametrize("how", [{}, {"sampled": True}, {"bits": 8}], ids=["greedy", "sampled", "screened"])
def test_a_pass_is_two_launches_and_the_host_never_waits(monkeypatch, how):
    block, head = make()
    step, G = step_for(block, head, **how), block.num_draft
    noise = Noise((1, 2, 3)) if how.get("sampled") else None
    read = "screened_argmax" if "bits" in how else "readout_sample" if noise else "readout_argmax"
    seed = "readout_sample" if noise else "readout_argmax"
    fixed = set()
    for passes in (0, 1, 3, G, G + 2, "auto"):
        seen, operations = launches(monkeypatch, step, block, head, passes, noise)
        rows = range(G if passes == "auto" else min(passes, G))
        assert seen == [(seed, None)] + [(name, p) for p in rows for name in ("refiner_latent", read)]
        assert not {"_local_scalar_dense", "nonzero"} & set(operations)  # what asks the device and waits
        assert operations.count("copy_") == 1
        if passes != "auto" and passes <= G:
            fixed.add(tuple(operations))
    assert len(fixed) == 1 and len(fixed.pop()) <= 3  # all buffers made new by one copy, then keys to ids


# ---- Triton


@on_triton
@pytest.mark.parametrize("layout", ["infill", "next"])
@pytest.mark.parametrize("how", [{}, {"sampled": True}, {"bits": 8}], ids=["greedy", "sampled", "screened"])
def test_a_step_of_kernels_is_the_solver(layout, how):
    noise = Noise((5, 6, 7), round=2) if how.get("sampled") else None
    drafts = None if layout == "infill" else REDUCED
    block, head = make(layout=layout, drafts=drafts, N=3, B=5)
    block, head = block_to(block, DEVICE), head.to(DEVICE)
    step = step_for(block, head, **how)
    for passes in (2, "auto"):
        with kernels.use("triton"):
            assert_refines(step, block, head, passes, noise, poll=False)


@on_triton
@pytest.mark.parametrize("sampled", [False, True])
def test_a_step_of_kernels_leaves_nothing_over(sampled):
    with kernels.use("triton"):
        leaks(["auto", 0, "auto", 1], sampled, device=DEVICE)


@on_triton
def test_a_markov_step_of_kernels_is_the_solver():
    block, head = make("markov", B=5)
    block, head = block_to(block, DEVICE), head.to(DEVICE)
    with kernels.use("triton"):
        assert_refines(step_for(block, head), block, head, "auto", poll=True)


@pytest.mark.skipif(INTERPRETED, reason="this is the process under the interpreter")
def test_laws_of_the_step_under_the_interpreter(capsys):
    interpreted.run(__file__, capsys)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's Triton does not compile")
@pytest.mark.parametrize("N", [1, 8])
def test_the_seed_fits_an_h200(monkeypatch, capsys, N):
    """Its readout is the one of no weights: 16 columns of a single line."""
    pytest.importorskip("triton")
    from xpress.kernels import readout_tiles

    monkeypatch.setattr(
        sys.modules[programs.__module__], "programs", lambda device, block_m: 132 * (1 + (block_m == 16))
    )
    found = {name: Recorder(getattr(readout_tiles, name)) for name in ("argmax_kernel", "sample_kernel")}
    for name, recorder in (*found.items(), ("combine_kernel", Recorder(readout_tiles.combine_kernel))):
        monkeypatch.setattr(readout_tiles, name, recorder)
    vocab, R, B = 151936, 256, 16
    with torch.device("meta"):
        table = torch.empty(vocab, R, dtype=bf16)
        base, constant = torch.empty(N, B, vocab, dtype=bf16)[:, 1:], torch.empty(N, B, R)
        address = torch.empty(N, 2, dtype=torch.long)
    sizes = dict(num_blocks=N, num_draft=B - 1, num_known=2)
    with kernels.use("triton"):
        RefineStep(Folded(table), table, **sizes)(base, constant, 0, poll=False)
        RefineStep(Folded(table), table, **sizes, sampled=True)(base, constant, 0, address=address, poll=False)
    for name, recorder in found.items():
        cost = compile_for_h200(recorder)
        with capsys.disabled():
            print(f"\nseed: {name} N={N}:", *(f"{key} {value}" for key, value in cost.items()), end="")
        assert cost["spills"] == cost["local"] == 0 and cost["shared"] <= 227 * 1024
