"""What transformers' own decoding reaches on the same target, prompts and drafter, interleaved with our engine."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig

from ...configs.errors import BadInput
from ...heads.drafter import Drafter
from ...heads.loading import quiet_loading
from ...heads.target import Target
from ..drafters.draft_model import DraftModelDrafter
from ..drafters.lookup import NgramDrafter
from ..suites.prompts import Suite
from .bandwidth import baseline_bandwidth
from .breakdown import conventions
from .config import MeasureConfig, draft_length
from .measure import compared
from .metrics import Acceptance
from .passes import failures, runner
from .resume import Measured, settings_key
from .summary import rounded, speedup_of, speedup_percentiles, timing

Decode = Callable[[list[int]], tuple[list[int], int]]  # a prompt to its new tokens and the number of target forwards


@dataclass
class Timed:
    """What one way to decode did, prompt by prompt. seconds: of whole answers, prefill included, over all repeats.

    texts: new tokens. num_forwards: of the target, the prefill included; both of the first repeat. places: which of
    the prompts these are. failed: why the others are not among them.
    """

    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    num_forwards: int = 0
    places: list[int] = field(default_factory=list)
    failed: dict[int, Exception] = field(default_factory=dict)

    def seconds_for(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Time per prompt for as many tokens as these texts have."""
        return [s * len(new) / len(own) for s, own, new in zip(self.seconds, self.texts, texts, strict=True)]


@torch.no_grad()
def compare_transformers(
    target: Target,
    drafter: Drafter | None,
    suite: Suite,
    config: MeasureConfig,
    *,
    name: str,
    on_prompt: Callable[[], object] = lambda: None,
    store: Measured | None = None,
) -> dict[str, Any] | None:
    """A result entry for transformers' own decoding: greedy, batch 1, whole answers on all sides.

    Without a drafter its plain `generate` runs against our baseline. With one, its assisted generation (draft model)
    or prompt lookup (n-gram) runs against our speculation with the same drafter and K, and our baseline beside them.

    Args: name, store: as `measure` takes them. on_prompt: called after each prompt, for a progress bar.

    Returns: the entry of docs/report_schema.md, or None where transformers has no such drafter: heads, suffixes, and
        draft models of another vocabulary size, which it refuses.
    """
    if not has_counterpart(target, drafter):
        return None
    num_draft = draft_length(drafter, config.num_draft_tokens)
    kept = None
    if store is not None:
        key = settings_key(target, drafter, suite, asdict(config), name=name, engine="transformers", store=store)
        kept = store, key
    with their_decoding(target, drafter, config, num_draft=num_draft) as theirs_run:
        ways = [theirs_run, *our_decoding(target, drafter, suite.prompts, config)]
        timed = interleave(ways, suite.prompts, num_repeats=config.num_repeats, on_prompt=on_prompt, kept=kept,
                           rehearse=config.steps != "eager")  # fmt: skip
    theirs, baseline, ours = timed[0], timed[1], timed[-1]
    failed = [one for i, error in theirs.failed.items() for one in failures(suite.asked[i : i + 1], error)]
    suite = replace(suite.only(theirs.places), failed=[*suite.failed, *failed])
    return entry(target, suite, config, theirs, baseline, ours, name=name, num_draft=num_draft)


def has_counterpart(target: Target, drafter: Drafter | None) -> bool:
    """Whether transformers can decode with this drafter."""
    if isinstance(drafter, DraftModelDrafter):
        sizes = [one.config.vocab_size for one in (target, drafter.model)]
        return sizes[0] == sizes[1]
    return drafter is None or (isinstance(drafter, NgramDrafter) and drafter.min_ngram == 1)


def our_decoding(
    target: Target, drafter: Drafter | None, prompts: list[list[int]], config: MeasureConfig
) -> list[Decode]:
    """Our engine, greedy, one prompt at a time: the baseline, and speculation where there is a drafter."""
    greedy = replace(config, temperature=0.0, tree=None, accept="exact", stop_strings=())
    run = runner(target, drafter, prompts, greedy)

    def decode_with(which: Drafter | None) -> Decode:
        def decode(prompt: list[int]) -> tuple[list[int], int]:
            done = run([prompt], which, config.seed)
            return done.token_ids[0], len(done.rounds)

        return decode

    return [decode_with(which) for which in ([None] if drafter is None else [None, drafter])]


@contextmanager
def their_decoding(
    target: Target, drafter: Drafter | None, config: MeasureConfig, *, num_draft: int
) -> Iterator[Decode]:
    """transformers' `generate` with its defaults (a dynamic cache) and the options of this drafter, one prompt a time.

    Checkpoints' own generation configs, which may sample or penalise repetition, are set aside meanwhile.
    """
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": config.max_new_tokens}
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    def run(prompt: list[int]) -> tuple[list[int], int]:
        before = calls[0]
        ids = torch.tensor([prompt], device=target.device)  # [1, T]
        new = target.model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :].tolist()
        return new, calls[0] - before

    with ExitStack() as stack:
        stack.enter_context(quiet_loading())  # transformers warns of what its own assisted generation does
        eos = sorted(target.eos_token_ids) or None
        stack.enter_context(generation_config(target.model, eos_token_id=eos, pad_token_id=0))
        if isinstance(drafter, NgramDrafter):
            how |= {"prompt_lookup_num_tokens": num_draft, "max_matching_ngram_size": drafter.max_ngram}
        elif isinstance(drafter, DraftModelDrafter):
            how["assistant_model"] = drafter.model.model
            # read from the assistant's own config, not from what `generate` is told
            constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
            assistant = generation_config(drafter.model.model, num_assistant_tokens=num_draft, **constant)
            stack.enter_context(assistant)
        stack.callback(target.model.register_forward_pre_hook(count).remove)
        yield run


