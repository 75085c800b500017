#!/usr/bin/env bash
# Create or refresh a development environment. Idempotent: a second call costs a checksum.
#
#   setup_env.sh demo        the maintained forks of the mm packages, without mmcv's compiled operators, in .venv
#   setup_env.sh             the same with compiled operators and what the tests need, in .venv
#   setup_env.sh originals   OpenMMLab's own packages on the torch of their last release, in .venv-originals
#   setup_env.sh transformers   torch, transformers, diffusers, timm, peft and detectors without any mm package, in
#                               .venv-transformers
#   setup_env.sh torch       torch and pytest alone, in .venv-torch-VERSION; TORCH=2.11.0 names the version
#
#   PYTHON=python3.11        interpreter to build the environment from
#   VENV=.venv               where the environment goes
#   TORCH=2.4.1              another torch (the originals need 2.1 to 2.4)
#   MMGATE_CACHE=~/.cache/mmgate   where built mmcv wheels are kept, by torch, CUDA and Python version
#   MMCV_WHEELS=DIR_OR_URL   where prebuilt mmcv wheels lie; tried before anything is compiled
#   MAX_JOBS=N               compilers to run at once (default: one a core)
set -euo pipefail
cd "$(dirname "$0")/../.."

SET=${1:-forks}
MMCV= ALONE=() BUILD=("setuptools>=80,<81" numpy)
case $SET in
  demo)
    VENV=${VENV:-.venv}
    PACKAGES=('.[mm]')
    ;;
  forks)
    VENV=${VENV:-.venv}
    MMCV=onedl-mmcv==2.3.6
    BUILD+=(wheel packaging ninja psutil)
    PACKAGES=('.[mm,pretrain,triton,deploy,dev,mutants]')
    ;;
  originals)
    TORCH=${TORCH:-2.1.2} VENV=${VENV:-.venv-originals}
    MMCV=mmcv==2.1.0
    # mmcv's and torch's releases are older than numpy 2, and mmcv's setup needs the pkg_resources of an older setuptools
    BUILD=("setuptools<70" wheel packaging ninja psutil "numpy<2")
    PACKAGES=('.[dev]' mmengine==0.10.7 "$MMCV" mmdet==3.3.0 mmsegmentation==1.2.2 "opencv-python<4.12" ftfy regex
      "setuptools<70" "numpy<2" mmpretrain==1.2.0 torchvision timm importlib-metadata requests)
    export FORCE_CUDA=${FORCE_CUDA:-0}
    ;;
  transformers)
    VENV=${VENV:-.venv-transformers}
    PACKAGES=('.[transformers]' diffusers==0.42.1 tomesd==0.1.3 "accelerate>=1" pytorch-fid==0.3.0 torchvision
      "pytest>=8" "pytest-xdist>=3.6" scipy matplotlib polars "onnx>=1.18" "onnxscript>=0.5" "onnxruntime>=1.22"
      peft==0.21.2)
    # Detectors with their trainers, and what those import: what else they name pulls in another torchvision and a
    # second OpenCV.
    ALONE=(timm==1.0.31 rfdetr==1.11.2 supervision defusedxml "pyDeprecate>=0.9,<0.10" pytorch-lightning lightning-utilities
      torchmetrics faster-coco-eval ultralytics==8.4.190 ultralytics-thop opencv-python-headless)
    ;;
  torch)
    VENV=${VENV:-.venv-torch-$TORCH}
    BUILD=("setuptools>=80,<81")
    # numpy: the interpreter of Triton 3.6, which comes with torch 2.11, fails beside a newer one
    PACKAGES=('.' "numpy<2.3" "pytest>=8" "pytest-xdist>=3.6" "hypothesis>=6.100" psutil)
    ;;
  *) echo "usage: $0 [demo|forks|originals|transformers|torch]" >&2; exit 2 ;;
esac
TORCH=${TORCH:-2.13.0}
# The kernels need Triton 3.2, and torch before 2.6 pins an older one.
if [ "$(printf '%s\n' 2.6 "$TORCH" | sort -V | head -n 1)" != 2.6 ]; then PACKAGES=("${PACKAGES[@]/triton,/}"); fi
CACHE=${MMGATE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/mmgate}
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}

