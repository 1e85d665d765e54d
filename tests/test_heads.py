"""Heads and solvers on blocks of no model, in fp64: causality, the fixed point, and what must equal what.

Solvers are checked against `sweeps` and `serial`, two loops that call nothing but `head(hidden, prev_ids)`.
"""

from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toys import HEADS, D, V, random_block

from xpress.block import LAYOUTS
from xpress.heads import CorrectionHead, Refiner
from xpress.heads.base import corrected_logits
from xpress.refine import jacobi, refine
from xpress.sampling import argmax

R = 8
EXACT = dict(rtol=1e-12, atol=1e-12)  # fp64 rounding of short sums
LAST = torch.arange(V - 30, V)  # a reduced draft vocabulary without the low ids


class OwnHead(CorrectionHead):
    """The least that a head must write: `__init__` and `latent`. Slot k reads the mean of all tokens up to k."""

    def __init__(self, vocab_size, hidden_size, block_size, rank=R, draft_vocab_size=None):
        super().__init__()
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.readout = nn.Linear(rank, draft_vocab_size or vocab_size, bias=False)

    def latent(self, prepared, prev_ids):
        seen = torch.arange(1, prev_ids.shape[1] + 1, device=prev_ids.device)
        return torch.tanh(self.down(prepared) + self.token_embed(prev_ids).cumsum(1) / seen[:, None])


KINDS = {**HEADS, "own": OwnHead, "folded": lambda *sizes: Refiner(*sizes)}
FLAGS = ("use_h", "use_g", "use_mixer", "use_mlp")
ABLATIONS = {  # "refiner gx": the refiner with g and the mixer, without h and the MLP
    "refiner " + "".join(letter for letter, on in zip("hgxm", values) if on): dict(zip(FLAGS, values))
    for values in product((True, False), repeat=4)
}
FORMS = {**KINDS, **{name: partial(Refiner, **flags) for name, flags in ABLATIONS.items()}}


def head_for(name, block, std=0.5, seed=2, pure_slots=None):
    """A random head that fits the block, strong enough to overrule its base logits now and then."""
    B, V_draft = block.hidden.shape[1], V if block.draft_ids is None else len(block.draft_ids)
    pure_slots = block.layout.first_slot + 1 if pure_slots is None else pure_slots
    extra = {"gru_hidden_size": 12, "pure_slots": pure_slots} if name == "domino" else {}
    head = FORMS[name](V, D, B, R, V_draft, **extra).to(block.hidden.dtype)
    torch.manual_seed(seed)
    for weight in head.parameters():
        nn.init.normal_(weight, std=std)
    head.requires_grad_(False).bind(SimpleNamespace(embedding=nn.Embedding(V, D, dtype=block.hidden.dtype)))
    return head.folded() if name == "folded" else head


def pick(block, head, ids, row=slice(None)):
    """argmax(s + head(hidden, prev_ids(ids))), as written."""
    logits = block.base_logits() + block.rows(head(block.hidden, block.prev_ids(ids)))
    best = (logits == logits.max(-1, keepdim=True).values).long().argmax(-1)  # the lowest of equals
    return (best if block.draft_ids is None else block.draft_ids[best])[:, row]


def sweeps(block, head):
    """Draft tokens after 0, 1, … G + 1 whole passes."""
    best = block.base_logits().argmax(-1)
    trace = [best if block.draft_ids is None else block.draft_ids[best]]
    for _ in range(block.num_draft + 1):
        trace.append(pick(block, head, trace[-1]))
    return trace


def serial(block, head):
    ids = torch.full((len(block), block.num_draft), V - 1)
    for row in range(block.num_draft):
        ids[:, row] = pick(block, head, ids, row)
    return ids


every_head = pytest.mark.parametrize("name", KINDS)
every_form = pytest.mark.parametrize("name", FORMS)
both_layouts = pytest.mark.parametrize("layout", LAYOUTS)

