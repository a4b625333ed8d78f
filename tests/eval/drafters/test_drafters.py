"""Drafters without training draft what they should, row by row, and leave the text the target's own."""

from typing import Any

import pytest
from drafted import own_text, told, untrained
from headstart.base.errors import BadInput
from headstart.engines.heads import HEADS, save_head
from headstart.eval.decoding import generate
from headstart.eval.drafters import lookup
from headstart.eval.drafters.draft_model import DraftModelDrafter, has_tokenizer_of
from headstart.eval.drafters.lookup import NgramDrafter, SuffixDrafter
from headstart.eval.drafters.registry import build_drafter, build_drafters, parse_drafter
from headstart.heads.drafting.drafter import Drafter
from headstart.targets.caches.ring_cache import DraftWindow
from headstart.targets.target import Target

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 7, 8, 3, 7], [1], [1, 30, 31, 32, 30, 31, 33, 30]]


@pytest.fixture(params=["ngram", "suffix", "draft-model", "small-draft-model", "itself"])
def drafter(request, target, tiny_target) -> Drafter:
    """Every drafter, and draft models that are unlike the target, lack half of its vocabulary, or equal it."""
    make = {
        "ngram": lambda: NgramDrafter(),
        "suffix": lambda: SuffixDrafter(),
        "draft-model": lambda: DraftModelDrafter(tiny_target("qwen3"), target_vocab_size=target.vocab_size),
        "small-draft-model": lambda: DraftModelDrafter(tiny_target("llama", vocab_size=30), target_vocab_size=61),
        "itself": lambda: DraftModelDrafter(target),
    }
    return make[request.param]()


def drafts(drafter: Drafter, texts: list[list[int]], num_draft_tokens: int) -> list[list[int]]:
    return drafter.propose(told(drafter, texts), num_draft_tokens=num_draft_tokens).tokens.tolist()


# Losslessness


def test_the_text_is_what_transformers_writes_and_a_batch_accepts_what_its_rows_accept_alone(drafter, target):
    how: dict[str, Any] = {"max_new_tokens": 20, "num_draft_tokens": 3, "eos_token_ids": []}
    together = generate(target, drafter, PROMPTS, **how)
    assert together.token_ids == [own_text(target.model, prompt, 20) for prompt in PROMPTS]
    for i, prompt in enumerate(PROMPTS):
        alone = generate(target, drafter, prompt, **how)
        assert alone.token_ids == [together.token_ids[i]]
        ours = [(one.num_accepted[i], one.num_committed[i]) for one in together.rounds if one.num_committed[i]]
        assert ours == [(one.num_accepted[0], one.num_committed[0]) for one in alone.rounds]


# N-grams


def test_ngram_copies_what_followed_the_longest_match():
    drafter = NgramDrafter()
    assert drafts(drafter, [[5, 6, 7, 8, 5, 6]], 3) == [[7, 8, 5]]
    assert drafts(drafter, [[1, 2, 3, 9, 2, 3, 8, 1, 2, 3]], 2) == [[9, 2]]  # three tokens before two later ones
    assert drafts(drafter, [[2, 3, 9, 2, 3, 8, 1, 2, 3]], 2) == [[8, 1]]  # of equal matches the latest
    assert drafts(NgramDrafter(1), [[1, 2, 3, 9, 2, 3, 8, 7, 3]], 2) == [[8, 7]]


def test_ngram_always_drafts_as_many():
    assert drafts(NgramDrafter(), [[5, 6, 7, 8, 5, 6]], 9) == [[7, 8, 5, 6, 7, 8, 5, 6, 7]]
    assert drafts(NgramDrafter(), [[4, 4]], 3) == [[4, 4, 4]]
    assert drafts(NgramDrafter(), [[4, 5, 6]], 3) == [[6, 6, 6]]


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
def test_what_is_committed_later_counts(make):
    drafter = make()
    state = told(drafter, [[5, 6, 7, 8]])
    told(drafter, [[8, 9, 5, 6]], state=state, start=3)  # the pending token is read, and two drafts were accepted
    assert drafter.propose(state, num_draft_tokens=5).tokens.tolist() == [[7, 8, 9, 5, 6]]


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
def test_rows_have_texts_of_their_own(make):
    rows = [[5, 6, 7, 8, 5, 6], [1, 6, 2, 6], [9, 7, 9]]
    alone = [drafts(make(), [row], 2)[0] for row in rows]
    assert drafts(make(), rows, 2) == alone == [[7, 8], [2, 6], [7, 9]]


