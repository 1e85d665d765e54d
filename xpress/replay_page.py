"""A replay as one page that needs nothing else: no server, no network, no library."""

from __future__ import annotations

import json
from pathlib import Path

from xpress.files import new_file
from xpress.replay import Recording, Replay

TEMPLATE = Path(__file__).with_name("replay.html")
PLACE = "__REPLAY__"


def check_page(path: str | Path | None) -> None:
    """Raises ValueError or FileNotFoundError naming `html` where a page cannot be written there. None: no page."""
    if path is None:
        return
    if not isinstance(path, (str, Path)) or not str(path).strip():
        raise ValueError(f"html={path}: must be the name of a file, or null for no page")
    place = Path(path).expanduser()
    if place.exists():
        raise ValueError(f"html={path}: is there already and is not overwritten; give another name, or remove it")
    if not place.parent.is_dir():
        raise FileNotFoundError(f"html={path}: no folder {place.parent}; make it, or give another name")


def write_page(replay: Replay, path: str | Path) -> Path:
    """The replay as one HTML file, whole or not there; never over an older one."""
    check_page(path)
    place = Path(path).expanduser()
    before, after = TEMPLATE.read_text(encoding="utf-8").split(PLACE)
    with new_file(place) as temporary:
        temporary.write_text(before + embedded(facts(replay)) + after, encoding="utf-8")
    return place


def embedded(content) -> str:
    """JSON that may stand inside a script element: pure ASCII, and no < that could end the element."""
    return json.dumps(content, allow_nan=False).replace("<", "\\u003c")


def facts(replay: Replay) -> dict:
    """What the page shows, as JSON-able data. A token is [text, kind]."""
    return {
        "prompt": replay.prompt,
        "greedy": replay.greedy,
        "protocol": replay.protocol,
        "seconds": replay.seconds,
        "methods": [
            method_facts(recording, row) for recording, row in zip(replay.recordings, replay.summary(), strict=True)
        ],
    }


def method_facts(recording: Recording, row: dict) -> dict:
    pairs = lambda tokens: [[token.text, token.kind] for token in tokens]  # noqa: E731
    return {
        "name": recording.name,
        "about": recording.about,
        "passes": recording.passes,
        "text": recording.text,
        "summary": row,
        "scenes": [
            {
                "at": scene.at,
                "tokens": pairs(scene.tokens),
                "drafted": pairs(scene.drafted),
                "round": None
                if scene.round is None
                else {"accepted": scene.round.num_accepted, "passes": scene.round.passes},
            }
            for scene in recording.scenes
        ],
    }
