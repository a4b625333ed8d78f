"""Pretrains the GPU suite's target from scratch, on all text that the machine carries: real text, without any hub.

    python -m headstart.scripts.benchmarks.gpu.target OUTPUT [--shape llama|qwen3] [--size toy|full]

The target learns sources and documents, to complete functions (chats of code), and reasoning problems with traces.
OUTPUT gets the target, in bfloat16; pretrain.json: loss curve, tokens per second, MFU, samples; and OUTPUT/prompts:
train.jsonl, what is asked for heads to learn from, and code.jsonl, code_long.jsonl and reasoning.jsonl, held out, to
measure on. Layers are many and narrow, so that a decode step waits for weights as a large model's does.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from ....configs.errors import BadInput
from ....configs.files import write_json, write_text
from ....heads.loading import default_device
from ....train.speed import matmul_rate, synchronize
from ...quickstart.toy_corpus import reasoning_problems
from ...quickstart.toy_target import new_target, train, train_tokenizer
from ..store import Figures, picked
from .corpus import Chat, Corpus, completions, installed_texts

# transformers writes the causal mask out where code is compiled, and flash attention takes no mask; rows here are full
CAUSAL = "headstart_causal"
AttentionInterface.register(CAUSAL, sdpa_attention_forward)
AttentionMaskInterface.register(CAUSAL, lambda *args, **kwargs: None)

SHAPES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
NUM_POINTS = 100  # of the loss curve
PROMPTS = ("def merge_sorted(left, right):\n", "import os\n\n\nclass ", "The function returns")


@dataclass(frozen=True, kw_only=True)
class Size:
    """A target, and what it learns."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    vocab_size: int
    row_tokens: int
    rows: int  # of a step
    seconds: float  # of training, which ends then, its learning rate down at zero,
    least_steps: int  # and after so many steps
    learning_rate: float
    num_chars: int  # of text at most; what follows comes on top
    num_problems: int  # reasoning problems
    num_completions: int  # functions to complete
    num_prompts: int  # of each domain, for heads to learn from
    num_held_out: int  # of each file to measure on
    context: int  # tokens of code prompts
    long_context: int


SIZES = {
    "toy": Size(
        layers=3, width=64, heads=4, kv_heads=2, vocab_size=700, row_tokens=192, rows=2, seconds=3.0, least_steps=100,
        learning_rate=3e-3, num_chars=2_000_000, num_problems=200, num_completions=40, num_prompts=24, num_held_out=3,
        context=48, long_context=160,
    ),
    "full": Size(
        layers=32, width=768, heads=12, kv_heads=4, vocab_size=16384, row_tokens=4608, rows=14, seconds=170.0,
        least_steps=100, learning_rate=2e-3, num_chars=200_000_000, num_problems=200_000, num_completions=30_000,
        num_prompts=6000, num_held_out=64, context=512, long_context=4096,
    ),
}  # fmt: skip
MAX_POSITIONS = 8192
CHARS_PER_TOKEN = 5  # more than code has: what is cut to so many tokens must not be too short
LONG_SHARE = 10  # one completion in so many has the long context


def packed(tokenizer: Any, texts: list[str], *, row_tokens: int) -> Tensor:
    """[rows, T] int32: the concatenated texts, each preceded by an end token."""
    end, parts = tokenizer.eos_token_id, []
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.backend_tokenizer.encode_batch(texts[start : start + 256], add_special_tokens=False):
            parts.append(np.array([*encoding.ids, end], dtype=np.int32))
    ids = np.concatenate(parts)
    num_rows = len(ids) // row_tokens
    return torch.from_numpy(ids[: num_rows * row_tokens].reshape(num_rows, row_tokens))