class Repeats:
    """An engine's view of a target that goes round in a circle."""

    def __init__(self, period: list[int]):
        self.period = period

    def accepted(self, drafter: Drafter, *, num_draft_tokens: int, num_rounds: int) -> list[int]:
        text = self.period * 2
        state, taken = told(drafter, [text]), []
        for _ in range(num_rounds):
            tokens = drafter.propose(state, num_draft_tokens=num_draft_tokens).tokens[0].tolist()
            truth = [self.period[(len(text) + i) % len(self.period)] for i in range(num_draft_tokens + 1)]
            taken.append(next((i for i, token in enumerate(tokens) if token != truth[i]), num_draft_tokens))
            told(drafter, [[text[-1], *truth[: taken[-1] + 1]]], state=state, start=len(text) - 1)
            text = text + truth[: taken[-1] + 1]
        return taken


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
@pytest.mark.parametrize("period", [[4], [4, 5], [4, 5, 6, 7, 8, 9, 10]])
def test_a_repetitive_text_is_accepted_whole(make, period):
    assert Repeats(period).accepted(make(), num_draft_tokens=5, num_rounds=4) == [5] * 4


# Suffixes


def test_suffix_takes_the_more_frequent_continuation():
    text = [1, 2, 7, 3, 1, 2, 7, 4, 1, 2, 8, 5, 1, 2]
    assert drafts(SuffixDrafter(), [text], 1) == [[7]]
    assert drafts(NgramDrafter(), [text], 1) == [[8]]  # the latest


def test_suffix_prefers_a_longer_match_to_a_more_frequent_one(monkeypatch):
    text = [9, 2, 6, 4, 2, 7, 3, 2, 7, 5, 9, 2]
    assert drafts(SuffixDrafter(), [text], 2) == [[6, 4]]
    monkeypatch.setattr(lookup, "MAX_SUFFIX", 1)
    assert drafts(SuffixDrafter(), [text], 1) == [[7]]


def test_a_row_learns_from_no_earlier_prompt():
    own = SuffixDrafter()
    drafts(own, [[5, 6, 7, 8]], 2)
    assert drafts(own, [[5, 6]], 1) != [[7]]


def test_tries_are_bounded(monkeypatch):
    monkeypatch.setattr(lookup, "MAX_NODES", 100)
    drafter = SuffixDrafter()
    state = told(drafter, [list(range(60)), list(range(50, 99))])
    tries: dict[int, Any] = {id(row.own): row.own for row in state.rows}  # pyright: ignore
    assert sum(len(trie.token) for trie in tries.values()) <= 100
    assert drafter.propose(state, num_draft_tokens=3).tokens.shape == (2, 3)


# Draft models


def test_after_rejections_the_draft_model_s_cache_is_right(target, tiny_target):
    """Its drafts are those of a model that reads the committed text afresh."""
    drafter = DraftModelDrafter(tiny_target("qwen3"), target_vocab_size=target.vocab_size)
    proposed: list[list[list[int]]] = []

    class Watched(DraftModelDrafter):
        def propose(self, state, *, num_draft_tokens):
            proposal = super().propose(state, num_draft_tokens=num_draft_tokens)
            proposed.append(proposal.tokens.tolist())
            return proposal

    done = generate(target, Watched(drafter.model), PROMPTS, max_new_tokens=16, num_draft_tokens=3, eos_token_ids=[])
    for i, (prompt, new) in enumerate(zip(PROMPTS, done.token_ids, strict=True)):
        length = 0
        for one, tokens in zip(done.rounds, proposed, strict=False):
            length += one.num_committed[i]
            if length >= len(new):
                break
            assert tokens[i] == own_text(drafter.model.model, prompt + new[:length], 3)


def test_a_smaller_vocabulary_is_drafted_within(target, tiny_target):
    for drafter, most in [
        (DraftModelDrafter(tiny_target("llama", vocab_size=30), target_vocab_size=61), 30),
        (DraftModelDrafter(tiny_target("llama", vocab_size=99), target_vocab_size=61), 61),
    ]:
        assert drafter.num_tokens == most
        state = drafter.begin(batch_size=2, max_length=30)
        told(drafter, [[1, 60, 45, 3], [59, 2]], state=state)
        assert drafter.propose(state, num_draft_tokens=6).tokens.max() < most


