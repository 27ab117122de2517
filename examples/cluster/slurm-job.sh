#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
set -euo pipefail

# Every rank finds its node's profile there; a node that the store does not answer reads what it copied before.
export RINGTUNE_STORE=/shared/ringtune
# export RINGTUNE_TRUST=signed    # believe only what is signed by a key in /etc/ringtune/allowed_signers

# Says in the job's output what each kind of node runs. 4 is the exit code for the heuristic, with which a job may run.
srun bash -c 'ringtune which || [ $? -eq 4 ]'

rendezvous=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$rendezvous:29500" --rdzv-id "$SLURM_JOB_ID" \
    train_ring.py
