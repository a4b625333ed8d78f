"""Measuring what a head saves in llama-server: with and without it, in turns, prompt by prompt, as for our engine."""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ....configs.errors import BadInput
from ....heads.target import Target
from ...decoding.draft_setting import chain
from ...drafters.llamacpp_cache import MOST_DRAFTED
from ...suites.prompts import Suite
from ..batches import first_prompts
from ..config import MeasureConfig
from ..lossless import LosslessReport, compare_texts
from ..metrics import rounded
from ..passes import measure_parts
from ..result import SERVER, Observation, Result
from ..resume import BatchStore, Record, kept_in
from ..summary import unmeasured, with_speedup
from .llama_server import LlamaServer, ServerAnswer, ServerFiles

SWEPT = range(1, 8)  # values of K if none is given
WARM_TOKENS = 8  # that a server started for one answer writes before it
HEADROOM = 16  # context positions that the server needs beyond a prompt and its answer


def swept(files: ServerFiles) -> Sequence[int]:
    """The values of K to measure if none is given; look-ups have only one."""
    return (MOST_DRAFTED,) if files.looks_up else SWEPT


@dataclass(frozen=True)
class ServedAnswers:
    """A prompt's answers with the head and without it, one per repeat."""

    drafted: list[ServerAnswer]
    plain: list[ServerAnswer]

    @property
    def seconds(self) -> tuple[float, float]:
        """Decoding time without and with the head, for the number of tokens decoded with it; without prefills."""
        per_token = decode_seconds(self.plain) / max(1, count_decoded(self.plain))
        return per_token * count_decoded(self.drafted), decode_seconds(self.drafted)


def count_decoded(answers: Sequence[ServerAnswer]) -> int:
    """Number of tokens, without the first of each answer, which the prefill gives."""
    return sum(max(0, answer.num_tokens - 1) for answer in answers)


def decode_seconds(answers: Sequence[ServerAnswer]) -> float:
    return sum(answer.decode_ms for answer in answers) / 1000


def measure_served(
    target: Target,
    files: ServerFiles,
    suite: Suite,
    config: MeasureConfig,
    lengths: Sequence[int],
    *,
    on_prompt: Callable[[], object] = lambda: None,
    store: BatchStore | None = None,
) -> list[Result]:
    """A result per K, greedy, batch 1. Two servers run at a time, of which one is busy.

    Args: target: whose tokenizer made the prompts. lengths: values of K. on_prompt: called after each prompt and K.
    Raises: BadInput if a server does not start, and on settings that are not supported.
    """
    check_served_settings(config)
    if files.looks_up and list(lengths) != [MOST_DRAFTED]:
        raise BadInput(f"--num-draft-tokens: llama-server looks up at most {MOST_DRAFTED} tokens, as it decides")
    max_length = max(map(len, suite.prompts)) + config.max_new_tokens + HEADROOM
    name, results = files.head.name if files.head else "none", []
    changed = [str(path.stat().st_mtime) for path in files.read]  # so that other files are measured anew
    with LlamaServer(files.command(max_length=max_length)) as plain:
        for length in lengths:
            command = files.command(max_length=max_length, num_draft_tokens=length)
            config = replace(config, setting=chain(length))
            stored = kept_in(store, target, None, suite, config, name=name, engine=" ".join([*command, *changed]))
            per_round = 0 if files.looks_up else length
            how = {"on_prompt": on_prompt, "per_round": per_round, "stored": stored}
            with ExitStack() as stack:
                afresh = partial(answer_afresh, command)
                drafting = afresh if files.looks_up else stack.enter_context(LlamaServer(command)).answer
                results.append(one_length([drafting, plain.answer], suite, config, name, **how))
    return results


def answer_afresh(command: Sequence[str], prompt: list[int], *, max_new_tokens: int) -> ServerAnswer:
    """The answer of a server started for it: one that looks up keeps what it has seen, this prompt's earlier answers
    included."""
    with LlamaServer(command) as server:
        server.answer(prompt[:1], max_new_tokens=WARM_TOKENS)
        return server.answer(prompt, max_new_tokens=max_new_tokens)


def check_served_settings(config: MeasureConfig) -> None:
    if config.temperature or config.accept.name != "exact" or config.stop_strings or config.batch_size != 1:
        raise BadInput("--engine llama-server: is measured greedily, at batch 1, with no --stop and no other --accept")


