"""Publish a checkpoint on the Hugging Face hub, with a model card made of its own records.

    python scripts/push_to_hub.py CHECKPOINT owner/name [format=zlab] [results=outputs/eval] [license=apache-2.0]
    python scripts/push_to_hub.py CHECKPOINT owner/name folder=published      # writes the files only, no network

CHECKPOINT: a folder, a training run, a research file or a hub id. format: null or left out: its own. results: what
eval_tau.py wrote about these weights. license: of these weights; left out, none is stated. base_model: the target's
hub id, where the checkpoint names a local folder. private: true or false. target, dtype, drafter, drop: as in
convert.py. The token is huggingface_hub's own (`hf auth login`, or HF_TOKEN).
"""

import sys

from xpress import parts, push_to_hub
from xpress.arguments import CONVERSION, arguments, conversion

PLAIN = ("format", "results", "license", "base_model", "folder")


def main(words: list[str]):
    if not words or {"-h", "--help"} & set(words):
        return print(__doc__)
    try:
        (source, repo_id), settings = arguments(words, (*PLAIN, "private", *CONVERSION), "CHECKPOINT owner/name")
        private = settings.get("private", "false")
        if private not in ("true", "false"):
            raise ValueError(f"private={private}: give true or false")
        plain = {key: settings[key] for key in PLAIN if key in settings}
        made = push_to_hub(parts.find(source), repo_id, private=private == "true", **conversion(settings), **plain)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{source}: written to {made}" if "folder" in settings else f"{source}: published at {made}")


if __name__ == "__main__":
    main(sys.argv[1:])
