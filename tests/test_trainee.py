"""What training measures is what decoding does; the same loss compiled, in bf16, and after reloading elsewhere."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from disk import save_model
from safetensors.torch import load_file
from toys import HEADS, XPRESS, V, make_rows, make_target, make_trainee

from xpress import Target, checkpoint, load
from xpress.anchors import draw, lay_out
from xpress.batches import collate
from xpress.decode import generate
from xpress.features import OnlineFeatures
from xpress.loss import Pass
from xpress.recipe import TrainSettings
from xpress.refine import refine, sweep
from xpress.train import Run

EXACT = dict(rtol=0, atol=1e-10)  # fp64, sums in another order
HALF = tuple(range(0, V, 2))


@pytest.fixture(scope="module")
def wide():
    return make_target(dtype=torch.float64)


@pytest.fixture
def passes_seen(monkeypatch):
    """The passes over the vocabulary, one a forward."""
    seen = []

    class Spy(Pass):
        def run(self, *args):
            seen.append(self)
            return super().run(*args)

    monkeypatch.setattr("xpress.trainee.Pass", Spy)
    return seen


def blocks_of(trainee) -> list:
    """From now on, the blocks that the drafter makes."""
    made, make = [], trainee.drafter.block
    trainee.drafter.block = lambda *args: made.append(make(*args)) or made[-1]
    return made


def laid_out(trainee, *lengths):
    """Rows of these lengths, all candidates, features of the trainee's target -> arguments of forward."""
    batch, drafter = collate(make_rows(*lengths), 99), trainee.drafter
    anchors = lay_out(batch, *draw(batch, 99, 0, 0), drafter.config.num_draft)
    target = drafter.target
    source = OnlineFeatures(target, drafter.layer_ids, drafter.draft_ids is not None, target.dtype)
    return batch, anchors, *source(batch)


def count_leading(ids, anchors) -> list[int]:
    """Blocks whose first k draft tokens are right, for each k."""
    found = [0] * ids.shape[1]
    for right in ((ids == anchors.labels[anchors.valid]) & anchors.mask[anchors.valid]).tolist():
        run = right.index(False) if False in right else len(right)
        for k in range(run):
            found[k] += 1
    return found


# --- training and the solvers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_ids", [None, HALF], ids=["whole", "reduced"])
@pytest.mark.parametrize("layout", ["infill", "next"])
@pytest.mark.parametrize("name", HEADS)
def test_drafts_of_training_are_those_of_the_solvers(wide, passes_seen, name, layout, draft_ids):
    """After K = 0 … 3 passes, at any chunk size; what is counted as accepted is the leading run that is right."""
    trainee = make_trainee(wide, name, layout=layout, draft_ids=draft_ids, chunk=7)
    blocks, given = blocks_of(trainee), laid_out(trainee, 13, 8)
    outcome = trainee(*given)
    [block], drafts, anchors = blocks, passes_seen[0].drafts, given[1]
    solved = [refine(trainee.head, block, K).ids for K in range(4)]
    assert len(drafts) == 4 and all(torch.equal(d.view_as(ids), ids) for d, ids in zip(drafts, solved))
    assert not torch.equal(solved[0], solved[1])  # the head moves tokens
    assert outcome.accepted.keys() == {"drafter", "head"}
    # random drafts are hardly ever right: labels that mostly agree with them show what is counted
    for place, key in ((0, "drafter"), (3, "head")):
        labels = anchors.labels.clone()
        agree = torch.rand(solved[place].shape) < 0.8
        labels[anchors.valid] = torch.where(agree, solved[place], labels[anchors.valid])
        relabelled = replace(anchors, labels=labels)
        told = trainee(given[0], relabelled, *given[2:]).accepted[key].tolist()
        drafts = passes_seen[-1].drafts[place].view(agree.shape)
        assert told == count_leading(drafts, relabelled) and sum(told) > 0


@pytest.mark.parametrize("passes", [1, 2, 4, 6])
def test_passes_measure_beyond_the_rounds_that_are_trained(wide, passes_seen, passes):
    """max(rounds, passes) sweeps are measured; losses and gradients are those without."""
    terms = [XPRESS[0], type(XPRESS[1])("consistency", "self", 0.3, rounds=2), XPRESS[2]]
    trainee = make_trainee(wide, terms=terms, chunk=7)
    blocks, given = blocks_of(trainee), laid_out(trainee, 13, 8)
    plain, measured = trainee(*given), trainee(*given, passes=passes)
    ids = refine(trainee.head, blocks[0], max(2, passes)).ids
    assert torch.equal(passes_seen[1].drafts[-1].view_as(ids), ids)
    assert torch.equal(plain.sums, measured.sums) and torch.equal(plain.rounds, measured.rounds)
    gradients = (torch.autograd.grad(x.total, list(trainee.parameters())) for x in (plain, measured))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


