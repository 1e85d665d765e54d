"""Latency of refining one block: the refiner in its forms, and serial heads beside it.

    python benchmarks/refine_latency.py --threads 1
    python benchmarks/refine_latency.py --device cuda --dtype bfloat16 --sizes 151936:256:16:4096

A size is V:R:B:D, V being the drafter's vocabulary. Forms, on the same readout and the same base logits:

    plain       the trained form; every pass reads out all rows, argmax(base + readout(latent))
    compiled    the same through torch.compile (--compile; a CPU needs a C++ compiler for it)
    folded      the folded form in the same loop
    ours        xpress.refine of the folded form: fused readout, settled rows left out
    int8, int4  the same with a screened readout, as exact
    top-256     256 candidates a row: not exact
    markov, gated, rnn, domino   xpress.refine, serially, one slot a step

Three tables a size: all K; a pass over all rows beside its floor, the larger of bytes / bandwidth and operations / rate
as measured here; and what leaving out settled rows and stopping early save. Weights are random; `hard` heads need
nearly all passes, `easy` ones settle early. Inputs and weights rotate over several sets, functions run interleaved, and
the median counts. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
from itertools import cycle

import torch
from measure import bandwidth, interleaved, machine, rate, show
from torch import nn

from xpress import kernels
from xpress.block import INFILL, Block
from xpress.heads import DominoHead, GatedMarkovHead, MarkovHead, Refiner, RNNMarkovHead
from xpress.kernels import Screen
from xpress.refine import refine
from xpress.sampling import argmax

SERIAL = {"markov": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNMarkovHead, "domino": DominoHead}
CPU_SIZES = [f"{V}:{R}:{B}:576" for V in (49152, 8192, 4096) for R, B in ((64, 8), (64, 16), (256, 8), (256, 16))]
GPU_SIZES = ["151936:256:16:4096", "32000:256:16:4096"]
TOP_C = 256


class Set:
    """One set of inputs and weights: a block of N = 1, the refiner, its folded forms, and serial heads."""

    def __init__(self, V: int, R: int, B: int, D: int, seed: int, device: str, dtype, vocab: int, std: float):
        torch.manual_seed(seed)
        G = B - 1
        ids = None if V == vocab else torch.arange(V, device=device) * (vocab // V)
        base = (torch.randn(1, G, V, device=device) * 3).to(dtype)
        hidden = torch.randn(1, B, D, device=device).to(dtype)
        one, two = torch.tensor([[1], [2]], device=device)
        self.block = Block(hidden, one, two, INFILL, G, lambda _: base, vocab, ids)
        self.base = base
        with torch.device(device):
            self.plain = self._head(Refiner(vocab, D, B, R, V), dtype, std)
            embedding = nn.Embedding(vocab, D, dtype=dtype).requires_grad_(False)
            self.serial = {name: self._head(kind(vocab, D, B, R, V), dtype, std) for name, kind in SERIAL.items()}
        for head in self.serial.values():
            head.readout = self.plain.readout
        object.__setattr__(self.serial["domino"], "_embedding", embedding)
        self.ours = self.plain.folded()
        self.screened, self.top = {}, self.plain.folded()
        for bits in (8, 4):
            self.screened[f"int{bits}"] = head = self.plain.folded()
            head.screen = Screen.of(head.readout.weight, bits)
        self.top.top_c = min(TOP_C, V)

    @staticmethod
    def _head(head, dtype, std):
        with torch.no_grad():
            for name, weight in head.named_parameters():
                if weight.dim() > 1 and name != "mix_l":
                    weight.normal_(std=weight.shape[1] ** -0.5 if name != "readout.weight" else std)
        return head.to(dtype).requires_grad_(False).eval()


def all_rows(head, part: Set, passes: int, latent=None) -> torch.Tensor:
    """K passes, each over all rows, with no care taken: the obvious way."""
    block, latent = part.block, latent or head.latent
    ids = block.to_target(argmax(part.base))
    prepared = head.prepare(block.hidden)
    for _ in range(passes):
        z = block.rows(latent(prepared, block.prev_ids(ids)))
        ids = block.to_target(argmax(part.base + head.readout(z)))
    return ids


def one_pass(part: Set, form: str):
    """A function that runs one pass over all rows of one set."""
    block, base = part.block, part.base
    ids = block.to_target(argmax(base))
    head = part.plain if form == "plain" else part.ours
    prepared, prev = head.prepare(block.hidden), block.prev_ids(ids)
    weight = head.readout.weight
    if form in ("plain", "folded"):
        return lambda: argmax(base + head.readout(block.rows(head.latent(prepared, prev))))
    constant = head.constant(prepared, prev[:, : block.layout.num_known])
    folded, known = head.weights(), block.layout.num_known
    z = weight.new_empty(*ids.shape, weight.shape[1])
    screen = part.screened[form].screen if form in part.screened else None

    def run():
        kernels.refiner_latent(constant, folded, ids, known, out=z)
        if screen is None:
            return kernels.readout_argmax(base, z, weight, block.draft_ids)
        return kernels.screened_argmax(base, z, weight, screen, block.draft_ids)

    return run


def floor(V: int, R: int, B: int, rows: int, size: int, base_size: int, found: dict) -> tuple[float, float, float]:
    """Bytes and operations of a pass over `rows` rows, and the seconds that they take at least."""
    mlp = 3 * 2 * R * R  # gate, up and down, of 2R hidden units
    num_bytes = V * R * size + rows * V * base_size + (mlp + R * B * B) * size
    operations = 2 * rows * (V * R + mlp + R * B / 2)
    return num_bytes, operations, max(num_bytes / found["bandwidth"], operations / found["rate"])


def measured(name: str, arguments, found: dict) -> dict:
    """All numbers of one size."""
    V, R, B, D = map(int, name.split(":"))
    device, dtype, G = arguments.device, getattr(torch, arguments.dtype), B - 1
    vocab = max(V, 49152)
    make = lambda seed, std: Set(V, R, B, D, seed, device, dtype, vocab, std)  # noqa: E731
    sets = [make(seed, arguments.hard) for seed in range(arguments.sets)]
    easy = [make(seed, arguments.easy) for seed in range(arguments.sets)]
    for part in sets:
        exact = refine(part.ours, part.block, G).ids
        assert all(refine(head, part.block, G).ids.equal(exact) for head in part.screened.values())
        assert refine(part.ours, part.block, "auto").ids.equal(exact)
    compiled = torch.compile(sets[0].plain.latent) if arguments.compile else None
    counts = [K for K in range(9) if K < G] + [G]

    def rotating(parts, run):
        turn = cycle(parts)
        return lambda: run(next(turn))

    forms = {"plain": lambda part, K: all_rows(part.plain, part, K), "folded": lambda p, K: all_rows(p.ours, p, K)}
    if compiled is not None:
        forms["compiled"] = lambda part, K: all_rows(sets[0].plain, part, K, compiled)
    forms["ours"] = lambda part, K: refine(part.ours, part.block, K)
    # random rows are far from a trained head's: on a CPU int4 leaves thousands of ids to the readout, a pass shows that
    for bits in ("int8", "int4") if device != "cpu" else ("int8",):
        forms[bits] = lambda part, K, bits=bits: refine(part.screened[bits], part.block, K)
    forms[f"top-{TOP_C}"] = lambda part, K: refine(part.top, part.block, K)
    functions = {}
    for form, run in forms.items():
        for K in (*counts, "auto"):
            if K != "auto" or form not in ("plain", "folded", "compiled"):
                functions[form, K] = rotating(sets, lambda part, run=run, K=K: run(part, K))
    for K in ("auto", G):
        functions["easy", K] = rotating(easy, lambda part, K=K: refine(part.ours, part.block, K))
    for head in SERIAL:
        functions[head, "serial"] = rotating(sets, lambda p, head=head: refine(p.serial[head], p.block, "sequential"))
    for form in ("plain", "folded", "ours", "int8", "int4"):
        turns = [one_pass(part, form) for part in sets]
        functions[form, "pass"] = rotating(turns, lambda run: run())
    with torch.inference_mode():
        times = interleaved(functions, arguments.repeats, device)
    seconds = {key: sorted(values)[len(values) // 2] for key, values in times.items()}
    size = torch.empty(0, dtype=dtype).element_size()
    floors = [floor(V, R, B, rows, size, size, found) for rows in range(G, 0, -1)]
    used = {k: [int(refine(p.ours, p.block, "auto").passes) for p in s] for k, s in (("hard", sets), ("easy", easy))}
    rechecked = {bits: rechecks(sets, bits) for bits in ("int8", "int4")}
    return {
        **{"size": name, "V": V, "R": R, "B": B, "D": D, "G": G, "passes_used": used, "rechecked": rechecked},
        "bytes": floors[0][0],
        "operations": floors[0][1],
        "floor": floors[0][2],
        "floor_all": sum(part[2] for part in floors),
        "seconds": {f"{form} {K}": value for (form, K), value in seconds.items()},
    }


def rechecks(sets: list[Set], bits: str) -> float:
    """Ids a row that the screen leaves to the readout itself, over one pass of each set."""
    stats = kernels.Screened()
    for part in sets:
        block, head = part.block, part.ours
        z = block.rows(head.latent(head.prepare(block.hidden), block.prev_ids(block.to_target(argmax(part.base)))))
        screen, weight = part.screened[bits].screen, head.readout.weight
        kernels.screened_argmax(part.base, z.contiguous(), weight, screen, part.block.draft_ids, stats=stats)
    return stats.ids_rechecked / stats.rows


def report(row: dict, unit: float, name: str):
    """Prints the three tables of a size."""
    seconds, G = row["seconds"], row["G"]
    counts = [K for K in range(9) if K < G] + [G]
    forms = list(dict.fromkeys(key.rpartition(" ")[0] for key in seconds if not key.endswith("serial")))
    print(f"\nV {row['V']}, R {row['R']}, B {row['B']}, D {row['D']}: {name} from base logits to {G} draft tokens")
    cell = lambda key: f"{seconds[key] * unit:.2f}" if key in seconds else ""  # noqa: E731
    swept = [form for form in forms if form != "easy" and f"{form} 1" in seconds]
    table = [[form, *(cell(f"{form} {K}") for K in (*counts, "auto"))] for form in swept]
    show(["form", *(f"K={K}" for K in counts), "auto"], table)
    serial = [[head, cell(f"{head} serial")] for head in SERIAL]
    show(["serial head", f"{G} steps"], serial)
    floor_, plain = row["floor"], seconds["plain pass"]
    lines = []
    for form in ("plain", "folded", "ours", "int8", "int4"):
        own = seconds[f"{form} pass"]
        recheck = f"{row['rechecked'][form]:.1f}" if form in row["rechecked"] else ""
        lines.append([form, f"{own * unit:.2f}", f"{plain / own:.2f}", f"{own / floor_:.2f}", recheck])
    print(f"floor of a pass over all rows: {floor_ * unit:.2f} ({row['bytes'] / 1e6:.1f} MB, ", end="")
    print(f"{row['operations'] / 1e6:.0f} Mflop)")
    show(["a pass over all rows", name, "plain / it", "it / floor", "ids rechecked a row"], lines)
    ours, full, used = seconds[f"ours {G}"] - seconds["ours 0"], G * seconds["ours pass"], row["passes_used"]
    share, over = ours / full, ours / row["floor_all"]
    print(f"K = {G}, settled rows left out: {share:.2f} of {G} full passes, {over:.2f} of its floor")
    for kind, form in (("hard", "ours"), ("easy", "easy")):
        ratio = seconds[f"{form} auto"] / seconds[f"{form} {G}"]
        print(f"auto / K = {G}, {kind} blocks (passes {', '.join(map(str, used[kind]))}): {ratio:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--sizes", nargs="+", help="V:R:B:D")
    parser.add_argument("--sets", type=int, default=3, help="sets of inputs and weights that calls rotate over")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--hard", type=float, default=0.3, help="spread of the readout of hard heads")
    parser.add_argument("--easy", type=float, default=0.05, help="and of easy ones")
    parser.add_argument("--compile", action="store_true", help="torch.compile of the plain form too")
    arguments = parser.parse_args()
    gpu = arguments.device.startswith("cuda")
    arguments.dtype = arguments.dtype or ("bfloat16" if gpu else "float32")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    found = {"bandwidth": bandwidth(arguments.device), "rate": rate(arguments.device, getattr(torch, arguments.dtype))}
    print(" | ".join(f"{key}: {value}" for key, value in machine(arguments.device).items()))
    print(f"measured: {found['bandwidth'] / 1e9:.1f} GB/s read, {found['rate'] / 1e9:.0f} Gflop/s {arguments.dtype}")
    rows = []
    for name in arguments.sizes or (GPU_SIZES if gpu else CPU_SIZES):
        rows.append(measured(name, arguments, found))
        report(rows[-1], *((1e6, "µs") if gpu else (1e3, "ms")))
    print(json.dumps({"benchmark": "refine_latency", **machine(arguments.device), **found, "rows": rows}))


if __name__ == "__main__":
    main()
