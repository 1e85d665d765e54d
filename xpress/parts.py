"""One section of the settings -> one object: target, drafter, head, objective; and where relative paths lead.

Sections are plain dicts. A key that nothing reads is refused here by name.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import torch

from xpress import batches, checkpoint, data, interop, prompts, state
from xpress.anchors import Batch
from xpress.client import Tokens
from xpress.drafter import DFlashDrafter
from xpress.drafter_config import DrafterConfig
from xpress.features import feature_scale
from xpress.heads import ConfidenceHead, CorrectionHead
from xpress.heads.confidence import beside
from xpress.kernels import Screen
from xpress.loss import CONFIDENCE, Term
from xpress.recipe import TrainSettings
from xpress.static import SIZES
from xpress.target import Target

REPO = Path(__file__).resolve().parents[1]
HOME = Path(os.environ.get("XPRESS_HOME", "~/.cache/xpress")).expanduser()

SCREENS = {"full": None, "int8": 8, "int4": 4, "bf16": 16}
TARGET_KEYS = {"name", "dtype", "revision", "device_map", "loop", "graphs", "sizes"}
TERM_VALUES = {
    "rounds": "rounds",
    "anchor": "weight",
    "loss": "loss",
    "decay": "decay",
}  # objective.x -> a term's field


def refuse_unknown(section: str, found, known):
    unknown = sorted(set(found or ()) - set(known))
    if unknown:
        where = f"{section}." if section else ""
        raise ValueError(f"unknown key {where}{unknown[0]}; known are {', '.join(sorted(known))}")


def find(path: str | None) -> str | None:
    """A relative path as the user's, else as the repository's, the package's, or in XPRESS_HOME; anything else
    unchanged."""
    if path is None or Path(path).expanduser().exists():
        return path
    return next((str(root / path) for root in (REPO, checkpoint.PACKAGE, HOME) if (root / path).exists()), path)


def from_anywhere(path: str) -> str:
    """A folder that only the present working folder finds as an absolute path; all else as it was given."""
    local = Path(path).expanduser()
    ours = any((root / path).exists() for root in (REPO, checkpoint.PACKAGE, HOME))
    return str(local.resolve()) if local.exists() and not ours else path


def device_of(name: str | None) -> str:
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(name: str | None, device: str) -> str:
    """float32 on a CPU and bfloat16 on a GPU unless named."""
    name = name or ("float32" if device == "cpu" else "bfloat16")
    if not isinstance(getattr(torch, str(name), None), torch.dtype):
        raise ValueError(f"dtype={name}: give float32, bfloat16, float16 or float64")
    return name


def check_readout(name: str):
    """Raises ValueError unless `name` is full, int8, int4, bf16 or top<C>."""
    if name not in SCREENS and not re.fullmatch(r"top[1-9]\d*", str(name)):
        raise ValueError(f"readout={name}: give full, int8, int4, bf16, or top<C> as top256 (not exact)")


def for_decoding(head: CorrectionHead, readout: str = "full") -> CorrectionHead:
    """The head's inference form, with greedy drafts read out as asked: full; int8, int4, bf16: from a screen, as exact;
    top<C>: over the C best candidates of the drafter, not exact."""
    check_readout(readout)
    head = head.folded()
    if readout in SCREENS:
        bits = SCREENS[readout]
        head.screen = bits and Screen.of(head.readout.weight, bits)
    else:
        head.top_c = int(readout[3:])
    return head


def target_of(given: str | None, folders: list[Path]) -> str:
    """The target's name: the one given, else the one that a checkpoint's provenance names."""
    for folder in folders:
        given = given or (checkpoint.provenance_of(folder).get("target") or {}).get("name")
    if given is None:
        raise ValueError(f"checkpoint={folders[0]} does not name its target; give target.name=<folder or hub id>")
    return given


def make_target(section: dict, device: str, dtype: str | None = None) -> Target:
    place = _place(section)
    dtype = dtype or section.get("dtype") or "float32"
    options = section.get("revision"), section.get("device_map"), section.get("loop", "auto")
    target = Target.from_pretrained(place, dtype, device, *options, section.get("graphs") or SIZES)
    target.name = section["name"]
    check_sizes("target", section.get("sizes"), section["name"], target.config)
    return target


def check_sizes(section: str, sizes: dict | None, name: str, config):
    """Raises ValueError where the sizes that a settings file writes down for plans are not those that were loaded.
    Those of another model than `name` are not looked at."""
    if not sizes or sizes.get("of") != name:
        return
    plain = lambda value: list(value) if isinstance(value, tuple) else value  # noqa: E731
    have = {key: plain(getattr(config, key, None)) for key in sizes if key != "of"}
    wrong = [f"{key}={sizes[key]} (it has {value})" for key, value in have.items() if sizes[key] != value]
    if wrong:
        raise ValueError(f"{section}.sizes: {', '.join(wrong)}: not those of {name}; correct them in its settings file")


def make_tokens(section: dict) -> Tokens:
    """The target's tokenizer and stop ids without its weights, for rows that a server answers."""
    tokens = Tokens.from_pretrained(_place(section), section.get("revision"))
    tokens.name = section["name"]
    return tokens


