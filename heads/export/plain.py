"""A draft model as a plain Hugging Face folder with the target's tokenizer, for any engine and for transformers."""

import shutil
from pathlib import Path

from ...configs.errors import BadInput
from .folder import HeadFolder, write_config, write_tensors

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.tiktoken")
CHAT_FILES = ("chat_template*", "generation_config.json")


def write_plain(head: HeadFolder, folder: Path, *, to: str) -> None:
    """config.json, model.safetensors and the target's tokenizer. Raises BadInput where the target is not local."""
    source = Path(head.target)
    if not source.is_dir():
        raise BadInput(f"target {head.target}: no local folder; name one with --target: its tokenizer files are copied")
    write_config(folder, {**head.config, **head.provenance})
    write_tensors(folder, head.tensors)
    for pattern in (*TOKENIZER_FILES, "*.model", *CHAT_FILES):
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