# The set that is installed, with a checksum. The tests' environment is the demo's with more in it.
STAMP=$VENV/.mmgate-setup
fingerprint() {
  cat pyproject.toml tools/dev/setup_env.sh tools/dev/join_sources.py mmgate/ops/native/cpp/*.{h,cpp} \
    <(echo "$1 $TORCH") | cksum
}
installed() { grep -qsxF "$1 $(fingerprint "$1")" "$STAMP"; }
finish() {
  echo "$SET $(fingerprint "$SET")" >"$STAMP"
  say "ready in ${SECONDS} s"
}
if installed "$SET" || { [ "$SET" = demo ] && installed forks; }; then exit 0; fi

rm -f "$STAMP"

say() { printf 'setup: %s\n' "$*"; }
run_pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
# Errors alone are shown: warnings about a machine's indexes and cache would hide them.
install() { run_pip install -qq "$@"; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  { say "Python 3.10 or newer is needed, $PYTHON is older; set PYTHON=..."; exit 1; }

if [ ! -x "$VENV/bin/python" ]; then
  say "creating $VENV"
  "$PYTHON" -m venv "$VENV"
fi
say "installing torch $TORCH (half a minute to 3 minutes)"
install "torch==$TORCH" "${BUILD[@]}"

# The CPU kernel is optional: without a compiler, or where it fails, everything runs by torch's operators.
build_native() { "$VENV/bin/python" -W ignore -m mmgate.doctor --build || say "the CPU kernel is left out"; }

mend_torchvision() {
  if ! "$VENV/bin/python" -W ignore -c 'import torchvision' 2>/dev/null; then # built for CUDA, beside a CPU torch
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    cp tools/dev/torchvision_on_cpu.py "$site/"
    echo 'import torchvision_on_cpu' >"$site/torchvision_on_cpu.pth"
  fi
}

# A wheel compiled against one torch does not load under another, hence the folder's name.
tag=$("$VENV/bin/python" -c '
import platform, sys, torch
cuda = "cu" + torch.version.cuda.replace(".", "") if torch.version.cuda else "cpu"
version = torch.__version__.split("+")[0]
print(f"torch{version}-{cuda}-cp{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}")')
wheels=$CACHE/wheels/$tag
wheel_name=$(tr - _ <<<"${MMCV%%==*}")-${MMCV##*==}
find_wheel() { find "$wheels" -name "$wheel_name-*.whl" 2>/dev/null | head -n 1; }

build_mmcv() {
  local jobs=${MAX_JOBS:-$(nproc)} start=$SECONDS work log
  work=$(mktemp -d) log=$wheels/build.log
  mkdir -p "$wheels"
  # shellcheck disable=SC2064  # the variable is gone when the trap runs
  trap "rm -rf '$work'" EXIT INT TERM
  say "compiling the operators of $MMCV with $jobs jobs: 1 to 2 minutes on 2 cores, once for $tag; log: $log"
  # Debug information would take more than half of the time. CFLAGS would replace Python's -O3 with a new setuptools.
  export MMCV_WITH_OPS=1 MAX_JOBS=$jobs CPPFLAGS="${CPPFLAGS:-} -g0"
  if ! {
    run_pip download --no-build-isolation --no-deps --no-binary :all: -d "$work" "$MMCV" &&
      tar -xzf "$work"/*.tar.gz -C "$work" && rm "$work"/*.tar.gz && "$PYTHON" tools/dev/join_sources.py "$work"/*mmcv* &&
      { [ "$(printf '%s\n' 2.14 "$TORCH" | sort -V | head -n 1)" != 2.14 ] || # whose headers need C++20
        sed -i 's/-std=c++17/-std=c++20/' "$work"/*mmcv*/setup.py; } &&
      run_pip wheel -v --no-build-isolation --no-deps --no-cache-dir --wheel-dir "$work/out" "$work"/*mmcv*
  } >"$log" 2>&1; then
    say "mmcv did not build; the end of $log:"
    tail -n 30 "$log"
    exit 1
  fi
  mv "$work"/out/"$wheel_name"-*.whl "$wheels/" # last, so that an interrupted build leaves no half wheel
  trap - EXIT INT TERM
  rm -rf "$work"
  say "mmcv compiled in $((SECONDS - start)) s"
}

if [ -n "$MMCV" ]; then
  if [ -z "$(find_wheel)" ] && [ -n "${MMCV_WHEELS:-}" ]; then
    mkdir -p "$wheels"
    say "looking for a prebuilt mmcv wheel in $MMCV_WHEELS"
    run_pip download -q --no-deps --only-binary=:all: --no-index --find-links "$MMCV_WHEELS" -d "$wheels" \
      "$MMCV" || say "none there fits this Python and torch"
  fi
  if [ -z "$(find_wheel)" ]; then build_mmcv; fi
  # The wheel itself, and by force: pip may have one of the same name, for another torch or without operators.
  install --no-deps --force-reinstall "$(find_wheel)"
fi

case $SET in
  demo)
    # As pip does by default: in isolation mmcv's setup finds no torch, and leaves the operators out.
    say "installing the mm packages and mmgate (a minute)"
    install "torch==$TORCH" -e "${PACKAGES[@]}"
    ;;
  *)
    say "installing the packages of $VENV (1 to 2 minutes)"
    install --no-build-isolation "torch==$TORCH" -e "${PACKAGES[@]}"
    ;;
esac
if [ ${#ALONE[@]} -gt 0 ]; then install --no-deps "${ALONE[@]}"; fi
mend_torchvision
build_native
finish
