"""A client of servers that are asked by ids and answer with ids, so that no text is tokenised or templated there."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...engines.servers.address import NOT_ANSWERED, Address
from ...targets.chat.written_ids import NEW_KEYS
from ...targets.images.pictures import pictures_of
from .as_ids import AsIds
from .client import AS_WRITTEN, AttemptFailed, OpenAIClient, Server
from .conversations import Answer, ChatRequest, Failure
from .regenerate import ClientConfig

ENDED_BY = ("stop_reason", "matched_stop")  # the end token that a choice names, of vLLM, of SGLang


class IdsClient(OpenAIClient):
    """As `OpenAIClient`, for vLLM and SGLang. Of prompts with pictures the messages are sent, and the ids compared that
    the server made of them."""

    def __init__(self, addresses: Sequence[Address], *, model: str, config: ClientConfig, as_ids: AsIds):
        super().__init__(addresses, model=model, config=config)
        self.as_ids, self.ends = as_ids, sorted(as_ids.target.eos_token_ids)

    def __call__(self, request: ChatRequest) -> Answer:
        prompt = self.as_ids.prompt(request)
        if isinstance(prompt, Failure):
            raise prompt
        return super().__call__(replace(request, prompt=prompt))

    def _asked(self, server: Server, request: ChatRequest, optional: dict[str, Any]) -> bytes:
        sampling = request.sampling
        if pictures_of(request.prompt):  # ids have no room for them
            return super()._asked(server, request, {**optional, **AS_WRITTEN, "stop_token_ids": self.ends})
        response = server.client.completions.with_raw_response.create(
            model=self.model,
            prompt=request.prompt,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=request.seed,
            extra_body=self._extra(sampling, {**optional, "stop_token_ids": self.ends}),
        )
        return response.content

    def _read(self, payload: bytes, request: ChatRequest, url: str) -> Answer:
        try:
            data = json.loads(payload)
            [choice, *_] = data["choices"]
            reason = choice["finish_reason"]
            new = next((choice[key] for key in NEW_KEYS if choice.get(key)), [])
            tokens = [int(token) for token in new]
            prompt = choice.get("prompt_token_ids") or data.get("prompt_token_ids")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AttemptFailed(f"{url}: not a completion but {payload[:60]!r}") from error
        if reason in NOT_ANSWERED:
            raise AttemptFailed(f"{url}: the server gave up: finish_reason {reason}")
        if not tokens:
            raise Failure(f"{url}: gives no token ids; ask it by messages: engine.name=openai")
        if prompt is not None and prompt != request.prompt:
            raise Failure(f"{url}: read another prompt than it was asked")
        end = next((choice[key] for key in ENDED_BY if choice.get(key) in self.ends), None)
        if reason == "stop" and end is not None and tokens[-1] != end:
            tokens.append(end)
        return self.as_ids.answer(request.prompt, tokens, request)
