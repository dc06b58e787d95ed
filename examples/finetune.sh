#!/usr/bin/env bash
# Fine-tune a published LLaMA on instructions with --bcd-preset finetune, answer a prompt, and write a folder that
# AutoModelForCausalLM loads. tools/plan.py --task sft estimates memory, time and price. It trains every layer in every
# step if that fits, if needed with layers in host memory, or else blocks; --bcd-inactive-update none uses blocks.
#
#   bash examples/finetune.sh MODEL CLUSTER [flags of the planner and of the training script]
#
#   MODEL     the folder of the published model, or its config.json. Or a row of models.csv with LLaMA's architecture and
#             the size of MODEL_DIR: LLaMA-7B, L-1.5B; --models FILE reads your table
#   CLUSTER   a row of clusters.csv: rtx4090 rtx5090 a100 a800 h100 h200
#
#   MODEL_DIR=llama-7b DATA=alpaca.jsonl bash examples/finetune.sh LLaMA-7B rtx4090             one RTX 4090 (24 GB)
#   NUM_GPUS=4 MODEL_DIR=llama-7b DATA=alpaca.jsonl bash examples/finetune.sh LLaMA-7B rtx4090  four
#   MODEL_DIR=my-1.5b DATA=alpaca.jsonl bash examples/finetune.sh L-1.5B rtx4090                1.5B on one
#
#   DRY_RUN=1 bash examples/finetune.sh LLaMA-7B rtx4090       print the command and its estimate; needs no torch, GPU or data
#   SCALE=tiny bash examples/finetune.sh LLaMA-7B rtx4090      the same recipe with a small random model, to its end, on the CPU
#   SCALE=tiny DATA=alpaca.jsonl bash examples/finetune.sh DIR rtx4090      for 20 steps on DATA, with the tokenizer of DIR
#
# A restarted run resumes from its newest checkpoint. On several nodes, start the same command on each. HEAD_NODE is the
# name of one of them, and SAVE must be on a shared disk.
#
# Environment:
#   MODEL_DIR             the published model: a folder with config.json and safetensors, or a name on the hub (default:
#                         MODEL, if that is a folder)
#   DATA                  records: a file or a folder (docs/fine_tuning.md)
#   NUM_GPUS              (1); NNODES and GPUS_PER_NODE as in examples/pretrain.sh
#   HEAD_NODE, MASTER_PORT   rendezvous of several nodes (port 29500)
#   EPOCHS, LR            (3, the plan's)
#   PROMPT                prompt for the tuned model at the end
#   SAVE                  folder of the checkpoints (out/MODEL-finetune-CLUSTER); the model goes to SAVE-hf, metrics to SAVE.jsonl
#   MICRO_BATCH, GLOBAL_BATCH, PRECISION, RECOMPUTE   (the plan's, 8, bf16, the plan's); flags too, as NUM_GPUS
#   FORCE=1               start even if the estimate does not fit
#   OUT                   with SCALE=tiny: output folder (out/recipes)
#   BCD_PYTHON            your interpreter (examples/setup_env.sh)
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    printf 'finetune.sh: error: %s\n' "$*" >&2
    exit 2
}

