"""Checkpoints exchanged with the real `speculators` package, both ways, compared on the same inputs in fp32.

    python -m venv spec && spec/bin/pip install speculators==0.9.0
    python tests/interop_speculators.py spec/bin/python

The package runs in a process of its own (it needs another transformers than ours); folders and tensors are files. For
each case its own forward draws anchors and runs drafter and head; ours drafts from the same prefixes, one at a time, as
decoding does. Exits with 1 where hidden states, head biases or confidences differ by more than 1e-5, or where a head is
fed other tokens; skipped, with 0, where the package is missing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GAP, LENGTH, ANCHORS, B, R = 1e-5, 40, 6, 4, 8
REDUCED = tuple(range(2, 92, 3))
OURS = [  # written here: head, layout, options
    ("dflash", None, "infill", {}),
    ("xpress", "refiner", "infill", {}),
    ("xpress, next token", "refiner", "next", {}),
    ("xpress, 30 ids", "refiner", "infill", {"draft_ids": REDUCED}),
    ("dspark vanilla", "markov", "next", {}),
    ("dspark gated, 30 ids", "gated", "next", {"draft_ids": REDUCED}),
    ("dspark rnn", "rnn", "next", {}),
]
THEIRS = [  # made there: kind, options
    ("dflash", "dflash", {}),
    ("xpress", "xpress", {"xpress_rank": R}),
    ("xpress, next token", "xpress", {"xpress_rank": R, "sample_from_anchor": True}),
    ("xpress, 30 ids", "xpress", {"xpress_rank": R, "draft_vocab_size": len(REDUCED)}),
    ("dspark vanilla", "dspark", {"markov_rank": R}),
    ("dspark gated", "dspark", {"markov_rank": R, "markov_head_type": "gated", "confidence_head_with_markov": False}),
    ("dspark rnn, 30 ids", "dspark", {"markov_rank": R, "markov_head_type": "rnn", "draft_vocab_size": len(REDUCED)}),
]


# --- in the package's process ---------------------------------------------------------------------------------------


def import_it() -> str:
    """-> the package's version."""
    # the torchvision and torchaudio that come with it do not fit a torch for CPUs: importing them fails, none is needed
    sys.modules["torchvision"] = sys.modules["torchaudio"] = None
    from importlib.metadata import version

    import speculators  # noqa: F401

    return version("speculators")


def worker(root: Path):
    """Loads or makes each model of jobs.json, and writes what its own forward computes."""
    import_it()
    inputs = load_file(root / "inputs.safetensors")
    for i, job in enumerate(json.loads((root / "jobs.json").read_text())):
        torch.manual_seed(i)
        if job["kind"]:
            make(root, job)
        save_file(run(job["folder"], inputs), f"{job['folder']}.out")


def run(folder: str, inputs: dict) -> dict:
    """The package's own forward -> anchors [A], hidden [A,B,D], and of a head prev [A,B] and bias [A,B,V_draft]."""
    import speculators.models.dflash.core as core
    from speculators.model import SpeculatorModel

    model = SpeculatorModel.from_pretrained(folder, config=eager(folder)).eval()
    if model._attn_impl != "eager":
        raise RuntimeError(f"speculators runs {model._attn_impl} attention, eager was asked for")
    found, calls = {}, []
    model.norm.register_forward_hook(lambda module, args, out: found.update(hidden=out.view(ANCHORS, B, -1)))
    head = getattr(model, "refiner_head", None) or getattr(model, "markov_head", None)
    if hasattr(head, "causal_tril"):
        # 0.9.0's from_pretrained leaves this buffer, which is not stored, as the memory happened to be: its own
        # constructor's value is put back, or the comparison would be with noise
        whole = torch.ones_like(head.causal_tril).tril()
        found["mask was lost"] = torch.tensor(not torch.equal(head.causal_tril, whole))
        head.causal_tril.copy_(whole)
    if head is not None:
        bias = head.block_bias

        def block_bias(*args, **kwargs):
            prev = kwargs["prev_token_ids"] if "prev_token_ids" in kwargs else args[0]
            calls.append((prev, bias(*args, **kwargs)))
            return calls[-1][1]

        head.block_bias = block_bias
    if getattr(model, "confidence_head", None) is not None:
        model.confidence_head.register_forward_hook(
            lambda module, args, out: found.update(confidence=torch.sigmoid(out).view(ANCHORS, B))
        )
    select = core.select_anchors

    def keep(*args):
        places, valid = select(*args)
        found["anchors"] = places
        return places, valid

    core.select_anchors = keep
    losses = model.get_trainer_kwargs(loss_fn='{"ce": 0.1, "tv": 0.9}', loss_implementation="eager")[1]
    with torch.no_grad():
        model(
            hidden_states=inputs["hidden"],
            input_ids=inputs["ids"],
            loss_mask=(torch.arange(LENGTH) > 0)[None].float(),  # an anchor at 0 has no context to draft from
            verifier_last_hidden_states=inputs["last"],
            document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            position_ids=torch.arange(LENGTH)[None],
            **losses | {"max_anchors": ANCHORS},
        )
    core.select_anchors = select
    if calls:  # the first is fed the data's own tokens
        found["prev"], found["bias"] = calls[0][0].view(ANCHORS, B), calls[0][1].view(ANCHORS, B, -1)
    return {name: t.contiguous() for name, t in found.items()}


