#!/usr/bin/env bash
# The main job from nothing, on two CPU cores in under 20 minutes: get the target, regenerate responses to the shipped
# training prompts, train a dFlash drafter and an XPress head, measure tau on held-out prompts.
# TARGET=<folder or hub id> takes another target than the embedded one (then also give MASK_TOKEN_ID).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$SECONDS
say() { printf '\n[%3d s] %s\n' $((SECONDS - started)) "$1"; }

say "1/5 set up .venv"
if [ ! -x .venv/bin/pytest ]; then
    "${PYTHON:-python3}" -m venv .venv
    .venv/bin/pip install --quiet -c constraints.txt -e '.[dev,smollm2]'
fi
python=.venv/bin/python
out=outputs/quickstart
target=${TARGET:-smollm2-135m-instruct}
mask=${MASK_TOKEN_ID:-16}
if [ -e $out/xpress/checkpoint ] || [ -e $out/drafter/checkpoint ]; then
    echo "$out holds an earlier quickstart; remove it to train again" >&2
    exit 1
fi

say "2/5 get the target"
if [ "$target" = smollm2-135m-instruct ]; then $python scripts/get_smollm2.py; fi

say "3/5 regenerate responses to the shipped training prompts"
$python scripts/generate_data.py target.name="$target" prompts=train out=$out/responses max_new_tokens=96 batch_size=96

say "4/5 train a drafter, then an XPress head on top of it"
common="+exp=smollm2_135m target.name=$target drafter.mask_token_id=$mask data.path=$out/responses"
$python scripts/train.py $common head=none objective=dflash_b8 out=$out/drafter steps=300
$python scripts/train.py $common drafter.init=$out/drafter out=$out/xpress steps=120

say "5/5 measure on held-out prompts"
$python scripts/eval_tau.py checkpoint=$out/xpress bench=sample samples=16 max_new_tokens=64 'passes=[0,1,2,auto]' out=$out/eval
say "done"
