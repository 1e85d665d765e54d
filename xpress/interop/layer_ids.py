"""What a layer id means, in one place."""

from __future__ import annotations

OUTPUT, PUBLISHED, INPUT = "output", "published", "input"  # ours; z-lab and its kin; speculators
_SHIFT = {OUTPUT: 0, PUBLISHED: 0, INPUT: 1}


def layer_ids(ids, given: str, wanted: str, num_layers: int) -> tuple[int, ...]:
    """Ids of a target's captured layers from one convention into another.

    | convention | formats | id l is | hidden_states | embedding output | last layer of L |
    |---|---|---|---|---|---|
    | output | ours | the output of layer l | l + 1 | −1: refused | L − 1: its raw stream |
    | published | z-lab and its kin | the output of layer l | l + 1 | −1: refused | L − 1: refused |
    | input | speculators, vLLM's auxiliary ids | the output of layer l − 1 | l | 0: refused | L: refused |

    hidden_states: the index in transformers' tuple. The embedding output is not captured by this library. The last
    layer is refused wherever the reference reads transformers' tuple, which holds the normed state there and not the
    stream that this library captures; serving engines capture what enters a layer, so never that output.
    Raises ValueError for an id that either side does not mean.
    """
    embedding, last = -1 + _SHIFT[given], num_layers - 1 + _SHIFT[given]
    for found in ids:
        where = f"layer ids {list(ids)}: {found}"
        if found == embedding:
            raise ValueError(f"{where} is the embedding output, which is not captured here; no such checkpoint is read")
        if not embedding < found <= last:
            raise ValueError(
                f"{where} is no decoder layer of a target with {num_layers}; give the target that it belongs to"
            )
        if found == last and not given == wanted == OUTPUT:
            raise ValueError(
                f"{where} is the last layer: the formats differ in whether its state is normed and engines do not "
                "capture it; only checkpoints of our own format use it"
            )
    return tuple(found - _SHIFT[given] + _SHIFT[wanted] for found in ids)
