"""Lets the smoke run's target answer its own training prompts: what a head learns from is what the target writes."""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.progress import track

from ...base.files import write_text
from ...base.jsonl import read_jsonl
from ...eval.decoding import generate
from ...targets.chat.prompts import prompt_ids
from ...targets.target import Target

BATCH_SIZE = 64
NUM_VALIDATION = 64  # rows
MAX_NEW_TOKENS = 224


def answer(target: Target, prompts: list[list[int]], *, max_new_tokens: int) -> list[list[int]]:
    """Greedy answers [token ids], in the prompts' order; batches hold prompts of similar length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, list[int]] = {}
    starts = range(0, len(order), BATCH_SIZE)
    for start in track(starts, "target answers its prompts", console=Console(stderr=True)):
        part = order[start : start + BATCH_SIZE]
        new = generate(target, None, [prompts[i] for i in part], max_new_tokens=max_new_tokens).token_ids
        answers.update(zip(part, new, strict=True))
    return [answers[i] for i in range(len(prompts))]


def main() -> None:
    """Write OUTPUT and VALIDATION rows: input_ids, prompt_length, and the text for readers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="folder of the target")
    parser.add_argument("prompts", help="JSONL of prompts")
    parser.add_argument("output", type=Path, help="JSONL of training rows to write; kept where it is there already")
    parser.add_argument("--validation", type=Path, required=True, help="JSONL for the last rows")
    arguments = parser.parse_args()
    if arguments.output.is_file():
        print(f"{arguments.output} is there already")
        return
    target = Target.load(arguments.target, dtype="float32")
    rows = read_jsonl(arguments.prompts)
    prompts = [prompt_ids(row, target.tokenizer, origin=arguments.prompts) for row in rows]
    answers = answer(target, prompts, max_new_tokens=MAX_NEW_TOKENS)
    lines = []
    for prompt, new in zip(prompts, answers, strict=True):
        text = target.tokenizer.decode(prompt + new)
        lines.append(json.dumps({"input_ids": prompt + new, "prompt_length": len(prompt), "text": text}) + "\n")
    split = len(lines) - NUM_VALIDATION
    for path, part in ((arguments.validation, lines[split:]), (arguments.output, lines[:split])):
        write_text(path, "".join(part))
    print(f"{len(lines)} answers, {sum(map(len, answers))} tokens, in {arguments.output} and {arguments.validation}")


if __name__ == "__main__":
    main()
