"""Measuring transformers' own decoding with the same target, prompts and drafter, interleaved with our engine."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ...heads.drafter import Drafter
from ...heads.loading import quiet_loading
from ...heads.target import Target
from ..decoding.draft_setting import chain
from ..drafters.draft_model import DraftModelDrafter
from ..drafters.lookup import NgramDrafter
from ..suites.prompts import FailedPrompt, Suite
from .config import MeasureConfig
from .lossless import LosslessReport, Unproved, compare_texts
from .metrics import rounded, speedup_of
from .passes import measure_parts
from .proof.own_forward import generation_config
from .result import Result
from .resume import BatchStore, Record, kept_in
from .runner import Runner
from .summary import unmeasured, with_speedup

LENGTH_SLACK = 0.1  # by which answers may differ in length to be compared in time

Decode = Callable[[list[int]], tuple[list[int], int]]  # a prompt to its new tokens and the number of target forwards


@dataclass
class TimedAnswers:
    """What one side decoded, prompt by prompt."""

    seconds: list[float] = field(default_factory=list)  # of whole answers, prefill included, over all repeats
    texts: list[list[int]] = field(default_factory=list)  # new tokens of the first repeat
    num_forwards: int = 0  # of the target in the first repeat, the prefill included

    def seconds_for(self, texts: Sequence[Sequence[int]], at: Sequence[int]) -> list[float]:
        """Time of the prompts `at`, for as many tokens as these texts have; all of it if an answer ended at once."""
        answers = ((self.seconds[i], self.texts[i], texts[i]) for i in at)
        return [seconds * len(new) / len(own) if own else seconds for seconds, own, new in answers]


@torch.no_grad()
def compare_transformers(
    target: Target,
    drafter: Drafter | None,
    suite: Suite,
    config: MeasureConfig,
    *,
    name: str,
    on_prompt: Callable[[], object] = lambda: None,
    store: BatchStore | None = None,
) -> Result | None:
    """A result for transformers' own decoding: greedy, batch 1, whole answers on all sides.

    Without a drafter its plain `generate` runs against our baseline. With one, its assisted generation (draft model)
    or prompt lookup (n-gram) runs against our speculation with the same drafter and K, and our baseline beside them.

    Args: name, store: as `measure` takes them. on_prompt: called after each prompt, for a progress bar.

    Returns: the result as docs/report_schema.md has it, or None where transformers has no such drafter: heads,
        suffixes, and draft models of another vocabulary size, which it refuses.
    """
    if not has_counterpart(target, drafter):
        return None
    config = comparable(config, drafter)
    stored = kept_in(store, target, drafter, suite, config, name=name, engine="transformers")
    theirs = their_decoding(target, drafter, config)
    return time_beside(
        theirs, target, drafter, suite, config, engine="transformers", name=name, on_prompt=on_prompt, stored=stored
    )


def comparable(config: MeasureConfig, drafter: Drafter | None) -> MeasureConfig:
    """The settings for comparing with another engine: greedy, batch 1, chains; without a drafter K is 0."""
    return MeasureConfig(
        setting=chain(0) if drafter is None else config.setting_for(drafter),
        max_new_tokens=config.max_new_tokens,
        steps=config.steps,
        num_repeats=config.num_repeats,
        seed=config.seed,
    )


def time_beside(
    their_way: AbstractContextManager[Decode],
    target: Target,
    drafter: Drafter | None,
    suite: Suite,
    config: MeasureConfig,
    *,
    engine: str,
    name: str,
    on_prompt: Callable[[], object],
    stored: tuple[BatchStore, str] | None,
) -> Result:
    """Another engine's decoding in turns with our baseline and, where there is a drafter, our speculation."""
    if drafter is not None:
        drafter.leave_out(suite.prompts, suite.questions)
    with their_way as theirs:
        ways = [theirs, *our_decoding(target, drafter, suite.prompts, config)]
        sides, answered, failed = decode_in_turns(ways, suite, config, on_prompt=on_prompt, stored=stored)
    suite = replace(suite.subset(answered), failed=[*suite.failed, *failed])
    lossless = text_check(target, drafter, suite, config, sides[0].texts, sides[-1].texts)
    return result_of(suite, config, [sides[0], sides[1], sides[-1]], lossless, engine=engine, name=name)


