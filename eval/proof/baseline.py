"""Before anything is timed: does the engine decode this target as the model's own code does?"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...base.errors import BadInput
from ...heads.drafting.trees import Proposal
from ...targets.images.pictures import pictures_of
from ..decoding.engine import DecodeState, Engine
from ..decoding.loop import right_padded
from ..suites.prompts import Suite
from .own_forward import below_best, first_not_own, own_logits, own_step_logits, rounding
from .runner import Runner

NUM_PROMPTS, MOST_TOKENS = 4, 64  # that are checked; new tokens of each
MOST_READ = 8192  # tokens of all prompts that are checked, but for the first: each is read three times
MOST_NOISE = 5  # times how far the model's own steps are from its whole forward


def check_baseline(runner: Runner, parts: Sequence[Suite]) -> None:
    """Hold what the baseline computes behind the first prompts against the model's own forwards.

    Raises: BadInput if its greedy texts or its logits differ by more than rounding."""
    config, left, num_read = runner.config, NUM_PROMPTS, 0
    if config.temperature > 0:
        greedy = replace(config, temperature=0.0, top_k=0, top_p=1.0)
        runner = Runner(runner.target, None, [prompt for part in parts for prompt in part.prompts], greedy)
    for part in parts:
        num_read += sum(map(len, part.prompts))
        if part is not parts[0] and num_read > MOST_READ:
            return
        engine = runner.engine(len(part.prompts))
        texts, states = decode_baseline(engine, part.prompts, min(MOST_TOKENS, config.max_new_tokens))
        for row in range(min(left, len(texts))):
            check_text(engine, part.prompts[row], texts[row], states[row : row + 1], where=part.sources[row].row)
        left -= len(texts)
        if left <= 0:
            return


@torch.no_grad()
def decode_baseline(engine: Engine, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], Tensor]:
    """The baseline's next tokens behind each prompt, end tokens or not, and the states [B, n, D] that they are chosen
    from."""
    tokens, start = right_padded(prompts, engine.target.device)
    output, last = engine.prefill(tokens, start, pictures=[pictures_of(prompt) for prompt in prompts])
    chosen, states = [last], [output.at(start - 1).post_norm]
    for count in range(1, num_tokens):
        engine.begin_round(tokens.shape[1] + count)
        state = DecodeState(None, last, start)
        engine.rehearse(state)
        verified = engine.verify(state, Proposal(engine.no_tokens), ended=[False] * len(prompts))
        last, start = verified.committed.clone(), start + 1  # a recorded step writes the next ones over it
        chosen.append(last)
        states.append(verified.output.post_norm.clone())
    return torch.cat(chosen, 1).tolist(), torch.cat(states, 1)


@torch.no_grad()
def check_text(engine: Engine, prompt: Sequence[int], new: Sequence[int], states: Tensor, *, where: str) -> None:
    """Raises BadInput if a text is not the model's own choice, or the logits of the states [1, n, D] behind it are not
    the model's.

    In half precision a fault may leave most tokens as they are, so logits are compared too: at the median token, their
    mean distance from those of the whole forward may be as large as rounding explains in one logit, or a few times as
    large as that of the model's own steps.
    """
    target = engine.target
    whole, ours = own_logits(target, prompt, new), target.logits(states)[0]  # [n, V]
    refusal = f"behind {where}: it cannot be measured"
    at = first_not_own(target, prompt, new, whole)
    if at is not None:
        short, best = float(below_best(whole, new)[at]), int(whole[at].argmax())
        raise BadInput(
            f"target {target.name}: the engine's text differs from the model's own at token {at + 1} (id {new[at]} "
            f"instead of {best}, logits {short:.2g} apart) {refusal}"
        )
    apart = distance(ours, whole)
    if apart <= float(rounding(target, whole).median()):
        return
    noise = distance(own_step_logits(target, prompt, new), whole)
    if not apart <= MOST_NOISE * noise:
        raise BadInput(
            f"target {target.name}: the engine's logits differ from the model's own by {apart:.2g} on average, its own "
            f"steps by {noise:.2g}, {refusal}"
        )


def distance(ours: Tensor, theirs: Tensor) -> float:
    """How far apart two sets of logits [n, V] are: the mean difference in the median row."""
    return float(torch.where(ours == theirs, 0.0, (ours - theirs).abs()).mean(-1).median())
