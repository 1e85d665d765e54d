"""Regenerate a prompt set's responses with the target, as rows of token ids. Resumable.

python scripts/generate_data.py prompts=train out=outputs/responses max_new_tokens=128
"""

import sys

import hydra
from tqdm import tqdm

from xpress import build


@hydra.main(version_base=None, config_path="../configs", config_name="generate_data")
def main(cfg):
    bar = tqdm(unit="row", dynamic_ncols=True)

    def progress(done, total):
        bar.total = total
        bar.update(done - bar.n)

    try:
        counts = build.generation(cfg, progress)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    finally:
        bar.close()
    print(f"{cfg.out}: {counts}")


if __name__ == "__main__":
    main()
