"""Is sampled output distributed as the target's own? The library's loop, held to exact probabilities.

A small random target is asked for many short continuations of one prompt, with speculation and without. Pairs of
neighbouring tokens are compared with their exact joint distribution, which so small a target lets us enumerate, and
with the pairs of plain autoregression. Everything under test is the code that serves real models: drafter, heads,
`decode_batch`. Temperature, top-k and top-p themselves (`Sampling.adjust`) are taken as given on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from rich.table import Table
from torch import Tensor, nn

from xpress.block import LAYOUTS
from xpress.decode import decode_batch
from xpress.drafter import DFlashDrafter
from xpress.drafter_config import DrafterConfig
from xpress.gtest import fit, holm, homogeneity, smallest_distance
from xpress.heads import ConfidenceHead, MarkovHead, Refiner
from xpress.lengths import ByConfidence, check_policy
from xpress.refine import check_passes
from xpress.sampling import Sampling
from xpress.target import Target

V, D, G, LENGTH = 6, 16, 3, 5  # five tokens: the opening one, G drafted ones, and the bonus after G acceptances
PROMPT = [1, 4, 2]
ALPHA, CHANCE = 1e-3, 0.99
BATCH = 2048
HEADS = {"refiner": Refiner, "markov": MarkovHead}
ONE, SOME = Sampling(1.0), Sampling(1.2, top_k=4, top_p=0.9)
MATCH = {"accept": "match"}


@dataclass(frozen=True)
class Case:
    """One way of speculating: head (None: the bare drafter), passes, layout, Sampling and, for a reduced draft
    vocabulary, its target ids; threshold: drafts are cut by a confidence head (None: full). Raises ValueError for a
    head, layout or passes that do not exist, for a threshold outside [0, 1], and for one without a head."""

    name: str
    head: str | None = "refiner"
    passes: int | str = 1
    layout: str = "infill"
    sampling: Sampling = ONE
    draft_ids: tuple[int, ...] | None = None
    threshold: float | None = None

    def __post_init__(self):
        check_passes(self.passes)
        if self.head is not None and self.head not in HEADS:
            raise ValueError(f"head={self.head!r}: known heads are {', '.join(HEADS)}, or None")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r}: known layouts are {', '.join(LAYOUTS)}")
        if self.threshold is not None:
            check_policy("confidence", self.threshold)
            if self.head is None:
                raise ValueError(f"threshold={self.threshold}: the confidence head reads a head's rows; give one")
        if self.sampling.greedy:
            raise ValueError("temperature=0: greedy output is checked token for token, not by its distribution")


CASES = (
    Case("drafter alone", None, 0),
    Case("refiner, K=0", passes=0, layout="next"),
    Case("refiner, K=1"),
    Case("refiner, K=2", passes=2),
    Case("refiner, K=G", passes=G, layout="next"),
    Case("refiner, auto", passes="auto", layout="next"),
    Case("refiner, sequential", passes="sequential"),
    Case("markov, K=1", "markov", 1, "next"),
    Case("markov, sequential, T=0.7", "markov", "sequential", sampling=Sampling(0.7)),
    Case("top-k, top-p, T=1.2, K=1", sampling=SOME),
    Case("top-k, top-p, T=1.2, auto", "markov", "auto", "next", SOME),
    Case("reduced vocabulary, K=1", draft_ids=(0, 1, 3, 4)),
    Case("reduced vocabulary, top-k, top-p", passes=2, layout="next", sampling=SOME, draft_ids=(1, 2, 3, 5)),
    Case("cut by confidence, K=1", threshold=0.5),
    Case("cut by confidence, auto, top-k", "markov", "auto", "next", SOME, threshold=0.5),
    Case("match, K=1", sampling=Sampling(1.0, **MATCH)),
    Case("match, markov, auto", "markov", "auto", "next", replace(SOME, **MATCH), (0, 1, 3, 4)),
)


def check_sampling(
    cases: Sequence[Case] | None = None,
    draws: int = 16_384,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict:
    """Draws `draws` continuations for each case and for plain autoregression, and tests their pairs -> a JSON-able
    result: passed, rows (one for each test) and what they rest on. progress(done, total, what) counts batches.

    A row has p, the p-value of its G-test, and p_holm, the same adjusted for all tests of the call; it passes where
    p_holm > alpha = 1e-3, so sound code fails the whole check for at most one seed in a thousand. `distance` is the
    total-variation distance from which on a wrong distribution of that pair is found with a chance of 99 %. The models
    are always the same; `seed` moves the draws. The global random state is neither read nor changed.
    """
    cases = CASES if cases is None else tuple(cases)
    if draws < 1000:
        raise ValueError(f"draws={draws}: fewer than 1000 leave too few in a cell to test anything")
    if not cases or len({case.name for case in cases}) < len(cases):
        raise ValueError("cases: give at least one, each with a name of its own, or None for all")
    # one run of plain autoregression for each way of adjusting; `accept` plays no part in it
    plain = {how: None for how in dict.fromkeys(replace(case.sampling, accept="rejection") for case in cases)}
    runs = len(plain) + len(cases)
    each = -(-draws // BATCH)
    target, rows = small_target(), []

    def run(number: int, what: str, how: Sampling, **parts):
        def tell(batch: int):
            if progress:
                progress(number * each + batch, runs * each, what)

        first = (seed * runs + number) * draws  # no two runs share a seed: equal noise would make samples alike
        return draw(target, how, range(first, first + draws), tell, **parts)

    exact = {how: joint(target, how) for how in plain}
    for number, how in enumerate(plain):
        name = f"plain, {describe(how)}"
        plain[how], _ = run(number, name, how)
        rows += _against(name, None, exact[how], plain[how], None)
    for number, case in enumerate(cases, len(plain)):
        drafter, head = parts_of(target, case)
        parts = {"drafter": drafter, "head": head, "passes": case.passes, "lengths": lengths_of(case, head)}
        ids, accepted = run(number, case.name, case.sampling, **parts)
        how = replace(case.sampling, accept="rejection")
        rows += _against(case.name, accepted, exact[how], ids, plain[how])
    for row, adjusted in zip(rows, holm([row["p"] for row in rows])):
        effective = draws if row["against"] == "exact" else draws / 2
        row["p_holm"] = adjusted
        row["distance"] = smallest_distance(row["dof"], ALPHA / len(rows), effective, CHANCE)
        row["passed"] = adjusted > ALPHA
    return {
        "passed": all(row["passed"] for row in rows),
        "alpha": ALPHA,
        "correction": "holm",
        "chance": CHANCE,
        "draws": draws,
        "seed": seed,
        "length": LENGTH,
        "vocab_size": V,
        "rows": rows,
    }


def _against(name: str, accepted, exact: Tensor, ids: Tensor, plain: Tensor | None) -> list[dict]:
    rows = []
    for at in range(LENGTH - 1):
        others = tuple(i for i in range(LENGTH) if i not in (at, at + 1))
        counts = pair_counts(ids, at)
        tests = {"exact": fit(counts, exact.sum(others).flatten())}
        if plain is not None:
            tests["plain"] = homogeneity(counts, pair_counts(plain, at))
        for against, test in tests.items():
            rows.append(
                {
                    "case": name,
                    "against": against,
                    "pair": f"{at + 1}-{at + 2}",
                    "draws": len(ids),
                    "accepted": accepted,
                    "statistic": test.statistic,
                    "dof": test.dof,
                    "p": test.p,
                    "pearson": test.pearson,
                    "p_pearson": test.p_pearson,
                }
            )
    return rows


def pair_counts(ids: Tensor, at: int) -> Tensor:
    """ids [n,LENGTH] -> how often each pair stands at places at, at + 1: [V·V]"""
    return torch.bincount(ids[:, at] * V + ids[:, at + 1], minlength=V * V)


def draw(target, how: Sampling, seeds: range, tell, **parts) -> tuple[Tensor, float | None]:
    """-> continuations [n,LENGTH], mean accepted draft tokens of a round (None without a drafter)"""
    found, accepted, rounds = [], 0, 0
    for number, start in enumerate(range(0, len(seeds), BATCH), 1):
        part = seeds[start : start + BATCH]
        ids = [[] for _ in part]
        settings = {"max_new_tokens": LENGTH, "sampling": how, "seeds": list(part)}
        for steps in decode_batch(target, [PROMPT] * len(part), **parts, **settings):
            for row, step in steps.items():
                ids[row] += step.tokens
                if parts and step.num_draft is not None:
                    accepted, rounds = accepted + step.num_accepted, rounds + 1
        found.append(torch.tensor(ids))
        tell(number)
    return torch.cat(found), accepted / rounds if rounds else None


@torch.inference_mode()
def joint(target, how: Sampling) -> Tensor:
    """Exact probabilities of every continuation [V, …, V], by the target without cache or speculation."""
    stems = torch.cartesian_prod(*[torch.arange(V)] * (LENGTH - 1))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(stems), -1), stems], 1)
    logits = target.model(input_ids=ids, use_cache=False).logits[:, len(PROMPT) - 1 :]
    probs = how.adjust(logits.double()).softmax(-1).unflatten(0, (V,) * (LENGTH - 1))  # [V, …, V, LENGTH, V]
    whole = torch.ones((), dtype=torch.float64)
    for place in range(LENGTH):
        index = (slice(None),) * place + (0,) * (LENGTH - 1 - place) + (place,)  # later tokens are not seen
        whole = whole[..., None] * probs[index]
    return whole


def small_target() -> Target:
    """A llama of one layer and six tokens that is sure of nothing; always the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=V,
        hidden_size=D,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = _scattered(0, 0.35, lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.6)  # flat enough that every token is drawn often
    return Target(model, name="small")


