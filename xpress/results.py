"""result.json files: read with clear errors, and several put side by side."""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from pathlib import Path

from xpress.tables import whole

FORMAT = 1
NAME = "result.json"
# What two results must share for their numbers to be comparable: first what the outputs depend on, then the speed.
# Not the commit: most changes of the code move no number, and the merged protocol shows both.
SAME = ("target_sha256", "samples", "max_new_tokens", "temperature", "top_k", "top_p", "accept", "thinking", "turns")
SAME += ("seed", "seeds", "dtype", "device", "loop", "threads", "torch", "transformers", "python", "triton")


def find(path: Path) -> Path:
    """A result's file: `path` itself, or the result.json in it. FileNotFoundError where there is none."""
    path = Path(path).expanduser()
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; give a {NAME} that eval_tau.py wrote, or its folder")
    return file


def read(path: Path) -> dict:
    """A result.json of format 1, from its file or folder.

    Raises OSError where it cannot be read, ValueError where it is no such result; both name the file.
    """
    file = find(path)
    try:
        result = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); copy it again or measure again") from error
    found = result.get("format") if isinstance(result, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"{file}: format {found!r}, this version reads format {FORMAT}; give a {NAME} that eval_tau.py wrote, or "
            "measure again"
        )
    cells = result.get("cells")
    listed = isinstance(cells, list) and all(isinstance(cell, dict) for cell in cells)
    if not listed or not all(isinstance(row, dict) for cell in cells for row in cell.get("methods") or []):
        raise ValueError(f"{file}: cells must be a list of objects with methods; copy it again or measure again")
    return result


def read_all(paths) -> dict[str, dict]:
    """{short name: result}: the folder of a result.json (else the file's stem), with folders above where names clash.

    ValueError where a result is given twice.
    """
    files = [find(path).resolve() for path in paths]
    twice = [str(file) for file, count in Counter(files).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]}: given twice; give each result once")
    names = short_names([file.parent if file.name == NAME else file.with_suffix("") for file in files])
    return {name: read(file) for name, file in zip(names, files)}


def short_names(paths: list) -> list[str]:
    """The last part of each path, made different from each other by what stands before it."""
    split = [Path(str(path)).parts for path in paths]
    for length in range(1, max(map(len, split), default=0) + 1):
        names = ["/".join(part[-length:]) for part in split]
        if len(set(names)) == len(names):
            return names
    return [f"{Path(str(path)).name or path} ({i})" for i, path in enumerate(paths, 1)]


def merge(results: dict[str, dict]) -> dict:
    """{name: result} -> one result. Cells of the same set and batch size become one.

    A label that several results have is prefixed with its result's name. What makes their numbers incomparable is told
    in `warnings`. Where nothing does, `paired` also compares each method that several results have, marked
    `across_runs` and without interval, since those prompts were not answered side by side; a result without plain
    autoregression gets its speed-up against that of another, marked `speedup_across_runs`.
    """
    results = {name: whole(deepcopy(result)) for name, result in results.items()}
    owners: dict[str, set[str]] = {}
    for name, result in results.items():
        for cell in result["cells"]:
            for row in cell["methods"]:
                owners.setdefault(row["label"], set()).add(name)
    protocols = {name: result["protocol"] for name, result in results.items()}
    warned = [f"{name}: {text}" for name, result in results.items() for text in result["warnings"]]
    differ = differences(protocols)
    alike = not differ
    by_place: dict[tuple, dict[str, dict]] = {}
    for name, result in results.items():
        for cell in result["cells"]:
            by_place.setdefault((cell["bench"], cell["batch_size"]), {})[name] = cell
    cells = []
    for (bench, size), found in by_place.items():
        where = f"{bench}, batch size {size}: "
        unlike = differences({name: {"prompts": cell["prompts"]} for name, cell in found.items()}, ("prompts",))
        differ += [where + text for text in unlike]
        cells.append(_merge_cell(found, owners, alike and not unlike))
    return {
        "format": FORMAT,
        "protocol": {"results": ", ".join(results), **_together(protocols)},
        "warnings": [f"numbers are not comparable, {text}" for text in differ] + warned,
        "cells": cells,
    }


def differences(protocols: dict[str, dict], keys=SAME) -> list[str]:
    """`key: value in a, value in b` for each key that is not the same everywhere."""
    # Without its hash, a target is known by its name alone.
    keys = list(keys) if all(p.get("target_sha256") for p in protocols.values()) else ["target", *keys]
    found = []
    for key in keys:
        values = {name: protocol.get(key) for name, protocol in protocols.items()}
        if any(value != next(iter(values.values())) for value in values.values()):
            found.append(f"{key}: " + ", ".join(f"{value} in {name}" for name, value in values.items()))
    return found


def _together(protocols: dict[str, dict]) -> dict:
    """One value where all agree, else each with its result's name."""
    merged = {}
    for key in dict.fromkeys(key for protocol in protocols.values() for key in protocol):
        values = {name: protocol.get(key) for name, protocol in protocols.items()}
        first, *others = values.values()
        same = all(value == first for value in others)
        merged[key] = first if same else "; ".join(f"{name}: {value}" for name, value in values.items())
    return merged


def _merge_cell(found: dict[str, dict], owners: dict[str, set[str]], comparable: bool) -> dict:
    rows, pairs, best = [], [], []
    autoregressive = {
        name: row["tokens_per_second"]
        for name, cell in found.items()
        for row in cell["methods"]
        if row["kind"] == "ar" and row["tokens_per_second"]
    }
    by_label: dict[str, list[dict]] = {}
    for name, cell in found.items():
        rename = {row["label"]: f"{name}: {row['label']}" for row in cell["methods"] if len(owners[row["label"]]) > 1}
        for row in cell["methods"]:
            by_label.setdefault(row["label"], []).append(row)
            row["label"] = rename.get(row["label"], row["label"])
            if comparable and autoregressive and name not in autoregressive and row["speedup"] is None:
                if row["tokens_per_second"] is not None:
                    row["speedup"] = row["tokens_per_second"] / next(iter(autoregressive.values()))
                    row["speedup_across_runs"] = True
            rows.append(row)
        pairs += [pair | {key: rename.get(pair.get(key), pair.get(key)) for key in "ab"} for pair in cell["paired"]]
        best += [{"run": name, **choice} for choice in cell["best"]]
    for first, *others in by_label.values() if comparable else ():
        for other in others:
            pairs += _across(other, first)
    truncated = {cell["truncated"] for cell in found.values()}
    prompts = {cell["prompts"] for cell in found.values()}
    first = next(iter(found.values()))
    return {
        "bench": first["bench"],
        "batch_size": first["batch_size"],
        "prompts": prompts.pop() if len(prompts) == 1 else None,
        "truncated": truncated.pop() if len(truncated) == 1 else None,
        "best": best or None,
        "methods": rows,
        "paired": pairs,
    }


def _across(a: dict, b: dict) -> list[dict]:
    pair = {"a": a["label"], "b": b["label"], "interval": None, "across_runs": True}
    found = []
    if None not in (a["tau"], b["tau"]) and a["kind"] != "ar":  # plain autoregression has tau 1 everywhere
        found.append(pair | {"metric": "tau", "value": a["tau"] - b["tau"]})
    if a["tokens_per_second"] is not None and b["tokens_per_second"]:
        found.append(pair | {"metric": "speed", "value": a["tokens_per_second"] / b["tokens_per_second"]})
    return found
