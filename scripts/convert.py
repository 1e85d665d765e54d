"""Write a checkpoint in another format: vLLM's, SGLang's, speculators', ours.

    python scripts/convert.py SRC DST format=zlab [target=<folder or hub id>] [drafter=<folder>] [drop=head]
    python scripts/convert.py matrix        # every format on tiny checkpoints: read, write, decode, round trip

SRC: a folder, a training run, a research file or a hub id, its format is recognised. target: compared with saved copies
of its tensors, and needed to write a reduced vocabulary; dtype=bfloat16 loads it so. drafter: for a research file, the
folder of the dFlash drafter that it started from. drop: leave out head or confidence (drop=head,confidence).
weights=bfloat16: round to it.
"""

import sys

from xpress import interop, parts
from xpress.arguments import CONVERSION, arguments, conversion
from xpress.interop import matrix

KEYS = ("format", "weights", *CONVERSION)


def main(words: list[str]):
    if not words or {"-h", "--help"} & set(words):
        return print(__doc__)
    if [word.removeprefix("--") for word in words] == ["matrix"]:
        rows = matrix.measure()
        print(matrix.table(rows))
        sys.exit("error: a format FAILED" if any(row.failed for row in rows) else None)
    try:
        (source, destination), settings = arguments(words, KEYS, "SRC DST format=<name>, or matrix")
        if "format" not in settings:
            raise ValueError(f"format: give one of {', '.join(interop.FORMATS)}")
        how = conversion(settings) | {"weights": settings.get("weights")}
        record = interop.convert(parts.find(source), destination, settings["format"], **how)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{source}: {interop.FORMATS[record['source']['format']].ABOUT}, sha256 {record['source']['sha256'][:16]}")
    print(f"{destination}: {interop.FORMATS[record['written']].ABOUT}")
    for line in [*record["notes"], *record["left_out"]]:
        print(f"  {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
