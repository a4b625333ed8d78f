"""Pretrains the GPU suite's target from scratch, on all text that the machine carries: real text, without any hub.

    python -m headstart.scripts.benchmarks.gpu.target OUTPUT [--shape llama|qwen3] [--size toy|full] [--text FILE ...]

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
from collections.abc import Sequence
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
from ....eval.report.document import write_whole
from ....heads.loading import default_device
from ....train.speed import matmul_rate
from ...quickstart.toy_corpus import reasoning_problems
from ...quickstart.toy_target import train_tokenizer
from .corpus import Chat, Corpus, completions, given_texts, installed_texts

# transformers writes the causal mask out where code is compiled, and flash attention takes no mask; rows here are full
CAUSAL = "headstart_causal"
AttentionInterface.register(CAUSAL, sdpa_attention_forward)
AttentionMaskInterface.register(CAUSAL, lambda *args, **kwargs: None)

SHAPES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
NUM_POINTS = 100  # of the loss curve
PROMPTS = ("def merge_sorted(left, right):\n", "import os\n\n\nclass ", "The function returns")


@dataclass(frozen=True, kw_only=True)
class Size:
    """layers, width, heads, kv_heads: of the target. vocab_size: of its tokenizer. row_tokens, rows: of a step.

    seconds: of training, which ends then and after least_steps, its learning rate down at zero. num_chars: of text at
    most; num_problems reasoning problems and num_completions functions to complete come on top. num_prompts: of each
    domain, for heads to learn from. num_held_out: of each file to measure on. context, long_context: tokens of code
    prompts.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    vocab_size: int
    row_tokens: int
    rows: int
    seconds: float
    least_steps: int
    learning_rate: float
    num_chars: int
    num_problems: int
    num_completions: int
    num_prompts: int
    num_held_out: int
    context: int
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
    """[rows, T] int32: the texts one after the other, each behind an end token."""
    end, parts = tokenizer.eos_token_id, []
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.backend_tokenizer.encode_batch(texts[start : start + 256], add_special_tokens=False):
            parts.append(np.array([*encoding.ids, end], dtype=np.int32))
    ids = np.concatenate(parts)
    num_rows = len(ids) // row_tokens
    return torch.from_numpy(ids[: num_rows * row_tokens].reshape(num_rows, row_tokens))


def new_model(shape: str, size: Size, tokenizer: Any) -> Any:
    """An untrained model, whose layers start as the identity."""
    config = SHAPES[shape](
        vocab_size=len(tokenizer),
        hidden_size=size.width,
        intermediate_size=8 * size.width // 3 // 32 * 32,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.width // size.heads,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.5 * size.width**-0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def pretrain(model: Any, rows: Tensor, *, size: Size, device: str) -> dict[str, Any]:
    """Train for size's time on rows in random order: Muon on the layers' matrices, AdamW on the rest."""
    on_gpu = device.startswith("cuda")
    model.to(device).train()
    model.set_attn_implementation(CAUSAL)
    if on_gpu:
        compile_layers(model)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    source, curve, step, started = torch.Generator().manual_seed(0), [], 0, 0.0
    order = torch.randperm(len(rows), generator=source)
    while (share := min((time.perf_counter() - started) / size.seconds, step / size.least_steps)) < 1:
        picked = order[(torch.arange(size.rows) + step * size.rows) % len(rows)]
        batch = rows[picked].long().to(device, non_blocking=True)  # [B, T]
        with torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=on_gpu):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = (
                size.learning_rate * min(1.0, 20 * share + 0.05) * 0.5 * (1 + math.cos(math.pi * share))
            )
            optimizer.step()
            optimizer.zero_grad()
        curve.append((step, loss.detach()))
        step += 1
        if step == 1:  # the first step compiled; the clock starts behind it
            curve[0][1].item()
            started = time.perf_counter()
    last = curve[-1][1].item()
    seconds = time.perf_counter() - started
    every = max(1, len(curve) // NUM_POINTS)
    rate = (step - 1) * size.rows * size.row_tokens / seconds
    peak = matmul_rate(torch.device(device), torch.bfloat16 if on_gpu else torch.float32)
    return {
        "steps": step,
        "seconds": round(seconds, 1),
        "tokens": step * size.rows * size.row_tokens,
        "epochs": round(step * size.rows / len(rows), 3),
        "tokens_per_second": round(rate, 1),
        "mfu": round(rate * step_operations(model, size) / peak, 4),
        "loss": round(last, 4),
        "loss_curve": [[number, round(value.item(), 4)] for number, value in curve[::every]],
    }


def compile_layers(model: Any, **how: Any) -> None:
    """What is compiled of one layer serves all: a model of many takes no longer to compile than one of few."""
    for layer in model.model.layers:
        layer.compile(fullgraph=True, **how)


def step_operations(model: Any, size: Size) -> float:
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


def asked(chat: Chat) -> dict[str, Any]:
    """A row of prompts: the chat up to its answer."""
    return {"messages": chat[:-1]}


def measured_code(tokenizer: Any, texts: Sequence[str], count: int, *, num_tokens: int) -> list[dict[str, Any]]:
    """Rows of prompts with so many tokens, the template's included and a tenth at most missing."""
    rows = []
    around = len(
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True)["input_ids"]
    )
    for chat in completions(texts, 50 * count, contexts=(num_tokens * CHARS_PER_TOKEN,), seed=2):
        ids = tokenizer(chat[0]["content"]).input_ids[-(num_tokens - around) :]
        if len(ids) >= 0.9 * num_tokens - around:
            rows.append({"messages": [{"role": "user", "content": tokenizer.decode(ids)}]})
    return rows[:count]


