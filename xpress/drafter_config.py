"""Sizes and conventions of a dFlash drafter, read from and written to the published config.json.

Names and places are z-lab's: `block_size` at top level (newer files: inside `dflash_config`), `mask_token_id` and
`target_layer_ids` inside `dflash_config`. Ours beside them: `sample_from_anchor` (true for the next-token layout),
`draft_vocab_size` and `feature_scale`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from xpress.block import LAYOUTS, NEXT
from xpress.target import check_layer_ids, rope_parameters

SCALINGS = ("default", "linear", "llama3", "yarn")


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The published rule: n ids spread evenly from layer 1 to L − 3; L // 2 for a single one."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


@dataclass(frozen=True)
class DrafterConfig:
    """All that a DFlashDrafter is built from. Raises ValueError, naming the setting, where values cannot work."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    rope_parameters: dict
    block_size: int = 16
    layout: str = "infill"
    num_draft: int = 0  # 0: as many as the layout allows
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    draft_ids: tuple[int, ...] | None = field(default=None, repr=False)  # target ids of a reduced draft vocabulary
    feature_scale: tuple[float, ...] = ()  # powers of two, one a captured layer; folded into fc when saved

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen dataclass)
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r}: known layouts are {', '.join(LAYOUTS)}")
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size}: a block needs the anchor slot and at least one more")
        most = LAYOUTS[self.layout].max_draft(self.block_size)
        put("num_draft", self.num_draft or most)
        if not 1 <= self.num_draft <= most:
            raise ValueError(f"num_draft={self.num_draft}: a block of {self.block_size} slots drafts 1 … {most} tokens")
        put("target_layer_ids", tuple(self.target_layer_ids))
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids: the drafter needs at least one layer of the target")
        check_layer_ids(self.target_layer_ids, self.num_target_layers)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id}: outside the target's embedding of {self.vocab_size} rows; "
                "choose an id that no text uses (never pad, which is often the end-of-text id)"
            )
        put("feature_scale", tuple(self.feature_scale) or (1.0,) * len(self.target_layer_ids))
        if self.draft_ids is not None:
            put("draft_ids", tuple(self.draft_ids))
            inside = all(0 <= i < self.vocab_size for i in self.draft_ids)
            if list(self.draft_ids) != sorted(set(self.draft_ids)) or not inside or not self.draft_ids:
                raise ValueError(
                    "draft_ids: a reduced vocabulary is a non-empty, ascending list of distinct target ids"
                )
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads}, num_key_value_heads={self.num_key_value_heads}, "
                f"head_dim={self.head_dim}: the first must be a multiple of the second, the third even"
            )
        if self.rope_parameters["rope_type"] not in SCALINGS:
            kind = self.rope_parameters["rope_type"]
            raise ValueError(f"rope_type={kind!r}: supported rotary scalings are {', '.join(SCALINGS)}")

    @property
    def draft_vocab_size(self) -> int:
        return len(self.draft_ids) if self.draft_ids else self.vocab_size

    @classmethod
    def for_target(cls, target, num_hidden_layers: int, block_size: int, mask_token_id: int | None = None, **settings):
        """A fresh drafter shaped like the target's own layers. `settings` overrides any field."""
        ours, L = target.config, target.num_layers
        if mask_token_id is None:
            mask_token_id = getattr(target.tokenizer, "mask_token_id", None)
        if mask_token_id is None:
            raise ValueError(
                "mask_token_id: neither the drafter's settings nor the tokenizer name one; give drafter.mask_token_id="
                "<an id that no text uses> (pad is no substitute: it is often the end-of-text id)"
            )
        shape = dict(
            hidden_size=target.hidden_size,
            intermediate_size=ours.intermediate_size,
            num_attention_heads=ours.num_attention_heads,
            num_key_value_heads=ours.num_key_value_heads,
            head_dim=getattr(ours, "head_dim", None) or ours.hidden_size // ours.num_attention_heads,
            vocab_size=target.vocab_size,
            rms_norm_eps=getattr(ours, "rms_norm_eps", 1e-6),
            max_position_embeddings=target.context_length or 40960,
            num_target_layers=L,
            target_layer_ids=default_layer_ids(L, num_hidden_layers),
            rope_parameters=rope_parameters(ours),
        )
        shape.update({key: value for key, value in settings.items() if value is not None})
        return cls(
            num_hidden_layers=num_hidden_layers, block_size=block_size, mask_token_id=int(mask_token_id), **shape
        )

    @classmethod
    def from_json(cls, raw: dict, draft_ids=None) -> DrafterConfig:
        """A published (or our own) config.json. Refuses by name what this drafter does not compute."""
        inner = raw.get("dflash_config") or {}
        for key, ours in (("hidden_act", "silu"), ("attention_bias", False)):
            if raw.get(key, ours) != ours:
                raise ValueError(f"drafter config: {key}={raw[key]!r} is not supported (only {ours!r})")
        for key in ("causal", "causal_head", "projector_type", "conv_kernel_size", "selector_rank"):
            if inner.get(key):
                raise ValueError(
                    f"drafter config: dflash_config.{key}={inner[key]!r} belongs to another drafter than dFlash"
                )
        odd = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
        if not raw.get("layer_types") and raw.get("use_sliding_window"):
            odd = ["sliding_attention"]
        if odd:
            raise ValueError(
                f"drafter config: layer type '{odd[0]}' is not supported; every layer needs full_attention"
            )
        find = lambda key, default=None: inner.get(key, raw.get(key, default))  # noqa: E731
        missing = [key for key in ("mask_token_id", "target_layer_ids", "block_size") if find(key) is None]
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        missing += [key for key in (*sizes, "num_target_layers", "vocab_size") if raw.get(key) is None]
        if missing:
            raise ValueError(f"drafter config: {', '.join(missing)} missing; is this config.json a dFlash drafter's?")
        for key in (*sizes, "num_target_layers", "vocab_size", "block_size", "head_dim", "max_position_embeddings"):
            value = find(key) if key == "block_size" else raw.get(key)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"drafter config: {key}={value!r} is no positive whole number; restore config.json")
        ids, mask = find("target_layer_ids"), find("mask_token_id")
        if not isinstance(ids, list | tuple) or any(type(i) is not int for i in [*ids, mask]):
            raise ValueError(f"drafter config: target_layer_ids={ids!r}, mask_token_id={mask!r}: give whole numbers")
        return cls(
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=raw["num_attention_heads"],
            num_key_value_heads=raw["num_key_value_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            vocab_size=raw["vocab_size"],
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            max_position_embeddings=raw.get("max_position_embeddings", 40960),
            initializer_range=raw.get("initializer_range", 0.02),
            num_target_layers=raw["num_target_layers"],
            target_layer_ids=find("target_layer_ids"),
            mask_token_id=find("mask_token_id"),
            block_size=find("block_size"),
            layout="next" if find("sample_from_anchor") else "infill",
            num_draft=find("num_draft", 0),
            rope_parameters=rope_parameters(raw),
            draft_ids=draft_ids,
            feature_scale=find("feature_scale", ()),
        )

    def to_json(self) -> dict:
        """config.json with the published fields; other engines ignore what is ours."""
        rope = dict(self.rope_parameters)
        scaling = None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling,
            "rope_parameters": rope,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": self.num_hidden_layers,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "use_cache": True,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "sample_from_anchor": self.layout == NEXT.name,
            "num_draft": self.num_draft,
            "feature_scale": list(self.feature_scale),
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)},
        }

    def warn_if_rope_differs(self, theirs: dict, name: str):
        """A drafter whose rotary base is not its target's drafts badly and never fails: say it aloud."""
        if dict(self.rope_parameters) != theirs:
            warnings.warn(
                f"the drafter's rotary embedding {dict(self.rope_parameters)} differs from {name}'s {theirs}; unless "
                "it was trained so, acceptance will suffer: set rope_theta and rope_scaling in its config.json",
                stacklevel=3,
            )
