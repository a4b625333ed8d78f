"""Rows per second and memory from conversations to packed batches, on any number of synthetic ones.

    python -m headstart.scripts.benchmarks.bench_data --rows 1000000

Conversations of about 2 kB (a 200th of them twice) go through `headstart data prepare`, rendering and masks as in
training, and one epoch of packed batches, each stage in a process of its own, in a temporary folder.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STAGES = ("prepare", "encode", "pack")
MAX_LENGTH = 2048  # tokens of a row, and of a packed one
BATCH_SIZE = 8  # packed rows
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    arguments = parse(sys.argv[1:])
    if arguments.stage:
        print(json.dumps(run_stage(arguments)))
        return
    results = measure(arguments)
    if arguments.json:
        print(json.dumps(results))
    else:
        show(results)


def parse(line: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m headstart.scripts.benchmarks.bench_data", description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000, help="conversations")
    parser.add_argument(
        "--tokenizer", default="", help="folder with a chat template; default: a small one, trained here"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes of prepare")
    parser.add_argument("--folder", help="where the temporary folder is made; default: the system's")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    return parser.parse_args(line)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of each stage, run one after the other, each in a new process."""
    with tempfile.TemporaryDirectory(prefix="bench_data_", dir=arguments.folder) as name:
        folder = Path(name)
        num_bytes = synthesise(folder / "chats.jsonl", num_rows=arguments.rows)
        tokenizer = arguments.tokenizer or str(train_tokenizer(folder / "chats.jsonl", folder / "tokenizer"))
        stages = {}
        for stage in STAGES:
            command = [
                sys.executable,
                "-m",
                "headstart.scripts.benchmarks.bench_data",
                "--stage",
                stage,
                "--folder",
                name,
            ]
            command += ["--tokenizer", tokenizer, "--workers", str(arguments.workers)]
            stages[stage] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {"rows": arguments.rows, "bytes": num_bytes, "stages": stages}


def run_stage(arguments: argparse.Namespace) -> dict[str, Any]:
    """One stage in this process: rows, seconds, its own figures, and the peak memory of it and of its largest child."""
    folder = Path(arguments.folder)
    figures = {"prepare": prepare_stage, "encode": encode_stage, "pack": pack_stage}[arguments.stage](folder, arguments)
    peak = [resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {**figures, "peak_rss_bytes": peak[0], "peak_rss_of_a_worker_bytes": peak[1]}


def timed(started: float, *, rows: int, **figures: Any) -> dict[str, Any]:
    """Figures of a stage over so many rows that ends now; imports lie before `started`."""
    seconds = time.perf_counter() - started
    return {"rows": rows, "seconds": round(seconds, 2), "rows_per_second": round(rows / seconds), **figures}


def prepare_stage(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    from ...data_pipelines.prepare import PrepareConfig, prepare

    started = time.perf_counter()
    sources, output = str(folder / "chats.jsonl"), str(folder / "prepared")
    card = prepare(PrepareConfig(sources=sources, output=output, num_workers=arguments.workers))
    return timed(started, rows=card.read, kept=card.kept, dropped=card.dropped)


def encode_stage(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """As training does before its first step."""
    from transformers import AutoTokenizer

    from ...data_pipelines.config import DataConfig
    from ...data_pipelines.masks.chat import encode_rows
    from ...data_pipelines.sources import iter_rows
    from ...data_pipelines.storage.shard_file import StoredSample
    from ...data_pipelines.storage.shards import ShardWriter

    started = time.perf_counter()
    config = DataConfig(train=str(folder / "prepared" / "train.jsonl"), max_length=MAX_LENGTH)
    tokenizer, writer, counts = AutoTokenizer.from_pretrained(arguments.tokenizer), ShardWriter(folder / "t"), Counter()
    for sample in encode_rows(iter_rows(config.train), tokenizer, config, counts=counts):
        writer.add(StoredSample(sample))
    manifest = writer.finish()
    return timed(started, rows=counts["kept"] + counts["dropped"], tokens=manifest.num_tokens)


def pack_stage(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One epoch of batches."""
    from ...data_pipelines.loader import BatchPlan, collate
    from ...data_pipelines.packing import RowSequence
    from ...data_pipelines.storage.shards import Shards

    started = time.perf_counter()
    shards = Shards(folder / "t")
    plan = BatchPlan(RowSequence(shards.lengths, layout="packed", seed=0, capacity=MAX_LENGTH), BATCH_SIZE)
    num_tokens = num_positions = number = 0
    while plan.epoch(number) < 1:
        batch = collate([[shards[i] for i in row] for row in plan.rows(number)])
        num_tokens, num_positions = num_tokens + batch.num_tokens, num_positions + batch.input_ids.numel()
        number += 1
    return timed(started, rows=len(shards), batches=number, padding=round(1 - num_tokens / num_positions, 4))


def synthesise(path: Path, *, num_rows: int) -> int:
    """Writes conversations of one to four exchanges in made-up words; returns the file's bytes."""
    source = random.Random(0)
    words = ["".join(source.choices("etaoinshrdlu", k=source.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    line = ""
    with path.open("w", encoding="utf-8") as file:
        for row in range(num_rows):
            if row % 200 or not row:
                text = source.choices(words, weights, k=source.randint(100, 450))
                cuts = sorted(source.sample(range(8, len(text) - 8), 2 * source.randint(1, 4) - 1))
                parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
                turns = [
                    {"role": ("user", "assistant")[index % 2], "content": " ".join(part)}
                    for index, part in enumerate(parts)
                ]
                line = json.dumps({"messages": turns})
            file.write(line + "\n")
    return path.stat().st_size


def train_tokenizer(chats: Path, folder: Path) -> Path:
    """A byte-level BPE tokenizer of the first conversations, with a chat template, saved."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    with chats.open(encoding="utf-8") as file:
        rows = [json.loads(line)["messages"] for line, _ in zip(file, range(2000), strict=False)]
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((turn["content"] for turns in rows for turn in turns), trainer)
    fast: PreTrainedTokenizerBase = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[1])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def show(results: dict[str, Any]) -> None:
    table = Table(title=f"{results['rows']:,} conversations, {results['bytes'] / 1e9:.3g} GB")
    for column in ("stage", "rows/s", "seconds", "peak memory", ""):
        table.add_column(column, justify="left" if column in ("stage", "") else "right")
    for name, stage in results["stages"].items():
        others = {key: stage[key] for key in ("kept", "tokens", "batches", "padding") if key in stage}
        told = ", ".join(f"{key} {value:,}" for key, value in others.items())
        memory = f"{stage['peak_rss_bytes'] / 2**30:.2f} GiB"
        table.add_row(name, f"{stage['rows_per_second']:,}", f"{stage['seconds']:,}", memory, told)
    Console().print(table)


if __name__ == "__main__":
    main()
