"""The chunked loss is the plain loss, in value and gradient, at any size, keeping nothing of the vocabulary's size."""

import importlib
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory import Largest, kept_bytes

from xpress.loss import Logits, Pass, Rows, Term, Vocabulary, attach, token_loss

V, D, R = 11, 6, 4
MIXES = [(0.1, 0.9), (1.0, 0.0), (0.0, 1.0), (0.3, 0.0)]


def make(n, feeds=1, draft_ids=None, dtype=torch.float64, seed=0, vocab=V, zero_weights=False):
    """Random rows -> Rows, Vocabulary and latents [F,n,R], those with hidden and readout wanting gradients, and the
    target's lm_head."""
    torch.manual_seed(seed)
    head = torch.randn(vocab, D, dtype=dtype)
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    last = torch.randn(n, D, dtype=dtype)
    rows = Rows(
        hidden=torch.randn(n, D, dtype=dtype).requires_grad_(),
        labels=torch.randint(vocab, (n,)),
        last=last,
        log_norm=None if ids is None else (last @ head.T).logsumexp(-1),
        weights=torch.rand(1 + feeds, n, dtype=torch.float64) * (not zero_weights),
    )
    lm_rows = head if ids is None else head[ids]
    readout = torch.randn(len(lm_rows), R, dtype=dtype).requires_grad_()
    latents = torch.randn(feeds, n, R, dtype=dtype).requires_grad_()
    return rows, Vocabulary(lm_rows, readout, ids), latents, head


def chunked_loss(rows, vocabulary, latents, mix, chunk=128, factors=None) -> tuple[torch.Tensor, torch.Tensor]:
    """The pass over given latents -> (Σ factor·sum, sums)."""
    factors = [1.0] * len(mix) if factors is None else factors
    tensors = [Logits("gold" if i else "none", *mix[i], factors[i]) for i in range(1 + len(latents))]
    found = Pass(rows, vocabulary, tensors, rows.hidden.requires_grad, slope=True)
    found.run(lambda i, fed, part: latents[i - 1, part].detach(), chunk)
    counted = [latent for latent, tensor in zip(latents, tensors[1:]) if len(latent) and (tensor.ce or tensor.l1)]
    return attach(found, rows.hidden, vocabulary.readout, counted), found.sums


def test_the_target_is_asked_where_a_loss_reads_it(monkeypatch):
    """CE knows the data's tokens alone: a drafter that is trained on it costs no second readout."""
    asked = []
    module = importlib.import_module("xpress.loss")
    probs = module.target_probs
    monkeypatch.setattr(module, "target_probs", lambda *args: asked.append(1) or probs(*args))
    for mix, times in (([(1.0, 0.0)] * 2, 0), ([(1.0, 0.0), (0.1, 0.9)], 2)):
        rows, vocabulary, latents, _ = make(5)
        chunked_loss(rows, vocabulary, latents, mix, chunk=3)
        assert sum(asked) == times


def plain_loss(rows, vocabulary, latents, head, mix) -> torch.Tensor:
    """The formula: ce·CE(z, data token) + l1·‖softmax z − p‖₁, weighted and summed; p over the whole vocabulary, the
    label's term dropped where the draft vocabulary lacks it."""
    ids = range(len(head)) if vocabulary.draft_ids is None else vocabulary.draft_ids.tolist()
    p = (rows.last @ head.T).softmax(-1)[:, list(ids)]
    base = rows.hidden @ vocabulary.lm_rows.T
    sums = []
    for z, weight, (ce, l1) in zip([base, *(base + x @ vocabulary.readout.T for x in latents)], rows.weights, mix):
        q = z.softmax(-1)
        total = 0.0 * z.sum()
        for i, label in enumerate(rows.labels.tolist()):
            nll = -q[i, ids.index(label)].log() if label in ids else 0.0
            total = total + weight[i] * (ce * nll + l1 * (q[i] - p[i]).abs().sum())
        sums.append(total)
    return torch.stack(sums)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from([None, [4], [0, 3, 4, 8, 10]]),
    st.lists(st.sampled_from(MIXES), min_size=4, max_size=4),
    st.booleans(),
)
@example(0, 3, 2, None, MIXES, False)
@example(1, 3, 2, [1, 2], MIXES, False)
@example(9, 4, 3, None, MIXES, True)
@example(9, 4, 3, [0, 3, 4, 8, 10], MIXES, False)
def test_chunked_is_plain(n, chunk, feeds, draft_ids, mix, zero_weights):
    """Value and gradient in hidden, latents and readout; the sums come back with unequal factors, as a step gives."""
    rows, vocabulary, latents, head = make(n, feeds, draft_ids, zero_weights=zero_weights)
    inputs, factors = [rows.hidden, latents, vocabulary.readout], torch.arange(1.0, 2 + feeds).double()
    total, found = chunked_loss(rows, vocabulary, latents, mix, chunk, factors.tolist())
    wanted = plain_loss(rows, vocabulary, latents, head, mix)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12)  # fp64, sums of at most nine rows
    assert torch.allclose(total, wanted @ factors, rtol=0, atol=1e-12)
    for ours, theirs in zip(
        *(torch.autograd.grad(3 * x, inputs, allow_unused=True) for x in (total, wanted @ factors))
    ):
        ours, theirs = (torch.zeros(()).double() if g is None else g for g in (ours, theirs))
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)  # as above


