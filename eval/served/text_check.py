"""Are the prompts ours, and the texts with drafts those without? What differs is held against our own forward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...targets.target import Target
from ..proof.lossless import LosslessReport, compare_texts
from ..proof.own_forward import first_not_own
from .figures import Record
from .questions import Question

OTHER = 0.25  # share of texts without drafts that rounding may leave unproved, at most; of fewer than four none may
MOST_PROVED = 40  # texts that differ, held against our forward; each takes a forward over its whole length
Told = tuple[list[int] | None, str]  # a text as its ids, where the server gives them, and as characters


@dataclass(frozen=True)
class PromptCheck:
    """By question: the server's prompt ids are ours, are others, or are not known (it gives none, or we have none).
    first_other: the row of the first that is another."""

    same: int = 0
    other: int = 0
    unknown: int = 0
    first_other: str = ""

    @classmethod
    def of(cls, questions: Sequence[Question], theirs: Mapping[int, list[int] | None]) -> "PromptCheck":
        pairs = [(questions[number], ids) for number, ids in theirs.items()]
        known = [(question, ids) for question, ids in pairs if ids is not None and question.ids is not None]
        other = [question.row for question, ids in known if ids != question.ids]
        return cls(len(known) - len(other), len(other), len(pairs) - len(known), other[0] if other else "")


@dataclass(frozen=True)
class TextCheck:
    """Greedy texts with drafts beside those without: each different text of each question, in all blocks. by_ids: of
    those compared, how many by token ids; the others by characters. not_proved: differ, and were not held against the
    target, which could not be loaded here, or whose own the text without drafts is not either. is_other: so many are
    not that the server must compute something else: packed weights, a schema, an adapter; then none is proved."""

    report: LosslessReport
    by_ids: int
    not_proved: int
    is_other: bool = False

    @property
    def num_wrong(self) -> int:
        """Texts that are not the target's own, and do not differ by rounding."""
        return self.report.unexplained - self.not_proved


def texts_in(records: Sequence[Record]) -> dict[int, list[Told]]:
    """The different texts of each question, in the order in which they came."""
    found: dict[int, list[Told]] = {}
    for record in records:
        for number, texts in record["texts"].items():
            told = found.setdefault(int(number), [])
            told += [(ids, text) for ids, text in texts if (ids, text) not in told]
    return found


def check_texts(
    questions: Sequence[Question],
    baseline: Sequence[Record],
    drafted: Sequence[Record],
    prompts: Mapping[int, list[int] | None],
    load_target: Callable[[], Target | None],
    *,
    is_narrow: bool = True,
) -> TextCheck:
    """Args: prompts: by question, the ids that the server read, where it gives them. load_target: called where a text
    differs; None: it cannot be loaded here. is_narrow: the server may compute in 16 bits, as most do."""
    plain, whole, by_ids, not_proved, num_held, num_other = texts_in(baseline), LosslessReport(), 0, 0, 0, 0
    for number, told in ((number, told) for number, texts in texts_in(drafted).items() for told in texts):
        if number not in plain:
            continue
        ids, text = told
        equal = (one for one in plain[number] if one == told or (ids is not None and one[0] == ids))
        other_ids, other_text = next(equal, plain[number][0])
        known, prompt = ids is not None and other_ids is not None, prompts.get(number) or questions[number].ids
        ours, theirs = (ids, other_ids) if known else (list(text.encode()), list(other_text.encode()))
        assert ours is not None and theirs is not None
        by_ids += known
        unproved: int | None = 0
        if ours != theirs:
            is_held = known and prompt and whole.checked - whole.identical < MOST_PROVED
            target = load_target() if is_held else None
            if target is not None and prompt:
                num_held += 1
                if first_not_own(target, prompt, theirs, is_narrow=is_narrow) is None:
                    unproved = first_not_own(target, prompt, ours, baseline=theirs, is_narrow=is_narrow)
                else:  # there is nothing to hold the other text against
                    num_other, target = num_other + 1, None
            not_proved += target is None
        whole += compare_texts([theirs], [ours], lambda unproved=unproved: [unproved], numbers=[number])
    is_other = num_other > OTHER * num_held
    return TextCheck(whole, by_ids, whole.unexplained if is_other else not_proved, is_other)
