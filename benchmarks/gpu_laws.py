"""The laws that gpu_check.py holds on a device, without pytest: each a function of a Case that raises AssertionError.

A device's error poisons its process, so gpu_check.py runs this file as one and begins another for what is left:

    python benchmarks/gpu_laws.py --device cuda --skip readout_argmax
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from xpress import kernels  # noqa: E402
from xpress.block import INFILL, Block  # noqa: E402
from xpress.decode import decode_batch  # noqa: E402
from xpress.drafter import DFlashDrafter  # noqa: E402
from xpress.drafter_config import DrafterConfig  # noqa: E402
from xpress.heads import Refiner  # noqa: E402
from xpress.kernels import Folded, Graphs, RefineStep, Screen  # noqa: E402
from xpress.lossless import first_difference  # noqa: E402
from xpress.refine import refine  # noqa: E402
from xpress.sampling import DRAFT, GREEDY, Noise, Sampling  # noqa: E402
from xpress.target import Target  # noqa: E402

DIED = 3  # exit code of a process that a device's error has spoilt
T = 0.8


@dataclass(frozen=True)
class Case:
    """Sizes: vocabularies V, rank R, slots B, batch sizes N, hidden size D, repeated launches; prompts; the target."""

    device: str
    vocabularies: tuple = (151936, 32000)
    R: int = 256
    B: int = 16
    N: tuple = (1, 8)
    D: int = 1024
    launches: int = 3000
    prompts: tuple = (5, 300, 505, 1)
    new_tokens: int = 48
    target: tuple = (4, 256, 8, 2, 2048)  # layers, hidden size, heads, key heads, vocabulary

    @classmethod
    def small(cls, device: str) -> Case:
        return cls(device, (301, 96), 32, 6, (1, 3), 24, 5, (5, 9, 1), 8, (3, 32, 4, 2, 97))

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    def readouts(self):
        """(label, base [N,G,V] as a part of more, latent, weight) for every V, N and dtype."""
        for dtype in (torch.bfloat16, torch.float32):
            for V in self.vocabularies:
                for N in self.N:
                    draw = torch.Generator(self.device).manual_seed(V + N)
                    normal = lambda *size: torch.randn(size, generator=draw, device=self.device)  # noqa: B023, E731
                    parts = 3 * normal(N, self.B, V), normal(N, self.B - 1, self.R), 0.2 * normal(V, self.R)
                    base, latent, weight = (part.to(dtype) for part in parts)
                    yield f"{str(dtype)[6:]} V {V} N {N}", base[:, 1:], latent, weight


def bounded(base, latent, weight) -> tuple[Tensor, Tensor]:
    """ℓ in fp64, and how far two fp32 ways of summing it may differ."""
    z, w = latent.double(), weight.double().T
    logits, step = base.double() + z @ w, 2.0**-24
    gamma = (w.shape[0] + 2) * step / (1 - (w.shape[0] + 2) * step)
    return logits, 2 * gamma * (z.abs() @ w.abs()) + 2 * step * logits.abs()


def at(values: Tensor, ids: Tensor) -> Tensor:
    return values.gather(-1, ids[..., None])[..., 0]


def readout_argmax(case: Case) -> str:
    """Ids of every row, of rows behind the first few, and through a map, against fp64 within the rounding bound."""
    differing = rows = 0
    for label, base, latent, weight in case.readouts():
        ids = kernels.readout_argmax(base, latent, weight)
        logits, bound = bounded(base, latent, weight)
        best = logits.argmax(-1)
        gap, slack = at(logits, best) - at(logits, ids), at(bound, best) + at(bound, ids)
        assert (gap <= slack).all(), f"{label}: behind by {gap.max():.3g}, the bound is {slack.max():.3g}"
        differing, rows = differing + int((gap > 0).sum()), rows + ids.numel()
        kept = torch.full_like(ids, 7)
        active = (torch.arange(len(ids), device=ids.device) % 2 == 0).int()
        kernels.readout_argmax(base, latent, weight, keys=kept, first_row=2, active=active)
        on = active.bool()
        assert kernels.unpack(kept)[on, 2:].equal(ids[on, 2:]), f"{label}: rows left out change the others"
        assert (kept[:, :2] == 7).all() and (kept[~on] == 7).all(), f"{label}: rows left out were written"
        names = torch.randperm(2 * len(weight), device=ids.device)[: len(weight)]
        mapped = kernels.readout_argmax(base, latent, weight, names)
        assert mapped.equal(names[ids]), f"{label}: through a map {int((mapped != names[ids]).sum())} ids differ"
    return f"{rows} rows, {differing} within rounding of the best"


def readout_sample(case: Case) -> str:
    """Token, ℓ/T and log-sum against fp64 under the same noise; the noise itself differs by a few fp32 steps."""
    differing = rows = 0
    for label, base, latent, weight in case.readouts():
        noise = Noise(tuple(range(len(base))), round=5)
        drawn = kernels.readout_sample(base, latent, weight, address=noise.address(DRAFT, base.device), temperature=T)
        logits, bound = bounded(base, latent, weight)
        gumbel = noise.gumbel(base.shape[1], torch.arange(len(weight), device=base.device)).double()
        keys = logits / T + gumbel
        bound = bound / T + 4e-6 * gumbel.abs() + 1e-6 * keys.abs()
        best = keys.argmax(-1)
        gap, slack = at(keys, best) - at(keys, drawn.ids), at(bound, best) + at(bound, drawn.ids)
        assert (gap <= slack).all(), f"{label}: behind by {gap.max():.3g}, the bound is {slack.max():.3g}"
        off = (
            (drawn.logit - at(logits, drawn.ids) / T).abs().max(),
            (drawn.lse - (logits / T).logsumexp(-1)).abs().max(),
        )
        assert max(off) < 1e-3, f"{label}: ℓ/T off by {off[0]:.3g}, its log-sum by {off[1]:.3g}"
        differing, rows = differing + int((gap > 0).sum()), rows + gap.numel()
    return f"{rows} rows, {differing} within rounding of the best"


def fold(case: Case, V: int, dtype: torch.dtype) -> Folded:
    R, B = case.R, case.B
    draw = lambda *size: (torch.randn(size, device=case.device) / size[-1] ** 0.5).to(dtype)  # noqa: E731
    mix = draw(R, B, B).tril().permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return Folded(draw(V, R) * R**0.5, mix, draw(2 * R, R), draw(2 * R, R), draw(R, 2 * R))


def refiner_latent(case: Case) -> str:
    """Against the reference; rows left out; a block's numbers do not depend on its neighbours."""
    worst = {}
    for dtype, close in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2)):
        torch.manual_seed(1)
        folded, V = fold(case, case.vocabularies[0], dtype), case.vocabularies[0]
        for N in case.N:
            constant = torch.randn(N, case.B, case.R, device=case.device)
            draft = torch.randint(V, (N, case.B - 1), device=case.device)
            for first in (0, 3):
                outs = torch.full((2, N, case.B - 1, case.R), 7.0, device=case.device)
                kernels.refiner_latent(constant, folded, draft, 2, first_row=first, out=outs[0])
                with kernels.use("reference"):
                    kernels.refiner_latent(constant, folded, draft, 2, first_row=first, out=outs[1])
                off = ((outs[0] - outs[1]).abs() / (1 + outs[1].abs())).max().item()
                worst[str(dtype)[6:]] = off = max(off, worst.get(str(dtype)[6:], 0.0))
                assert off <= close, f"{dtype} N {N} first_row {first}: off by {off:.3g}, allowed {close}"
            together = kernels.refiner_latent(constant, folded, draft, 2)
            alone = [kernels.refiner_latent(constant[n : n + 1], folded, draft[n : n + 1], 2) for n in range(N)]
            assert together.equal(torch.cat(alone)), f"{dtype}: a block depends on its neighbours"
    return "off by at most " + ", ".join(f"{off:.2g} ({name})" for name, off in worst.items())