def test_gradcheck():
    rows, vocabulary, latents, _ = make(5, 2)

    def run(hidden, latents, readout):
        return chunked_loss(replace(rows, hidden=hidden), replace(vocabulary, readout=readout), latents, MIXES, 2)[0]

    assert torch.autograd.gradcheck(run, (rows.hidden, latents, vocabulary.readout))


def test_frozen_inputs_get_no_gradient():
    """A frozen drafter: the head's gradient is the same, the drafter's is absent."""
    rows, vocabulary, latents, _ = make(5, 2)
    wanted = torch.autograd.grad(chunked_loss(rows, vocabulary, latents, MIXES, 2)[0], [latents, vocabulary.readout])
    frozen = replace(rows, hidden=rows.hidden.detach())
    chunked_loss(frozen, vocabulary, latents, MIXES, 2)[0].backward()
    assert rows.hidden.grad is None
    assert torch.equal(latents.grad, wanted[0]) and torch.equal(vocabulary.readout.grad, wanted[1])


def test_no_head():
    """A plain drafter has no readout; its sum is the first one."""
    rows, vocabulary, latents, head = make(5, 0)
    _, found = chunked_loss(rows, Vocabulary(vocabulary.lm_rows, None), latents, MIXES[:1], 2)
    assert torch.allclose(found, plain_loss(rows, vocabulary, latents, head, MIXES[:1]), rtol=0, atol=1e-12)  # fp64


def test_sign_of_zero_is_zero():
    """Where q equals p the L1 part has no slope: q = (¼,¼,¼,¼), p = (¼,¼,½,0) pulls at the last two only."""
    z, label, inside = torch.zeros(1, 4), torch.tensor([0]), torch.tensor([True])
    one = torch.ones(1)
    same, other = torch.full((1, 4), 0.25), torch.tensor([[0.25, 0.25, 0.5, 0.0]])
    assert torch.equal(token_loss(z, label, label, inside, same, None, one, True)[1], torch.zeros(1, 4))
    assert torch.equal(
        token_loss(z, label, label, inside, other, None, one, True)[1], torch.tensor([[0.0, 0.0, -0.25, 0.25]])
    )


def test_reduced_vocabulary_needs_the_normaliser():
    rows, vocabulary, latents, _ = make(3, 1, [0, 2])
    with pytest.raises(ValueError, match="log_norm"):
        chunked_loss(replace(rows, log_norm=None), vocabulary, latents, MIXES)


# --- narrow types -----------------------------------------------------------------------------------------------------


def overlapping(overlap: float, n=6, vocab=4096):
    """bf16 logits z, t [n,vocab] with Σ min(softmax z, softmax t) near `overlap`."""
    torch.manual_seed(1)
    t, noise = torch.randn(2, n, vocab) * torch.tensor([2.0, 1.0])[:, None, None]
    low, high = 0.0, 4.0
    for _ in range(30):
        mid = (low + high) / 2
        shared = torch.minimum(t.softmax(-1), (t + mid * noise).softmax(-1)).sum(-1).mean()
        low, high = (mid, high) if shared > overlap else (low, mid)
    return (t + low * noise).bfloat16(), t.bfloat16()


def logit_gradient(z, t, mix):
    """∂/∂z through the chunked loss: a unit latent for each row makes the readout's gradient that of the logits."""
    n = len(z)
    unit = torch.eye(n, dtype=z.dtype)
    readout = z.T.contiguous().requires_grad_()
    # `last` reads the target's logits off lm_rows, hidden = 0 adds nothing to z
    rows = Rows(torch.zeros_like(unit), t.argmax(-1), unit, None, torch.ones(2, n).double())
    total, _ = chunked_loss(rows, Vocabulary(t.T.contiguous(), readout), unit[None], [(0.0, 0.0), mix], 4)
    total.backward()
    return float(total), readout.grad.T.double()


