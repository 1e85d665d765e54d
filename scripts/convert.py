"""Write a checkpoint in another format: vLLM's, SGLang's, speculators', ours.

    python scripts/convert.py SRC DST format=zlab [target=<folder or hub id>] [drafter=<folder>] [drop=head]
    python scripts/convert.py matrix        # every format on tiny checkpoints: read, write, decode, round trip

SRC: a folder, a training run, a research file or a hub id, its format is recognised. target: compared with saved copies
of its tensors, and needed to write a reduced vocabulary; dtype=bfloat16 loads it so. drafter: for a research file, the
folder of the dFlash drafter that it started from. drop: leave out head or confidence (drop=head,confidence).
"""

import sys

KEYS = ("format", "target", "dtype", "drafter", "drop")


def arguments(words: list[str]) -> tuple[list[str], dict]:
    """-> places, settings. Raises ValueError for a key that is not known or given twice."""
    places = [word for word in words if word.partition("=")[0] not in KEYS]
    pairs = [word.partition("=")[::2] for word in words if word not in places]
    settings = dict(pairs)
    if len(settings) < len(pairs) or "" in settings.values():
        raise ValueError(f"give each of {', '.join(KEYS)} once, with a value")
    if places != ["matrix"] and (len(places) != 2 or "format" not in settings):
        raise ValueError(
            f"give SRC DST format=<name>, or matrix; settings are {', '.join(KEYS)}; got {' '.join(words)}"
        )
    return places, settings


def main(words: list[str]):
    if not words or {"-h", "--help"} & set(words):
        return print(__doc__)
    try:
        places, settings = arguments([word.removeprefix("--") for word in words])
        from xpress import interop, parts
        from xpress.interop import matrix

        if places == ["matrix"]:
            rows = matrix.measure()
            print(matrix.table(rows))
            sys.exit("error: a format FAILED" if any(row.failed for row in rows) else None)
        target = None
        if name := settings.get("target"):
            target = parts.make_target({"name": name}, "cpu", settings.get("dtype"))
        drop = settings["drop"].split(",") if "drop" in settings else ()
        source, destination = parts.find(places[0]), places[1]
        drafter = parts.find(settings.get("drafter"))
        record = interop.convert(source, destination, settings["format"], target, drafter, drop)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    about = interop.FORMATS[record["source"]["format"]].ABOUT
    print(f"{places[0]}: {about}, sha256 {record['source']['sha256'][:16]}")
    print(f"{destination}: {interop.FORMATS[record['written']].ABOUT}")
    for line in [*record["notes"], *record["left_out"]]:
        print(f"  {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
