"""What the chosen head really saves on held-out prompts, and what follows: to deploy it, something else, or nothing."""

from dataclasses import replace
from pathlib import Path
from shlex import quote

from ...eval.measurement.metrics import LEAST_TIMED
from ...eval.measurement.result import Result
from ...eval.report.document import read_report
from ...eval.report.recommendation import recommend
from ...heads.export.folder import read_folder
from ...heads.export.llamacpp import Conversion, serve_lines
from ...heads.export.write import serve_commands
from .candidates import OURS
from .journal import Decision, Machine

SIDES = 3.4  # the time of all sides (no drafts, the head, look-ups, both, checks of texts) in that without drafts
EXPORTING = 2  # commands that start behind the evaluation where another engine serves: export, check
FREE = "suffix"  # the drafter that needs no training
BOTH = "hybrid"  # it and a head together
WITH_ANSWERS = "+answers"  # behind these names, where they look up the target's answers too
OURS_ALONE = tuple(name + more for name in (FREE, BOTH) for more in ("", WITH_ANSWERS))  # what no other engine has so
SAFETY = 0.8  # share of the time that a plan fills


def evaluation_seconds(num_batches: int, machine: Machine, *, max_new_tokens: int) -> float:
    """Estimated seconds of an evaluation of that many batches, at least LEAST_TIMED."""
    per_batch = SIDES * max_new_tokens * machine.baseline_ms / 1000
    return machine.start_seconds + max(num_batches, LEAST_TIMED) * per_batch / SAFETY


def ending_seconds(num_batches: int, machine: Machine, *, engine: str, max_new_tokens: int) -> float:
    """Estimated seconds of evaluation, export and check."""
    exporting = EXPORTING * machine.start_seconds * (engine != OURS)
    return evaluation_seconds(num_batches, machine, max_new_tokens=max_new_tokens) + exporting


def prompts_within(seconds: float, machine: Machine, *, max_new_tokens: int, most: int) -> int:
    """How many prompts can be measured in that many seconds: whole batches, at least LEAST_TIMED of them."""
    per_batch = SIDES * max_new_tokens * machine.baseline_ms / 1000
    batches = int((seconds - machine.start_seconds) * SAFETY / per_batch)
    return min(max(batches, LEAST_TIMED) * machine.batch_size, most)


def evaluate_words(
    target: str,
    head: str,
    answers: str,
    prompts: Path,
    output: Path,
    machine: Machine,
    *,
    limit: int,
    max_new_tokens: int,
    length: int,
) -> list[str]:
    """`headstart eval` of the head, of look-ups, and of both. Args: head: its folder; empty: look-ups alone. answers:
    the file to look up; empty: the text alone. length: the head's K."""
    wanted = [f"head:{head}@{length}", f"{BOTH}:{head}{behind(answers)}"] if head else []
    drafters = [word for spec in (*wanted, FREE + behind(answers)) for word in ("--drafter", spec)]
    return [
        *("eval", "--target", target, "--dtype", machine.dtype, "--device", machine.device),
        *drafters,
        *("--prompts", str(prompts), "--limit", str(limit), "--max-new-tokens", str(max_new_tokens)),
        *("--batch-size", str(machine.batch_size), "--repeats", "1", "--output", str(output)),
    ]


def behind(answers: str) -> str:
    """The suffix of a drafter's name that gives it a file of answers."""
    return f":{answers}" if answers else ""


def decide(report: Path, *, head: str, answers: str, engine: str, exported: str, target: str) -> Decision:
    """By the report's recommendation. Args: head: its folder; empty: none was trained. exported: folder, or empty."""
    ours = [result for result in read_report(report).ours if engine == OURS or result.drafter not in OURS_ALONE]
    advice = recommend(ours)
    best = advice.best
    if not advice.is_deployable or best is None:
        return Decision(False, advice.headline, advice.reasons, advice.cautions)
    file = behind(answers)
    specs = {
        FREE: FREE,
        BOTH: f"{BOTH}:{head}",
        FREE + WITH_ANSWERS: FREE + file,
        BOTH + WITH_ANSWERS: f"{BOTH}:{head}{file}",
    }
    drafter = specs.get(best.drafter, f"head:{head}")
    commands = serving(best, drafter, head=head, engine=engine, exported=exported, target=target)
    cautions = [*advice.cautions, *losing(best)]
    interval = list(best.speedup_ci95)
    return Decision(True, advice.headline, advice.reasons, cautions, drafter, commands, best.speedup, interval)


def serving(best: Result, drafter: str, *, head: str, engine: str, exported: str, target: str) -> list[str]:
    """Command lines of the engine that draft so; of our own, which serves nobody, the one that decodes with it."""
    length = best.num_draft_tokens
    if engine == OURS:
        how = f"--drafter {quote(drafter)} --num-draft-tokens {length} --batch-size {best.batch_size}"
        return [f"headstart eval --target {quote(target)} {how} --prompts PROMPTS.jsonl --output DIR"]
    folder = read_folder(head, target=target)
    folder = replace(folder, record=replace(folder.record, head={**folder.own, "num_depths": length}))
    if engine == "llama.cpp":
        return serve_lines(folder, exported, Conversion())
    found = serve_commands(folder, exported, to=engine, target=target)
    return [found[engine]] if engine in found else []


def losing(best: Result) -> list[str]:
    """The domains of the traffic on which a result is not shown to be faster, in words."""
    return [
        f"Not shown to be faster on prompts of {name}: {part.speedup:.2f} times the speed."
        for name, part in best.by_domain.items()
        if part.speedup is not None and (part.speedup_ci95[0] or 0) <= 1
    ]
