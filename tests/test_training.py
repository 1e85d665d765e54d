"""Training sees what decoding sees: the same logits, the same positions, the same documents, and a loss per token."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from toys import XPRESS, V, anchors_at, count_batch, make_rows, make_run, make_target, make_trainee, plain

from xpress.anchors import PADDING, Batch, candidates, draw, lay_out
from xpress.batches import collate
from xpress.data import Row
from xpress.decode import generate
from xpress.drafter import Context
from xpress.features import OnlineFeatures
from xpress.heads.base import corrected_logits
from xpress.loss import Pass, Term
from xpress.refine import refine, sweep
from xpress.target import Features

EXACT = dict(rtol=0, atol=1e-10)  # fp64, sums in another order


@pytest.fixture(scope="module")
def wide():
    """The toy target in fp64, so that equal means equal."""
    return make_target(dtype=torch.float64)


@pytest.fixture
def losses(monkeypatch):
    """What reaches the loss: a list of passes, one a forward, each with the latents that it was given."""
    seen = []

    class Spy(Pass):
        def run(self, latents_of, chunk):
            made = [[] for _ in self.tensors]

            def keep(i, fed, part):
                made[i].append(latents_of(i, fed, part))
                return made[i][-1]

            super().run(keep, chunk)
            self.latents = [torch.cat(parts) for parts in made if parts]
            seen.append(self)
            return self

    monkeypatch.setattr("xpress.trainee.Pass", Spy)
    return seen


def logits_of(found: Pass) -> torch.Tensor:
    """[1 + F,n,V_draft]: the drafter's, then under each feed."""
    base = found.rows.hidden @ found.vocabulary.lm_rows.T
    return torch.stack([base, *(base + z @ found.vocabulary.readout.T for z in found.latents)])


def run_forward(trainee, target, batch, anchors, passes=0):
    """One forward on the real target's features, in its own dtype."""
    reduced = trainee.drafter.draft_ids is not None
    features, log_norm = OnlineFeatures(target, trainee.drafter.layer_ids, reduced, target.dtype)(batch)
    return trainee(batch, anchors, features, log_norm, passes=passes)


# --- training and decoding are one ------------------------------------------------------------------------------------


HEADS = ["refiner", "markov", "rnn", "domino"]
CASES = [(head, layout, None) for head in HEADS for layout in ("infill", "next")]


@pytest.mark.parametrize("head, layout, draft_ids", [*CASES, ("refiner", "next", tuple(range(0, V, 2)))])
def test_train_logits_are_decode_logits(wide, losses, head, layout, draft_ids):
    """Slot by slot: the drafter, the head under given tokens, each self-fed round; and the target that judges them."""
    trainee = make_trainee(wide, head, layout=layout, draft_ids=draft_ids)
    drafter, head, G = trainee.drafter, trainee.head, trainee.drafter.config.num_draft
    x, places = [5, 6, 7, *plain(wide, [5, 6, 7], 20)], [4, 8, 11, 12]
    batch = collate([Row("x", x[:3], x[3:])], 99)
    run_forward(trainee, wide, batch, anchors_at(batch, places[:3], G))
    trained = logits_of(losses[0]).unflatten(1, (3, G))
    judged = wide.lm_head(losses[0].rows.last).unflatten(0, (3, G))

    _, hidden = wide.prefill([x[:4]], drafter.layer_ids)
    drafter.reset()
    for i, place in enumerate(places[:3]):
        block = drafter.draft(Context([x[: place + 1]], hidden))
        labels = torch.tensor([x[place + 1 : place + 1 + G]])
        base, state, prepared = block.base_logits(), None, head.prepare(block.hidden)
        decoded = [base, base.new_empty(base.shape)]
        for slot in range(drafter.layout.first_slot + G):
            latent, state = head.step(prepared, block.prev_ids(labels)[:, slot], slot, state)
            row = slot - drafter.layout.first_slot
            if row >= 0:
                decoded[1][:, row] = corrected_logits(base[:, row], latent, head.readout)
        for passes in range(3):
            latent = sweep(head, prepared, block, refine(head, block, passes).ids)
            decoded.append(corrected_logits(base, latent, head.readout))
        assert torch.allclose(trained[:, i], torch.cat(decoded), **EXACT)
        assert torch.allclose(judged[i], wide.score(block.anchor, labels)[0, :G], **EXACT)
        hidden = wide.keep([places[i + 1] - place])


