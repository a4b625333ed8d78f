"""What a measurement in servers gives: the typed entries of report.json's `served`, as report_schema.md has them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...engines.servers.llama_server import LOOKUP_SUFFIX
from ...engines.servers.registry import SERVER_ENGINES
from ..figures.metrics import LEAST_TIMED, Ends
from ..figures.repetition import Repetition
from ..suites.prompts import FailedPrompt
from .figures import SideFigures, Slo
from .load import Load
from .text_check import PromptCheck, TextCheck

WITHOUT = "without drafts"  # of a baseline
ITS_OWN = "its own drafts"  # of a server that runs, where nothing names them
REMEMBERING = "suffix"  # look-ups that keep earlier answers in every engine that has them
DRAFTS_TOO = "the server without drafts drafts too"  # the beginning of such a doubt


@dataclass(frozen=True)
class ServerAcceptance:
    """From the differences of the server's own counters over the blocks with drafts. acceptance_rate: by draft
    position; empty where the server does not count so."""

    acceptance_length: float | None
    acceptance_rate: list[float | None] = field(default_factory=list)
    num_rounds: int = 0
    num_accepted: int = 0


@dataclass(frozen=True)
class ServedResult:
    """One way of drafting under one load, beside the same server without drafts.

    order: of the blocks; A is without drafts. at_once: both servers were up, else one at a time. acceptance: None: the
    server has no counters, or was started anew meanwhile."""

    engine: str
    drafter: str
    num_draft_tokens: int | None
    load: Load
    max_new_tokens: int
    temperature: float
    num_questions: int
    order: str
    at_once: bool
    speedup: float | None
    speedup_ci95: Ends
    baseline: SideFigures
    drafted: SideFigures
    acceptance: ServerAcceptance | None
    prompts: PromptCheck
    texts: TextCheck | None  # None: sampled
    failed: list[FailedPrompt] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)  # as of `Questions`
    slo: Slo | None = None
    commands: list[str] = field(default_factory=list)  # of both servers, or their addresses
    baseline_drafter: str = WITHOUT  # what the baseline drafts with instead
    doubts: list[str] = field(default_factory=list)  # whether the two servers differ by their drafts alone
    models: list[str] = field(default_factory=list)  # by whose names both servers were asked
    learnt: float | None = None  # share of the questions that the head was trained on; None: not known
    repetition: Repetition = field(default_factory=Repetition)  # of the texts without drafts

    @property
    def is_flattered(self) -> bool:
        """Whether its look-ups found earlier answers to these very prompts."""
        looks_up = self.drafter.startswith("ngram") or LOOKUP_SUFFIX in self.drafter
        return self.drafter.startswith(REMEMBERING) or looks_up and SERVER_ENGINES[self.engine].remembers

    @property
    def is_beside_none(self) -> bool:
        return self.baseline_drafter == WITHOUT

    @property
    def pays(self) -> bool:
        """Whether the interval proves that it is faster with drafts."""
        low = self.speedup_ci95[0]
        return low is not None and low > 1

    def rests_on_loops(self, num_results: int) -> bool:
        """Whether it is not proved among so many results to be faster on the questions whose texts do not loop."""
        if (left := self.repetition.without_loops) is None:
            return False
        others = replace(self, num_questions=left.num_timed, speedup=left.speedup, speedup_ci95=left.speedup_ci95)
        return lower_end_among(others, num_results) <= 1

    @property
    def loses_answers(self) -> bool:
        """Whether more questions fail with drafts than without."""
        return self.drafted.num_failed > self.baseline.num_failed

    @property
    def is_right(self) -> bool:
        """Whether no text is known to be wrong, and drafts make no question fail."""
        return not self.loses_answers and not (self.texts and self.texts.num_wrong)


def deployable(results: Sequence[ServedResult]) -> list[ServedResult]:
    """Those with a gain proved among so many, without texts that loop, wrong texts and remembered answers."""
    num = len(results)
    proved = [one for one in results if lower_end_among(one, num) > 1 and not one.rests_on_loops(num)]
    return [one for one in proved if one.is_right and not one.is_flattered]


def lower_end_among(result: ServedResult, num_results: int) -> float:
    """The lower end of its interval, where it was chosen for that end among so many results: each then has to hold in
    all but a share 0.05 / num_results (Bonferroni), by t over the pairs of blocks; over the questions where these are
    asked one at a time and are fewer, or the pairs too few for an interval. 0 if it has no interval."""
    from scipy.special import stdtrit

    low = result.speedup_ci95[0]
    if low is None or not result.speedup:
        return 0.0
    pairs = len(result.order) // 2
    counts = [pairs] * (pairs >= LEAST_TIMED or not result.load.is_single)
    counts += [result.num_questions] * result.load.is_single
    freedom = max(1, min(counts) - 1)
    wider = float(stdtrit(freedom, 1 - 0.025 / num_results) / stdtrit(freedom, 0.975))
    return result.speedup * (low / result.speedup) ** wider
