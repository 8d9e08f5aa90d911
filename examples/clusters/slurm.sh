#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=3                     # 2 train, and 1 is a spare
#SBATCH --ntasks-per-node=1           # lightning-replica, which starts the ranks of its node
#SBATCH --exclusive
#SBATCH --no-kill                     # a node that fails does not end the job
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120             # to lightning-replica: a last checkpoint. DyingGaspCheckpoint(..., grace_s=80)
#SBATCH --requeue                     # allows it: below, and by SLURM after a preemption
#SBATCH --open-mode=append            # keeps the output of the attempts before
#
# Trains on several nodes, one of them a spare, and puts the job back into the queue when it has left a last checkpoint.
#
#   sbatch examples/clusters/slurm.sh train.py --epochs 3
#
# The checkpoints must be on storage that all nodes share. Ask for GPUs and memory as in any other job.
set -u

spares=${SPARES:-1} # nodes that wait until another is lost
ranks=${RANKS:-1}   # on each node: Trainer(devices=RANKS, num_nodes=nodes - SPARES)
port=${PORT:-29500} # of the store, which the first node serves

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT

# start HOST COMMAND...: runs one node, prints its output with the host before each line, and keeps its exit code.
# Each node is a step of its own: no step ends because of another, and each has its own exit code. One srun for all nodes
# would return the highest code of its tasks, so that of a killed node (137) would hide 0 and 75. No shell stands between
# srun and lightning-replica, because SLURM sends signals only to the process that srun has started. Without
# --cpu-bind=none this process may be bound to one core.
start() {
    srun --nodes=1 --ntasks=1 --nodelist="$1" --kill-on-bad-exit=0 --cpu-bind=none --unbuffered "${@:2}" 2>&1 |
        while IFS= read -r line || [ -n "$line" ]; do
            printf '%s: %s\n' "$1" "$line"
        done
    echo "${PIPESTATUS[0]}" >"$folder/code-$1"
}

# verdict CODE...: the job's exit code. A lost node's own code says nothing about the job.
verdict() {
    for code in 93 75 0 76 77 "$@"; do
        case " $* " in *" $code "*) return "$code" ;; esac
    done
}

for host in "${hosts[@]}"; do
    start "$host" lightning-replica run --nnodes $((${#hosts[@]} - spares)) --spares "$spares" \
        --nproc-per-node "$ranks" --rdzv-backend c10d --rdzv-endpoint "${hosts[0]}:$port" \
        --rdzv-id "$SLURM_JOB_ID" "$@" &
done
wait

# shellcheck disable=SC2046 # the codes are words
verdict $(cat "$folder"/code-*)
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