def new_model(shape: str, size: Size, tokenizer: Any) -> Any:
    """An untrained model of one of SHAPES."""
    sizes = {**picked(size, "layers width heads kv_heads"), "intermediate": 8 * size.width // 3 // 32 * 32}
    kind: Any = {"config_class": SHAPES[shape], "max_positions": MAX_POSITIONS, "rope_theta": 500000.0}
    return new_target(tokenizer, **sizes, **kind)


def timed_batches(rows: Tensor, size: Size, device: str) -> Iterator[tuple[Tensor, float]]:
    """Batches [B, 2, T] of rows in random order, with learning rates, until the size's time is over.

    The first step compiles: the clock starts behind it.
    """
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    step, started = 0, 0.0
    while (share := min((time.perf_counter() - started) / size.seconds, step / size.least_steps)) < 1:
        picked = order[(torch.arange(size.rows) + step * size.rows) % len(rows)]
        batch = rows[picked].long().to(device, non_blocking=True)  # [B, T]
        rate = size.learning_rate * min(1.0, 20 * share + 0.05) * 0.5 * (1 + math.cos(math.pi * share))
        yield batch[:, None].expand(-1, 2, -1), rate
        step += 1
        if step == 1:
            synchronize(torch.device(device))
            started = time.perf_counter()


def pretrain(model: Any, rows: Tensor, *, size: Size, device: str) -> Figures:
    """Train for the size's time on rows [N, T]; the figures of pretrain.json."""
    on_gpu = device.startswith("cuda")
    model.to(device)
    model.set_attn_implementation(CAUSAL)
    if on_gpu:
        compile_layers(model)
    losses, started = [], 0.0
    for loss in train(model, timed_batches(rows, size, device), beta2=0.95, in_bf16=on_gpu):
        losses.append(loss)
        started = started or time.perf_counter()
    last, steps = losses[-1].item(), len(losses)
    seconds = time.perf_counter() - started
    rate = (steps - 1) * size.rows * size.row_tokens / seconds
    peak = matmul_rate(torch.device(device), torch.bfloat16 if on_gpu else torch.float32)
    curve = list(enumerate(losses))[:: max(1, steps // NUM_POINTS)]
    return {
        "steps": steps,
        "seconds": round(seconds, 1),
        "tokens": steps * size.rows * size.row_tokens,
        "epochs": round(steps * size.rows / len(rows), 3),
        "tokens_per_second": round(rate, 1),
        "mfu": round(rate * token_operations(model, size) / peak, 4),
        "loss": round(last, 4),
        "loss_curve": [[step, round(loss.item(), 4)] for step, loss in curve],
    }


def compile_layers(model: Any, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compiles one layer for all of them, so that compile time does not grow with their number."""
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=backend)


def token_operations(model: Any, size: Size) -> float:
    """Floating-point operations per trained token: 6 per weight that multiplies, 12 T D per layer of attention, halved
    as it is causal (PaLM, Chowdhery et al. 2022, appendix B)."""
    weights = sum(p.numel() for p in model.parameters())  # the tied table once: as output layer
    return 6 * weights + 6 * size.layers * size.row_tokens * size.width


@torch.no_grad()
def samples(folder: Path, tokenizer: Any, *, device: str) -> list[str]:
    """Greedy continuations of a few beginnings, by the target as it was saved."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.to(device)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
        found.append(tokenizer.decode(out[0]))
    return found


def code_chats(texts: Sequence[str], size: Size, count: int) -> list[Chat]:
    """Functions to complete, behind short and long contexts."""
    short, long = (tokens * CHARS_PER_TOKEN for tokens in (size.context, size.long_context))
    num_long = count // LONG_SHARE
    chats = completions(texts, count - num_long, contexts=(short // 4, short // 2, short), seed=0)
    return chats + completions(texts, num_long, contexts=(long,), seed=1)


def measured_code(tokenizer: Any, texts: Sequence[str], count: int, *, num_tokens: int) -> list[Chat]:
    """Prompts of so many tokens, the template's included and a tenth at most missing."""
    chats = []
    empty = tokenizer.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True)
    room = num_tokens - len(empty["input_ids"])
    for chat in completions(texts, 50 * count, contexts=(num_tokens * CHARS_PER_TOKEN,), seed=2):
        ids = tokenizer(chat[0]["content"]).input_ids[-room:]
        if len(ids) >= room - 0.1 * num_tokens:
            chats.append([{"role": "user", "content": tokenizer.decode(ids)}])
    return chats[:count]


def write_prompts(folder: Path, corpus: Corpus, tokenizer: Any, size: Size) -> None:
    """What heads learn from and what they are measured on, of which nothing was learned: no file, no problem.

    Raises: BadInput if the texts give no prompt for one of the files.
    """
    problems = reasoning_problems(size.num_prompts, 1), reasoning_problems(size.num_held_out, 2, held_out=True)
    answered = code_chats(corpus.prompts, size, size.num_prompts) + [problem["messages"] for problem in problems[0]]
    count, held_out = size.num_held_out, corpus.held_out
    files = {
        "train": [chat[:-1] for chat in answered],
        "code": measured_code(tokenizer, held_out, count, num_tokens=size.context),
        "code_long": measured_code(tokenizer, held_out, count, num_tokens=size.long_context),
        "reasoning": [problem["messages"][:-1] for problem in problems[1]],
    }
    for name, chats in files.items():
        if not chats:
            raise BadInput(f"{name}.jsonl: {len(held_out)} held-out texts give no prompt for it")
        write_text(folder / f"{name}.jsonl", "".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def make_target(output: Path, shape: str, size: Size, device: str) -> Figures:
    """Prompts, tokenizer and trained target, saved; returns its figures. Raises BadInput on too little text."""
    corpus = Corpus.of(installed_texts(size.num_chars))
    chats = [problem["messages"] for problem in reasoning_problems(size.num_problems, 0)]
    words = [message["content"] for chat in chats[:3000] for message in chat]
    texts = corpus.pretrain
    tokenizer = train_tokenizer([*texts[:: max(1, len(texts) // 2000)], *words], vocab_size=size.vocab_size)
    tokenizer.model_max_length = MAX_POSITIONS
    write_prompts(output / "prompts", corpus, tokenizer, size)
    chats += code_chats(texts, size, size.num_completions)
    texts = texts + [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    rows = packed(tokenizer, texts, row_tokens=size.row_tokens)
    torch.manual_seed(0)
    model = new_model(shape, size, tokenizer)
    print(f"{model.num_parameters() / 1e6:.1f} M parameters, {rows.numel() / 1e6:.1f} M tokens", flush=True)
    figures = pretrain(model, rows, size=size, device=device)
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    header = {"shape": shape, "size": asdict(size), "parameters": model.num_parameters(), "device": device}
    return {**header, **figures, "samples": samples(output, tokenizer, device=device)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama")
    parser.add_argument("--size", choices=sorted(SIZES), default="toy")
    parser.add_argument("--share", type=float, default=1.0, help="of the size's training time")
    parser.add_argument("--device", default=default_device())
    options = parser.parse_args()
    path, size = options.output / "pretrain.json", SIZES[options.size]
    if path.is_file():
        print(f"{options.output} holds a target already")
        return
    try:
        size = replace(size, seconds=options.share * size.seconds)
        figures = make_target(options.output, options.shape, size, options.device)
    except BadInput as error:
        print(f"gpu_target: {error}", file=sys.stderr)
        sys.exit(2)
    write_json(path, figures)
    print(f"loss {figures['loss']:.3f}, {figures['tokens_per_second']:,.0f} tokens/s, {figures['mfu']:.1%} MFU")


if __name__ == "__main__":
    main()
