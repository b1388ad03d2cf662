#!/bin/bash
# A training run on the machines of a Slurm job, one Ray node on each:
#
#   RUNS=/shared/runs sbatch --nodes 4 examples/cluster/slurm.sh impala --environment atari:Pong --num-actors 64 \
#       --device cuda --resources learner.num_gpus=1 actor.num_cpus=1
#
# RUNS is a folder that every machine mounts; the run is in $RUNS/<job>. A job that Slurm puts back into its
# queue (preemption, scontrol requeue) has the same number, and so continues from its checkpoint.
#SBATCH --job-name=repertory
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
set -euo pipefail

: "${RUNS:?a folder that every machine mounts}"
port=${RAY_PORT:-6379}
# Whoever reaches the port could start code on the cluster: Ray asks for a token, which is in the shared home.
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
[ -s ~/.ray/auth_token ] || ray get-auth-token --generate > /dev/null

# Options of Ray: what Slurm gave to this job on each machine, and nothing else of the machine.
resources=(--num-cpus="${SLURM_CPUS_PER_TASK:-1}" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats --block)
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=$(srun --nodes=1 --ntasks=1 --nodelist="${hosts[0]}" hostname --ip-address | cut -d " " -f 1)
export RAY_ADDRESS="$address:$port"

trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
srun --nodes=1 --ntasks=1 --nodelist="${hosts[0]}" \
    ray start --head --node-ip-address="$address" --port="$port" --include-dashboard=false "${resources[@]}" &
for host in "${hosts[@]:1}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$host" ray start --address="$RAY_ADDRESS" "${resources[@]}" &
done

# Until all machines are there, or five minutes have passed.
timeout 300 python - "${#hosts[@]}" << 'PYTHON'
import sys, time

import ray

while True:
    try:
        if not ray.is_initialized():
            ray.init(address="auto", log_to_driver=False)
        if sum(node["Alive"] for node in ray.nodes()) >= int(sys.argv[1]):
            break
    except ConnectionError:
        pass
    time.sleep(1)
PYTHON

# Two minutes before the job's time is over Slurm tells this script, which tells the run. It writes a checkpoint
# and ends, and the job goes back into the queue.
again=
folder="$RUNS/$SLURM_JOB_ID"
command=(repertory train "$@" --engine ray --directory "$folder")
[ ! -e "$folder/config.yaml" ] || command=(repertory train --resume "$folder")
"${command[@]}" &
run=$!
trap 'again=1; kill -TERM $run || true' TERM
code=0
wait $run || code=$?
if [ -n "$again" ]; then
    code=0
    wait $run || code=$?  # The signal has ended the first wait, not the run.
    if [ $code -eq 143 ]; then  # SIGTERM has stopped it; it had neither finished nor failed.
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
fi
exit $code
