"""One prompt decoded by plain autoregression, the bare drafter and the head, then played side by side under one clock.

    python scripts/replay.py checkpoint=outputs/my_run prompt="Why is the sky blue?" passes=auto html=replay.html

`html` writes the same replay as one page that needs no network. Ctrl-C ends the playing, not the table after it. Exits
with 1 where a text at temperature 0 is not that of plain autoregression.
"""

import sys

import hydra

from xpress import build, replay_page, replay_screen


@hydra.main(version_base=None, config_path="../configs", config_name="replay")
def main(cfg):
    try:
        replay = build.replaying(cfg, print)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        sys.exit(130)
    problem = None
    if cfg.html is not None:
        try:  # what was decoded is shown even where the page cannot be written
            print(f"page: {replay_page.write_page(replay, cfg.html)}")
        except (ValueError, OSError) as error:
            problem = error
    replay_screen.play(replay, speed=cfg.speed)
    replay_screen.print_summary(replay)
    if problem:
        sys.exit(f"error: {problem}")
    if not replay.lossless:
        sys.exit("error: a text differs from plain autoregression by more than a tie")


if __name__ == "__main__":
    main()
