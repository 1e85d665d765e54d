"""The prepared run on a GPU goes through on a CPU, without what a bare machine lacks; what fails shows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
sys.path.insert(0, str(SCRIPT.parent))

import gpu_check  # noqa: E402
import gpu_laws  # noqa: E402

# accelerate could be missing too, but where it is installed transformers goes by that
ABSENT = ("hydra", "omegaconf", "datasets", "wandb", "matplotlib", "pytest", "hypothesis")


@pytest.fixture
def bare(tmp_path):
    """An environment in which these packages cannot be imported, and $OUT."""
    for name in ABSENT:
        (tmp_path / f"{name}.py").write_text(f'raise ModuleNotFoundError("no {name} here", name="{name}")\n')
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}


def test_the_whole_run_on_toy_sizes(bare, tmp_path):
    """All laws, and the tables that are not tested elsewhere."""
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--small", "--without", "steps", "refine_latency"]
    done = subprocess.run(command, capture_output=True, text=True, env=bare)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    found = json.loads(lines[-1])
    assert json.loads((tmp_path / "gpu_check.json").read_text()) == found and found["failed"] == []
    names = [check.__name__ for check in gpu_laws.CHECKS]
    assert list(found["laws"]) == names and {verdict for verdict, _ in found["laws"].values()} == {"ok"}
    assert [line.split()[1].rstrip(":") for line in lines if line.startswith("ok ")] == names
    rows = found["parts"]["passes"]["answer"]["rows"]
    assert {row["form"] for row in rows} == {"bf16", "int8", "int4"}
    assert all(row["measured"] > 0 for row in rows if row["what"] != "pass")  # that is a difference of two
    assert found["parts"]["decode_speed"]["answer"]["rows"][0]["method"] == "ar"
    assert "steps: left out" in lines


def test_the_prediction_reads_each_byte_once():
    size = {"V": 151936, "rows": 15, "bytes": {"bf16": 151936 * 512, "int8": 151936 * 256}}
    full, screened = (gpu_check.predicted(form, size, 4e12) for form in ("bf16", "int8"))
    assert full["readout"] == pytest.approx((151936 * 512 + 15 * 151936 * 2) / 4e12)
    assert full["readout"] < gpu_check.AIM["bf16", "pass"] < gpu_check.PAPER["pass"]
    for model in (full, screened):
        assert model["K=8"] - model["K=4"] == pytest.approx(4 * model["pass"]) and model["K=0"] < model["pass"]


@pytest.mark.parametrize(
    "check, kernel",
    [
        ("readout_argmax", "readout_argmax"),
        ("readout_sample", "readout_sample"),
        ("screened_argmax", "screened_argmax"),
    ],
)
def test_a_wrong_kernel_fails_its_law(check, kernel, monkeypatch):
    case = gpu_laws.Case.small("cpu")
    getattr(gpu_laws, check)(case)
    real = getattr(gpu_laws.kernels, kernel)

    def wrong(*args, **how):
        found = real(*args, **how)
        for part in (how.get("keys"), found[0] if isinstance(found, tuple) else found):
            if part is not None:
                part[..., -1] = part[..., -1] - 1 if part is how.get("keys") else (part[..., -1] + 1) % 90
        return found

    monkeypatch.setattr(gpu_laws.kernels, kernel, wrong)
    with pytest.raises(AssertionError):
        getattr(gpu_laws, check)(case)


def test_a_latent_that_changes_or_a_count_that_stays_is_seen(monkeypatch):
    case, real, calls = gpu_laws.Case.small("cpu"), gpu_laws.kernels.refiner_latent, []

    def unsteady(*args, **how):
        found = real(*args, **how)
        calls.append(found)
        found[0, 0, 0] += 1e-3 * (len(calls) == 4)
        return found

    monkeypatch.setattr(gpu_laws.kernels, "refiner_latent", unsteady)
    with pytest.raises(AssertionError, match="1 of 5 launches gave other bits"):
        gpu_laws.arrival_counter(case)


def test_tokens_that_are_not_the_targets_fail_the_law_of_the_static_loop(monkeypatch):
    real = gpu_laws.answers

    def wrong(target, prompts, method, *rest):
        found = real(target, prompts, method, *rest)
        if target.loop == "static" and method == "bare":
            found[-1][-2] = (found[-1][-2] + 1) % 90
        return found

    monkeypatch.setattr(gpu_laws, "answers", wrong)
    with pytest.raises(AssertionError, match="bare, prompt of"):
        gpu_laws.static_loop(gpu_laws.Case.small("cpu"))


def worker(folder: Path, body: str) -> Path:
    (folder / "gpu_laws.py").write_text(f"import sys, time\nskip = sys.argv[sys.argv.index('--skip') + 1 :]\n{body}\n")
    return folder


def test_a_process_that_dies_or_hangs_fails_its_check_and_the_others_run(tmp_path, monkeypatch, capsys):
    body = """
for name in ("one", "two", "three"):
    if name not in skip:
        print("begin", name, flush=True)
        if name == "two":
            sys.exit(7)
        print("ok    ", name + ": fine", flush=True)
"""
    monkeypatch.setattr(gpu_check, "HERE", worker(tmp_path, body))
    arguments = type("Arguments", (), {"device": "cpu", "small": False})
    found = gpu_check.laws(arguments, 30)
    assert found == {"one": ["ok", "fine"], "two": ["FAILED", "the process ended with 7"], "three": ["ok", "fine"]}
    worker(tmp_path, 'print("begin one", flush=True)\ntime.sleep(60)')
    assert gpu_check.laws(arguments, 1.5)["one"] == ["FAILED", "no answer in time"]
    worker(tmp_path, 'print("no torch")\nsys.exit(1)')
    assert gpu_check.laws(arguments, 30) == {"start": ["FAILED", "no torch"]}
    assert "FAILED two: the process ended with 7" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys):
    with pytest.raises(SystemExit, match="sees no GPU; .*--device cpu --small"):
        gpu_check.main([])
