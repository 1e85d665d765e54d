"""The kernels: references against plain arithmetic, Triton against the references, and what compiles for an H200.

Laws of the Triton side carry the mark `gpu`. On a machine without a device they run in a second process under Triton's
interpreter, which has to be chosen before Triton is imported.
"""

import dataclasses
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import interpreted
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import V, random_block

from xpress import kernels
from xpress.heads import Refiner
from xpress.kernels import Folded, pack, q_row, readout_argmax, readout_sample, refiner_latent, unpack, values
from xpress.kernels.readout_argmax import programs
from xpress.kernels.readout_sample import empty
from xpress.kernels.rows import Rows, best_keys
from xpress.refine import refine
from xpress.sampling import DRAFT, GREEDY, Noise, Sampling

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
on_triton = pytest.mark.gpu
INF, NAN = float("inf"), float("nan")
fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def triton():
    with kernels.use("triton"):
        yield


def rows(N, G, V, R, dtype=fp32, base_dtype=None, whole=False, seed=0):
    """base [N,G,V] as a strided part of a larger tensor, latent [N,G,R], weight [V,R]; whole numbers sum exactly."""
    torch.manual_seed(seed)
    draw = (lambda *size: torch.randint(-2, 3, size)) if whole else torch.randn
    base = draw(N, G + 1, V).to(DEVICE, base_dtype or dtype)[:, 1:]
    return base, draw(N, G, R).to(DEVICE, dtype), draw(V, R).to(DEVICE, dtype)


def exact(base, latent, weight):
    """ℓ in fp64, and how far two fp32 ways of summing it may differ."""
    factors = latent.double(), weight.double().T
    logits = base.double() + factors[0] @ factors[1]
    u, R = 2.0**-24, weight.shape[1]
    gamma = (R + 2) * u / (1 - (R + 2) * u)
    return logits, 2 * gamma * (factors[0].abs() @ factors[1].abs()) + 2 * u * logits.abs()


def assert_argmax(ids, base, latent, weight):
    """ids are the argmax, or lie within the rounding bound of it."""
    logits, bound = exact(base, latent, weight)
    top = logits.argmax(-1, keepdim=True)
    gap, slack = (logits.gather(-1, top) - logits.gather(-1, ids[..., None]))[..., 0], bound.gather(-1, top)[..., 0]
    assert (gap <= slack + bound.gather(-1, ids[..., None])[..., 0]).all()


def pairwise(*axes):
    """Few cases in which every pair of values of two axes meets."""
    at = list(itertools.combinations(range(len(axes)), 2))
    open_ = {(i, j, a, b) for i, j in at for a in axes[i] for b in axes[j]}

    def covered(case):
        return {(i, j, case[i], case[j]) for i, j in at} & open_

    cases = list(itertools.product(*axes))
    while open_:
        best = max(cases, key=lambda case: len(covered(case)))
        open_ -= covered(best)
        yield best


SIZES = (1, 2, 7, 97, 1000, 1025, 4099, 49152)
CASES = list(pairwise(SIZES, (1, 7, 15, 16), (16, 64, 256), (1, 3), (fp32, bf16, fp16), (fp32, bf16), (True, False)))


# ---- keys and references against plain arithmetic


@given(st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=8), st.randoms())
def test_keys_order_values_then_ids(numbers, random):
    """The largest key names the largest value and the lowest id; NaN is below −inf; both halves come back."""
    ids = random.sample(range(2**31 - 1), len(numbers))
    keys = pack(torch.tensor(numbers), torch.tensor(ids))
    want = max(zip(numbers, ids), key=lambda p: (p[0] == p[0], p[0] + 0.0 if p[0] == p[0] else 0, -p[1]))
    assert unpack(keys.max()) == want[1] and unpack(keys).tolist() == ids
    assert values(keys).equal(torch.tensor(numbers)) or torch.isnan(values(keys)).tolist() == [n != n for n in numbers]


