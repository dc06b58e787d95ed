#!/usr/bin/env bash
# What would break with the newest versions of all pins? Makes a fresh environment with them and tries imports, flags and a
# small run.
#
#   bash tools/look_ahead.sh FOLDER        FOLDER is for the environment (6 GB with the CUDA build of torch)
#
# Environment: PYTHON3 (default: the newest that tests/newer_python.sh finds), PIP_EXTRA_INDEX_URL (CONTRIBUTING.md).
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
FOLDER=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$ROOT"
"${PYTHON3:-$(bash tests/newer_python.sh "$FOLDER/python")}" -m venv --clear "$FOLDER/venv"
sed -E '/^# tests\/run.sh/,$d; /^(#|$)/d; s/[=;].*//' requirements.txt | sort -u > "$FOLDER/newest.txt"
"$FOLDER/venv/bin/python" -m pip install --quiet --upgrade pip pytest pytest-timeout hypothesis -r "$FOLDER/newest.txt"
"$FOLDER/venv/bin/python" -m pip list --format freeze | grep -E "^($(paste -sd '|' "$FOLDER/newest.txt"))=="

try() {
    local name=$1
    shift
    if "$FOLDER/venv/bin/python" "$@" > "$FOLDER/$name.log" 2>&1; then echo "$name: passed"; else
        echo "$name: FAILED ($FOLDER/$name.log)"
        grep -E '^(E  |FAILED|[A-Za-z]*Error)' "$FOLDER/$name.log" | tail -n 12 || tail -n 5 "$FOLDER/$name.log"
    fi
}
try imports -c 'import importlib, pkgutil, megatron.bcd as p
for m in pkgutil.walk_packages(p.__path__, "megatron.bcd."): importlib.import_module(m.name)'
try private_apis -m pytest -q -p no:cacheprovider tests/unit/test_compat.py
try flags pretrain_gpt_bcd.py --help
try run pretrain_gpt_bcd.py --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 \
    --train-iters 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --eval-iters 0 --num-workers 0 \
    --bcd-preset pretrain --bcd-num-blocks 2 --bcd-steps-per-block 2
