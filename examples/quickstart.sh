#!/usr/bin/env bash
# Train three small models and draw one picture: five minutes on two idle CPU cores, and two for the packages.
#
#   bash examples/quickstart.sh
#
# Sets up .venv, tokenizes the source of Python's standard library, trains a small GPT with full-parameter updates, with
# block coordinate descent as published, and with the preset for pretraining, and compares the three. It can be repeated:
# environment and tokenized text are reused, and all models are trained again.
#
# Environment: OUT is the output folder (default out/quickstart), ITERS the training steps of each model, TEXT_MB the
# amount of text, BCD_PYTHON an existing interpreter (examples/setup_env.sh).
set -euo pipefail

ITERS=${ITERS:-72}
[[ $ITERS =~ ^[1-9][0-9]*$ ]] || {
    echo "quickstart.sh: error: ITERS=$ITERS: must be a whole number, at least 1" >&2
    exit 2
}
OUT=${OUT:-}
[ -z "$OUT" ] || { mkdir -p "$OUT"; OUT=$(cd "$OUT" && pwd); }
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$BCD_ROOT"
OUT=${OUT:-out/quickstart}
TEXT_MB=${TEXT_MB:-4}
NUM_BLOCKS=3
EVAL_INTERVAL=$((ITERS >= 6 ? ITERS / 6 : 1))  # about a phase: each block has two
WARMUP=$((ITERS > 10 ? 10 : ITERS - 1))  # it must be shorter than the run

say() {
    if [ -t 1 ]; then printf '\n\033[1m== %s\033[0m\n' "$*"; else printf '\n== %s\n' "$*"; fi
}

# ---------------------------------------------------------------- text
say "1/5 Text: the Python standard library's own source (up to $TEXT_MB MB), one document per file"
mkdir -p "$OUT"
DATA=$OUT/stdlib_text_document
"$PYTHON" examples/stdlib_text.py --megabytes "$TEXT_MB" --output "$OUT/stdlib.jsonl.now"
if cmp -s "$OUT/stdlib.jsonl.now" "$OUT/stdlib.jsonl" && [ -s "$DATA.bin" ] && [ -s "$DATA.idx" ]; then
    rm "$OUT/stdlib.jsonl.now"
    echo "already tokenized: $DATA.bin"
else
    # Remove old tokens first, so that a killed run never leaves them next to another text.
    rm -f "$DATA.bin" "$DATA.idx"
    mv "$OUT/stdlib.jsonl.now" "$OUT/stdlib.jsonl"
    "$PYTHON" tools/preprocess_data.py --input "$OUT/stdlib.jsonl" --output-prefix "$OUT/stdlib" \
        --tokenizer-type ByteLevelTokenizer --append-eod --workers 2
fi

# ---------------------------------------------------------------- machine
GPUS=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
if [ "$GPUS" -eq 0 ]; then
    PROCESSES=2
    WHERE="2 processes on the CPU"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
else
    # A power of two, so that the global batch is divisible for any number of GPUs.
    PROCESSES=1
    while [ $((PROCESSES * 2)) -le "$GPUS" ] && [ "$PROCESSES" -lt 8 ]; do PROCESSES=$((PROCESSES * 2)); done
    WHERE="$PROCESSES of $GPUS GPUs"
fi
PIPELINE=$((PROCESSES > 1 ? 2 : 1))

# ---------------------------------------------------------------- recipe
MODEL_ARGS=(
    --num-layers 6
    --hidden-size 192
    --num-attention-heads 6
    --seq-length 128
    --max-position-embeddings 128
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 16
    --train-iters "$ITERS"
    --lr 1e-3
    --min-lr 1e-4
    --lr-decay-style cosine
    --lr-warmup-iters "$WARMUP"
    --hidden-dropout 0
    --attention-dropout 0
    --seed 1234
)
PARALLEL_ARGS=(
    --pipeline-model-parallel-size "$PIPELINE"
)
DATA_ARGS=(
    --tokenizer-type ByteLevelTokenizer
    --data-path "$DATA"
    --split 95,5,0
)
REPORT_ARGS=(
    --eval-interval "$EVAL_INTERVAL"
    --eval-iters 4
    --eval-fixed
    --log-interval 1
)

# train NAME FLAG...: one run of the recipe; its metrics go to OUT/NAME.jsonl.
train() {
    local name=$1
    shift
    rm -f "$OUT/$name.jsonl"  # of a quickstart before: other flags would be refused
    "$PYTHON" tools/launch.py --standalone --nproc-per-node "$PROCESSES" pretrain_gpt_bcd.py \
        "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" "${REPORT_ARGS[@]}" \
        --metrics-file "$OUT/$name.jsonl" "$@"
}

# ---------------------------------------------------------------- train, compare
STARTED=$SECONDS
say "2/5 Full-parameter training with Adam, for comparison: $WHERE, pipeline $PIPELINE, $ITERS steps"
train full --bcd-num-blocks 1

say "3/5 Block coordinate descent as published: $NUM_BLOCKS blocks, the other layers frozen"
train paper --bcd-preset paper --bcd-num-blocks "$NUM_BLOCKS"

say "4/5 The preset for pretraining: the other layers are updated too, without optimizer state"
train pretrain --bcd-preset pretrain --bcd-num-blocks "$NUM_BLOCKS"
TRAINED=$((SECONDS - STARTED))

say "5/5 Comparison (training took $TRAINED s)"
"$PYTHON" tools/report.py --run "full training=$OUT/full.jsonl" --run "BCD, preset paper=$OUT/paper.jsonl" \
    --run "BCD, preset pretrain=$OUT/pretrain.jsonl" --figure "$OUT/loss.png"

cat <<NEXT

Picture: $OUT/loss.png
Try next: $PYTHON pretrain_gpt_bcd.py --help   (every flag, block coordinate descent first)
          ITERS=1000 bash examples/quickstart.sh   (the same models, trained for longer)
NEXT