def eager(folder):
    from speculators import SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return config


def make(root: Path, job: dict):
    """A random model of a kind, saved by the package itself."""
    import speculators
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.model import SpeculatorModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    layer = Qwen3Config(**job["layer"])
    layer._attn_implementation = "eager"
    options = {"draft_vocab_size": layer.vocab_size} | job["options"]
    kind = getattr(
        speculators, {"dflash": "DFlash", "dspark": "DSpark", "xpress": "XPress"}[job["kind"]] + "SpeculatorConfig"
    )
    next_token = options.get("sample_from_anchor", job["kind"] == "dspark")
    config = kind(
        transformer_layer_config=layer,
        block_size=B,
        aux_hidden_state_layer_ids=[1, 3],
        mask_token_id=layer.vocab_size - 1,
        speculators_config=SpeculatorsConfig(
            algorithm=job["kind"],
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=B - 1 + next_token)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(root / "target")),
        ),
        **options,
    )
    model = SpeculatorModel.registered_model_class_from_config(config)(config)
    if options["draft_vocab_size"] != layer.vocab_size:
        ids = torch.tensor(REDUCED)
        chosen = torch.zeros(layer.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        model.load_vocab_mappings(chosen, ids - torch.arange(len(ids)))
    model.load_verifier_weights()
    own = [t for name, t in model.named_parameters() if "embed_tokens" not in name and "lm_head" not in name]
    with torch.no_grad():
        for weight in own:
            if weight.dim() > 1:
                weight.normal_(std=0.1)
    model.save_pretrained(job["folder"])


# --- in ours --------------------------------------------------------------------------------------------------------


def write_ours(root: Path, target) -> list[dict]:
    """Random checkpoints of ours, converted -> jobs."""
    from toys import make_drafter, make_head

    from xpress import interop
    from xpress.checkpoint import tensors_of
    from xpress.interop.base import Weights

    jobs = []
    for i, (name, head, layout, options) in enumerate(OURS):
        drafter = make_drafter(target, B, layout, scale=4.0, seed=i, **options)
        made = head and make_head(head, drafter, R, std=0.1)
        tensors = {n: t for n, t in tensors_of(drafter, made).items() if n != "d2t"}
        rank = R if name.startswith("dspark") else None
        if rank:
            tensors |= {"confidence.proj.weight": 0.1 * torch.randn(1, target.hidden_size + R)}
            tensors |= {"confidence.proj.bias": torch.randn(1)}
        folder = root / f"ours-{i}"
        interop.write(
            folder, Weights("ours", drafter.config, made and made.config, rank, tensors), "speculators", target
        )
        jobs.append({"name": name, "direction": "ours -> speculators", "folder": str(folder), "kind": None})
    return jobs


@torch.no_grad()
def compare(job: dict, target, ids: list[int]) -> dict:
    """The largest differences of one case."""
    from xpress import Context, load

    theirs = load_file(f"{job['folder']}.out")
    found = load(job["folder"], target, say=None)
    drafter, row = found.drafter, {"hidden": 0.0, "bias": 0.0, "confidence": 0.0, "same tokens": True}
    worst = lambda key, a, b: row.update({key: max(row[key], float((a - b).abs().max()))})  # noqa: E731
    for n, anchor in enumerate(theirs["anchors"].tolist()):
        drafter.reset()
        _, features = target.prefill([ids[:anchor]], drafter.layer_ids)
        block = drafter.draft(Context([ids[: anchor + 1]], features))
        worst("hidden", block.hidden[0], theirs["hidden"][n])
        if found.head is None:
            continue
        prev = block.prev_ids(torch.tensor([ids[anchor + 1 : anchor + 1 + block.num_draft]]))
        row["same tokens"] &= torch.equal(prev[0], theirs["prev"][n])
        worst("bias", found.head(block.hidden, prev)[0], theirs["bias"][n])
        if found.confidence is not None:
            rows = found.head.token_embed(prev)
            worst("confidence", found.confidence(block.hidden, rows)[0], theirs["confidence"][n])
    has = {"hidden": True, "bias": found.head is not None, "confidence": found.confidence is not None}
    row |= {key: None for key, there in has.items() if not there}
    row["note"] = "its mask was lost on loading" if theirs.get("mask was lost", torch.tensor(False)) else ""
    row["ok"] = row["same tokens"] and all(row[key] <= GAP for key in has if row[key] is not None)
    return row


def main(python: str) -> int:
    probe = subprocess.run([python, __file__, "version"], capture_output=True, text=True)
    if probe.returncode:
        why = " ".join(probe.stderr.splitlines()[-1:])
        print(
            f"skipped: {python} cannot import speculators ({why}); to add it: spec/bin/pip install speculators==0.9.0"
        )
        return 0
    from toys import make_model

    from xpress import Target

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_model().save_pretrained(root / "target")
        target = Target(make_model(), name=str(root / "target"))
        ids = torch.randint(3, target.vocab_size - 1, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
        features = target.features(torch.tensor([ids]), torch.arange(LENGTH)[None], (0, 2))
        save_file(
            {"ids": torch.tensor([ids]), "hidden": features.hidden.contiguous(), "last": features.last.contiguous()},
            root / "inputs.safetensors",
        )
        jobs = write_ours(root, target)
        c = target.config
        layer = {key: getattr(c, key) for key in ("vocab_size", "hidden_size", "intermediate_size", "rope_parameters")}
        layer |= {key: getattr(c, key) for key in ("num_attention_heads", "num_key_value_heads")}
        layer |= {"num_hidden_layers": 2, "head_dim": c.hidden_size // c.num_attention_heads}
        for i, (name, kind, options) in enumerate(THEIRS):
            job = {"name": name, "direction": "speculators -> ours", "folder": str(root / f"theirs-{i}")}
            jobs.append(job | {"kind": kind, "options": options, "layer": layer})
        (root / "jobs.json").write_text(json.dumps(jobs))
        done = subprocess.run([python, __file__, "worker", folder], capture_output=True, text=True)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        rows = [(job, compare(job, target, ids)) for job in jobs]
    print(f"speculators {probe.stdout.strip()}, fp32, {ANCHORS} blocks a case; the largest absolute differences")
    show = lambda value: "–" if value is None else f"{value:.1e}"  # noqa: E731
    for job, row in rows:
        gaps = "  ".join(f"{key} {show(row[key]):7}" for key in ("hidden", "bias", "confidence"))
        said = "ok" if row["ok"] else "DIFFERS" if row["same tokens"] else "OTHER TOKENS"
        print(f"{job['direction']:20} {job['name']:22} {gaps}  {said}  {row['note']}".rstrip())
    return int(not all(row["ok"] for _, row in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]))
    elif sys.argv[1:] == ["version"]:
        print(import_it())
    elif len(sys.argv) == 2:
        sys.exit(main(sys.argv[1]))
    else:
        sys.exit(__doc__)