def _place(section: dict) -> str:
    refuse_unknown("target", section, TARGET_KEYS)
    name = section["name"]
    if name == "smollm2-135m-instruct" and find(name) == name:
        raise FileNotFoundError(f"target.name={name} is not in {HOME}; run: python scripts/get_smollm2.py")
    return find(name)


def make_drafter(section: dict, target: Target, rows, settings: TrainSettings) -> tuple[DFlashDrafter, dict | None]:
    """A fresh drafter for the target, or the one that `drafter.init` names -> drafter, where it came from."""
    section = dict(section)
    init, vocab = section.pop("init", None), section.pop("draft_vocab_size", None)
    sizes = section.pop("sizes", None)
    fields = {field.name for field in dataclasses.fields(DrafterConfig)}
    refuse_unknown("drafter", section, fields)
    if init is not None:
        found = interop.load(find(init), target, device=target.device)
        for key, wanted in {**section, "draft_vocab_size": vocab}.items():
            have = getattr(found.drafter.config, key)
            if wanted is not None and (list(have) if isinstance(have, tuple) else have) != wanted:
                raise ValueError(f"drafter.{key}={wanted}, but drafter.init={init} has {have}; drop one of the two")
        check_sizes("drafter", sizes, init, found.drafter.config)
        origin = {"path": from_anywhere(init), "sha256": checkpoint.weights_hash(found.path)}
        return found.drafter, origin
    config = DrafterConfig.for_target(target, **section)
    if vocab is not None:
        always = prompts.stop_ids(target.tokenizer, target.model)
        ids = data.frequent_ids(rows, vocab, target.vocab_size, always)
        config = dataclasses.replace(config, draft_ids=tuple(ids))
    if config.feature_scale == (1.0,) * len(config.target_layer_ids):
        sample: Batch = batches.collate(rows[:16], settings.max_length).to(target.device)
        config = dataclasses.replace(config, feature_scale=feature_scale(target, sample, config.target_layer_ids))
    torch.manual_seed(settings.seed)
    return DFlashDrafter(config).bind(target), None


def make_head(section: dict | None, drafter: DFlashDrafter, target: Target):
    """The head that `_target_` names; sizes come from the drafter. None for head=none."""
    section = {key: value for key, value in (section or {}).items() if key != "init"}
    if section.get("_target_") is None:
        return None
    sizes = checkpoint.head_sizes(drafter.config)
    checkpoint.check_head(section, drafter.config)
    kind = checkpoint.head_class(section["_target_"])
    accepted = inspect.signature(kind.__init__).parameters
    arguments = {key: value for key, value in sizes.items() if key in accepted}
    return checkpoint.build_head({**section, **arguments}).bind(target)


def trained_head(section: dict, drafter: DFlashDrafter, target: Target) -> tuple[CorrectionHead, dict]:
    """The head of the checkpoint that `head.init` names, to be trained further -> head, where it came from.

    Raises ValueError where there is none, where it is not the head asked for, and where it does not fit the drafter.
    """
    init, asked = section["init"], make_head(section, drafter, target)
    found = interop.load(find(init), target, device=target.device)
    if found.head is None or asked is None:
        why = "no head there" if found.head is None else "head=none asks for none"
        raise ValueError(f"head.init={init}: {why}; drop head.init")
    for key, wanted in asked.config.items():
        if (have := found.head.config.get(key)) != wanted:
            raise ValueError(f"head.{key}={wanted}, but head.init={init} has {have}; choose the head that is there")
    if found.drafter.config.draft_ids != drafter.config.draft_ids:
        raise ValueError(f"head.init={init}: its draft vocabulary is not the drafter's; give drafter.init={init} too")
    return found.head, {"path": from_anywhere(init), "sha256": checkpoint.weights_hash(found.path)}


