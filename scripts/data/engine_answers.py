"""A target in this process that answers requests, for `headstart data regenerate` without servers."""

import hashlib
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ...configs.errors import BadInput
from ...data_pipelines.answers.conversations import Answer, ChatRequest, Failure
from ...data_pipelines.answers.dispatch import in_batches, joining
from ...data_pipelines.answers.regenerate import Answerer, AskedSource, RegenerateConfig, source_samplings
from ...data_pipelines.answers.tool_calls import with_tool_calls
from ...data_pipelines.sources import read_sources
from ...eval.decoding import generate
from ...eval.decoding.continuous import WaitingPrompt, answer_continuously
from ...eval.decoding.replay import default_steps
from ...heads.base import DraftHead
from ...heads.chat.answers import answer_message, answer_text
from ...heads.chat.messages import Message
from ...heads.chat.prompts import ChatTemplate
from ...heads.chat.reasoning import template_hash, think_markers, tokenizer_hash
from ...heads.chat.rows import UnusableRow
from ...heads.chat.written_ids import AnswerIds, tokenizer_fingerprint
from ...heads.loading import config_hash, default_device
from ...heads.registry import load_head
from ...heads.target import Target
from ...heads.targets.dtype import default_dtype


def by_engine(config: RegenerateConfig) -> tuple[Answerer, dict[str, Any]]:
    """Answers of the target in this process, and what identifies it."""
    engine = config.engine
    device = engine.device or default_device()
    dtype = default_dtype(config.target, device) if engine.dtype == "auto" else engine.dtype
    target = Target.load(config.target, dtype=dtype, device=device, revision=engine.revision, adapter=engine.adapter)
    head = None if engine.head is None else load_head(engine.head, target)
    answer = EngineAnswers(target, head, batch_size=engine.batch_size)
    samplings = source_samplings(read_sources(config.sources, AskedSource), config.sampling)
    if all(sampling.temperature == 0 for sampling in samplings.values()):
        return partial(joining, answers=answer.joining, batch_size=engine.batch_size), identity_of(target)
    return partial(in_batches, answer=answer, batch_size=engine.batch_size), identity_of(target)


def identity_of(target: Target) -> dict[str, Any]:
    """What a target's answers depend on, as settings of a run: its weights and config, and how chats are written."""
    return {
        "target_fingerprint": target.fingerprint,
        "target_config_hash": config_hash(target.config),
        "tokenizer_hash": tokenizer_hash(target.tokenizer),
        "template_hash": template_hash(target.tokenizer),
        "eos_token_ids": sorted(target.eos_token_ids),
    }


class EngineAnswers:
    """A target that answers requests; with a head, which drafts for it.

    Called with a batch, one stream of random numbers serves it, seeded by all its requests: the same batch gets the
    same answers. Greedy answers need no batch of their own: see `joining`.
    """

    def __init__(self, target: Target, head: DraftHead | None = None, *, batch_size: int = 32):
        """Raises BadInput if the target's tokenizer has no chat template."""
        self.target, self.head, self.tokenizer, self.batch_size = target, head, target.tokenizer, batch_size
        if not self.tokenizer.chat_template:
            raise BadInput(f"tokenizer of {target.name}: no chat template to ask with")
        self.markers, self.fingerprint = think_markers(self.tokenizer), tokenizer_fingerprint(self.tokenizer)

    def __call__(self, requests: list[ChatRequest]) -> list[Answer | Failure]:
        """Answers in the requests' order; a prompt that the template or the context does not take is a Failure."""
        sampling = requests[0].sampling  # equal within a batch
        prompts = [self.prompt(request) for request in requests]
        fitting = [prompt for prompt in prompts if not isinstance(prompt, Failure)]
        seeds = ",".join(str(request.seed) for request in requests)
        seed = int.from_bytes(hashlib.sha256(seeds.encode()).digest()[:7])
        texts: list[list[int]] = []
        if fitting:
            texts = generate(
                self.target,
                self.head,
                fitting,
                max_new_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                steps=default_steps(self.target.device, num_tokens=sampling.max_tokens),
                generator=torch.Generator(self.target.device).manual_seed(seed),
            ).token_ids
        answered, pairs = iter(texts), zip(prompts, requests, strict=True)
        return [
            prompt if isinstance(prompt, Failure) else self.answer(prompt, next(answered), request)
            for prompt, request in pairs
        ]

    def joining(self, waiting: deque[tuple[str, ChatRequest]]) -> Iterator[tuple[str, Answer | Failure]]:
        """Yields greedy answers as they finish; requests have equal sampling, and more may be appended meanwhile."""
        asked: deque[WaitingPrompt] = deque()
        taken: dict[str, tuple[list[int], ChatRequest]] = {}
        limit = waiting[0][1].sampling.max_tokens

        def take() -> Iterator[tuple[str, Failure]]:
            while waiting:
                key, request = waiting.popleft()
                prompt = self.prompt(request)
                if isinstance(prompt, Failure):
                    yield key, prompt
                else:
                    taken[key] = prompt, request
                    asked.append(WaitingPrompt(key, prompt))

        yield from take()
        rows, head = self.batch_size, self.head
        for key, tokens in answer_continuously(self.target, asked, batch_size=rows, max_new_tokens=limit, drafter=head):
            prompt, request = taken[key]
            yield key, self.answer(prompt, tokens, request)
            yield from take()  # the next turn of this conversation

    def prompt(self, request: ChatRequest) -> list[int] | Failure:
        """Token ids up to where the assistant answers."""
        try:
            ids = self.template(request).prompt(request.messages, "")
        except UnusableRow as error:
            return Failure(error.reason)
        room, wanted, size = self.target.num_positions, request.sampling.max_tokens, self.target.vocab_size
        if len(ids) + wanted > room:
            return Failure(f"{len(ids)} prompt tokens + {wanted} new ones (max_tokens) exceed the context of {room}")
        if max(ids) >= size:
            return Failure(f"the tokenizer gives the id {max(ids)}, outside the target's table of {size}")
        return ids

    def template(self, request: ChatRequest) -> ChatTemplate:
        """The chat template with what the request tells it."""
        return ChatTemplate(self.tokenizer, request.tools, request.told)

    def answer(self, prompt: list[int], tokens: list[int], request: ChatRequest) -> Answer:
        """The text of an answer and its ids; reasoning stays in the text, where the answer itself opens it.

        Tool calls become structured where the chat template writes them as the target did, see `with_tool_calls`.
        """
        text = answer_text(tokens, self.tokenizer, self.target.eos_token_ids)
        message = answer_message(text, self.markers)
        has_ended = bool(tokens) and tokens[-1] in self.target.eos_token_ids
        reason = "stop" if has_ended else "length"
        if has_ended and "reasoning_content" not in message:
            called = with_tool_calls(text, partial(self.rendered, request))
            message, reason = (message, reason) if called is None else (called, "tool_calls")
        ids = AnswerIds(prompt, tokens, self.fingerprint)
        return Answer(message, reason, len(prompt), len(tokens), ids, self.template(request).recorded)

    def rendered(self, request: ChatRequest, answer: list[Message]) -> str:
        """The chat with an answer, as the chat template writes it; without one, up to where it begins."""
        return self.template(request).render_text([*request.messages, *answer], generation_prompt=not answer)
