"""The target's own answers to prompts, as rows of token ids. Resumable; by its weights or by a server.

python scripts/generate_data.py prompts=train out=outputs/responses max_new_tokens=128
"""

import os
import sys

import hydra
from accelerate import PartialState
from tqdm import tqdm

from xpress import build


@hydra.main(version_base=None, config_path="../configs", config_name="generate_data")
def main(cfg):
    quiet = int(os.environ.get("RANK", 0)) > 0  # of several processes the first one talks
    bar = tqdm(unit="row", dynamic_ncols=True, disable=quiet)

    def progress(done, total):
        bar.total = total
        bar.update(done - bar.n)

    try:
        found = build.generation(cfg, progress)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        bar.close()
        print(f"{cfg.out}: interrupted, what is finished is written; the same command goes on from there", flush=True)
        os._exit(130)  # threads may wait for a server for minutes
    finally:
        bar.close()
    if PartialState().num_processes > 1:
        PartialState().destroy_process_group()
    if quiet:
        return
    skipped, failed = found.pop("skipped"), found.pop("failed_rows")
    print(f"{cfg.out}: {found['rows']} rows")
    for name, count in [*found.items(), *((f"skipped: {reason}", n) for reason, n in sorted(skipped.items()))]:
        print(f"{count:>10}  {name}")
    if failed:
        first = "; ".join(f"{name}: {why}" for name, why in list(failed.items())[:3])
        sys.exit(f"error: {len(failed)} rows failed ({first}); the same command goes on with what is missing")


if __name__ == "__main__":
    main()
