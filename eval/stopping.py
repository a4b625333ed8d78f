"""Where a text ends, exact to the token: end tokens, stop strings, max_new_tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..configs.errors import BadInput
from ..heads.target import Target


@dataclass(frozen=True)
class Stop:
    """What ends a row. The token that ends it is emitted: an end token, or the one that completes a stop string.

    eos: end tokens. strings: texts that end a row where they occur in what is new of it, also across tokens.
    """

    eos: frozenset[int]
    strings: tuple[str, ...] = ()
    tokenizer: Any = None

    @classmethod
    def of(cls, target: Target, *, eos_token_ids: Iterable[int] | None = None, strings: Sequence[str] = ()) -> "Stop":
        """Args: eos_token_ids: None: the target's own. Raises BadInput on an empty string."""
        if not all(strings):
            raise BadInput("stop string '': expected at least one character")
        eos = target.eos_token_ids if eos_token_ids is None else frozenset(eos_token_ids)
        return cls(eos, tuple(strings), target.tokenizer if strings else None)

    def first(self, before: Sequence[int], tokens: Sequence[int]) -> int | None:
        """How many of the new tokens remain, the ending one included; None where nothing ends the row.

        Args: before: what the row has emitted so far. tokens: what is to follow.
        """
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.eos), None)
        if not self.strings:
            return end
        tokens = tokens[:end]
        # a character has four bytes at most, so four tokens; a few more, so that no match begins at the cut
        window = list(before[-(4 * max(map(len, self.strings)) + 8) :])
        if not self._holds([*window, *tokens]):
            return end
        return next((i for i in range(1, len(tokens)) if self._holds([*window, *tokens[:i]])), len(tokens))

    def _holds(self, tokens: list[int]) -> bool:
        text = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self.strings)