# --- the law of a head ------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("j", range(5))
def test_causal_in_prev_ids(name, j):
    block = random_block(B=5)
    head, prev = head_for(name, block), torch.randint(V, (3, 5))
    other = prev.clone()
    other[:, j] = (prev[:, j] + 1) % V
    change = (head(block.hidden, other) - head(block.hidden, prev)).abs().amax((0, 2))
    assert (change[:j] <= 1e-12).all()  # fp64 rounding
    assert change[j:].max() > 1e-3


@every_form
@given(N=st.integers(1, 4), B=st.integers(2, 6), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=10, deadline=None)
def test_step_is_latent_slot_by_slot(name, N, B, seed, data):
    block = random_block(N, B, seed=seed)
    head = head_for(name, block, pure_slots=data.draw(st.integers(0, B)))
    prev, state = torch.randint(V, (N, B)), None
    prepared = head.prepare(block.hidden)
    whole = head.latent(prepared, prev)
    assert torch.allclose(head.readout(whole), head(block.hidden, prev), **EXACT)
    for k in range(B):
        z, state = head.step(prepared, prev[:, k], k, state)
        assert torch.allclose(z, whole[:, k], **EXACT)


def equation(name, head, hidden, prev):
    """The published equations, one slot at a time."""
    sigmoid, tanh, silu = torch.sigmoid, torch.tanh, nn.functional.silu
    latents, xs, s = [], [], torch.zeros(())
    for k in range(hidden.shape[1]):
        h, w = hidden[:, k], head._embedding.weight if name == "domino" else head.token_embed.weight[prev[:, k]]
        if name == "refiner":
            g = sum(hidden[:, j] for j in range(hidden.shape[1])) / hidden.shape[1]
            parts = [h @ head.down_h.weight.T, g @ head.down_g.weight.T, w]
            xs.append(torch.cat(parts, -1) @ head.in_proj.weight.T)
            u = xs[k] + sum(head.mix_l[:, k, j] * xs[j] for j in range(k + 1))
            gate = silu(u @ head.mlp_gate.weight.T) * (u @ head.mlp_up.weight.T)
            latents.append(u + gate @ head.mlp_down.weight.T)
        elif name == "markov":
            latents.append(w)
        elif name == "gated":
            latents.append(sigmoid(torch.cat([h, w], -1) @ head.gate_proj.weight.T + head.gate_proj.bias) * w)
        elif name == "rnn":
            joint = torch.cat([s.expand_as(w), w, h], -1) @ head.joint_proj.weight.T + head.joint_proj.bias
            gate, candidate, output = joint[:, :R], joint[:, R : 2 * R], joint[:, 2 * R :]
            s = sigmoid(gate) * s + (1 - sigmoid(gate)) * tanh(candidate)
            latents.append(tanh(output))
        elif name == "domino":
            state = head.gru(w[prev[:, : k + 1]])[1][0]  # after the token of this slot
            z = silu(torch.cat([h, state], -1) @ head.fuse.weight.T)
            latents.append(z if k >= head.pure_slots else 0 * z)
    return torch.stack(latents, 1) @ head.readout.weight.T


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_its_equation(name):
    block, prev = random_block(N=2, B=4), torch.randint(V, (2, 4))
    head = head_for(name, block)
    expected = equation(name, head, block.hidden, prev)
    assert torch.allclose(head(block.hidden, prev), expected, rtol=1e-12, atol=1e-10)  # rounding of logits up to 1e3


def test_the_refiner_without_hidden_inputs_mixer_and_mlp_is_the_markov_head():
    block, prev = random_block(), torch.randint(V, (3, 5))
    refiner, markov = head_for("refiner", block), head_for("markov", block)
    for weight in (refiner.down_h.weight, refiner.down_g.weight, refiner.mix_l, refiner.mlp_down.weight):
        nn.init.zeros_(weight)
    markov.token_embed.weight.copy_(refiner.token_embed.weight @ refiner.in_proj.weight[:, 2 * R :].T)
    markov.readout.weight.copy_(refiner.readout.weight)
    assert torch.allclose(refiner(block.hidden, prev), markov(block.hidden, prev), **EXACT)
    assert torch.equal(refine(refiner, block, "auto").ids, refine(markov, block, "auto").ids)


