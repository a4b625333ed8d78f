#!/usr/bin/env bash
# What a GPU is asked: `make gpu`. Each stage takes under 10 minutes, can be run alone by its name, and writes one JSON.
#
#   bash scripts/gpu_suite.sh [--size toy|8b] [STAGE ...]       stages: tests pretrain engine
#
# --size toy runs the same stages on a CPU, so that the suite itself stays tested. A stage that is done is not repeated
# where its output is there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=runs/gpu
size=8b
stages=()
while [ $# -gt 0 ]; do
    case "$1" in
        --size) size=${2:?--size needs toy or 8b}; shift 2 ;;
        tests | pretrain | engine) stages+=("$1"); shift ;;
        *) echo "gpu_suite: unknown stage $1: expected tests, pretrain or engine" >&2; exit 2 ;;
    esac
done
[ ${#stages[@]} -gt 0 ] || stages=(tests pretrain engine)
mkdir -p $out

for stage in "${stages[@]}"; do
    printf '\n\033[1m[%3ss] %s\033[0m\n' "$SECONDS" "$stage"
    case "$stage" in
        tests) # captured graphs decode what eager steps do
            "$python" -m pytest -q -m gpu --junitxml $out/tests.xml ;;
        pretrain) # targets of a few hundred million parameters, on the text that this machine carries
            for shape in llama qwen3; do
                "$python" -m headstart.scripts.gpu_target $out/$shape --shape $shape --size "${size/8b/full}"
            done ;;
        engine) # the baseline against the bandwidth limit, a round's cost, what the formula explains
            "$python" -m headstart.scripts.engine_bench --size "$size" --output $out/engine.json ;;
    esac
done
