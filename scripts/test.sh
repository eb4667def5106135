#!/usr/bin/env bash
# Installs what is missing and runs the tests.
#
#   bash scripts/test.sh          the suite; further arguments go to pytest (e.g. -m slow)
#   bash scripts/test.sh --help   this text
#
# What may be installed: tmux, bubblewrap, gcc, chromium, bindfs and Slurm by apt-get; flowrl and
# its packages into .venv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case "${1:-}" in
  -h | --help)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

setup
offer bwrap bubblewrap "some tests confine a trainer by it"
offer cc gcc "some tests compile a library that makes the disk fail"
offer bindfs bindfs "some tests cut the network between two hosts and their disk"
offer chromium chromium "some tests open the page of flowrl serve"
for package in munge slurm-client slurmd slurmctld; do
  offer "${package/slurm-client/sbatch}" "$package" "some tests submit runs to a Slurm of their own"
done
cd "$FLOWRL_ROOT"
# Else all workers and hundreds of processes that tests start would compile the same Python anew.
unset PYTHONDONTWRITEBYTECODE
exec "$PYTHON" -m pytest -n "${FLOWRL_TEST_WORKERS:-3}" --dist loadfile \
  --no-loadscope-reorder "$@"