def naive(base, latent, weight, ids):
    """By Python: max of (value, −id) over what is a number."""
    logits = base + latent @ weight.T
    out = []
    for row in logits.flatten(0, -2).tolist():
        real = [(value, -i) for value, i in zip(row, ids.tolist()) if value == value]
        out.append(-max(real)[1] if real else min(ids.tolist()))
    return torch.tensor(out).view(logits.shape[:-1])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 700), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_reference_is_the_rule(size, seed, mapped, rough):
    """Ties by the handful, −0, ±inf and NaN; rows of the readout in any order, over several chunks."""
    torch.manual_seed(seed)
    base, latent, weight = rows(2, 3, size, 4, whole=True, seed=seed)
    if rough:
        odd = torch.tensor([-0.0, 0.0, INF, -INF, -INF, NAN])[torch.randint(6, base.shape)]
        base = torch.where(torch.rand(2, 3, 1) < 0.5, odd, base)
        latent = latent * (torch.rand(2, 3, 1) < 0.5)
    ids = torch.randperm(size * 2)[:size] if mapped else None
    names = torch.arange(size) if ids is None else ids
    with kernels.use("reference"):
        assert readout_argmax(base, latent, weight, ids).equal(naive(base, latent, weight, names))
        assert readout_argmax(base[0], latent[0], weight, ids).equal(naive(base[0], latent[0], weight, names))


def test_reference_in_fp64_compares_in_fp64():
    base = torch.tensor([[0.0, 1e-12, 0.0]], dtype=torch.float64)
    assert readout_argmax(base, torch.zeros(1, 4).double(), torch.zeros(3, 4).double()).item() == 1


def test_reference_over_chunks():
    base, latent, weight = rows(1, 15, 49152, 16)
    ids = readout_argmax(base, latent, weight)
    assert_argmax(ids, base, latent, weight)
    order = torch.randperm(49152)
    mapped = readout_argmax(base[..., order], latent, weight[order], order)
    assert_argmax(mapped, base, latent, weight)