def test_with_every_part_off_nothing_but_the_markov_head_is_left():
    """By flags, not by zeros: the parts are not there, no slot hears of another, no state is kept."""
    block, prev = random_block(), torch.randint(V, (3, 5))
    refiner, markov = head_for("refiner ", block), head_for("markov", block)
    assert set(refiner.state_dict()) == {"token_embed.weight", "in_proj.weight", "readout.weight"}
    markov.token_embed.weight.copy_(refiner.token_embed.weight @ refiner.in_proj.weight.T)
    markov.readout.weight.copy_(refiner.readout.weight)
    assert torch.allclose(refiner(block.hidden, prev), markov(block.hidden, prev), **EXACT)
    for passes in (1, "auto", "sequential"):
        assert torch.equal(refine(refiner, block, passes).ids, refine(markov, block, passes).ids)
    assert refiner.step(refiner.prepare(block.hidden), prev[:, 0], 0, None)[1] is None


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablated_refiner_is_the_whole_one_with_that_part_zero(name):
    """Its parameters are the whole one's without those of the parts that are off, in the same order of columns."""
    block, prev, flags = random_block(), torch.randint(V, (3, 5)), ABLATIONS[name]
    whole, part = head_for("refiner", block), head_for(name, block)
    for weight, on in ((whole.down_h.weight, "use_h"), (whole.down_g.weight, "use_g"), (whole.mix_l, "use_mixer")):
        weight.mul_(flags[on])
    whole.mlp_down.weight.mul_(flags["use_mlp"])
    kept = dict(whole.state_dict())
    columns = zip(kept["in_proj.weight"].split(R, 1), (flags["use_h"], flags["use_g"], True))
    kept["in_proj.weight"] = torch.cat([column for column, on in columns if on], 1)
    gone = {"down_h": "use_h", "down_g": "use_g", "mix_l": "use_mixer"}
    gone |= {"mlp_gate": "use_mlp", "mlp_up": "use_mlp", "mlp_down": "use_mlp"}
    part.load_state_dict({key: w for key, w in kept.items() if flags.get(gone.get(key.split(".")[0]), True)})
    expected = whole(block.hidden, prev)
    assert torch.allclose(part(block.hidden, prev), expected, rtol=1e-12, atol=1e-10)  # rounding of logits up to 1e3
    assert {flag: part.config[flag] for flag in FLAGS} == flags


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_weight_of_an_ablated_refiner_is_used(name):
    """A parameter without a gradient stops a run on two processes."""
    block, prev = random_block(), torch.randint(V, (3, 5))
    head = head_for(name, block).requires_grad_(True)
    head(block.hidden, prev).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in head.parameters())


def test_the_flags_leave_the_start_of_the_whole_refiner_as_it_was():
    """One seed, one start: the draws come in the order mixer, then modules as they are made."""
    torch.manual_seed(7)
    head = Refiner(V, D, 5, R)
    torch.manual_seed(7)
    made = [nn.Embedding(V, R), *(nn.Linear(*s, bias=False) for s in ((D, R), (D, R), (3 * R, R), (R, 2 * R)))]
    made += [nn.Linear(*s, bias=False) for s in ((R, 2 * R), (2 * R, R), (R, V))]
    nn.init.normal_(torch.empty(R, 5, 5), std=0.02)
    for module, weight in zip(made, list(head.parameters())[1:], strict=True):
        assert torch.equal(nn.init.normal_(module.weight, std=0.02), weight)


