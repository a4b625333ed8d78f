"""A running server that gives the target's states for token ids, and what it says of itself."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from http.client import HTTPException
from threading import Event
from typing import Any, Self
from urllib.parse import urlsplit

from torch import Tensor

from ...configs.errors import BadInput, first_line
from .transport import Files, Lost, Tcp

REQUEST_SECONDS = 3600.0  # of one answer
PATIENCE = 600.0  # seconds for which a server may be away, such as for a restart
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds between two attempts
NOT_OURS = "does not run headstart's connector for vLLM (docs/launching.md)"


@dataclass(frozen=True)
class StatesIdentity:
    """What identifies the states that a server gives."""

    engine: str
    version: str
    target: str  # folder or hub id
    weights: str  # `in_vllm.headstart_weights.weights_digest`
    vocabulary: str | None  # `vocabulary_digest`; None: it has no tokenizer
    layers: tuple[int, ...]  # of the states, in their order: inputs of layers; num_layers: the last one's output
    num_layers: int
    hidden_size: int
    dtype: str
    quantization: str | None  # as the engine names it
    max_length: int  # tokens of a row, with one that is generated

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        known = {field.name: told[field.name] for field in fields(cls)}
        return cls(**{**known, "layers": tuple(told["layers"])})

    def check_same(self, other: "StatesIdentity", *, url: str) -> None:
        """Raises BadInput, naming what differs, if a server is another one than before."""
        for key, before in asdict(self).items():
            now = getattr(other, key)
            if now != before:
                raise BadInput(f"server {url}: has {key} {now} now, and had {before} before")


@dataclass(frozen=True)
class ServedStates:
    """Of a row of T tokens."""

    states: Tensor  # [T, L, D] in the server's dtype, L in the order of served.layers
    served: StatesIdentity
    next_token: int  # the likeliest one after the row
    next_logprob: float


class StateServer:
    """A server by its address; `ask` may be called from many threads at a time.

    served: what it said at first; every answer must come from a server that says the same.
    """

    def __init__(
        self,
        url: str,
        *,
        label: str,
        is_gone: Callable[[], str | None] = lambda: None,
        key: str = "--server",
    ):
        """Args: url: such as http://localhost:8000. label: hex digits, by which the server marks what is
        for this asker. is_gone: why it is not to be waited for; None: it is. key: that names it, for messages.

        Raises: BadInput if there is no such server, or it gives no states.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise BadInput(f"{key} {url}: expected an address such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.label, self.is_gone, self.patience = label, is_gone, PATIENCE
        self.ways: dict[str, Files | Tcp] = {"file": Files(label), "tcp": Tcp(label)}  # by what an answer names
        self._closed = Event()
        self.served: StatesIdentity | None = None
        self.model = self._model(key)

    def ask(self, token_ids: Sequence[int]) -> ServedStates:
        """The states of a row [T].

        Raises: BadInput if the server refuses the row, is another one than before, or stays away.
        """
        began, pause = time.monotonic(), FIRST_PAUSE
        while True:
            try:
                return self._attempt(list(map(int, token_ids)))
            except Lost as lost:
                why = self.is_gone()
                if why is not None:
                    raise BadInput(f"server {self.url}: {why}") from lost
                if time.monotonic() - began > self.patience:
                    raise BadInput(f"server {self.url}: {lost}; gave up after {self.patience:g} s") from lost
            if self._closed.wait(pause):
                raise BadInput(f"server {self.url}: no longer asked")
            pause = min(2 * pause, LONGEST_PAUSE)

    def clear(self) -> None:
        """Remove what this asker left at the server when it was killed. No answer may be under way."""
        for way in self.ways.values():
            way.clear()

    def close(self) -> None:
        """Let threads that wait for the server to come back give up."""
        self._closed.set()

    def _attempt(self, ids: list[int]) -> ServedStates:
        """Raises: Lost if another attempt may do."""
        asked: dict[str, Any] = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        asked |= {"logprobs": 1, "return_tokens_as_token_ids": True, "kv_transfer_params": {"headstart": self.label}}
        said = self._request("/v1/completions", asked)
        try:
            told = said["kv_transfer_params"]["headstart"]
            served = StatesIdentity.of(told["served"])
            likely = said["choices"][0]["logprobs"]
            way = next(way for key, way in self.ways.items() if key in told)
            token, logprob = int(likely["tokens"][0].removeprefix("token_id:")), float(likely["token_logprobs"][0])
        except (KeyError, TypeError, IndexError, ValueError, StopIteration) as error:
            raise BadInput(f"server {self.url}: {NOT_OURS}") from error
        tensors = way.take(told)
        if self.served is None:
            self.served = served
        self.served.check_same(served, url=self.url)
        if tensors["token_ids"].tolist() != ids:
            raise BadInput(f"server {self.url}: gave the states of other tokens than were asked for")
        return ServedStates(tensors["states"], served, token, logprob)

    def _model(self, key: str) -> str:
        """The name by which the server knows its target."""
        try:
            return self._request("/v1/models")["data"][0]["id"]
        except Lost as lost:
            raise BadInput(f"{key} {self.url}: {lost}") from lost
        except (KeyError, TypeError, IndexError) as error:
            raise BadInput(f"{key} {self.url}: names no model") from error

    def _request(self, path: str, asked: dict[str, Any] | None = None) -> Any:
        body = None if asked is None else json.dumps(asked).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            told = " ".join(error.read().decode(errors="replace").split())[:300]
            problem = f"{error.code} {error.reason}: {told}"
            if error.code >= 500 or error.code in (408, 425, 429):
                raise Lost(problem) from error
            raise BadInput(f"server {self.url}: {problem}") from error
        except (OSError, ValueError, HTTPException) as error:  # no connection, or one that broke
            raise Lost(first_line(error)) from error
