#!/usr/bin/env bash
# Trains all skills of Craftax-Classic and counts those that the merged agent masters.
#
#   bash scripts/learn_classic.sh [--minutes 20|60|120] [--fresh] [--json FILE]
#
# Further flags go to flowrl train. It first installs what is missing, as scripts/demo.sh does.
set -euo pipefail
FLOWRL_EXTRAS="${FLOWRL_EXTRAS-}"
case "${1:-}" in
  -h | --help)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
offer bwrap bubblewrap "each trainer is confined by it"
setup
cd "$FLOWRL_ROOT"
exec "$PYTHON" scripts/learn_classic.py "$@"
