"""Attention over a shared context and the own block: the dense softmax, at any chunk size, without the dense matrix."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory import Largest, kept_bytes

from xpress import attention
from xpress.attention import block_attention, chunks

EXACT = dict(rtol=0, atol=1e-12)  # fp64, sums of a few dozen numbers near 1


def make(S=2, A=3, B=3, T=7, kv=2, group=2, d=4, dtype=torch.float64, seed=0):
    """Random q, context keys and values, own keys and values, all wanting gradients."""
    torch.manual_seed(seed)
    shapes = [(S, A, B, kv * group, d), *[(S, T, kv, d)] * 2, *[(S, A, B, kv, d)] * 2]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def dense(q, ctx_k, ctx_v, own_k, own_v, visible):
    """Every sequence, block and head in a loop: softmax over what the block sees of the context, then its own slots."""
    S, A, B, heads, d = q.shape
    group, out = heads // ctx_k.shape[2], []
    for s in range(S):
        for a in range(A):
            seen = torch.ones(ctx_k.shape[1]).bool() if visible is None else visible[s, a]
            for h in range(heads):
                k = torch.cat([ctx_k[s, seen, h // group], own_k[s, a, :, h // group]])
                v = torch.cat([ctx_v[s, seen, h // group], own_v[s, a, :, h // group]])
                out.append((q[s, a, :, h] @ k.T).softmax(-1) @ v)
    if not out:
        return q.flatten(3) * 1
    return torch.stack(out).view(S, A, heads, B, d).transpose(2, 3).flatten(3)


def ours(inputs, visible, at_once=None):
    """block_attention with chunks of `at_once` blocks."""
    q, ctx_k, ctx_v, own_k, own_v = inputs
    S, A, B, heads, _ = q.shape
    rows, length = S * heads * B, ctx_k.shape[1]
    with pytest.MonkeyPatch.context() as patch:
        if at_once is not None:
            patch.setattr(attention, "MAX_SCORES", at_once * rows * (length + B))
        parts = chunks(visible, A, length, rows, B)
    assert at_once is None or [part.stop - part.start for part, _ in parts[:-1]] == [at_once] * (len(parts) - 1)
    return block_attention(q, (ctx_k, ctx_v), (own_k, own_v), visible, parts)


def compare(inputs, visible, at_once):
    found, wanted = ours(inputs, visible, at_once), dense(*inputs, visible)
    assert found.shape == wanted.shape and torch.allclose(found, wanted, **EXACT)
    slope = torch.randn_like(wanted)
    pairs = zip(*(torch.autograd.grad(out, inputs, slope, allow_unused=True) for out in (found, wanted)))
    for mine, theirs in pairs:
        mine, theirs = (torch.zeros(()).double() if g is None else g for g in (mine, theirs))
        assert torch.allclose(mine, theirs, **EXACT)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(0, 8),
    st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]),
    st.integers(1, 5),
    st.sampled_from([None, 0.0, 0.2, 0.8]),
    st.integers(0, 99),
)
@example(2, 3, 2, 0, (2, 2), 2, 0.5, 0)  # no context at all
@example(2, 0, 2, 5, (2, 2), 1, 0.5, 0)  # no block
@example(2, 3, 2, 5, (2, 2), 1, 0.0, 0)  # nothing in sight, each block a chunk of its own
def test_it_is_the_dense_softmax(S, A, B, T, heads, at_once, share, seed):
    """Value and gradient in every input, for random masks (None: all in sight), groups and chunk sizes."""
    inputs = make(S, A, B, T, *heads, seed=seed)
    compare(inputs, None if share is None else torch.rand(S, A, T) < share, at_once)


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_uneven_anchors(at_once):
    """What training asks for: each block sees the tokens before its anchor, in its own document, the first one none."""
    index = torch.tensor([[0, 3, 9, 11], [1, 2, 5, 8]])
    start = torch.tensor([[0, 0, 6, 6], [0, 0, 0, 5]])
    place = torch.arange(12)
    visible = (place < index[..., None]) & (place >= start[..., None])
    assert not visible[0, 0].any()
    compare(make(2, 4, 3, 12), visible, at_once)


def test_gradcheck():
    inputs, visible = make(1, 3, 2, 4, d=2), torch.rand(1, 3, 4) < 0.6
    assert torch.autograd.gradcheck(lambda *x: ours(x, visible, 2), inputs)


def test_frozen_inputs_change_nothing():
    """A context without gradient, as from a frozen projection: the others' gradients to the bit."""
    inputs, visible = make(), torch.rand(2, 3, 7) < 0.5
    wanted = torch.autograd.grad(ours(inputs, visible, 2).square().sum(), inputs)
    frozen = [x.detach().requires_grad_(i not in (1, 2)) for i, x in enumerate(inputs)]
    ours(frozen, visible, 2).square().sum().backward()
    for i, (x, g) in enumerate(zip(frozen, wanted)):
        assert x.grad is None if i in (1, 2) else torch.equal(x.grad, g)


