#!/usr/bin/env bash
# Installs what is missing and runs the tests; arguments go to pytest (e.g. -m slow).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup
offer bwrap bubblewrap
offer cc gcc
cd "$FLOWRL_ROOT"
exec "$PYTHON" -m pytest -n "${FLOWRL_TEST_WORKERS:-3}" --dist loadfile \
  --no-loadscope-reorder "$@"
