#!/usr/bin/env bash
# Build the documentation into site/, in a small separate environment without torch. Idempotent, as setup_env.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."

VENV=${VENV:-.venv}-docs
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}
requirements=$(sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
STAMP=$VENV/.mmgate-docs
if [ "$(cat "$STAMP" 2>/dev/null)" != "$requirements" ]; then
  echo "setup: creating $VENV"
  [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
  # shellcheck disable=SC2086
  "$VENV/bin/python" -m pip --disable-pip-version-check install -qq $requirements
  echo "$requirements" >"$STAMP"
fi
export NO_MKDOCS_2_WARNING=1
"$VENV/bin/python" -m mkdocs build --strict "$@"
echo "docs: open site/index.html"
