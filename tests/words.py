"""Tokenizers whose words are w0, w1 ..., and targets' folders with a chat template."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast


def word_tokenizer(words: int | Sequence[str], **options: Any) -> PreTrainedTokenizerFast:
    """As many words, or these, between spaces. The first is the pad and stands for unknown ones, the third ends a text.

    Args: options: of `PreTrainedTokenizerFast`."""
    names = [f"w{i}" for i in range(words)] if isinstance(words, int) else words
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token=names[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{"eos_token": names[2], "pad_token": names[0], **options}
    )


def with_template(target: Path, folder: Path, template: str) -> Path:
    """A copy of a target's folder, with a chat template."""
    shutil.copytree(target, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder
