"""Rows become batches: documents, packing, the order of an epoch, and which rows are held out."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from toys import PROMPTS, make_rows, make_target

from xpress.anchors import PADDING, candidates, draw
from xpress.batches import OPEN, Order, collate, pack
from xpress.data import Row, coverage, hold_out, load_rows
from xpress.generation import generate_data
from xpress.prompts import Prompt

# --- collate ----------------------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=3), st.integers(1, 12))
def test_collate_lays_documents_back_to_back(shapes, max_length):
    """Token for token: ids, restarting positions, document numbers, what is supervised; then padding that goes on in
    the last document's positions, so that no target takes it for a new one."""
    names = iter(range(99))
    sequences = [
        [Row(f"r{next(names)}", list(range(10, 10 + p)), list(range(50, 50 + n))) for p, n in own] for own in shapes
    ]
    batch = collate(sequences, max_length)
    assert batch.row_ids == [tuple(row.id for row in rows) for rows in sequences]
    T = batch.ids.shape[1]
    lengths = []
    for s, rows in enumerate(sequences):
        wanted = []
        for d, row in enumerate(rows):
            own = [(i, p, d, p >= len(row.prompt_ids)) for p, i in enumerate(row.prompt_ids + row.response_ids)]
            wanted += own[:max_length]
        lengths.append(len(wanted))
        last = wanted[-1][1]
        wanted += [(0, last + 1 + i, PADDING, False) for i in range(T - len(wanted))]
        columns = (batch.ids, batch.positions, batch.documents, batch.supervised)
        assert list(zip(*(x[s].tolist() for x in columns))) == wanted
    assert T == max(lengths)


def test_a_row_is_a_sequence_of_its_own():
    rows = make_rows(4, 7)
    one, listed = collate(rows, 99), collate([[row] for row in rows], 99)
    assert one.row_ids == listed.row_ids == [("row-0",), ("row-1",)]
    assert all(torch.equal(getattr(one, n), getattr(listed, n)) for n in ("ids", "positions", "documents"))


# --- pack -------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=300), st.integers(8, 64))
@example([], 8)
@example([60] * (OPEN + 9) + [4] * 200, 64)  # more sequences than are held open
def test_pack_laws(lengths, capacity):
    """Every document once and whole, in its order within a sequence; none over capacity; two neighbours that would fit
    together are never both alone; the same every time."""
    packed = pack(lengths, capacity)
    assert sorted(i for documents in packed for i in documents) == list(range(len(lengths)))
    size = [min(n, capacity) for n in lengths]  # what collate leaves of a longer one
    filled = [sum(size[i] for i in documents) for documents in packed]
    assert all(0 < n <= capacity for n in filled)
    assert all(documents == sorted(documents) for documents in packed)
    assert packed == pack(lengths, capacity)
    if len(packed) <= OPEN:  # first fit: at most one sequence is half empty
        assert sum(2 * n <= capacity for n in filled) <= 1


