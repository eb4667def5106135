#!/usr/bin/env bash
# The small form of every benchmark, held against the committed figures (docs/figures):
#
#   scripts/bench_all.sh [--write] [FOLDER]
#
# Figures go into FOLDER (default: a temporary one). --write makes them the committed ones. Ends
# with 1 when a ratio has fallen below 0.7 of the committed one, or when a benchmark failed.
# PYTHON names the interpreter, ONLY a few benchmarks ("moe merge").
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

write=()
if [[ "${1:-}" == --write ]]; then
    write=(--write)
    shift
fi
folder=${1:-$(mktemp -d)}
mkdir -p "$folder" || exit 2
python=${PYTHON:-python}
failed=0

for name in ${ONLY:-merge memory moe env ppo devices startup scheduler parallel averaging replicas}; do
    script=scripts/bench_$name.py
    if [[ ! -f $script ]]; then
        echo "$script is not there" >&2
        failed=1
        continue
    fi
    began=$SECONDS
    if ! timeout 300 "$python" "$script" --small --json "$folder/$name.json"; then
        echo "$script failed" >&2
        failed=1
    fi
    echo "$script took $((SECONDS - began)) s"
done

"$python" scripts/compare_figures.py "$folder" "${write[@]}" || failed=1
exit $failed
