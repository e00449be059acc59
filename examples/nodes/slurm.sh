#!/bin/bash
# Trains on the nodes of a Slurm job:  sbatch examples/nodes/slurm.sh chimera.out/train.py --model MODEL.py --backend nccl
#SBATCH --job-name=chimera
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --signal=TERM@120
set -eu

# One torchrun on each node; they meet at the first one. PROCESSES are the ranks of a node, by default one for each GPU.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${PROCESSES:-4}" \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:${PORT:-29400}" \
    "$@"