def one_length(
    sides: Sequence[Callable[..., ServerAnswer]],
    suite: Suite,
    config: MeasureConfig,
    name: str,
    *,
    on_prompt: Callable[[], object],
    per_round: int,
    stored: tuple[BatchStore, str] | None,
) -> Result:
    """Measure both sides, as `LlamaServer.answer` each, on all prompts at one K."""

    def ask(prompt: list[int], which: int) -> ServerAnswer:
        return sides[which](prompt, max_new_tokens=config.max_new_tokens)

    def warm_up(part: Suite) -> None:
        for which in range(2):
            ask(part.prompts[0], which)

    def both(number: int, part: Suite) -> Record:
        answers_by_side: list[list[dict[str, Any]]] = [[], []]
        for repeat in range(config.num_repeats):
            for which in (0, 1) if (number + repeat) % 2 == 0 else (1, 0):
                answers_by_side[which].append(asdict(ask(part.prompts[0], which)))
        return {"sides": answers_by_side}

    parts = [suite.subset([i]) for i in range(len(suite.prompts))]
    answered, failed = measure_parts(parts, both, warm_up, stored=stored, on_part=on_prompt)
    answers = [
        ServedAnswers(*([ServerAnswer(**one) for one in side] for side in record["sides"]))
        for record in answered.values()
    ]
    suite = replace(suite.subset(list(answered)), failed=[*suite.failed, *failed])
    return result_of(suite, config, answers, name=name, per_round=per_round)


def result_of(
    suite: Suite, config: MeasureConfig, served: Sequence[ServedAnswers], *, name: str, per_round: int
) -> Result:
    """A result with the figures that a server's counts allow, without those of single rounds and positions.

    Args: per_round: tokens drafted in every round; 0: varying.
    """
    setting = config.setting
    assert setting is not None
    empty = unmeasured(suite, config, setting, engine=SERVER, drafter=name)
    if not served:
        return empty
    firsts, length = [one.drafted[0] for one in served], setting.num_draft_tokens
    num_rounds, num_committed = sum(answer.num_rounds(per_round) for answer in firsts), count_decoded(firsts)
    accepted = (num_committed - num_rounds) / num_rounds if num_rounds else None
    plain_seconds, seconds = (sum(times) for times in zip(*(one.seconds for one in served), strict=True))
    num_tokens = sum(count_decoded(one.drafted) for one in served)
    prefills = [answer.prompt_ms for one in served for answer in one.drafted]
    plain_prefills = [answer.prompt_ms for one in served for answer in one.plain]
    whole, plain_whole = seconds + sum(prefills) / 1000, plain_seconds + sum(plain_prefills) / 1000
    seen = observations(suite, served, per_round=per_round)
    return replace(
        with_speedup(empty, [(unit.baseline_seconds, unit.seconds) for unit in seen]),
        observations=seen,
        num_tokens=sum(answer.num_tokens for answer in firsts),
        num_rounds=num_rounds,
        num_committed=num_committed,
        acceptance_length=None if accepted is None else rounded(1 + accepted),
        acceptance_rate=[rounded(accepted) if length == 1 else None] * length,
        tokens_per_second=rounded(num_tokens / seconds if seconds else None, 2),
        baseline_tokens_per_second=rounded(num_tokens / plain_seconds if plain_seconds else None, 2),
        end_to_end_speedup=rounded(plain_whole / whole if whole else None),
        ttft_ms=rounded(statistics.median(prefills), 3),
        baseline_ttft_ms=rounded(statistics.median(plain_prefills), 3),
        time_per_output_token_ms=rounded(1000 * seconds / max(1, num_tokens), 3),
        baseline_time_per_output_token_ms=rounded(1000 * plain_seconds / max(1, num_tokens), 3),
        lossless=compare_answers(suite, served),
    )


def observations(suite: Suite, served: Sequence[ServedAnswers], *, per_round: int) -> list[Observation]:
    """What the intervals are computed from: the prompts with something to time, those of one chat and those that are
    asked twice together, as in `timed_units`."""
    firsts, units = first_prompts([suite]), dict[tuple[int, ...], list[tuple[int, ServedAnswers]]]()
    for source, one in zip(suite.sources, served, strict=True):
        if all(one.seconds):
            units.setdefault(firsts[source.first], []).append((source.number, one))
    seen = []
    for unit in units.values():
        answers = [one.drafted[0] for _, one in unit]
        baseline, drafted = zip(*(one.seconds for _, one in unit), strict=True)
        num_rounds = sum(answer.num_rounds(per_round) for answer in answers)
        numbers = [number for number, _ in unit]
        seen.append(Observation(numbers, num_rounds, count_decoded(answers), sum(baseline), sum(drafted)))
    return seen


def compare_answers(suite: Suite, served: Sequence[ServedAnswers]) -> LosslessReport:
    """All answers with the head compared with those without it. A text that differs cannot be replayed in the server in
    forwards of equal shapes, so it stays unexplained."""
    whole, seen = LosslessReport(), set[tuple[int, ...]]()
    for source, one in zip(suite.sources, served, strict=True):
        for answer in one.drafted:
            texts = [one.plain[0].token_ids], [answer.token_ids]
            whole += compare_texts(*texts, lambda: [0], numbers=[source.number], seen=seen)
    return whole
