"""Refinement by the fused step: heads whose passes the kernels can run on their own (`CorrectionHead.weights`).

A head keeps a step for each batch size, layout and readout that it met, with the graphs captured of it. Everything
here is speed: tokens, passes and q are those of the solvers in refine.py.
"""

from __future__ import annotations

from xpress import kernels
from xpress.block import Block
from xpress.draft import Draft, Redrawn
from xpress.heads.base import CorrectionHead
from xpress.kernels import Graphs, RefineStep
from xpress.sampling import DRAFT, Noise, Sampling

MOST_SLOTS = 32  # of a block, in the latents' kernel
KEPT = 16  # steps of a head; the one that was used longest ago goes


def fits(head: CorrectionHead, block: Block, sampling: Sampling) -> bool:
    """Can the fused step draft this block, and does it pay? It saves launches, of which a CPU has none; top-k and top-p
    need whole rows."""
    if head.weights() is None or head.top_c or block.hidden.shape[1] > MOST_SLOTS:
        return False
    if not sampling.greedy_draft and (sampling.top_k or sampling.top_p < 1):
        return False
    return kernels.backend(block.hidden, head.readout.weight) == "triton"


def fused(head: CorrectionHead, block: Block, passes: int | str, sampling: Sampling, noise: Noise | None) -> Draft:
    """The draft after `passes`, a number or 'auto', by one call of the step (on a GPU one graph, for the batch sizes
    in head.graph_sizes). Tensors other than ids are the step's own: valid until the head drafts again."""
    sampled = not sampling.greedy_draft
    run = _step_of(head, block, sampled)
    base, known = block.base_logits(), block.known_ids
    if not sampled:
        found = run(block.hidden, base, known, None, passes=passes)
        drawn = None
    else:
        address = noise.address(DRAFT, block.hidden.device)
        found = run(block.hidden, base, known, address, passes=passes, temperature=sampling.temperature)
        drawn = Redrawn(base, found.latent, head.readout.weight, sampling.temperature, found.logit, found.lse)
    return Draft(found.ids.clone(), drawn, found.passes, block, found.settled)


def _step_of(head: CorrectionHead, block: Block, sampled: bool):
    made = head.__dict__.setdefault("_steps", {})  # left out of copies: see CorrectionHead
    weight, screen = head.readout.weight, None if sampled else head.screen
    where = weight.data_ptr(), weight.dtype, weight.device, block.hidden.dtype
    # ids of objects, not of freed ones: the step that is kept holds both
    key = (
        len(block),
        block.num_draft,
        block.layout,
        id(block.draft_ids),
        id(screen),
        sampled,
        head.graph_sizes,
        *where,
    )
    if key in made:
        made[key] = made.pop(key)  # the youngest stands last
        return made[key]
    step = RefineStep(
        head.weights(),
        weight,
        num_blocks=len(block),
        num_draft=block.num_draft,
        num_known=block.layout.num_known,
        ids=block.draft_ids,
        screen=screen,
        sampled=sampled,
    )

    def run(hidden, base, known, address, **how):
        return step(base, head.constant(head.prepare(hidden), known), address=address, **how)

    made[key] = Graphs(run, head.graph_sizes, "refine", head.parameters)
    if len(made) > KEPT:
        del made[next(iter(made))]
    return made[key]