def has_counterpart(target: Target, drafter: Drafter | None) -> bool:
    """Whether transformers can decode with this drafter."""
    if isinstance(drafter, DraftModelDrafter):
        return target.config.vocab_size == drafter.model.config.vocab_size
    return drafter is None or isinstance(drafter, NgramDrafter)


def our_decoding(
    target: Target, drafter: Drafter | None, prompts: list[list[int]], config: MeasureConfig
) -> list[Decode]:
    """Our engine, greedy, one prompt at a time: the baseline, and speculation where there is a drafter."""

    def decode(run: Runner, prompt: list[int]) -> tuple[list[int], int]:
        generation = run([prompt], config.seed)
        return generation.token_ids[0], len(generation.rounds)

    sides = [None] if drafter is None else [None, drafter]
    return [partial(decode, Runner(target, which, prompts, config)) for which in sides]


@contextmanager
def their_decoding(target: Target, drafter: Drafter | None, config: MeasureConfig) -> Iterator[Decode]:
    """transformers' `generate` with its defaults (a dynamic cache) and the options of this drafter.

    The checkpoints' own generation configs, which may sample or penalise repetition, are replaced meanwhile.
    """
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": config.max_new_tokens}
    num_draft = config.setting.num_draft_tokens if config.setting else 0
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    def run(prompt: list[int]) -> tuple[list[int], int]:
        before = calls[0]
        ids = torch.tensor([prompt], device=target.device)  # [1, T]
        new = target.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
        return new, calls[0] - before

    with ExitStack() as stack:
        stack.enter_context(quiet_loading())  # transformers warns about its own assisted generation
        eos = sorted(target.eos_token_ids) or None
        stack.enter_context(generation_config(target.model, eos_token_id=eos, pad_token_id=0))
        if isinstance(drafter, NgramDrafter):
            options |= {"prompt_lookup_num_tokens": num_draft, "max_matching_ngram_size": drafter.max_ngram}
        elif isinstance(drafter, DraftModelDrafter):
            options["assistant_model"] = drafter.model.model
            # read from the assistant's own config, not from the arguments of `generate`
            constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
            assistant = generation_config(drafter.model.model, num_assistant_tokens=num_draft, **constant)
            stack.enter_context(assistant)
        stack.callback(target.model.register_forward_pre_hook(count).remove)
        yield run


def decode_in_turns(
    ways: Sequence[Decode],
    suite: Suite,
    config: MeasureConfig,
    *,
    on_prompt: Callable[[], object],
    stored: tuple[BatchStore, str] | None = None,
) -> tuple[list[TimedAnswers], list[int], list[FailedPrompt]]:
    """Time several ways to decode in turns, prompt by prompt after a warm-up, so that drifts of the machine affect all;
    the first one changes every time.

    With recorded steps, every prompt is decoded once before it is timed, so that its steps have been recorded.

    Args: stored: the store of prompts that were timed, and their key in it.

    Returns: the answers of each way, the indices of the prompts that they are of, and the prompts that failed.
    """

    def warm_up(part: Suite) -> None:
        for way in ways:
            way(part.prompts[0])

    def time_part(number: int, part: Suite) -> Record:
        return {"ways": time_prompt(ways, part.prompts[0], number=number, num_repeats=config.num_repeats)}

    parts = [suite.subset([i]) for i in range(len(suite.prompts))]
    warms_each = config.steps != "eager"
    records, failed = measure_parts(parts, time_part, warm_up, stored=stored, on_part=on_prompt, warms_each=warms_each)
    sides = [TimedAnswers() for _ in ways]
    for record in records.values():
        for side, (seconds, new, num_forwards) in zip(sides, record["ways"], strict=True):
            side.seconds.append(seconds)
            side.texts.append(new)
            side.num_forwards += num_forwards
    return sides, list(records), failed


