"""Drafts that are cut: decided before a token is seen, lossless at every cut, and the cut is all that is verified."""

import importlib
import json
from pathlib import Path

import pytest
import torch
import yaml
from disk import saved_target
from test_batch import PROMPTS, together
from toys import HEADS, V, make_confidence, make_drafter, make_head, make_target, oracle, random_block

from xpress import save, tables
from xpress.block import LAYOUTS
from xpress.decode import generate
from xpress.draft import Drawing, Rows
from xpress.lengths import ByConfidence, check_policy
from xpress.measuring import Measurement
from xpress.probe import Probe
from xpress.refine import refine
from xpress.sampling import GREEDY, Noise, Sampling
from xpress.verify import verify

REFINE = importlib.import_module("xpress.refine")
ROOT = Path(__file__).resolve().parents[1]
WAYS = [GREEDY, Sampling(0.8), Sampling(1.0, accept="match")]
SOME = torch.tensor([3, 17, 40, 41, 60, 72, 96])


@pytest.fixture(scope="module")
def target():
    return make_target(dtype=torch.float64, num_hidden_layers=3)


def parts(target, name="markov", layout="next", block_size=5, **settings):
    drafter = make_drafter(target, block_size, layout, layers=1, **settings)
    head = make_head(name, drafter, std=0.4)
    return drafter, head, make_confidence(head, drafter)


# --- the decision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("draft_ids", [None, SOME])
@torch.no_grad()
def test_a_token_is_kept_or_not_before_it_is_seen(target, layout, draft_ids):
    """Any change of tokens k … G leaves c_1 … c_k as they were, and so whether tokens 1 … k are kept; token k − 1 does
    count. c by the formula, slot by slot."""
    drafter, head, confidence = parts(target, layout=layout)
    block = random_block(N=16, B=5, layout=layout, draft_ids=draft_ids)
    policy, draft = ByConfidence(head, confidence, 0.5), refine(None, block)
    kept, G, moved = policy(draft), block.num_draft, 0
    assert len(kept.unique()) > 2
    for n in range(16):
        chances = []
        for k in range(G):
            prev = draft.ids[n, k - 1] if k else block.anchor[n]
            inputs = torch.cat([block.hidden[n, k + block.layout.first_slot], head.token_embed.weight[prev]])
            chances.append(float(torch.sigmoid(confidence.proj.weight[0] @ inputs + confidence.proj.bias)))
        assert torch.allclose(policy.of(draft)[n], torch.tensor(chances, dtype=torch.float64), rtol=1e-12)
        assert kept[n] == next((k for k, c in enumerate(chances) if c < 0.5), G)
    for k in range(G):
        other = refine(None, block)
        other.ids[:, k:] = (other.ids[:, k:] + torch.randint(1, V, (16, G - k))) % V
        assert policy.of(other)[:, : k + 1].equal(policy.of(draft)[:, : k + 1])
        assert policy(other).clamp(max=k + 1).equal(kept.clamp(max=k + 1))
        moved += not policy(other).equal(kept)
    assert moved


def test_a_head_alone_reads_hidden_states(target):
    """A confidence head without rows goes with any head, or with none, and nothing that was drafted moves the cut."""
    drafter, head, confidence = parts(target, "domino")
    assert confidence.rank == 0
    block = random_block(N=8, B=5, layout="next")
    for one in (head, None):
        policy = ByConfidence(one, confidence, 0.5)
        draft = refine(None, block)
        kept = policy(draft)
        draft.ids.random_(V)
        assert policy(draft).equal(kept) and len(kept.unique()) > 1


@pytest.mark.parametrize("threshold", [-0.1, 1.01, float("nan"), "0.5", True])
def test_a_threshold_is_a_probability(target, threshold):
    _, head, confidence = parts(target)
    with pytest.raises(ValueError, match="threshold=.*probability from 0"):
        ByConfidence(head, confidence, threshold)


