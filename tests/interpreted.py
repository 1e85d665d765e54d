"""The gpu-marked tests of a file, in a process of their own whose Triton is the interpreter: it is chosen at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(file: str, capsys):
    """Fails where one of them does."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", file, "-m", "gpu", "-x", "-p", "no:cacheprovider", "-W", "ignore"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if "only 0-dimensional arrays can be converted" in done.stdout:
        pytest.skip("the interpreter of this Triton needs numpy below 2.4")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    with capsys.disabled():
        print("\ninterpreted:", done.stdout.strip().splitlines()[-1])
