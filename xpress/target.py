"""The frozen target: any full-attention causal LM of Hugging Face, with exact roll-back and its layers' hidden states.

Layer ids follow the published drafters: id l is the OUTPUT of decoder layer l (0 … L − 1), raw residual stream, before
the final norm. In a Hugging Face `hidden_states` tuple that is index l + 1, except for the last layer, where the tuple
holds the normed state; a hook has no such exception.
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from xpress.lean import Keeper, LeanBody, choose_loop
from xpress.linear import linear
from xpress.sampling import at_least_fp32
from xpress.sequences import Sequences
from xpress.static import SIZES, StaticSteps


@dataclass(frozen=True)
class Features:
    """What training reads from the target: hidden [S,T,M·D] of the captured layers, last [S,T,D] post-norm."""

    hidden: Tensor
    last: Tensor


class _Layer(DynamicLayer):
    """Keys and values of one decoder layer, behind transformers' own cache interface. Never its `crop`: its meaning
    changed between releases, and at 0 it removes nothing."""

    def __init__(self, sequences: Sequences, index: int):
        super().__init__()
        self.sequences, self.index = sequences, index
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        pair = ((kind, states.transpose(1, 2)) for kind, states in (("k", key_states), ("v", value_states)))
        self.keys, self.values = (self.sequences.write((k, self.index), new).transpose(1, 2) for k, new in pair)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.sequences.longest


class Target:
    """A frozen causal LM. `embedding` and `lm_head` are the model's own modules.

    Decoding keeps N sequences: `prefill` opens them, `score` runs a block of each, `keep` commits a prefix of each.
    loop: how decoding runs the layers: "lean" (lean.py), "static" (the same in buffers that never move, on a GPU as
    CUDA graphs for batches of the sizes in `graphs`), "plain" (transformers' modules), "auto" (static on a GPU and lean
    elsewhere, where it can); the attribute says which it is, chosen anew by each prefill. Training always takes the
    modules. Raises ValueError for attention that cannot be rolled back (sliding, chunked, linear, hybrid), for
    loop="lean" and "static" where that loop does not know the model, and for sizes that are no whole numbers from 1 up.
    """

    def __init__(self, model, tokenizer=None, name: str = "", loop: str = "auto", graphs=SIZES):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        self._refuse_unsupported()
        self.body = model.get_decoder()
        self.embedding = model.get_input_embeddings()
        self.lm_head = model.get_output_embeddings()
        self.hidden_size = self.config.hidden_size
        self.vocab_size = self.embedding.weight.shape[0]
        self.num_layers = len(self.body.layers)
        self.context_length = getattr(self.config, "max_position_embeddings", None)
        accepted = inspect.signature(type(self.body).forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.2x
        self._layer_ids: tuple[int, ...] = ()
        self._by_hook = True
        self._hooks: list = []
        self._captured: dict[int, Tensor] = {}
        self._asked, self._lean, self.loop = loop, None, choose_loop(loop, model, self.name)
        self._steps, self._stacked = StaticSteps(graphs), None
        self.graphs = self._steps.sizes
        self.cache = self.sequences = None

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        dtype: str | torch.dtype = "float32",
        device: str = "cpu",
        revision=None,
        device_map=None,
        loop: str = "auto",
        graphs=SIZES,
    ):
        """`name` is a local folder or a hub id; device_map spreads the layers over devices, as in transformers, where
        one does not hold them. Raises OSError naming `target` where neither can be read."""
        from transformers import AutoModelForCausalLM, AutoTokenizer  # early 5.x: they drag in accelerate and triton

        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        try:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, revision=revision, device_map=device_map)
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        except (OSError, ValueError) as error:
            known = "the folder has no readable model" if Path(name).is_dir() else "no such folder, and no hub access"
            raise OSError(f"target={name}: {known}. Give a local folder or a hub id (with network). {error}") from error
        return cls(model if device_map else model.to(device), tokenizer, str(name), loop, graphs)

    def _refuse_unsupported(self):
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if not kinds and getattr(self.config, "sliding_window", None):
            if getattr(self.config, "use_sliding_window", True):
                kinds = {"sliding_attention"}
        bad = sorted(kinds - {"full_attention"})
        if bad or not hasattr(self.model.get_decoder(), "layers"):
            kind = bad[0] if bad else type(self.model).__name__
            raise ValueError(
                f"target {self.name}: layer type '{kind}' keeps a cache that cannot be rolled back token by token; "
                "targets need full attention in every layer"
            )
        for field in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
            if getattr(self.config, field, None) not in (None, 1, 1.0):
                raise ValueError(
                    f"target {self.name}: {field} changes the logits after lm_head, which is not supported"
                )

    @property
    def device(self):
        return self.embedding.weight.device

    @property
    def dtype(self):
        return self.embedding.weight.dtype

    # --- decoding ---------------------------------------------------------------------------------------------------

    def prefill(self, prompts: list[list[int]], layer_ids=()) -> tuple[Tensor, Tensor | None]:
        """Opens N sequences -> (logits [N,V] of the token after each prompt, hidden [N,T,M·D] of `layer_ids` or None).

        Prompts are padded on the right, where causal attention cannot see; row r of hidden holds len(prompts[r]).
        """
        if not prompts or not all(prompts):
            raise ValueError("a prompt is empty; a sequence needs at least one token")
        self._choose(layer_ids)
        if self.loop == "static":
            self.sequences = self._steps.open(self._lean, self.lm_head, len(prompts))
        else:
            self.sequences = Sequences([0] * len(prompts))
        self.cache = Cache(layers=[_Layer(self.sequences, i) for i in range(self.num_layers)])
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
        for row, prompt in zip(ids, prompts):
            row[: len(prompt)] = torch.tensor(prompt)
        last = self._run(ids.to(self.device))
        ends = torch.tensor(lengths, device=last.device) - 1
        return self.lm_head(last[torch.arange(len(prompts), device=last.device), ends]), self.keep(lengths)

    def score(self, anchor: Tensor, draft: Tensor) -> Tensor:
        """anchor [N], draft ids [N,G] -> logits [N,G+1,V]; row k − 1 judges draft token k, row G the token after.

        The static loop's logits on a GPU, and what `keep` then returns, are valid until the next call."""
        ids = torch.cat([anchor[:, None], draft], 1)
        if self.loop == "static":
            scores, self._stacked = self._steps(ids, self.sequences, self._layer_ids)
            return scores
        last = self._run(ids)
        return linear(last, self.lm_head.weight, self.lm_head.bias) if self._lean else self.lm_head(last)

    def keep(self, counts: list[int]) -> Tensor | None:
        """Commits the first counts[r] of the tokens just run in sequence r, drops the rest -> their hidden
        [N,max(counts),M·D]."""
        self.sequences.commit(counts)
        return self._features()[:, : max(counts)] if self._layer_ids else None

    def select(self, rows: list[int]):
        """Goes on with these sequences alone."""
        self.sequences.select(rows)

    def _run(self, ids: Tensor) -> Tensor:
        rows = self.sequences
        rows.open(ids.shape[1])
        self._stacked = None
        if self._lean:
            last, found = self._lean(ids, rows, self._layer_ids)
            self._captured.update(found)  # the dict that hooks of ours write to as well
            return last
        ragged = {} if rows.even else {"attention_mask": self._mask(), "position_ids": rows.positions(ids.device)}
        return self.body(
            input_ids=ids, use_cache=True, **ragged, **{self._cache_argument: self.cache}
        ).last_hidden_state

    def _choose(self, layer_ids):
        """The loop of the sequences that open. Weights may have moved since the last ones, or modules been changed."""
        self.capture(layer_ids, by_hook=self._asked == "plain")  # our own hooks are no reason against the lean loop
        self.loop = choose_loop(self._asked, self.model, self.name)
        self._lean = None if self.loop == "plain" else LeanBody(self.model)
        self.capture(layer_ids, by_hook=self._lean is None)

    def _mask(self) -> Tensor:
        """[N,1,n,T] for sequences of different lengths; those of one length take the model's own path."""
        kind, visible = self.config._attn_implementation, self.sequences.visible(self.device)[:, None]
        if kind == "sdpa":
            return visible
        if kind != "eager":
            raise ValueError(
                f"target {self.name}: attention '{kind}' takes no mask; load it with sdpa, or batch_size=1"
            )
        return torch.where(visible, 0.0, torch.finfo(self.dtype).min).to(self.dtype)

    # --- training: whole sequences ----------------------------------------------------------------------------------

    @torch.no_grad()
    def features(self, ids: Tensor, positions: Tensor, layer_ids) -> Features:
        """ids [S,T], positions [S,T] that restart at 0 with each document -> Features.

        Documents of one row never mix: without cache and attention mask, transformers reads restarting positions as
        document borders. (With its default cache it would mix them silently, hence use_cache=False.)
        """
        self.capture(layer_ids)
        self._stacked = None
        last = self.body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        return Features(self._features(), last)

    def log_norm(self, last: Tensor, chunk: int = 256) -> Tensor:
        """log Σ exp of the logits over the whole vocabulary: post-norm states [...,D] -> [...] in fp32."""
        flat = last.reshape(-1, last.shape[-1])
        parts = [at_least_fp32(self.lm_head(part)).logsumexp(-1) for part in flat.split(chunk)]
        return torch.cat(parts).view(last.shape[:-1]) if parts else last.new_zeros(last.shape[:-1])

    def release_layers(self):
        """Frees the decoder layers, for training from cached features: embedding and lm_head stay."""
        self.body.layers.to("meta")

    # --- capturing --------------------------------------------------------------------------------------------------

    def capture(self, layer_ids, by_hook: bool = True):
        """Choose the decoder layers whose outputs are kept; the lean loop hands them over without a hook. Raises
        ValueError for an id outside 0 … L − 1."""
        layer_ids = tuple(layer_ids)
        if (layer_ids, by_hook) == (self._layer_ids, self._by_hook):
            return
        check_layer_ids(layer_ids, self.num_layers)
        for hook in self._hooks:
            hook.remove()
        self._captured = {}
        self._layer_ids, self._by_hook = layer_ids, by_hook
        keepers = {l: Keeper(self._captured, l) for l in set(layer_ids) if by_hook}
        self._hooks = [self.body.layers[l].register_forward_hook(keeper) for l, keeper in keepers.items()]

    def _features(self) -> Tensor:
        if self._stacked is not None:
            return self._stacked
        # a device_map spreads layers
        return torch.cat([self._captured[l].to(self.device) for l in self._layer_ids], -1)

    def fingerprint(self) -> str:
        """sha256 over names, shapes and a strided sample of every weight in bf16: the same for any load dtype."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.model.state_dict().items()):
            flat = weight.detach().flatten()
            part = flat[:: max(1, len(flat) // 1024)].to(torch.bfloat16).float().cpu()
            digest.update(f"{name}{tuple(weight.shape)}".encode() + part.numpy().tobytes())
        return digest.hexdigest()


def check_layer_ids(layer_ids, num_layers: int):
    """Raises ValueError unless every id names a decoder layer's output."""
    for layer_id in layer_ids:
        if not 0 <= layer_id < num_layers:
            raise ValueError(
                f"target_layer_ids={list(layer_ids)}: {layer_id} is no decoder layer; id l is the output of layer l, "
                f"and this target has layers 0 … {num_layers - 1}"
            )


def rope_parameters(config) -> dict:
    """Rotary base and scaling of a config (object or dict): the new place first, then the old one.

    -> {"rope_theta": float, "rope_type": str, ...}. Raises ValueError where no base is written down at all.
    """
    read = config.get if isinstance(config, dict) else lambda key, default=None: getattr(config, key, default)
    old = dict(read("rope_scaling") or {})
    merged = {**old, **(read("rope_parameters") or {})}
    theta = merged.get("rope_theta", read("rope_theta"))
    if theta is None:
        raise ValueError("rope_theta: the config has no rotary base, neither in rope_parameters nor at top level")
    merged["rope_theta"] = float(theta)
    merged["rope_type"] = merged.get("rope_type", merged.pop("type", "default"))
    merged.pop("type", None)
    return merged
