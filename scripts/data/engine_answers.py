"""A target in this process that answers requests, for `headstart data regenerate` without servers."""

import hashlib
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...data_pipelines.answers.as_ids import AsIds
from ...data_pipelines.answers.conversations import Answer, ChatRequest, Failure
from ...data_pipelines.answers.dispatch import in_batches, joining
from ...data_pipelines.answers.regenerate import Answerer, RegenerateConfig, check_prompts
from ...eval.decoding import generate
from ...eval.decoding.continuous import WaitingPrompt, answer_continuously
from ...eval.decoding.replay import default_steps
from ...targets.chat.reasoning import template_hash, tokenizer_hash
from ...targets.dtype import with_default_dtype
from ...targets.loading import TargetConfig, config_hash, default_device
from ...targets.target import Target


def by_engine(config: RegenerateConfig) -> tuple[Answerer, dict[str, Any]]:
    """Answers of the target in this process, and what identifies it. Raises BadInput, before the target is loaded, on
    rows and output folder."""
    engine = config.engine
    check_prompts(config)
    device = engine.device or default_device()
    asked = TargetConfig(path=config.target, dtype=engine.dtype, revision=engine.revision)
    dtype = with_default_dtype(asked, device).dtype
    target = Target.load(config.target, dtype=dtype, device=device, revision=engine.revision, adapter=engine.adapter)
    clip_length(config, target)
    answer = EngineAnswers(target, batch_size=engine.batch_size)
    if config.sampling.temperature == 0:
        return partial(joining, answers=answer.joining, batch_size=engine.batch_size), identity_of(target)
    return partial(in_batches, answer=answer, batch_size=engine.batch_size), identity_of(target)


def clip_length(config: RegenerateConfig, target: Target) -> None:
    """Lower sampling.max_tokens, with a line, where it would leave no room for any prompt."""
    room, wanted = target.num_positions, config.sampling.max_tokens
    if wanted >= room:
        config.sampling = replace(config.sampling, max_tokens=max(1, room // 2))
        what = f"sampling.max_tokens {wanted}: leaves no prompt room in the target's context of {room}"
        print(f"headstart: {what}: {config.sampling.max_tokens} instead", file=sys.stderr)


def identity_of(target: Target) -> dict[str, Any]:
    """What a target's answers depend on, as settings of a run: its weights and config, and how chats are written."""
    return {
        "target_fingerprint": target.fingerprint,
        "target_config_hash": config_hash(target.config),
        "tokenizer_hash": tokenizer_hash(target.tokenizer),
        "template_hash": template_hash(target.tokenizer),
        "eos_token_ids": sorted(target.eos_token_ids),
    }


class EngineAnswers(AsIds):
    """A target that answers requests.

    Called with a batch, one stream of random numbers serves it, seeded by all its requests: the same batch gets the
    same answers. Greedy answers need no batch of their own: see `joining`.
    """

    def __init__(self, target: Target, *, batch_size: int = 32):
        super().__init__(target)
        self.batch_size = batch_size

    def __call__(self, requests: list[ChatRequest]) -> list[Answer | Failure]:
        """Answers in the requests' order; a prompt that the template or the context does not take is a Failure."""
        sampling = requests[0].sampling  # equal within a run
        prompts = [self.prompt(request) for request in requests]
        fitting = [prompt for prompt in prompts if not isinstance(prompt, Failure)]
        seeds = ",".join(str(request.seed) for request in requests)
        seed = int.from_bytes(hashlib.sha256(seeds.encode()).digest()[:7])
        texts: list[list[int]] = []
        if fitting:
            texts = generate(
                self.target,
                None,
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
        """Yields greedy answers as they finish; more requests may be appended meanwhile."""
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
        for key, tokens in answer_continuously(self.target, asked, batch_size=self.batch_size, max_new_tokens=limit):
            prompt, request = taken[key]
            yield key, self.answer(prompt, tokens, request)
            yield from take()  # the next turn of this conversation
