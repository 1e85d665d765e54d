"""The frozen target: cached logits equal a fresh forward, roll-back is exact, features are those of the layer named."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from disk import save_model
from toys import SHAPES, D, L, V, make_drafter, make_model, make_target
from transformers import AutoConfig, AutoModelForCausalLM

from xpress.drafter import Context
from xpress.parts import make_target as make
from xpress.target import Target, check_layer_ids, rope_parameters

PROMPT = [5, 17, 44, 3, 61, 80, 9]
CLOSE = dict(rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module", params=[(kind, loop) for kind in SHAPES for loop in ("lean", "plain")], ids="-".join)
def any_target(request):
    kind, loop = request.param
    return make_target(kind, loop=loop)


def fresh(target, ids) -> torch.Tensor:
    """Logits [T,V] of the whole model without any cache."""
    with torch.no_grad():
        return target.model(torch.tensor([ids]), use_cache=False).logits[0]


def counting_target() -> Target:
    """Embedding row i holds i, and decoder layer l adds 1 to the stream: after layer l it reads token + l + 1."""
    model = make_model()
    model.get_input_embeddings().weight.data[:] = torch.arange(V)[:, None]
    for layer in model.get_decoder().layers:
        layer.forward = lambda hidden_states, **_: hidden_states + 1
    return Target(model, name="counting")


# --- prefill, score, keep -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_cached_logits_equal_a_fresh_forward_after_every_round(any_target):
    """A prompt, then blocks of which 1 … all tokens are kept: nothing of a rejected draft stays behind."""
    logits, hidden = any_target.prefill([PROMPT], (1,))
    assert any_target.loop == any_target._asked
    assert hidden.shape == (1, len(PROMPT), D)
    torch.testing.assert_close(logits[0], fresh(any_target, PROMPT)[-1], **CLOSE)
    ids, draft = list(PROMPT), torch.tensor([[70, 2, 33, 96]])
    for kept in (1, 3, 5, 2, 1):
        anchor = 10 + kept
        scores, hidden = any_target.score(torch.tensor([anchor]), draft), any_target.keep([kept])
        torch.testing.assert_close(scores[0], fresh(any_target, [*ids, anchor, *draft[0].tolist()])[-5:], **CLOSE)
        ids += [anchor, *draft[0].tolist()][:kept]
        whole = any_target.features(torch.tensor([ids]), torch.arange(len(ids))[None], (1,)).hidden
        torch.testing.assert_close(hidden, whole[:, -kept:], **CLOSE)
        assert any_target.sequences.lengths == [any_target.cache.get_seq_length()] == [len(ids)]


@torch.no_grad()
@pytest.mark.parametrize("kept", range(len(PROMPT) + 1))
def test_roll_back_is_exact_at_every_length(any_target, kept):
    """`crop(0)` removes nothing in transformers, and stale rows show only in what comes after."""
    any_target.prefill([PROMPT])
    any_target.keep([kept - len(PROMPT)])
    assert any_target.cache.get_seq_length() == kept
    scores = any_target.score(torch.tensor([50]), torch.tensor([[51, 52]]))
    torch.testing.assert_close(scores[0], fresh(any_target, [*PROMPT[:kept], 50, 51, 52])[-3:], **CLOSE)


def test_an_empty_prompt_is_refused(any_target):
    with pytest.raises(ValueError, match="prompt is empty"):
        any_target.prefill([])
    with pytest.raises(ValueError, match="prompt is empty"):
        any_target.prefill([PROMPT, []])


def test_a_shorter_prompt_after_a_longer_one_starts_afresh(any_target):
    """Target and drafter are reused from prompt to prompt; the contexts of both must really be empty."""
    target, drafter = any_target, make_drafter(any_target)

    def draft(prompt):
        drafter.reset()
        return drafter.draft(Context([[*prompt, 7]], target.prefill([prompt], drafter.layer_ids)[1])).hidden

    alone = draft(PROMPT[:1])
    draft(PROMPT)
    assert torch.equal(draft(PROMPT[:1]), alone)


def test_parts_are_the_models_own_and_frozen(any_target):
    model = any_target.model
    assert any_target.embedding is model.get_input_embeddings()
    assert any_target.lm_head is model.get_output_embeddings()
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@torch.no_grad()
def test_log_norm_equals_logsumexp(target):
    ids = torch.randint(V, (2, 9))
    last = target.features(ids, torch.arange(9).expand(2, 9), (0,)).last
    expected = target.model(ids, use_cache=False).logits.logsumexp(-1)
    for chunk in (1, 4, 256):
        torch.testing.assert_close(target.log_norm(last, chunk), expected, **CLOSE)
    assert target.log_norm(last[:, :0]).shape == (2, 0)


def test_log_norm_is_wide_for_a_narrow_target():
    narrow = make_target(dtype=torch.bfloat16)
    last = narrow.features(torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None], (0,)).last
    assert last.dtype == torch.bfloat16 and narrow.log_norm(last).dtype == torch.float32


# --- hidden states of the named layers ------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_ids, expected", [([0, 3], [1, 4]), ([3, 0], [4, 1]), ([2], [3]), ([1, 1], [2, 2])])
def test_layer_id_l_is_the_output_of_layer_l(layer_ids, expected):
    """Layer ids off by one (input instead of output, or a tuple that opens with the embedding) never raise an error."""
    counting = counting_target()
    ids = torch.tensor([[0, 5, 0], [7, 0, 2]])
    found = counting.features(ids, torch.arange(3).expand(2, 3), layer_ids).hidden
    assert torch.equal(found.unflatten(-1, (-1, D))[..., 0], ids[..., None] + torch.tensor(expected))
    _, hidden = counting.prefill([[0, 0]], layer_ids)
    assert torch.equal(hidden.unflatten(-1, (-1, D))[0, 1, :, 0], torch.tensor(expected, dtype=torch.float))


@torch.no_grad()
@pytest.mark.parametrize("make", [counting_target, *(lambda kind=kind: make_target(kind) for kind in SHAPES)])
def test_hooks_equal_the_hidden_states_tuple_below_the_last_layer(make):
    """In every batch row: a hook that takes `output[0]` of a tensor reads row 0 alone."""
    target, ids = make(), torch.randint(V, (3, 6))
    found = target.features(ids, torch.arange(6).expand(3, 6), range(L)).hidden.unflatten(-1, (L, D)).unbind(2)
    states = target.model(ids, use_cache=False, output_hidden_states=True).hidden_states
    for l in range(L - 1):
        torch.testing.assert_close(found[l], states[l + 1], **CLOSE)
    normed = target.body.norm(found[L - 1])  # for the last layer the tuple holds the normed state
    torch.testing.assert_close(normed, states[L], **CLOSE)


@pytest.mark.parametrize("bad", [L, -1])
@pytest.mark.parametrize("use", [lambda t, ids: t.prefill([PROMPT], ids), lambda t, ids: check_layer_ids(ids, L)])
def test_a_layer_id_outside_the_target_is_refused(target, use, bad):
    with pytest.raises(ValueError, match=rf"target_layer_ids=\[0, {bad}\]: {bad} is no decoder layer.*0 … 3"):
        use(target, (0, bad))


@torch.no_grad()
def test_captured_layers_can_change_and_be_switched_off(any_target):
    first = any_target.prefill([PROMPT], (0, 2))[1]
    assert any_target.prefill([PROMPT])[1] is None and not any_target._captured
    assert torch.equal(any_target.prefill([PROMPT], (2, 0))[1], torch.cat(first.split(D, -1)[::-1], -1))


# --- what is refused ------------------------------------------------------------------------------------------------


def with_layer_types(*kinds):
    model = make_model()
    model.config.layer_types = list(kinds)
    return model


@pytest.mark.parametrize(
    "model, kind",
    [
        (lambda: make_model("mistral", sliding_window=8), "sliding_attention"),
        (lambda: make_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2), "sliding"),
        (lambda: with_layer_types("full_attention", "linear_attention"), "linear_attention"),
        (lambda: with_layer_types("full_attention", "chunked_attention"), "chunked_attention"),
        (lambda: with_layer_types("hybrid"), "hybrid"),
        (
            lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", hidden_size=8, vocab_size=9)),
            "linear",
        ),
    ],
)
def test_caches_that_cannot_be_rolled_back_are_refused_by_layer_type(model, kind):
    with pytest.raises(ValueError, match=f"layer type '{kind}.*full attention"):
        Target(model(), name="odd")


def test_logits_changed_after_lm_head_are_refused():
    model = make_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        Target(model)


def test_a_folder_without_a_model_names_the_setting_and_the_remedy(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match="target=.*empty: the folder has no readable model. Give a local folder"):
        Target.from_pretrained(str(tmp_path / "empty"))


# --- identity and rotary embedding ----------------------------------------------------------------------------------


def test_fingerprint_is_of_the_weights_not_of_the_dtype():
    model = make_model()
    same = {Target(deepcopy(model).to(dtype)).fingerprint() for dtype in (torch.bfloat16, torch.float32, torch.float64)}
    assert len(same) == 1
    changed = deepcopy(model)
    changed.get_decoder().layers[1].mlp.up_proj.weight.data.add_(1.0)
    assert not same & {
        Target(changed).fingerprint(),
        make_target(seed=5).fingerprint(),
        make_target("qwen2").fingerprint(),
    }


BASE = {"rope_theta": 5e5, "rope_type": "default"}
LINEAR = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"rope_parameters": BASE}, BASE),
        ({"rope_theta": 5e5}, BASE),
        ({"rope_theta": 500000, "rope_scaling": None}, BASE),
        ({"rope_theta": 1e4, "rope_parameters": BASE}, BASE),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, BASE),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, LINEAR),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}}, LINEAR),
        ({"rope_parameters": LINEAR, "rope_scaling": {"type": "dynamic", "factor": 9.0}}, LINEAR),
    ],
)
@pytest.mark.parametrize("kind", [dict, lambda raw: SimpleNamespace(**raw)])
def test_rotary_base_and_scaling_are_read_in_the_new_place_then_the_old(config, expected, kind):
    assert rope_parameters(kind(config)) == expected


def test_a_config_without_rotary_base_is_refused():
    with pytest.raises(ValueError, match="rope_theta: the config has no rotary base"):
        rope_parameters({"rope_scaling": None})


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_a_target_spread_by_device_map_is_the_same(tmp_path, monkeypatch, device_map):
    """Here there is one device to spread over; the hooks that accelerate puts around the layers change no number."""
    folder = str(save_model(tmp_path / "target"))
    plain = Target.from_pretrained(folder)
    load, asked = AutoModelForCausalLM.from_pretrained, []
    note = lambda *names, **options: asked.append(options["device_map"]) or load(*names, **options)  # noqa: E731
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", note)
    spread = make({"name": folder, "device_map": device_map}, "cpu")
    assert asked == [device_map]
    ids = torch.randint(3, 90, (2, 9))
    for ours, theirs in zip(*(vars(t.features(ids, torch.arange(9)[None], (0, 2))).values() for t in (plain, spread))):
        assert torch.equal(ours, theirs)
    assert plain.fingerprint() == spread.fingerprint()
