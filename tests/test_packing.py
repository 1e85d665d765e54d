"""Rows that share a sequence train as if each had its own: loss, gradient, first steps of a run."""

from pathlib import Path

import pytest
import torch
from toys import SHAPES, V, make_rows, make_target, make_trainee

from xpress.anchors import draw, lay_out
from xpress.batches import collate
from xpress.data import Row
from xpress.features import OnlineFeatures
from xpress.recipe import TrainSettings
from xpress.train import Run

EXACT = dict(rtol=0, atol=1e-10)  # fp64, sums in another order


@pytest.fixture(scope="module", params=SHAPES)
def wide(request):
    return make_target(request.param, dtype=torch.float64)


def forward(trainee, batch, backward=True):
    """Loss of all candidates' blocks -> blocks, Σ w·ℓ, Σ w, and the gradient of every parameter."""
    drafter = trainee.drafter
    anchors = lay_out(batch, *draw(batch, 99, 0, 0), drafter.config.num_draft)
    source = OnlineFeatures(drafter.target, drafter.layer_ids, drafter.draft_ids is not None, drafter.target.dtype)
    found = trainee(batch, anchors, *source(batch))
    gradients = torch.autograd.grad(found.total, list(trainee.parameters())) if backward else None
    return anchors, found.sums, found.weights, gradients


# documents of 6 and 10 tokens in 16; several packed sequences of unequal fill, so that there is padding
TWO, SEVEN = [[0, 1]], [[0, 1], [2], [3, 4, 5], [6]]


@pytest.mark.parametrize("sequences", [TWO, SEVEN], ids=["two", "seven"])
def test_packed_is_unpacked(wide, sequences):
    """In value and in every gradient, through the real target's forward; blocks of all documents are there."""
    rows = make_rows(5, 9, 4, 3, 11, 2, 7, prompt=1)[: sum(map(len, sequences))]
    trainee, lone = make_trainee(wide, chunk=128), collate(rows, 99)
    packed = collate([[rows[i] for i in own] for own in sequences], 99)
    anchors, sums, weights, gradients = forward(trainee, packed)
    wanted, *rest = forward(trainee, lone)
    assert anchors.num_blocks == wanted.num_blocks == sum(len(row.response_ids) - 1 for row in rows)
    assert torch.allclose(sums, rest[0], **EXACT) and torch.allclose(weights, rest[1], **EXACT)
    assert len(gradients) > 20 and all(g.any() for g in gradients)
    assert all(torch.allclose(a, b, **EXACT) for a, b in zip(gradients, rest[2], strict=True))
    parts = [forward(trainee, collate([row], 99), backward=False)[1] for row in rows]
    assert torch.allclose(sums, sum(parts), **EXACT)


def test_a_reduced_vocabulary_packs_as_well():
    """Its normaliser is read at the same places."""
    rows = make_rows(5, 9, 4, prompt=1)
    trainee = make_trainee(make_target(dtype=torch.float64), draft_ids=tuple(range(0, V, 3)), chunk=128)
    (_, packed, _, up), (_, lone, _, down) = (forward(trainee, collate(s, 99)) for s in ([rows], rows))
    assert torch.allclose(packed, lone, rtol=1e-6)  # log_norm is kept in fp32
    assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(up, down, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", ["infill", "next"])
@pytest.mark.parametrize("kind", SHAPES)
def test_another_document_1_leaves_document_2_to_the_bit(kind, layout, dtype):
    """Every token of the first document changed, the second one's loss and gradients the same; and the count sees it
    where document 1 is supervised too."""
    target = make_target(kind, dtype=dtype)
    trainee = make_trainee(target, layout=layout, chunk=128)
    one, two = make_rows(5, 9, prompt=1)
    ids = [*one.prompt_ids, *one.response_ids]
    other = [3 + (i + 7) % (V - 4) for i in ids]
    silent = [forward(trainee, collate([[Row("a", own, []), two]], 99)) for own in (ids, other)]
    assert silent[0][0].num_blocks == 8 and all(x != y for x, y in zip(ids, other))
    assert torch.equal(silent[0][1], silent[1][1])
    assert all(torch.equal(a, b) for a, b in zip(silent[0][3], silent[1][3]))
    loud = [forward(trainee, collate([[Row("a", own[:1], own[1:]), two]], 99), False)[1] for own in (ids, other)]
    assert not torch.equal(*loud)


@pytest.mark.parametrize("block_size", [2, 4, 7])
@pytest.mark.parametrize("layout", ["infill", "next"])
def test_no_block_spans_a_boundary(target, layout, block_size):
    """Labels past the document's end are masked and nothing else; the context lies in the document."""
    trainee = make_trainee(target, layout=layout, block_size=block_size)
    batch = collate([make_rows(5, 9, prompt=1)], 99)
    G = trainee.drafter.config.num_draft
    anchors = lay_out(batch, *draw(batch, 99, 0, 0), G)
    assert anchors.index[0].tolist() == [1, 2, 3, 4, *range(7, 15)]
    for a, place in enumerate(anchors.index[0].tolist()):
        start, end = (0, 6) if place < 6 else (6, 16)
        left = min(G, end - 1 - place)
        assert anchors.mask[0, a].tolist() == [True] * left + [False] * (G - left)
        assert anchors.labels[0, a, :left].tolist() == batch.ids[0, place + 1 : place + 1 + left].tolist()
        assert anchors.visible[0, a].nonzero()[:, 0].tolist() == list(range(start, place))
        assert int(anchors.positions[0, a]) == place - start
        assert int(anchors.before_ids[0, a]) == int(batch.ids[0, place - 1])


def test_a_packed_run_starts_as_an_unpacked_one():
    """The same rows and all anchors: three optimiser steps, their losses and gradient norms, and the weights after."""
    rows, told, weights = make_rows(9, 4, 12, 7, 5, 16), [], []
    for packing, batch_size in ((False, 6), (True, 3)):
        target = make_target(dtype=torch.float64)
        trainee = make_trainee(target, chunk=128)
        settings = TrainSettings(
            steps=3, batch_size=batch_size, max_anchors=99, max_length=27, packing=packing, lr=1e-3, warmup=0.0
        )
        source = OnlineFeatures(target, trainee.drafter.layer_ids, False, target.dtype)
        run = Run(Path("nowhere"), trainee, rows, source, settings)
        batch, anchors = run.micro_batches(0)[0]
        assert sorted(name for own in batch.row_ids for name in own) == [f"row-{i}" for i in range(6)]
        assert len(batch.ids) == batch_size and anchors.num_blocks == sum(len(row.response_ids) - 1 for row in rows)
        facts = [run.train_step(measure=True) for _ in range(3)]
        told.append([value for step in facts for name, value in step.items() if "loss/" in name or "norm" in name])
        weights.append([weight.detach().clone() for weight in trainee.parameters()])
    assert len(told[0]) >= 12 and told[0] == pytest.approx(told[1], rel=1e-9)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-7) for a, b in zip(*weights))  # AdamW divides by small moments
