"""Answers from OpenAI-compatible servers (vLLM, SGLang ...): several endpoints, retries with back-off, bounded load."""

import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from ...configs.errors import BadInput, first_line
from ..masks.messages import Message, normalise
from .answers import Answer, Failure, Request
from .endpoints import Endpoints, Trouble

STOPS_ALL = (301, 302, 307, 308, 401, 403, 404, 405)  # no row can be answered before someone mends it
TRY_AGAIN = (408, 425, 429)  # and all from 500
NOT_ANSWERED = ("abort", "error")  # finish reasons of an answer that the server gave up
LONGEST_PAUSE = 60  # seconds between two attempts


@dataclass(kw_only=True, frozen=True)
class ClientConfig:
    """How servers are asked.

    concurrency: requests at a time, per server. api_key_env: the environment variable that holds the key.
    connect_timeout, timeout: seconds for a connection, and for a whole answer. num_attempts: per answer; what does not
    even reach a server is not counted. backoff: seconds before the second attempt, twice that before the third, and so
    on. patience: seconds without any answer from any server after which the run stops. extra_body: more keys of each
    request, as the server has them, e.g. {min_p: 0.05}.
    """

    concurrency: int = 64
    api_key_env: str | None = None
    connect_timeout: float = 10.0
    timeout: float = 900.0
    num_attempts: int = 6
    backoff: float = 0.5
    patience: float = 600.0
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("concurrency", "num_attempts"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} {getattr(self, name)}: expected at least 1")
        for name in ("connect_timeout", "timeout", "backoff", "patience"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadInput(f"{name} {getattr(self, name)}: expected more than 0")


class OpenAIClient:
    """Asks whichever server is least busy; safe to call from many threads."""

    def __init__(self, urls: list[str], *, model: str, config: ClientConfig):
        """Args: urls: as `http://localhost:8000/v1`. model: the name they serve it by.

        Raises: BadInput on a URL of another form, a key that is not set, or where no server takes connections.
        """
        for index, url in enumerate(urls):
            check_url(url, where=f"servers.{index}")
        self.model, self.config = model, config
        self.urls = [url.rstrip("/") for url in urls]
        self.endpoints = Endpoints(self.urls, concurrency=config.concurrency, patience=config.patience)
        self._key = _key_of(config.api_key_env)
        self._check_any_listens()

    @property
    def num_threads(self) -> int:
        """How many callers keep all servers busy."""
        return self.config.concurrency * len(self.urls)

    def __call__(self, request: Request) -> Answer:
        """The answer. Raises: Failure where the servers refuse this request, or all attempts failed; BadInput where no
        request can succeed (key, model name, no server)."""
        body = json.dumps(self._body(request)).encode()
        num_failed = 0
        while True:
            endpoint = self.endpoints.acquire()
            try:
                answer = self._post(endpoint.url, body)
            except Trouble as trouble:
                self.endpoints.release(endpoint, trouble)
                num_failed += trouble.has_reached
                if num_failed == self.config.num_attempts:
                    raise Failure(f"{trouble} ({num_failed} attempts)") from trouble
                if trouble.has_reached:
                    pause = min(self.config.backoff * 2 ** (num_failed - 1), LONGEST_PAUSE)
                    time.sleep(random.uniform(0.5, 1.0) * pause)  # not all at once
            except BaseException:
                self.endpoints.release(endpoint)
                raise
            else:
                self.endpoints.release(endpoint)
                return answer

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        body = {
            "model": self.model,
            "messages": [_for_api(message) for message in request.messages],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,  # said even where it is off: servers may have the model's own as a default
            "seed": request.seed,
        }
        if request.tools:
            body["tools"] = request.tools
        if sampling.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": sampling.thinking}
        for key, value in self.config.extra_body.items():
            both = isinstance(value, Mapping) and isinstance(body.get(key), Mapping)
            body[key] = {**body[key], **value} if both else value
        return body

    def _post(self, url: str, body: bytes) -> Answer:
        """One attempt, over a connection of its own."""
        deadline = time.monotonic() + self.config.timeout
        connection = _connection(url, timeout=self.config.connect_timeout)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            try:
                connection.connect()
            except OSError as error:
                raise Trouble(f"{url}: cannot be reached: {_said(error)}", has_reached=False) from error
            connection.sock.settimeout(self.config.timeout)
            connection.request("POST", f"{urlsplit(url).path}/chat/completions", body, headers)
            response = connection.getresponse()
            payload = _read(response, deadline)
        except TimeoutError as error:
            raise Trouble(f"{url}: no answer within {self.config.timeout:g} s") from error
        except (OSError, HTTPException) as error:
            raise Trouble(f"{url}: connection lost: {_said(error)}") from error
        finally:
            connection.close()
        self._check_status(url, response, payload)
        return answer_of(payload, url)

    def _check_status(self, url: str, response: HTTPResponse, payload: bytes) -> None:
        if response.status == 200:
            return
        problem = f"{url}: {response.status} {response.reason}: {self._without_key(_error_in(payload))}"
        if response.status in STOPS_ALL:
            raise BadInput(problem)
        if response.status in TRY_AGAIN or response.status >= 500:
            raise Trouble(problem, pause=_retry_after(response))
        raise Failure(problem)

    def _without_key(self, text: str) -> str:
        """Servers that refuse a key may repeat it."""
        return text.replace(self._key, "***") if self._key else text

    def _check_any_listens(self) -> None:
        problems = []
        for url in self.urls:
            connection = _connection(url, timeout=self.config.connect_timeout)
            try:
                connection.connect()
                return
            except OSError as error:
                problems.append(f"{url}: cannot be reached: {_said(error)}")
            finally:
                connection.close()
        raise BadInput("; ".join(problems))


def check_url(url: str, *, where: str) -> None:
    """Raises BadInput on what is no http(s) URL, or holds a password, which is not repeated."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        raise BadInput(f"{where}: not a URL") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise BadInput(
            f"{where}: a URL with a password or parameters; name the variable of a key in client.api_key_env"
        )
    if not is_good:
        raise BadInput(f"{where} {url!r}: expected a URL such as http://localhost:8000/v1")


def answer_of(payload: bytes, url: str) -> Answer:
    """The answer in a chat completion. Raises Trouble where it is none, so that it is asked for again."""
    try:
        data = json.loads(payload)
        [choice, *_] = data["choices"]
        given = {key: value for key, value in choice["message"].items() if value is not None}
        [message] = normalise([{"content": "", **given, "role": "assistant"}], url)
        finish_reason = choice["finish_reason"] or "stop"
        usage = data.get("usage") or {}
        counts = [int(usage.get(key) or 0) for key in ("prompt_tokens", "completion_tokens")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        start = " ".join(payload[:60].decode("utf-8", "replace").split())
        raise Trouble(f"{url}: not a chat completion but {start!r}") from error
    if finish_reason in NOT_ANSWERED:
        raise Trouble(f"{url}: the server gave up: finish_reason {finish_reason}")
    kept = {key: message[key] for key in ("role", "content", "reasoning_content") if key in message}
    if message.get("tool_calls"):
        kept["tool_calls"] = message["tool_calls"]
    return Answer(kept, finish_reason, *counts)


def _for_api(message: Message) -> Message:
    """Chat templates take tool-call arguments as objects, OpenAI's API as JSON text."""
    if not isinstance(message.get("tool_calls"), list):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", {})
        arguments = function.get("arguments")
        as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": as_text}})
    return {**message, "tool_calls": calls}


def _connection(url: str, *, timeout: float) -> HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname is not None
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind(parts.hostname, parts.port, timeout=timeout)


def _read(response: HTTPResponse, deadline: float) -> bytes:
    parts = []
    while part := response.read1(1 << 16):
        parts.append(part)
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


def _key_of(variable: str | None) -> str:
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise BadInput(f"client.api_key_env: no environment variable {variable}")
    return key


def _error_in(payload: bytes) -> str:
    """What a server says about a refusal: OpenAI's {"error": {"message"}}, or the text as it is."""
    text = payload.decode("utf-8", "replace")
    try:
        data = json.loads(text)
        error = data.get("error", data)
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, AttributeError):
        pass
    return " ".join(str(text).split())[:200] or "(no text)"


def _retry_after(response: HTTPResponse) -> float | None:
    """Seconds that a server asks to be left alone for, given so or as a date; None: it does not say."""
    value = response.headers.get("Retry-After", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or first_line(error)
