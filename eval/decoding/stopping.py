"""What ends an answer: an end token or a stop string."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...base.errors import BadInput
from ...targets.target import Target


@dataclass(frozen=True)
class Stop:
    """What ends a row: an end token or a stop string. The ending token itself is emitted.

    eos: end tokens. strings: texts that end a row when they occur in its new text, also across tokens.
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
        """The number of new tokens up to the ending one, included; None if none of them ends the row.

        Args: before: the tokens that the row has emitted so far. tokens: the new ones.
        """
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.eos), None)
        if not self.strings:
            return end
        tokens = tokens[:end]
        # a character has at most four bytes, so at most four tokens; 8 more keep the cut clear of any match
        window = list(before[-(4 * max(map(len, self.strings)) + 8) :])
        if not self._holds([*window, *tokens]):
            return end
        return next((i for i in range(1, len(tokens)) if self._holds([*window, *tokens[:i]])), len(tokens))

    def _holds(self, tokens: list[int]) -> bool:
        text = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self.strings)
