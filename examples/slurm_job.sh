#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --signal=TERM@60
# One task for each GPU; each task is a rank. Submit: sbatch examples/slurm_job.sh train.py
# SIGTERM comes 60 s before the end of the job's time: torchotel exports what it has, and the process ends.
set -eu

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
# A folder that all nodes see. Each rank adds its number to the name.
export TORCHOTEL_RECORD="${RUNS:-$PWD/torchotel-runs}/$SLURM_JOB_ID"

# Variables of torchrun, which init_process_group() reads. Python is started with exec, so that it gets the signal.
# shellcheck disable=SC2016  # each task reads its own variables
srun bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec torchotel run --quiet "$@"
' task "$@"