# Names


class Words:
    """Of a tokenizer, its vocabulary."""

    def __init__(self, words: dict[str, int]):
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return self.words


def test_tokenizers_are_the_same_where_tokens_have_the_same_ids(tiny_model):
    def with_words(**words: int) -> Target:
        target = Target.of(tiny_model("llama"), name="tiny", fingerprint="")
        target._tokenizer = Words(words)
        return target

    target = with_words(a=0, b=1, c=2)
    assert has_tokenizer_of(target, with_words(a=0, b=1)) and has_tokenizer_of(with_words(a=0, b=1), target)
    assert not has_tokenizer_of(target, with_words(a=0, d=1)) and not has_tokenizer_of(target, with_words(a=1, b=0))


def test_specs_become_drafters(saved_target, tmp_path):
    target = Target.load(saved_target)
    head = save_head(untrained("medusa", target), tmp_path / "head")
    for spec, name, kind in [
        ("ngram", "ngram", NgramDrafter),
        ("ngram:5", "ngram", NgramDrafter),
        ("suffix", "suffix", SuffixDrafter),
        (f"draft-model:{saved_target}", "draft-model", DraftModelDrafter),
        (f"head:{head}", "medusa", HEADS["medusa"]),
    ]:
        named, drafter = build_drafter(spec, target)
        assert named == name and isinstance(drafter, kind)
    assert build_drafter("ngram:5", target)[1].max_ngram == 5  # pyright: ignore
    specs = ["suffix", "ngram", "ngram:2", f"head:{head}", "ngram", f"head:{head}"]
    names = ["suffix", "ngram", "ngram:2", f"medusa:{head}", "ngram#2", f"medusa:{head}#2"]
    assert [name for name, _ in build_drafters(specs, target)] == names


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("ngrm", "did you mean ngram:MAX?"),
        ("draft_model:x", "did you mean draft-model:PATH?"),
        ("zebra", "expected one of ngram, ngram:MAX, suffix, suffix:ANSWERS, draft-"),
        ("", "expected one of ngram"),
        ("ngram:0", "MAX should be a whole number"),
        ("ngram:x", "MAX should be a whole number"),
        ("suffix:gone.jsonl", "gone.jsonl: no such file of answers"),
        ("head", "expected head:PATH"),
        ("draft-model:", "expected draft-model:PATH"),
        ("head:./gone", "head ./gone: no such folder"),
    ],
)
def test_unknown_specs_name_the_known_ones(spec, problem):
    with pytest.raises(BadInput, match=".*") as caught:
        parse_drafter(spec)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_a_bare_head_folder_is_recognised(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput) as caught:
        parse_drafter(str(tmp_path))
    assert f"did you mean head:{tmp_path}?" in str(caught.value)


def test_a_head_with_nan_is_refused_before_it_is_measured(target, tmp_path):
    head = untrained("eagle3", target)
    name, value = next((name, value) for name, value in head.named_parameters() if value.ndim == 2)
    value.data[0, 0] = float("nan")
    folder = save_head(head, tmp_path / "head")
    for spec in (f"head:{folder}", f"hybrid:{folder}"):
        with pytest.raises(BadInput, match=f"head {folder}: tensor {name}: 1 values are NaN or infinite"):
            build_drafter(spec, target)


# A window of heads


def test_a_window_is_set_on_heads_alone_and_said_in_their_names(target, tmp_path):
    folder = save_head(untrained("eagle3", target), tmp_path / "head")
    specs = [f"head:{folder}", f"hybrid:{folder}", "suffix"]
    (one, head), (both, hybrid), (other, _) = build_drafters(specs, target, window="512:4")
    assert (one, both, other) == ("eagle3:window 512:4", "hybrid+eagle3:window 512:4", "suffix")
    assert (head.draft_window, hybrid.head.draft_window) == (DraftWindow(512, 4),) * 2


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("medusa", {}, "MedusaHead has no keys and values of its own"),
        ("eagle3", {"sliding_window": 8}, "Eagle3Head has a window of its own, of 8"),
    ],
)
def test_a_head_that_cannot_draft_with_a_window_is_refused(family, options, reason, target, tmp_path):
    folder = save_head(untrained(family, target, **options), tmp_path / "head")
    with pytest.raises(BadInput, match=reason):
        build_drafter(f"head:{folder}", target, window="512")
