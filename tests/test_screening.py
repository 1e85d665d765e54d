"""Screening: the full readout's ids to the last, bounds that hold in fp64, counts that add up.

Laws of the Triton side carry the mark `gpu` and run under the interpreter as those of test_kernels.py.
"""

import sys

import interpreted
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import DEVICE, INTERPRETED, Recorder, bf16, compile_for_h200, fp16, fp32, odd_rows

from xpress import kernels
from xpress.kernels import Screen, Screened, TopC, readout_argmax, readout_sample, screened_argmax, top_c, unpack
from xpress.kernels import screening as file
from xpress.kernels.readout_sample import empty
from xpress.kernels.screen import Query, fp32_sums, round_up, whole_sums
from xpress.sampling import DRAFT, Noise

INF, NAN = float("inf"), float("nan")
SHAPES = [(1, 16, 8, fp32), (97, 32, 4, fp16), (1025, 64, 8, bf16)]
SHAPES += [(1500, 64, 4, fp32), (1000, 256, 16, fp16), (513, 16, 16, fp32)]
BITS, SIZES = (4, 8, 16), (1, 2, 7, 63, 64, 97, 513, 1025, 4099)
KINDS = ("random", "ties", "duplicates", "near", "huge", "zeros", "infinite", "nan", "whole nan", "outlier", "tiny")


