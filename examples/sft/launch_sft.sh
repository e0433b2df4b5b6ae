#!/usr/bin/env bash
# All devices of one machine: ./launch_sft.sh [--key value ...]; NPROC says how many ranks.
set -euo pipefail
cd "$(dirname "$0")"
exec fullshard sft --config_file recipes/accelerate_configs/fsdp.yaml \
  --config recipes/config_distill.yaml --output_dir runs/sft --num_processes "${NPROC:-2}" "$@"
