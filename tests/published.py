"""Tiny checkpoints in the published layouts, their names written out by hand and none of our writers used."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from disk import published_drafter
from safetensors.torch import load_file, save_file

R, B, WIDTH = 8, 4, 12
REDUCED = tuple(range(2, 92, 3))


def edit(folder: Path, config=None, tensors=None):
    """Change a folder's config and tensors by functions of them."""
    if config is not None:
        raw = json.loads((folder / "config.json").read_text())
        config(raw)
        (folder / "config.json").write_text(json.dumps(raw))
    if tensors is not None:
        found = load_file(folder / "model.safetensors")
        tensors(found)
        save_file({name: t.contiguous() for name, t in found.items()}, folder / "model.safetensors")


def random(*shape, std=0.5):
    return std * torch.randn(shape)


def refiner(V, D, vocab=None) -> dict:
    """Under the research names."""
    torch.manual_seed(11)
    return {
        "w1.weight": random(V, R),
        "w2.weight": random(vocab or V, R),
        "down_h.weight": random(R, D),
        "down_g.weight": random(R, D),
        "in_proj.weight": random(R, 3 * R),
        "mix.L": random(R, B, B),
        "mlp.gate_proj.weight": random(2 * R, R),
        "mlp.up_proj.weight": random(2 * R, R),
        "mlp.down_proj.weight": random(R, 2 * R),
    }


def markov(V, D, kind="vanilla", vocab=None) -> dict:
    torch.manual_seed(12)
    tensors = {"markov_w1.weight": random(V, R), "markov_w2.weight": random(vocab or V, R)}
    if kind == "gated":
        tensors |= {"gate_proj.weight": random(R, D + R), "gate_proj.bias": random(R)}
    if kind == "rnn":
        tensors |= {"joint_proj.weight": random(3 * R, 2 * R + D), "joint_proj.bias": random(3 * R)}
    return tensors


def under(prefix: str, tensors: dict) -> dict:
    return {prefix + name: t for name, t in tensors.items()}


def zlab(folder, target, **changes):
    return published_drafter(folder, target, B, **changes)


def nested(folder, target):
    """block_size inside dflash_config, as in newer files, and the weights in two files."""
    published_drafter(folder, target, B)

    def move(raw):
        raw["dflash_config"]["block_size"] = raw.pop("block_size")

    edit(folder, move)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for name, part in parts.items():
        save_file({key: tensors[key] for key in part}, folder / name)
    index = {"metadata": {}, "weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def serving(folder, target, mask=False):
    published_drafter(folder, target, B)
    fields = {"xpress_rank": R, "xpress_mlp_hidden": 2 * R, "xpress_block_size": B, "xpress_num_passes": 5}
    head = refiner(target.vocab_size, target.hidden_size)
    head |= {"mix.tril": torch.ones(B, B).tril()} if mask else {}
    edit(
        folder,
        lambda raw: raw.update(architectures=["Qwen3XPressModel"], sample_from_anchor=False, **fields),
        lambda tensors: tensors.update(under("xpress_head.", head)),
    )
    return folder


def research(folder, target, kind="xpress"):
    """The file, and beside it the config of the drafter that it started from."""
    published_drafter(folder, target, B)
    drafter = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    args = argparse.Namespace(
        markov_rank=R, mlp_ratio=2, input_mode="concat", no_residual=True, run_name="toy", lr=6e-4
    )
    head = refiner(target.vocab_size, target.hidden_size) | {"mix.tril": torch.ones(B, B).tril()}
    if kind == "markov":
        head = {n.removeprefix("markov_"): t for n, t in markov(target.vocab_size, target.hidden_size).items()}
    state = {"refiner_state_dict": head, "draft_state_dict": drafter, "args": args, "global_step": 7, "epoch": 0}
    torch.save(state, folder / "refiner_cotrain.pt")
    return folder / "refiner_cotrain.pt"


def dspark(folder, target, kind="vanilla", confidence=True, frozen=True, specforge=False, changes=None):
    published_drafter(folder, target, B)
    V, D = target.vocab_size, target.hidden_size
    fields = {"markov_rank": R, "markov_head_type": kind, "enable_confidence_head": confidence}
    fields |= {"confidence_head_with_markov": True} if confidence else {}
    if kind is None:  # DeepSpec's plain dFlash
        fields |= {"markov_rank": 0, "markov_head_type": "vanilla"}
        head = {}
    else:
        head = under("markov_head.", markov(V, D, kind))
    if confidence:
        head |= {"confidence_head.proj.weight": random(1, D + R), "confidence_head.proj.bias": random(1)}
    if frozen:
        head |= {"embed_tokens.weight": target.embedding.weight.detach().clone()}
        head |= {"lm_head.weight": target.lm_head.weight.detach().clone()}

    def flat(raw):
        raw |= raw.pop("dflash_config") | fields | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}

    def inside(raw):
        raw["dflash_config"] |= fields | {"projector_type": "dspark", "attention_mode": "gqa"}
        raw["architectures"] = ["DSparkDraftModel"]

    edit(folder, inside if specforge else flat, lambda tensors: tensors.update(head))
    return folder