def test_what_cannot_be_cut_is_refused(target):
    drafter, head, confidence = parts(target)
    with pytest.raises(ValueError, match="no confidence head; choose length_policy=full"):
        ByConfidence(head, None, 0.5)
    for other, said in (
        (None, "no head has no token_embed"),
        (make_head("domino", drafter), "DominoHead has no token_embed"),
        (make_head("refiner", drafter).folded(), r"FoldedRefiner has no token_embed; .* before head.folded\(\)"),
        (make_head("markov", drafter, rank=4), "MarkovHead has rows of 4 numbers"),
    ):
        with pytest.raises(ValueError, match=f"reads rows of 8 numbers, and {said}"):
            ByConfidence(other, confidence, 0.5)
    for policy, threshold, said in (
        ("half", None, "known are full, confidence"),
        ("full", 0.5, "length_policy=full has none"),
        ("confidence", None, "needs threshold"),
    ):
        with pytest.raises(ValueError, match=said):
            check_policy(policy, threshold)
    for numbers in (-1, 6):
        with pytest.raises(ValueError, match="a draft of 5 tokens cannot be cut"):
            generate(target, [1], drafter, lengths=lambda draft, n=numbers: torch.full((len(draft.ids),), n))


# --- verification -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("chooser", [Rows, Drawing])
@pytest.mark.parametrize("draft_ids", [None, SOME])
def test_a_cut_draft_is_judged_as_a_shorter_one(monkeypatch, how, chooser, draft_ids):
    """Each row as the block of one that drafted no more than it kept, whatever the longest of the batch is, and whether
    or not the rest is there."""
    if not how.greedy_draft:
        monkeypatch.setattr(REFINE, "chooser", chooser)
    N, seen = 16, []
    block, kept = random_block(N=N, B=5, draft_ids=draft_ids), torch.arange(N) % 4
    draft = refine(None, block, 0, how, Noise(tuple(range(N)), 3))
    likely = torch.nn.functional.one_hot(torch.cat([draft.ids, draft.ids[:, :1]], 1), V) * torch.rand(N, 1, 1) * 8
    scores = torch.randn(N, 5, V).double() + likely  # from rows that say anything to rows that follow the draft
    for length in (3, 4):
        found = verify(draft.cut(kept, length), scores[:, : length + 1], how, Noise(tuple(range(N)), 3))
        for n in range(N):
            own = int(kept[n])
            alone = refine(None, block[n : n + 1], 0, how, Noise(n, 3)).cut(kept[n : n + 1], own)
            one = verify(alone, scores[n : n + 1, : own + 1], how, Noise(n, 3))
            assert (one.num_accepted[0], one.bonus[0]) == (found.num_accepted[n], found.bonus[n])
            seen.append((int(found.num_accepted[n]), own))
    assert any(a == k > 0 for a, k in seen) and any(a < k for a, k in seen) and (0, 0) in seen


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", HEADS)
def test_greedy_output_is_plain_autoregression_at_every_threshold(target, name, layout):
    """And no round verifies more than the longest draft of its batch, accepts more than its own, or tells of more."""
    drafter, head, confidence = parts(target, name, layout)
    expected, taus, counts = [oracle(target.model, prompt, 12) for prompt in PROMPTS], [], set()
    for threshold in (0.0, 0.3, 0.5, 0.7, 1.0):
        policy = ByConfidence(head, confidence, threshold)
        for batch in (PROMPTS[:1], PROMPTS[:3], PROMPTS):
            sizes = []

            def observe(draft, scores, verdict, rows, sizes=sizes):
                longest = int(draft.kept.max())
                assert draft.ids.shape[1] == longest == scores.shape[1] - 1
                assert (verdict.num_accepted <= draft.kept).all()
                sizes.append({row: int(own) for row, own in zip(rows, draft.kept)})

            ids, rounds = together(target, batch, drafter, head, 2, max_new_tokens=12, lengths=policy, observe=observe)
            assert ids == expected[: len(batch)]
            told = [{row: r[i].num_draft for row, r in enumerate(rounds) if i < len(r)} for i in range(len(sizes))]
            assert told == sizes
            flat = [r for row in rounds for r in row]
            assert all(len(r.drafted) == r.num_draft >= r.num_accepted for r in flat)
        counts |= {r.num_draft for r in flat}
        taus.append(sum(r.num_accepted for r in flat) / len(flat))
    assert len(counts) > 2 and taus[0] == max(taus)


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("name, passes", [("refiner", "auto"), ("markov", 1), ("rnn", "sequential")])
def test_threshold_0_is_full_drafts_round_by_round(target, name, passes, how):
    drafter, head, confidence = parts(target, name)
    options = dict(sampling=how, max_new_tokens=14, seeds=[7, 8, 9, 10, 11])
    full = together(target, PROMPTS, drafter, head, passes, **options)
    assert full == together(
        target, PROMPTS, drafter, head, passes, lengths=ByConfidence(head, confidence, 0.0), **options
    )
    half = together(target, PROMPTS, drafter, head, passes, lengths=ByConfidence(head, confidence, 0.6), **options)
    assert full[1] != half[1]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_row_is_cut_as_it_would_be_alone(target, how):
    """Though alone its verification is shorter. In fp64, every round of rows that end at different ones."""
    drafter, head, confidence = parts(target, "refiner")
    options = dict(sampling=how, max_new_tokens=14, lengths=ByConfidence(head, confidence, 0.6))
    ids, rounds = together(target, PROMPTS, drafter, head, 2, seeds=[7, 8, 9, 10, 11], **options)
    for i, prompt in enumerate(PROMPTS):
        alone = generate(target, prompt, drafter, head, 2, seed=7 + i, **options)
        assert (ids[i], rounds[i]) == (alone.ids, alone.rounds)
    assert len({r.num_draft for row in rounds for r in row}) > 2


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_draft_of_nothing_is_a_plain_step(target, how):
    drafter, head, confidence = parts(target)
    options = dict(sampling=how, max_new_tokens=9, seeds=[3, 4, 5, 6, 7])
    nothing = ByConfidence(head, confidence, 1.0)
    ids, rounds = together(target, PROMPTS, drafter, head, 1, lengths=nothing, **options)
    assert ids == together(target, PROMPTS, **options)[0]
    assert {(r.num_draft, r.num_accepted, len(r.tokens)) for row in rounds for r in row} == {(0, 0, 1)}


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_the_folded_head_is_cut_by_the_rows_of_the_plain_one(target, how):
    drafter, head, confidence = parts(target, "refiner")
    options = dict(sampling=how, max_new_tokens=12, lengths=ByConfidence(head, confidence, 0.55))
    plain, folded = (together(target, PROMPTS, drafter, one, 2, **options) for one in (head, head.folded()))
    assert plain == folded and len({r.num_draft for row in plain[1] for r in row}) > 1


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_the_static_loop_runs_every_row_and_emits_the_same(how):
    """Its graphs are made for one number of rows: the cut is in what may be accepted."""
    found, rows = [], set()
    for loop in ("plain", "static"):
        own = make_target("qwen3", dtype=torch.float64, loop=loop)
        drafter, head, confidence = parts(own)
        options = dict(sampling=how, max_new_tokens=12, lengths=ByConfidence(head, confidence, 0.5))
        look = {"observe": lambda draft, scores, *_: rows.add(scores.shape[1])} if loop == "static" else {}
        found.append(together(own, PROMPTS, drafter.requires_grad_(False), head, 1, **options, **look))
    assert found[0] == found[1] and rows == {drafter.config.num_draft + 1}
    assert len({r.num_draft for row in found[0][1] for r in row}) > 1


