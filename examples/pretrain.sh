#!/usr/bin/env bash
# Train one of the paper's models, by the tables of models, methods and clusters in this folder.
#
#   bash examples/pretrain.sh MODEL METHOD CLUSTER [flags of the planner and of the training script]
#
#   MODEL     a row of models.csv: G-0.15B G-1.6B G-5.4B G-10B G-20B L-1.5B L-6.0B L-8.0B L-11B L-23B LLaMA-7B; or a folder
#             with a config.json
#   METHOD    muon (full training with Muon: the lowest loss, the least money), pretrain (blocks, --bcd-preset pretrain:
#             less memory), paper or bcd (blocks as published); to compare: full (full training with Adam), offload (its
#             optimizer on the host)
#   CLUSTER   a row of clusters.csv: rtx4090 rtx5090 a100 a800 h100 h200
#
#   DRY_RUN=1 bash examples/pretrain.sh G-20B muon rtx4090     the command and its estimate; needs no torch, GPU or data
#   SCALE=tiny bash examples/pretrain.sh L-6.0B paper rtx4090  the same recipe with a small model, to its end, on the CPU
#   DATA_PATH=out/my_text_document TOKENIZER_ARGS="--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json \
#       --merge-file merges.txt" bash examples/pretrain.sh G-5.4B pretrain rtx4090 --bcd-order random
#
# On several nodes, start the same command on each, with HEAD_NODE the name of one of them (examples/slurm.sh does this).
# A restarted run resumes from its newest checkpoint. tools/plan.py chooses memory, pipeline and recomputation.
#
# Environment:
#   NUM_GPUS                   GPUs in total (default: methods.csv, or else the smallest number on which it fits)
#   NNODES, GPUS_PER_NODE      nodes and GPUs used on each; one of the two is enough with NUM_GPUS
#   HEAD_NODE, MASTER_PORT     rendezvous of several nodes (port 29500)
#   DATA_PATH, TOKENIZER_ARGS  tokenized text (tools/preprocess_data.py) and the flags of its tokenizer, both as words
#                              separated by spaces; a blend is "weight prefix weight prefix"
#   MOCK_DATA=1                use mock tokens, to measure speed; SAVE then ends in -mock
#   SAVE                       folder of the checkpoints; metrics go to SAVE.jsonl (out/MODEL-METHOD-CLUSTER)
#   TRAIN_ITERS                steps (default: the estimate's, 20 tokens per parameter times the B-F multiplier)
#   MICRO_BATCH, GLOBAL_BATCH  sequences (1 and 64)
#   PRECISION, RECOMPUTE       bf16, fp32 (as the paper) or fp16 (bf16); auto, full or none (auto only where needed).
#                              These and NUM_GPUS can be given as flags too, as to tools/plan.py
#   REPLICA_GROUPS, LIGHTHOUSE, REPLICA_ID   so many groups of NUM_GPUS each, joined at the lighthouse's HOST:PORT, and the
#                              name of this one (the node's): start this once a group (docs/replica_groups.md)
#   FORCE=1                    start even if the estimate does not fit
#   OUT                        with SCALE=tiny: output folder (out/recipes)
#   BCD_PYTHON                 your interpreter (examples/setup_env.sh)
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
NEAR=$ROOT/
[ "$PWD" != "$ROOT" ] || NEAR=

fail() {
    printf 'pretrain.sh: error: %s\n' "$*" >&2
    exit 2
}

