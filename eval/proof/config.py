"""How to measure: `MeasureConfig`."""

from dataclasses import dataclass, field

from ...base.errors import BadInput
from ...heads.drafting.drafter import Drafter
from ..decoding.draft_setting import DraftSetting, chain, draft_length
from ..decoding.sampling import Sampling
from ..decoding.verify import ACCEPT_RULES, AcceptRule

SHORT_ANSWER = 64  # tokens; drafts as long may be measured with shorter answers too


def check_length(num_draft_tokens: int, max_new_tokens: int) -> None:
    """Raises BadInput on a chain far longer than an answer, whose drafts could never be used."""
    most = max(SHORT_ANSWER, max_new_tokens)
    if num_draft_tokens > most:
        raise BadInput(f"num_draft_tokens {num_draft_tokens}: at most {most}, an answer's tokens (max_new_tokens)")


@dataclass(kw_only=True)
class MeasureConfig:
    """How to measure."""

    setting: DraftSetting | None = None  # None: a chain of the drafter's default length
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    accept: AcceptRule = field(default_factory=lambda: ACCEPT_RULES["exact"])
    steps: str = "eager"  # as `Engine` takes it
    stop_strings: tuple[str, ...] = ()  # texts that end an answer
    batch_size: int = 1
    num_repeats: int = 3  # timed passes per side (speculation, baseline), after a warm-up, in alternating order
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("batch_size", self.batch_size), ("num_repeats", self.num_repeats)):
            if value < 1:
                raise BadInput(f"{name} {value}: expected at least 1")
        _ = self.sampling  # raises on what is out of range
        if self.setting is not None:
            check_length(self.setting.num_draft_tokens, self.max_new_tokens)

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def setting_for(self, drafter: Drafter) -> DraftSetting:
        """The setting, or this drafter's default. Raises BadInput if it cannot draft that many tokens."""
        length = draft_length(drafter, self.setting.num_draft_tokens if self.setting else None)
        return self.setting or chain(length)
