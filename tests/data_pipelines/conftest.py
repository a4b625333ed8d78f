"""Real chat templates, rewritten in templates/, on a small byte-level tokenizer that has their special tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
from headstart.data_pipelines.storage.extract import ExtractConfig, Extraction, fields_of
from headstart.data_pipelines.storage.features import Reads
from headstart.data_pipelines.storage.shards import Manifest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "masks" / "templates"
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "qwen2.5": ["<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "llama-3.1": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
    "gemma-2": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    "deepseek-r1": ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],
}
SPECIAL["mistral"] += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
BEGINNINGS = {"llama-3.1": "<|begin_of_text|>", "mistral": "<s>", "gemma-2": "<bos>"}
BEGINNINGS["deepseek-r1"] = "<｜begin▁of▁sentence｜>"
ADDED = {"qwen3": ["<think>", "</think>", "<tool_call>", "</tool_call>"], "deepseek-r1": ["<think>", "</think>"]}
MERGES = [("Ċ", "Ċ"), (".", "Ċ"), (":", "Ġ"), ("Ġ", "o"), ("o", "k"), ("Ġo", "k"), ("h", "i"), ("Ġ", "hi")]


PIECES = [("\n", "\n"), (".", "\n"), (":", "▁"), ("▁", "o"), ("o", "k"), ("▁o", "k"), ("h", "i"), ("▁", "hi")]
SPLITS = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KINDS = ("bytes", "words", "numbers", "pieces")  # ways of splitting: of no text, as GPT-2, as Llama 3, as SentencePiece


def make_chat_tokenizer(name: str, kind: str = "bytes") -> PreTrainedTokenizerFast:
    """256 bytes and a few merges, which reach across every boundary that is no added token and where no kind splits."""
    merges = PIECES if kind == "pieces" else MERGES
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == "pieces":
        alphabet = [*(f"<0x{byte:02X}>" for byte in range(256)), "\n", "▁", *map(chr, range(33, 127))]
    vocab = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=kind == "pieces"))
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "words")
    splits = pre_tokenizers.Split(Regex(SPLITS), "isolated")
    tokenizer.pre_tokenizer = {
        "pieces": pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        "numbers": pre_tokenizers.Sequence([splits, of_bytes]),
    }.get(kind, of_bytes)
    of_pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(of_pieces) if kind == "pieces" else decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL[name]])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED.get(name, [])])  # not special ones
    if name == "llama-3.1" and kind != "pieces":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGINNINGS.get(name),
        eos_token="</s>" if name == "mistral" else None,
        chat_template=(TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"),
    )


@pytest.fixture(scope="session")
def chat_tokenizer() -> Callable[[str], PreTrainedTokenizerFast]:
    """A factory: chat_tokenizer("qwen3")."""
    return make_chat_tokenizer


@pytest.fixture(params=sorted(SPECIAL))
def template_name(request: pytest.FixtureRequest) -> str:
    """Every template in templates/."""
    return request.param


@pytest.fixture(scope="session")
def extract() -> Callable[..., Manifest]:
    """As `headstart data extract`, in one process: extract(samples, target, head, output, config=, origin=)."""

    def run(samples, target, head, output, *, config=None, origin=None) -> Manifest:
        config, reads = config or ExtractConfig(), Reads.of(head)
        fields = fields_of(target, reads, config, origin or {})
        extraction = Extraction(samples, target, reads, config=config, fields=fields)
        extraction.run(output)
        return extraction.finish(output)

    return run