@pytest.mark.parametrize("N,G,R", [(1, 7, 128), (1, 15, 128), (2, 3, 128), (1, 1, 128), (3, 16, 16), (700, 2, 16)])
@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_reference_over_runs(N, G, R, dtype):
    """Batched and single products, few logits and many, a rest that is no whole run: the lowest id of equals wins."""
    for size in (511, 1536, 9000 if N == 700 else 30001):
        base, latent, weight = rows(N, G, size, R, dtype, whole=True)  # whole numbers: exact sums, ties by the handful
        found, want = readout_argmax(base, latent, weight), []
        for n in range(N):
            logits = base[n].float() + latent[n].float() @ weight.float().T
            want.append((logits == logits.amax(-1, keepdim=True)).int().argmax(-1))
        assert found.equal(torch.stack(want))
        base[..., size // 3] = NAN
        assert not (readout_argmax(base[:3], latent[:3], weight) == size // 3).any()


@pytest.mark.parametrize("G,R,dtype", [(7, 128, fp32), (15, 64, bf16), (700, 16, fp32)])
def test_some_logits_are_the_same_to_the_bit(G, R, dtype):
    base, latent, weight = rows(1, G, 30001, R, dtype)
    work = Rows(base, latent, weight, None, 0, None, None)
    whole = torch.cat([logits for _, logits in work.chunks()], -1)
    assert whole.shape == base.shape
    wanted, seen = [3, 20000, 30000], set()
    for start, logits in work.chunks(only=wanted):
        stop = start + logits.shape[-1]
        assert logits.equal(whole[..., start:stop])
        seen |= {place for place in wanted if start <= place < stop}
    assert seen == set(wanted)


def test_arguments_that_do_not_fit_are_named():
    base, latent, weight = rows(2, 3, 5, 16)
    flags = torch.ones(2, dtype=torch.int32)
    for wrong, how in [
        ((base, latent[:, :2], weight), {}),
        ((base, latent, weight[:, :8]), {}),
        ((base, latent, weight, torch.arange(4)), {}),
        ((base, latent, weight), {"first_row": 1}),
        ((base, latent, weight), {"active": flags}),
        ((base, latent, weight), {"keys": torch.zeros(2, 4, dtype=torch.long)}),
        ((base[..., :0], latent, weight[:0]), {}),
    ]:
        with pytest.raises(ValueError):
            readout_argmax(*wrong, **how)
    address = Noise((1, 2)).address(DRAFT)
    for how in ({"temperature": 0.0}, {"first_row": 1}, {"address": address[:1]}):
        with pytest.raises(ValueError):
            readout_sample(base, latent, weight, **{"address": address, **how})


def test_dispatch(monkeypatch):
    cpu = torch.zeros(1)
    assert kernels.backend(cpu) == "reference"
    with kernels.use("triton"):
        assert kernels.backend(cpu) == "triton"
        with kernels.use("reference"):
            assert kernels.backend(cpu) == "reference"
        assert kernels.backend(cpu) == "triton"
    monkeypatch.setenv("XPRESS_KERNELS", "triton")
    assert kernels.backend(cpu) == "triton"
    monkeypatch.setenv("XPRESS_KERNELS", "cuda")
    with pytest.raises(ValueError, match="XPRESS_KERNELS"):
        kernels.backend(cpu)
    with pytest.raises(ValueError, match="use"), kernels.use("fast"):
        pass


@pytest.mark.parametrize("layout", ["infill", "next"])
@pytest.mark.parametrize("off", [None, "use_h", "use_g", "use_mixer", "use_mlp"])
def test_latents_of_a_pass_are_the_folded_heads(layout, off):
    """u = C + M·E[prev] and the MLP: what the plain form gives, in fp64."""
    block = random_block(layout=layout)
    head = Refiner(V, block.hidden.shape[2], 5, 8, **({off: False} if off else {})).double()
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    folded = head.folded()
    draft = torch.randint(V, (len(block), block.num_draft))
    known = block.prev_ids(draft)[:, : block.layout.num_known]
    want = block.rows(head.latent(head.prepare(block.hidden), block.prev_ids(draft)))
    constant = folded.constant(folded.prepare(block.hidden), known)
    got = refiner_latent(constant, folded.weights(), draft, block.layout.num_known)
    assert torch.allclose(got, want, rtol=1e-10, atol=1e-10)
    out = torch.full_like(got, 7.0)
    some = torch.tensor([1, 0, 1], dtype=torch.int32)
    refiner_latent(constant, folded.weights(), draft, block.layout.num_known, first_row=2, active=some, out=out)
    assert torch.allclose(out[::2, 2:], want[::2, 2:]) and (out[1] == 7).all() and (out[:, :2] == 7).all()


def solve(block, folded, passes, noise=None):
    """Jacobi passes as a graph runs them: two buffers of keys, one latent and one readout kernel a pass -> ids, passes,
    log q of each token."""
    N, G, known = len(block), block.num_draft, block.layout.num_known
    base, weights, weight = block.base_logits(), folded.weights(), folded.readout.weight.detach()
    z = torch.zeros(N, G, weight.shape[1], dtype=weight.dtype, device=base.device)
    active, used = torch.ones(2, N, dtype=torch.int32, device=base.device)
    used.zero_()
    keys, *row = empty(N, G, base.device)
    keys = [keys, keys.clone()]

    def choose(out, **rest):
        if noise is None:
            readout_argmax(base, z, weight, block.draft_ids, keys=out, reset=not rest, packed=True, **rest)
        else:
            how = dict(address=noise.address(DRAFT, base.device), temperature=0.8, state=(out, *row))
            readout_sample(base, z, weight, block.draft_ids, packed=True, **how, **rest)

    choose(keys[0])
    constant = folded.constant(folded.prepare(block.hidden), block.prev_ids(unpack(keys[0]))[:, :known])
    flags = active if passes == "auto" else None
    for p in range(G if passes == "auto" else passes):
        rest = dict(first_row=min(p, G), active=flags)
        refiner_latent(constant, weights, keys[0], known, out=z, packed=True, next_keys=keys[1], passes=used, **rest)
        choose(keys[1], **rest)
        keys.reverse()
    return unpack(keys[0]), used, row[0] - row[1]


def assert_solves(block, folded, passes, device="cpu"):
    """Tokens, passes and q of the library's solver, greedy and sampled."""
    there = block_to(block, device), folded.to(device)
    for noise, sampling in ((None, GREEDY), (Noise((5, 6, 7), round=2), Sampling(0.8))):
        want = refine(*(folded.cpu(), block, passes), sampling, noise)
        ids, used, log_q = (part.cpu() for part in solve(there[0], there[1].to(device), passes, noise))
        assert ids.equal(want.ids) and used.tolist() == want.passes.tolist()
        if noise is not None:
            drawn = want.q().log().gather(-1, ids[..., None])[..., 0]
            assert torch.allclose(log_q.double(), drawn.double(), atol=1e-4)


def block_to(block, device):
    """A block whose base logits were computed once, on the CPU."""
    base = block.readout(block.hidden).to(device)
    moved = {name: getattr(block, name).to(device) for name in ("hidden", "anchor", "before")}
    drafts = None if block.draft_ids is None else block.draft_ids.to(device)
    return dataclasses.replace(block, **moved, draft_ids=drafts, readout=lambda _: block.rows(base))


def solver_case(layout, rank=16, drafts=None, dtype=fp32):
    block = random_block(N=3, B=7, layout=layout, dtype=dtype, draft_ids=drafts)
    head = Refiner(V, block.hidden.shape[2], 7, rank, None if drafts is None else len(drafts)).to(dtype)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return block, head.folded().eval()


@pytest.mark.parametrize("layout", ["infill", "next"])
@pytest.mark.parametrize("passes", [0, 1, 3, 6, "auto"])
def test_passes_over_two_buffers_are_jacobi(layout, passes):
    for drafts in (None, torch.arange(0, V, 3)):
        assert_solves(*solver_case(layout, drafts=drafts, dtype=torch.float64), passes)


def test_reference_draws_what_the_solver_draws():
    """Noise.gumbel and readout_sample are the same noise; logit and lse are the row's."""
    base, latent, weight = rows(3, 5, 97, 16)
    noise, names = Noise((3, 4, 5), round=7), torch.arange(97) * 2
    drawn = readout_sample(base, latent, weight, names, address=noise.address(DRAFT), temperature=0.7)
    tempered = q_row(base[0], latent[0], weight) / 0.7
    want = tempered + noise.gumbel(5, names)[0]
    assert drawn.ids[0].equal(names[want.argmax(-1)])
    assert torch.allclose(drawn.logit[0], tempered.gather(-1, want.argmax(-1, keepdim=True))[:, 0])
    assert torch.allclose(drawn.lse[0], tempered.logsumexp(-1))


@pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=on_triton)])
def test_rows_left_out_keep_their_keys(name):
    with kernels.use(name):
        base, latent, weight = rows(3, 7, 97, 16, whole=True)
        keys = torch.zeros(3, 7, dtype=torch.long, device=DEVICE)
        readout_argmax(base, latent, weight, keys=keys)
        before, lower = keys.clone(), base - 1000  # a key that was not reset would stay
        active = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
        ids = readout_argmax(lower, latent, weight, keys=keys, first_row=2, active=active)
        fresh = best_keys(lower + latent @ weight.T, torch.arange(97, device=DEVICE))
        open_ = torch.zeros(3, 7, dtype=torch.bool, device=DEVICE)
        open_[::2, 2:] = True
        assert keys.equal(torch.where(open_, fresh, before)) and ids.equal(unpack(keys))
        assert readout_argmax(base, latent, weight, keys=keys, first_row=7).equal(ids)


