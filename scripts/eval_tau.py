"""Measure the acceptance length tau of a checkpoint, beside its bare drafter and plain autoregression.

    python scripts/eval_tau.py bench=gsm8k checkpoint=outputs/my_run 'passes=[0,1,2,4,6,auto]'

Exits with 1 where an output at temperature 0 is not that of plain autoregression.
"""

import sys

import hydra
from tqdm import tqdm

from xpress import build, report


@hydra.main(version_base=None, config_path="../configs", config_name="eval_tau")
def main(cfg):
    bars = {}

    def progress(bench, done, total, what):
        if bench not in bars:
            bars[bench] = tqdm(total=total, unit="response", desc=bench, dynamic_ncols=True)
        bar = bars[bench]
        bar.set_postfix_str(what, refresh=False)
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    try:
        reports = build.evaluation(cfg, progress)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    for result in reports:
        report.print_protocol(result["protocol"])
        report.print_report(result)
        print(f"result: {result['path']}")
    if any(row["lossless"] is False for result in reports for row in result["methods"]):
        sys.exit("error: an output differs from plain autoregression by more than a tie")


if __name__ == "__main__":
    main()