def make_terms(section: dict) -> list[Term]:
    """The terms of an objective; those of 0 rounds or of weight 0 throughout are left out.

    rounds, anchor, loss and decay beside `terms` are values that terms refer to, so that one key changes them all.
    `confidence` is the weight of a confidence head's term, which counts tokens as the term with feed gold does; absent
    or 0: none. Raises ValueError for a value that no term has, for a loss that is all zero, and where no term is left.
    """
    refuse_unknown("objective", section, {"terms", CONFIDENCE, *TERM_VALUES})
    terms = []
    for term in section["terms"]:
        refuse_unknown("objective.terms", term, {field.name for field in dataclasses.fields(Term)})
        unrolled = term.get("rounds") != 0 or term.get("feed") != "self"
        made = Term(**(term if unrolled else {**term, "rounds": 1}))  # what is left out must be well written too
        if not any(made.loss.values()):
            raise ValueError(f"objective term {made.name}: loss={made.loss} is zero; give ce or l1 a weight")
        if unrolled and any(made.weight if isinstance(made.weight, list) else [made.weight]):
            terms.append(made)
    for key, field in TERM_VALUES.items():
        if key in section and not any(field in term and term[field] == section[key] for term in section["terms"]):
            raise ValueError(
                f"objective.{key}={section[key]}: no term has it as its {field}; drop the key with ~objective.{key}, "
                f"or write {field}: ${{objective.{key}}} into a term"
            )
    if not terms:
        raise ValueError("objective: no term is left, all have weight 0 or no rounds; nothing would be trained")
    weight = section.get(CONFIDENCE) or 0
    gold = [term for term in terms if term.feed == "gold"]
    if any(weight if isinstance(weight, list) else [weight]):
        if not gold:
            raise ValueError(
                f"objective.confidence={weight}: it is trained on what the term with feed gold would have accepted, "
                "and there is none; add one, or objective.confidence=0"
            )
        terms.append(Term(CONFIDENCE, CONFIDENCE, weight, loss={}, decay=gold[0].decay))
    return terms


def make_confidence(terms: list[Term], head, drafter: DFlashDrafter) -> ConfidenceHead | None:
    """A fresh confidence head where the objective trains one."""
    return beside(head, drafter.config.hidden_size) if any(term.feed == CONFIDENCE for term in terms) else None


def left_behind(init: str, target, head=None, confidence=None, taken=False) -> str | None:
    """What to say of heads beside the drafter in the checkpoint that `drafter.init` names: a run takes over none of
    them by itself. head, confidence: its own; taken: its head was trained before. None where there are none."""
    parts = lambda one, other: [n for n, x in (("head", one), ("confidence head", other)) if x is not None]  # noqa: E731
    found = interop.plan(find(init), target)
    known = (None, found.confidence) if taken else (found.head, found.confidence)
    left, fresh = parts(*known), parts(None if taken else head, confidence)
    if not left:
        return None
    rest = "its own head will be trained further" if taken else "the drafter alone will be trained"
    says = f"a new {' and a new '.join(fresh)} will be trained" if fresh else rest
    return f"drafter.init={init}: the {' and the '.join(left)} beside the drafter will not be used; {says}"


def check_room(out: Path, trainee):
    """Raises OSError where the disk cannot hold what a run keeps: three states while one is written, best and last."""
    free, need = shutil.disk_usage(out).free, 4 * state.size(trainee)
    if need > free:
        raise OSError(
            f"out={out}: a run of this size keeps up to {need / 1e9:.1f} GB of states and checkpoints, the disk has "
            f"{free / 1e9:.1f} GB; give another out"
        )


def versions() -> dict:
    """What a number was measured with."""
    import transformers

    try:
        commit = subprocess.run(
            ["git", "-C", str(REPO), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def bare_drafter(path: str | None, provenance: dict, target, dtype: str, device: str):
    """The drafter that training started from: the one given, else the one that the provenance names, if it is there
    and unchanged."""
    origin = provenance.get("init") or {}
    if path is None:
        start = find(origin.get("path"))
        try:
            weights = checkpoint.locate(start) if start and Path(start).exists() else None
        except FileNotFoundError:
            weights = None
        if weights is None or checkpoint.weights_hash(weights) != origin.get("sha256"):
            return None
        path = start
    return interop.load(find(path), target, getattr(torch, dtype), device)
