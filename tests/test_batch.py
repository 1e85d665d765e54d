"""Batches: a row's output, rounds and drafts do not depend on what shares its batch; a finished row costs nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import HEADS, V, make_drafter, make_head, make_target, oracle

from xpress.decode import decode_batch, generate
from xpress.sampling import Sampling
from xpress.sequences import Sequences

PROMPTS = [[5], [1, 7], [3, 4, 5, 6, 7, 8, 9], [8] * 4, [2, 9]]


@pytest.fixture(scope="module")
def target():
    return make_target(dtype=torch.float64)


def together(target, prompts, *args, **options):
    ids, rounds = [[] for _ in prompts], [[] for _ in prompts]
    for step in decode_batch(target, prompts, *args, **options):
        for row, found in step.items():
            ids[row] += found.tokens
            if found.num_draft is not None:
                rounds[row].append(found)
    return ids, rounds


@pytest.mark.parametrize("layout", ["infill", "next"])
@pytest.mark.parametrize(
    "name, passes", [(None, 0), *((name, 2) for name in HEADS), ("refiner", "auto"), ("rnn", "sequential")]
)
@pytest.mark.parametrize(
    "how", [Sampling(), Sampling(0.8, top_k=20, top_p=0.9), Sampling(1.0, accept="match")], ids=str
)
def test_a_row_is_what_it_is_alone(target, name, passes, layout, how):
    """In fp64, tokens, acceptances, drafts and passes of every round; rows end at different rounds."""
    drafter = make_drafter(target, layout=layout)
    head = name and make_head(name, drafter, std=0.4)
    options = dict(sampling=how, max_new_tokens=14, stop_ids=[11, 40, 77])
    ids, rounds = together(target, PROMPTS, drafter, head, passes, seeds=[7, 8, 9, 10, 11], **options)
    for i, prompt in enumerate(PROMPTS):
        alone = generate(target, prompt, drafter, head, passes, seed=7 + i, **options)
        assert (ids[i], rounds[i]) == (alone.ids, alone.rounds)
    assert len({len(found) for found in rounds}) > 1
    if how.greedy:
        assert all(row[:1] == oracle(target.model, p, 1) for row, p in zip(ids, PROMPTS))


def test_plain_decoding_in_a_batch(target):
    ids, _ = together(target, PROMPTS, max_new_tokens=12)
    assert ids == [oracle(target.model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_fp32_rows_of_every_target(kind, attention):
    target = make_target(kind)
    target.model.set_attn_implementation(attention)
    drafter = make_drafter(target)
    ids, _ = together(target, PROMPTS, drafter, make_head("refiner", drafter, std=0.4), 1, max_new_tokens=12)
    assert ids == [oracle(target.model, prompt, 12) for prompt in PROMPTS]


def test_attention_without_masks_is_refused():
    target = make_target()
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="takes no mask; load it with sdpa, or batch_size=1"):
        target.sequences = Sequences([1, 2])
        target._mask()


def test_finished_rows_leave_the_batch(target):
    """The target and the drafter run as many rows as are open, and at the end none."""
    drafter, sizes = make_drafter(target), []
    stop = oracle(target.model, PROMPTS[0], 3)[2]
    steps = decode_batch(
        target,
        PROMPTS,
        drafter,
        max_new_tokens=9,
        stop_ids=[stop],
        observe=lambda draft, scores, verdict, rows: sizes.append((len(draft.ids), len(scores), len(rows))),
    )
    open_rows = [len(step) for step in steps]
    assert sizes == [(n, n, n) for n in open_rows[1:]]
    assert open_rows == sorted(open_rows, reverse=True) and open_rows[0] == 5 and 1 <= open_rows[-1] < 5


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_sequences_hold_what_was_committed(data):
    """Any lengths, any commits, rows leaving: each row reads its own states in order, and sees nothing else."""
    n = data.draw(st.integers(1, 4))
    kept, truth, counter = Sequences([0] * n), [[] for _ in range(n)], 1
    for _ in range(data.draw(st.integers(1, 12))):
        new = data.draw(st.integers(1, 70))
        kept.open(new)
        states = torch.arange(counter, counter + len(kept) * new).view(len(kept), new, 1)
        counter += states.numel()
        seen, visible = kept.write("x", states), kept.visible(states.device)
        for row, own in enumerate(truth):
            for i in range(new):
                assert seen[row, visible[row, i], 0].tolist() == own + states[row, : i + 1, 0].tolist()
        counts = [data.draw(st.integers(0, new)) for _ in truth]
        kept.commit(counts)
        for own, part, count in zip(truth, states[..., 0].tolist(), counts):
            own += part[:count]
        if len(truth) > 1 and data.draw(st.booleans()):
            rows = sorted(data.draw(st.sets(st.integers(0, len(truth) - 1), min_size=1)))
            kept.select(rows)
            truth = [truth[r] for r in rows]
        assert kept.lengths == [len(own) for own in truth]
        held = kept.held(states.device)
        assert [kept.read("x")[row, held[row], 0].tolist() for row in range(len(truth))] == truth


# --- stop strings and the context's end -------------------------------------------------------------------------------


class Letters:
    """Token i is one, two or three letters, so that strings cross tokens."""

    def decode(self, ids):
        return "".join("abc"[i % 3] * (1 + i % 2) for i in ids)


def test_a_stop_string_ends_where_plain_decoding_would(target):
    """The token that completes the string is the last, in the middle of an accepted run too."""
    target.tokenizer, drafter = Letters(), make_drafter(target)
    for prompt in PROMPTS:
        ids = oracle(target.model, prompt, 24)
        for at in (0, 3, 8, 15):
            string = Letters().decode(ids[max(0, at - 2) : at + 1])
            end = next(i for i in range(1, 25) if string in Letters().decode(ids[:i]))
            for options in ({}, {"drafter": drafter, "head": make_head("refiner", drafter), "passes": 1}):
                found = generate(target, prompt, max_new_tokens=24, stop_strings=("zz", string), **options)
                assert found.ids == ids[:end]


def test_stop_strings_are_checked(target):
    with pytest.raises(ValueError, match="stop_strings"):
        generate(target, [1], stop_strings=("",))
    target.tokenizer = None
    with pytest.raises(ValueError, match="need the target's tokenizer"):
        generate(target, [1], stop_strings=("x",))


def test_the_context_ends_the_answer():
    """A prompt may fill the context to its last token; the answer ends where no position is left."""
    target = make_target(dtype=torch.float64, max_position_embeddings=16)
    drafter, prompt = make_drafter(target), [4] * 13
    answer = oracle(target.model, prompt, 3)
    for options in ({}, {"drafter": drafter}):
        assert generate(target, prompt, max_new_tokens=9, **options).ids == answer
    assert generate(target, [4] * 15, drafter, max_new_tokens=9).ids == oracle(target.model, [4] * 15, 1)
    with pytest.raises(ValueError, match="16 tokens leaves no room in the target's context 16"):
        generate(target, [4] * 16)


def test_ids_are_in_the_vocabulary(target):
    ids, _ = together(target, PROMPTS, make_drafter(target), max_new_tokens=5, sampling=Sampling(3.0))
    assert all(0 <= i < V for row in ids for i in row)