def domino(folder, target, prefix="", shift=True):
    published_drafter(folder, target, B)
    V, D = target.vocab_size, target.hidden_size
    torch.manual_seed(13)
    head = {
        "prefix_gru.weight_ih_l0": random(3 * WIDTH, D),
        "prefix_gru.weight_hh_l0": random(3 * WIDTH, WIDTH),
        "embed_proj.0.weight": random(R, D + WIDTH),
        "embed_proj.2.weight": random(V, R),
    }

    def fields(raw):
        raw["architectures"] = ["DFlashDraftModel" if prefix else "DominoDraftModel"]
        raw["dflash_config"] |= {"projector_type": "domino", "emb_dim": R, "gru_hidden_dim": WIDTH}
        raw["dflash_config"] |= {"pure_draft_prefix_len": 1, "shift_label": shift}

    edit(folder, fields, lambda tensors: tensors.update(under(prefix, head)))
    return folder


def speculators(folder, target, kind="xpress", reduced=False, sample_from_anchor=None):
    published_drafter(folder, target, B)
    V, D = target.vocab_size, target.hidden_size
    old = json.loads((folder / "config.json").read_text())
    shape = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shape += ("head_dim", "vocab_size", "max_position_embeddings", "rope_theta", "model_type")  # the rest: defaults
    draft = len(REDUCED) if reduced else V
    raw = {
        "architectures": [{"dflash": "DFlash", "dspark": "DSpark", "xpress": "XPress"}[kind] + "Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": {key: old[key] for key in shape},
        "draft_vocab_size": draft,
        "block_size": B,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": V - 1,
        "sliding_window_non_causal": False,
        "sample_from_anchor": kind == "dspark" if sample_from_anchor is None else sample_from_anchor,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": B - 1}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "someone/target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    head = {}
    if kind == "xpress":
        raw |= {"xpress_rank": R, "xpress_mlp_ratio": 2, "num_jacobi_passes": 6}
        names = {"w1.weight": "token_embed.weight", "w2.weight": "readout.weight", "mix.L": "mix_l"}
        names |= {f"mlp.{part}_proj.weight": f"mlp_{part}.weight" for part in ("gate", "up", "down")}
        head = {f"refiner_head.{names.get(name, name)}": t for name, t in refiner(V, D, draft).items()}
    if kind == "dspark":
        raw |= {"markov_rank": R, "markov_head_type": "gated", "enable_confidence_head": True}
        raw |= {"confidence_head_with_markov": False}
        head = under("markov_head.", markov(V, D, "gated", draft))
        head |= {"confidence_head.proj.weight": random(1, D), "confidence_head.proj.bias": random(1)}
    if reduced:
        ids = torch.tensor(REDUCED)
        head |= {"d2t": ids - torch.arange(draft), "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)}
        head |= {"lm_head.weight": target.lm_head.weight.detach()[ids].clone()}
    (folder / "config.json").write_text(json.dumps(raw))
    edit(folder, None, lambda tensors: tensors.update(head))
    return folder


def ours(folder, target):
    published_drafter(folder, target, B, feature_scale=[2.0, 0.5], draft_vocab_size=None)
    names = {"markov_w1.weight": "token_embed.weight", "markov_w2.weight": "readout.weight"}
    V, D = target.vocab_size, target.hidden_size
    sizes = {"vocab_size": V, "hidden_size": D, "block_size": B, "rank": R, "draft_vocab_size": None}
    head = {"_target_": "xpress.heads.markov.GatedMarkovHead", **sizes}
    tensors = {f"head.{names.get(name, name)}": t for name, t in markov(V, D, "gated").items()}
    edit(folder, lambda raw: raw.update(head=head), lambda found: found.update(tensors))
    return folder


def variant(maker, **options):
    return lambda folder, target: maker(folder, target, **options)


MAKERS = {  # name -> the format, what makes it
    "zlab": ("zlab", zlab),
    "zlab-nested-sharded": ("zlab", nested),
    "research-xpress": ("research", research),
    "research-markov": ("research", variant(research, kind="markov")),
    "serving": ("serving", serving),
    "serving-mask": ("serving", variant(serving, mask=True)),
    "dspark-vanilla": ("dspark", dspark),
    "dspark-gated": ("dspark", variant(dspark, kind="gated", frozen=False)),
    "dspark-rnn": ("dspark", variant(dspark, kind="rnn", confidence=False)),
    "dspark-none": ("dspark", variant(dspark, kind=None, confidence=False)),
    "dspark-specforge": ("dspark", variant(dspark, specforge=True, frozen=False)),
    "domino": ("domino", domino),
    "domino-author": ("domino", variant(domino, prefix="logit_head.")),
    "domino-infill": ("domino", variant(domino, shift=False)),
    "speculators-dflash": ("speculators", variant(speculators, kind="dflash")),
    "speculators-dspark": ("speculators", variant(speculators, kind="dspark")),
    "speculators-xpress": ("speculators", speculators),
    "speculators-xpress-next": ("speculators", variant(speculators, sample_from_anchor=True)),
    "speculators-reduced": ("speculators", variant(speculators, reduced=True)),
    "ours": ("ours", ours),
}