def case(kind, size, R, seed, dtype=fp32):
    """base [2,5,V], latent [2,5,R], weight [V,R] of which something goes wrong in careless hands."""
    torch.manual_seed(seed)
    base, latent, weight = torch.randn(2, 5, size) * 3, torch.randn(2, 5, R), torch.randn(size, R) / 4
    if kind == "ties":
        base, latent, weight = (torch.randint(-1, 2, x.shape).float() for x in (base, latent, weight))
    elif kind in ("duplicates", "near"):  # copies of a few lines, in any order; near: each a rounding away
        copy = torch.randint(max(1, size // 20), (size,))
        base, weight = base[..., copy], weight[copy]
        if kind == "near":
            base = base + torch.randn_like(base) * 10.0 ** torch.randint(-8, -1, (2, 5, 1))
            weight = weight * (1 + torch.randn_like(weight) * 1e-7)
    elif kind == "huge":
        latent, weight, base = latent * 1e18, weight * 10.0 ** torch.randint(10, 20, (size, 1)), base * 1e30
    elif kind == "zeros":
        latent = latent * (torch.rand(2, 5, 1) < 0.5)
        weight, base = weight * (torch.rand(size, 1) < 0.3), base * (torch.rand(2, 5, 1) < 0.5)
    elif kind == "infinite":
        base = torch.where(torch.rand(base.shape) < 0.7, -INF, base)
        base[0, 0], base[1, 2, size // 2] = -INF, INF
    elif kind == "nan":
        base = torch.where(torch.rand(base.shape) < 0.01, NAN, base)
        base[0, 1, size // 2], latent[1, 1, 0] = NAN, NAN
    elif kind == "whole nan":
        base[0, 3], weight[size // 2] = NAN, NAN
    elif kind == "outlier":
        weight[size // 3] *= 1e4
        weight[:, 0] *= 50
    elif kind == "tiny":
        latent, weight, base = latent * 1e-30, weight * 1e-12, base * 1e-42
    return base.to(dtype), latent.to(dtype), weight.to(dtype)


@settings(deadline=None, max_examples=150)
@given(
    *(st.sampled_from(x) for x in (KINDS, SIZES, (16, 64, 256), BITS, (fp32, fp32, bf16))),
    *(st.integers(0, 10**6), st.booleans(), st.integers(0, 5), st.sampled_from([None, (1, 0), (0, 1), (0, 0)])),
)
def test_ids_are_the_full_readouts(kind, size, R, bits, dtype, seed, mapped, first, flags):
    """Whatever the operands, with rows and blocks left out, ids in any order, tiles skipped or not."""
    base, latent, weight = case(kind, size, R, seed, dtype)
    screen, ids = Screen.of(weight, bits), torch.randperm(size * 2)[:size] if mapped else None
    active = None if flags is None else torch.tensor(flags, dtype=torch.int32)
    want = torch.full((2, 5), 7)
    rest = dict(first_row=first, active=active)
    readout_argmax(base, latent, weight, ids, keys=want, **rest)
    for skip in (False, True):
        keys, stats = torch.full((2, 5), 7), Screened()
        got = screened_argmax(base, latent, weight, screen, ids, keys=keys, skip=skip, stats=stats, **rest)
        assert got.equal(unpack(want)) and got.equal(unpack(keys))
        open_ = (5 - first) * (2 if flags is None else sum(flags))
        assert stats.rows == open_ and 0 <= stats.tiles_skipped <= stats.tiles
        assert stats.full_rows <= open_ and stats.ids_rechecked + stats.full_rows * size >= open_
        assert stats.tiles == (open_ > 0) * -(-size // file.TILE)
    assert screened_argmax(base, latent, weight, screen, ids).equal(readout_argmax(base, latent, weight, ids))
    one = screened_argmax(base[0], latent[0], weight, screen, ids)
    assert one.equal(readout_argmax(base[0], latent[0], weight, ids))


@settings(deadline=None, max_examples=60)
@given(
    *(
        st.sampled_from(x)
        for x in (("random", "near", "nan", "infinite"), (1, 97, 1025), (16, 64), BITS, (0.01, 0.7, 5))
    ),
    *(st.integers(0, 10**6), st.booleans()),
)
def test_draws_are_the_full_readouts(kind, size, R, bits, temperature, seed, mapped):
    base, latent, weight = case(kind, size, R, seed)
    ids = torch.randperm(size * 2)[:size] if mapped else None
    how = dict(address=Noise((1, seed), round=3).address(DRAFT), temperature=temperature)
    want = readout_sample(base, latent, weight, ids, **how).ids
    assert screened_argmax(base, latent, weight, Screen.of(weight, bits), ids, **how).equal(want)


@settings(deadline=None, max_examples=60)
@given(
    *(
        st.sampled_from(x)
        for x in (("random", "near", "outlier", "zeros", "tiny", "ties"), (1, 97, 1025), (16, 64, 256))
    ),
    *(st.sampled_from(BITS), st.integers(0, 10**6)),
)
def test_the_inequality_in_fp64(kind, size, R, bits, seed):
    """|z·w_v − l̂_v| ≤ δ_v with what the CPU multiplies, and e_v, ‖w_v‖ are above what they stand for."""
    _, latent, weight = case(kind, size, R, seed)
    screen, z = Screen.of(weight, bits), latent.flatten(0, 1)
    exact = weight.double()
    away = (exact - screen.dequantised()).norm(dim=1)
    assert (screen.error.double() >= away).all() and (screen.norm.double() >= exact.norm(dim=1)).all()
    assert (screen.error.double() <= away * (1 + 1e-6) + 1e-44).all()
    query, found = Query(z, screen), torch.empty(len(z), size)
    query.product(0, size, found)
    gap = (found.double() - z.double() @ exact.T).abs()
    full = (z @ weight.T).double() - z.double() @ exact.T  # the full readout's own rounding has a share of the bound
    assert (gap + full.abs() <= query.spread(screen.error, screen.norm).double()).all()


def test_a_copy_is_what_its_bits_allow():
    weight = torch.randn(200, 64)
    near = {bits: Screen.of(weight, bits) for bits in BITS}
    share = {bits: float((s.error / s.norm).mean()) for bits, s in near.items()}
    assert share[16] < 0.003 and share[8] < 0.01 and share[4] < 0.12
    assert [near[b].bytes for b in (4, 8, 16)] == [200 * (32 + 12), 200 * (64 + 12), 200 * (128 + 8)]
    for s in near.values():
        assert s.shape == (200, 64) and torch.equal(s.to("cpu").codes, s.codes)
        error, norm = s.tops(64)
        assert error.shape == (4,) and error[3] == s.error[192:].max() and norm[0] == s.norm[:64].max()
    assert Screen.of(weight.bfloat16(), 16).error.eq(0).all()


@given(st.lists(st.floats(0, 1e300), min_size=1))
def test_norms_are_rounded_up(numbers):
    exact = torch.tensor(numbers, dtype=torch.float64)
    up = round_up(exact).double()
    assert (up >= exact).all() and ((up <= exact * (1 + 2e-7) + 1e-44) | up.isinf()).all()


def test_a_screen_leaves_few_ids_and_skips_what_cannot_win():
    base, latent, weight = torch.randn(1, 7, 8192) * 3, torch.randn(1, 7, 64), torch.randn(8192, 64) / 8
    base[..., 600:] -= 60
    plain, skipping = Screened(), Screened()
    for stats in (plain, skipping):
        screened_argmax(base, latent, weight, Screen.of(weight), skip=stats is skipping, stats=stats)
    assert plain.tiles_skipped == 0 and plain.ids_rechecked < 30 and plain.bytes_read < 1.3 * 8192 * 64
    assert skipping.tiles_skipped == 112 and skipping.ids_rechecked == plain.ids_rechecked
    assert skipping.bytes_read < plain.bytes_read / 5


@pytest.mark.parametrize("bits", BITS)
def test_blocks_that_do_not_fit_one_piece_of_memory(monkeypatch, bits):
    base, latent, weight = torch.randn(5, 3, 700), torch.randn(5, 3, 16), torch.randn(700, 16)
    monkeypatch.setattr(file, "MEMORY", 2 * 3 * 700)
    active = torch.tensor([1, 1, 0, 1, 1], dtype=torch.int32)
    for flags in (None, active):
        how = dict(active=flags, first_row=1)
        keys = torch.zeros(2, 5, 3, dtype=torch.long)
        screened_argmax(base, latent, weight, Screen.of(weight, bits), keys=keys[0], **how)
        readout_argmax(base, latent, weight, keys=keys[1], **how)
        assert unpack(keys[0]).equal(unpack(keys[1]))


def test_without_the_processors_integer_and_bf16_products(monkeypatch):
    base, latent, weight = case("near", 1025, 64, 0)
    want = readout_argmax(base, latent, weight)
    assert isinstance(whole_sums(), bool) and isinstance(fp32_sums(), bool)
    for name in ("whole_sums", "fp32_sums"):
        monkeypatch.setattr(sys.modules[Screen.__module__], name, lambda: False)
    for bits in BITS:
        assert screened_argmax(base, latent, weight, Screen.of(weight, bits)).equal(want)


def test_arguments_that_do_not_fit_are_named():
    base, latent, weight = torch.zeros(2, 3, 8), torch.zeros(2, 3, 16), torch.zeros(8, 16)
    screen = Screen.of(weight)
    for wrong in (weight.double(), weight[0], weight[:0], weight.long()):
        with pytest.raises(ValueError, match="screen"):
            Screen.of(wrong)
    for bits, like in ((5, weight), (4, torch.zeros(8, 15))):
        with pytest.raises(ValueError, match="bits"):
            Screen.of(like, bits)
    other = Screen.of(torch.zeros(9, 16))
    address = Noise((1, 2)).address(DRAFT)
    for parts, how in [
        ((base, latent, weight, other), {}),
        ((base.double(), latent, weight, screen), {}),
        ((base, latent, weight, screen), {"first_row": 1}),
        ((base, latent[:, :2], weight, screen), {}),
        ((base, latent, weight, screen), {"address": address, "temperature": 0.0}),
        ((base, latent, weight, screen), {"address": address[:1]}),
        ((base[0], latent[0], weight, screen), {"address": address[:1]}),
    ]:
        with pytest.raises(ValueError):
            screened_argmax(*parts, **how)
    with pytest.raises(ValueError, match="C="):
        top_c(base, latent, weight, 0)


@pytest.mark.parametrize("mapped", [False, True])
def test_top_c_is_the_argmax_of_its_candidates(mapped):
    base, latent, weight = case("ties", 97, 16, 3)
    ids = torch.randperm(200)[:97] if mapped else None
    assert top_c(base, latent, weight, 97, ids).equal(readout_argmax(base, latent, weight, ids))
    base = torch.randn(2, 5, 97)
    for C in (1, 8):
        chosen = TopC.of(base, weight, C, ids)
        inside = torch.full_like(base, -INF).scatter(-1, chosen.places, chosen.base)
        want = readout_argmax(inside, latent, weight, ids)
        assert top_c(base, latent, weight, C, ids).equal(want)
        assert top_c(base, latent, weight, C, ids, chosen=chosen).equal(want)
    lost = base.clone()
    lost[..., 0] = base.amax() + 1  # NOT exact: what lies outside the candidates cannot win
    assert top_c(lost, latent, weight, 1).eq(0).all()
    assert not readout_argmax(lost, latent * 100, weight).eq(0).all()


# ---- Triton


@pytest.mark.gpu
@pytest.mark.parametrize("kind,shape", zip(KINDS, SHAPES * 2))
def test_keys_are_the_kernels(kind, shape):
    """To the bit, values too; with rows left out, tiles skipped, ids in any order."""
    size, R, bits, dtype = shape
    base, latent, weight = (part.to(DEVICE) for part in case(kind, size, R, 5, dtype))
    ids, active = torch.randperm(size * 2)[:size].to(DEVICE), torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    screen = Screen.of(weight, bits)
    with kernels.use("triton"):
        for how in ({}, {"ids": ids, "active": active, "first_row": 1}):
            want, got, skipped = torch.full((3, 2, 5), 7, device=DEVICE)
            readout_argmax(base, latent, weight, keys=want, **how)
            stats = Screened()
            screened_argmax(base, latent, weight, screen, keys=got, stats=stats, **how)
            screened_argmax(base, latent, weight, screen, keys=skipped, skip=True, **how)
            assert got.equal(want) and skipped.equal(want)
            assert stats.ids_rechecked and stats.tiles and not stats.tiles_skipped


@pytest.mark.gpu
@pytest.mark.parametrize("bits", BITS)
def test_draws_are_the_kernels(bits):
    base, latent, weight = (part.to(DEVICE) for part in case("near", 1025, 64, 2))
    ids = torch.randperm(3000, device=DEVICE)[:1025]
    how = dict(address=Noise((1, 2), round=9).address(DRAFT, DEVICE), temperature=0.7)
    with kernels.use("triton"):
        state = empty(2, 5, DEVICE)
        readout_sample(base, latent, weight, ids, state=state, **how)
        assert screened_argmax(base, latent, weight, Screen.of(weight, bits), ids, packed=True, **how).equal(state[0])


@pytest.mark.gpu
def test_odd_rows_and_skipped_tiles():
    base, answers = odd_rows(1000)
    latent, weight = torch.zeros(len(base), 16, device=DEVICE), torch.zeros(1000, 16, device=DEVICE)
    with kernels.use("triton"):
        assert screened_argmax(base.to(DEVICE), latent, weight, Screen.of(weight)).cpu().equal(answers)
        base, latent, weight = (part.to(DEVICE) for part in case("random", 4099, 16, 1))
        base[..., 200:] -= 100
        stats, screen = Screened(), Screen.of(weight)
        got = screened_argmax(base, latent, weight, screen, skip=True, stats=stats)
        assert got.equal(readout_argmax(base, latent, weight)) and stats.tiles_skipped > stats.tiles / 2
        with pytest.raises(ValueError, match="8 bits"):
            screened_argmax(base, latent, weight, Screen.of(weight, 4))


@pytest.mark.skipif(INTERPRETED, reason="this is the process under the interpreter")
def test_laws_of_screening_under_the_interpreter(capsys):
    interpreted.run(__file__, capsys)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's Triton does not compile")
@pytest.mark.parametrize("vocab", [151936, 32000])
@pytest.mark.parametrize("bits", [4, 8])
def test_production_shapes_fit_an_h200(monkeypatch, capsys, vocab, bits):
    pytest.importorskip("triton")
    from xpress.kernels import screening_tiles

    monkeypatch.setattr(sys.modules["xpress.kernels.readout_argmax"], "programs", lambda device, block_m: 264)
    found = {}
    for name in ("screen_kernel", "recheck_kernel"):
        found[name] = Recorder(getattr(screening_tiles, name))
        monkeypatch.setattr(screening_tiles, name, found[name])
    with torch.device("meta"):  # sizes and strides are all that compiling needs
        base, latent = torch.empty(1, 16, vocab, dtype=bf16)[:, 1:], torch.empty(1, 15, 256, dtype=bf16)
        weight, keys = torch.empty(vocab, 256, dtype=bf16), torch.empty(1, 15, dtype=torch.long)
        codes = torch.empty(vocab, 32 * bits, dtype=torch.int8 if bits == 8 else torch.uint8)
        screen = Screen(bits, codes, *(torch.empty(vocab) for _ in range(3)))
    for skip in (False, True):
        with kernels.use("triton"):
            screened_argmax(base, latent, weight, screen, keys=keys, reset=False, skip=skip)
        for name, recorder in found.items():
            cost = compile_for_h200(recorder)
            with capsys.disabled():
                print(f"\n{name} bits={bits} V={vocab} skip={skip}:", *(f"{k} {v}" for k, v in cost.items()), end="")
            assert cost["spills"] == cost["local"] == 0 and cost["shared"] <= 227 * 1024
