"""Every turn of a chat is measured, behind the target's own answers to the turns before it or behind recorded ones.

The target's own are decoded here without drafts, once, before anything is timed: baseline and drafters then read the
same prompts, and each turn is measured and checked as any other prompt. Behind recorded ones tools' results stay.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from ...targets.chat.answers import answer_message, answer_text
from ...targets.chat.messages import Message
from ...targets.chat.prompts import ChatTemplate
from ...targets.chat.rows import UnusableRow
from ...targets.target import Target
from ..proof.config import MeasureConfig
from ..proof.runner import Runner
from ..suites.prompts import FailedPrompt, PromptSource, Script, Suite, check_ids, last_question


@dataclass
class Talk:
    """A chat while its turns are asked. history: all messages before the open turn. prompts: of the turns so far."""

    script: Script
    template: ChatTemplate
    history: list[Message] = field(default_factory=list)
    at: int = 0  # the first message of the script that is not in the history
    prompts: list[list[int]] = field(default_factory=list)
    questions: list[str | None] = field(default_factory=list)
    problem: str = ""  # why the turn after `prompts` cannot be asked

    @property
    def num_turns(self) -> int:
        return self.script.turns.count(None)

    @property
    def kinds(self) -> list[str]:
        """Of each recorded turn: `call` if its messages call tools, else `answer`."""
        turns = self.script.turns
        asked = [at for at, turn in enumerate(turns) if turn is None]
        answers = [takewhile(lambda turn: turn and turn["role"] == "assistant", turns[at + 1 :]) for at in asked]
        return ["call" if any(turn and turn.get("tool_calls") for turn in run) else "answer" for run in answers]

    @property
    def is_open(self) -> bool:
        return not self.problem and len(self.prompts) < self.num_turns

    def ask(self, target: Target, *, max_new_tokens: int) -> None:
        """Add the prompt of the next turn, or the problem with it."""
        turns, origin = self.script.turns, self.script.source.row
        while (message := turns[self.at]) is not None:
            self.history.append(message)
            self.at += 1
        try:
            ids = self.template.prompt(self.history, origin)
            check_ids(ids, target, max_new_tokens=max_new_tokens, origin=origin)
        except UnusableRow as error:
            self.problem = error.reason
            return
        self.prompts.append(ids)
        self.questions.append(last_question(self.history))
        self.at += 1

    def answer(self, tokens: Sequence[int], target: Target) -> None:
        """Add the target's answer to the turn that was asked last."""
        prompt, markers = self.template.prompt_text(self.history, ""), self.template.markers
        opened = markers if markers and prompt.rstrip().endswith(markers[0]) else None
        text = answer_text(tokens, self.template.tokenizer, target.eos_token_ids)
        self.history.append(answer_message(text, opened))


def with_every_turn(suite: Suite, target: Target, config: MeasureConfig, *, batch_size: int = 1) -> Suite:
    """The suite with a prompt for each turn of its chats with several; the others stay.

    A turn that cannot be asked, as where the context is full, is listed in `failed`, and ends its chat.

    Args: batch_size: chats that the target answers at once.
    """
    if not suite.scripts:
        return suite
    tokenizer = target.tokenizer
    talks = {
        number: Talk(script, ChatTemplate(tokenizer, script.chat.tools, script.chat.variables))
        for number, script in suite.scripts.items()
    }
    waiting = list(talks.values())
    while waiting:
        for talk in waiting:
            talk.ask(target, max_new_tokens=config.max_new_tokens)
        waiting = [talk for talk in waiting if talk.is_open]
        if suite.chat.has_recorded_turns:
            continue
        answers = own_answers(target, [talk.prompts[-1] for talk in waiting], config, batch_size=batch_size)
        for talk, tokens in zip(waiting, answers, strict=True):
            talk.answer(tokens, target)
    return expanded(suite, talks)


def own_answers(
    target: Target, prompts: list[list[int]], config: MeasureConfig, *, batch_size: int
) -> Iterator[list[int]]:
    """The new tokens of the target's own answers, decoded as the baseline does."""
    run = Runner(target, None, prompts, config)
    for start in range(0, len(prompts), batch_size):
        yield from run(prompts[start : start + batch_size], config.seed + start).token_ids


def expanded(suite: Suite, talks: dict[int, Talk]) -> Suite:
    """The suite with the prompts of these chats' turns in place of the chats, all numbered anew."""
    prompts, sources, failed = list[list[int]](), list[PromptSource](), list[FailedPrompt]()
    single = {source.number: (source, ids) for source, ids in zip(suite.sources, suite.prompts, strict=True)}
    reasons = {prompt.prompt: prompt for prompt in suite.failed}
    number = 0
    for row in sorted({*single, *reasons, *talks}):
        talk = talks.get(row)
        if talk is not None:
            prompts += talk.prompts
            kinds = talk.kinds if suite.chat.has_recorded_turns else [None] * talk.num_turns
            chat = number if talk.num_turns > 1 else None
            for index, (question, kind) in enumerate(zip(talk.questions, kinds, strict=False)):
                turn = replace(talk.script.source, number=number + index, turn=index + 1, chat=chat)
                sources.append(replace(turn, question=question, kind=kind))
            if talk.problem:
                why = f"turn {len(talk.prompts) + 1} of {talk.num_turns}: {talk.problem}"
                failed.append(FailedPrompt(number + len(talk.prompts), talk.script.source.row, why))
            number += talk.num_turns
            continue
        if row in single:
            source, ids = single[row]
            prompts.append(ids)
            sources.append(replace(source, number=number))
        else:
            failed.append(replace(reasons[row], prompt=number))
        number += 1
    return replace(suite, prompts=prompts, sources=sources, failed=failed, scripts={})
