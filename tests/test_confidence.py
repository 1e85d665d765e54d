"""The confidence term: what c is held against, where its gradient goes, and that it is saved, resumed and used."""

from dataclasses import asdict

import pytest
import torch
from test_trainee import blocks_of, laid_out, passes_seen  # noqa: F401
from toys import (
    DSPARK,
    HEADS,
    XPRESS,
    V,
    make_drafter,
    make_head,
    make_rows,
    make_run,
    make_target,
    make_trainee,
    oracle,
)

from xpress import ByConfidence, load, save
from xpress.decode import generate
from xpress.heads import ConfidenceHead
from xpress.heads.confidence import beside
from xpress.loss import Term
from xpress.parts import left_behind, make_confidence, make_terms
from xpress.trainee import Trainee

HALF = tuple(range(0, V, 2))
EXACT = dict(rtol=1e-9, atol=1e-10)
ALL = [*XPRESS, DSPARK[1]]


@pytest.fixture(scope="module")
def wide():
    return make_target(dtype=torch.float64)


def by_hand(trainee, batch, anchors, features, seen) -> torch.Tensor:
    """Σ w·BCE(c, a) from whole rows: p of the target over all V tokens, q of draft and head over its own and 0
    elsewhere, a = 1 − ½‖q − p‖₁. c from the formula. `seen`: the block that the drafter made."""
    drafter, head, confidence = trainee.drafter, trainee.head, trainee.confidence
    keep, target = anchors.valid, drafter.target
    labels, mask = anchors.labels[keep], anchors.mask[keep]
    prev = seen.prev_ids(labels)
    logits = seen.base_logits() + seen.rows(head(seen.hidden, prev))
    q = seen.over_target(logits.softmax(-1)).detach()
    last = features.last[keep.nonzero()[:, 0][:, None], anchors.judge[keep]]
    p = target.lm_head(last).softmax(-1)
    a = 1 - (q - p).abs().sum(-1) / 2
    inputs = seen.rows(seen.hidden)
    if confidence.rank:
        inputs = torch.cat([inputs, head.token_embed.weight[seen.rows(prev)]], -1)
    c = torch.sigmoid(inputs @ confidence.proj.weight[0] + confidence.proj.bias)
    k = torch.arange(seen.num_draft, dtype=torch.float64)
    weight = torch.exp(-k / 4) * mask
    return -(weight * (a * c.log() + (1 - a) * (1 - c).log())).sum()


@pytest.mark.parametrize("draft_ids", [None, HALF], ids=["whole", "reduced"])
@pytest.mark.parametrize("layout", ["infill", "next"])
@pytest.mark.parametrize("name", HEADS)
def test_the_term_is_the_formula_and_changes_no_other(wide, name, layout, draft_ids):
    """Its value and gradient, added to those of the rest; chunks smaller and larger than all rows."""
    plain = make_trainee(wide, name, XPRESS, layout=layout, draft_ids=draft_ids)
    arguments = laid_out(plain, 9, 6)
    found = plain(*arguments)
    found.total.backward()
    others = {n: w.grad for n, w in plain.named_parameters()}
    near = EXACT if draft_ids is None else dict(rtol=1e-5, atol=1e-6)  # the log-normaliser is kept in fp32
    for chunk in (5, 9999):
        trainee = make_trainee(wide, name, ALL, layout=layout, draft_ids=draft_ids, chunk=chunk)
        made = blocks_of(trainee)
        outcome = trainee(*arguments)
        outcome.total.backward()
        grads = {n: w.grad.clone() for n, w in trainee.named_parameters()}
        torch.testing.assert_close(outcome.sums[:-1], found.sums, **EXACT)
        assert outcome.weights[-1] == outcome.weights[0] > 0
        trainee.zero_grad()
        trainee(*arguments)
        wanted = by_hand(trainee, *arguments[:3], made[-1])
        torch.testing.assert_close(outcome.sums[-1], wanted.detach(), **near)
        wanted.backward()
        for n, weight in trainee.named_parameters():
            alone = torch.zeros_like(weight) if weight.grad is None else weight.grad
            torch.testing.assert_close(grads[n], alone + others.get(n, torch.zeros_like(weight)), **near)
        own = {n for n, weight in trainee.named_parameters() if weight.grad is not None and weight.grad.abs().sum() > 0}
        assert {"confidence.proj.weight", "confidence.proj.bias", "drafter.fc.weight"} <= own
        assert "head.readout.weight" not in own and ("head.token_embed.weight" in own) is (name != "domino")


def test_its_scale_is_its_own(wide):
    """And a frozen drafter is left alone."""
    trainee = make_trainee(wide, "markov", DSPARK, train_drafter=False)
    arguments = laid_out(trainee, 9)
    one, two = (trainee(*arguments, scale=[1.0, factor]) for factor in (1.0, 3.0))
    torch.testing.assert_close(two.total - one.total, 2 * one.sums[1], **EXACT)
    two.total.backward()
    assert all(weight.grad is None for weight in trainee.drafter.parameters())
    assert trainee.confidence.proj.weight.grad.abs().sum() > 0


