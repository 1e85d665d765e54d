"""Publish a checkpoint on the Hugging Face hub, with a model card made of its own records.

    python scripts/push_to_hub.py CHECKPOINT owner/name [format=zlab] [results=outputs/eval] [license=apache-2.0]
    python scripts/push_to_hub.py CHECKPOINT owner/name folder=published      # writes the files only, no network

CHECKPOINT: a folder, a training run, a research file or a hub id. format: null or left out: its own. results: what
eval_tau.py wrote about these weights. license: of these weights; left out, none is stated. base_model: the target's
hub id, where the checkpoint names a local folder. private: true or false. target, dtype, drafter, drop: as in
convert.py. The token is huggingface_hub's own (`hf auth login`, or HF_TOKEN).
"""

import sys

PLAIN = ("format", "results", "license", "base_model", "folder")
KEYS = (*PLAIN, "private", "target", "dtype", "drafter", "drop")


def arguments(words: list[str]) -> tuple[list[str], dict]:
    """-> checkpoint and repository, settings. Raises ValueError for a key that is not known or given twice."""
    pairs = [word.partition("=")[::2] for word in words if "=" in word]
    places, settings = [word for word in words if "=" not in word], dict(pairs)
    unknown = sorted(set(settings) - set(KEYS))
    if unknown or len(settings) < len(pairs) or "" in settings.values():
        said = f"unknown key {unknown[0]}; " if unknown else ""
        raise ValueError(f"{said}give each of {', '.join(KEYS)} once at most, with a value")
    if len(places) != 2:
        raise ValueError(f"give CHECKPOINT owner/name, then settings; got {' '.join(words)}")
    if settings.get("private", "false") not in ("true", "false"):
        raise ValueError(f"private={settings['private']}: give true or false")
    return places, {key: value for key, value in settings.items() if value != "null"}


def main(words: list[str]):
    if not words or {"-h", "--help"} & set(words):
        return print(__doc__)
    try:
        (source, repo_id), settings = arguments([word.removeprefix("--") for word in words])
        from xpress import parts, push_to_hub

        target = None
        if name := settings.get("target"):
            target = parts.make_target({"name": name}, "cpu", settings.get("dtype"))
        made = push_to_hub(
            parts.find(source),
            repo_id,
            private=settings.get("private") == "true",
            target=target,
            drafter=parts.find(settings.get("drafter")),
            drop=settings["drop"].split(",") if "drop" in settings else (),
            **{key: settings[key] for key in PLAIN if key in settings},
        )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{source}: written to {made}" if "folder" in settings else f"{source}: published at {made}")


if __name__ == "__main__":
    main(sys.argv[1:])