def arrival_counter(case: Case) -> str:
    """The programs of a block count each other: launch after launch, the same bits, and every count back at zero."""
    from xpress.kernels.refiner_latent import scratch_for

    torch.manual_seed(2)
    N, G = case.N[-1], case.B - 1
    folded, scratch = fold(case, 1000, torch.bfloat16), scratch_for(N, G, case.R, case.device)
    constant = torch.randn(N, case.B, case.R, device=case.device)
    draft = torch.randint(1000, (N, G), device=case.device)
    out = torch.empty(N, G, case.R, device=case.device)
    how = {"out": out, "scratch": scratch} if case.cuda else {"out": out}
    want = kernels.refiner_latent(constant, folded, draft, 2, **how).clone()
    wrong = torch.zeros((), dtype=torch.long, device=case.device)
    for _ in range(case.launches):
        out.fill_(7)
        wrong += (kernels.refiner_latent(constant, folded, draft, 2, **how) != want).any()
    assert not int(wrong), f"{int(wrong)} of {case.launches} launches gave other bits"
    assert not scratch[1].any(), "a count did not come back to zero"
    return f"{case.launches} launches"


def screened_argmax(case: Case) -> str:
    """Copies of 8 and 4 bits give the full readout's ids, every one, and on a GPU its very keys."""
    rows = 0
    for label, base, latent, weight in case.readouts():
        for bits in (8, 4):
            screen = Screen.of(weight, bits)
            want, got = torch.zeros(2, *base.shape[:2], dtype=torch.long, device=case.device)
            kernels.readout_argmax(base, latent, weight, keys=want)
            kernels.screened_argmax(base, latent, weight, screen, keys=got)
            if not case.cuda:  # the references sum in another order
                want, got = kernels.unpack(want), kernels.unpack(got)
            assert got.equal(want), f"{label}, {bits} bits: {int((got != want).sum())} keys of {got.numel()} differ"
            rows += got.numel()
    return f"{rows} rows"