def write_prompts(folder: Path, corpus: Corpus, tokenizer: Any, size: Size) -> None:
    """What heads learn from and what they are measured on, of which nothing was learned: no file, no problem.

    Raises: BadInput where the texts give no prompt for one of the files.
    """
    problems = reasoning_problems(size.num_prompts, 1), reasoning_problems(size.num_held_out, 2, held_out=True)
    learned = [*code_chats(corpus.prompts, size, size.num_prompts), *(one["messages"] for one in problems[0])]
    how = {"texts": corpus.held_out, "count": size.num_held_out}
    files = {
        "train": [asked(chat) for chat in learned],
        "code": measured_code(tokenizer, **how, num_tokens=size.context),
        "code_long": measured_code(tokenizer, **how, num_tokens=size.long_context),
        "reasoning": [asked(one["messages"]) for one in problems[1]],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        if not rows:
            raise BadInput(
                f"{name}.jsonl: {len(corpus.held_out)} held-out texts give no prompt for it; add some, --text"
            )
        write_whole(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama")
    parser.add_argument("--size", choices=sorted(SIZES), default="toy")
    parser.add_argument("--share", type=float, default=1.0, help="of the size's training time")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="more text: plain files, or JSONL rows")
    parser.add_argument("--device", default=default_device())
    options = parser.parse_args()
    if missing := [str(path) for path in options.text if not path.is_file()]:
        parser.error(f"--text {missing[0]}: no such file")
    if (options.output / "pretrain.json").is_file():
        print(f"{options.output} holds a target already")
        return
    size = SIZES[options.size]
    size = replace(size, seconds=options.share * size.seconds)
    corpus = Corpus.of([*installed_texts(size.num_chars), *given_texts(options.text)])
    chats = [one["messages"] for one in reasoning_problems(size.num_problems, 0)]
    words = [message["content"] for chat in chats[:3000] for message in chat]
    texts = corpus.pretrain
    tokenizer = train_tokenizer([*texts[:: max(1, len(texts) // 2000)], *words], vocab_size=size.vocab_size)
    tokenizer.model_max_length = MAX_POSITIONS
    chats += code_chats(texts, size, size.num_completions)
    texts = texts + [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    try:
        write_prompts(options.output / "prompts", corpus, tokenizer, size)
    except BadInput as error:
        print(f"gpu_target: {error}", file=sys.stderr)
        sys.exit(2)
    rows = packed(tokenizer, texts, row_tokens=size.row_tokens)
    torch.manual_seed(0)
    model = new_model(options.shape, size, tokenizer)
    print(f"{model.num_parameters() / 1e6:.1f} M parameters, {rows.numel() / 1e6:.1f} M tokens", flush=True)
    found = pretrain(model, rows, size=size, device=options.device)
    model.to(torch.bfloat16).save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    document = {"shape": options.shape, "size": asdict(size), "parameters": model.num_parameters()}
    document |= {
        "device": options.device,
        **found,
        "samples": samples(options.output, tokenizer, device=options.device),
    }
    write_whole(options.output / "pretrain.json", json.dumps(document, indent=2) + "\n")
    print(f"loss {found['loss']:.3f}, {found['tokens_per_second']:,.0f} tokens/s, {found['mfu']:.1%} MFU")


if __name__ == "__main__":
    main()