@contextmanager
def generation_config(model: Any, **values: Any) -> Iterator[None]:
    """The model with these generation settings alone."""
    kept = model.generation_config
    model.generation_config = GenerationConfig(**values)
    try:
        yield
    finally:
        model.generation_config = kept


def interleave(
    ways: Sequence[Decode],
    prompts: Sequence[list[int]],
    *,
    num_repeats: int,
    on_prompt: Callable[[], object],
    kept: tuple[Measured, str] | None = None,
    rehearse: bool = False,
) -> list[Timed]:
    """Time several ways to decode, after a warm-up, prompt by prompt and by turns, so that a drifting machine slows
    all of them; who goes first changes every time.

    Args: kept: where prompts that were timed are kept, and under which key. rehearse: decode every prompt once before
        it is timed, so that steps that are recorded have been.
    """
    timed = [Timed() for _ in ways]
    is_warm = False
    for i, prompt in enumerate(prompts):
        record = kept[0].get(kept[1], i) if kept else None
        if record is None:
            try:
                for way in () if is_warm and not rehearse else ways:  # not counted
                    way(prompt)
                is_warm = True
                record = {"ways": time_prompt(ways, prompt, number=i, num_repeats=num_repeats)}
            except BadInput:
                raise
            except Exception as error:  # as `measure_batches`: the other prompts stand
                timed[0].failed[i] = error.with_traceback(None)
                on_prompt()
                continue
            if kept:
                kept[0].add(kept[1], i, record)
        for one, (seconds, new, num_forwards) in zip(timed, record["ways"], strict=True):
            one.places.append(i)
            one.seconds.append(seconds)
            one.texts.append(new)
            one.num_forwards += num_forwards
        on_prompt()
    return timed


def time_prompt(ways: Sequence[Decode], prompt: list[int], *, number: int, num_repeats: int) -> list[list[Any]]:
    """Of each way: seconds over all repeats, and of the first repeat new tokens and the number of target forwards."""
    done: list[list[Any]] = [[0.0, [], 0] for _ in ways]
    for repeat in range(num_repeats):
        for turn in range(len(ways)):
            which = (number + repeat + turn) % len(ways)
            started = time.perf_counter()
            new, num_forwards = ways[which](prompt)
            done[which][0] += time.perf_counter() - started
            if repeat == 0:
                done[which][1:] = new, num_forwards
    return done


def entry(
    target: Target,
    suite: Suite,
    config: MeasureConfig,
    theirs: Timed,
    baseline: Timed,
    ours: Timed,
    *,
    name: str,
    num_draft: int,
) -> dict[str, Any]:
    """The result entry of what transformers did."""
    texts = theirs.texts
    num_tokens = sum(map(len, texts))
    seconds = [side.seconds_for(texts) for side in (theirs, baseline, ours)]
    speeds = [rounded(num_tokens * config.num_repeats / sum(one), 2) if one else None for one in seconds]
    per_token = [rounded(1000 * sum(one) / config.num_repeats / num_tokens, 3) if one else None for one in seconds]
    speedup, interval = speedup_of(list(zip(seconds[1], seconds[0], strict=True)))
    over_theirs, over_theirs_interval = speedup_of(list(zip(seconds[0], seconds[2], strict=True)))
    lossless = compared(target, suite, texts, ours.texts)
    return {
        "engine": "transformers",
        "drafter": name,
        "suite": suite.name,
        **suite.described(),
        "tree": "chain",
        "tree_shape": None,
        "num_drafted": num_draft,
        "draft_vocabulary": None,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "accept": "exact",
        "steps": config.steps,
        "batch_size": 1,
        "num_draft_tokens": num_draft,
        "num_prompts": len(suite.prompts),
        "failed": suite.failed,
        "max_new_tokens": config.max_new_tokens,
        "num_repeats": config.num_repeats,
        "num_tokens": num_tokens,
        "num_rounds": theirs.num_forwards,
        "num_committed": num_tokens,
        "acceptance_length": rounded(num_tokens / theirs.num_forwards if texts else None),
        "acceptance_rate": [],
        "tokens_per_second": speeds[0],
        "baseline_tokens_per_second": speeds[1],
        "speedup": rounded(speedup),
        "speedup_ci95": [rounded(x) for x in interval],
        **speedup_percentiles(zip(seconds[1], seconds[0], strict=True)),
        "conventions": conventions(Acceptance(0, 0, [], []), num_tokens=0),
        "end_to_end_speedup": rounded(speedup),
        "ttft_ms": None,
        "baseline_ttft_ms": None,
        "time_per_output_token_ms": per_token[0],
        "baseline_time_per_output_token_ms": per_token[1],
        "baseline_bandwidth": baseline_bandwidth(target, []),
        "timing": timing([], None),
        "by_segment": {},
        "by_context": {},
        "by_domain": {},
        "teacher_forced_acceptance_length": None,
        "lossless": vars(lossless),
        "sampling_check": None,
        "trained": None,
        "beyond_training": None,
        "asked_as_trained": None,
        "ours_tokens_per_second": speeds[2],
        "ours_over_theirs": rounded(over_theirs),
        "ours_over_theirs_ci95": [rounded(x) for x in over_theirs_interval],
    }
