"""The dFlash drafter: its arithmetic written out again, its cached context, its mask token and rotary embedding."""

import dataclasses
import json
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from disk import published_drafter
from safetensors.torch import load_file
from toys import D, V, draft_hidden, make_drafter, make_target

from xpress import Context, DFlashDrafter, DrafterConfig, load, save
from xpress.checkpoint import CONFIG, WEIGHTS

PROMPT = [5, 17, 44, 3, 61, 80, 9]


def tokenizer(**ids):
    return SimpleNamespace(**{"mask_token_id": None, "eos_token_id": 2, "pad_token_id": 2, **ids})


def target_with(mask_token_id=None, **changes):
    found = make_target(**changes)
    found.tokenizer = tokenizer(mask_token_id=mask_token_id)
    return found


# --- the arithmetic, written out a second time ----------------------------------------------------------------------


def by_hand(weights: dict, config, embedding, features, ids, theta) -> torch.Tensor:
    """features [T,M·D] of positions 0 … T − 1, block ids [B] at T …: every head and slot in a loop -> hidden [B,D]."""
    heads, kv, dim, T = config.num_attention_heads, config.num_key_value_heads, config.head_dim, len(features)

    def norm(x, name):
        return x / (x.square().mean() + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def times(name, x):
        return weights[f"{name}.weight"] @ x

    def turn(x, position):
        out = x.clone()
        for i in range(dim // 2):
            angle = position * theta ** (-2 * i / dim)
            a, b = x[i], x[i + dim // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    context = [norm(times("fc", row), "hidden_norm") for row in features]
    x = [embedding[i].clone() for i in ids]
    for l in range(config.num_hidden_layers):
        at = f"layers.{l}"
        seen = context + [norm(row, f"{at}.input_layernorm") for row in x]
        keys = [times(f"{at}.self_attn.k_proj", row).view(kv, dim) for row in seen]
        values = [times(f"{at}.self_attn.v_proj", row).view(kv, dim) for row in seen]
        for j in range(len(ids)):
            query, mixed = times(f"{at}.self_attn.q_proj", seen[T + j]).view(heads, dim), []
            for h in range(heads):
                g = h // (heads // kv)  # grouped queries: neighbouring heads share keys and values
                q = turn(norm(query[h], f"{at}.self_attn.q_norm"), T + j)
                k = [turn(norm(row[g], f"{at}.self_attn.k_norm"), p) for p, row in enumerate(keys)]
                scores = torch.stack([q @ row / math.sqrt(dim) for row in k])
                share = (scores - scores.max()).exp()
                mixed.append(sum(w * row[g] for w, row in zip(share / share.sum(), values)))
            x[j] = x[j] + times(f"{at}.self_attn.o_proj", torch.cat(mixed))
            inner = norm(x[j], f"{at}.post_attention_layernorm")
            gate = times(f"{at}.mlp.gate_proj", inner)
            x[j] = x[j] + times(f"{at}.mlp.down_proj", gate * torch.sigmoid(gate) * times(f"{at}.mlp.up_proj", inner))
    return torch.stack([norm(row, "norm") for row in x])


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_draft_equals_the_published_arithmetic(tmp_path, kind, layers):
    target = make_target(kind, dtype=torch.float64)
    published_drafter(tmp_path, target)
    drafter = load(tmp_path, target, torch.float64).drafter
    drafter.layers = drafter.layers[:layers]
    config = dataclasses.replace(drafter.config, num_hidden_layers=layers)
    weights = {name: t.double() for name, t in load_file(tmp_path / WEIGHTS).items()}
    _, features = target.prefill([PROMPT], drafter.layer_ids)
    block = [7] + [config.mask_token_id] * (config.block_size - 1)
    expected = by_hand(weights, config, target.embedding.weight, features[0], block, 10000.0)
    torch.testing.assert_close(draft_hidden(drafter, target, PROMPT), expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["infill", "next"])
def test_context_cached_round_by_round_equals_one_fresh_draft(target, layout):
    ids = [*PROMPT, 8, 30, 31, 32, 4, 90, 11, 12, 60]
    cached, once = (make_drafter(target, layout=layout) for _ in range(2))
    _, features = target.prefill([ids], cached.layer_ids)
    absorbed = 0
    for start in (len(PROMPT), 8, 11, 13, 14):
        grown = cached.draft(Context([ids[: start + 1]], features[:, absorbed:start]))
        once.reset()
        fresh = once.draft(Context([ids[: start + 1]], features[:, :start]))
        torch.testing.assert_close(grown.hidden, fresh.hidden, rtol=1e-5, atol=1e-5)
        assert (int(grown.anchor), int(grown.before)) == (ids[start], ids[start - 1])
        absorbed = start


def test_a_context_out_of_step_is_refused(target):
    drafter = make_drafter(target)
    with pytest.raises(RuntimeError, match="3 new states, and the anchors stand at .4.: out of step"):
        drafter.draft(Context([[1, 2, 3, 4, 5]], torch.zeros(1, 3, 2 * D)))


# --- the mask token -------------------------------------------------------------------------------------------------


def test_mask_id_comes_from_the_argument_then_the_drafters_config_then_the_tokenizer(tmp_path):
    fresh = lambda target, mask=None: DrafterConfig.for_target(target, 2, 4, mask).mask_token_id  # noqa: E731
    target = target_with(mask_token_id=91)
    assert (fresh(target, 92), fresh(target)) == (92, 91)
    published_drafter(tmp_path, target, mask_token_id=90)
    assert load(tmp_path, target).drafter.config.mask_token_id == 90
    assert fresh(target, 0) == 0  # an id, not a missing one


def test_without_a_mask_id_nothing_stands_in_for_it():
    """pad = eos = 2: a drafter fed with it trains without any error and drafts badly."""
    with pytest.raises(ValueError, match="drafter.mask_token_id=.*pad is no substitute"):
        DrafterConfig.for_target(target_with(), 2, 4)


@pytest.mark.parametrize("mask, fits", [(V, False), (-1, False), (V - 1, True)])
def test_mask_id_is_checked_against_the_rows_of_the_embedding(tmp_path, mask, fits):
    """Not against the tokenizer: ids in the padded tail of the embedding are the best choice."""
    target = target_with()
    published_drafter(tmp_path, target, mask_token_id=mask)
    for make in (lambda: make_drafter(target, mask_token_id=mask), lambda: load(tmp_path, target).drafter):
        if fits:
            assert make().config.mask_token_id == mask
        else:
            with pytest.raises(ValueError, match=f"mask_token_id={mask}: outside the target's embedding of {V} rows"):
                make()


# --- the rotary embedding -------------------------------------------------------------------------------------------

SCALED = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
}


def same_rotary(drafter, target):
    positions = torch.tensor([[0, 1, 77, 300, 511]])
    cos, sin = target.body.rotary_emb(torch.zeros(1), positions)
    ours = [part[:, :, 0].float() for part in drafter.rotary(positions)]
    torch.testing.assert_close(ours, [cos, sin], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", SCALED)
def test_rotary_embedding_is_the_targets_own_after_reloading_too(tmp_path, kind):
    """A drafter left at the default base of 10,000 never fails, it only drafts badly."""
    target = make_target(rope_parameters={"rope_theta": 5e5, "rope_type": kind, **SCALED[kind]})
    drafter = make_drafter(target)
    save(tmp_path / "c", drafter)
    raw = json.loads((tmp_path / "c" / CONFIG).read_text())
    old_place = {key: value for key, value in raw.items() if key != "rope_parameters"}
    new_place = {key: value for key, value in raw.items() if key not in ("rope_theta", "rope_scaling")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (drafter.bind(target), load(tmp_path / "c", target).drafter):
            same_rotary(each, target)
        for written in (old_place, new_place, raw | {"rope_theta": 1.0}):  # both and different: the new place wins
            (tmp_path / "c" / CONFIG).write_text(json.dumps(written))
            same_rotary(load(tmp_path / "c", target).drafter, target)


@pytest.mark.parametrize(
    "place", [{"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_theta": 5e5}]
)
def test_base_of_the_target_is_read_in_both_places(target, place):
    config = SimpleNamespace(**{k: v for k, v in vars(target.config).items() if "rope" not in k}, **place)
    other = SimpleNamespace(**{**vars(target), "config": config, "tokenizer": tokenizer(mask_token_id=3)})
    made = DFlashDrafter(DrafterConfig.for_target(other, 1, 4))
    expected = 5e5 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(made.rotary.inv_freq, expected)
    assert made.to(torch.bfloat16).rotary.inv_freq.dtype == torch.float64  # never narrowed with the weights


def test_a_scaling_that_is_not_computed_is_refused_by_name(target):
    with pytest.raises(ValueError, match="rope_type='longrope': supported rotary scalings are default, linear"):
        make_drafter(target, rope_parameters={"rope_theta": 1e4, "rope_type": "longrope"})


def test_a_loaded_drafter_with_another_base_warns(target, tmp_path):
    published_drafter(tmp_path, target, rope_theta=1e6)
    with pytest.warns(UserWarning, match="rotary embedding .*1000000.0.* differs from toy-llama's .*10000.0"):
        load(tmp_path, target)