# ---- Triton against the references


@on_triton
@pytest.mark.parametrize("V,G,R,N,dtype,base_dtype,whole", CASES)
def test_argmax(triton, V, G, R, N, dtype, base_dtype, whole):
    base, latent, weight = rows(N, G, V, R, dtype, base_dtype, whole)
    keys = torch.full((N, G), 5, device=DEVICE)
    tile = 512 if INTERPRETED and V > 4099 else None
    ids = readout_argmax(base, latent, weight, keys=keys, tile=tile)
    assert ids.equal(unpack(keys)) and ((0 <= ids) & (ids < V)).all()
    assert_argmax(ids, base, latent, weight)
    logits, bound = exact(base, latent, weight)
    found = logits.gather(-1, ids[..., None])[..., 0]
    assert ((values(keys) - found).abs() <= bound.gather(-1, ids[..., None])[..., 0]).all()
    if whole:
        with kernels.use("reference"):
            assert ids.equal(readout_argmax(base, latent, weight))


def odd_rows(V):
    """Rows that kernels get wrong [rows,V], all of them exact in bf16, and their answers."""
    end, middle, start = V - 1, V // 2, min(1, V - 1)
    table = [
        (0.0, {}, 0),
        (-INF, {}, 0),
        (NAN, {}, 0),
        (NAN, {middle: -INF}, middle),  # −inf beats NaN
        (2.0, {0: NAN}, start),
        (0.0, {end: 1.0}, end),
        (-5.0, {end: -4.0}, end),  # below zero: a padded lane would win
        (-0.0, {end: 0.0}, 0),
        (-INF, {middle: -3e38}, middle),
        (3e38, {}, 0),
    ]
    rows = torch.tensor([fill for fill, _, _ in table])[:, None].repeat(1, V)
    for row, (_, changes, _) in zip(rows, table):
        for place, value in changes.items():
            row[place] = value
    return rows, torch.tensor([answer for _, _, answer in table])


