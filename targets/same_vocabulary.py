"""Whether a draft model has the target's vocabulary: the same words under the same ids, and its size up to padding."""

from collections.abc import Mapping

from ..base.errors import BadInput
from .loading import TargetConfig, comes_with_tokenizer, load_tokenizer, read_model_config
from .target import Target

PADDING = 0.01  # vocabularies whose sizes differ by at most this share may be the same up to padding


def check_vocabulary(path: str, target: Target) -> None:
    """Raises BadInput if a model's vocabulary is not the target's, before its weights are loaded."""
    config = TargetConfig(path=path)
    try:
        size = read_model_config(config).get_text_config().vocab_size
    except BadInput as error:
        raise BadInput(f"head.path {path}: {error}") from error
    sizes = f"{size} tokens, those of {target.name} {target.vocab_size}"
    if abs(size - target.vocab_size) > PADDING * max(size, target.vocab_size):
        raise BadInput(f"head.path {path}: its vocabulary has {sizes}: expected the same, but for padding")
    if not comes_with_tokenizer(path):
        return  # then only the size can be compared
    words: Mapping[str, int] = load_tokenizer(config).get_vocab()
    theirs: Mapping[str, int] = target.tokenizer.get_vocab()
    word = differing_word(words, theirs)
    if word is not None:
        ids = f"{word!r} is {words.get(word, 'absent')} there and {theirs.get(word, 'absent')} here"
        raise BadInput(f"head.path {path}: its vocabulary ({sizes}) is another: {ids}")


def differing_word(words: Mapping[str, int], others: Mapping[str, int]) -> str | None:
    """A token of the smaller vocabulary that the larger lacks or has under another id; None if there is no such."""
    few, many = sorted((words, others), key=len)
    return next((word for word, i in few.items() if many.get(word) != i), None)
