#!/usr/bin/env bash
# The CPU kernels' tests beside sanitizers. The kernels alone are compiled for them, into a folder that goes afterwards.
#   sanitize.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/../.."
PY=${1:-python}
CXX=${CXX:-g++}
export CXX PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
compile() { # FILE FLAGS
  MMGATE_NATIVE=$1 "$PY" -W ignore -c \
    'import sys; from mmgate.ops.native import build; build.build(sys.argv[1])' "$2 -g -O1 -fno-omit-frame-pointer"
}
preloaded() { printf '%s ' "$("$CXX" -print-file-name="$1")"; }
took() { echo "sanitize: $1 took $SECONDS s"; SECONDS=0; }
SECONDS=0

echo 'sanitize: addresses and undefined behaviour'
compile "$folder/address.so" '-fsanitize=address,undefined -fno-sanitize-recover=undefined'
# libstdc++ is named as well, or the sanitizer does not find what throws exceptions. If pytest captured more than
# Python's output, the report of a process that ends would be lost.
MMGATE_NATIVE=$folder/address.so ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  LD_PRELOAD="$(preloaded libasan.so)$(preloaded libubsan.so)$(preloaded libstdc++.so)" \
  "$PY" -m pytest -q -p no:cacheprovider --capture=sys -k 'not triton' -m 'not slow' \
  tests/test_ops/test_deformable/test_native_deformable.py tests/test_ops/test_deformable/test_deformable.py \
  tests/test_ops/test_dense/test_chunked.py
took 'addresses and undefined behaviour'

echo 'sanitize: threads'
compile "$folder/thread.so" '-fsanitize=thread'
MMGATE_NATIVE=$folder/thread.so TSAN_OPTIONS='exitcode=66 ignore_noninstrumented_modules=1' \
  LD_PRELOAD="$(preloaded libtsan.so)" "$PY" -W ignore tools/dev/threads.py
took threads
