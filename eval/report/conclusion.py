"""What a page begins with and a terminal ends with: what to do, why, where not, and the commands for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..measurement.result import Result
from .recommendation import lossless_evidence, recommend


@dataclass(frozen=True)
class Conclusion:
    """is_good: whether there is something to deploy. figure: the main one with its interval, and `unit`: what it is of;
    empty: none. reasons: sentences. cautions: sentences on where it does not hold. commands: how to do it."""

    is_good: bool
    headline: str
    figure: str = ""
    unit: str = ""
    reasons: Sequence[str] = ()
    cautions: Sequence[str] = ()
    commands: Sequence[str] = ()


def conclude(results: Sequence[Result], commands: Sequence[str] = ()) -> Conclusion:
    """Of a report's results. Args: commands: that serve what is recommended."""
    advice = recommend(results)
    unit = "speedup [95 % interval]" + (f", {advice.best.suite}" if advice.best else "")
    return Conclusion(
        advice.is_deployable,
        advice.headline,
        advice.figure,
        unit,
        [*advice.reasons, f"Losslessness: {lossless_evidence(results)}"],
        advice.cautions,
        commands if advice.is_deployable else (),
    )
