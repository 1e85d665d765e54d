"""The model card of a checkpoint: what it is, how it was made, what was measured, how it is loaded and served.

Everything comes from the checkpoint's own files and from a result of eval_tau.py; what they lack is said so.
"""

from __future__ import annotations

import json

from xpress import tables
from xpress.interop import FORMATS
from xpress.interop.base import Weights
from xpress.interop.serve_lines import KINDS, NOTES, SAYS, case_of, launch
from xpress.markdown import plain, render
from xpress.results import short_names
from xpress.tables import Table

LACKING = "not recorded"
PROTOCOL = ("target", "target_sha256", "bench", "prompts_sha256", "protocol", "samples", "turns", "max_new_tokens")
PROTOCOL += ("temperature", "top_k", "top_p", "accept", "thinking", "seed", "rounds", "batch_size", "readout", "dtype")
PROTOCOL += ("device", "loop", "threads", "torch", "transformers", "commit", "date")
COLUMNS = ("tau", "tau_macro", "responses", "lossless")


def measured(result: dict, sha256: str, headless: bool = False) -> list[dict]:
    """The cells of a result with the rows of the checkpoint whose weights have this hash, and no others.

    headless: only its rows without the head. Raises ValueError where the result measured other weights, or none so.
    """
    result = tables.whole(result)
    protocol = result["protocol"]
    hashes, names = protocol.get("checkpoint_sha256"), protocol.get("checkpoint")
    if not isinstance(hashes, list) or not isinstance(names, list) or len(hashes) != len(names):
        raise ValueError("results: it does not say which weights it measured; give the folder of one eval_tau.py run")
    if sha256 not in hashes:
        theirs = ", ".join(f"{name} (hash {str(own)[:16]})" for name, own in zip(names, hashes))
        raise ValueError(
            f"results: it measured {theirs}, but this checkpoint's weights have hash {sha256[:16]}; give the "
            "checkpoint that was measured (format= converts it), or measure this one"
        )
    name, cells = short_names(names)[hashes.index(sha256)], []
    for cell in result["cells"]:
        rows = [row for row in cell["methods"] if row["checkpoint"] == name and not row["note"]]
        cells.append(cell | {"methods": [row for row in rows if not headless or row["kind"] == "drafter"]})
    if not any(cell["methods"] for cell in cells):
        what = "the drafter without its head" if headless else "this checkpoint"
        raise ValueError(f"results: no row of {what} in it; measure with methods=[ar,drafter,head]")
    return cells


def card(
    weights: Weights,
    repo_id: str,
    *,
    base_model: str | None = None,
    license: str | None = None,
    source: dict | None = None,
    protocol: dict | None = None,
    cells: list[dict] | None = None,
) -> str:
    """The text of README.md. weights: what the published folder holds; source: {format, sha256} of the checkpoint that
    it was made from; protocol, cells: of a result, cells as `measured` gives them."""
    name = base_model or (weights.provenance.get("target") or {}).get("name")
    parts = [
        _front(weights, base_model, license),
        f"# {repo_id.partition('/')[2]}",
        f"{_title(weights)} for speculative decoding of {plain(name or 'a target that is not recorded')}. It drafts "
        "tokens that its target verifies, alone it is no language model. This card was made by `xpress` (distribution "
        "`xpress-refiner`) from the checkpoint's own records.",
        "## What it is\n\n" + render(_what(weights, name, source)),
        "## How it was made\n\n" + render(_recipe(weights.provenance)),
        "## What was measured\n\n" + _results(protocol, cells, source),
        "## Load it\n\n" + _load(repo_id, base_model),
        "## Serve it\n\n" + _serve(weights, repo_id, base_model),
        "## Licence\n\n" + _licence(license),
    ]
    return "\n\n".join(parts) + "\n"


def _kind(weights: Weights) -> str | None:
    return weights.head and KINDS.get(weights.head["_target_"], weights.head["_target_"].rpartition(".")[2])


def _title(weights: Weights) -> str:
    kind = _kind(weights)
    return "A block-diffusion drafter" + ("" if kind is None else f" with a correction head ({kind})")


def _front(weights: Weights, base_model: str | None, license: str | None) -> str:
    from huggingface_hub import ModelCardData  # the hub's own idea of its fields

    tags = ["speculative-decoding", "xpress", "dflash", *([kind] if (kind := _kind(weights)) else [])]
    known = {"base_model": base_model, "license": license}
    data = ModelCardData(library_name="xpress", tags=tags, **{key: value for key, value in known.items() if value})
    return f"---\n{data.to_yaml().strip()}\n---"


def _facts(rows: dict) -> Table:
    table = Table("", [("", "left"), ("", "left")])
    table.rows = [[name, LACKING if value in (None, "") else str(value)] for name, value in rows.items()]
    return table


def _count(weights: Weights, prefixes: tuple[str, ...], inside: bool) -> str:
    chosen = [t.numel() for name, t in weights.tensors.items() if name.startswith(prefixes) == inside and name != "d2t"]
    return f"{sum(chosen) / 1e6:.2f} M"


