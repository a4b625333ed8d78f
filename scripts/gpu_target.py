"""Pretrains the GPU suite's target from scratch, on all text that the machine carries: real text, without any hub.

    python -m headstart.scripts.gpu_target OUTPUT [--shape llama|qwen3] [--size toy|full] [--text FILE ...]

OUTPUT gets the target, in bfloat16, and pretrain.json: the loss curve, tokens per second, MFU, samples. Layers are many
and narrow, so that a decode step waits for weights as a large model's does.
"""

import argparse
import hashlib
import json
import math
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from ..configs.errors import BadInput
from ..configs.jsonl import iter_jsonl
from ..eval.report import write_whole
from ..heads.loading import default_device
from ..train.speed import matmul_rate
from .toy_corpus import reasoning_problems
from .toy_target import train_tokenizer

# transformers writes the causal mask out where code is compiled, and flash attention takes no mask; rows here are full
CAUSAL = "headstart_causal"
AttentionInterface.register(CAUSAL, sdpa_attention_forward)
AttentionMaskInterface.register(CAUSAL, lambda *args, **kwargs: None)

SUFFIXES = {".py", ".md", ".rst", ".txt", ".pyi"}
LONGEST_FILE = 400_000  # characters; longer ones are tables
SHAPES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
NUM_POINTS = 100  # of the loss curve
PROMPTS = ("def merge_sorted(left, right):\n", "import os\n\n\nclass ", "The function returns")


@dataclass(frozen=True, kw_only=True)
class Size:
    """layers, width, heads, kv_heads: of the target. vocab_size: of its tokenizer. row_tokens, rows: of a step.

    seconds: of training, which ends then, its learning rate having come down to zero. num_chars: of text at most, of
    which num_problems reasoning problems come on top.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    vocab_size: int
    row_tokens: int
    rows: int
    seconds: float
    num_chars: int
    num_problems: int
    learning_rate: float


SIZES = {
    "toy": Size(
        layers=3, width=64, heads=4, kv_heads=2, vocab_size=700, row_tokens=64, rows=4, seconds=4.0,
        num_chars=150_000, num_problems=200, learning_rate=3e-3,
    ),
    "full": Size(
        layers=32, width=768, heads=12, kv_heads=4, vocab_size=16384, row_tokens=2048, rows=32, seconds=400.0,
        num_chars=400_000_000, num_problems=200_000, learning_rate=2e-3,
    ),
}  # fmt: skip


def installed_texts(num_chars: int) -> Iterator[str]:
    """Sources and documents of Python and its packages here, each once, in an order that mixes them."""
    roots = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib")}
    paths = {path for root in roots for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file()}
    seen: set[bytes] = set()
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.name.encode() + bytes(path)).digest()):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if not text.strip() or len(text) > LONGEST_FILE or digest in seen:
            continue
        seen.add(digest)
        yield text
        num_chars -= len(text)
        if num_chars <= 0:
            return


def given_texts(files: Iterable[Path]) -> Iterator[str]:
    """The caller's own: JSONL rows with `text` or `messages` (their contents), or a file of plain text."""
    for file in files:
        if ".jsonl" not in file.name:
            yield file.read_text(encoding="utf-8")
            continue
        for line, row in iter_jsonl(file):
            if "text" in row:
                yield row["text"]
            elif "messages" in row:
                yield "\n\n".join(message["content"] for message in row["messages"])
            else:
                raise BadInput(f"{file}:{line}: a row of text needs `text` or `messages`, found {sorted(row)}")


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
        max_position_embeddings=8192,
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
    """Train for size.seconds on rows in random order: Muon on the layers' matrices, AdamW on the rest."""
    on_gpu = device.startswith("cuda")
    model.to(device).train()
    model.set_attn_implementation(CAUSAL)
    step_of: Any = torch.compile(model) if on_gpu else model
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    source, curve, step, started = torch.Generator().manual_seed(0), [], 0, 0.0
    order = torch.randperm(len(rows), generator=source)
    while (share := (time.perf_counter() - started) / size.seconds if step > 0 else 0.0) < 1:
        picked = order[(torch.arange(size.rows) + step * size.rows) % len(rows)]
        batch = rows[picked].long().to(device, non_blocking=True)  # [B, T]
        with torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=on_gpu):
            loss = step_of(input_ids=batch, labels=batch, use_cache=False).loss
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
    model.eval().set_attn_implementation("sdpa")
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


def step_operations(model: Any, size: Size) -> float:
    """Floating-point operations per trained token: 6 per weight that multiplies, 12 T D per layer of attention, halved
    as it is causal (PaLM, Chowdhery et al. 2022, appendix B)."""
    weights = sum(p.numel() for p in model.parameters())  # the tied table once: as output layer
    return 6 * weights + 6 * size.layers * size.row_tokens * size.width


@torch.no_grad()
def samples(model: Any, tokenizer: Any) -> list[str]:
    """Greedy continuations of a few beginnings."""
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
        found.append(tokenizer.decode(out[0]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama")
    parser.add_argument("--size", choices=sorted(SIZES), default="toy")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="more text: plain files, or JSONL rows")
    parser.add_argument("--device", default=default_device())
    options = parser.parse_args()
    if (options.output / "pretrain.json").is_file():
        print(f"{options.output} holds a target already")
        return
    size = SIZES[options.size]
    texts = [*installed_texts(size.num_chars), *given_texts(options.text)]
    problems = [one["messages"] for one in reasoning_problems(size.num_problems, 0)]
    words = [message["content"] for chat in problems[:3000] for message in chat]
    tokenizer = train_tokenizer([*texts[:: max(1, len(texts) // 2000)], *words], vocab_size=size.vocab_size)
    chats = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in problems]
    rows = packed(tokenizer, [*texts, *chats], row_tokens=size.row_tokens)
    torch.manual_seed(0)
    model = new_model(options.shape, size, tokenizer)
    print(f"{model.num_parameters() / 1e6:.1f} M parameters, {rows.numel() / 1e6:.1f} M tokens", flush=True)
    found = pretrain(model, rows, size=size, device=options.device)
    options.output.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    document = {"shape": options.shape, "size": asdict(size), "parameters": model.num_parameters()}
    document |= {"device": options.device, **found, "samples": samples(model, tokenizer)}
    write_whole(options.output / "pretrain.json", json.dumps(document, indent=2) + "\n")
    print(f"loss {found['loss']:.3f}, {found['tokens_per_second']:,.0f} tokens/s, {found['mfu']:.1%} MFU")


if __name__ == "__main__":
    main()