@pytest.mark.parametrize("overlap", [0.5, 0.7, 0.88, 0.95, 0.98])
@pytest.mark.parametrize("mix", [(1.0, 0.0), (0.0, 1.0), (0.1, 0.9)], ids=["ce", "l1", "both"])
def test_narrow_logits_keep_value_and_gradient(overlap, mix):
    """Against fp64 from the same logits: fp32 loses nothing that shows, bf16 only what storing a gradient in it costs.
    With softmaxes in bf16 L1's gradient would be lost just where the drafter is good."""
    z, t = overlapping(overlap)
    value, exact = logit_gradient(z.double(), t.double(), mix)
    wide_value, wide = logit_gradient(z.float(), t.float(), mix)

    def error(found):
        return float((found - exact).norm() / exact.norm())

    assert wide_value == pytest.approx(value, rel=1e-6)
    # where q is p to rounding, the sign of L1's slope flips: that grows with the overlap
    assert error(wide) < (1e-5 if overlap <= 0.7 or not mix[1] else 1e-3)
    assert error(logit_gradient(z, t, mix)[1]) < 1e-2  # the gradient itself is stored in bf16: 2⁻⁹ a number
    q, p = z.softmax(-1), t.softmax(-1)
    sign = (q - p).sign()
    if mix == (0.0, 1.0) and overlap >= 0.88:
        assert error((q * (sign - (q * sign).sum(-1, keepdim=True))).double()) > 2e-2  # what bf16 softmaxes would give


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("label", [0, 1])
def test_extreme_logits_stay_finite(dtype, label):
    """z of ±60 against a one-hot p, right and wrong."""
    z, t = torch.full((2, 4, 512), -60.0, dtype=dtype)
    z[:, label], t[:, 0] = 60, 60
    assert logit_gradient(z, t, (0.1, 0.9))[1].isfinite().all()
    z, t, half = z.float(), t.float(), torch.full((4,), 0.5)
    value, _ = token_loss(z, z.argmax(-1), t.argmax(-1), torch.ones(4), t.softmax(-1), half, half, False)
    assert float(value) == pytest.approx(4 * 0.5 * (120 + 2) * label, abs=1e-3)  # fp32 near 240


# --- memory -----------------------------------------------------------------------------------------------------------


def test_nothing_of_vocabulary_size_is_kept():
    """What the loss keeps has the size of its inputs, which it does not keep: nothing that grows with the rows comes on
    top, and nothing larger than a chunk is ever made. The plain loss keeps it all."""
    chunk, vocab, beyond = 16, 4096, {}
    for n in (64, 512):
        rows, vocabulary, latents, head = make(n, 2, vocab=vocab, dtype=torch.float32)
        parts = [rows, vocabulary, latents]
        kept = kept_bytes(lambda r=rows, v=vocabulary, x=latents: chunked_loss(r, v, x, MIXES, chunk)[0], parts)
        beyond[n] = kept - sum(x.nbytes for x in (rows.hidden, latents, vocabulary.readout))
        with Largest() as largest:
            chunked_loss(rows, vocabulary, latents, MIXES, chunk)[0].backward()
        assert largest.size <= 4 * chunk * vocab
        unchunked = kept_bytes(lambda r=rows, v=vocabulary: F.cross_entropy(r.hidden @ v.lm_rows.T, r.labels), parts)
        assert unchunked >= 4 * n * vocab  # the count sees what a loss without recompute keeps
    assert beyond[64] == beyond[512] == 0


# --- terms ------------------------------------------------------------------------------------------------------------


def test_weight_moves_linearly_over_its_share():
    term = Term("anchor", "none", weight=[0.6, 0.2], over=0.5)
    assert [term.weight_at(x) for x in (0, 0.25, 0.5, 1)] == pytest.approx([0.6, 0.4, 0.2, 0.2])
    assert Term("refined", "gold", weight=0.3).weight_at(0.7) == 0.3


@pytest.mark.parametrize("decay", [4.0, 7.0, None])
def test_slot_weights(decay):
    wanted = [1.0 if decay is None else math.exp(-(k - 1) / decay) for k in range(1, 6)]
    assert Term("refined", "gold", decay=decay).slot_weights(5).tolist() == pytest.approx(wanted, rel=1e-15)


@pytest.mark.parametrize(
    "wrong",
    [
        {"feed": "silver"},
        {"loss": {"kl": 1.0}},
        {"rounds": 0},
        {"over": 0.0},
        {"over": 1.5},
        {"decay": 0.0},
        {"weight": [1]},
    ]
    + [{"rounds": 2, "feed": "gold"}, {"weight": [0.1, 0.2, 0.3]}, {"weight": float("nan")}],
)
def test_bad_terms_are_refused(wrong):
    """The message names the term, the setting and the value."""
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match="objective term refined: ") as caught:
        Term(**{"name": "refined", "feed": "self", **wrong})
    assert name in str(caught.value) and str(value) in str(caught.value)