@pytest.mark.parametrize("name", ABLATIONS)
@both_layouts
def test_the_folded_form_is_the_plain_form(layout, name):
    block, prev = random_block(layout=layout), torch.randint(V, (3, 5))
    plain = head_for(name, block, std=0.2)
    folded = plain.folded()
    one, two = plain.prepare(block.hidden), folded.prepare(block.hidden)
    assert torch.allclose(folded.latent(two, prev), plain.latent(one, prev), **EXACT)
    a = b = None
    for k in range(5):
        (za, a), (zb, b) = plain.step(one, prev[:, k], k, a), folded.step(two, prev[:, k], k, b)
        assert torch.allclose(za, zb, **EXACT)
    for passes in (1, 3, "auto", "sequential"):
        assert torch.equal(refine(plain, block, passes).ids, refine(folded, block, passes).ids)


# --- solvers ----------------------------------------------------------------------------------------------------------


@every_head
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    N=st.integers(1, 4),
    B=st.integers(2, 7),
    cut=st.integers(0, 3),
    reduced=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=15, deadline=None)
def test_solvers_agree_with_the_plain_loops(name, layout, N, B, cut, reduced, seed):
    """Skipping rows that are final, keeping state and stopping early change no token; after p passes the first p drafts
    are final; `auto` counts the passes of each block on its own, the confirming one included."""
    num_draft = max(1, LAYOUTS[layout].max_draft(B) - cut)
    block = random_block(N, B, layout, num_draft, seed=seed, draft_ids=LAST if reduced else None)
    head, G = head_for(name, block, seed=seed), block.num_draft
    expected, final = sweeps(block, head), serial(block, head)
    for p, (ids, truth) in enumerate(zip(jacobi(head, block), expected)):
        assert torch.equal(ids, truth) and torch.equal(ids[:, :p], final[:, :p])
    for p in range(G + 1):
        draft = refine(head, block, p)
        assert torch.equal(draft.ids, expected[p]) and draft.passes.tolist() == [p] * N and draft.q() is None
    for passes in (G, G + 3, "auto", "sequential"):
        assert torch.equal(refine(head, block, passes).ids, final)
    settled = [next(p for p in range(1, G + 2) if expected[p][i].equal(expected[p - 1][i])) for i in range(N)]
    assert refine(head, block, "auto").passes.tolist() == [min(p, G) for p in settled]
    for bare in (refine(head, block, 0), refine(None, block, 5), refine(None, block, "auto"), refine(None, block)):
        assert torch.equal(bare.ids, expected[0])
    assert not reduced or set(final.flatten().tolist()) <= set(LAST.tolist())


def test_the_laws_above_are_not_held_by_idle_heads():
    """Random heads overrule the drafter, and blocks settle after different numbers of passes."""
    for name in KINDS:
        drafts = [refine(head_for(name, b), b, "auto") for b in [random_block(4, 7, "next", seed=s) for s in range(4)]]
        bare = [refine(None, draft.block).ids for draft in drafts]
        assert any(not draft.ids.equal(ids) for draft, ids in zip(drafts, bare))
        assert len({p for draft in drafts for p in draft.passes.tolist()}) > 1, name


@every_head
@both_layouts
@pytest.mark.parametrize("B", range(2, 7))
def test_a_zero_readout_is_the_bare_drafter_in_every_slot(name, layout, B):
    """No slot between the uncorrected ones and the corrected ones is left unfilled (buffers start at an id that no
    token has), also where a head corrects from slot 0 on, or none."""
    block = random_block(3, B, layout)
    bare = block.base_logits().argmax(-1)
    for pure_slots in range(B) if name == "domino" else [None]:
        head = head_for(name, block, pure_slots=pure_slots)
        if name == "domino":
            strong = refine(head, block, "sequential").ids
            untouched = max(pure_slots - block.layout.first_slot, 0)
            assert torch.equal(strong, serial(block, head)) and torch.equal(strong[:, :untouched], bare[:, :untouched])
            assert torch.equal(strong, refine(head, block, block.num_draft).ids) and (strong >= 0).all()
        nn.init.zeros_(head.readout.weight)
        for passes in (0, 1, block.num_draft, "auto", "sequential"):
            assert torch.equal(refine(head, block, passes).ids, bare)


