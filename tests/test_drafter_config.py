"""What a drafter's folder says: published names and fields, block sizes, the folded scale, and what is refused."""

import json

import pytest
import torch
from disk import published_drafter, published_tensors
from safetensors.torch import load_file
from toys import SHAPES, D, ScriptedDrafter, V, draft_hidden, make_drafter, make_target, plain

from xpress import DFlashDrafter, DrafterConfig, generate, load, save
from xpress.checkpoint import CONFIG, WEIGHTS
from xpress.drafter_config import default_layer_ids
from xpress.metrics import Counts, histogram
from xpress.target import rope_parameters

PROMPT = [5, 17, 44, 3, 61, 80, 9]
QWEN3_8B = DrafterConfig(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    num_target_layers=36,
    target_layer_ids=default_layer_ids(36, 5),
    mask_token_id=151669,
    rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
)


# --- the published layout -------------------------------------------------------------------------------------------


def test_names_and_shapes_are_the_published_ones():
    with torch.device("meta"):
        ours = {name: list(t.shape) for name, t in DFlashDrafter(QWEN3_8B).state_dict().items()}
        published = published_tensors(4096, 12288, 32, 8, 128, 5, 5)
    assert ours == {name: list(t.shape) for name, t in published.items()}
    assert ours["fc.weight"] == [4096, 20480] and ours["layers.4.self_attn.k_proj.weight"] == [1024, 4096]


def test_config_has_the_published_fields():
    published = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 5,
        "num_target_layers": 36,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 1000000,
        "rope_scaling": None,
        "max_position_embeddings": 40960,
        "layer_types": ["full_attention"] * 5,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 5,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "use_cache": True,
        "initializer_range": 0.02,
    }
    ours = QWEN3_8B.to_json()
    assert {key: ours.get(key, "missing") for key in published} == published
    assert DrafterConfig.from_json(published) == DrafterConfig.from_json(json.loads(json.dumps(ours))) == QWEN3_8B


