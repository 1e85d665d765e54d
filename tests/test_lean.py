"""The lean loop is the plain one: logits, states, captured layers, decoded tokens; the model stays as it was."""

from __future__ import annotations

import warnings
from copy import deepcopy

import pytest
import torch
from disk import save_model
from hypothesis import given
from hypothesis import strategies as st
from toys import SHAPES, L, V, make_drafter, make_head, make_model, plain
from transformers import AutoModelForCausalLM

from xpress import parts
from xpress.decode import decode_batch, generate
from xpress.lean import LeanBody, fuse, why_not
from xpress.linear import linear
from xpress.sampling import Sampling
from xpress.target import Target

PROMPTS = [[5, 17, 44, 3, 61, 80, 9], [70, 2], [33, 96, 8, 4]]
VARIANTS = {
    **{kind: (kind, {}) for kind in SHAPES},
    "llama, every head its own keys": ("llama", {"num_key_value_heads": 4}),
    "llama, one key head, tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama, biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.0}  # fp32: kernels differ with the width


def model_of(variant: str, dtype=torch.float64):
    """A toy whose norms and biases matter: both start as ones and zeros."""
    kind, changes = VARIANTS[variant]
    model = make_model(kind, **changes)
    torch.manual_seed(9)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight), alpha=0.3)
    return model.to(dtype)


def both(variant: str, dtype=torch.float64) -> tuple[Target, Target]:
    model = model_of(variant, dtype)
    found = Target(deepcopy(model), loop="plain"), Target(model, loop="lean")
    assert [target.loop for target in found] == ["plain", "lean"]
    return found


def same(ours, theirs, dtype, lengths=None):
    """[N,…] compared, rows of [N,T,…] up to their lengths only: what lies behind an end is nobody's."""
    for row in range(len(ours)):
        part = slice(None) if lengths is None else slice(lengths[row])
        torch.testing.assert_close(ours[row][part], theirs[row][part], rtol=0, atol=TOLERANCE[dtype])


# --- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_a_batch_that_grows_rolls_back_and_shrinks_is_the_plain_loops(variant, dtype):
    """Uneven prompts, drafts of which each row keeps another number, a row that leaves; every layer captured."""
    (theirs, ours), layers = both(variant, dtype), (L - 1, 0, 2)
    (a, b), lengths = (target.prefill(PROMPTS, layers) for target in (ours, theirs)), [len(p) for p in PROMPTS]
    same(a[0], b[0], dtype)
    same(a[1], b[1], dtype, lengths)
    assert not ours._hooks and a[1].shape[-1] == len(layers) * ours.hidden_size
    anchor = torch.tensor([11, 12, 13])
    for turn, (kept, rows) in enumerate([([1, 4, 2], [0, 1, 2]), ([3, 0, 4], [2, 0]), ([2, 2], [0, 1]), ([1, 1], [1])]):
        draft = torch.arange(20 + turn, 20 + turn + 3 * len(anchor)).view(-1, 3) % V
        same(ours.score(anchor, draft), theirs.score(anchor, draft), dtype)
        same(ours.keep(kept), theirs.keep(kept), dtype, kept)
        for target in (ours, theirs):
            target.select(rows)
        anchor = anchor[rows]
    assert ours.sequences.lengths == theirs.sequences.lengths and len(ours.sequences) == 1


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_one_token_after_another_is_the_whole_sequence_at_once(variant):
    """Against transformers without any cache, down to a prompt of one token."""
    ours, ids = both(variant)[1], PROMPTS[0]
    whole = ours.model(torch.tensor([ids]), use_cache=False).logits[0]
    logits, _ = ours.prefill([ids[:1]])
    for i in range(len(ids)):
        torch.testing.assert_close(logits[0], whole[i], rtol=0, atol=1e-6)  # norms are fp32 in any dtype
        if i + 1 < len(ids):
            logits = ours.score(torch.tensor([ids[i + 1]]), torch.zeros(1, 0, dtype=torch.long))[:, 0]
            ours.keep([1])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8), Sampling(0.7, top_k=20, accept="match")])
