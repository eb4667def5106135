#!/usr/bin/env bash
# Trains three real skills, two at a time, in a folder of its own, and checks what comes out.
#
#   bash scripts/test_parallel_training.sh          some minutes on two cores
#   KEEP=1 bash scripts/test_parallel_training.sh   leave the graph's folder for reading
#   bash scripts/test_parallel_training.sh --help   this text; further flags go to
#                                                   flowrl.bottomup_parallel
#
# It ends with 0 when three skills are trained and merged, and with another code otherwise.
set -euo pipefail
FLOWRL_EXTRAS="${FLOWRL_EXTRAS-}" # nothing that only developers need
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case "${1:-}" in
  -h | --help)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

setup
cd "$FLOWRL_ROOT"
FOLDER="$(mktemp -d "${TMPDIR:-/tmp}/flowrl_parallel.XXXXXX")"
GRAPH="$FOLDER/graph"
SOCKET="$FOLDER/tmux" # a tmux server of our own

clean_up() {
  tmux -S "$SOCKET" kill-server 2>/dev/null || true
  if [ "${KEEP:-0}" = 1 ]; then
    say "kept: $GRAPH"
  else
    rm -rf "$FOLDER"
  fi
}
trap clean_up EXIT
trap 'exit 130' INT TERM

"$PYTHON" -m flowrl.bottomup_parallel \
  "$GRAPH" \
  --max_nodes 3 \
  --max_parallel_skills 2 \
  --total_timesteps 5e4 \
  --needs_success_rate 0 \
  --tmux_socket "$SOCKET" \
  --no_use_wandb \
  "$@"

"$PYTHON" - "$GRAPH" << 'CHECK'
import sys
from pathlib import Path

from flowrl.experts.store import ExpertStore
from flowrl.paths import GraphPaths
from flowrl.reports.status import status_document

layout = GraphPaths(Path(sys.argv[1]))
status = status_document(layout)
store = ExpertStore(layout)
experts = store.manifest().experts
problems = []
if not status["ended"] or len(status["skills"]) != 3:
    problems.append(f"{len(status['skills'])} skills, not 3 that have ended")
for row in status["skills"]:
    version = experts.get(row["expert"])
    if row["status"] != "completed":
        problems.append(f"{row['skill']} is {row['status']}: {row['why']}")
    elif version is None or version.skill != row["skill"]:
        problems.append(f"{row['skill']} is not in {layout.manifest}")
    else:
        folder = store.verify(version)  # raises when a file is missing or damaged
        print(f"{row['skill']}: expert {row['expert']}, {version.frames:,} acted frames, {folder}")
if left := sorted(layout.training_runs.glob("skill_*")):
    problems.append(f"run folders are left: {', '.join(map(str, left))}")
print("\n".join(problems) or "3 skills are trained, merged and whole")
sys.exit(1 if problems else 0)
CHECK
