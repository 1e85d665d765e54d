"""Measure the acceptance length tau and the speed of checkpoints, beside their bare drafter and plain autoregression.

    python scripts/eval_tau.py bench=gsm8k checkpoint=outputs/my_run 'passes=[0,1,2,4,6,auto]'

Writes responses.jsonl, result.json, report.md and plots. Exits with 1 where an output at temperature 0 is not that of
plain autoregression. Ctrl-C keeps what is measured; the same command with out=<folder> resume=true goes on.
`check=sampling` tests instead that sampled outputs follow the target's distribution.
"""

import sys

import hydra
from tqdm import tqdm

from xpress import build, markdown, report, sampling_check


class Bars:
    """A bar for each set and batch size."""

    def __init__(self):
        self.name, self.bar = None, None

    def __call__(self, name, done, total, what):
        if name != self.name:
            self.name, self.bar = name, tqdm(total=total, unit="response", desc=name, dynamic_ncols=True)
        self.bar.set_postfix_str(what, refresh=False)
        self.bar.update(done - self.bar.n)
        if done == total:
            self.bar.close()


@hydra.main(version_base=None, config_path="../configs", config_name="eval_tau")
def main(cfg):
    folder = None
    try:
        if cfg.check is not None:
            found = build.checking(cfg, Bars())
            report.wide_console().print(sampling_check.table(found))
            sys.exit(None if found["passed"] else "error: sampled outputs do not follow the target's distribution")
        measurement = build.evaluation(cfg, lambda text: print(f"WARNING: {text}", file=sys.stderr))
        folder = measurement.journal.folder
        result = measurement.run(Bars())
        markdown.write_report(result, folder)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted: go on with the same command and out={folder} resume=true" if folder else "interrupted")
    report.print_protocol(result["protocol"])
    report.print_report(result, cfg.metrics)
    print(f"result: {folder}/result.json")
    if any(row.get("lossless") is False for cell in result["cells"] for row in cell["methods"]):
        sys.exit("error: an output differs from plain autoregression by more than a tie")


if __name__ == "__main__":
    main()