@pytest.mark.parametrize("method", ["ar", "bare", "refiner"])
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_decoded_tokens_are_the_plain_loops(variant, method, sampling):
    answers = []
    for target in both(variant):
        drafter = None if method == "ar" else make_drafter(target)
        head = make_head("refiner", drafter) if method == "refiner" else None
        settings = dict(passes=2 if head else 0, max_new_tokens=14, sampling=sampling, seeds=[4, 5, 6])
        answers.append(list(decode_batch(target, PROMPTS, drafter, head, **settings)))
    assert answers[0] == answers[1] and len(answers[0]) > 1


@given(
    st.integers(1, 40), st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.data()
)
def test_a_product_of_few_rows_is_f_linear(rows, batch, dtype, data):
    """Slices of blocks are not contiguous; large weights take another way in fp32."""
    width, out = data.draw(st.sampled_from([(8, 5), (640, 1000)]))
    torch.manual_seed(rows)
    x, weight = torch.randn(batch, rows + 1, width).to(dtype)[:, 1:], torch.randn(out, width).to(dtype)
    bias = torch.randn(out).to(dtype) if data.draw(st.booleans()) else None
    with torch.no_grad():
        found = linear(x, weight, bias)
    wide = x.double() @ weight.double().T
    shift = torch.zeros(out).double() if bias is None else bias.double()
    assert found.shape == wide.shape and found.dtype == dtype and found.is_contiguous()
    # product and sum are each rounded once to the dtype, after sums of `width` products in fp32 at least
    steps = torch.finfo(dtype).eps * (wide.abs() + shift.abs()) + 1e-4
    assert ((found.double() - wide - shift).abs() <= steps).all()
    weight.requires_grad_(True)
    linear(x, weight, bias).sum().backward()  # where there is a gradient, it is F.linear
    assert weight.grad.isfinite().all()


# --- the model stays what it was ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["qwen2", "qwen3, tied", "llama, biases everywhere"])
def test_a_model_is_hashed_and_saved_the_same_after_decoding(tmp_path, variant):
    model = model_of(variant, torch.float32)
    fresh, used = Target(deepcopy(model)), Target(model)
    fresh.model.save_pretrained(tmp_path / "fresh")
    before, names = used.fingerprint(), [name for name, _ in model.named_parameters()]
    generate(used, PROMPTS[0], max_new_tokens=3)
    assert used.loop == "lean" and used.fingerprint() == before == fresh.fingerprint()
    assert [name for name, _ in model.named_parameters()] == names
    assert not any(parameter.is_inference() or parameter.requires_grad for parameter in model.parameters())
    used.model.save_pretrained(tmp_path / "used")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("fresh", "used")]
    assert files[0] == files[1]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "used", dtype=torch.float32)
    assert plain(Target(again), PROMPTS[0], 8) == plain(fresh, PROMPTS[0], 8)


def test_fused_weights_are_views_of_the_modules_and_made_once():
    model = make_model("qwen2")
    attention = model.get_decoder().layers[0].self_attn
    parts = attention.q_proj, attention.k_proj, attention.v_proj
    values, biases = (torch.cat([getattr(m, kind).clone() for m in parts]) for kind in ("weight", "bias"))
    weight, bias = fuse(*parts)
    assert torch.equal(weight, values) and torch.equal(bias, biases)
    again = fuse(*parts)
    assert [t.data_ptr() for t in again] == [weight.data_ptr(), bias.data_ptr()]  # nothing was copied
    with torch.no_grad():
        attention.k_proj.weight.fill_(7.0)
        attention.v_proj.bias.fill_(8.0)
    rows = len(attention.q_proj.weight), len(attention.k_proj.weight)
    assert (weight[rows[0] : sum(rows)] == 7).all() and (bias[sum(rows) :] == 8).all()


