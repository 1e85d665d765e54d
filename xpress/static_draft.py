"""The dFlash drafter's pass in buffers that never move: context and block in one function of tensors.

Committed states go behind each sequence's end, padded to as many rows as a round can commit, and the block's own keys
and values behind them; the next round writes over both. A block's slots see everything up to the block's end, so that
the mask has one row a sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xpress.kernels import Graphs
from xpress.sequences import on_device
from xpress.static import Buffers, StaticSequences, Window, additive, packed_attention


class StaticDraft:
    """One drafter's buffers and graphs, for the batch sizes for which its target has them."""

    def __init__(self):
        self.buffers = Buffers()
        self.graphs = Graphs(self._pass, (), "drafting", self._tensors)
        self._weights: list[Tensor] = []
        self._scale, self._scaled_by = None, None

    def __deepcopy__(self, memo) -> StaticDraft:
        """A copied drafter starts with nothing: states and graphs are those of one."""
        return StaticDraft()

    def open(self, drafter, num_rows: int) -> StaticSequences:
        self.drafter, weight = drafter, drafter.fc.weight
        # a graph reads the scale where it lay: made anew only where it has changed
        facts = (drafter.config.feature_scale, weight.dtype, weight.device)
        if facts != self._scaled_by:
            with torch.inference_mode(False):
                self._scale = torch.tensor(facts[0], dtype=facts[1], device=facts[2])
            self._scaled_by = facts
        self.graphs.sizes = frozenset(drafter.target.graphs)
        shared = [drafter.target.embedding.weight, drafter.rotary.inv_freq, self._scale]
        self._weights = [*drafter.parameters(), *shared]
        return StaticSequences([0] * num_rows, self.buffers)

    def __call__(self, rows: StaticSequences, new: Tensor, counts: list[int], anchor: Tensor) -> Tensor:
        """new [N,c,M·D], of which row r holds counts[r], anchor [N] -> hidden [N,B,D]. On a GPU it is a graph's own:
        the next call overwrites it. The prompts' states, of any number, run without a graph."""
        config, opening = self.drafter.config, not rows.longest
        if not opening:
            new = F.pad(new, (0, 0, 0, config.num_draft + 1 - new.shape[1]))
        rows.open(new.shape[1] + config.block_size)
        held, starts = rows.lengths, [length + count for length, count in zip(rows.lengths, counts)]
        run = self._pass if opening else self.graphs
        hidden = run(new, anchor, *(on_device(at, anchor.device) for at in (held, starts)), length=rows.length)
        rows.commit(counts)
        return hidden

    def _pass(self, new: Tensor, anchor: Tensor, held: Tensor, starts: Tensor, *, length: int) -> Tensor:
        drafter, B = self.drafter, self.drafter.config.block_size
        context = Window(self.buffers, held, new.shape[1], length)
        for i, pair in enumerate(drafter.project(new, context.positions(), self._scale)):
            for kind, states in zip("kv", pair):
                context.write((kind, i), states)
        own = Window(self.buffers, starts, B, length)
        x = drafter.embed(anchor)
        cos, sin = drafter.rotary(own.positions())
        seen = own.mask()[1][:, :, -1:].expand(-1, -1, B, -1)  # the last slot's: all of them see the whole block
        attention = drafter.layers[0].self_attn
        mask = additive(seen, x.dtype, drafter.config.num_attention_heads // attention.kv)
        for i, layer in enumerate(drafter.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            pair = zip("kv", attention.keys_values(normed, cos, sin))
            k, v = (own.write((kind, i), states) for kind, states in pair)
            mixed = packed_attention(attention.queries(normed, cos, sin), k, v, mask, 1.0)
            x = x + attention.o_proj(mixed)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return drafter.norm(x)

    def _tensors(self) -> list[Tensor]:
        return self._weights + self.buffers.tensors()
