#!/usr/bin/env bash
# What a GPU is asked: `make gpu`. Each stage takes under 9 minutes, can be run alone by its name, goes on where it was
# stopped, and writes one JSON (of tests, XML); a stage whose JSON is there is not run again. One that fails does not stop
# the others.
#
#   bash scripts/benchmarks/gpu/suite.sh [--size toy|8b] [--output FOLDER] [STAGE ...]
#
# Results are in runs/gpu. --size toy runs the same stages on a CPU in minutes, into runs/gpu-toy, so that the suite
# itself stays tested. PYTHON: another interpreter than that of .venv.
set -euo pipefail
cd "$(dirname "$0")/../../.."
python=${PYTHON:-.venv/bin/python}
all=(tests pretrain answers heads evaluate sampled conditions plan engine training)
size=8b
out=
stages=()
while [ $# -gt 0 ]; do
    case "$1" in
        --size) size=${2:?--size needs toy or 8b}; shift 2 ;;
        --output) out=${2:?--output needs a folder}; shift 2 ;;
        *)
            [[ " ${all[*]} " == *" $1 "* ]] || { echo "gpu_suite: unknown stage $1: expected ${all[*]}" >&2; exit 2; }
            stages+=("$1"); shift ;;
    esac
done
case "$size" in
    8b) target_size=full; out=${out:-runs/gpu} ;;
    toy) target_size=toy; out=${out:-runs/gpu-toy} ;;
    *) echo "gpu_suite: --size $size: expected toy or 8b" >&2; exit 2 ;;
esac
[ ${#stages[@]} -gt 0 ] || stages=("${all[@]}")

script() { "$python" -m "headstart.scripts.benchmarks.$@"; }

run() {
    case "$1" in
        tests) # captured graphs decode what eager steps do
            "$python" -m pytest -m gpu --junitxml "$out/tests.xml" $(grep -rl --include='*.py' 'mark\.gpu' tests) ;;
        pretrain) # targets of two shapes, on the text that this machine carries
            script gpu.target "$out/llama" --shape llama --size $target_size &&
                script gpu.target "$out/qwen3" --shape qwen3 --size $target_size --share 0.35 ;;
        answers | heads | evaluate | sampled | conditions | plan) # the whole product on the first of them
            script gpu.product "$1" --target "$out/llama" --runs "$out" --size $target_size ;;
        engine) # the baseline against the bandwidth limit, a round's cost, what the formula explains
            report=$out/eval/report.json
            script engine_bench --size $size --output "$out/engine.json" $([ ! -f "$report" ] || echo --acceptance "$report") ;;
        training) # what a step of a head costs at 8B shape
            script bench_train --size $size --output "$out/training.json" ;;
    esac
}

mkdir -p "$out"
failed=()
for stage in "${stages[@]}"; do
    printf '\n\033[1m[%3ss] %s\033[0m\n' "$SECONDS" "$stage"
    result=$out/$stage.json
    [ $stage != tests ] || result=$out/tests.xml
    if [ -f "$result" ] && [[ $stage != engine && $stage != training ]]; then # those two go on cell by cell
        echo "$result is there already"
    else
        run "$stage" || failed+=("$stage")
    fi
done
[ ${#failed[@]} -eq 0 ] || { echo "gpu_suite: failed: ${failed[*]}" >&2; exit 1; }