def _what(weights: Weights, target: str | None, source: dict | None) -> Table:
    config, parts = weights.config, ("head.", "confidence.")
    sizes = f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, {config.num_attention_heads} heads"
    rows = {
        "target": target,
        "target weights": _short((weights.provenance.get("target") or {}).get("fingerprint")),
        "drafter": f"dFlash, {sizes}, {_count(weights, parts, False)} parameters",
        "reads the target's layers": ", ".join(map(str, config.target_layer_ids)),
        "block": f"{config.block_size} slots, {config.num_draft} draft tokens, layout {config.layout}",
        "mask token": config.mask_token_id,
        "draft vocabulary": f"{config.draft_vocab_size} of {config.vocab_size} ids",
        "head": "none",
        "confidence head": "none" if weights.confidence is None else f"reads {weights.confidence} columns of the head",
        "dtype": str(weights.tensors["fc.weight"].dtype).removeprefix("torch."),
        "format": f"{weights.format}: {FORMATS[weights.format].ABOUT}",
    }
    if weights.head is not None:
        rows["head"] = f"{_kind(weights)}, rank {weights.rank}, {_count(weights, ('head.',), True)} parameters"
    if source is not None:
        rows["made from"] = f"{FORMATS[source['format']].ABOUT}, sha256 {source['sha256']}"
    return _facts(rows)


def _short(value) -> str | None:
    return f"sha256 {value}" if value else None


def _recipe(provenance: dict) -> Table:
    recipe, rows = dict(provenance.get("recipe") or {}), provenance.get("data") or {}
    init = provenance.get("init") or {}
    asked = {key: recipe.pop(key, None) for key in ("objective", "steps", "lr", "drafter_lr_scale", "seed")}
    counts = [
        f"{rows[key]} {name}" for key, name in (("rows", "rows"), ("response_tokens", "response tokens")) if key in rows
    ]
    coverage = rows.get("coverage")
    return _facts(
        {
            "data": ", ".join([*counts, *([_short(rows["sha256"])] if rows.get("sha256") else [])]),
            **({} if coverage is None else {"tokens inside the draft vocabulary": f"{coverage:.2%}"}),
            "objective": asked["objective"] and json.dumps(asked["objective"], sort_keys=True),
            "steps": asked["steps"],
            "learning rate": asked["lr"],
            "of the drafter, times": asked["drafter_lr_scale"],
            "seed": asked["seed"],
            "started from": _short(init.get("sha256")),
            "other settings": ", ".join(f"{key}={value}" for key, value in sorted(recipe.items())),
            "versions": ", ".join(f"{key} {value}" for key, value in (provenance.get("versions") or {}).items()),
        }
    )


def _results(protocol: dict | None, cells: list[dict] | None, source: dict | None) -> str:
    if not cells:
        return f"Acceptance length and losslessness: {LACKING}."
    where = ", on the weights that these were written from" if source else ""
    parts = [
        "tau is the mean number of tokens a round, the target's own included, over all rounds; intervals are 95 % "
        f"bootstraps over prompts. Measured by `eval_tau.py`{where}."
    ]
    for cell in cells:
        table = tables.main_table(cell, COLUMNS)
        parts += [f"### {plain(table.title)}", render(table)]
        lines = [plain(line.strip()) for line in tables.lossless_lines(cell)]
        parts += ["\n".join(f"- {line}" for line in lines)] if lines else []
    parts.append(render(_facts({key: tables.setting(protocol[key]) for key in PROTOCOL if key in protocol})))
    return "\n\n".join(parts)


def _load(repo_id: str, base_model: str | None) -> str:
    return "\n".join(
        [
            "```python",
            "import xpress  # pip install -e . in a checkout of xpress-refiner",
            "",
            f'target = xpress.Target.from_pretrained("{base_model or "TARGET"}", dtype="bfloat16", device="cuda")',
            f'found = xpress.load("{repo_id}", target, dtype=target.dtype, device="cuda")',
            'prompt = target.tokenizer("The capital of France is")["input_ids"]',
            'response = xpress.generate(target, prompt, found.drafter, found.head, passes="auto", max_new_tokens=64)',
            "```",
        ]
    )


def _serve(weights: Weights, repo_id: str, base_model: str | None) -> str:
    case, parts = case_of(weights.format, weights.head and weights.head["_target_"], weights.config.layout), []
    beside = {"reduced", "skipped"} if weights.config.draft_ids is None else set()
    beside |= {"confidence"} if weights.confidence is None else set()
    parts.append("Lines and notes hold for folders as `xpress` writes this format.")
    for engine, way in case.ways.items():
        parts.append(f"**{engine}**: {SAYS[way.status]}.")
        if way.line:
            line = launch(way.line, base_model or "TARGET", repo_id, weights.config.num_draft)
            parts.append(f"```text\n{line}\n```")
        parts.append("\n".join(f"- {NOTES[name][0]} ({NOTES[name][1]})" for name in way.notes if name not in beside))
    return "\n\n".join(parts)


def _licence(license: str | None) -> str:
    said = f"`{license}`, as whoever published it says." if license else "None is stated for these weights."
    return f"{said} Nothing is claimed about the licences of the target and of the training data, which may bind too."
