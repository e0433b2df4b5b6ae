#!/usr/bin/env bash
# All devices of one machine: ./launch_fsdp.sh [key=value ...]; NPROC says how many ranks.
set -euo pipefail
cd "$(dirname "$0")"
exec torchrun --nproc_per_node="${NPROC:-2}" scripts/run_distillation.py "$@"