def test_terms_and_normaliser(wide, losses):
    """Σ w·ℓ and Σ w of each term, self-fed rounds as their mean. A label outside a reduced vocabulary costs nothing,
    its weight still counts, and the block goes on behind it."""
    batch, terms = collate(make_rows(12), 99), [replace(term, loss={"ce": 1.0}) for term in XPRESS]
    kept = batch.ids[0, [5, 7]].tolist()
    draft_ids = sorted({1, 2, *kept} - {int(batch.ids[0, 6])})
    trainee, anchors = make_trainee(wide, terms=terms, draft_ids=draft_ids), anchors_at(batch, [4], 3)
    sums, weights, _, rounds, _ = run_forward(trainee, wide, batch, anchors)
    none, gold, *own = -logits_of(losses[0]).log_softmax(-1)[:, [0, 2], [draft_ids.index(i) for i in kept]]
    w = torch.exp(-torch.arange(3).double() / 4)
    wanted = torch.stack([gold, sum(own) / 3, none]) @ w[[0, 2]]
    assert torch.allclose(sums, wanted, **EXACT)
    assert torch.allclose(rounds, torch.stack(own) @ w[[0, 2]], **EXACT)
    assert torch.allclose(weights, w.sum().expand(3), **EXACT)
    assert torch.equal(weights, trainee.weight_sums(anchors))
    rows = losses[0].rows
    assert torch.allclose(rows.log_norm.double(), wide.lm_head(rows.last).logsumexp(-1), rtol=1e-6)  # kept in fp32


def test_no_gradient_through_argmax(wide, losses):
    """The gradient of a self-fed term is that of feeding the same tokens as constants."""
    trainee, batch = make_trainee(wide, terms=[Term("consistency", "self", rounds=2)]), collate(make_rows(12), 99)
    anchors = anchors_at(batch, [4, 9], 3)

    def gradient(total):
        return [g for g in torch.autograd.grad(total, list(trainee.parameters()), allow_unused=True) if g is not None]

    found = gradient(run_forward(trainee, wide, batch, anchors).total)
    constants = losses[0].drafts[:2]
    given = make_trainee(wide, terms=[Term("refined", "gold")])
    given.drafter, given.head = trainee.drafter, trainee.head
    wanted = []
    for ids in constants:  # the labels of a gold term decide what is fed; CE is off, so they decide nothing else
        given.terms = [replace(given.terms[0], loss={"l1": 0.9})]
        fed = replace(anchors, labels=ids.view_as(anchors.labels))
        wanted.append(gradient(run_forward(given, wide, batch, fed).total))
    trainee.terms = [replace(trainee.terms[0], loss={"l1": 0.9})]
    found = gradient(run_forward(trainee, wide, batch, anchors).total)
    assert found and all(torch.allclose(g, (a + b) / 2, **EXACT) for g, a, b in zip(found, *wanted, strict=True))
    assert not torch.equal(*constants)  # the pass moves tokens


# --- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["infill", "next"])
def test_a_block_sees_only_what_lies_before_its_anchor(wide, losses, layout):
    """Blocks that overlap do not see each other, and features at or after the anchor move nothing."""
    trainee = make_trainee(wide, layout=layout)
    G = trainee.drafter.config.num_draft
    batch = collate(make_rows(21), 99)
    features = wide.features(batch.ids, batch.positions, trainee.drafter.layer_ids)

    def logits(places, at, moved=None):
        hidden = features.hidden.clone()
        if moved is not None:
            hidden[:, moved] += torch.randn_like(hidden[:, moved])
        trainee(batch, anchors_at(batch, places, G), replace(features, hidden=hidden), None)
        return logits_of(losses[-1]).unflatten(1, (len(places), G))[:, places.index(at)]

    together = logits([4, 6, 7], 6)
    assert torch.allclose(together, logits([6], 6), **EXACT)
    assert torch.equal(together, logits([4, 6, 7], 6, slice(6, None)))
    assert not torch.allclose(together, logits([4, 6, 7], 6, slice(5, 6)), atol=1e-3)  # the last one that it sees
    assert not torch.allclose(logits([4, 6, 7], 7), logits([4, 6, 7], 7, slice(6, None)), atol=1e-3)