# --- measured ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS[:2], ids=str)
def test_only_tokens_that_were_verified_are_probed(target, how):
    """Rounds of token k are those that verified it; their sum is the number of verified tokens."""
    drafter, head, confidence = parts(target, "refiner")
    probe, rounds = Probe(how), []
    options = dict(sampling=how, max_new_tokens=20, lengths=ByConfidence(head, confidence, 0.5), observe=probe)
    for prompt in PROMPTS:
        rounds += generate(target, prompt, drafter, head, 2, **options).rounds
    found, slots = probe.of(0), range(drafter.config.num_draft)
    assert found["rounds"] == [sum(r.num_draft > k for r in rounds) for k in slots]
    assert found["reached"] == [sum(r.num_draft > k and r.num_accepted >= k for r in rounds) for k in slots]
    assert found["accepted"] == [sum(r.num_accepted > k for r in rounds) for k in slots]
    assert all(1 <= mean / n <= V for mean, n in zip(found["mean"], found["rounds"]) if n)
    assert any(a > b for a, b in zip(found["rounds"], found["rounds"][1:]))
    if not how.greedy:
        assert all(0 <= promised <= n for promised, n in zip(found["expected"], found["reached"]))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Checkpoints of a Markov head and a refiner with a confidence head beside it, and of a head without one."""
    at = tmp_path_factory.mktemp("cut")
    target, about = saved_target(at / "llama", num_hidden_layers=3)
    for name, kind, with_confidence in (
        ("markov", "markov", True),
        ("refiner", "refiner", True),
        ("old", "rnn", False),
    ):
        drafter = make_drafter(target, 5, layers=1)
        head = make_head(kind, drafter, std=0.3)
        save(
            at / name,
            drafter,
            head,
            about,
            confidence=make_confidence(head, drafter) if with_confidence else None,
        )
    save(at / "plain", make_drafter(target, 5, layers=1), None, about)
    (at / "alpaca.jsonl").write_text("".join(json.dumps({"instruction": f"Ask {i} of them"}) + "\n" for i in range(3)))
    return at


def measuring(world, out, *names, **changes) -> Measurement:
    raw = yaml.safe_load((ROOT / "configs" / "eval_tau.yaml").read_text())
    raw = {key: value for key, value in raw.items() if key not in ("defaults", "hydra")}
    raw |= {"checkpoint": [str(world / name) for name in names], "data_dir": str(world), "device": "cpu"}
    raw |= {"out": str(out), "bench": "alpaca", "max_new_tokens": 10, "passes": [1], "methods": ["drafter", "head"]}
    return Measurement(raw | {"length_policy": "confidence", "threshold": 0.5} | changes)


def test_drafts_of_heads_are_cut_and_counted(world, tmp_path):
    """A drafter drafts in full beside them; the rest of the lines and of the table goes on as before."""
    result = measuring(world, tmp_path / "cut", "markov", "refiner", batch_size=2).run()
    assert (result["protocol"]["length_policy"], result["protocol"]["threshold"]) == ("confidence", 0.5)
    (cell,) = result["cells"]
    rows, lines = {row["label"]: row for row in cell["methods"]}, []
    for line in map(json.loads, (tmp_path / "cut" / "responses.jsonl").read_text().splitlines()):
        lines.append(line)
        assert len(line["drafted"]) == len(line["accepted"]) == len(line["passes"])
        assert all(a <= n for a, n in zip(line["accepted"], line["drafted"]))
    for name in ("markov", "refiner"):
        row = rows[f"{name}: {name} c≥0.5 K=1"]
        own = [n for line in lines if line["method"] == row["label"] for n in line["drafted"]]
        assert row["drafted"] == sum(own) / len(own) and 0 < row["drafted"] < 4
        assert row["lossless"] and row["threshold"] == 0.5
        assert rows[f"{name}: drafter"]["drafted"] == 4 and rows[f"{name}: drafter"]["threshold"] is None
    shown = tables.main_table(tables.whole(result)["cells"][0])
    column = [title for title, _ in shown.columns].index("drafted")
    assert [row[column] for row in shown.rows][:2] == ["–", "4.00"]


def test_without_a_policy_nothing_is_cut_and_no_column_more_is_shown(world, tmp_path):
    full = measuring(world, tmp_path / "full", "refiner", length_policy="full", threshold=None).run()
    zero = measuring(world, tmp_path / "zero", "refiner", threshold=0).run()
    shown = []
    for result, label in ((full, "refiner K=1"), (zero, "refiner c≥0 K=1")):
        row = next(row for row in result["cells"][0]["methods"] if row["label"] == label)
        shown.append([row[key] for key in ("tau", "histogram", "drafted", "passes_used")])
        table = tables.main_table(tables.whole(result)["cells"][0])
        assert ("drafted" in [title for title, _ in table.columns]) is (result is zero)
    assert shown[0] == shown[1] and shown[0][2] == 4


@pytest.mark.parametrize(
    "names, changes, said",
    [
        (["markov", "old"], {}, "checkpoint=old: .*no confidence head; choose length_policy=full"),
        (["plain"], {}, "no checkpoint has one"),
        (["markov"], {"methods": ["drafter"]}, "methods leaves heads out"),
        (["markov"], {"threshold": None}, "needs threshold"),
        (["markov"], {"threshold": 2}, "threshold=2: must be a probability"),
        (["markov"], {"length_policy": "full"}, "length_policy=full has none"),
        (["markov"], {"length_policy": "short"}, "length_policy=short: known are full, confidence"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_the_start(world, tmp_path, names, changes, said):
    with pytest.raises(ValueError, match=said):
        measuring(world, tmp_path / "out", *names, **changes)
    assert not (tmp_path / "out").exists()


def test_another_threshold_is_another_measurement(world, tmp_path):
    measuring(world, tmp_path / "out", "markov").journal.close()
    with pytest.raises(ValueError, match="threshold: was 0.5, now 0.6"):
        measuring(world, tmp_path / "out", "markov", threshold=0.6, resume=True)