@on_triton
@pytest.mark.parametrize("V", [1, 2, 7, 97, 1000, 1024, 1025, 4099])
@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_rows_that_kernels_get_wrong(triton, V, dtype):
    base, answers = odd_rows(V)
    wide = base.to(DEVICE, dtype)[:, :, None].expand(-1, -1, 3).contiguous()[..., 1]  # a stride of three
    latent, weight = torch.zeros(len(base), 16, device=DEVICE), torch.zeros(V, 16, device=DEVICE)
    keys = torch.zeros(len(base), dtype=torch.long, device=DEVICE)
    ids = readout_argmax(wide, latent, weight, keys=keys).cpu()
    assert ids.equal(answers)
    assert values(keys).isnan().cpu().equal(base.isnan().all(-1))
    clean = ~base.isnan().any(-1)
    assert ids[clean].equal(base[clean].argmax(-1))


@on_triton
@pytest.mark.parametrize("tile", [32, 64, 256])
def test_lowest_original_id_wins_a_tie(triton, tile):
    base, latent, weight = rows(2, 3, 500, 16, whole=True)
    order = torch.randperm(1000, device=DEVICE)[:500]
    keys = torch.zeros(2, 3, dtype=torch.long, device=DEVICE)
    ids = readout_argmax(base, latent, weight, order, keys=keys, tile=tile)
    assert keys.equal(best_keys(base + latent @ weight.T, order)) and ids.equal(unpack(keys))


@on_triton
@pytest.mark.parametrize("tile", [32, 256])
@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_sampling(triton, tile, dtype):
    """The reference's words, whatever the tile and the rows that are left out."""
    base, latent, weight = rows(3, 7, 1025, 64, dtype, fp32, whole=True)
    base, names = base / 2, torch.randperm(4000, device=DEVICE)[:1025]
    how = dict(address=Noise((1, 2, 2**40), round=2**20).address(DRAFT, DEVICE), temperature=2.0)
    state = empty(3, 7, DEVICE)
    drawn = readout_sample(base, latent, weight, names, state=state, tile=tile, **how)
    with kernels.use("reference"):
        want = readout_sample(base, latent, weight, names, **how)
    assert drawn.ids.equal(want.ids) and drawn.logit.equal(want.logit)
    assert torch.allclose(drawn.lse, want.lse, rtol=1e-6, atol=1e-5)
    active = torch.tensor([0, 1, 1], dtype=torch.int32, device=DEVICE)
    before = [part.clone() for part in drawn]
    again = readout_sample(base + 1, latent, weight, names, state=state, first_row=3, active=active, **how)
    assert again.ids.equal(drawn.ids) and again.logit[1:, 3:].equal(before[1][1:, 3:] + 0.5)
    assert again.logit[0].equal(before[1][0]) and again.lse[:, :3].equal(before[2][:, :3])


@on_triton
def test_the_noise_is_the_gumbel_of_its_address(triton):
    """Without logits the best key is the largest noise: its place and, to rounding of two logarithms, its value."""
    N, G, V = 2, 5, 3000
    noise, names = Noise((11, 12), round=3), torch.arange(V, device=DEVICE) * 50
    state, zero = empty(N, G, DEVICE), torch.zeros(N, G, V, device=DEVICE)
    latent, weight = torch.zeros(N, G, 16, device=DEVICE), torch.zeros(V, 16, device=DEVICE)
    drawn = readout_sample(zero, latent, weight, names, address=noise.address(DRAFT, DEVICE), state=state)
    top, place = noise.gumbel(G, names).max(-1)
    assert drawn.ids.equal(names[place]) and torch.allclose(values(state[0]), top, rtol=1e-6)
    assert (drawn.logit == 0).all() and torch.allclose(drawn.lse, torch.full_like(top, V).log())


