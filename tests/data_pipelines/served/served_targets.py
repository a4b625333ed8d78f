"""Kinds of targets that a server is asked for, and a tokenizer for their folders."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

KINDS = {  # tied and untied, with and without bias of the queries, keys and values
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
}


def save_words(folder: Path, *, num_words: int = 61, first: str = "w0") -> None:
    """A tokenizer of words w0, w1 ... Args: first: the word with id 0."""
    words = {first: 0} | {f"w{i}": i for i in range(1, num_words)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=first))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", pad_token=first).save_pretrained(folder)