def test_packing_fills_sequences():
    """Answers of all lengths up to a quarter of the capacity: nearly full, against an eighth one a sequence."""
    lengths = torch.randint(1, 257, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    packed = pack(lengths, 1024)
    assert sum(lengths) / (1024 * len(packed)) > 0.97
    assert sum(lengths) / (1024 * len(lengths)) < 0.2


# --- order ------------------------------------------------------------------------------------------------------------


def order(rows, per_step=3, seed=0, max_length=24, packing=False) -> Order:
    return Order(rows, per_step, seed, max_length, packing)


ROWS = make_rows(*(3 + 7 * i % 11 for i in range(23)))


@pytest.mark.parametrize("packing", [False, True])
def test_an_epoch_takes_every_row_at_most_once(packing):
    """What is left over is less than one step; another epoch or seed has another order, and leaves out other rows."""
    made, epochs = order(ROWS, packing=packing), {}
    for step in range(60):
        epoch, chosen = made.sequences(step)
        assert len(chosen) == 3
        epochs.setdefault(epoch, []).extend(row.id for sequence in chosen for row in sequence)
    complete = sorted(epochs)[:-1]
    assert len(complete) >= 3 and complete == list(range(len(complete)))
    for epoch in complete:
        assert len(set(epochs[epoch])) == len(epochs[epoch])
        left = len(made._epoch(epoch)) % 3
        assert left < 3 and (packing or len(epochs[epoch]) == 23 - left)
    assert epochs[0] != epochs[1] and set().union(*(epochs[e] for e in complete)) == {row.id for row in ROWS}
    assert [r.id for s in order(ROWS, seed=1, packing=packing).sequences(0)[1] for r in s] != epochs[0][:3]


@pytest.mark.parametrize("packing", [False, True])
def test_any_step_can_be_asked_first(packing):
    """A resumed run asks for step 17 at once; a straight one has asked for all before it."""
    straight = order(ROWS, packing=packing)
    steps = [straight.sequences(step) for step in range(40)]
    for step in (0, 7, 17, 39):
        assert order(ROWS, packing=packing).sequences(step) == steps[step]
    backwards = order(ROWS, packing=packing)
    assert [backwards.sequences(step) for step in range(39, -1, -1)] == steps[::-1]
    for step in range(40):
        epoch, place = straight.place(step)
        assert (epoch, place) == order(ROWS, packing=packing).place(step) and place < len(straight._epoch(epoch)) // 3
    places = [straight.place(step) for step in range(40)]
    assert places == sorted(set(places))  # one after another, none twice


@pytest.mark.parametrize("packing", [False, True])
def test_packed_steps_are_whole_rows_within_the_capacity(packing):
    """Under packing sequences hold several rows, and at most max_length tokens."""
    found = [sequence for step in range(12) for sequence in order(ROWS, packing=packing).sequences(step)[1]]
    assert all(sum(len(r.prompt_ids) + len(r.response_ids) for r in sequence) <= 24 for sequence in found)
    assert (max(map(len, found)) > 1) == packing


@pytest.mark.parametrize("packing, rows", [(False, 2), (True, 4)])
def test_an_epoch_of_less_than_a_step_is_refused(packing, rows):
    """Two rows for three sequences; or four short ones that packing makes two of."""
    with pytest.raises(ValueError, match=f"{rows} rows make 2 sequences, .*3 = batch_size.*lower batch_size"):
        order(make_rows(*[9] * rows), packing=packing)
    assert order(make_rows(*[9] * 3)).sequences(5)[0] == 5  # just enough: an epoch a step


# --- draw -------------------------------------------------------------------------------------------------------------


def drawn(sequences, max_anchors, epoch=0, span=1) -> dict[str, list[int]]:
    """Row id -> its anchors, counted from the start of the row."""
    batch = collate(sequences, 99)
    index, valid = draw(batch, max_anchors, 0, epoch, span)
    found = {}
    for s, names in enumerate(batch.row_ids):
        for d, name in enumerate(names):
            own = index[s][valid[s] & (batch.documents[s, index[s]] == d)]
            found[name] = (own - int((batch.documents[s] == d).nonzero()[0, 0])).tolist()
    return found


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_packed_documents_draw_what_they_draw_alone(epoch):
    """Exactly, where max_anchors suffices for all; else each a part of it, max_anchors a sequence together."""
    rows = make_rows(8, 12, 5)
    alone = {name: places for row in rows for name, places in drawn([[row]], 6, epoch).items()}
    packed = drawn([rows[:2], rows[2:]], 6, epoch)
    assert packed["row-2"] == alone["row-2"]
    assert all(set(packed[name]) <= set(alone[name]) for name in alone)
    assert len(packed["row-0"]) + len(packed["row-1"]) == 6
    assert drawn([rows], 99, epoch) == {k: v for row in rows for k, v in drawn([[row]], 99, epoch).items()}
    assert drawn([rows[1::-1], rows[2:]], 6, epoch) == packed  # nor does the order within a sequence count


def test_every_candidate_is_drawn_as_often_as_any_other():
    """Over many epochs, within five standard deviations of a fair draw."""
    batch = collate(make_rows(11), 99)  # 10 candidates
    counts = Counter(i for epoch in range(600) for i in draw(batch, 3, 0, epoch)[0][0].tolist())
    assert sorted(counts) == list(range(3, 13))
    assert all(abs(n - 180) < 5 * (600 * 0.3 * 0.7) ** 0.5 for n in counts.values())


@pytest.mark.parametrize("span", [1, 2, 4, 30])
def test_span_keeps_whole_blocks_only(span):
    """Positions whose next `span` tokens lie in the same document and are supervised; more than there are: none."""
    rows = make_rows(6, 3)
    batch = collate([rows], 99)
    batch = replace(batch, supervised=batch.supervised & (torch.arange(15) != 6))
    document = batch.documents[0].tolist()
    good = [
        all(i + k < 15 and bool(batch.supervised[0, i + k]) and document[i + k] == document[i] for k in range(span + 1))
        for i in range(15)
    ]
    assert candidates(batch, span)[0].tolist() == good
    index, valid = draw(batch, 99, 0, 0, span)
    assert index[valid].tolist() == [i for i in range(15) if good[i]]


# --- held-out rows ----------------------------------------------------------------------------------------------------


def test_held_out_rows_do_not_depend_on_the_order():
    rows = make_rows(*[4] * 20)
    train, held = hold_out(rows, 6)
    assert len(held) == 6 and sorted(r.id for r in train + held) == sorted(r.id for r in rows)
    assert train == [row for row in rows if row not in held]  # in the order given
    for other in (rows[::-1], rows[7:] + rows[:7]):
        again = hold_out(other, 6)
        assert {r.id for r in again[1]} == {r.id for r in held} and {r.id for r in again[0]} == {r.id for r in train}
    more = hold_out(rows, 9)[1]
    assert {r.id for r in held} < {r.id for r in more}
    assert hold_out(rows, 0) == (rows, [])


def test_conversations_stay_together(tmp_path):
    """Turns of real conversations, as generate_data writes and load_rows reads them: later turns have names of their
    own, and two conversations that open alike share their first."""
    talks = [Prompt(f"t{i}", "toy", [f"Tell {i}", "More", f"And {i % 2}?"]) for i in range(8)]
    talks += [Prompt("twin", "toy", ["Tell 3", "Other"]), *PROMPTS]
    generate_data(make_target(), talks, tmp_path, max_new_tokens=4)
    rows = load_rows(tmp_path)
    assert len(rows) == 8 * 3 + 1 + len(PROMPTS)
    opening = {row.id: row.conversation or row.id for row in rows}
    assert Counter(Counter(opening.values()).values()) == {3: 7, 4: 1, 1: len(PROMPTS)}
    for count in range(1, 13):
        train, held = hold_out(rows, count)
        assert count <= len(held) <= count + 3 and not {r.id for r in train} & {r.id for r in held}
        assert not {opening[r.id] for r in train} & {opening[r.id] for r in held}


def test_several_answers_to_one_prompt_stay_together(tmp_path):
    """Rows of one name get names of their own, whatever names are taken, and lie on one side."""
    file = tmp_path / "rows.jsonl"
    ids = ["a", "a~2", "a", "a", "b", "b", "c", "d", "e"]
    file.write_text("".join(f'{{"id": "{i}", "prompt_ids": [5], "response_ids": [6, 7]}}\n' for i in ids))
    rows = load_rows(file)
    assert [r.id for r in rows] == ["a", "a~2", "a~3", "a~4", "b", "b~2", "c", "d", "e"]
    for count in range(1, 5):
        held = {r.id for r in hold_out(rows, count)[1]}
        assert ({"a", "a~3", "a~4"} <= held or not {"a", "a~3", "a~4"} & held) and len({"b", "b~2"} & held) != 1
    strangers = [Row(f"c#{i}", [5], [6, 7]) for i in range(8)]  # names of others' making say nothing
    assert len(hold_out(strangers, 3)[1]) == 3


def test_more_than_half_held_out_is_refused():
    rows = make_rows(*[4] * 7)
    assert len(hold_out(rows, 3)[1]) == 3
    with pytest.raises(ValueError, match="eval_rows=4: .*more than half of the 7 rows.*eval_every=0"):
        hold_out(rows, 4)
    one_talk = [replace(row, conversation="row-0") for row in rows]
    with pytest.raises(ValueError, match=r"eval_rows=1: .*conversations.*\(7\)"):
        hold_out(one_talk, 1)


def test_coverage_counts_answer_tokens():
    rows = [Row("a", [9, 9], [1, 2, 2]), Row("b", [1], [3])]
    assert coverage(rows, [2, 9]) == 0.5 and coverage(rows, [1, 2, 3]) == 1 and coverage(rows, []) == 0
    assert coverage([], [1]) == 0