@on_triton
def test_odd_rows_are_sampled_within_range(triton):
    base, _ = odd_rows(97)
    base = base.to(DEVICE)[None]
    latent, weight = torch.zeros(1, len(base[0]), 16, device=DEVICE), torch.zeros(97, 16, device=DEVICE)
    address = Noise(5).address(DRAFT, DEVICE)
    drawn = readout_sample(base, latent, weight, address=address)
    with kernels.use("reference"):
        want = readout_sample(base, latent, weight, address=address)
    assert drawn.ids.equal(want.ids)
    assert torch.allclose(drawn.logit, want.logit, equal_nan=True)
    assert torch.allclose(drawn.lse, want.lse, equal_nan=True)


@on_triton
@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_q_row(triton, dtype):
    base, latent, weight = rows(1, 7, 1000, 64, dtype)
    logits, bound = exact(base, latent, weight)
    assert ((q_row(base[0], latent[0], weight) - logits[0]).abs() <= bound[0]).all()
    assert ((q_row(base[0, 3], latent[0, 3], weight) - logits[0, 3]).abs() <= bound[0, 3]).all()


def random_fold(R, B, dtype, mixer=True, mlp=True):
    def draw(*size):
        return (torch.randn(size) / size[-1] ** 0.5).to(DEVICE, dtype)

    mix = draw(R, B, B).tril().permute(1, 2, 0).contiguous().permute(2, 0, 1) if mixer else None
    return Folded(draw(200, R) * R**0.5, mix, *([draw(2 * R, R), draw(2 * R, R), draw(R, 2 * R)] if mlp else []))


RANKS, SLOTS = (16, 64, 256), (2, 7, 16, 20)
LATENTS = list(pairwise(RANKS, SLOTS, (1, 3), (1, 2), (fp32, bf16), (0, 3), (True, False), (True, False)))


@on_triton
@pytest.mark.parametrize("R,B,N,known,dtype,first,mixer,mlp", LATENTS)
def test_latents(triton, R, B, N, known, dtype, first, mixer, mlp):
    G = B - known + 1
    first, folded = min(first, G), random_fold(R, B, dtype, mixer, mlp)
    constant, draft = torch.randn(N, B, R, device=DEVICE), torch.randint(200, (N, G), device=DEVICE)
    out, want = torch.full((2, N, G, R), 7.0, device=DEVICE)
    for buffer, name in ((out, "triton"), (want, "reference")):
        with kernels.use(name):
            refiner_latent(constant, folded, draft, known, first_row=first, out=buffer)
    close = dict(rtol=1e-5, atol=1e-5) if dtype is fp32 else dict(rtol=2e-2, atol=2e-2)  # one bf16 step of u moves z
    assert torch.allclose(out, want, **close)
    rounded = refiner_latent(constant, folded, draft, known)
    assert rounded.dtype is dtype and rounded[:, first:].equal(out[:, first:].to(dtype))


@on_triton
def test_a_blocks_latents_do_not_depend_on_its_neighbours(triton):
    folded = random_fold(64, 8, fp32)
    constant, draft = torch.randn(3, 8, 64, device=DEVICE), torch.randint(200, (3, 7), device=DEVICE)
    together = refiner_latent(constant, folded, draft, 2)
    alone = [refiner_latent(constant[n : n + 1], folded, draft[n : n + 1], 2) for n in range(3)]
    assert together.equal(torch.cat(alone)) and together.equal(refiner_latent(constant, folded, draft, 2))


@on_triton
@pytest.mark.parametrize("layout", ["infill", "next"])
@pytest.mark.parametrize("passes", [3, "auto"])
def test_passes_of_kernels_are_jacobi(triton, layout, passes):
    """With settled blocks and rows left out, and through a reduced vocabulary."""
    for drafts in (None, torch.arange(0, V, 3)):
        assert_solves(*solver_case(layout, drafts=drafts), passes, DEVICE)