case " $* " in *" -h "* | *" --help "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
[ $# -ge 2 ] || fail "MODEL CLUSTER are needed, as in: bash examples/finetune.sh LLaMA-7B rtx4090 (see --help)"
NAME=$1 CARD=$2
shift 2
SCALE=${SCALE:-}
[ -z "$SCALE" ] || [ "$SCALE" = tiny ] || fail "SCALE=$SCALE: must be tiny, or left out"

# ---------------------------------------------------------------- the planner's choices
for PLANNER in "${BCD_PYTHON:-$ROOT/.venv/bin/python}" python3 none; do
    "$PLANNER" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
done
[ "$PLANNER" != none ] || fail "no Python 3.11 or newer found; name one with BCD_PYTHON=/path/to/python"
[ -n "${NNODES:-}${GPUS_PER_NODE:-}" ] || export NUM_GPUS=${NUM_GPUS:-1}
WHOLE=whole
[ -z "$SCALE" ] || WHOLE=tiny=2
ERRORS=$(mktemp)  # not into RECIPE: a warning of Python would be run as a command
trap 'rm -f "$ERRORS"' EXIT
RECIPE=$("$PLANNER" "$ROOT/tools/recipe.py" "$WHOLE" "$NAME" finetune "$CARD" "$@" 2> "$ERRORS") \
    || { MESSAGE=$(< "$ERRORS"); fail "${MESSAGE#pretrain.sh: error: }"; }
eval "$RECIPE"  # MODEL, CLUSTER, LAYOUT_ARGS, EXTRA_ARGS, SEQUENCE, PLAN, MISFIT, ...
[ ! -d "$NAME" ] || MODEL_DIR=${MODEL_DIR:-$NAME}
[ "$FORM" = llama ] || fail "MODEL $MODEL is a GPT: give one in LLaMA's form"

. "$ROOT/examples/given.sh"

SAVE=${SAVE:-out/$MODEL-finetune-$CLUSTER}
while [[ $SAVE == ?*/ ]]; do SAVE=${SAVE%/}; done
OUT=${OUT:-out/recipes}
LR=${LR:-$LEARNING_RATE} LOG_INTERVAL=10 SAVE_INTERVAL=500 EPOCHS=${EPOCHS:-3}
PROMPT=${PROMPT:-Name three ways to save memory when a language model is trained.}
TOKENIZER=() GIVEN_DATA=${DATA:-}
if [ "$SCALE" = tiny ]; then
    SAVE=$OUT/$MODEL-finetune-$CLUSTER
    DATA=${DATA:-$OUT/finetune-records.jsonl}
    LR=1e-3 LOG_INTERVAL=1 SAVE_INTERVAL=6
    SEQUENCE=512  # of bytes: the prompt around an instruction takes 150
    TOKENIZER=(--tokenizer-type ByteLevelTokenizer)
    [ ! -f "${MODEL_DIR:-}/tokenizer_config.json" ] || TOKENIZER=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$MODEL_DIR")
    MODEL_DIR=$OUT/finetune-base
fi
LAUNCH_ARGS=(--nproc-per-node "$GPUS_PER_NODE")
if [ "$NUM_NODES" -gt 1 ]; then
    MEETING=${HEAD_NODE:-HEAD_NODE}:${MASTER_PORT:-29500}
    LAUNCH_ARGS+=(--nnodes "$NUM_NODES" --rdzv-backend c10d --rdzv-endpoint "$MEETING")
else
    LAUNCH_ARGS=(--standalone "${LAUNCH_ARGS[@]}")
fi
# Omit a default that conflicts with one of the user's flags.
RECORDS=--data-path
! given --valid-data-path --test-data-path || RECORDS=--train-data-path
LENGTH_ARGS=(--num-epochs "$EPOCHS")
[ -z "$SCALE" ] || [ -z "$GIVEN_DATA" ] || LENGTH_ARGS=(--train-iters 20)
! given --train-iters --train-samples || LENGTH_ARGS=()
given --lr-warmup-iters --lr-warmup-samples || LENGTH_ARGS+=(--lr-warmup-fraction 0.03)
LAUNCHED=(
    "${LAUNCH_ARGS[@]}" "$ROOT/$SCRIPT"
    --sft "$RECORDS" "${DATA:-DATA}" --load-hf "${MODEL_DIR:-MODEL_DIR}" --save-hf "$SAVE-hf" "${TOKENIZER[@]}"
    --seq-length "$SEQUENCE" "${LENGTH_ARGS[@]}" --lr "$LR" --lr-decay-style cosine
    --weight-decay 0 --clip-grad 1.0
    "${LAYOUT_ARGS[@]}"
    --save "$SAVE" --load "$SAVE" --save-interval "$SAVE_INTERVAL" --keep-last-checkpoints 2
    --log-interval "$LOG_INTERVAL" --metrics-file "$SAVE.jsonl" "${EXTRA_ARGS[@]}"
)

if [ "${DRY_RUN:-}" = 1 ]; then
    printf '%s\n\ncommand%s\ntorchrun' "$PLAN" "${SCALE:+ (SCALE=tiny: a small model; the estimate is that of the full one)}"
    for word in "${LAUNCHED[@]}"; do
        [[ $word == --* ]] && printf ' \\\n   '
        printf ' %q' "$word"
    done
    printf '\n'
    [ -z "$MISFIT" ] || printf '\nnote: %s\n' "$MISFIT"
    [ "$NUM_NODES" -eq 1 ] || [ -n "${HEAD_NODE:-}" ] || printf '\nnote: HEAD_NODE is the name of one of the nodes\n'
    exit 0
fi

# ---------------------------------------------------------------- checks before anything starts
[ -z "$GIVEN_DATA" ] || [ -e "$GIVEN_DATA" ] || fail "DATA=$GIVEN_DATA: there is no such file"
if [ -z "$SCALE" ]; then
    [ -n "${MODEL_DIR:-}" ] || fail "MODEL_DIR is not set: give the folder of the published model, or its name on the hub"
    [ -n "${DATA:-}" ] || fail "DATA is not set: give records (docs/fine_tuning.md)"
    [ -z "$MISFIT" ] || [ "${FORCE:-}" = 1 ] || fail "$MISFIT; FORCE=1 starts it anyway"
    [ "$NUM_NODES" -eq 1 ] || [ -n "${HEAD_NODE:-}" ] || fail "HEAD_NODE is not set: $NUM_NODES nodes of" \
        "$GPUS_PER_NODE GPUs meet at one of them; start this on each with its name, or give fewer NUM_GPUS"
fi
. "$ROOT/examples/setup_env.sh"
if [ -z "$SCALE" ]; then
    HERE=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
    [ "$HERE" -ge "$GPUS_PER_NODE" ] || fail "torch sees $HERE GPUs on this machine, $GPUS_PER_NODE needed;" \
        "DRY_RUN=1 prints command and estimate, SCALE=tiny runs on the CPU"
else
    export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    rm -rf "$SAVE" "$SAVE-hf" "$SAVE.jsonl" "$OUT/finetune-base"  # an earlier tiny run would be resumed
    mkdir -p "$OUT"
    if [ -z "$GIVEN_DATA" ]; then
        for i in {0..99}; do  # two visits to every block
            printf '{"instruction": "Say the number %d twice.", "output": "%d %d"}\n' "$i" "$i" "$i"
        done > "$DATA"
    fi
    # replaces the published model: a few steps from random weights
    "$PYTHON" "$ROOT/$SCRIPT" "${MODEL_ARGS[@]}" "${TOKENIZER[@]}" --seq-length "$SEQUENCE" --mock-data --train-iters 2 --micro-batch-size 2 \
        --lr 1e-3 --bcd-num-blocks 1 --eval-iters 0 --num-workers 0 --bf16 --make-vocab-size-divisible-by 1 --save-hf "$MODEL_DIR"
fi

# ---------------------------------------------------------------- train, answer, load
printf '%s on %s: %s\n' "$MODEL" "$CLUSTER" "$REASON"
"$PYTHON" "$ROOT/tools/launch.py" "${LAUNCHED[@]}"
if [ ! -e "$SAVE-hf/config.json" ]; then
    printf '\n%s was not written: the training was stopped before its end, or the lines above say why; the same command %s\n' \
        "$SAVE-hf" "resumes it from $SAVE"
    exit 0
fi
if [ "$NUM_NODES" -gt 1 ]; then  # each node comes here
    printf '\n%s fine-tuned on %s nodes: model in %s, checkpoints in %s, metrics in %s\n' \
        "$MODEL" "$NUM_NODES" "$SAVE-hf" "$SAVE" "$SAVE.jsonl"
    exit 0
fi
ASK=--instruction  # the form of the records: the tokenizer's chat template where there is one, else Alpaca's
if [[ " ${EXTRA_ARGS[*]} " != *"--sft-prompt-format"[\ =]"text "* ]]; then
    [ ! -f "$SAVE-hf/chat_template.jinja" ] || ASK=--chat
    ! grep -qs '"chat_template": *["[]' "$SAVE-hf"/{chat_template,tokenizer_config}.json || ASK=--chat
fi
"$PYTHON" "$ROOT/tools/generate.py" --model "$SAVE-hf" --max-new-tokens 64 "$ASK" --prompt "$PROMPT"
if "$PYTHON" -c 'import transformers' 2>/dev/null; then
    "$PYTHON" - "$SAVE-hf" <<'EOF'
import sys

from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(f"AutoModelForCausalLM loads {sys.argv[1]}: {type(model).__name__}, {model.num_parameters():,} parameters")
EOF
fi
[ -z "$SCALE" ] || MODEL="a small random model in place of $MODEL,"
printf '\n%s fine-tuned on %s process%s: model in %s, checkpoints in %s, metrics in %s\n' \
    "$MODEL" "$GPUS_PER_NODE" "$([ "$GPUS_PER_NODE" -eq 1 ] || echo es)" "$SAVE-hf" "$SAVE" "$SAVE.jsonl"
