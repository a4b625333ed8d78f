"""Trains the smoke run's target from scratch: a tokenizer and a small Llama that reasons and continues code."""

import argparse
import dataclasses
import json
import math
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from ...base.files import replacing_folder, write_json, write_text
from .toy_corpus import contrast_prompts, is_right, python_sources, reasoning_problems

RECIPE_VERSION = 1
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Words, whole numbers and punctuation with their leading space; white space.
PIECES = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
IGNORED = -100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides which target comes out."""

    version: int = RECIPE_VERSION
    seed: int = 0
    steps: int = 1000
    layers: int = 8
    width: int = 128
    vocab_size: int = 800
    rows: int = 8
    code_rows: int = 1  # of each batch; 0: no text but the problems, whatever lies on the machine
    row_tokens: int = 128
    learning_rate: float = 3e-3
    train_prompts: int = 1500
    eval_prompts: int = 64
    contrast_rows: int = 8


def train_tokenizer(texts: list[str], *, vocab_size: int) -> Any:
    """A byte-level BPE with the chat template and `<think>` tags that decoding keeps."""
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        extra_special_tokens=SPECIAL_TOKENS[2:],
        model_max_length=1024,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def chat_rows(tokenizer: Any, problems: list[dict], *, row_tokens: int) -> list[Tensor]:
    """Rows of (ids, labels): each opens with a fresh chat, the last chat is cut off; only answers carry labels."""
    rows, ids, labels = [], [], []
    for problem in problems:
        prompt = _prompt_text(tokenizer, problem)
        answer = problem["messages"][1]["content"] + "<|end|>"
        prompt_ids, answer_ids = tokenizer.encode(prompt), tokenizer.encode(answer)
        ids += prompt_ids + answer_ids
        labels += [IGNORED] * len(prompt_ids) + answer_ids
        if len(ids) >= row_tokens:
            rows.append(torch.tensor([ids[:row_tokens], labels[:row_tokens]]))  # [2, T]
            ids, labels = [], []
    return rows


def code_rows(tokenizer: Any, texts: list[str], *, row_tokens: int) -> list[Tensor]:
    """Rows of (ids, labels) cut from the end-joined texts."""
    ids = [token for text in texts for token in [*tokenizer.encode(text, verbose=False), tokenizer.eos_token_id]]
    num_rows = len(ids) // row_tokens
    rows = torch.tensor(ids[: num_rows * row_tokens]).view(num_rows, row_tokens)  # [rows, T]
    return list(rows[:, None].expand(-1, 2, -1))  # rows of [2, T]


def new_target(tokenizer: Any, *, layers: int, width: int, intermediate: int) -> Any:
    """An untrained fp32 model, deep rather than wide."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=width // 4, tie_word_embeddings=True,
        max_position_embeddings=1024, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.5 * width**-0.5,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:  # every layer starts as the identity: the token's own signal reaches the top
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def train(model: Any, batches: Iterable[tuple[Tensor, float]]) -> Iterator[Any]:
    """Minimises the labels' cross entropy, one batch [B, 2, T] and learning rate per step; yields each step's loss.

    Muon on the layers' matrices, AdamW on the rest: the smoke run's target learns to copy from the question and to add
    within 600,000 tokens, where AdamW alone answered one question in ten after 800,000 (docs/log/real_models.md).
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    model.train()
    for batch, rate in batches:
        loss = model(input_ids=batch[:, 0], labels=batch[:, 1], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        yield loss.detach()
    model.eval()


def batches_of(chats: list[Tensor], codes: list[Tensor], recipe: Recipe) -> Iterator[tuple[Tensor, float]]:
    """Batches [B, 2, T] of chat and code rows in the recipe's proportion, with learning rates: warm-up, then cosine."""
    rng, num_chats = random.Random(recipe.seed), recipe.rows - recipe.code_rows
    for step in range(recipe.steps):
        batch = [chats[(step * num_chats + index) % len(chats)] for index in range(num_chats)]
        rate = min(1.0, (step + 1) / (0.04 * recipe.steps + 1)) * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        yield torch.stack([*batch, *rng.sample(codes, recipe.code_rows)]), recipe.learning_rate * rate