def block_and_head(case: Case, V: int, N: int, dtype, seed: int = 3) -> tuple[Block, torch.nn.Module]:
    """A block with given base logits, and a folded refiner that changes tokens to the last."""
    torch.manual_seed(seed)
    with torch.device(case.device):
        head = Refiner(V, case.D, case.B, case.R)
        for name, weight in head.named_parameters():
            std = weight.shape[-1] ** -0.5 if name != "readout.weight" else 0.3
            torch.nn.init.normal_(weight, std=1.0 if name == "token_embed.weight" else std)
        base, hidden = (3 * torch.randn(N, case.B - 1, V)).to(dtype), torch.randn(N, case.B, case.D).to(dtype)
        anchor, before = torch.randint(V, (2, N))
    block = Block(hidden, anchor, before, INFILL, case.B - 1, lambda _: base, V)
    return block, head.to(dtype).folded().eval().requires_grad_(False)


def refine_graph(block: Block, head, sampled: bool = False, bits: int | None = None):
    """-> (function of tensors, its arguments for a block): base logits and constant to tokens, for Graphs."""
    weight = head.readout.weight
    screen = None if bits is None else Screen.of(weight, bits)
    sizes = {"num_blocks": len(block), "num_draft": block.num_draft, "num_known": 2}
    step = RefineStep(head.weights(), weight, **sizes, screen=screen, sampled=sampled)

    def function(base, hidden, known, address, *, passes):
        draw = {"address": address, "temperature": T} if sampled else {}
        return step(base, head.constant(head.prepare(hidden), known), passes, **draw, poll=False)

    def arguments(other: Block, noise=None):
        known = other.prev_ids(other.anchor[:, None])[:, :2]
        return other.base_logits(), other.hidden, known, noise and noise.address(DRAFT, other.hidden.device)

    return function, arguments


