#!/usr/bin/env bash
# What a GPU is asked: `make gpu`. Each stage takes under 9 minutes, can be run alone by its name, goes on where it was
# stopped, and writes one JSON into runs/gpu; a stage whose JSON is there is not run again.
#
#   bash scripts/gpu_suite.sh [--size toy|8b] [--output runs/gpu] [STAGE ...]
#
# --size toy runs the same stages on a CPU in minutes, so that the suite itself stays tested.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
all=(tests pretrain answers heads evaluate conditions plan engine training)
out=runs/gpu
size=8b
stages=()
while [ $# -gt 0 ]; do
    case "$1" in
        --size) size=${2:?--size needs toy or 8b}; shift 2 ;;
        --output) out=${2:?--output needs a folder}; shift 2 ;;
        *)
            case " ${all[*]} " in
                *" $1 "*) stages+=("$1"); shift ;;
                *) echo "gpu_suite: unknown stage $1: expected ${all[*]}" >&2; exit 2 ;;
            esac ;;
    esac
done
[ ${#stages[@]} -gt 0 ] || stages=("${all[@]}")
run() { "$python" -m "headstart.scripts.$@"; }
mkdir -p "$out"

for stage in "${stages[@]}"; do
    printf '\n\033[1m[%3ss] %s\033[0m\n' "$SECONDS" "$stage"
    if [ -f "$out/$stage.json" ]; then
        echo "$out/$stage.json is there already"
        continue
    fi
    case "$stage" in
        tests) # captured graphs decode what eager steps do
            run gpu_tests "$out/tests.json" tests/*/test_on_gpu.py ;;
        pretrain) # targets of two shapes, on the text that this machine carries
            run gpu_target "$out/llama" --shape llama --size "${size/8b/full}"
            run gpu_target "$out/qwen3" --shape qwen3 --size "${size/8b/full}" --share 0.4 ;;
        answers | heads | evaluate | conditions | plan) # the whole product on the first of them
            run gpu_product "$stage" --target "$out/llama" --runs "$out" --size "${size/8b/full}" ;;
        engine) # the baseline against the bandwidth limit, a round's cost, what the formula explains
            run engine_bench --size "$size" --output "$out/engine.json" ;;
        training) # what a step of a head costs at 8B shape
            run bench_train --output "$out/training.json" ;;
    esac
done
