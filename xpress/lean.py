"""The target's decoder layers run by a short loop of our own: fused projections, states written in place.

The same weights and the same arithmetic as transformers' modules (RMSNorm in fp32, rotary embedding, grouped-query
attention, SwiGLU), without their overhead at every layer: q, k, v are one product, gate and up another. The fused
weights are the modules' own, laid out one behind the other, so nothing is held twice and nothing can go stale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xpress.linear import linear
from xpress.sequences import Sequences
from xpress.static import additive, packed_attention

LOOPS = ("auto", "lean", "plain", "static")
KINDS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}  # model_type -> its classes' name
SIDE_BY_SIDE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Keeper:
    """A forward hook that keeps a decoder layer's output in `kept` and changes nothing. The loop may pass it by, also
    where it is another Target's on the same model."""

    def __init__(self, kept: dict[int, Tensor], layer_id: int):
        self.kept, self.layer_id = kept, layer_id

    def __call__(self, module, args, output):
        # a decoder layer returns its tensor in transformers 5, a tuple that begins with it before
        self.kept[self.layer_id] = output if isinstance(output, Tensor) else output[0]


def only_watches(hook) -> bool:
    """Ours, and those that transformers leaves on a model once it was asked for hidden states."""
    return isinstance(hook, Keeper) or getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def choose_loop(asked: str, model, name: str) -> str:
    """-> "lean" (what auto takes where it can be had), "plain" or "static". Raises ValueError for another setting, and
    where "lean" or "static" is asked for and cannot be had."""
    if asked not in LOOPS:
        raise ValueError(f"target.loop={asked}: known are {', '.join(LOOPS)}")
    why = None if asked == "plain" else why_not(model)
    if asked in ("lean", "static") and why:
        raise ValueError(f"target.loop={asked}: target {name} cannot run that way, {why}; give auto or plain")
    if asked == "plain" or why:
        return "plain"
    return "lean" if asked == "auto" else asked


def why_not(model) -> str | None:
    """What keeps a model from being run by the lean loop, or None. Whatever changes how its modules work (hooks,
    adapters, quantised layers) does, since the loop passes the modules by."""
    config = model.config.get_text_config()
    kind = KINDS.get(config.model_type)
    if kind is None:
        return f"the lean loop knows {', '.join(KINDS)} and no {config.model_type}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"its layers have {config.hidden_act}, the lean loop silu"
    if getattr(config, "_attn_implementation", "sdpa") not in ("sdpa", None):
        return f"its attention is {config._attn_implementation}, the lean loop's sdpa"
    body = model.get_decoder()
    devices = {parameter.device for parameter in body.parameters()}
    if len(devices) != 1:
        return f"it lies on {len(devices)} devices"
    if devices == {torch.device("meta")}:
        return "its weights were given up"
    own = {
        "SiLUActivation",
        *(f"{kind}{part}" for part in ("DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding", "Model")),
    }
    for path, module in body.named_modules():
        if type(module) not in (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU) and type(module).__name__ not in own:
            return f"{path or 'its body'} is a {type(module).__name__}"
        strange = [hook for hook in module._forward_hooks.values() if not only_watches(hook)]
        if strange or module._forward_pre_hooks or "forward" in vars(module):
            return f"{path or 'its body'} has a hook or another forward"
    for layer in body.layers:
        for names in SIDE_BY_SIDE:
            found = [module for path, module in layer.named_modules() if path.rpartition(".")[2] in names]
            if len({module.bias is None for module in found}) > 1 or len({m.weight.dtype for m in found}) > 1:
                return f"{', '.join(names)} do not agree in bias or dtype"
    return None