# ---------------------------------------------------------------- arguments
case " $* " in *" -h "* | *" --help "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
[ $# -ge 3 ] || fail "MODEL METHOD CLUSTER are needed, as in: bash examples/pretrain.sh G-5.4B pretrain rtx4090 (see --help)"
METHOD=$2
[ "$METHOD" != finetune ] || fail "METHOD finetune is for published models: bash examples/finetune.sh (see its --help)"
SCALE=${SCALE:-}
[ -z "$SCALE" ] || [ "$SCALE" = tiny ] || fail "SCALE=$SCALE: must be tiny, or left out"
RANKS=2  # of a tiny run, at most

# Print an interpreter for the planner, which needs only the standard library.
planner_python() {
    local candidate
    for candidate in "${BCD_PYTHON:-$ROOT/.venv/bin/python}" "${PYTHON3:-python3}" python3.13 python3.12 python3.11; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$candidate"; return; }
    done
    fail "no Python 3.11 or newer found; name one with BCD_PYTHON=/path/to/python"
}

PLANNER=$(planner_python)

# Set MODEL, CLUSTER, MODEL_ARGS, LAYOUT_ARGS and EXTRA_ARGS, and the numbers used below.
WHOLE=whole
[ -z "$SCALE" ] || WHOLE=tiny=$RANKS
RECIPE=$("$PLANNER" "$ROOT/tools/recipe.py" "$WHOLE" "$@")
eval "$RECIPE"

. "$ROOT/examples/given.sh"

# ---------------------------------------------------------------- settings that the planner does not choose
REPLICA_GROUPS=${REPLICA_GROUPS:-1}
[ -z "$SCALE" ] || REPLICA_GROUPS=1
[ "$REPLICA_GROUPS" -eq 1 ] || REPLICA_ID=${REPLICA_ID:-$HOSTNAME}
ITERATIONS=$(((ITERATIONS + REPLICA_GROUPS - 1) / REPLICA_GROUPS))  # the groups share the tokens
SAVE=${SAVE:-out/$MODEL-$METHOD-$CLUSTER}
while [[ $SAVE == ?*/ ]]; do SAVE=${SAVE%/}; done
OUT=${OUT:-out/recipes}
LR=$LEARNING_RATE LOG_INTERVAL=10 EVAL_INTERVAL=1000 EVAL_ITERS=10 SAVE_INTERVAL=500
TOKENS=(--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt)
[ "$FORM" = gpt ] || TOKENS=(--tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model)
[ -z "${TOKENIZER_ARGS:-}" ] || read -r -a TOKENS <<< "$TOKENIZER_ARGS"
if [ "$SCALE" = tiny ]; then
    SAVE=$OUT/$MODEL-$METHOD-$CLUSTER
    LR=1e-3 LOG_INTERVAL=1 EVAL_INTERVAL=3 EVAL_ITERS=2 SAVE_INTERVAL=3
    TRAIN_ITERS= ITERATIONS=$((NUM_BLOCKS > 1 ? NUM_BLOCKS * 2 : 4))  # two visits to every block
    DATA_PATH=$OUT/text/stdlib_text_document
    TOKENS=(--tokenizer-type ByteLevelTokenizer)
fi

# Omit a default that conflicts with one of the user's flags.
TRAINING_ARGS=()
[ -z "${TRAIN_ITERS:-}" ] && given --train-samples || TRAINING_ARGS+=(--train-iters "${TRAIN_ITERS:-$ITERATIONS}")
given --lr-warmup-iters --lr-warmup-samples || TRAINING_ARGS+=(--lr-warmup-fraction 0.01)
TRAINING_ARGS+=(
    --lr "$LR"
    --lr-decay-style cosine
    --weight-decay 0.1
    --clip-grad 1.0
)
TEXT=("${DATA_PATH:-DATA_PATH}")
[ -n "$SCALE" ] || read -r -a TEXT <<< "${TEXT[0]}"  # one prefix, or weight prefix weight prefix
DATA_ARGS=(
    --data-path "${TEXT[@]}"
    "${TOKENS[@]}"
    --split "969,30,1"
)
if [ "${MOCK_DATA:-}" = 1 ] && [ -z "$SCALE" ]; then
    SAVE=$SAVE-mock  # or the run on the data would resume from what was trained on mock tokens
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size $((VOCABULARY - 1)))  # it adds one token
fi
CHECKPOINT_ARGS=(
    --save "$SAVE"
    --load "$SAVE"
    --save-interval "$SAVE_INTERVAL"
    --keep-last-checkpoints 2
)
REPORT_ARGS=(
    --log-interval "$LOG_INTERVAL"
    --eval-interval "$EVAL_INTERVAL"
    --eval-iters "$EVAL_ITERS"
    --metrics-file "$SAVE${REPLICA_ID:+-$REPLICA_ID}.jsonl"
)
[ "$REPLICA_GROUPS" -eq 1 ] || EXTRA_ARGS+=(
    --lighthouse "${LIGHTHOUSE:-HOST:29510}" --replica-groups "$REPLICA_GROUPS" --replica-id "$REPLICA_ID"
)
LAUNCH_ARGS=(--nproc-per-node "$GPUS_PER_NODE")
if [ "$NUM_NODES" -gt 1 ]; then
    MEETING=${HEAD_NODE:-HEAD_NODE}:${MASTER_PORT:-29500}
    LAUNCH_ARGS+=(--nnodes "$NUM_NODES" --rdzv-backend c10d --rdzv-endpoint "$MEETING")
