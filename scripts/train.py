"""Train a drafter and a correction head.

python scripts/train.py +exp=smollm2_135m out=outputs/my_run
python scripts/train.py +exp=smollm2_135m out=outputs/my_run resume=true
"""

import sys

import hydra
from tqdm import tqdm

from xpress import build, curves, report, track


@hydra.main(version_base=None, config_path="../configs", config_name="train")
def main(cfg):
    try:
        run, provenance = build.training(cfg)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    trainable = sum(p.numel() for p in run.trainee.parameters() if p.requires_grad)
    tokens = provenance["data"]["response_tokens"]
    print(f"{len(run.rows)} rows, {tokens} response tokens, {trainable / 1e6:.2f} M parameters to train")
    chosen = {"target": cfg.target.name, "drafter": dict(cfg.drafter), "head": dict(cfg.head), "data": cfg.data.path}
    report.print_protocol({**chosen, **provenance["recipe"], **provenance["versions"]})
    config = build.OmegaConf.to_container(cfg, resolve=True)
    main_process = run.accelerator.is_main_process  # one curve a run, not one a process
    tracker = track.tracker(cfg.tracker if main_process else None, run.out, config, None, str(run.out), cfg.wandb_mode)
    bar = tqdm(total=run.settings.steps, initial=run.step, unit="step", mininterval=2.0, dynamic_ncols=True)

    def on_step(facts, total):
        bar.update()
        shown = {key.split("/")[1]: f"{value:.3f}" for key, value in facts.items() if "/" in key}
        bar.set_postfix(shown, refresh=False)
        tracker.log(facts, facts["step"])

    try:
        folder = run.fit(provenance, on_step)
    except KeyboardInterrupt:
        print(f"interrupted after step {run.step}; go on with the same command and resume=true", file=sys.stderr)
        sys.exit(130)
    except FloatingPointError as error:
        sys.exit(f"error: {error}")
    finally:
        bar.close()
        tracker.finish()
    print(f"checkpoint: {folder}")
    if main_process:
        curves.draw(run.out / "metrics.jsonl", run.out / "curves.png")
        print(f"curves: {run.out / 'curves.png'}")


if __name__ == "__main__":
    main()