def train_target(model: Any, chats: list[Tensor], codes: list[Tensor], *, recipe: Recipe) -> None:
    """Trains by the recipe, with a line of progress now and then."""
    started, losses = time.perf_counter(), []
    for step, loss in enumerate(train(model, batches_of(chats, codes, recipe)), start=1):
        losses.append(loss.item())
        if step % max(1, recipe.steps // 10) == 0:
            seconds = time.perf_counter() - started
            speed = step * recipe.rows * recipe.row_tokens / seconds
            mean = sum(losses) / len(losses)
            print(f"step {step}/{recipe.steps}  loss {mean:.3f}  {speed:,.0f} tokens/s  {seconds:.0f} s", flush=True)
            losses.clear()


def _prompt_text(tokenizer: Any, problem: dict) -> str:
    return tokenizer.apply_chat_template(problem["messages"][:1], tokenize=False, add_generation_prompt=True)


@torch.no_grad()
def measure(model: Any, tokenizer: Any, *, problems: list[dict]) -> dict:
    """Greedy answers: share right, share ended, share of repeated 4-grams."""
    prompts = [_prompt_text(tokenizer, problem) for problem in problems]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    outputs = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=256, do_sample=False
    )  # [N, P + A]
    num_grams = num_repeated = num_ended = num_right = 0
    for problem, row in zip(problems, outputs[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        ended = tokenizer.eos_token_id in row
        answer = row[: row.index(tokenizer.eos_token_id)] if ended else row
        grams = [tuple(answer[start : start + 4]) for start in range(len(answer) - 3)]
        num_grams, num_repeated = num_grams + len(grams), num_repeated + len(grams) - len(set(grams))
        num_ended, num_right = num_ended + ended, num_right + is_right(problem, tokenizer.decode(answer))
    return {
        "right": num_right / len(problems),
        "ended": num_ended / len(problems),
        "repeated_4grams": num_repeated / max(1, num_grams),
    }


def build_target(folder: Path, *, recipe: Recipe) -> dict:
    """Trains tokenizer and target, saves both with recipe and quality into the folder, and returns the quality."""
    num_chats = recipe.steps * (recipe.rows - recipe.code_rows) * recipe.row_tokens // 80 + recipe.rows
    num_chars = min(1_000_000, 50_000 + 4 * recipe.steps * recipe.code_rows * recipe.row_tokens)
    problems = reasoning_problems(num_chats, recipe.seed)
    sources = python_sources(recipe.seed, num_chars=num_chars)[0] if recipe.code_rows else []
    texts = [message["content"] for problem in problems[:3000] for message in problem["messages"]]
    tokenizer = train_tokenizer([*texts, *sources[:60]], vocab_size=recipe.vocab_size)
    torch.manual_seed(recipe.seed)
    model = new_target(tokenizer, layers=recipe.layers, width=recipe.width, intermediate=3 * recipe.width)
    print(f"target of {model.num_parameters() / 1e6:.1f} M parameters, {len(tokenizer)} tokens in its vocabulary")
    started = time.perf_counter()
    chats = chat_rows(tokenizer, problems, row_tokens=recipe.row_tokens)
    codes = code_rows(tokenizer, sources, row_tokens=recipe.row_tokens)
    train_target(model, chats, codes, recipe=recipe)
    seconds = time.perf_counter() - started
    held_out = reasoning_problems(recipe.eval_prompts, recipe.seed, held_out=True)
    quality = {**measure(model, tokenizer, problems=held_out), "train_seconds": round(seconds, 1)}
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / "quality.json", quality)
    write_json(folder / "recipe.json", dataclasses.asdict(recipe))
    return quality


def prompt_files(*, recipe: Recipe) -> dict[str, list[dict]]:
    """The rows of the smoke run's three prompt files, by file name."""
    train = reasoning_problems(recipe.train_prompts, recipe.seed)
    held_out = reasoning_problems(recipe.eval_prompts, recipe.seed, held_out=True)
    return {
        "reasoning_prompts_train.jsonl": [{"messages": problem["messages"][:1]} for problem in train],
        "reasoning.jsonl": [{**problem, "messages": problem["messages"][:1]} for problem in held_out],
        "contrast.jsonl": [{"prompt": prompt} for prompt in contrast_prompts(recipe.contrast_rows, recipe.seed)],
    }


def make_target(output: Path, *, recipe: Recipe) -> None:
    """Builds the target and its prompt files unless they are there by the same recipe; a failure leaves nothing."""
    data, stored = output.parent / "data", output / "recipe.json"
    files = prompt_files(recipe=recipe)
    same = stored.is_file() and json.loads(stored.read_text()) == dataclasses.asdict(recipe)
    if same and all((data / name).is_file() for name in files):
        print(f"{output} already holds this target")
        return
    with replacing_folder(output) as folder:
        quality = build_target(folder, recipe=recipe)
        for name, rows in files.items():
            write_text(data / name, "".join(json.dumps(row) + "\n" for row in rows))
    shares = ", ".join(f"{name} {quality[name]:.1%}" for name in ("right", "ended", "repeated_4grams"))
    print(f"held-out answers: {shares}")


def main() -> None:
    """Reads the output folder and the recipe from the command line and makes the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    for field in dataclasses.fields(Recipe):
        if field.name != "version":
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    output = options.pop("output").absolute()
    make_target(output, recipe=Recipe(**options))


if __name__ == "__main__":
    main()
