"""Texts end exactly where they should, whatever a round commits at once."""

import pytest
from headstart.base.errors import BadInput
from headstart.eval.decoding import generate
from headstart.eval.decoding.stopping import Stop
from headstart.targets.target import Target
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

PROMPT = [1, 5, 9]
PIECES = ["", *"abcdefgh", "a b", " stop", "st", "op", "\n\n", *[f"w{i} " for i in range(14, 61)]]


@pytest.fixture
def spelled(tiny_target):
    """A target whose tokens spell PIECES, joined without spaces."""
    target = tiny_target("llama")
    words = Tokenizer(models.WordLevel({piece or "<s>": i for i, piece in enumerate(PIECES)}, unk_token="<s>"))
    words.decoder = decoders.Fuse()
    spelled = Target.of(target.model, name=target.name, fingerprint=target.fingerprint)
    spelled._tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    return spelled


def earliest(target, text, strings):
    """The shortest beginning of a text that holds one of the strings, looked for token by token."""
    for n in range(1, len(text) + 1):
        if any(string in target.tokenizer.decode(text[:n]) for string in strings):
            return text[:n]
    return text


def test_a_stop_string_ends_the_text_at_the_token_that_completes_it(spelled, target_as_drafter):
    """Every pair of neighbours in the text, for every K: inside an accepted block, at its end, as the bonus."""
    text = generate(spelled, None, PROMPT, max_new_tokens=30, eos_token_ids=[]).token_ids[0]
    whole = spelled.tokenizer.decode(text)
    strings = {whole[i : i + 4] for i in range(0, len(whole) - 4, 7)}
    assert len(strings) > 5
    for string in sorted(strings):
        wanted = earliest(spelled, text, [string])
        for drafter in (None, target_as_drafter(spelled)):
            num_draft = 4 if drafter else None
            how = {"max_new_tokens": 30, "eos_token_ids": [], "stop_strings": [string]}
            out = generate(spelled, drafter, PROMPT, num_draft_tokens=num_draft, **how)  # type: ignore[arg-type]
            assert out.token_ids == [wanted], string
            assert sum(one.num_committed[0] for one in out.rounds) == len(wanted), "nothing behind it counts"


def test_the_first_of_several_ends_wins(spelled):
    text = generate(spelled, None, PROMPT, max_new_tokens=30, eos_token_ids=[]).token_ids[0]
    late, early = (spelled.tokenizer.decode(text[i : i + 2]) for i in (12, 4))
    out = generate(spelled, None, PROMPT, max_new_tokens=30, eos_token_ids=[], stop_strings=[late, early])
    assert out.token_ids == [earliest(spelled, text, [late, early])]
    ended = generate(spelled, None, PROMPT, max_new_tokens=30, eos_token_ids=[text[2]], stop_strings=[late])
    assert ended.token_ids == [text[: text.index(text[2]) + 1]]


def test_a_stop_string_in_the_prompt_ends_nothing(spelled):
    stop = Stop.of(spelled, eos_token_ids=[], strings=["st"])
    assert stop.first([], [1, 2]) is None
    assert stop.first([11], [1, 2]) == 1, "it was there before: the row should have ended then"
    assert stop.first([], [11, 12]) == 1 and stop.first([1], [2, 10]) == 2
    assert Stop.of(spelled, eos_token_ids=[], strings=["stop"]).first([11], [12, 1]) == 1, "across rounds"


def test_an_empty_stop_string_is_refused(spelled):
    with pytest.raises(BadInput, match="^stop string '': expected at least one character$"):
        generate(spelled, None, PROMPT, stop_strings=[""])