def time_prompt(ways: Sequence[Decode], prompt: list[int], *, number: int, num_repeats: int) -> list[list[Any]]:
    """Of each way: seconds over all repeats, and of the first repeat new tokens and the number of target forwards."""
    records: list[list[Any]] = [[0.0, [], 0] for _ in ways]
    for repeat in range(num_repeats):
        for turn in range(len(ways)):
            which = (number + repeat + turn) % len(ways)
            started = time.perf_counter()
            new, num_forwards = ways[which](prompt)
            records[which][0] += time.perf_counter() - started
            if repeat == 0:
                records[which][1:] = new, num_forwards
    return records


def text_check(
    target: Target,
    drafter: Drafter | None,
    suite: Suite,
    config: MeasureConfig,
    theirs: Sequence[list[int]],
    ours: Sequence[list[int]],
) -> LosslessReport:
    """Our texts compared with theirs. Ours that differ are decoded again, for their rounds, and proved."""
    run = Runner(target, drafter, suite.prompts, config)
    report = LosslessReport()

    def prove(prompt: list[int], text: list[int]) -> Unproved:
        again = run([prompt], config.seed)
        # their text need not be the model's; and if our second text differs from the first, its proof proves nothing
        return run.first_unproved([prompt], again, [[]]) if again.token_ids == [text] else [0]

    for prompt, source, their_text, text in zip(suite.prompts, suite.sources, theirs, ours, strict=True):
        report += compare_texts([their_text], [text], partial(prove, prompt, text), numbers=[source.number])
    return report


def are_of_a_length(lengths: Sequence[int]) -> bool:
    """Whether answers are so nearly of one length that their times, prefill included, can be scaled to it."""
    return max(lengths) - min(lengths) <= max(1, LENGTH_SLACK * max(lengths))


def result_of(
    suite: Suite,
    config: MeasureConfig,
    sides: Sequence[TimedAnswers],
    lossless: LosslessReport,
    *,
    engine: str,
    name: str,
) -> Result:
    """Of another engine's decoding; timed are the prompts that all sides answered at about the same length.

    Args: sides: its own, our baseline's, and ours, which may be the same."""
    theirs, texts = sides[0], sides[0].texts
    alike = [i for i in range(len(texts)) if are_of_a_length([len(side.texts[i]) for side in sides])]
    num_tokens, timed_tokens = sum(map(len, texts)), sum(len(texts[i]) for i in alike)
    their_seconds, base_seconds, our_seconds = (side.seconds_for(texts, alike) for side in sides)

    def per_second(seconds: list[float]) -> float | None:
        return rounded(timed_tokens * config.num_repeats / sum(seconds), 2) if seconds else None

    def per_token_ms(seconds: list[float]) -> float | None:
        return rounded(1000 * sum(seconds) / config.num_repeats / timed_tokens, 3) if seconds else None

    assert config.setting is not None
    empty = unmeasured(suite, config, config.setting, engine=engine, drafter=name)
    result = with_speedup(empty, list(zip(base_seconds, their_seconds, strict=True)))
    over_theirs, over_theirs_interval = speedup_of(list(zip(their_seconds, our_seconds, strict=True)))
    return replace(
        result,
        num_tokens=num_tokens,
        num_rounds=theirs.num_forwards,
        num_committed=num_tokens,
        acceptance_length=rounded(num_tokens / theirs.num_forwards if texts else None),
        tokens_per_second=per_second(their_seconds),
        baseline_tokens_per_second=per_second(base_seconds),
        end_to_end_speedup=result.speedup,
        time_per_output_token_ms=per_token_ms(their_seconds),
        baseline_time_per_output_token_ms=per_token_ms(base_seconds),
        lossless=lossless,
        ours_tokens_per_second=per_second(our_seconds),
        ours_over_theirs=over_theirs,
        ours_over_theirs_ci95=over_theirs_interval,
    )
