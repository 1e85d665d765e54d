"""Show, write up and compare what eval_tau.py measured, from its result.json alone.

python scripts/report.py outputs/eval                                  tables, report.md and plots beside the result
python scripts/report.py outputs/eval_a outputs/eval_b --out both      several runs in one, into a new folder
"""

import argparse
import sys
from pathlib import Path

from xpress import files, markdown, report, results, tables


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", nargs="+", type=Path, help="a result.json or its folder; several are merged")
    parser.add_argument("--out", type=Path, help="folder for report.md and plots (default: beside the result)")
    parser.add_argument("--metrics", help=f"columns of the printed tables, of {','.join(report.METRICS)}")
    args = parser.parse_args()
    try:
        metrics = tables.chosen(args.metrics.split(",")) if args.metrics is not None else None
        found = results.read_all(args.result)
        merging = len(found) > 1
        if merging:
            refuse_used(args.out)
        result = results.merge(found) if merging else next(iter(found.values()))
        if merging:
            with files.new_folder(args.out) as folder:
                files.write_json(folder / results.NAME, result)
                markdown.write_report(result, folder)
            written = [args.out]
        else:
            written = markdown.write_report(result, args.out or results.find(args.result[0]).parent)
        report.print_protocol(result.get("protocol") or {})
        report.print_report(result, metrics)
        for path in written:
            print(f"written: {path}")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def refuse_used(out: Path | None):
    if out is None:
        raise ValueError("--out: several results are merged into a new folder; give one")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: is there and not an empty folder; a merged result overwrites nothing")


if __name__ == "__main__":
    main()
