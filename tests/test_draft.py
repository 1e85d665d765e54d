"""Three ways to choose draft tokens, one meaning: whole rows, the sampling readout, and the greedy readouts."""

import copy
import importlib

import pytest
import torch
from torch import nn
from toys import HEADS, random_block

from xpress.draft import Drawing, Rows
from xpress.fused import fused
from xpress.heads import Refiner
from xpress.kernels import Screen
from xpress.refine import refine
from xpress.sampling import GREEDY, Noise, Sampling
from xpress.sampling_check import Case, check_sampling
from xpress.verify import verify

REFINE = importlib.import_module("xpress.refine")
SOME = torch.tensor([3, 17, 40, 41, 60, 72, 96])
PASSES = [0, 1, 2, 4, "auto", "sequential"]


def block_and_head(layout="infill", draft_ids=None, N=3):
    block = random_block(N=N, B=5, layout=layout, draft_ids=draft_ids)
    head = Refiner(97, block.hidden.shape[2], 5, 16, None if draft_ids is None else len(draft_ids)).double()
    for weight in head.parameters():
        nn.init.normal_(weight, std=0.2)
    return block, head.requires_grad_(False)


@pytest.mark.parametrize("layout", ["infill", "next"])
@pytest.mark.parametrize("draft_ids", [None, SOME])
@pytest.mark.parametrize("passes", PASSES)
def test_the_sampling_readout_is_the_whole_rows(monkeypatch, layout, draft_ids, passes):
    """The same tokens of the same q, and verification asks it for less and decides the same."""
    block, head = block_and_head(layout, draft_ids)
    how, noise = Sampling(0.7), Noise((5, 6, 7), round=2)
    scores = torch.randn(3, block.num_draft + 1, 97, dtype=torch.float64)
    whole = refine(head, block, passes, how, noise)
    monkeypatch.setattr(REFINE, "chooser", Drawing)
    drawn = refine(head, block, passes, how, noise)
    assert type(drawn.drawn) is not type(whole.drawn)
    assert drawn.ids.equal(whole.ids) and drawn.passes.equal(whole.passes)
    assert torch.allclose(drawn.q(), whole.q(), rtol=1e-9, atol=0)
    of_tokens = whole.q().gather(-1, whole.ids[..., None])[..., 0]
    assert torch.allclose(drawn.drawn.of_tokens().double(), of_tokens, atol=1e-6)
    for row in range(block.num_draft):
        assert torch.allclose(drawn.q_row(torch.full((3,), row)), whole.q()[:, row], rtol=1e-9, atol=0)
    one, other = (verify(draft, scores, how, noise) for draft in (whole, drawn))
    assert one.num_accepted.equal(other.num_accepted) and one.bonus.equal(other.bonus)


@pytest.mark.parametrize("passes", [0, 1, "auto"])
def test_decoding_with_the_sampling_readout_follows_the_target(monkeypatch, passes):
    monkeypatch.setattr(REFINE, "chooser", Drawing)
    assert check_sampling([Case(f"drawing {passes}", passes=passes)], 4096)["passed"]


def test_whole_rows_are_kept_where_top_k_cuts_them():
    block, _ = block_and_head()
    how, noise = Sampling(0.7, top_k=3), Noise((1, 2, 3))
    assert isinstance(REFINE.chooser(block, how, noise), Rows)
    with pytest.raises(ValueError, match="one seed for each block"):
        refine(None, block, 0, how, Noise((1, 2)))


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", ["refiner", "markov", "gated", "rnn"])
def test_a_screened_head_drafts_the_same(bits, name):
    block = random_block(N=3, B=5, dtype=torch.float32)
    head = HEADS[name](97, block.hidden.shape[2], 5, 16).requires_grad_(False)
    for weight in head.parameters():
        nn.init.normal_(weight, std=0.2)
    for passes in PASSES:
        head.screen = None
        exact = refine(head, block, passes)
        head.screen = Screen.of(head.readout.weight, bits)
        assert refine(head, block, passes).ids.equal(exact.ids)


def test_top_c_of_the_whole_vocabulary_is_exact_and_of_few_ids_is_not():
    block, head = block_and_head(N=16)
    exact = refine(head, block, "auto").ids
    for C, same in ((97, True), (1, False)):
        head.top_c = C
        assert refine(head, block, "auto").ids.equal(exact) is same
    assert refine(head, block, "auto").ids.equal(refine(None, block).ids)  # one candidate: the drafter's own choice


def test_a_copy_of_a_head_begins_without_buffers():
    block, head = block_and_head()
    head = head.folded()
    ids = fused(head, block, 2, GREEDY, None).ids
    copied = copy.deepcopy(head)
    assert "_steps" in vars(head) and "_steps" not in vars(copied)
    nn.init.zeros_(copied.readout.weight)
    assert refine(head, block, 2).ids.equal(ids) and refine(copied, block, 2).ids.equal(refine(None, block).ids)


@pytest.mark.parametrize("passes", [0, 1, 3, 4, 7, "auto"])
@pytest.mark.parametrize("name", ["refiner", "markov"])
def test_the_fused_step_is_the_solver(name, passes):
    """Tokens, passes and settled passes, of batches that change in size, with weights changed in place between."""
    for N in (3, 1, 3, 2):
        block = random_block(N=N, B=5, seed=N)
        head = HEADS[name](97, block.hidden.shape[2], 5, 16).double().requires_grad_(False)
        for weight in head.parameters():
            nn.init.normal_(weight, std=0.2)
        head = head.folded()
        for _ in range(2):
            quick, plain = fused(head, block, passes, GREEDY, None), refine(head, block, passes)
            assert quick.ids.equal(plain.ids) and quick.passes.equal(plain.passes)
            assert quick.settled is plain.settled is None or quick.settled.equal(plain.settled)
            head.readout.weight.mul_(-0.5)