@pytest.mark.parametrize("change", ["dtype and back", "new data", "in place", "another module", "deep copy", "loaded"])
def test_whatever_happens_to_the_weights_between_prompts_is_noticed(change):
    """Views break when a model is moved; a fused copy that nobody looks after would go on with the old weights."""
    used = Target(model_of("qwen2"), loop="lean")
    plain(used, PROMPTS[0], 2)
    attention, mlp = used.body.layers[1].self_attn, used.body.layers[2].mlp
    with torch.no_grad():
        if change == "dtype and back":
            used.model.to(torch.float32)
            assert used.prefill(PROMPTS)[0].dtype == torch.float32
            used.model.to(torch.float64)
        elif change == "new data":
            attention.k_proj.weight.data = attention.k_proj.weight * 2
        elif change == "in place":
            mlp.up_proj.weight.mul_(-1)
            attention.q_proj.bias.add_(1)
        elif change == "another module":
            used.body.layers[1].mlp, used.body.layers[2].mlp = mlp, used.body.layers[1].mlp
        elif change == "deep copy":
            used = deepcopy(used)
            used.body.layers[0].self_attn.v_proj.weight.mul_(2)
        else:
            used.model.load_state_dict(model_of("qwen2").state_dict() | {"lm_head.weight": used.lm_head.weight + 1})
        fresh = Target(deepcopy(used.model), loop="plain")
        same(used.prefill(PROMPTS)[0], fresh.prefill(PROMPTS)[0], torch.float64)
    assert used.loop == "lean"


def test_two_targets_of_one_model_share_the_weights():
    model = model_of("llama")
    first, second = Target(model), Target(model)
    expected = plain(Target(deepcopy(model), loop="plain"), PROMPTS[0], 6)
    assert [plain(target, PROMPTS[0], 6) for target in (first, second, first)] == [expected] * 3
    places = [layer.qkv[0].data_ptr() for layer in first._lean.layers]
    assert places == [layer.qkv[0].data_ptr() for layer in second._lean.layers]


def test_training_takes_the_modules_before_and_after_decoding():
    """Features come from hooks, decoding from the loop; each clears the other's way."""
    target, ids = Target(model_of("qwen3")), torch.tensor([PROMPTS[0]])
    untouched = target.body.layers[0].self_attn.q_proj.weight.data_ptr()
    look = lambda: target.features(ids, torch.arange(ids.shape[1])[None], (0, L - 1)).hidden  # noqa: E731
    before = look()
    assert target.body.layers[0].self_attn.q_proj.weight.data_ptr() == untouched  # nothing is fused without need
    with torch.no_grad():
        decoded = target.prefill([PROMPTS[0]], (0, L - 1))[1]
    torch.testing.assert_close(decoded, before, rtol=0, atol=1e-12)
    assert target.loop == "lean" and torch.equal(look(), before)
    with torch.no_grad():
        assert torch.equal(target.prefill([PROMPTS[0]], (0, L - 1))[1], decoded) and target.loop == "lean"


def test_what_one_target_captures_keeps_another_from_nothing():
    """Hooks of ours change nothing, so a second Target on the model runs the loop, and each has its own features."""
    training = Target(model_of("llama"))
    ids = torch.tensor([PROMPTS[0]])
    seen = training.features(ids, torch.arange(ids.shape[1])[None], (1,)).hidden
    other = Target(training.model, name="other", loop="lean")
    assert other.loop == "lean" and plain(other, PROMPTS[0], 6) == plain(Target(model_of("llama")), PROMPTS[0], 6)
    with torch.no_grad():
        torch.testing.assert_close(other.prefill([PROMPTS[0]], (1,))[1], seen, rtol=0, atol=1e-12)
    assert torch.equal(training.features(ids, torch.arange(ids.shape[1])[None], (1,)).hidden, seen)


def test_a_model_that_was_asked_for_hidden_states_still_runs_the_loop():
    """transformers leaves its hooks on the layers for good; they keep what passes and change nothing."""
    model = model_of("llama")
    with torch.no_grad():
        model(torch.tensor([PROMPTS[0]]), output_hidden_states=True)
    assert any(layer._forward_hooks for layer in model.model.layers)
    target = Target(model, loop="lean")
    assert plain(target, PROMPTS[0], 6) == plain(Target(model_of("llama")), PROMPTS[0], 6)


# --- the setting ----------------------------------------------------------------------------------------------------


