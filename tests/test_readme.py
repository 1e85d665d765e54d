"""Every command line of the README runs, on a toy target, in the README's order; its one-file head is complete."""

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from disk import published_drafter, save_model
from hydra import compose, initialize_config_dir

from xpress import build, load, markdown, measuring, parts, report
from xpress.target import Target

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
LINES = [line.split("#")[0].strip() for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
SHIPPED, SHIPPED_FROM = "pretrained/smollm2_xpress_b8", "outputs/pretrained/xpress8"  # on the toy, a copy of it
COMMANDS = [line for line in LINES if "scripts/" in line]


def test_the_readme_has_commands_and_names_every_module():
    assert len(COMMANDS) > 10
    modules = {path.name for path in (ROOT / "xpress").rglob("*.py")} - {"__init__.py"}
    assert not {name for name in modules if name not in README}


def test_shell_scripts_exist():
    for line in COMMANDS:
        script = next(word for word in line.split() if word.startswith("scripts/"))
        assert (ROOT / script).exists(), line


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A toy target, a published drafter for it, and the README's head on the path."""
    folder = tmp_path_factory.mktemp("readme")
    target = save_model(folder / "target")
    published_drafter(folder / "zlab", Target.from_pretrained(str(target)))
    code = next(text for kind, text in BLOCKS if kind == "python" and "class TwoTokenHead" in text)
    (folder / "two_token_head.py").write_text(code)
    (folder / "prompts").mkdir()
    for name, row in {"gsm8k": {"question": "1 + 1?"}, "humaneval": {"prompt": "def f(x):"}}.items():
        (folder / "prompts" / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def toy_overrides(program: str, words: list[str]) -> list[str]:
    """What turns a command of the README into seconds of work on the toy."""
    if program == "generate_data":
        return ["target.name=target", "samples=6", "max_new_tokens=12", "batch_size=6"]
    if program == "replay":
        return ["max_new_tokens=6", "device=cpu", "dtype=float32"]
    if program == "eval_tau":
        published = "protocol=published" in words
        short = [] if published else ["max_new_tokens=6", "samples=1"]
        return [*short, "data_dir=prompts", "device=cpu", "dtype=float32"]
    fresh = ["drafter.mask_token_id=299", "drafter.target_layer_ids=[0,2]", "drafter.draft_vocab_size=200"]
    shape = ["drafter.init=zlab"] if "+exp=qwen3_8b" in words else fresh
    short = ["steps=2", "batch_size=2", "accumulation=1", "max_anchors=2", "precision=no", "log_every=1"]
    short += ["eval_rows=2", "eval_every=2", "cache_dir=features"]
    return ["target.name=target", "target.dtype=float32", "data.path=outputs/responses", *shape, *short]


def pooled_tau(folder: str) -> dict:
    """What the README's script prints of a measurement."""
    code = next(text for kind, text in BLOCKS if kind == "python" and "pooled_tau.py" in text)
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {(bench, size, " ".join(label)): float(tau) for bench, size, *label, tau in lines}


def test_every_program_of_the_readme_runs(world, monkeypatch):
    """In order, since later commands read what earlier ones wrote."""
    monkeypatch.chdir(world)
    monkeypatch.syspath_prepend(str(world))
    monkeypatch.setattr(parts, "REPO", world)
    ran = []
    for line in COMMANDS:
        words = [w for w in shlex.split(line) if w not in ("python", "accelerate", "launch", "--multirun")]
        words = [w for w in words if not w.startswith("PYTHONPATH")]
        program, overrides = Path(words[0]).stem, words[1:]
        if program == "report":
            assert not subprocess.run([sys.executable, ROOT / words[0], *overrides]).returncode
            ran.append(program)
            continue
        if program == "convert" and overrides != ["matrix"]:  # the matrix has a test of its own
            main = runpy.run_path(str(ROOT / words[0]))["main"]
            assert main([re.sub("^target=.*", "target=target", word) for word in overrides]) is None
            asked = next(word.removeprefix("format=") for word in overrides if word.startswith("format="))
            assert load(overrides[1], Target.from_pretrained("target")).format == asked
            if overrides[1] == SHIPPED_FROM:
                shutil.copytree(overrides[1], SHIPPED)
            ran.append(program)
            continue
        if program == "push_to_hub":
            assert runpy.run_path(str(ROOT / words[0]))["main"](overrides) is None
            card = (world / "outputs/published/README.md").read_text()
            assert "| refiner K=auto | " in card and load("outputs/published", Target.from_pretrained("target")).head
            ran.append(program)
            continue
        if program not in ("generate_data", "train", "eval_tau", "replay"):
            continue
        if "--multirun" in line:  # the sweep's own test runs it; here its first job
            overrides = [word.split(",")[0] for word in overrides]
        planned = "plan=true" in overrides  # needs no toy: sizes alone
        with initialize_config_dir(str(ROOT / "configs"), version_base=None):
            cfg = compose(program, overrides=[*overrides, *([] if planned else toy_overrides(program, overrides))])
        if planned:
            report.print_plan(build.planning(cfg).to_json())
            program = "plan"
        elif program == "train":
            run, provenance = build.training(cfg)
            assert (run.fit(provenance) / "model.safetensors").exists()
        elif program == "replay":
            assert len(build.replaying(cfg).recordings) == 3
        elif program == "eval_tau":
            if isinstance(cfg.checkpoint, str) and not Path(cfg.checkpoint).exists():
                cfg.checkpoint = "outputs/my_run"
            if cfg.protocol == "published":
                assert measuring.settle(build.plain(cfg, measuring.EVAL_KEYS))["max_new_tokens"] == 2048
                continue
            if cfg.check:
                continue  # needs no toy, and has a test of its own
            measurement = build.evaluation(cfg, lambda text: None)
            measured, cfg.out = measurement.run(), str(measurement.journal.folder)
            rows = [row for cell in measured["cells"] for row in cell["methods"] if not row["note"]]
            assert all(row["lossless"] is (None if cfg.answers == "recorded" else True) for row in rows)
            assert markdown.write_report(measured, Path(cfg.out))
            assert pooled_tau(cfg.out) == {
                (cell["bench"], str(cell["batch_size"]), row["label"]): row["tau"]
                for cell in measured["cells"]
                for row in cell["methods"]
                if not row["note"]
            }
        else:
            assert build.generation(cfg, lambda *_: None)["rows"] == 6
        ran.append(program)
    assert {"generate_data", "train", "eval_tau", "plan", "replay", "report", "convert", "push_to_hub"} <= set(
        ran
    ) and ran.count("train") >= 6
    assert "two_token_head" in sys.modules