@pytest.mark.parametrize("at_once", [1, 3])
def test_under_autocast_it_is_close_to_fp32(at_once):
    """bf16 products, fp32 softmax and sums: relative errors of some 2⁻⁸, in fp32 gradients for fp32 inputs."""
    inputs, visible = make(2, 6, 4, 40, d=16, dtype=torch.float32), torch.rand(2, 6, 40) < 0.7
    inputs = [(x / 2).detach().requires_grad_() for x in inputs]
    slope = torch.randn(2, 6, 4, 64)
    exact = ours(inputs, visible, at_once)
    wanted = torch.autograd.grad(exact, inputs, slope)
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(inputs, visible, at_once)
    assert found.dtype == torch.bfloat16
    gradients = torch.autograd.grad(found, inputs, slope.bfloat16())
    for a, b in zip((found, *gradients), (exact, *wanted)):
        assert a.dtype == (torch.bfloat16 if a is found else torch.float32)
        assert (a - b).norm() < 2e-2 * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_scores_stay_finite(dtype):
    inputs = [(x * 60).to(dtype).detach().requires_grad_() for x in make(dtype=torch.float32)]
    out = ours(inputs, torch.rand(2, 3, 7) < 0.5, 2)
    assert all(g.isfinite().all() for g in (out, *torch.autograd.grad(out.sum(), inputs)))


def test_a_chunk_reads_only_what_its_blocks_see():
    """Keys and values that no block of a chunk sees may be anything: in front, between two chunks, behind."""
    inputs = make(1, 4, 3, 16)
    visible = torch.zeros(1, 4, 16, dtype=torch.bool)
    visible[0, 0, 2:4] = visible[0, 1, 2:6] = visible[0, 2, 9:11] = visible[0, 3, 10:13] = True
    unseen = ~visible[0].any(0)
    compare(inputs, visible, 2)
    clean = ours(inputs, visible, 2)
    wanted = torch.autograd.grad(clean.sum(), inputs)
    spoilt = [x.detach().clone() for x in inputs]
    spoilt[1][:, unseen] = spoilt[2][:, unseen] = float("nan")
    spoilt = [x.requires_grad_() for x in spoilt]
    found = ours(spoilt, visible, 2)
    assert torch.equal(found, clean)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(found.sum(), spoilt), wanted))
    second = [x.detach().clone() for x in inputs]
    second[1][:, 9:] = second[2][:, 9:] = float("nan")
    out = ours(second, visible, 2)
    assert torch.equal(out[:, :2], clean[:, :2]) and out[:, 2:].isnan().any()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_no_tensor_grows_with_blocks_times_context():
    """Nothing larger than a chunk's scores or an input is ever made, and for backward the inputs are kept, the queries
    once more in the order that the products want. The dense form makes and keeps all scores."""
    B, T, heads, d, at_once = 4, 96, 4, 2, 2
    chunk = 4 * at_once * heads * B * (T + B)
    for A in (8, 64):
        inputs, visible = make(1, A, B, T, 2, 2, d, torch.float32), torch.rand(1, A, T) < 0.9
        with Largest() as largest:
            ours(inputs, visible, at_once).square().sum().backward()
        assert largest.size <= max(chunk, inputs[0].nbytes, visible.nbytes)
        kept = kept_bytes(lambda x=inputs, v=visible: ours(x, v, at_once), [inputs, visible])
        assert kept <= inputs[0].nbytes
        with Largest() as largest:
            scores = torch.einsum("sabhd,sthd->shabt", inputs[0], inputs[1].repeat_interleave(2, 2))
            scores.softmax(-1)
        assert largest.size >= 4 * A * heads * B * T  # the count sees what a dense form makes
    assert 4 * A * heads * B * T > 20 * chunk
