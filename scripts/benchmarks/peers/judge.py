"""Acceptance of EAGLE-3 heads in vLLM, whoever trained them: greedy chains, float32, on a CPU.

    python -m headstart.scripts.benchmarks.peers.judge --vllm-python .venv-vllm/bin/python --target T \
        --chats PROMPTS.jsonl --heads ours=DIR theirs=DIR --output FILE.json

In the main environment; `make .venv-vllm/.ready` makes vLLM's. Heads are exports or what the peers wrote.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ....configs.errors import BadInput
from ....configs.files import write_json
from ....configs.jsonl import iter_jsonl
from ....heads.chat.prompts import prompt_ids

CLIENT = Path(__file__).parents[3] / "tests" / "vllm" / "client.py"
NUM_DRAFT_TOKENS, MAX_NEW_TOKENS, LONGEST = 5, 96, 256  # the last: what the client's engine takes
OFFLINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--chats", type=Path, required=True, help="JSONL of messages; the last one a user's")
    parser.add_argument("--heads", nargs="+", required=True, metavar="NAME=DIR")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args(arguments)
    try:
        judge(asked)
    except BadInput as error:
        print(f"headstart: {error}", file=sys.stderr)
        return 2
    return 0


def judge(asked: argparse.Namespace) -> None:
    """Decode the prompts with each head in vLLM, write and print what its counters say."""
    prompts = token_prompts(asked.target, asked.chats)
    heads = dict(head.split("=", 1) for head in asked.heads)
    job = {
        "folder": asked.target,
        "dtype": "float32",
        "prompts": prompts,
        "max_new_tokens": MAX_NEW_TOKENS,
        "heads": {
            name: {"method": "eagle3", "model": folder, "num_speculative_tokens": NUM_DRAFT_TOKENS}
            for name, folder in heads.items()
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        asking, answer = Path(folder, "job.json"), Path(folder, "result.json")
        asking.write_text(json.dumps({"peers": job}))
        command = [asked.vllm_python, str(CLIENT), str(asking), str(answer)]
        subprocess.run(command, check=True, env=os.environ | OFFLINE)
        results = json.loads(answer.read_text())
    texts = {json.dumps(result.get("texts")) for result in results.values() if "error" not in result}
    found = {name: acceptance(result) for name, result in results.items()}
    write_json(asked.output, {"num_prompts": len(prompts), "texts_equal": len(texts) == 1, "heads": found})
    for name, figures in found.items():
        print(name, figures)


def token_prompts(target: str, chats: Path) -> list[list[int]]:
    """Token ids of the prompts that leave room for the answer. Raises BadInput naming the line."""
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    ids = [prompt_ids(row, tokenizer, origin=f"{chats}:{line}") for line, row in iter_jsonl(chats)]
    return [prompt for prompt in ids if len(prompt) + MAX_NEW_TOKENS + NUM_DRAFT_TOKENS < LONGEST]


def acceptance(result: dict[str, Any]) -> dict[str, Any]:
    """From vLLM's own counters: tokens per round, its bonus included, and the rate of each position given the last."""
    if "error" in result:
        return result
    rounds, accepted = result["num_drafts"], result["accepted_at"]
    given = [rounds, *accepted[:-1]]
    rates = [round(n / before, 3) if before else None for n, before in zip(accepted, given, strict=True)]
    return {"acceptance_length": round(1 + sum(accepted) / rounds, 3), "acceptance_rate": rates, "num_rounds": rounds}


if __name__ == "__main__":
    sys.exit(main())
