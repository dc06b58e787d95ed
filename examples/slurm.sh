#!/usr/bin/env bash
# Run a recipe under Slurm, on one or more nodes, and requeue it until it is trained:
#
#   DATA_PATH=... TOKENIZER_ARGS=... sbatch --nodes 2 examples/slurm.sh G-20B bcd rtx4090 [flags of the training script]
#
# Submit it from the root of the repository, on a disk that all nodes share: text, environment and checkpoints are read
# there. Words and variables are those of examples/pretrain.sh, which srun starts on every node; NNODES, GPUS_PER_NODE and
# HEAD_NODE come from the job: it runs on the nodes and GPUs of the #SBATCH lines below, not those of methods.csv. Others:
# sbatch --nodes 1 --gpus-per-node 4 examples/slurm.sh G-5.4B ..., or edit the lines.
# With REPLICA_GROUPS and LIGHTHOUSE each group is a separate job (docs/replica_groups.md): submit it once per group.
# Ten minutes before the time limit the ranks save and exit with 0; the job is requeued under the same number and
# resumes from that checkpoint. The job ends when the run is trained or fails.
#
#SBATCH --job-name=megatron-bcd
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail

case " $* " in *" -h "* | *" --help "*) sed -n '2,${/^#SBATCH/q;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
cd "${SLURM_SUBMIT_DIR:?is set by sbatch: sbatch examples/slurm.sh MODEL METHOD CLUSTER}"  # Slurm runs a copy of this file
export NNODES=$SLURM_JOB_NUM_NODES
export GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?is set by sbatch --gpus-per-node N}}
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}  # of two jobs on a node, each its own
read -r HEAD_NODE < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export HEAD_NODE
[ "${REPLICA_GROUPS:-1}" = 1 ] || export REPLICA_ID=${REPLICA_ID:-$SLURM_JOB_ID}  # a requeued job keeps its number
export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-${SLURM_CPUS_PER_TASK:-1}}  # from Slurm 22.05 on srun does not inherit it

# "B:" above sends the signal to this shell only; srun passes it on to every process of the step (with Slurm's usual
# process tracking, proctrack/cgroup: ranks are in separate process groups).
STOPPING=
pass_on() {
    STOPPING=1
    kill -USR1 "$STEP" || true  # it may have ended just now
}
srun --kill-on-bad-exit=1 bash examples/pretrain.sh "$@" &
STEP=$!
trap pass_on USR1

# A signal ends wait, not the step.
CODE=0
wait "$STEP" || CODE=$?
while kill -0 "$STEP" 2>/dev/null; do
    CODE=0
    wait "$STEP" || CODE=$?
done
[ "$CODE" -eq 0 ] || exit "$CODE"
[ -z "$STOPPING" ] || scontrol requeue "$SLURM_JOB_ID"