@torch.inference_mode()
def refine_step_graph(case: Case) -> str:
    """Graph = eager to the bit over changing inputs and passes, greedy, sampled and screened; in fp32 eager = the
    solver, whose latents are other sums: one block in all may fall otherwise."""
    count, other_blocks, V = 0, 0, case.vocabularies[-1]
    for how in ({}, {"sampled": True}, {"bits": 8}):
        for N, dtype in [*((N, torch.bfloat16) for N in case.N), (case.N[-1], torch.float32)]:
            block, head = block_and_head(case, V, N, dtype)
            function, arguments = refine_graph(block, head, **how)
            graphs = Graphs(function, sizes=case.N)
            for seed, passes in enumerate(["auto", 0, 3, "auto", 3, 0, "auto"]):
                other = block_and_head(case, V, N, dtype, seed)[0]
                noise = Noise(tuple(range(seed, seed + N))) if how.get("sampled") else None
                part = arguments(other, noise)
                got = [None if out is None else out.clone() for out in graphs(*part, passes=passes)]
                want = function(*part, passes=passes)
                for mine, theirs in zip(got, want):
                    assert mine is theirs is None or mine.equal(theirs), (
                        f"{how} {dtype} N {N} K={passes}: graph ≠ eager"
                    )
                if dtype == torch.float32:
                    solved = refine(head, other, passes, Sampling(T) if noise else GREEDY, noise).ids
                    other_blocks += int((solved != want[0]).any(1).sum())
                count += 1
            assert len(graphs) == (3 if case.cuda else 0), f"{how} N {N}: a capture failed, see the log"
    assert other_blocks <= 1, f"{other_blocks} blocks differ from the solver's"
    return f"{count} calls, {other_blocks} near ties"


@torch.inference_mode()
def auto_is_sequential(case: Case) -> str:
    """The fixed point is the serial solver's answer; serial latents are other sums, so near ties may fall otherwise."""
    ties = used = 0
    for V in case.vocabularies:
        for N in case.N:
            block, head = block_and_head(case, V, N, torch.float32)
            auto = refine(head, block, "auto")
            serial, whole = refine(head, block, "sequential").ids, refine(head, block, block.num_draft).ids
            assert auto.ids.equal(whole), f"V {V} N {N}: auto stopped too early"
            used = max(used, int(auto.passes.max()))
            latent = head.latent(head.prepare(block.hidden), block.prev_ids(auto.ids))
            logits = block.base_logits() + head.readout(block.rows(latent))
            for n in range(N):
                if differ := (serial[n] != auto.ids[n]).nonzero().flatten().tolist():
                    row, pair = logits[n, differ[0]], torch.stack([serial[n], auto.ids[n]])[:, differ[0]]
                    gap = (row[pair[0]] - row[pair[1]]).abs().item()
                    assert gap < 1e-4 * (1 + row.abs().max().item()), f"V {V} block {n}: {gap:.3g} apart, no tie"
                    ties += 1
    return f"{ties} near ties, at most {used} passes"