@pytest.mark.skipif(INTERPRETED, reason="this is the process under the interpreter")
def test_laws_of_the_kernels_under_the_interpreter(capsys):
    interpreted.run(__file__, capsys)


# ---- what the launchers ask for, compiled for an H200


class Recorder:
    """Stands for a kernel and notes with what it was launched."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.take

    def take(self, *args, **options):
        self.args, self.options = args, options


def compile_for_h200(recorder):
    """Compiles a recorded launch as Triton's launcher would -> registers, spills, shared memory, instructions."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = recorder.kernel.arg_names
    signature, attributes, fixed = {}, {}, {}
    for i, value in enumerate(recorder.args):
        if isinstance(value, torch.Tensor):
            short = str(value.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
            signature[names[i]] = "*" + short.replace("uint", "u").replace("int", "i")
        elif isinstance(value, float):
            signature[names[i]] = "fp32"
        else:
            signature[names[i]] = "i64" if value >= 2**31 else "i32"
        if isinstance(value, int) and value == 1:
            signature[names[i]], fixed[(i,)] = "constexpr", 1
        elif isinstance(value, torch.Tensor) or isinstance(value, int) and value % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = dict(recorder.options)
    for name in names[len(recorder.args) :]:
        signature[name], fixed[(names.index(name),)] = "constexpr", options.pop(name)
    source = ASTSource(recorder.kernel, signature, fixed, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton carries no cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("--dump-resource-usage", "-sass")
        )
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)", code)
    spills = sum(name in ("STL", "LDL") for name in instructions)
    return {"registers": int(found["REG"]), "local": int(found["STACK"]) + int(found["LOCAL"]), "spills": spills,
            "shared": compiled.metadata.shared, "instructions": len(instructions)}  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's Triton does not compile")
@pytest.mark.parametrize("vocab", [151936, 32000])
@pytest.mark.parametrize("N", [1, 8])
def test_production_shapes_fit_an_h200(monkeypatch, capsys, vocab, N):
    pytest.importorskip("triton")
    from xpress.kernels import latent_tiles, readout_tiles

    monkeypatch.setattr(
        sys.modules[programs.__module__], "programs", lambda device, block_m: 132 * (1 + (block_m == 16))
    )
    found = {}
    for module, name in (
        (readout_tiles, "argmax_kernel"),
        (readout_tiles, "sample_kernel"),
        (readout_tiles, "combine_kernel"),
        (readout_tiles, "logits_kernel"),
        (latent_tiles, "latent_kernel"),
    ):
        found[name] = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, found[name])
    R, B, known = 256, 16, 2
    with torch.device("meta"):  # sizes and strides are all that compiling needs
        base = torch.empty(N, B, vocab, dtype=bf16)[:, 1:]
        latent, weight = torch.empty(N, B - 1, R, dtype=bf16), torch.empty(vocab, R, dtype=bf16)
        mlp = [torch.empty(2 * R, R, dtype=bf16), torch.empty(2 * R, R, dtype=bf16), torch.empty(R, 2 * R, dtype=bf16)]
        folded = Folded(weight, torch.empty(B, B, R, dtype=bf16).permute(2, 0, 1), *mlp)
        keys, spare = torch.empty(2, N, B - 1, dtype=torch.long).unbind(0)
        active, passes = torch.empty(2, N, dtype=torch.int32).unbind(0)
        address, constant = torch.empty(N, 2, dtype=torch.long), torch.empty(N, B, R)
        state = keys, torch.empty(N, B - 1), torch.empty(N, B - 1)
    with kernels.use("triton"):
        readout_argmax(base, latent, weight, keys=keys, active=active, reset=False)
        readout_sample(base, latent, weight, address=address, temperature=0.7, active=active, state=state)
        q_row(base[0], latent[0], weight)
        how = dict(active=active, out=latent, packed=True, next_keys=spare, passes=passes)
        refiner_latent(constant, folded, keys, known, **how)
    for name, recorder in found.items():
        cost = compile_for_h200(recorder)
        with capsys.disabled():
            print(f"\n{name} V={vocab} N={N}:", *(f"{key} {value}" for key, value in cost.items()), end="")
        assert cost["spills"] == cost["local"] == 0 and cost["shared"] <= 227 * 1024
