#!/usr/bin/env bash
# Trains nine real Craftax-Classic skills, two at a time, and measures the merged agent; fails
# when a skill is not completed, or an early one succeeds in less than 80 % of fresh worlds.
#
#   bash scripts/demo.sh            train, or go on with a demo that was interrupted
#   bash scripts/demo.sh --fresh    remove the last demo first
#   bash scripts/demo.sh --help     this text
#
# Further flags go to flowrl.bottomup_parallel. A smaller demo, of two skills:
#
#   bash scripts/demo.sh --fresh --max_nodes 2 --total_timesteps 2e5
#
# With flags of your own only completed skills are measured, and need not reach 80 %.
# It first installs what is missing: tmux and bubblewrap by apt-get, flowrl with its packages into .venv.
set -euo pipefail
FLOWRL_EXTRAS="${FLOWRL_EXTRAS-web}" # for flowrl serve; nothing that only developers need
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

fresh="" flags=()
for word in "$@"; do
  case "$word" in
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --fresh) fresh=yes ;;
    *) flags+=("$word") ;;
  esac
done
set -- "${flags[@]}"
case "${1:---} " in # the folder is ours: neither a word nor --graph_path names another
  --graph[_-]path[=\ ]* | [!-]*)
    say "flowrl: the demo trains in exp/demo alone, not '$1'; elsewhere use flowrl train"
    exit 2
    ;;
esac

offer bwrap bubblewrap "each trainer is confined by it"
setup
cd "$FLOWRL_ROOT"
last="exp/.demo-$$"
[ -z "$fresh" ] || [ ! -e exp/demo ] || mv exp/demo "$last"
code=0
"$PYTHON" -m flowrl.bottomup_parallel \
  exp/demo \
  --max_nodes 9 \
  --max_parallel_skills 2 \
  --total_timesteps 1e6 \
  --success_state_rate 0.9 \
  --no_use_wandb \
  "$@" || code=$?
if [ "$code" -eq 2 ] && [ -e "$last" ] && [ ! -e exp/demo ]; then
  mv "$last" exp/demo # the flags were refused
fi
rm -rf "$last"
[ "$code" -eq 0 ] || exit "$code"

completed="$("$PYTHON" -m flowrl status exp/demo --json | "$PYTHON" -c '
import json, sys
print(*(row["skill"] for row in json.load(sys.stdin)["skills"] if row["status"] == "completed"), sep="\n")')"
least=0.8
[ $# -eq 0 ] || least=0
for skill in "Collect Wood" "Collect Sapling" "Collect Drink" "Place Table"; do
  [ $# -eq 0 ] || grep -qxF "$skill" <<<"$completed" || continue
  "$PYTHON" -m flowrl evaluate exp/demo "$skill" --episodes 256 --at_least "$least"
done

"$PYTHON" -m flowrl status exp/demo
