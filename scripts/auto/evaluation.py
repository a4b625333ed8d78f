"""Evaluates the chosen head on held-out prompts, and decides what to deploy: the head, something else, or nothing."""

from dataclasses import replace
from pathlib import Path
from shlex import quote

from ...eval.measurement.metrics import LEAST_TIMED
from ...eval.measurement.result import Result
from ...eval.report.document import read_report
from ...eval.report.recommendation import recommend
from ...heads.export.llamacpp import Conversion, serve_lines
from ...heads.export.write import read_folder, serve_commands
from .candidates import OURS
from .journal import Decision, Machine

# time of the whole evaluation (baseline, head, look-ups, both together, checks of texts) relative to the baseline alone
SIDES = 3.4
SAFETY = 0.8  # share of the available time that is planned for
EXPORTING = 2  # commands started after the evaluation for another engine: export and check

LOOKUP = "suffix"  # the drafter that looks up and needs no training
HYBRID = "hybrid"  # look-ups and a head together
WITH_ANSWERS = "+answers"  # suffix of a drafter's name if it also looks up the target's answers
LOOKUPS = tuple(name + suffix for name in (LOOKUP, HYBRID) for suffix in ("", WITH_ANSWERS))  # our engine only


def seconds_per_batch(machine: Machine, max_new_tokens: int) -> float:
    """Estimated seconds to evaluate one batch of prompts."""
    return SIDES * max_new_tokens * machine.baseline_ms / 1000


def evaluation_seconds(num_batches: int, machine: Machine, *, max_new_tokens: int) -> float:
    """Estimated seconds of an evaluation of that many batches, but at least of LEAST_TIMED."""
    timed = max(num_batches, LEAST_TIMED) * seconds_per_batch(machine, max_new_tokens)
    return machine.start_seconds + timed / SAFETY


def ending_seconds(num_batches: int, machine: Machine, *, engine: str, max_new_tokens: int) -> float:
    """Estimated seconds of evaluation, export and check."""
    exporting = 0.0 if engine == OURS else EXPORTING * machine.start_seconds
    return evaluation_seconds(num_batches, machine, max_new_tokens=max_new_tokens) + exporting


def prompts_within(seconds: float, machine: Machine, *, max_new_tokens: int, num_prompts: int) -> int:
    """How many of `num_prompts` prompts can be evaluated in that many seconds: whole batches, at least LEAST_TIMED."""
    batches = int((seconds - machine.start_seconds) * SAFETY / seconds_per_batch(machine, max_new_tokens))
    return min(max(batches, LEAST_TIMED) * machine.batch_size, num_prompts)


def eval_arguments(
    target: str,
    head: str,
    answers: str,
    prompts: Path,
    output: Path,
    machine: Machine,
    *,
    limit: int,
    max_new_tokens: int,
    num_draft_tokens: int,
) -> list[str]:
    """Arguments of a `headstart eval` of the head, of look-ups, and of both together.

    Args:
        head: folder; empty: look-ups only.
        answers: file of answers to look up; empty: only the row's own text is looked up.
        limit: number of prompts.
        num_draft_tokens: K of the head.
    """
    specs = [f"head:{head}@{num_draft_tokens}", f"{HYBRID}:{head}{answers_suffix(answers)}"] if head else []
    specs.append(LOOKUP + answers_suffix(answers))
    return [
        *("eval", "--target", target, "--dtype", machine.dtype, "--device", machine.device),
        *(argument for spec in specs for argument in ("--drafter", spec)),
        *("--prompts", str(prompts), "--limit", str(limit), "--max-new-tokens", str(max_new_tokens)),
        *("--batch-size", str(machine.batch_size), "--repeats", "1", "--output", str(output)),
    ]


def answers_suffix(answers: str) -> str:
    """The part of a drafter's specification that names a file of answers; empty without one."""
    return f":{answers}" if answers else ""


def decide(report: Path, *, head: str, answers: str, engine: str, exported: str, target: str) -> Decision:
    """Decides by the recommendation of a report. For other engines than ours, look-ups are not considered.

    Args:
        report: report.json of the evaluation.
        head: folder; empty if no head was trained.
        answers: file of answers to look up, or empty.
        exported: folder in which the head is or will be exported.
    """
    results = [result for result in read_report(report).ours if engine == OURS or result.drafter not in LOOKUPS]
    advice = recommend(results)
    best = advice.best
    if not advice.is_deployable or best is None:
        return Decision(False, advice.headline, advice.reasons, advice.cautions)
    file = answers_suffix(answers)
    specs = {
        LOOKUP: LOOKUP,
        HYBRID: f"{HYBRID}:{head}",
        LOOKUP + WITH_ANSWERS: LOOKUP + file,
        HYBRID + WITH_ANSWERS: f"{HYBRID}:{head}{file}",
    }
    drafter = specs.get(best.drafter, f"head:{head}")
    return Decision(
        deploy=True,
        headline=advice.headline,
        reasons=advice.reasons,
        cautions=[*advice.cautions, *domains_without_gain(best)],
        drafter=drafter,
        commands=serving_commands(best, drafter, head=head, engine=engine, exported=exported, target=target),
        speedup=best.speedup,
        speedup_ci95=list(best.speedup_ci95),
    )


def serving_commands(best: Result, drafter: str, *, head: str, engine: str, exported: str, target: str) -> list[str]:
    """Command lines that serve the best result in the engine. Our own engine has no server: it decodes prompts."""
    length = best.num_draft_tokens
    if engine == OURS:
        how = f"--drafter {quote(drafter)} --num-draft-tokens {length} --batch-size {best.batch_size}"
        return [f"headstart eval --target {quote(target)} {how} --prompts PROMPTS.jsonl --output DIR"]
    folder = read_folder(head, target=target)
    folder = replace(folder, record=replace(folder.record, head={**folder.own, "num_depths": length}))
    if engine == "llama.cpp":
        return serve_lines(folder, exported, Conversion())
    commands = serve_commands(folder, exported, to=engine, target=target)
    return [commands[engine]] if engine in commands else []


def domains_without_gain(best: Result) -> list[str]:
    """A caution for each domain of the prompts in which the speedup's confidence interval does not lie above 1."""
    return [
        f"Not shown to be faster on prompts of {name}: {part.speedup:.2f} times the speed."
        for name, part in best.by_domain.items()
        if part.speedup is not None and (part.speedup_ci95[0] or 0) <= 1
    ]