def parts_of(target: Target, case: Case) -> tuple[DFlashDrafter, nn.Module | None]:
    """A random drafter of one layer and, unless the case has none, a head strong enough to matter."""
    size = G + LAYOUTS[case.layout].first_slot
    settings = {"layout": case.layout, "target_layer_ids": (0,), "mask_token_id": 0, "draft_ids": case.draft_ids}
    config = DrafterConfig.for_target(target, 1, size, **settings)
    drafter = _scattered(1, 0.35, lambda: DFlashDrafter(config)).bind(target)
    if case.head is None:
        return drafter, None
    shape = (config.vocab_size, config.hidden_size, size, 4, config.draft_vocab_size)
    head = _scattered(2, 0.4, lambda: HEADS[case.head](*shape))
    with torch.no_grad():
        head.token_embed.weight.mul_(5)  # the tokens before a slot must matter, or every pass would have the same q
    return drafter, head.bind(target)


def lengths_of(case: Case, head) -> ByConfidence | None:
    """A random confidence head, of which the token before a slot decides much: cuts go by what was drafted."""
    if case.threshold is None:
        return None
    rank = head.token_embed.embedding_dim
    return ByConfidence(head, _scattered(3, 0.4, lambda: ConfidenceHead(D, rank)), case.threshold)


