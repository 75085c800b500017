#!/usr/bin/env bash
# Through srun; GPUS (8), GPUS_PER_NODE (8), CPUS_PER_TASK (5) and SRUN_ARGS from the environment.
set -euo pipefail
if [ $# -lt 4 ]; then
  echo "usage: $0 PARTITION JOB_NAME CONFIG CHECKPOINT [arguments of test.py]" >&2
  exit 2
fi
gpus=${GPUS:-8} per_node=${GPUS_PER_NODE:-8}
((per_node < gpus)) || per_node=$gpus
# SRUN_ARGS is a list of arguments, hence unquoted
# shellcheck disable=SC2086
exec srun --partition="$1" --job-name="$2" --gres="gpu:$per_node" --ntasks="$gpus" --ntasks-per-node="$per_node" \
  --cpus-per-task="${CPUS_PER_TASK:-5}" --kill-on-bad-exit=1 ${SRUN_ARGS:-} \
  python -u "$(dirname "$0")/test.py" "$3" "$4" --launcher slurm "${@:5}"