@pytest.mark.parametrize("depth, n", [(36, 5), (30, 5), (28, 1), (4, 2), (12, 3), (61, 6)])
def test_layer_rule(depth, n):
    """Spread evenly from the second layer to the third-to-last; the middle for a single one."""
    ids = default_layer_ids(depth, n)
    even = [depth // 2] if n == 1 else [round(1 + i * (depth - 4) / (n - 1)) for i in range(n)]
    assert list(ids) == even and default_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert n == 1 or (ids[0], ids[-1]) == (1, depth - 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_feature_scale_is_folded_into_fc_on_disk_and_taken_out_bit_for_bit(target, tmp_path, dtype):
    scale = (0.0625, 8.0)
    drafter = make_drafter(target, feature_scale=scale).to(dtype)
    save(tmp_path / "c", drafter)
    stored = load_file(tmp_path / "c" / WEIGHTS)["fc.weight"]
    assert torch.equal(stored, torch.cat([w * s for w, s in zip(drafter.fc.weight.split(D, 1), scale)], 1))
    found = load(tmp_path / "c", target, dtype).drafter
    assert torch.equal(found.fc.weight, drafter.fc.weight) and found.config == drafter.config
    raw = json.loads((tmp_path / "c" / CONFIG).read_text())
    del raw["feature_scale"]  # an engine that knows nothing of it reads the same drafter
    (tmp_path / "c" / CONFIG).write_text(json.dumps(raw))
    plain_reader = load(tmp_path / "c", target, dtype).drafter
    torch.testing.assert_close(draft_hidden(plain_reader, target, PROMPT), draft_hidden(drafter, target, PROMPT))


def test_a_reduced_draft_vocabulary_is_stored_as_offsets(target, tmp_path):
    ids = (2, 3, 7, 40, 96)
    drafter = make_drafter(target, draft_ids=ids)
    save(tmp_path / "c", drafter)
    assert load_file(tmp_path / "c" / WEIGHTS)["d2t"].tolist() == [i - place for place, i in enumerate(ids)]
    found = load(tmp_path / "c", target).drafter
    assert found.config == drafter.config and found.config.draft_vocab_size == found.lm_rows.shape[0] == 5
    hidden = torch.randn(3, D)
    assert torch.equal(found.readout(hidden), target.lm_head(hidden)[:, list(ids)])
    assert generate(target, PROMPT, found, max_new_tokens=12).ids == plain(target, PROMPT, 12)


@pytest.mark.parametrize("ids", [(), (3, 2), (2, 2), (-1, 2), (2, V)])
def test_a_draft_vocabulary_must_be_ascending_target_ids(target, ids):
    with pytest.raises(ValueError, match="draft_ids"):
        make_drafter(target, draft_ids=ids)


# --- block size and drafted tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout, less", [("infill", 1), ("next", 0)])
@pytest.mark.parametrize("B", [2, 3, 8])
def test_a_block_of_b_slots_drafts_the_same_number_after_reloading(target, tmp_path, B, layout, less):
    """Slots and drafted tokens are two numbers; mixed up, a reloaded drafter would claim one token too many."""
    drafter = make_drafter(target, block_size=B, layout=layout)
    save(tmp_path / "c", drafter)
    found = load(tmp_path / "c", target).drafter
    G = B - less
    raw = json.loads((tmp_path / "c" / CONFIG).read_text())
    assert (raw["block_size"], found.config.block_size, found.config.num_draft, drafter.config.num_draft) == (
        B,
        B,
        G,
        G,
    )
    responses = [generate(target, PROMPT, each, max_new_tokens=20) for each in (drafter, found)]
    assert responses[0] == responses[1] and {r.num_draft for r in responses[1].rounds} == {G}
    answer = plain(target, PROMPT, 60)
    oracle = ScriptedDrafter(target, PROMPT, answer, found.config.num_draft, lambda _: G)
    response = generate(target, PROMPT, oracle, max_new_tokens=1 + 3 * (G + 1))
    assert [len(r.tokens) for r in response.rounds] == [G + 1] * 3
    bins = histogram([Counts.of(responses[1])])
    assert len(bins) == G + 1 and sum(bins) == len(responses[1].rounds)


@pytest.mark.parametrize("changes", [{"block_size": 1}, {"block_size": 0}, {"num_draft": 4}, {"num_draft": -1}])
def test_blocks_that_cannot_draft_are_refused(target, changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        make_drafter(target, **changes)
    with pytest.raises(ValueError, match="block_size=1: a block needs the anchor slot and at least one more"):
        make_drafter(target, block_size=1, layout="next")


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer type 'sliding_attention'"),
        ({"dflash_config": {"causal": True}}, "dflash_config.causal=True"),
        ({"dflash_config": {"causal_head": True}}, "dflash_config.causal_head=True"),
        ({"dflash_config": {"projector_type": "other"}}, "dflash_config.projector_type='other'"),
        ({"dflash_config": {"conv_kernel_size": 2}}, "dflash_config.conv_kernel_size=2"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"dflash_config": {"mask_token_id": 5}}, "target_layer_ids missing"),
        ({"block_size": None}, "block_size missing"),
        ({"intermediate_size": None}, "intermediate_size missing"),
        ({"num_attention_heads": None}, "num_attention_heads missing"),
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 64}, "layer type 'sliding_attention'"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 4]}}, "4 is no decoder layer"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": []}}, "at least one layer"),
    ],
)
def test_a_config_that_is_not_computed_is_refused_by_name(target, tmp_path, changes, named):
    published_drafter(tmp_path, target, **changes)
    with pytest.raises(ValueError, match=named):
        load(tmp_path, target)


@pytest.mark.parametrize(
    "other, setting",
    [
        ({"hidden_size": 64, "head_dim": 16}, "hidden_size"),
        ({"vocab_size": 96}, "vocab_size"),
        ({"num_hidden_layers": 5}, "num_target_layers"),
    ],
)
def test_a_drafter_of_another_target_is_refused(target, other, setting):
    with pytest.raises(ValueError, match=f"drafter {setting}=.*toy-llama has .*do not belong together"):
        make_drafter(target).bind(make_target(**other))


@pytest.mark.parametrize("kind", SHAPES)
def test_a_fresh_drafter_takes_its_shape_from_any_target(kind):
    target = make_target(kind)
    drafter = make_drafter(target, num_draft=None)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        assert getattr(drafter.config, name) == getattr(target.config, name)
    assert drafter.config.rope_parameters == rope_parameters(target.config)
    assert generate(target, PROMPT, drafter, max_new_tokens=9).ids == plain(target, PROMPT, 9)
    borrowed = {id(p) for p in target.model.parameters()}
    assert not borrowed & {id(p) for p in drafter.parameters()}  # the target's own parts stay outside