def _scattered(seed: int, std: float, build: Callable[[], nn.Module]) -> nn.Module:
    """A module in fp32 whose every weight but those of norms is drawn anew from N(0, std)."""
    with torch.random.fork_rng(devices=[]):  # modules draw their first weights from the global generator
        module = build().float().eval()
    own = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.normal_(std=std, generator=own)
    return module


def describe(how: Sampling) -> str:
    parts = [f"T={how.temperature:g}"]
    parts += [f"top-k={how.top_k}"] if how.top_k else []
    parts += [f"top-p={how.top_p:g}"] if how.top_p < 1 else []
    return ", ".join(parts)


def table(result: dict) -> Table:
    """One line for each case: of its pairs, the least p-value against each reference, and what would be found."""
    drawn = Table(
        title=f"sampled output against the target's own distribution, {result['draws']} draws a case",
        caption=f"G-tests of pairs of neighbouring tokens, the least p of each case; Holm over {len(result['rows'])} "
        f"tests, so that sound code fails for at most {result['alpha']:g} of all seeds. 'finds': the total-variation "
        f"distance of a pair that is found with a chance of {result['chance']:.0%}.",
    )
    against = ("G (dof)", "p", "finds")
    for name in ("case", "accepted", "exact: pair", *against, "plain: pair", *against, "verdict"):
        drawn.add_column(name, justify="left" if name == "case" else "right")
    for case in dict.fromkeys(row["case"] for row in result["rows"]):
        mine = [row for row in result["rows"] if row["case"] == case]
        accepted = mine[0]["accepted"]
        cells = [case, "–" if accepted is None else f"{accepted:.2f}"]
        for reference in ("exact", "plain"):
            rows = [row for row in mine if row["against"] == reference]
            cells += _cells(min(rows, key=lambda row: row["p"])) if rows else ["–"] * 4
        drawn.add_row(*cells, "ok" if all(row["passed"] for row in mine) else "WRONG")
    return drawn


def _cells(row: dict) -> list[str]:
    return [row["pair"], f"{row['statistic']:.1f} ({row['dof']})", f"{row['p']:.1e}", f"{row['distance']:.3f}"]
