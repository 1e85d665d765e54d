"""Words of the scripts that have no settings file: PLACE … key=value …"""

from __future__ import annotations

from xpress import parts

CONVERSION = ("target", "dtype", "drafter", "drop")  # what scripts that read checkpoints have in common


def arguments(words: list[str], keys: tuple[str, ...], what: str) -> tuple[list[str], dict]:
    """-> places, settings. `what` names the two places. Only known keys make a setting, so that a path may hold "=".

    Raises ValueError for a key that is not known, given twice or without a value, and for another number of places.
    """
    words = [word.removeprefix("--") for word in words]
    pairs = [word.partition("=")[::2] for word in words if word.partition("=")[0] in keys and "=" in word]
    places, settings = [word for word in words if word.partition("=")[0] not in keys or "=" not in word], dict(pairs)
    if len(settings) < len(pairs) or "" in settings.values():
        raise ValueError(f"give each of {', '.join(keys)} once at most, with a value")
    if len(places) != 2:
        unknown = "".join(f"; no setting is named {word.partition('=')[0]}" for word in places if "=" in word)
        raise ValueError(f"give {what}, then settings of {', '.join(keys)}; got {' '.join(words)}{unknown}")
    return places, {key: value for key, value in settings.items() if value != "null"}


def conversion(settings: dict) -> dict:
    """The settings of CONVERSION as `interop.convert` takes them: target loaded, drafter found, drop split."""
    name, target = settings.get("target"), None
    if name:
        target = parts.make_target({"name": name}, "cpu", settings.get("dtype"))
    drop = tuple(settings["drop"].split(",")) if "drop" in settings else ()
    return {"target": target, "drafter": parts.find(settings.get("drafter")), "drop": drop}
