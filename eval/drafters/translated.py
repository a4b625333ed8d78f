"""A draft model with another tokenizer than the target's: both read the same text, each in its own tokens.

Drafting by text (string-level exact match, Timor et al. 2025; "universal assisted decoding" in transformers): the
committed text is translated to the draft model's tokens and its continuation back to the target's, so everything that
the draft model can write can be drafted. The alternative, drafting only tokens in both vocabularies (token-level
intersection, TLI), is better for sampled drafts, since it gives their probabilities. Ours are greedy and verified
against the target's own choice at any temperature, so it would only restrict the draft model.

Nothing is assumed about tokenizers: decode(a + b) need not be decode(a) + decode(b), a character may need several
tokens' bytes, a first word may lose its space. If text cannot be aligned, filler is drafted, and verified as usual.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...configs.errors import BadInput
from ...heads.base import Proposal
from ...heads.decoders.cache import SlotCache
from ...heads.target import Target
from .host import RowText, TextDrafter, TextState

INCOMPLETE = "\ufffd"  # what decoders write for bytes of an incomplete character
KEEP_TOKENS, KEEP_CHARACTERS = 16, 64  # least part of a text's end that is translated again
STEPS_PER_TOKEN = 16  # most tokens of the draft model per token of the target


class Tail:
    """Computes the image f(source) of a source that grows at its end, by calling f only on the end.

    The image is its own first `base` items followed by f(source[cut:]) without the first `skip` items. `cut` moves
    forward only to a place where this reproduces the current image.
    """

    def __init__(self, f: Callable[[Any], Any], *, empty: Any, keep: int):
        """Args: empty: the image of an empty source. keep: least number of the source's last items to pass to f."""
        self.f, self.image, self.keep = f, empty, keep
        self.cut = self.skip = self.base = 0

    def update(self, source: Any) -> Any:
        """The image of the whole source."""
        self.image = self.image[: self.base] + self.f(source[self.cut :])[self.skip :]
        if len(source) - self.cut > 4 * self.keep:
            self._move_up(source)
        return self.image

    def _move_up(self, source: Any) -> None:
        for cut in range(len(source) - self.keep, len(source) - self.keep - 8, -1):
            end = self.f(source[cut:])
            for skip in range(min(4, len(end))):  # the first items may differ where a word was cut
                base = len(self.image) - len(end) + skip
                if base >= 0 and self.image[base:] == end[skip:]:
                    self.cut, self.skip, self.base = cut, skip, base
                    return


def settled(text: str) -> str:
    """The text without an incomplete character at its end."""
    return text.rstrip(INCOMPLETE)


class Vocabulary:
    """One model's tokenizer. special: ids of its special tokens by name; ends: ids of those that end an answer."""

    def __init__(self, model: Target):
        self.tokenizer = model.tokenizer
        self.size = min(model.vocab_size, max(self.tokenizer.get_vocab().values()) + 1)
        added = self.tokenizer.added_tokens_decoder.items()
        ids = {*self.tokenizer.all_special_ids, *(i for i, token in added if token.special)}
        self.special: dict[str, int] = {self.tokenizer.convert_ids_to_tokens(i): i for i in sorted(ids)}
        end = self.tokenizer.eos_token_id
        self.ends = [*([] if end is None else [end]), *sorted(model.eos_token_ids)]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def decode(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def first(self) -> list[int]:
        """The tokens that this tokenizer puts before a text: its bos, or none."""
        bos = self.tokenizer.bos_token_id
        return [bos] if bos is not None and self.tokenizer.encode("a")[:1] == [bos] else []

    def special_in(self, other: "Vocabulary") -> dict[int, list[int]]:
        """Each special token's equivalent in another vocabulary: an end token, or one of the same name; else empty."""
        into = {i: [other.special[name]] if name in other.special else [] for name, i in self.special.items()}
        bos = self.tokenizer.bos_token_id
        return into | ({} if bos is None else {bos: []}) | {end: other.ends[:1] for end in self.ends}


class TranslatedRow(RowText):
    """The committed text of one row in the draft model's tokens, and what of it the draft model has read.

    Special tokens are translated one by one; between two of them, a run of tokens is translated by its text.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary):
        self.target_vocabulary, self.draft_vocabulary = target, draft
        self.to_draft, self.to_target = target.special_in(draft), draft.special_in(target)
        self.num_tokens = 0  # of the target
        self.before = draft.first()  # the draft model's tokens before the last run
        self.read: list[int] = []  # the draft model's tokens in its cache
        self._open()

    def _open(self) -> None:
        self.run: list[int] = []
        self.text = Tail(self.target_vocabulary.decode, empty="", keep=KEEP_TOKENS)
        self.words = Tail(self.draft_vocabulary.encode, empty=[], keep=KEEP_CHARACTERS)
        self.tokens = list(self.before)  # the whole text, in tokens of the draft model

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens of the target."""
        self.num_tokens += len(tokens)
        for token in tokens:
            if token not in self.to_draft:
                self.run.append(token)
                continue
            self._translate()
            self.before = self.tokens + self.to_draft[token]
            self._open()
        self._translate()

    def _translate(self) -> None:
        self.tokens = self.before + self.words.update(settled(self.text.update(self.run)))

    def num_kept(self, text: list[int]) -> int:
        """How many leading tokens of a text are in the cache; the last one never counts, as it must be read again."""
        pairs = zip(self.read, text[:-1], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.read), len(text) - 1))

    def translate_back(self, drafted: list[int]) -> list[int]:
        """The drafted text in the target's tokens, to follow the committed ones; empty if it cannot be aligned."""
        end = next((i for i, token in enumerate(drafted) if token in self.to_target), len(drafted))
        special = self.to_target[drafted[end]] if end < len(drafted) else []
        context = self.words.image[-KEEP_TOKENS:]
        old, new = settled(self.draft_vocabulary.decode(context)), self.draft_vocabulary.decode(context + drafted[:end])
        if not new.startswith(old):
            return []
        text = settled(new[len(old) :])
        tokens = self._encode_behind(text) if text else []
        return tokens + special if tokens or not text else []

    def _encode_behind(self, text: str) -> list[int]:
        target, ids = self.target_vocabulary, self.run[self.text.cut :]
        committed = settled(target.decode(ids))
        new = target.encode(committed + text)
        if new[: len(ids)] == ids:
            return new[len(ids) :]
        # the tokenizer would have split the committed text otherwise: look for a boundary at its end
        for before in (committed, "\n", ""):
            new = target.encode(before + text)
            at = bisect_left(range(len(new)), len(before), key=lambda n, new=new: len(target.decode(new[:n])))
            if target.decode(ids + new[at:]) == committed + text:
                return new[at:]
        return []


