"""Train a drafter and a correction head.

python scripts/train.py +exp=smollm2_135m out=outputs/my_run [resume=true]
python scripts/train.py +exp=qwen3_8b plan=true gpus=8
"""

import sys

import hydra
from tqdm import tqdm

from xpress import build, curves, report, track


def feature_bar():
    bar = tqdm(unit="row", desc="features", mininterval=2.0, dynamic_ncols=True, leave=False, delay=1)

    def progress(done, total):
        bar.total = total
        bar.update(done - bar.n)

    return bar, progress


def tell(run, provenance, cfg):
    """What is about to be trained."""
    made, trained = provenance["data"], sum(p.numel() for p in run.trainee.parameters() if p.requires_grad)
    counts = f"{made['rows']} rows with {made['response_tokens']} response tokens, {made['held_out']} held out"
    skipped = "".join(f"\nskipped {count} rows: {reason}" for reason, count in made["skipped"].items())
    print(f"{counts}, {trained / 1e6:.2f} M parameters to train{skipped}")
    chosen = {"target": cfg.target.name, "drafter": dict(cfg.drafter), "head": dict(cfg.head), "data": cfg.data.path}
    report.print_protocol({**chosen, **provenance["recipe"], **provenance["versions"]})


@hydra.main(version_base=None, config_path="../configs", config_name="train")
def main(cfg):
    features, progress = feature_bar()
    try:
        with features:
            if cfg.plan:
                return report.print_plan(build.planning(cfg).to_json())
            run, provenance = build.training(cfg, print, progress)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted before the first step; the same command goes on")
    main_process = run.accelerator.is_main_process  # one curve a run, not one a process
    if main_process:
        tell(run, provenance, cfg)
    config, kind = build.OmegaConf.to_container(cfg, resolve=True), cfg.tracker if main_process else None
    tracker = track.tracker(kind, run.out, config, run.run_id, str(run.out), cfg.wandb_mode)
    bar = tqdm(total=run.settings.steps, initial=run.step, unit="step", mininterval=2.0, disable=not main_process)

    def on_step(facts, total):
        bar.update()
        shown = {k.split("/")[1]: f"{v:.3f}" for k, v in facts.items() if k.count("/") == 1 and isinstance(v, float)}
        shown |= {"tokens/s": facts["tokens_per_s"], "blocks/s": facts["blocks_per_s"], "GB": facts["peak_memory_gb"]}
        bar.set_postfix(shown, refresh=False)
        tracker.log(facts, facts["step"])
        if taus := ", ".join(f"{k[9:]} {v:.3f}" for k, v in facts.items() if k.startswith("eval/tau/")):
            bar.write(f"step {facts['step']}: held-out tau {taus}")

    try:
        folder = run.fit(provenance, on_step)
    except KeyboardInterrupt:
        print(f"interrupted after step {run.step}; go on with the same command and resume=true", file=sys.stderr)
        sys.exit(130)
    except (FloatingPointError, OSError) as error:
        sys.exit(f"error: {error}")
    finally:
        bar.close()
        tracker.finish()
        if main_process:
            print(curves.ending(run.out / "metrics.jsonl", run.out / "curves.png"))
    if main_process:
        print(f"checkpoint: {folder}")


if __name__ == "__main__":
    main()
