#!/usr/bin/env bash
# Machine 0 of two, which share this folder: MASTER_ADDR is the host of machine 0.
set -euo pipefail
cd "$(dirname "$0")"
exec torchrun --nnodes=2 --node_rank=0 --nproc_per_node="${NPROC:-1}" \
  --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${MASTER_PORT:-29500}" \
  scripts/run_distillation.py "$@"