def random_target(case: Case, loop: str, model=None) -> Target:
    from transformers import AutoConfig, AutoModelForCausalLM

    if model is None:
        layers, hidden, heads, kv, vocab = case.target
        torch.manual_seed(4)
        config = AutoConfig.for_model(
            "qwen3", vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv, head_dim=hidden // heads, initializer_range=0.15,
            max_position_embeddings=2048,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(case.device)
    return Target(model, name="random", loop=loop)


def drafting(target: Target, passes) -> tuple:
    """A random drafter and refiner for the target -> drafter, head."""
    torch.manual_seed(5)
    config = DrafterConfig.for_target(target, 2, 8, 3, target_layer_ids=(0, 2))
    drafter = DFlashDrafter(config)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.mul_(3.0 if weight.dim() == 2 else 1.0)
    head = Refiner(target.vocab_size, target.hidden_size, 8, 32)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    drafter = drafter.to(target.device).bind(target).eval().requires_grad_(False)
    return drafter, (head.folded().to(target.device).bind(target).eval() if passes else None)


def answers(target: Target, prompts, method: str, new_tokens: int, sampling=GREEDY) -> list[list[int]]:
    passes = {"ar": 0, "bare": 0, "K=2": 2, "auto": "auto"}[method]
    drafter, head = (None, None) if method == "ar" else drafting(target, passes)
    found = [[] for _ in prompts]
    settings = {"max_new_tokens": new_tokens, "sampling": sampling, "seeds": list(range(len(prompts)))}
    for rounds in decode_batch(target, prompts, drafter, head, passes, **settings):
        for row, step in rounds.items():
            found[row] += step.tokens
    return found


def static_loop(case: Case) -> str:
    """Tokens of the static loop are those of transformers' modules, batch by batch, over a bucket's border; and with
    any drafter they are plain autoregression's. Where two loops differ it must be a tie."""
    targets = {"plain": random_target(case, "plain")}
    targets["static"] = random_target(case, "static", targets["plain"].model)
    draw, ties = torch.Generator().manual_seed(6), 0
    prompts = [torch.randint(4, case.target[-1], (n,), generator=draw).tolist() for n in case.prompts]
    for batch in (prompts, prompts[1:2], prompts[-1:], prompts[:2]):
        want = answers(targets["plain"], batch, "ar", case.new_tokens)
        for method in ("ar", "bare", "K=2", "auto"):
            got = answers(targets["static"], batch, method, case.new_tokens)
            for prompt, own, other in zip(batch, want, got):
                if found := first_difference(targets["plain"], prompt, own, other):
                    assert found["tie"], f"{method}, prompt of {len(prompt)}: {found}"
                    ties += 1
    graphs = len(targets["static"]._steps.graphs)
    assert graphs or not case.cuda, "no graph was captured, see the log"
    return f"{ties} ties, {graphs} graphs of the last buffers"


def static_memory(case: Case) -> str:
    """Decoding again captures nothing and takes no more memory."""
    target = random_target(case, "static")
    prompt = [list(range(4, 4 + min(20, case.target[-1] - 4)))]
    drafter, head = drafting(target, 2)
    seen = []
    for _ in range(4):
        list(decode_batch(target, prompt, drafter, head, 2, max_new_tokens=case.new_tokens))
        held = torch.cuda.memory_allocated() if case.cuda else 0
        seen.append((len(target._steps.graphs), len(drafter._static.graphs), held))
    assert seen[1][:2] == seen[3][:2] and seen[3][2] <= seen[1][2] + 2**20, f"graphs and bytes held: {seen}"
    return f"{sum(seen[-1][:2])} graphs"


def one_wait_a_round(case: Case) -> str:
    """With synchronising calls forbidden but in the one place that reads a round's numbers."""
    if not case.cuda:
        return "nothing to see on a CPU"
    file, target = sys.modules["xpress.decode"], random_target(case, "static")
    read, (drafter, head) = file._read, drafting(target, 2)
    prompts = [[5, 6, 7, 8], [9], [10, 11]]

    def once(*args):
        torch.cuda.set_sync_debug_mode("default")
        found = read(*args)
        torch.cuda.set_sync_debug_mode("error")
        return found

    for sampling in (GREEDY, Sampling(T)):
        for strict in (False, True):  # kernels are compiled and graphs captured first
            rounds = decode_batch(target, prompts, drafter, head, 2, max_new_tokens=24, sampling=sampling)
            next(rounds), next(rounds)
            file._read = once if strict else read
            torch.cuda.set_sync_debug_mode("error" if strict else "default")
            try:
                for _ in rounds:
                    pass
            finally:
                torch.cuda.set_sync_debug_mode("default")
                file._read = read
    return "greedy and sampled"


CHECKS = (readout_argmax, readout_sample, refiner_latent, arrival_counter, screened_argmax, refine_step_graph)
CHECKS += (auto_is_sequential, static_loop, static_memory, one_wait_a_round)


def spoilt(error: BaseException) -> bool:
    """Is it an error after which the device answers nothing any more?"""
    text = f"{type(error).__name__} {error}"
    return any(sign in text for sign in ("CUDA error", "AcceleratorError", "illegal memory", "device-side assert"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--skip", nargs="*", default=[])
    arguments = parser.parse_args()
    case = Case.small(arguments.device) if arguments.small else Case(arguments.device)
    for check in CHECKS:
        if check.__name__ in arguments.skip:
            continue
        print(f"begin {check.__name__}", flush=True)
        start = time.perf_counter()
        try:
            said, verdict = check(case), "ok"
        except Exception as error:  # whatever it is, the other checks are still worth their time
            said, verdict = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "FAILED"
            if spoilt(error):
                print(f"{verdict:<6} {check.__name__}: {said}", flush=True)
                return DIED
        print(f"{verdict:<6} {check.__name__}: {said} ({time.perf_counter() - start:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
