"""Where in a text drafts stand: acceptance by segment and by context length, and in other engines' conventions."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from ..generate import Generation
from .metrics import Acceptance

CONTEXT_EDGES = (128, 512, 2048, 8192, 32768)  # tokens, prompt included, at the start of a round


def acceptance_by(
    prompts: Sequence[Sequence[int]],
    runs: Sequence[Generation],
    *,
    num_draft_tokens: int,
    label: Callable[[Sequence[int], int], str],
) -> dict[str, Acceptance]:
    """Rounds counted apart by a label of where they start.

    Args:
        prompts: in order. runs: generations of consecutive batches of them.
        label: of the whole text (prompt and new tokens) and the number of tokens committed when the round starts.
    """
    counted: dict[str, Acceptance] = {}
    prompt = iter(prompts)
    for run in runs:
        for row, new in enumerate(run.token_ids):
            text = [*next(prompt), *new]
            at = len(text) - len(new) + 1  # the prefill gave the first token
            for one in run.rounds[1:]:
                if one.num_committed[row] == 0:
                    break
                name = label(text, at)
                if name not in counted:
                    counted[name] = Acceptance(0, 0, [0] * num_draft_tokens, [0] * num_draft_tokens)
                counted[name].add(one.num_accepted[row], one.num_committed[row])
                at += one.num_committed[row]
    return counted


def context_label(trained_length: int | None = None) -> Callable[[Sequence[int], int], str]:
    """`0-127`, `128-511`, ...: the range that holds the context length. Args: trained_length: a further edge, so that
    no range has contexts as long as training rows and longer ones."""
    further = () if trained_length is None else (trained_length + 1,)
    edges = sorted({*CONTEXT_EDGES, *further})

    def label(text: Sequence[int], at: int) -> str:
        low = max((edge for edge in edges if edge <= at), default=0)
        high = min((edge for edge in edges if edge > at), default=None)
        return f"{low}-{high - 1}" if high else f"{low}-"

    return label


def segment_label(think_tokens: tuple[int, int] | None) -> Callable[[Sequence[int], int], str]:
    """`think` between the tokens that open and close a reasoning trace, else `answer`."""

    def label(text: Sequence[int], at: int) -> str:
        for token in reversed(text[:at]):
            if think_tokens and token in think_tokens:
                return "think" if token == think_tokens[0] else "answer"
        return "answer"

    return label


def as_entries(counted: dict[str, Acceptance]) -> dict[str, dict[str, Any]]:
    """The report's form."""
    return {
        name: {
            "num_rounds": one.num_rounds,
            "acceptance_length": round(one.length or 0.0, 4),
            "acceptance_rate": [None if rate is None else round(rate, 4) for rate in one.rate],
        }
        for name, one in counted.items()
    }


def conventions(counted: Acceptance, *, num_tokens: int) -> dict[str, Any]:
    """The same counts in the words of others; docs/report_schema.md names the sources.

    vllm_per_position is joint, P(the first k + 1 drafts all accepted), per round.
    """
    rates = [rate or 0.0 for rate in counted.rate]
    return {
        "vllm_mean_acceptance_length": round(1 + sum(counted.taken) / counted.num_rounds, 4)
        if counted.num_rounds
        else None,
        "vllm_per_position": [round(joint, 4) for joint in accumulate(rates, mul)],
        "sglang_accept_length": round(num_tokens / counted.num_rounds, 4) if counted.num_rounds else None,
        "eagle_n_alpha": [round(rate, 4) for rate in rates],
    }
