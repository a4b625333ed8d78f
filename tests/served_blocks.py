"""Measurements of two stand-ins for servers, and a result of one as it would be."""

from typing import Any

from headstart.engines.servers.registry import SERVER_ENGINES
from headstart.eval.measurement.resume import BatchStore
from headstart.eval.served.blocks import ServedConfig, ServedDrafts, ServedSide, measure_in_servers
from headstart.eval.served.figures import Percentiles, SideFigures
from headstart.eval.served.load import Load
from headstart.eval.served.questions import PLAIN, Question
from headstart.eval.served.served_result import ServedResult
from headstart.eval.served.text_check import LosslessReport, PromptCheck, TextCheck
from serving_stand_in import listening

QUESTIONS = [Question(f"p.jsonl:{i}", PLAIN, {"prompt": [1, 5 + i]}, [1, 5 + i]) for i in range(6)]
ONE = Load(1)


def measured(
    plain, drafting, tmp_path, *, engine="vllm", loads=(ONE,), questions=QUESTIONS, name="", **how
) -> list[Any]:
    config = ServedConfig(loads, max_new_tokens=12, num_repeats=2, **how)
    with listening(plain) as first, listening(drafting) as second, BatchStore(tmp_path) as store:
        drafts = ServedDrafts("head", 4, (ServedSide(first, name=name), ServedSide(second)))
        return measure_in_servers(SERVER_ENGINES[engine], drafts, questions, config, store=store)


SIDE = SideFigures(12, 0, 0, 100.0, 50.0, Percentiles(), Percentiles(), None, Percentiles(), 0.1)


def served(drafter, size, low, *, unexplained=0) -> ServedResult:
    """One of twelve prompts in four pairs of blocks, whose interval begins at `low`."""
    checked = LosslessReport(checked=12, identical=12 - unexplained, unexplained=unexplained)
    how = "vllm", drafter, 4, Load(size), 96, 0.0, 12, "ABBAABBA", True
    texts, commands = TextCheck(checked, 12, 0), ["plain", "drafting"]
    ends = low, low + 0.4
    return ServedResult(*how, low + 0.2, ends, SIDE, SIDE, None, PromptCheck(), texts, commands=commands)