@pytest.mark.parametrize("layout, wanted", [("infill", [6, 7, 8]), ("next", [6, 7, 8, 9])])
def test_labels_and_judges_read_off_count_data(target, losses, layout, wanted):
    """x[i] = i and target states that hold their own position: a shift by one can be seen by eye."""
    trainee, batch = make_trainee(target, layout=layout), count_batch()
    T, layers = batch.ids.shape[1], len(trainee.drafter.layer_ids)
    states = torch.arange(T).float()[None, :, None].expand(1, T, target.hidden_size)
    anchors = anchors_at(batch, [5], len(wanted))
    trainee(batch, anchors, Features(states.repeat(1, 1, layers), states), None)
    rows = losses[0].rows
    assert rows.labels.tolist() == wanted == anchors.labels[0, 0].tolist()
    assert rows.last[:, 0].tolist() == [i - 1 for i in wanted] == anchors.judge[0, 0].tolist()
    assert (int(anchors.anchor_ids), int(anchors.before_ids), int(anchors.positions)) == (5, 4, 5)


# --- anchors ----------------------------------------------------------------------------------------------------------

seldom, often = st.sampled_from([False] * 5 + [True]), st.sampled_from([True] * 3 + [False])


@settings(max_examples=60, deadline=None)
@example([(False, i != 3) for i in range(8)], 0, 20, 0)  # a gap inside a block
@given(
    st.lists(st.tuples(seldom, often), min_size=2, max_size=16),
    st.integers(0, 3),
    st.integers(1, 20),
    st.integers(0, 99),
)
def test_anchor_laws(marks, padding, max_anchors, seed):
    """Candidates, draws without replacement, masks and tokens before, against their definitions."""
    borders, supervised = zip(*marks)
    T, own = len(marks) - min(padding, len(marks) - 2), torch.tensor(borders).cumsum(0)
    own[T:] = PADDING
    batch = replace(count_batch(len(marks), own.tolist()), supervised=torch.tensor([supervised]))
    good = [i < T - 1 and own[i] == own[i + 1] and supervised[i] and supervised[i + 1] for i in range(len(marks))]
    assert candidates(batch)[0].tolist() == good
    index, valid = draw(batch, max_anchors, seed, 0)
    places = index[valid].tolist()
    assert places == sorted(set(places)) and len(places) == min(max_anchors, sum(good))
    assert all(good[i] for i in places)
    if not places:
        return
    anchors = lay_out(batch, index, valid, 3)
    for a, place in enumerate(places):
        inside = [i < T and own[i] == own[place] and supervised[i] for i in range(place + 1, place + 4)]
        assert anchors.mask[0, a].tolist() == [all(inside[: k + 1]) for k in range(3)]
        assert int(anchors.before_ids[0, a]) == (place - 1 if place and own[place - 1] == own[place] else place)


def test_anchors_do_not_depend_on_the_batch():
    """A row draws the same alone, beside others and in another order; another seed, epoch or row draws anew."""
    rows = make_rows(30, 20, 25)

    def drawn(rows, seed=0, epoch=0):
        index, valid = draw(collate(rows, 99), 6, seed, epoch)
        return {row.id: i[v].tolist() for row, i, v in zip(rows, index, valid)}

    assert drawn(rows) == drawn(rows[::-1]) == {k: v for row in rows for k, v in drawn([row]).items()}
    others = [drawn(rows, seed=1), drawn(rows, epoch=1), drawn([replace(rows[0], id="other")])]
    assert all(list(other.values())[0] != drawn(rows)["row-0"] for other in others)


# --- documents --------------------------------------------------------------------------------------------------------