def test_it_learns_how_likely_a_token_is_to_be_accepted(wide, tmp_path, passes_seen):  # noqa: F811
    """From chances of a half, most of the way to the least that the BCE can be, which is the entropy of a."""
    rows = make_rows(12, 12, 12, 12)
    trainee = make_trainee(wide, "markov", DSPARK, train_drafter=False)
    torch.nn.init.zeros_(trainee.confidence.proj.weight), torch.nn.init.zeros_(trainee.confidence.proj.bias)
    trainee.head.requires_grad_(False)
    run = make_run(tmp_path / "run", trainee, wide, rows, steps=60, batch_size=4, lr=5e-2, max_anchors=99)
    losses = [run.train_step()["loss/confidence"] for _ in range(60)]
    seen = passes_seen[-1]
    a, weight = seen.accepted, seen.rows.weights[1]
    least = -(weight * (a.xlogy(a) + (1 - a).xlogy(1 - a))).sum() / weight.sum()
    assert losses[0] == pytest.approx(0.693147, abs=1e-6)
    assert losses[-1] - least < 0.4 * (losses[0] - least)


def test_a_resumed_run_is_the_straight_one_and_its_checkpoint_cuts(target, tmp_path):
    """Weights and moments of the confidence head to the bit; every checkpoint has it; decoding by it stays lossless."""
    rows = make_rows(9, 12, 7, 10)

    def make(name, seed=1):
        trainee = make_trainee(target, "markov", DSPARK, seed=seed, layout="next")
        return make_run(tmp_path / name, trainee, target, rows[1:], rows[:1], eval_every=2, save_every=3, log_every=1)

    straight, first = make("a"), make("b")
    straight.fit({})
    while first.step < 3:
        first.train_step()
    first.save_state({})
    second = make("b", seed=7)
    assert second.resume() == [] and second.step == 3
    second.fit({})
    for (name, ours), theirs in zip(second.trainee.named_parameters(), straight.trainee.parameters()):
        assert torch.equal(ours, theirs), name
        moments = [run.optimizer.state[w] for run, w in ((second, ours), (straight, theirs))]
        assert all(torch.equal(moments[0][key], moments[1][key]) for key in moments[1]), name
    found = load(tmp_path / "b", target)
    assert torch.equal(found.confidence.proj.weight, straight.trainee.confidence.proj.weight)
    assert load(tmp_path / "b" / "best", target).confidence is not None
    chances = found.confidence.requires_grad_(False)(torch.randn(4, 32), found.head.token_embed.weight[:4].detach())
    policy = ByConfidence(found.head, found.confidence, float(chances.median()))
    response = generate(target, [5, 6], found.drafter, found.head, 1, max_new_tokens=12, lengths=policy)
    assert response.ids == oracle(target.model, [5, 6], 12)


def test_heads_beside_a_drafter_to_start_from_are_named_as_dropped(target, tmp_path):
    drafter = make_drafter(target)
    head, path = make_head("markov", drafter), str(tmp_path / "dspark")
    save(path, drafter, head, confidence=beside(head, 32))
    save(tmp_path / "bare", drafter)
    said = left_behind(path, target, head, beside(head, 32))
    assert said.startswith(f"drafter.init={path}: the head and the confidence head beside the drafter will not be used")
    assert said.endswith("a new head and a new confidence head will be trained")
    assert left_behind(path, target, head).endswith("; a new head will be trained")
    assert left_behind(path, target).endswith("the drafter alone will be trained")
    assert left_behind(str(tmp_path / "bare"), target, head) is None


# --- the setting ------------------------------------------------------------------------------------------------------

GOLD = {"name": "refined", "feed": "gold", "decay": 7.0}
BASE = {"name": "base", "feed": "none"}


def test_one_key_adds_the_term_with_the_gold_terms_decay(wide):
    terms = make_terms({"terms": [GOLD, BASE], "confidence": 0.5})
    assert [(t.feed, t.weight, t.decay) for t in terms][-1] == ("confidence", 0.5, 7.0)
    assert make_terms({"terms": [GOLD, BASE], "confidence": [0.0, 1.0]})[-1].weight_at(0.5) == 0.5
    drafter = make_drafter(wide)
    for name, rank in (("markov", 8), ("refiner", 8), ("domino", 0)):
        made = make_confidence(terms, make_head(name, drafter), drafter)
        assert isinstance(made, ConfidenceHead) and made.rank == rank and made.proj.in_features == 32 + rank
    for section in ({"terms": [GOLD]}, {"terms": [GOLD], "confidence": 0}, {"terms": [GOLD], "confidence": None}):
        off = make_terms(section)
        assert [asdict(t) for t in off] == [asdict(t) for t in terms[:1]]
        assert make_confidence(off, make_head("markov", drafter), drafter) is None


def test_what_cannot_be_trained_is_refused(wide):
    drafter = make_drafter(wide)
    head = make_head("markov", drafter)
    with pytest.raises(ValueError, match="objective.confidence=1.0: .* feed gold .*, or objective.confidence=0"):
        make_terms({"terms": [BASE], "confidence": 1.0})
    with pytest.raises(ValueError, match="feed=confidence has no token loss"):
        make_terms({"terms": [GOLD, {"name": "c", "feed": "confidence"}]})
    with pytest.raises(ValueError, match="belong together"):
        Trainee(drafter, head, DSPARK)
    with pytest.raises(ValueError, match="belong together"):
        Trainee(drafter, head, DSPARK[:1], confidence=beside(head, 32))
    with pytest.raises(ValueError, match="term with feed gold would have accepted"):
        Trainee(drafter, head, [Term("own", "self"), DSPARK[1]], confidence=beside(head, 32))
