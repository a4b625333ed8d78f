#!/usr/bin/env bash
# The whole of Headstart on a target of its own, without network, on a CPU: the story that `make smoke` tells.
#
#   target -> its answers -> a head learns to draft them -> what the head really saves
#
# The target and its answers are made once and kept under runs/smoke; heads are trained anew each time.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
run=runs/smoke
# bash's own SECONDS: whole seconds since the start
step() { printf '\n\033[1m[%3ss] %s\033[0m\n' "$SECONDS" "$1"; }

step "1. A small target: pretrained here, once, on reasoning problems with <think> traces and on Python's own sources"
"$python" -m headstart.benchmarks.quickstart.toy_target $run/target

step "2. Regenerate: the target answers the training prompts itself"
"$python" -m headstart.scripts.cli data regenerate data/regenerate_local.yaml sources=$run/data/reasoning_prompts_train.jsonl \
    output=$run/data/answers target=$run/target engine.dtype=float32 engine.batch_size=64 sampling.temperature=0 sampling.max_tokens=224
head -n 64 $run/data/answers/answers.jsonl > $run/data/validation.jsonl
tail -n +65 $run/data/answers/answers.jsonl > $run/data/train.jsonl

step "3. Train two heads on those answers; the target stays frozen"
rm -rf $run/eagle3 $run/medusa
"$python" -m headstart.train configs/runs/smoke_eagle3.yaml
"$python" -m headstart.train configs/runs/smoke_medusa.yaml

step "4. Evaluate on held-out prompts: the domain the heads were trained on, and Python code as contrast"
"$python" -m headstart.scripts.cli eval --target $run/target --head $run/eagle3/final --head $run/medusa/final \
    --prompts $run/data/reasoning.jsonl --prompts $run/data/contrast.jsonl --output $run/eval --limit 24 --max-new-tokens 80 --repeats 2

step "Done. The report: $run/eval/report.html; its figures: $run/eval/report.json; every round behind it: $run/eval/rounds.jsonl; the heads: $run/*/final"
