"""The memory of a training step, from sizes alone: which tensors of drafter.py, attention.py, trainee.py and loss.py
are alive at the same time.

Every term is a count of numbers times their bytes; w = 4 (fp32), a = 2 under bf16 autocast, else 4. Five moments of a
step can be its peak, the target's forward where it runs in the step apart:

    loss       all activations, the chunk of logits, the gradients that the loss keeps
    head       backward enters: what the loss kept and its scaled copy, gradients of the head
    mlp i      layer i and those below still hold their activations, those above have their gradients
    attention i
    optimiser  all gradients, no activations

Small things (ids, masks, weights of rows) are counted where they grow with the batch, workspaces of BLAS libraries are
not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from xpress.attention import MAX_SCORES
from xpress.drafter_config import DrafterConfig

W = 4  # bytes of weights, gradients and moments


@dataclass(frozen=True)
class Work:
    """What one micro-batch of one process asks for.

    config of the drafter; sequences S of `length` tokens with `anchors` blocks each; tensors: (fed by the head, ce > 0,
    l1 > 0) of each logit tensor in order; rank R of the readout, 0 without a head; head_block: bytes that the head
    saves for backward, in fp32, for one block: (once, for each fed tensor), `hidden` left out; chunk: rows of the loss
    at a time; target: its weights that stay in memory; captured: its layers whose outputs stay, target_inner: its
    MLP's width (both online only); accumulation: micro-batches a step.
    """

    config: DrafterConfig
    drafter: int
    head: int
    maps: int  # numbers of the head's two vocabulary maps
    sequences: int
    length: int
    anchors: int
    tensors: tuple[tuple[bool, bool, bool], ...]
    rank: int
    head_block: tuple[int, int]
    chunk: int
    mixed: bool
    train_drafter: bool
    target: dict[str, int] = field(default_factory=dict)
    captured: int = 0
    target_inner: int = 0
    accumulation: int = 1

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def blocks(self) -> int:
        return self.sequences * self.anchors

    @property
    def slots(self) -> int:
        return self.blocks * self.config.block_size

    @property
    def rows(self) -> int:
        return self.blocks * self.config.num_draft

    @property
    def trained(self) -> int:
        return self.head + self.drafter * self.train_drafter


def widths(c: DrafterConfig) -> tuple[int, int, int, int, int]:
    """D, heads·d, kv·d, d, inner"""
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return c.hidden_size, q, kv, c.head_dim, c.intermediate_size


def layer_bytes(c: DrafterConfig, mixed: bool, first: bool) -> tuple[int, int]:
    """What one slot leaves for backward in one layer -> (attention, MLP).

    A norm keeps its input in fp32, the normed numbers for the gradient of its weight, and what each projection reads:
    under autocast a bf16 copy for each of them, else its output once. The first layer's input is an embedding and needs
    no gradient. Queries and keys are normed too, cos and sin are kept in fp32 for both; queries and keys are kept once
    more as attention reads them, values once, and what o_proj reads. The MLP keeps gate, silu(gate), up and product.
    """
    D, q, kv, d, inner = widths(c)
    narrow = 2 if mixed else W
    reads = lambda n: 2 * n if mixed else W  # noqa: E731
    residual = 0 if first else W
    heads = q * (W + 3 * narrow) + kv * (W + 3 * narrow) + 4 * W * d
    return D * (residual + W + reads(3)) + heads, D * (W + W + reads(2)) + 4 * narrow * inner


def context_bytes(c: DrafterConfig, mixed: bool) -> int:
    """What one context token leaves in `project`: what fc reads, hidden_norm (input in fp32, normed), a copy for each
    projection of each layer (without autocast: one), and per layer keys before and after their norm, rotated in fp32,
    as attention reads them, values, cos and sin."""
    D, _, kv, d, _ = widths(c)
    narrow, L = (2, c.num_hidden_layers) if mixed else (W, c.num_hidden_layers)
    keys = kv * (W + narrow + W + (2 + 2 if mixed else W)) + 2 * W * d
    return len(c.target_layer_ids) * D * narrow + D * (W + narrow) + L * keys + D * (4 * L if mixed else W)


def drafter_bytes(work: Work) -> int:
    """Drafter activations while the loss runs. A frozen drafter keeps what its caller still names: keys and values of
    the context, and the final states (twice: as they are, and those of valid blocks)."""
    c, L = work.config, work.config.num_hidden_layers
    D, _, kv, _, _ = widths(c)
    states = 2 * W * D * work.slots
    if not work.train_drafter:
        return states + work.tokens * L * kv * (W + (2 if work.mixed else W))
    layers = sum(sum(layer_bytes(c, work.mixed, i == 0)) for i in range(L))
    return states + work.slots * (layers + 2 * W * D) + work.tokens * context_bytes(c, work.mixed)


def chunk_buffers(work: Work) -> int:
    """Most fp32 tensors [chunk, V_draft] alive at once in Pass._chunk: base and p; logits of a fed tensor; the summed
    gradient of the base logits; and in token_loss q, then with L1 q − p and a product of both."""
    most, summed = 2, False
    for fed, ce, l1 in work.tensors:
        if not (ce or l1):
            most = max(most, 2 + fed + summed)
            continue
        slope = fed or work.train_drafter
        inner = 1 + ((2 if slope else 1) if l1 else 0)
        most = max(most, 2 + fed + summed + inner)
        summed = summed or (slope and work.train_drafter)
    return most


def head_bytes(work: Work) -> int:
    """What the head's sweeps leave for backward, and the latents twice (as made, as joined). Under autocast matrices
    are read in bf16, and the drafter's states are copied for them once."""
    fed = sum(1 for tensor in work.tensors if tensor[0])
    if not fed:
        return 0
    once, each = work.head_block
    narrow = 2 if work.mixed else W
    saved = work.blocks * (once + fed * each) * narrow // W
    copies = 2 * work.slots * work.config.hidden_size if work.mixed and once else 0
    return saved + copies + 2 * narrow * fed * work.rows * work.rank


