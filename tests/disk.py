"""Toys on disk: a causal LM with a real tokenizer, and a drafter in the published layout written without our code."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from toys import make_model
from transformers import PreTrainedTokenizerFast

from xpress.target import Target

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% if not enable_thinking | default(true) %}<think></think>{% endif %}"
    "{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE, **special) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 280 ids, pad 0, <s> 1 (which plain text gets in front), </s> 2 to end with, no mask token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(
        [TEMPLATE, "the user asks how many of them there are, and the assistant answers"], trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **special}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    return fast


def save_model(folder: Path, kind: str = "llama", template: str | None = TEMPLATE, **changes) -> Path:
    """A folder as the hub has them: a toy of `kind` whose embedding has rows beyond the tokenizer's ids (V = 300)."""
    settings = dict(vocab_size=300, max_position_embeddings=1024, **changes)
    make_model(kind, **settings).save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return folder


def saved_target(folder: Path, **changes) -> tuple[Target, dict]:
    """`save_model`'s target, loaded from there, and the provenance of checkpoints that name it."""
    target = Target.from_pretrained(str(save_model(folder, **changes)))
    return target, {"target": {"name": str(folder), "fingerprint": target.fingerprint()}}


def published_tensors(size, inner, heads, kv, dim, layers, num_layer_ids, seed=0, dtype=torch.float32) -> dict:
    """Random tensors under the names that published dFlash drafters have."""
    torch.manual_seed(seed)
    shapes = {"fc": (size, num_layer_ids * size)}
    shapes |= {name: (size,) for name in ("hidden_norm", "norm")}
    for i in range(layers):
        shapes |= {f"layers.{i}.{name}": (size,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"layers.{i}.self_attn.{name}": (dim,) for name in ("q_norm", "k_norm")}
        shapes |= {f"layers.{i}.self_attn.{name}_proj": (kv * dim, size) for name in "kv"}
        shapes |= {
            f"layers.{i}.self_attn.q_proj": (heads * dim, size),
            f"layers.{i}.self_attn.o_proj": (size, heads * dim),
        }
        shapes |= {f"layers.{i}.mlp.{name}_proj": (inner, size) for name in ("gate", "up")}
        shapes |= {f"layers.{i}.mlp.down_proj": (size, inner)}
    make = lambda shape: (1 + 0.1 * torch.randn(shape)) if len(shape) == 1 else 0.1 * torch.randn(shape)  # noqa: E731
    return {f"{name}.weight": make(shape).to(dtype) for name, shape in shapes.items()}


def published_drafter(folder: Path, target, block_size=4, mask_token_id=None, dtype=torch.float32, **changes) -> Path:
    """config.json and model.safetensors of a two-layer dFlash drafter for a toy target, in the published layout."""
    ours = target.config
    dim = getattr(ours, "head_dim", None) or ours.hidden_size // ours.num_attention_heads
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": block_size,
        "bos_token_id": 1,
        "dflash_config": {"mask_token_id": mask_token_id or target.vocab_size - 1, "target_layer_ids": [0, 2]},
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": 2,
        "head_dim": dim,
        "hidden_act": "silu",
        "hidden_size": ours.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": ours.intermediate_size,
        "layer_types": ["full_attention"] * 2,
        "max_position_embeddings": ours.max_position_embeddings,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_attention_heads": ours.num_attention_heads,
        "num_hidden_layers": 2,
        "num_key_value_heads": ours.num_key_value_heads,
        "num_target_layers": ours.num_hidden_layers,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": ours.rope_parameters["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": target.vocab_size,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    sizes = ours.hidden_size, ours.intermediate_size, ours.num_attention_heads, ours.num_key_value_heads, dim
    save_file(published_tensors(*sizes, 2, 2, dtype=dtype), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def fake_engine(folder: Path, body: str) -> str:
    """A program that is called as the interpreter of a serving engine is."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport json, sys\nrequest, answer = sys.argv[2:]\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
