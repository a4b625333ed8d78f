"""A tiny Gemma 4 with a vocabulary that every engine reads, and an assistant that knows its texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from headstart.engines.heads import build_head
from headstart.eval.decoding import generate
from headstart.heads.assistant import AssistantConfig, AssistantHead
from headstart.heads.base import DraftBatch
from headstart.targets.target import Target
from tokenizers import Tokenizer, decoders, models
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedTokenizerFast

PROMPTS = [[2, *((7 * i * i + 3 * i * j + 11) % 200 + 30 for i in range(5 + j))] for j in range(4)]
LENGTH, NUM_DRAFT = 21, 3
NUM_STEPS = 400
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]


def save_target(folder: Path) -> None:
    """With bytes for a vocabulary. Its sliding window is longer than the texts, as engines differ there."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"global_head_dim": 64, "hidden_size_per_layer_input": 0}
    config = Gemma4TextConfig(
        **sizes,
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=64,
        max_position_embeddings=256,
        pad_token_id=0,
        tie_word_embeddings=False,  # a tied random table would only repeat its input
        eos_token_id=1,
        bos_token_id=2,
    )
    model = Gemma4ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(std=0.1 if "embed" in name else 0.25)
            elif "k_norm" in name:
                weight.fill_(0.15)  # else scores over 32 and 64 channels choose one key each
    model.save_pretrained(folder)
    names = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *map(chr, range(0x4E00, 0x4E00 + 512 - 260))]
    pairs = [(chr(0x4E00), chr(0x4E01))]
    names[-1] = "".join(pairs[0])
    words = models.BPE({name: i for i, name in enumerate(names)}, pairs, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(words)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    ends = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)


def answers_of(target: Target) -> list[list[int]]:
    """What it writes behind PROMPTS, as far as drafts look ahead."""
    return generate(target, None, PROMPTS, max_new_tokens=LENGTH + NUM_DRAFT + 2, eos_token_ids=[]).token_ids


def knowing_head(target: Target, answers: Sequence[Sequence[int]]) -> AssistantHead:
    """Trained on these texts until it drafts all of them."""
    config = AssistantConfig(num_depths=NUM_DRAFT, num_layers=2, hidden_size=48, loss={"hard_ce": 1.0})
    head = build_head(config, target, seed=1).train()
    assert isinstance(head, AssistantHead)
    rows = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    begins = torch.tensor([[len(prompt)] for prompt in PROMPTS])
    lengths = torch.tensor([[len(row)] for row in rows])
    at = torch.arange(ids.shape[1])
    batch = DraftBatch(ids, (at >= begins) & (at < lengths), target.forward(ids, feature_layers=head.feature_layers))
    optimizer = torch.optim.AdamW(head.parameters(), lr=4e-3, weight_decay=0.0)
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * (1 - step / NUM_STEPS) + 1e-4
        optimizer.zero_grad()
        head.loss(batch).loss.backward()
        optimizer.step()
    return head.eval()