@both_layouts
def test_a_reduced_draft_vocabulary_drafts_its_own_ids_and_feeds_target_ids(layout):
    block = random_block(3, 5, layout, draft_ids=LAST)
    block.anchor[:], block.before[:] = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
    head, fed = head_for("gated", block), []
    expected = sweeps(block, head)[:2]
    head.token_embed.register_forward_hook(lambda module, args, output: fed.append(args[0].clone()))
    draft = refine(head, block, 2)
    first = {"infill": [block.before, block.anchor], "next": [block.anchor]}[layout]
    assert torch.equal(torch.stack(fed), torch.stack([torch.column_stack([*first, ids])[:, :5] for ids in expected]))
    assert set(draft.ids.flatten().tolist()) <= set(LAST.tolist())
    assert head.readout.weight.shape == (30, R) and head.token_embed.weight.shape == (V, R)


# --- sizes, names, numbers --------------------------------------------------------------------------------------------


def test_the_refiner_has_its_published_names_shapes_and_start():
    head = Refiner(V, D, 5, 16, draft_vocab_size=30)
    shapes = {name: list(weight.shape) for name, weight in head.state_dict().items()}
    assert shapes == {
        "token_embed.weight": [V, 16],
        "down_h.weight": [16, D],
        "down_g.weight": [16, D],
        "in_proj.weight": [16, 48],
        "mix_l": [16, 5, 5],
        "mlp_gate.weight": [32, 16],
        "mlp_up.weight": [32, 16],
        "mlp_down.weight": [16, 32],
        "readout.weight": [30, 16],
    }
    stds = {name: weight.std().item() for name, weight in head.named_parameters()}
    assert stds.pop("mix_l") == 0
    assert all(0.017 < std < 0.023 for std in stds.values())  # 0.02, to the sampling error of 480 numbers


def test_the_refiner_of_qwen3_8b_has_80_5_million_parameters():
    with torch.device("meta"):
        head = Refiner(vocab_size=151936, hidden_size=4096, block_size=16)
    sizes = {name: weight.numel() for name, weight in head.named_parameters()}
    inner = sum(sizes.values()) - sizes["token_embed.weight"] - sizes["readout.weight"]
    assert round(sum(sizes.values()) / 1e6, 1) == 80.5 and round(inner / 1e6, 2) == 2.75


def test_bf16_factors_are_widened_and_the_sum_is_never_rounded():
    torch.manual_seed(0)
    base, latent = (100 + torch.randn(64, V)).bfloat16(), torch.randn(64, R).bfloat16()  # bf16 steps of 0.5
    readout = nn.Linear(R, V, bias=False).bfloat16().requires_grad_(False)
    truth = base.double() + latent.double() @ readout.weight.double().T
    ours = corrected_logits(base, latent, readout)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, base.float() + nn.functional.linear(latent.float(), readout.weight.float()))
    assert (ours - truth).abs().max() < 2e-5  # fp32 rounding of logits near 100
    rounded = base + readout(latent)
    assert not torch.equal(argmax(rounded), truth.argmax(-1)) and torch.equal(argmax(ours), truth.argmax(-1))


@pytest.mark.parametrize("passes", [0, 1, "auto", "sequential"])
def test_ties_take_the_lowest_id_and_minus_zero_is_zero(passes):
    for row, first in [([-0.0, 0.0, -1], 0), ([0.0, -0.0, -1], 0), ([-1, 5, 5], 1), ([7, 7, 7], 0), ([-2, -9, -2], 0)]:
        assert int(argmax(torch.tensor(row))) == first
    block = random_block(2, 4)
    object.__setattr__(block, "readout", lambda hidden: -torch.zeros(*hidden.shape[:2], V, dtype=torch.float64))
    head = head_for("markov", block)
    head.readout.weight.zero_()
    head.readout.weight[[11, 60]] = 1.0
    head.token_embed.weight.abs_()  # so that two ids share the largest corrected logit, and all ids the base logit
    assert set(refine(head, block, passes).ids.flatten().tolist()) == {11 if passes else 0}
