"""The plan of a head in llama-server: its step times and its check in place of ours."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...configs.errors import BadInput
from ..decoding.draft_setting import DraftSetting
from ..measurement.config import MeasureConfig
from ..measurement.metrics import LEAST_TIMED
from ..measurement.result import Result
from ..measurement.servers.llama_server import ServerFiles
from ..measurement.servers.served import measure_served
from ..measurement.step_times import StepTime
from .accepting import evenly
from .budget import ENDS, FEWEST_TOKENS, SAFETY
from .document import Plan
from .planner import Planner, Scope, at_doublings
from .prediction import MOST_FINALISTS, Accepted, Cell


def exported_files(folder: Path, binary: Path | None, args: str) -> ServerFiles:
    """What `headstart export --to llama.cpp` wrote, as the server reads it. Raises BadInput if a file is missing."""
    if binary is None:
        raise BadInput(f"--served {folder}: name llama-server's binary with --server-bin or in LLAMA_SERVER")
    for name, how in (("head.gguf", ""), ("target.gguf", " and --target-outtype bf16")):
        if not (folder / name).is_file():
            raise BadInput(
                f"--served {folder}: no {name}; headstart export --to llama.cpp --outtype bf16{how} writes it"
            )
    return ServerFiles(binary, folder / "target.gguf", folder / "head.gguf", args)


@dataclass
class ServedPlanner(Planner):
    """Of chains at batch 1, greedy, as llama-server drafts. What texts accept is decoded here: it accepts the same."""

    files: ServerFiles = field(kw_only=True)

    def __post_init__(self) -> None:
        config = self.config
        if config.measure.temperature or config.trees or list(config.batch_sizes) != [1] or config.contexts:
            raise BadInput("--served: plans chains at batch 1, greedily; leave out --temperature, --tree and --context")
        super().__post_init__()

    @property
    def trees(self) -> Sequence[str]:
        return ()

    def accept(self, settings: Sequence[DraftSetting], scope: Scope) -> tuple[list[Accepted], Scope]:
        """Of as many prompts and tokens as every stage has time for: a prediction is for those that check it."""
        suite, measure = scope.suite, scope.config.measure
        checked = {"all": len(settings), "advice": MOST_FINALISTS, "none": 0}[scope.config.check]
        runs = 2 * measure.num_repeats * checked
        stages = {"acceptance": len(settings), "step times": 2 * len(at_doublings(settings)), "check": runs}
        begins, answers = self.budget.used, math.inf  # answers: of full length, per setting
        for stage, number in stages.items():
            room = ENDS[stage] * self.budget.seconds - begins
            answers = min(answers, SAFETY * room / (max(number, 1) * max(answer_seconds(scope), 1e-6)))
            begins = ENDS[stage] * self.budget.seconds
        if answers < LEAST_TIMED:
            measure = replace(
                measure, max_new_tokens=max(FEWEST_TOKENS, int(measure.max_new_tokens * answers / LEAST_TIMED))
            )
        if answers < len(suite.prompts):
            suite = suite.subset(evenly(len(suite.prompts), max(LEAST_TIMED, int(answers))))
        return super().accept(settings, replace(scope, suite=suite, config=replace(scope.config, measure=measure)))

    def plan(self) -> Plan:
        """As its own, without what other engines take."""
        return replace(super().plan(), engine="llama-server", vllm_schedule=[], schedules=[], sglang_flags=None)

    def time(self, accepted: Sequence[Accepted], scope: Scope) -> tuple[list[StepTime], Scope]:
        """Rounds of llama-server, drafting included. Chains between the measured ones are left to the table."""
        timed = at_doublings([one.setting for one in accepted])
        results = self.serve(timed, scope, repeats=1)
        bases = [result.baseline_time_per_output_token_ms or 0.0 for result in results]
        if not all(bases) or not all(result.num_rounds for result in results):
            raise BadInput("--prompts: llama-server's answers end too early to be timed")
        step, context = statistics.median(bases), scope.workload.context
        times = [StepTime.of(None, batch_size=1, context=context, verify_ms=step)]
        for setting, result, base in zip(timed, results, bases, strict=True):
            per_round = (result.time_per_output_token_ms or 0.0) * result.num_committed / result.num_rounds
            how = {"num_timed": result.num_rounds, "verify_ms": per_round * step / base}  # in baseline steps beside it
            times.append(StepTime.of(setting, batch_size=1, context=context, **how))
        return times, scope

    def measured(self, chosen: Sequence[Cell], scope: Scope, *, num_choices: int) -> list[Cell]:
        """The most promising cells, as many as there is time for, in llama-server by turns with its plain decoding."""
        repeats, num_prompts = scope.config.measure.num_repeats, len(scope.suite.prompts)
        room, per_prompt = self.budget.room("check"), 2 * repeats * answer_seconds(scope)
        if chosen and room < per_prompt * len(chosen) * num_prompts:
            chosen = sorted(chosen, key=lambda cell: -cell.predicted_speedup)
            fits = int(room / per_prompt / num_prompts)
            self.budget.left_out += [f"measuring {self.name} at {cell.setting.name}" for cell in chosen[fits:]]
            chosen = chosen[:fits]
        results = self.serve([cell.setting for cell in chosen], scope, repeats=repeats) if chosen else []
        return [cell.measured(result, num_choices=num_choices) for cell, result in zip(chosen, results, strict=True)]

    def serve(self, settings: Sequence[DraftSetting], scope: Scope, *, repeats: int) -> list[Result]:
        """Each setting on all prompts."""
        config = MeasureConfig(max_new_tokens=scope.config.measure.max_new_tokens, num_repeats=repeats)
        tick = self.bar(len(scope.suite.prompts) * len(settings), f"llama-server with {self.name}")
        lengths = [setting.num_draft_tokens for setting in settings]
        results = measure_served(self.target, self.files, scope.suite, config, lengths, on_prompt=tick)
        tick()
        return results


def answer_seconds(scope: Scope) -> float:
    """What one plain answer takes at most: our engine's time, which is no shorter."""
    return scope.costs.prefill(1) + scope.config.measure.max_new_tokens * scope.costs.step(1)