class LeanBody:
    """`LeanBody(model)(ids, sequences, layer_ids)` -> post-norm states [N,n,D], {layer id: its output [N,n,D]}.
    sequences: Sequences with a step open, or a Window of static.py.

    For a model of which `why_not` says nothing. Making one lays the weights side by side where they do not lie so
    yet, and costs next to nothing where they do: make it anew wherever they may have moved.
    """

    def __init__(self, model):
        body = model.get_decoder()
        self.embedding, self.rotary, self.norm = body.embed_tokens, body.rotary_emb, body.norm
        self.layers = [_Layer(layer) for layer in body.layers]

    def __call__(self, ids: Tensor, sequences: Sequences, layer_ids=()) -> tuple[Tensor, dict[int, Tensor]]:
        x, captured = self.embedding(ids), {}
        cos, sin = self.rotary(x, sequences.positions(ids.device))
        half = sin.shape[-1] // 2
        turn = cos[:, :, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, :, None]
        causal, mask = sequences.mask(ids.device)
        packed = mask is not None and (ids.is_cuda or sequences.fixed)
        if packed:
            mask = additive(mask, x.dtype, self.layers[0].heads // self.layers[0].kv)
        for i, layer in enumerate(self.layers):
            x = layer(x, turn, mask, causal, packed, i, sequences)
            if i in layer_ids:
                captured[i] = x
        return _rms(self.norm, x), captured

    def tensors(self) -> list[Tensor]:
        """All that a pass reads of the model, fused weights once."""
        found = [self.embedding.weight, self.norm.weight, self.rotary.inv_freq]
        return found + [tensor for layer in self.layers for tensor in layer.tensors()]


class _Layer:
    """One decoder layer: the modules' own parameters, those of parallel projections side by side."""

    def __init__(self, layer):
        a, m = layer.self_attn, layer.mlp
        self.norm, self.post = layer.input_layernorm, layer.post_attention_layernorm
        self.o, self.down = a.o_proj, m.down_proj
        self.qkv = fuse(a.q_proj, a.k_proj, a.v_proj)
        self.gate_up = fuse(m.gate_proj, m.up_proj)
        self.q_norm, self.k_norm = getattr(a, "q_norm", None), getattr(a, "k_norm", None)
        self.scale, self.dim = a.scaling, a.head_dim
        self.heads, self.kv = a.q_proj.weight.shape[0] // self.dim, a.k_proj.weight.shape[0] // self.dim

    def tensors(self) -> list[Tensor]:
        norms = [norm.weight for norm in (self.norm, self.post, self.q_norm, self.k_norm) if norm is not None]
        return norms + [
            t for t in (*self.qkv, *self.gate_up, *self.o.parameters(), *self.down.parameters()) if t is not None
        ]

    def __call__(self, x: Tensor, turn, mask, causal: bool, packed: bool, index: int, sequences: Sequences) -> Tensor:
        mixed = linear(_rms(self.norm, x), *self.qkv).unflatten(-1, (-1, self.dim))
        qk, v = mixed.split([self.heads + self.kv, self.kv], -2)
        if self.q_norm is not None:
            q, k = qk.split([self.heads, self.kv], -2)
            qk = torch.cat([_rms(self.q_norm, q), _rms(self.k_norm, k)], -2)
        q, k = _rotate(qk, *turn).split([self.heads, self.kv], -2)
        k, v = sequences.write(("k", index), k), sequences.write(("v", index), v)
        if packed:
            out = packed_attention(q, k, v, mask, self.scale)
        else:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            gqa = self.heads != self.kv
            how = {"attn_mask": mask, "is_causal": causal, "scale": self.scale, "enable_gqa": gqa}
            out = F.scaled_dot_product_attention(q, k, v, **how).transpose(1, 2).flatten(2)
        x = x + linear(out, self.o.weight, self.o.bias)
        gate, up = linear(_rms(self.post, x), *self.gate_up).chunk(2, -1)
        return x + linear(F.silu(gate) * up, self.down.weight, self.down.bias)


def _rms(norm, x: Tensor) -> Tensor:
    """As the models' own, to the bit: scaled in fp32 whatever x is, then cast, then weighted."""
    wide = x.float()
    return norm.weight * F.rms_norm(wide, wide.shape[-1:], eps=norm.variance_epsilon).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N,n,heads,d]; sin with its first half negated, where the halves' exchange would negate x."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([x[..., half:], x[..., :half]], -1) * sin


def fuse(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) of parallel projections in one. The modules' parameters become views of the same memory."""
    weight = _side_by_side([linear.weight for linear in linears])
    return weight, None if linears[0].bias is None else _side_by_side([linear.bias for linear in linears])


def _side_by_side(parameters: list[nn.Parameter]) -> Tensor:
    """The rows of all in one tensor; copied only where they do not lie one behind the other yet."""
    first, rows = parameters[0], [len(parameter) for parameter in parameters]
    storage, place = first.untyped_storage().data_ptr(), first.storage_offset()
    adjacent = True
    for parameter in parameters:
        adjacent &= parameter.is_contiguous() and parameter.untyped_storage().data_ptr() == storage
        adjacent &= parameter.storage_offset() == place
        place += parameter.numel()
    # no inference tensors: the modules go on to be used, moved and saved outside inference mode
    with torch.inference_mode(False), torch.no_grad():
        if adjacent:
            return first.detach().as_strided((sum(rows), *first.shape[1:]), first.stride(), first.storage_offset())
        whole = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, whole.split(rows)):
            parameter.data = part
        return whole