def odd(what: str):
    """Models that the loop must not run, each for a reason of its own."""
    if what == "stablelm":
        return make_model("stablelm", partial_rotary_factor=0.5, hidden_act="silu")
    if what == "gelu":
        return make_model(hidden_act="gelu")
    if what == "eager":
        model = make_model()
        model.set_attn_implementation("eager")
        return model
    model = make_model()
    layer = model.get_decoder().layers[1]
    if what == "hook":
        layer.mlp.register_forward_hook(lambda module, args, output: output * 2)
    elif what == "forward":
        layer.forward = lambda hidden_states, **_: hidden_states + 1
    elif what == "adapter":

        class Adapted(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x) * 3

        other = Adapted(*reversed(layer.mlp.up_proj.weight.shape), bias=False)
        layer.mlp.up_proj = other
    elif what == "some biases":
        layer.self_attn.k_proj.bias = torch.nn.Parameter(torch.ones(len(layer.self_attn.k_proj.weight)))
    return model


ODD = {
    "stablelm": "no stablelm",
    "gelu": "its layers have gelu",
    "eager": "attention is eager",
    "hook": "layers.1.mlp has a hook",
    "forward": "layers.1 has a hook or another forward",
    "adapter": "layers.1.mlp.up_proj is a Adapted",
    "some biases": "q_proj, k_proj, v_proj do not agree",
}


@pytest.mark.parametrize("what", ODD)
def test_a_model_that_the_loop_does_not_know_is_refused_by_name_and_run_plainly_under_auto(what):
    with pytest.raises(ValueError, match=f"target.loop=lean: target odd cannot run that way, .*{ODD[what]}.*give auto"):
        Target(odd(what), name="odd", loop="lean")
    model = odd(what)
    with torch.no_grad():
        found = Target(model, name="odd")
        logits, _ = found.prefill([PROMPTS[0]])
        expected = model(torch.tensor([PROMPTS[0]]), use_cache=False).logits[0, -1]
    assert found.loop == "plain"
    torch.testing.assert_close(logits[0], expected, rtol=1e-5, atol=1e-5)


def test_a_hook_that_comes_later_is_not_passed_by():
    target = Target(model_of("llama"))
    before = plain(target, PROMPTS[0], 8)
    hook = target.body.layers[1].mlp.register_forward_hook(lambda module, args, output: -output)
    changed = plain(target, PROMPTS[0], 8)
    assert target.loop == "plain" and changed == plain(Target(target.model, loop="plain"), PROMPTS[0], 8) != before
    hook.remove()
    assert plain(target, PROMPTS[0], 8) == before and target.loop == "lean"
    asked = Target(target.model, name="asked", loop="lean")
    target.body.layers[1].mlp.register_forward_hook(lambda module, args, output: -output)
    with pytest.raises(ValueError, match="target asked cannot run that way"):
        asked.prefill(PROMPTS)


def test_an_unknown_loop_is_refused(tmp_path):
    with pytest.raises(ValueError, match="target.loop=fast: known are auto, lean, plain"):
        Target(make_model(), loop="fast")
    folder = str(save_model(tmp_path / "target"))
    assert [Target.from_pretrained(folder, loop=loop).loop for loop in ("auto", "lean", "plain")] == [
        "lean", "lean", "plain",
    ]  # fmt: skip


def test_the_setting_reaches_the_target_from_a_section_of_the_settings(tmp_path):
    section = {"name": str(save_model(tmp_path / "target"))}
    asked = {"lean": "lean", "plain": "plain", "auto": "auto", None: "auto"}
    for loop, expected in asked.items():
        made = parts.make_target(section | ({"loop": loop} if loop else {}), "cpu")
        assert made._asked == expected
    with pytest.raises(ValueError, match="target.loop=no: known are auto"):
        parts.make_target({**section, "loop": "no"}, "cpu")


def test_a_target_that_gave_up_its_layers_has_no_lean_loop():
    target = Target(make_model())
    target.release_layers()
    assert "devices" in why_not(target.model)


def test_the_loop_says_nothing_of_its_own():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LeanBody(make_model("qwen3"))
        generate(Target(make_model("qwen3")), PROMPTS[0], max_new_tokens=3)
