"""A checkpoint, with a model card, as a repository of the Hugging Face hub, or as the folder that would become one."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from xpress import checkpoint, interop
from xpress.card import card, measured
from xpress.files import new_folder, write_json, write_text
from xpress.results import read as read_result

CARD = "README.md"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
REPLACED = ["*.safetensors", checkpoint.INDEX, checkpoint.PROVENANCE, checkpoint.CONVERSION]  # of an older checkpoint


def push_to_hub(
    path: str | Path,
    repo_id: str,
    *,
    results: str | Path | None = None,
    private: bool = False,
    folder: str | Path | None = None,
    format: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    target=None,
    drafter: str | Path | None = None,
    drop=(),
    token: str | None = None,
) -> str | Path:
    """Publish a checkpoint with a model card, in one commit -> its address; with `folder`, write what would be
    published into that new folder, without any network -> the folder.

    path: as `xpress.load` takes it; repo_id: owner/name; results: the folder of an eval_tau.py run that measured these
    weights; format: one that is written, None for the checkpoint's own; license: the hub's name of the licence of these
    weights, None to state none; base_model: the target's hub id, None for the provenance's where that is one; target,
    drafter, drop: as in `interop.convert`; token: None for the one that huggingface_hub finds.

    Raises ValueError for a bad id, format, licence or base model, a missing token, results of other weights, and a
    public repository where a private one is asked for; FileExistsError where `folder` exists; OSError where the hub
    cannot be reached or refuses. Local paths in the provenance are cut to their last part.
    """
    for key, value in (("repo_id", repo_id), ("base_model", base_model)):
        if value is not None:
            _check_id(key, value)
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license):
        raise ValueError(f"license={license!r}: give the hub's name of one, as apache-2.0 or mit, or leave it out")
    if folder is not None and Path(folder).exists():
        raise FileExistsError(f"folder={folder} exists; give another name, nothing is written over it")
    if folder is None and token is None:
        from huggingface_hub import get_token

        if get_token() is None:
            raise ValueError(
                f"{repo_id}: no token to publish with; run `hf auth login` or set HF_TOKEN to a token that may write, "
                "or give folder=<a new folder> to write the files only"
            )
    made = {"format": format, "target": target, "drafter": drafter, "drop": drop}
    facts = {"repo_id": repo_id, "results": results, "license": license, "base_model": base_model}
    if folder is not None:
        _write(Path(folder).expanduser(), path, made, **facts)
        return Path(folder)
    with tempfile.TemporaryDirectory() as place:
        _write(Path(place) / "checkpoint", path, made, **facts)
        return _upload(Path(place) / "checkpoint", repo_id, private, token)


def _check_id(key: str, value: str):
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(value)
        why = "" if HUB_ID.fullmatch(value) else "not owner/name"
    except HFValidationError as error:
        why = str(error)
    if why:
        raise ValueError(f"{key}={value!r}: {why}; give a hub id as owner/name")


def _write(folder: Path, path, made: dict, *, repo_id, results, license, base_model):
    """The folder, whole or not at all. What it holds is read back before it gets its name."""
    place = checkpoint.locate(path)
    sha256, drop = checkpoint.weights_hash(place), tuple(made["drop"])
    result = None if results is None else read_result(results)
    cells = None if result is None else measured(result, sha256, headless="head" in drop)
    with new_folder(folder, replace=False) as temporary:
        source = None
        if made["format"] is None and not drop:
            _copy(place, temporary)
        else:
            format = made["format"] or interop.plan(place, made["target"], made["drafter"]).format
            inner = temporary / "converted"
            record = interop.convert(place, inner, format, made["target"], made["drafter"], drop)
            for file in inner.iterdir():
                file.rename(temporary / file.name)
            inner.rmdir()
            source = {key: record["source"][key] for key in ("format", "sha256")}
        base_model = _settle(temporary, base_model)
        weights = interop.read(temporary, made["target"])
        text = card(
            weights,
            repo_id,
            base_model=base_model,
            license=license,
            source=source,
            protocol=result and _portable(result["protocol"]),
            cells=cells,
        )
        write_text(temporary / CARD, text)


def _copy(place: Path, folder: Path):
    if place.is_file():
        raise ValueError(f"{place}: research files are read, not written; give format=ours or another one")
    names = [checkpoint.CONFIG, checkpoint.INDEX, checkpoint.PROVENANCE, checkpoint.CONVERSION]
    for file in [*(place / name for name in names), *checkpoint.weight_files(place)]:
        if file.exists():
            shutil.copyfile(file, folder / file.name)


def _settle(folder: Path, base_model: str | None) -> str | None:
    """Names the target in the folder's files as the hub does, and cuts local paths -> the target's hub id, if any."""
    named = (checkpoint.provenance_of(folder).get("target") or {}).get("name")
    config = checkpoint.read_json(folder / checkpoint.CONFIG)
    verifier = (config.get("speculators_config") or {}).get("verifier")
    for name in (named, verifier and verifier.get("name_or_path")):
        if base_model is None and isinstance(name, str) and HUB_ID.fullmatch(name) and not Path(name).exists():
            base_model = name
    if verifier is not None:
        if base_model is None:
            raise ValueError(
                f"base_model: this format names its target, and {verifier.get('name_or_path')!r} is no hub id; give "
                "base_model=<the target's owner/name>"
            )
        verifier["name_or_path"] = base_model
        write_json(folder / checkpoint.CONFIG, config)
    for name in (checkpoint.PROVENANCE, checkpoint.CONVERSION):
        if (folder / name).exists():
            found = checkpoint.read_json(folder / name)
            for facts in (found, found.get("provenance") or {}):
                if base_model is not None and isinstance(facts.get("target"), dict):
                    facts["target"]["name"] = base_model
            write_json(folder / name, _portable(found))
    return base_model


def _portable(value):
    """JSON without the folders of this machine: of an absolute path only its last part stays."""
    if isinstance(value, dict):
        return {key: _portable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_portable(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~/")) else value


def _upload(folder: Path, repo_id: str, private: bool, token: str | None) -> str:
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        public = private and not api.model_info(repo_id).private
        if not public:
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message="Checkpoint and model card",
                delete_patterns=REPLACED,
            )
    except Exception as error:  # the hub client raises a dozen kinds, and those of its HTTP library
        raise OSError(
            f"{repo_id}: not published ({type(error).__name__}: {error}); check network, name and the token's rights, "
            "then give the same command again, or folder=<a new folder> to write the files only"
        ) from error
    if public:
        raise ValueError(f"private: {repo_id} exists and is public; nothing was uploaded. Give another repo_id")
    return str(address)
