#!/usr/bin/env bash
# What:      any recipe under SLURM; after its time limit or a pre-emption the job is queued again and goes on from its newest checkpoint
# Hardware:  nodes of 8 GPUs, one process a GPU; another number: --gpus-per-node and --ntasks-per-node
# Command:   sbatch --nodes 4 recipes/slurm.sh recipes/llama_8b.yaml   (further options of `fit` may follow)
# Measured:  on two virtual nodes with CPU processes (tests/end_to_end/test_slurm.py)
#SBATCH --job-name=lightning_3d
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# --wait kills what is left a minute after the first process has ended: by SIGKILL, which is code 137 and no reason to queue again.
code=0
srun --wait=60 python -m lightning_3d fit --config "$@" --trainer.devices auto --ckpt_path auto || code=$?

# 143: all ranks have saved and stopped, as told; 138 and 143 too: the signal came before there was anything to save. SLURM queues a job
# again by itself when it ends it, not when the job ends in time after a signal.
if [[ $code == 143 || $code == 138 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
