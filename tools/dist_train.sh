#!/usr/bin/env bash
# On the GPUs of one machine, or of several: NNODES, NODE_RANK, MASTER_ADDR and PORT as torchrun knows them.
set -euo pipefail
if [ $# -lt 2 ]; then
  echo "usage: $0 CONFIG GPUS [arguments of train.py]" >&2
  exit 2
fi
config=$1 gpus=$2
shift 2
exec torchrun --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --nproc_per_node="$gpus" \
  --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
  "$(dirname "$0")/train.py" "$config" --launcher pytorch "$@"