def packed(ids, supervised) -> Batch:
    """Documents of 6 and 10 tokens in one row of 16."""
    batch = count_batch(16, [0] * 6 + [1] * 10)
    return replace(batch, ids=ids[None], supervised=torch.tensor([supervised]))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_documents_never_mix(kind):
    """In blocks, drafter and the real target's forward: document 2's loss does not know document 1, to the bit, and
    the packed loss is the token-weighted loss of both alone."""
    target = make_target(kind, dtype=torch.float64)
    trainee = make_trainee(target)
    ids = torch.randint(3, V - 1, (16,))

    def forward(batch):
        anchors = lay_out(batch, *draw(batch, 99, 0, 0), 3)  # every candidate
        return anchors, *run_forward(trainee, target, batch, anchors)[:2]

    batch = packed(ids, [True] * 16)
    anchors, sums, weights = forward(batch)
    label_at, block = (anchors.judge + 1)[anchors.mask], anchors.mask.nonzero()[:, 1]
    assert torch.equal(batch.documents[0, label_at], batch.documents[0, anchors.index[0, block]])
    alone = [
        forward(Batch(part[None], torch.arange(n)[None], torch.zeros(1, n).long(), torch.ones(1, n).bool(), [("x",)]))
        for n, part in ((6, ids[:6]), (10, ids[6:]))
    ]
    assert torch.allclose(sums, alone[0][1] + alone[1][1], **EXACT)
    assert torch.allclose(weights, alone[0][2] + alone[1][2], **EXACT)
    second = [False] * 6 + [True] * 10
    other = torch.cat([(ids[:6] + 7) % V, ids[6:]])
    assert torch.equal(forward(packed(ids, second))[1], forward(packed(other, second))[1])


# --- all of it together -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["infill", "next"])
def test_overfit_then_decode(tmp_path, wide, layout):
    """Half trained and fully: decoding accepts just what training measures at the same anchors, and in the end tau
    reaches what the training accuracy implies. A shift between the two would leave tau near 1."""
    rows = [Row(f"row-{i}", [i, 9, 4], plain(wide, [i, 9, 4], 22)) for i in range(3, 11)]
    terms = [replace(term, rounds=1, loss={"ce": 0.5, "l1": 0.5}) for term in XPRESS]  # learns by heart sooner
    trainee = make_trainee(wide, terms=terms, layout=layout, chunk=128, layers=1, std=0.05)
    run = make_run(tmp_path, trainee, wide, rows, steps=100, batch_size=8, lr=1e-2, max_anchors=20)
    G = trainee.drafter.config.num_draft

    def decoded(row, passes, name) -> list[int]:
        answer = generate(wide, row.prompt_ids, trainee.drafter, trainee.head, passes, max_new_tokens=16)
        accepted, batch = [r.num_accepted for r in answer.rounds], collate([row], 99)
        places = list(accumulate((len(r.tokens) for r in answer.rounds), initial=len(row.prompt_ids)))[:-1]
        found = run_forward(trainee, wide, batch, anchors_at(batch, places, G), passes).accepted[name]
        assert found.tolist() == [sum(n >= k for n in accepted) for k in range(1, G + 1)]
        return accepted

    for until, low, high in ((20, 1.2, 1 + 0.7 * G), (100, 1 + 0.9 * G, 1 + G)):
        while run.step < until:
            facts = run.train_step(measure=run.step == 99)
        for passes, name in ((0, "drafter"), (2, "head")):
            accepted = [n for row in rows for n in decoded(row, passes, name)]
            tau = 1 + sum(accepted) / len(accepted)
            assert low < tau <= high  # half trained it is neither nothing nor all
    assert facts["tau/head"] > low and tau >= facts["tau/head"] - 0.1  # blocks cut by the answer's end count less


def test_a_batch_without_blocks_weighs_nothing(target):
    """All invalid: sums and weights are zero, so is every gradient, nothing is NaN."""
    trainee, batch = make_trainee(target), collate(make_rows(8), 99)
    anchors = anchors_at(batch, [4], 3)
    anchors = replace(anchors, valid=~anchors.valid, mask=torch.zeros_like(anchors.mask))
    sums, weights, total, *_ = run_forward(trainee, target, batch, anchors)
    total.backward()
    assert sums.tolist() == weights.tolist() == [0.0] * 3
    assert all(w.grad is None or not w.grad.any() for w in trainee.parameters())