def kept_bytes(work: Work) -> int:
    """Gradients that the loss keeps until backward: in hidden and readout in fp32, in the latents as they are."""
    c, fed = work.config, sum(1 for tensor in work.tensors if tensor[0])
    narrow = 2 if work.mixed else W
    hidden = W * work.rows * c.hidden_size * work.train_drafter
    readout = W * c.draft_vocab_size * work.rank if fed else 0
    return hidden + readout + narrow * fed * work.rows * work.rank


def attention_bytes(work: Work) -> int:
    """One chunk of scores in backward: weights in fp32, their narrow copy, the slope, and a product; beside them the
    gradients in keys and values of the context (fp32, over all chunks) and of the layer's own slots."""
    c = work.config
    _, q, kv, _, _ = widths(c)
    one = work.sequences * c.num_attention_heads * c.block_size * (work.length + c.block_size)
    scores = min(work.anchors, max(1, MAX_SCORES // one)) * one
    narrow = 2 if work.mixed else W
    return scores * (3 * W + (2 if work.mixed else 0)) + 2 * W * work.tokens * kv + narrow * work.slots * (q + 2 * kv)


def moments(work: Work, gpus: int = 1, sharded: bool = False) -> dict[str, dict[str, int]]:
    """Bytes by part at each moment of a step that may be its peak: {moment: {part: bytes}}, per process.

    DDP keeps one more copy of the gradients in its buckets. Sharded, weights, moments and gradients are a share each,
    but a step gathers all weights (in bf16 under autocast) and, before it scatters them, holds all gradients.
    """
    c, D = work.config, work.config.hidden_size
    inner, narrow, L = c.intermediate_size, 2 if work.mixed else W, c.num_hidden_layers
    share = gpus if sharded else 1
    every, trained = work.drafter + work.head, work.trained
    still = {
        "weights, fp32": W * every // share,
        "AdamW moments": 2 * W * trained // share,
        **work.target,
    }
    if gpus > 1 and not sharded:
        still["DDP buckets"] = W * trained
    if sharded:
        still["gathered weights"] = narrow * every
    wire = narrow if sharded else W
    before = wire * trained if work.accumulation > 1 else 0  # of earlier micro-batches; sharded only after the last one
    casting = work.mixed and not sharded  # sharded weights are gathered narrow
    copies = 2 * (work.drafter * work.train_drafter + work.head - work.maps) if casting else 0
    readout = 2 * c.draft_vocab_size * work.rank if casting else 0
    kept, drafted, headed = kept_bytes(work), drafter_bytes(work), head_bytes(work)
    captured = work.captured * work.tokens * D * 2
    features = work.tokens * D * (len(c.target_layer_ids) + 1) * 2
    rows = work.rows * ((W + 2) * D + 8 * (len(work.tensors) + 6))
    chunk = min(work.chunk, work.rows) * c.draft_vocab_size * W
    found = {}
    found["loss"] = still | {
        "gradients": before,
        "features": features + captured,
        "bf16 copies": copies + readout,
        "drafter activations": drafted,
        "head activations": headed,
        "rows of the loss": rows,
        "loss chunk": chunk * chunk_buffers(work),
        "loss gradients kept": kept,
    }
    copied = kept + (2 * c.draft_vocab_size * work.rank if work.mixed else 0)
    if work.captured:  # no gradients: one layer's MLP beside the residual, what is captured, its joined copy
        forward = work.tokens * 2 * (4 * D + 3 * work.target_inner)
        found["target"] = still | {"gradients": before, "features": features + captured, "target's forward": forward}
    found["head"] = still | {
        "gradients": before + wire * work.head,
        "features": captured,
        "bf16 copies": copies,
        "drafter activations": drafted,
        "head activations": headed,
        "loss gradients kept": kept + copied,
    }
    total = wire * trained + (W * trained // share if sharded else 0)
    if work.train_drafter:
        layer = (work.drafter - D * (len(c.target_layer_ids) * D + 2)) // max(1, L)
        saved = [layer_bytes(c, work.mixed, i == 0) for i in range(L)]
        context = work.tokens * context_bytes(c, work.mixed)
        for i in reversed(range(L)):
            below = context + work.slots * sum(map(sum, saved[:i]))
            done = before + wire * (work.head + layer * (L - 1 - i))
            common = still | {"features": captured, "bf16 copies": copies, "loss gradients kept": kept}
            flow = 3 * W * D * work.slots
            mlp = work.slots * 3 * narrow * inner + (W + narrow) * D * inner
            found[f"mlp {i}"] = common | {
                "gradients": done,
                "drafter activations": below + work.slots * sum(saved[i]),
                "a layer's backward": flow + mlp,
            }
            found[f"attention {i}"] = common | {
                "gradients": done + wire * 3 * D * inner,
                "drafter activations": below + work.slots * saved[i][0],
                "a layer's backward": flow,
                "attention chunk": attention_bytes(work),
            }
    found["optimiser"] = still | {"gradients": total, "features": captured, "loss gradients kept": kept}
    return found


def peak(found: dict[str, dict[str, int]]) -> tuple[str, dict[str, int]]:
    """The moment with most bytes, and its parts."""
    name = max(found, key=lambda moment: sum(found[moment].values()))
    return name, {part: size for part, size in found[name].items() if size}


def saved_by(head, hidden_size: int, block_size: int) -> tuple[int, int]:
    """Bytes that a head (on the meta device, in fp32) saves for one block: (prepare, latent), its own weights and the
    drafter's states left out. The first is at least 1 where it reads the states with weights."""
    hidden = torch.zeros(1, block_size, hidden_size, device="meta")
    ids = torch.zeros(1, block_size, dtype=torch.long, device="meta")
    own = {weight.untyped_storage()._cdata for weight in head.parameters()}
    seen: dict[int, torch.Tensor] = {}  # a freed storage's address would be taken again

    def note(tensor):
        seen.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    def sizes() -> int:
        skip = own | {hidden.untyped_storage()._cdata}
        return sum(t.untyped_storage().nbytes() for at, t in seen.items() if at not in skip)

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        prepared = head.prepare(hidden)
        reads = int(hidden.untyped_storage()._cdata in seen)
        once = sizes()
        head.latent(prepared, ids)
        return once + reads, sizes() - once
