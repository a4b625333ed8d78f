"""A draft model with another tokenizer drafts what it would write itself, and leaves the text the target's own."""

import json
import random
import shutil
from functools import cache
from typing import Any

import pytest
import torch
from drafted import own_text, told
from headstart.configs.errors import BadInput
from headstart.eval.decoding import generate
from headstart.eval.drafters.draft_model import DraftModelDrafter
from headstart.eval.drafters.registry import build_drafter
from headstart.eval.drafters.translated import TranslatedDrafter, TranslatedRow, Vocabulary
from headstart.heads.folder import fingerprint_of_tensors
from headstart.heads.nn.target_output import TargetOutput
from headstart.heads.target import Target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz .,'-!?0123456789:;()"
TEXT = "the cat sat on the mat, and then the hat sat on the cat. 12 times the cat and 3 times the hat! " * 3
TEXT += "naïve café, 東京と大阪は日本の都市です。 Привет, мир! 🙂🙃 déjà vu: the 都市 and the café 🙂 again. " * 3
PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [4], [1, 30, 31, 32, 33, 34]]


def letters(special=("<pad>", "<s>", "</s>")) -> PreTrainedTokenizerFast:
    """Characters, one token each."""
    words = {token: i for i, token in enumerate([*special, "<unk>", *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    how = {"eos_token": special[2], "bos_token": special[1], "pad_token": special[0]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **how)


def words(*, vocab_size=400, prefix=False, special=("<|end|>",)) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on TEXT; with `prefix`, a first word gets a space, and a bos opens every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = [*special, *(["<bos>"] if prefix else [])]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=names, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    if prefix:
        bos = tokenizer.token_to_id("<bos>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    how = {"bos_token": "<bos>"} if prefix else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], **how)


def sentencepieces() -> PreTrainedTokenizerFast:
    """Pieces with a leading mark for spaces, which decoding strips from a text's first word; no pre-tokenization."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "<e>"], unk_token="<unk>")
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", unk_token="<unk>")


TOKENIZERS = {
    "letters": letters,
    "words": words,
    "bytes": lambda: words(vocab_size=257),
    "words with a prefix": lambda: words(vocab_size=350, prefix=True),
    "sentencepieces": sentencepieces,
}


def with_tokenizer(model, tokenizer, name="tiny") -> Target:
    return Target(
        model, name=name, fingerprint=fingerprint_of_tensors(dict(model.named_parameters())), tokenizer=tokenizer
    )


@pytest.fixture(scope="module")
def make(tiny_model):
    """make(tokenizer, family): a random model of that tokenizer."""

    def make(tokenizer, family="llama", **changes) -> Target:
        eos = changes.pop("eos_token_id", tokenizer.eos_token_id)
        return with_tokenizer(tiny_model(family, vocab_size=len(tokenizer), eos_token_id=eos, **changes), tokenizer)

    return make


@pytest.fixture(scope="module")
def vocabulary_of(make):
    """vocabulary_of(a name in TOKENIZERS), made once."""
    return cache(lambda name: Vocabulary(make(TOKENIZERS[name]())))


class Knows:
    """A language model that knows one text by heart and writes on from wherever what it has read leads to.

    Its cache holds the tokens that it has read, by slot, so that a wrong slot or a stale one leads astray.
    """

    def __init__(self, tokenizer: Any, texts: list[str], *, max_positions: int = 10_000):
        self.tokenizer, self.texts = tokenizer, texts
        self.vocab_size, self.max_positions = len(tokenizer) + 3, max_positions
        self.device, self.eos_token_ids = torch.device("cpu"), frozenset()
        self.num_read, self.has_states = 0, False

    class Slots:
        def __init__(self, max_length: int):
            self.max_length, self.tokens = max_length, {}

    def new_cache(self, max_length: int) -> Any:
        return self.Slots(max_length)

    def forward(self, tokens, *, cache, positions, extent) -> TargetOutput:
        assert int(positions.max()) < extent <= cache.max_length
        self.num_read += tokens.shape[1]
        hidden = torch.zeros(*tokens.shape, 1)
        for i, (row, slots) in enumerate(zip(tokens.tolist(), positions.tolist(), strict=True)):
            for j, (token, slot) in enumerate(zip(row, slots, strict=True)):
                cache.tokens[i, slot] = token
                hidden[i, j] = self.next([cache.tokens[i, p] for p in range(slot + 1)])
        return TargetOutput(hidden[..., None, :0], hidden)

    def next(self, tokens: list[int]) -> int:
        said = self.said(tokens)
        for text in self.texts:
            if text.startswith(said) and said:
                whole = self.tokenizer.encode(text, add_special_tokens=False)
                plain = [token for token in tokens if token not in self.tokenizer.all_special_ids]
                if whole[: len(plain)] == plain and len(plain) < len(whole):
                    return whole[len(plain)]
                longer = [i for i in range(len(self.tokenizer)) if text.startswith(self.said([*tokens, i]))]
                return max(longer, key=lambda i: len(self.said([*tokens, i])))
        return 0

    def said(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd").lstrip()

    def logits(self, hidden) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden[..., 0].long(), self.vocab_size).float()


def test_a_draft_model_that_cannot_go_back_in_its_text_is_refused(make):
    """A text that is translated anew parts from what was read; recurrent layers keep no state there."""
    recurrent = make(words(), family="qwen3_5")
    with pytest.raises(BadInput, match="^draft model tiny has recurrent layers: it needs the target's own tokenizer$"):
        TranslatedDrafter(recurrent, make(letters()))


# Losslessness


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["words", "sentencepieces", "words with a prefix"])
def test_the_text_is_what_transformers_writes(draft, make):
    target, model = make(letters()), make(TOKENIZERS[draft](), "qwen3")
    how: dict[str, Any] = {"max_new_tokens": 12, "num_draft_tokens": 5}
    expected = [own_text(target.model, prompt, 12) for prompt in PROMPTS]
    drafter = TranslatedDrafter(model, target)
    assert generate(target, drafter, PROMPTS, **how).token_ids == expected
    assert [generate(target, drafter, prompt, **how).token_ids[0] for prompt in PROMPTS[1:3]] == expected[1:3]


def test_the_text_of_bytes_that_make_no_characters_is_the_targets(make):
    """A random model of byte-level pieces writes broken characters."""
    target = make(TOKENIZERS["words"]())
    prompts = [[1, 200, 250], [3], list(range(100, 140))]
    expected = [own_text(target.model, prompt, 30) for prompt in prompts]
    drafter = TranslatedDrafter(make(letters(), "qwen3"), target)
    assert generate(target, drafter, prompts, max_new_tokens=30, num_draft_tokens=4).token_ids == expected


def test_sampled_texts_follow_the_targets_distribution(tiny_model, chi_square):
    tiny = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate("abcdef")}, merges=[]))
    tiny.decoder = decoders.Fuse()
    pairs = [(a, b) for a in "abc" for b in "abcdef"]
    vocabulary = {token: i for i, token in enumerate([*"abcdef", *(a + b for a, b in pairs)])}
    big = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    big.decoder = decoders.Fuse()
    models_of = [
        with_tokenizer(
            tiny_model(family, vocab_size=size, eos_token_id=None), PreTrainedTokenizerFast(tokenizer_object=t)
        )
        for family, size, t in (("llama", 6, tiny), ("qwen3", 24, big))
    ]
    assert chi_square(models_of[0], TranslatedDrafter(models_of[1], models_of[0]), num_rows=2000, num_new=3) < 1.5


# What is drafted


@pytest.mark.slow
@pytest.mark.parametrize("draft", sorted(TOKENIZERS))
@pytest.mark.parametrize("source", sorted(TOKENIZERS))
def test_a_model_that_knows_the_text_is_accepted(source, draft):
    """Round after round, over rows of different lengths; sometimes a draft is accepted only in part."""
    tokenizers = TOKENIZERS[source](), TOKENIZERS[draft]()
    plain = TEXT if "letters" not in (source, draft) and "sentencepieces" not in (source, draft) else TEXT[:280]
    texts = [plain, plain[37:]]
    target = Knows(tokenizers[0], texts)
    drafter = TranslatedDrafter(Knows(tokenizers[1], texts), target)  # type: ignore[arg-type]
    ids = [tokenizers[0].encode(text, add_special_tokens=False) for text in texts]
    at = [9, 14]
    state, accepted, drafted = told(drafter, [one[:n] for one, n in zip(ids, at, strict=True)]), 0, 0
    for i in range(12):
        proposal = drafter.propose(state, num_draft_tokens=4).tokens.tolist()
        num_right = [
            next((j for j, token in enumerate(row) if token != one[n + j]), 4)
            for row, one, n in zip(proposal, ids, at, strict=True)
        ]
        accepted, drafted = accepted + sum(num_right), drafted + 8
        step = min(num_right) + 1 if i % 3 else 1
        news = [one[n - 1 : n + step] for one, n in zip(ids, at, strict=True)]
        told(drafter, news, state=state, start=99)
        at = [n + step for n in at]
    assert accepted / drafted > 0.85, (accepted, drafted)


@pytest.mark.slow
def test_drafts_are_those_of_a_model_that_reads_the_text_afresh(make):
    """After rejections, in rows of different lengths that end at different times: nothing stale is read."""
    target, model = make(letters()), make(words(), "qwen3")
    written: list[tuple[list[int], list[int]]] = []

    class Watched(TranslatedDrafter):
        def _write(self, state, live, num_steps):
            said = super()._write(state, live, num_steps)
            rows = zip(state.rows, live, said, strict=True)
            written.extend((list(row.tokens), new) for row, is_live, new in rows if is_live)
            return said

    done = generate(target, Watched(model, target), PROMPTS, max_new_tokens=24, num_draft_tokens=5)
    assert len({len(row) for row in done.token_ids}) > 1, "one row ends before another"
    assert len(written) > 40
    for text, new in written:
        assert new == own_text(model.model, text, len(new), eos_token_id=None)


@pytest.mark.parametrize("draft", sorted(TOKENIZERS))
@pytest.mark.parametrize("source", sorted(TOKENIZERS))
def test_translating_bit_by_bit_is_translating_the_whole(source, draft, vocabulary_of):
    pair = [vocabulary_of(source), vocabulary_of(draft)]
    ids, chance = pair[0].encode(TEXT), random.Random(7)
    row, at = TranslatedRow(*pair), 0
    while at < len(ids):
        step = chance.randint(1, 7) if at else 40
        row.extend(ids[at : at + step])
        at += step
        said = pair[0].decode(ids[:at]).rstrip("\ufffd")
        assert row.tokens == pair[1].first() + pair[1].encode(said)
    assert row.text.cut > 0 and row.words.cut > 0, "the whole text is not read again each time"


def test_broken_texts_are_translated_without_fail(make):
    """Random tokens, of which bytes make no characters: nothing is promised but tokens."""
    pair = [Vocabulary(make(words())) for _ in range(2)]
    chance = random.Random(5)
    row = TranslatedRow(pair[0], Vocabulary(make(letters())))
    for _ in range(100):
        row.extend([chance.randrange(400) for _ in range(chance.randint(1, 5))])
        back = row.translate_back([chance.randrange(40) for _ in range(5)])
        assert all(0 <= token < 400 for token in back)


def test_special_tokens_are_translated_one_by_one(make):
    """An end is an end, a token of the same name is the same, others are left out; no text passes for them."""
    target = make(letters(special=("<|same|>", "<s>", "</s>")))
    model = make(words(special=("<|end|>", "<|same|>", "<|other|>")), eos_token_id=0)
    drafter = TranslatedDrafter(model, target)
    encode, into = target.tokenizer.encode, model.tokenizer.encode
    row = drafter.begin(batch_size=1, max_length=9).rows[0]
    row.extend([1, *encode("the cat", add_special_tokens=False), 0, *encode("the hat", add_special_tokens=False)])
    assert row.tokens == [*into("the cat"), 1, *into("the hat")]
    row.extend([2, *encode("and", add_special_tokens=False)])
    assert row.tokens == [*into("the cat"), 1, *into("the hat"), 0, *into("and")]
    assert row.translate_back([*into(" mat"), 0, *into("!")]) == [*encode(" mat"), 2]
    assert row.translate_back([*into(" mat"), 1]) == [*encode(" mat"), 0]
    assert row.translate_back([*into(" mat"), 2, 0]) == encode(" mat")
    assert row.translate_back([0]) == [2]
    assert row.translate_back([2]) == []


def test_a_bos_opens_the_draft_models_text(make):
    pair = [Vocabulary(make(TOKENIZERS[name]())) for name in ("letters", "words with a prefix")]
    row = TranslatedRow(*pair)
    row.extend([1, *pair[0].encode("the cat")])
    bos = pair[1].tokenizer.bos_token_id
    assert row.tokens == [bos, *pair[1].encode("the cat")] and row.tokens.count(bos) == 1


def test_committed_tokens_that_no_tokenizer_would_choose_are_drafted_behind(make):
    """`th` + `e` where the tokenizer has `the`: what follows is found all the same."""
    pair = [Vocabulary(make(TOKENIZERS[name]())) for name in ("words", "letters")]
    assert len(pair[0].encode(" the")) == 1
    row = TranslatedRow(*pair)
    row.extend([*pair[0].encode(" cat"), *pair[0].encode(" t"), *pair[0].encode("he")])
    assert pair[0].decode(row.translate_back(pair[1].encode(" hat"))) == " hat"
    row = TranslatedRow(*pair)
    row.extend([*pair[0].encode(" cat"), *pair[0].encode(" th")])  # the tokenizer would join it with what follows
    assert pair[0].decode(row.translate_back(pair[1].encode("e hat"))) == "e hat"


def test_only_what_is_new_is_read():
    """Accepted drafts are in the cache: a round reads the last token of the text and what was not drafted."""
    target = Knows(letters(), [TEXT[:280]])
    model = Knows(words(), [TEXT[:280]])
    drafter = TranslatedDrafter(model, target)  # type: ignore[arg-type]
    ids, at = target.tokenizer.encode(TEXT[:280]), 100
    state = told(drafter, [ids[:at]])
    for i in range(10):
        before = model.num_read
        drafter.propose(state, num_draft_tokens=8)
        assert i == 0 or model.num_read - before < 12, "the text is some 40 tokens long"
        told(drafter, [ids[at - 1 : at + 9]], state=state, start=at - 1)
        at += 9


def test_a_text_beyond_the_draft_models_context_gets_filler():
    target = Knows(letters(), [TEXT[:280]])
    drafter = TranslatedDrafter(Knows(words(), [TEXT[:280]], max_positions=12), target)  # type: ignore[arg-type]
    ids = target.tokenizer.encode(TEXT[:280])
    state = told(drafter, [ids[:60], ids[:15]])
    first, second = drafter.propose(state, num_draft_tokens=4).tokens.tolist()
    assert first == [0] * 4 and second == ids[15:19]


# Names


@pytest.fixture
def stranger(saved_target, tmp_path):
    """The saved target again, its words in another order."""
    folder = shutil.copytree(saved_target, tmp_path / "stranger")
    tokenizer = json.loads((saved_target / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {f"w{60 - i}": i for i in range(61)}
    tokenizer["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_the_command_line_picks_it_where_tokenizers_differ(saved_target, stranger):
    target = Target.load(saved_target)
    name, drafter = build_drafter(f"draft-model:{stranger}", target)
    assert name == "draft-model" and isinstance(drafter, TranslatedDrafter)
    assert isinstance(build_drafter(f"draft-model:{saved_target}", target)[1], DraftModelDrafter)
    expected = [own_text(target.model, prompt, 12) for prompt in PROMPTS]
    assert generate(target, drafter, PROMPTS, max_new_tokens=12).token_ids == expected


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_draft_model_without_a_tokenizer_is_refused(family, saved_target, tiny_model, tmp_path):
    """Also where transformers would make an empty one up."""
    tiny_model(family).save_pretrained(tmp_path)
    with pytest.raises(BadInput) as caught:
        build_drafter(f"draft-model:{tmp_path}", Target.load(saved_target))
    assert f"draft-model:{tmp_path}: tokenizer of {tmp_path}: " in str(caught.value)
    assert "\n" not in str(caught.value)