else
    LAUNCH_ARGS=(--standalone "${LAUNCH_ARGS[@]}")
fi
LAUNCHED=(
    "${LAUNCH_ARGS[@]}" "$NEAR$SCRIPT"
    "${MODEL_ARGS[@]}" "${LAYOUT_ARGS[@]}" "${TRAINING_ARGS[@]}"
    "${DATA_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${REPORT_ARGS[@]}" "${EXTRA_ARGS[@]}"
)

# ---------------------------------------------------------------- DRY_RUN: print and exit
# print_command WORD...: print shell input with one flag and its value per line.
print_command() {
    local line=$1 word quoted
    shift
    for word in "$@"; do
        printf -v quoted '%q' "$word"
        [[ $word =~ ^[A-Za-z0-9_./:,=-]+$ ]] && quoted=$word
        if [[ $word == --* && ${#line} -gt 80 ]]; then
            printf '%s \\\n' "$line"
            line="   "
        fi
        line+=" $quoted"
    done
    printf '%s\n' "$line"
}

if [ "${DRY_RUN:-}" = 1 ]; then
    printf '%s\n\ncommand%s\n' "$PLAN" "${SCALE:+ (SCALE=tiny: a small model; the estimate above is that of the full model)}"
    print_command torchrun "${LAUNCHED[@]}"
    [ -z "$MISFIT" ] || printf '\nnote: %s\n' "$MISFIT"
    [ "$REPLICA_GROUPS" -eq 1 ] || printf '\nnote: start this on %s node%s of each of %s replica groups; and\n%s\n' \
        "$NUM_NODES" "$([ "$NUM_NODES" -eq 1 ] || echo s)" "$REPLICA_GROUPS" \
        "torchft_lighthouse --min_replicas 1 --bind [::]:29510 on a machine that stays, whose HOST:29510 is LIGHTHOUSE"
    [ "$NUM_NODES" -eq 1 ] || [ -n "${HEAD_NODE:-}" ] || printf '\nnote: HEAD_NODE is the name of one of the nodes\n'
    [ -n "${DATA_PATH:-}${MOCK_DATA:-}" ] || printf '\nnote: DATA_PATH and the tokenizer'"'"'s files must be given\n'
    exit 0
fi

# ---------------------------------------------------------------- checks before anything starts
check_data() {
    local part found=
    [ "${MOCK_DATA:-}" != 1 ] || return 0
    [ -n "${DATA_PATH:-}" ] || fail "DATA_PATH is not set: make it with tools/preprocess_data.py --input my.txt" \
        "--output-prefix out/my ... and give DATA_PATH=out/my_text_document, or MOCK_DATA=1 for mock tokens"
    for part in "${TEXT[@]}"; do
        [[ ! $part =~ ^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$ ]] || continue  # a weight of a blend
        found=$part
        [ -f "$part.bin" ] && [ -f "$part.idx" ] || fail "DATA_PATH=$DATA_PATH: $part.bin and $part.idx are not" \
            "both there; tools/preprocess_data.py --output-prefix makes them"
    done
    [ -n "$found" ] || fail "DATA_PATH=$DATA_PATH: names no tokenized text"
    [ -n "${TOKENIZER_ARGS:-}" ] || fail "TOKENIZER_ARGS is not set: give the flags that $found was made with, as in" \
        "TOKENIZER_ARGS=\"${TOKENS[*]}\""
}

gpus_here() {
    "$PYTHON" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'
}

check_gpus() {
    local here
    here=$(gpus_here)
    [ "$here" -gt 0 ] || fail "torch sees no GPU on this machine; DRY_RUN=1 prints command and estimate, SCALE=tiny runs on the CPU"
    [ "$here" -ge "$GPUS_PER_NODE" ] || fail "$here GPUs on this machine, $GPUS_PER_NODE needed" \
        "($NUM_NODES x $GPUS_PER_NODE); DRY_RUN=1 NUM_GPUS=$here prints whether and how it fits on these"
}

if [ -z "$SCALE" ]; then
    check_data
    [ -z "$MISFIT" ] || [ "${FORCE:-}" = 1 ] || fail "$MISFIT; FORCE=1 starts it anyway"
    [ "$NUM_NODES" -eq 1 ] || [ -n "${HEAD_NODE:-}" ] || fail "HEAD_NODE is not set: $NUM_NODES nodes of" \
        "$GPUS_PER_NODE GPUs meet at one of them; start this on each with its name, or give NUM_GPUS for one node"
fi
. "$ROOT/examples/setup_env.sh"

# ---------------------------------------------------------------- train
if [ -z "$SCALE" ]; then
    check_gpus
    if [ "$METHOD" = offload ]; then  # Adam steps on the CPU, and torchrun's default is one thread per rank
        THREADS=$(($(nproc) / GPUS_PER_NODE))
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((THREADS > 0 ? THREADS : 1))}
    fi
    # Slurm sends USR1 to every process of a step. The ranks save and exit; torchrun, which it would kill, ignores it.
    trap '' USR1
    exec "$PYTHON" "$ROOT/tools/launch.py" "${LAUNCHED[@]}"
fi

# ---------------------------------------------------------------- SCALE=tiny
if [ "$METHOD" = offload ]; then
    [ "$(gpus_here)" -ge "$GPUS_PER_NODE" ] || fail "METHOD offload needs CUDA also with SCALE=tiny, here on" \
        "$GPUS_PER_NODE GPUs: the optimizer on the host takes its gradients from them; bcd and full run without"
else
    export CUDA_VISIBLE_DEVICES=
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Write under a temporary name, so that concurrent or killed runs leave no partial text.
if [ ! -d "$OUT/text" ]; then
    mkdir -p "$OUT"
    NEW=$(mktemp -d "$OUT/text.XXXXXX")
    "$PYTHON" "$ROOT/examples/stdlib_text.py" --megabytes 0.5 --output "$NEW/stdlib.jsonl"
    "$PYTHON" "$ROOT/tools/preprocess_data.py" --input "$NEW/stdlib.jsonl" --output-prefix "$NEW/stdlib" \
        --tokenizer-type ByteLevelTokenizer --append-eod
    mv -T "$NEW" "$OUT/text" 2>/dev/null || rm -r "$NEW"
fi
rm -rf "$SAVE" "$SAVE.jsonl"  # an earlier tiny run would be resumed
"$PYTHON" "$ROOT/tools/launch.py" "${LAUNCHED[@]}"
STEPS=$(cat "$SAVE/latest_checkpointed_iteration.txt")
[ "$STEPS" = "$ITERATIONS" ] || given --train-iters --train-samples || fail "no checkpoint of the last step in $SAVE"
printf '\n%s %s %s, scaled down: %s steps over %s block%s on %s process%s (pipeline %s), checkpoint in %s, metrics in %s\n' \
    "$MODEL" "$METHOD" "$CLUSTER" "$STEPS" "$NUM_BLOCKS" "$([ "$NUM_BLOCKS" -eq 1 ] || echo s)" \
    "$GPUS_PER_NODE" "$([ "$GPUS_PER_NODE" -eq 1 ] || echo es)" "$NUM_STAGES" "$SAVE" "$SAVE.jsonl"