@pytest.mark.parametrize("layout", ["infill", "next"])
def test_rounds_are_the_losses_of_each_pass(wide, layout):
    """Σ w·(0.1·CE + 0.9·L1) of round r, the head fed with what the solver drafts after r − 1 passes."""
    trainee = make_trainee(wide, layout=layout)
    blocks, (batch, anchors, features, _) = blocks_of(trainee), laid_out(trainee, 13, 8)
    rounds = trainee(batch, anchors, features, None).rounds
    [block], keep, G = blocks, anchors.valid, trainee.drafter.config.num_draft
    w = torch.exp(-torch.arange(G).double() / 4) * anchors.mask[keep]
    sequence = keep.nonzero()[:, 0]
    p = wide.lm_head(features.last[sequence[:, None], anchors.judge[keep]]).softmax(-1)
    for r in range(3):
        latent = sweep(trainee.head, trainee.head.prepare(block.hidden), block, refine(trainee.head, block, r).ids)
        z = block.base_logits() + trainee.head.readout(latent)
        nll = -z.log_softmax(-1).gather(-1, anchors.labels[keep][..., None])[..., 0]
        wanted = (w * (0.1 * nll + 0.9 * (z.softmax(-1) - p).abs().sum(-1))).sum()
        assert torch.allclose(rounds[r], wanted, **EXACT)
    assert len(rounds) == 3


# --- other arithmetic -------------------------------------------------------------------------------------------------


def value_and_gradient(trainee, given):
    found = trainee(*given)
    return found, torch.autograd.grad(found.total, list(trainee.parameters()))


def test_autocast_is_close_to_fp32(target):
    """bf16 products over fp32 weights: sums within 1 %, gradients in fp32 that point the same way."""
    trainee = make_trainee(target, chunk=128, scale=1.0, std=0.05)
    given = laid_out(trainee, 13, 8)
    exact, wanted = value_and_gradient(trainee, given)
    with torch.autocast("cpu", torch.bfloat16):
        found, gradients = value_and_gradient(trainee, given)
    assert torch.allclose(found.sums, exact.sums, rtol=1e-2) and not torch.equal(found.sums, exact.sums)
    assert torch.equal(found.weights, exact.weights)
    ours, theirs = (torch.cat([g.flatten() for g in each]) for each in (gradients, wanted))
    assert all(g.dtype == torch.float32 for g in gradients)
    assert torch.cosine_similarity(ours, theirs, 0) > 0.98


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_compiled_parts_give_the_same_loss(target):
    """Value and gradient, for another number of rows too, so that nothing is tied to one shape."""
    trainee = make_trainee(target, chunk=64, scale=1.0, std=0.05, layers=1)
    cases = [laid_out(trainee, 13, 8), laid_out(trainee, 6)]
    wanted = [value_and_gradient(trainee, given) for given in cases]
    trainee.compile_parts()
    for given, (exact, gradients) in zip(cases, wanted):
        found, ours = value_and_gradient(trainee, given)
        assert torch.allclose(found.sums, exact.sums, rtol=1e-6)
        assert torch.allclose(found.rounds, exact.rounds, rtol=1e-6)
        assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(ours, gradients))
    torch.compiler.reset()


# --- trained, saved, loaded elsewhere ---------------------------------------------------------------------------------

ELSEWHERE = """
import json, sys, torch
from xpress import Target, generate, load
for target, run in zip(sys.argv[1::2], sys.argv[2::2]):
    target = Target.from_pretrained(target)
    found = load(run, target)
    told = [generate(target, [5, 9, 7], found.drafter, found.head, K, max_new_tokens=12) for K in (0, 2)]
    print(json.dumps([[answer.ids for answer in told], [r.num_accepted for r in told[1].rounds]]))
"""


def test_a_trained_checkpoint_decodes_the_same_in_another_process(tmp_path):
    """Tied and untied targets: each saved tensor is the trained one, none is the target's, and the tokens are those of
    the trainer's own objects."""
    arguments, wanted = [], []
    for tied in (False, True):
        folder, out = tmp_path / f"target-{tied}", tmp_path / f"run-{tied}"
        save_model(folder, tie_word_embeddings=tied)
        target = Target.from_pretrained(str(folder))
        assert (target.lm_head.weight.data_ptr() == target.embedding.weight.data_ptr()) == tied
        trainee = make_trainee(target, mask_token_id=299, chunk=128)
        source = OnlineFeatures(target, trainee.drafter.layer_ids, False, target.dtype)
        run = Run(out, trainee, make_rows(9, 14), source, TrainSettings(steps=2, batch_size=2, lr=1e-2))
        run.fit({"target": {"fingerprint": target.fingerprint()}})
        saved = load_file(out / "checkpoint" / checkpoint.WEIGHTS)
        trained = dict(trainee.drafter.named_parameters())
        trained |= {f"head.{name}": weight for name, weight in trainee.head.named_parameters()}
        assert saved.keys() == trained.keys()
        assert all(torch.equal(saved[name], weight) for name, weight in trained.items())
        shapes = {tuple(weight.shape) for name, weight in saved.items() if not name.startswith("head.")}
        assert (target.vocab_size, target.hidden_size) not in shapes
        here = load(out, target)
        for drafter, head in ((trainee.drafter.eval(), trainee.head.eval()), (here.drafter, here.head)):
            told = [generate(target, [5, 9, 7], drafter, head, K, max_new_tokens=12) for K in (0, 2)]
            wanted.append([[answer.ids for answer in told], [r.num_accepted for r in told[1].rounds]])
        assert wanted[-1] == wanted[-2]
        wanted.pop()
        arguments += [str(folder), str(out)]
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == wanted
