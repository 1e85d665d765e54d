"""Train a drafter and a correction head.

python scripts/train.py +exp=smollm2_135m out=outputs/my_run
python scripts/train.py +exp=smollm2_135m out=outputs/my_run resume=true
"""

import os
import sys

import hydra
from tqdm import tqdm

from xpress import build, report


def tracker(raw, out):
    """wandb where it was asked for, else nothing."""
    if raw.wandb is False:
        return None
    import wandb

    mode = os.environ.get("WANDB_MODE", raw.wandb)
    config = build.OmegaConf.to_container(raw, resolve=True)
    return wandb.init(project="xpress", dir=str(out), mode=mode, config=config)


@hydra.main(version_base=None, config_path="../configs", config_name="train")
def main(cfg):
    try:
        if cfg.wandb not in (False, "offline", "online"):
            raise ValueError(f"wandb={cfg.wandb}: known are false, offline and online")
        run, provenance = build.training(cfg)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    trainable = sum(p.numel() for p in run.trainee.parameters() if p.requires_grad)
    tokens = provenance["data"]["response_tokens"]
    print(f"{len(run.rows)} rows, {tokens} response tokens, {trainable / 1e6:.2f} M parameters to train")
    chosen = {"target": cfg.target.name, "drafter": dict(cfg.drafter), "head": dict(cfg.head), "data": cfg.data.path}
    for reason, count in provenance["data"]["skipped"].items():
        print(f"{count} rows not used: {reason}")
    report.print_protocol({**chosen, **provenance["recipe"], **provenance["versions"]})
    wandb_run = tracker(cfg, run.out)
    bar = tqdm(total=run.settings.steps, initial=run.step, unit="step", mininterval=2.0, dynamic_ncols=True)

    def on_step(facts, total):
        bar.update()
        shown = {key.split("/")[1]: f"{value:.3f}" for key, value in facts.items() if "/" in key}
        bar.set_postfix(shown, refresh=False)
        if wandb_run is not None:
            wandb_run.log(facts, step=facts["step"])

    try:
        folder = run.fit(provenance, on_step)
    except KeyboardInterrupt:
        print(f"interrupted after step {run.step}; go on with the same command and resume=true", file=sys.stderr)
        sys.exit(130)
    except FloatingPointError as error:
        sys.exit(f"error: {error}")
    finally:
        bar.close()
        if wandb_run is not None:
            wandb_run.finish()
    print(f"checkpoint: {folder}")


if __name__ == "__main__":
    main()