@dataclass
class TranslatedState(TextState):
    """The rows, and the draft model's cache."""

    cache: SlotCache | None = None  # None until the first draft


class TranslatedDrafter(TextDrafter):
    """Drafts what a model with any vocabulary writes, translated to the target's tokens; a drafter on the host.

    A draft costs as many forwards as the draft model needs tokens for K of the target's, by their ratio in the text so
    far. Of a new text the draft model reads only what its cache, drafts included, does not hold.
    """

    def __init__(self, model: Target, target: Target):
        """Raises BadInput if the draft model has recurrent layers, whose states cannot go back to where texts part."""
        if model.has_states:
            raise BadInput(f"draft model {model.name} has recurrent layers: it needs the target's own tokenizer")
        self.model = model
        self.draft, self.target = Vocabulary(model), Vocabulary(target)

    def begin(self, *, batch_size: int, max_length: int) -> TranslatedState:
        return TranslatedState([TranslatedRow(self.target, self.draft) for _ in range(batch_size)])

    @torch.no_grad()
    def propose(self, state: TextState, *, num_draft_tokens: int) -> Proposal:
        assert isinstance(state, TranslatedState)
        live = [is_live and len(row.tokens) > 0 for row, is_live in zip(state.rows, state.active, strict=True)]
        ratios = [len(row.tokens) / row.num_tokens for row, is_live in zip(state.rows, live, strict=True) if is_live]
        num_steps = math.ceil(num_draft_tokens * min(max(ratios, default=0.0), STEPS_PER_TOKEN))
        room = self.model.max_positions - num_steps
        live = [is_live and len(row.tokens) <= room for row, is_live in zip(state.rows, live, strict=True)]
        written = self._write(state, live, num_steps) if any(live) else [[] for _ in live]
        drafts = []
        for row, is_live, new in zip(state.rows, live, written, strict=True):
            translated = row.translate_back(new) if is_live else []
            known = [token for token in translated if token < self.target.size][:num_draft_tokens] or [0]
            drafts.append(known + known[-1:] * (num_draft_tokens - len(known)))
        return Proposal(torch.tensor(drafts, device=self.model.device))  # [B, K]

    def _write(self, state: TranslatedState, live: list[bool], num_steps: int) -> list[list[int]]:
        """num_steps greedy tokens of the draft model after each live row's text; arbitrary tokens for other rows."""
        device = self.model.device
        texts = [row.tokens if is_live else [0] for row, is_live in zip(state.rows, live, strict=True)]
        starts = [row.num_kept(text) for row, text in zip(state.rows, texts, strict=True)]
        longest = max(map(len, texts))
        if state.cache is None or 2 * longest + num_steps > state.cache.max_length:
            # the final length in these tokens is not known: allocate with room to grow, and read the texts again
            state.cache, starts = self.model.new_cache(4 * longest + num_steps), [0] * len(texts)
        news = [text[start:] for text, start in zip(texts, starts, strict=True)]
        width = max(map(len, news))
        tokens = torch.tensor([new + [0] * (width - len(new)) for new in news], device=device)  # [B, Q]
        start = torch.tensor(starts, device=device)
        behind = torch.tensor([len(text) for text in texts], device=device)  # [B] position of the first drafted token
        positions = start[:, None] + torch.arange(width, device=device)  # [B, Q]
        extent = max(starts) + width
        hidden = self.model.forward(tokens, cache=state.cache, positions=positions, extent=extent).post_norm
        hidden = hidden[torch.arange(len(texts), device=device), behind - start - 1][:, None]  # [B, 1, D]
        written = [self._choose(hidden)]
        for step in range(1, num_steps):
            positions = (behind + step - 1)[:, None]  # [B, 1]
            hidden = self.model.forward(
                written[-1], cache=state.cache, positions=positions, extent=extent + step
            ).post_norm
            written.append(self._choose(hidden))
        drafted = torch.cat(written, 1).tolist()  # [B, num_steps], the host read
        for row, text, new in zip(state.rows, texts, drafted, strict=True):
            row.read = text + new[:-1]
        return drafted

    def _choose(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, 1, D] -> [B, 1] the most probable token that the tokenizer knows."""
        return self.model.logits(hidden)[..., : self.draft.size].argmax(-1)
