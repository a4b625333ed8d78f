"""A client of OpenAI-compatible servers (vLLM, SGLang, ...) that balances load over several of them."""

import json
import random
import re
import ssl
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from email.utils import parsedate_to_datetime
from threading import Condition
from typing import TYPE_CHECKING, Any

from ...base.errors import BadInput, first_line
from ...engines.neutral_sampling import NEUTRAL
from ...engines.servers.address import (
    FORBIDDEN,
    KEY_NAME,
    NOT_ANSWERED,
    OF_A_KEY,
    STOPPING,
    Address,
    first_answer,
    may_pass,
)
from ...targets.chat.messages import for_api, normalise
from ...targets.chat.rows import DAY, VARIABLES
from ...targets.chat.written_ids import ids_in_response
from ...targets.images.pictures import UnreadablePicture
from ..rows.traffic import reason_of
from .conversations import Answer, ChatRequest, Failure, SamplingConfig
from .regenerate import ClientConfig

if TYPE_CHECKING:
    import openai

NOT_REACHED = ("ConnectError", "ConnectTimeout")  # names of exceptions of the HTTP library that `openai` uses
AS_WRITTEN = {"return_token_ids": True, "skip_special_tokens": False}  # for the answer as the target wrote it
CONNECT_SECONDS = 10.0
LONGEST_BACKOFF = 60  # seconds between two attempts
FAILURES_IN_A_ROW = 3  # after which a server is paused; fewer may be the fault of one bad request
UNKNOWN_KEY = (
    r"(?i)\b(extra|unknown|unrecogni[sz]ed|unsupported|unexpected)\b.*\b(arguments?|fields?|inputs?|keys?|param\w+)\b"
)
FIRST_REST, LONGEST_REST = 1.0, 30.0  # seconds for which a failing server gets no requests


class AttemptFailed(Exception):
    """An attempt that failed and may be repeated, at this server or another one."""

    def __init__(self, problem: str, *, has_reached: bool = True, rest: float | None = None):
        """has_reached: whether a server accepted the request, which may then be the cause. rest: seconds for which the
        server asked to get no requests (Retry-After)."""
        super().__init__(problem)
        self.has_reached, self.rest = has_reached, rest


@dataclass
class Server:
    """A server, and how its last requests went."""

    address: Address
    client: "openai.OpenAI"
    num_busy: int = 0
    num_failures: int = 0  # in a row
    rests_until: float = 0.0  # time.monotonic(), in seconds
    problem: str = ""
    refused: set[str] = field(default_factory=set)  # optional keys of a request that it does not take

    @property
    def url(self) -> str:
        return self.address.url

    @property
    def is_failing(self) -> bool:
        return self.num_failures >= FAILURES_IN_A_ROW

    def is_free(self, now: float, concurrency: int) -> bool:
        return self.rests_until <= now and self.num_busy < (1 if self.is_failing else concurrency)


class OpenAIClient:
    """Sends each request to the least busy server; safe to call from many threads.

    A request that failed may be repeated at another server, so `openai` itself does not repeat it.
    """

    def __init__(self, addresses: Sequence[Address], *, model: str, config: ClientConfig):
        """model: the name by which they serve it.

        BadInput: no `openai` package, no server that takes connections.
        """
        self.model, self.config = model, config
        self._servers = [Server(address, self._connected(address)) for address in addresses]
        self._changed = Condition()
        self._last_success = time.monotonic()
        first_answer(addresses, lambda one: one.get("/v1/models"))  # or none can be reached

    @property
    def num_threads(self) -> int:
        """Number of concurrent callers that keeps all servers busy."""
        return self.config.concurrency * len(self._servers)

    def __call__(self, request: ChatRequest) -> Answer:
        """The answer. Raises: Failure where the servers refuse this request, or all attempts failed; BadInput if no
        request can succeed (key, model name, no server)."""
        num_failed, pause = 0, 0.0
        while True:
            time.sleep(random.uniform(0.5, 1.0) * pause)  # random, so that threads do not retry at the same time
            try:
                with self._free_server() as server:
                    return self._attempt(server, request)
            except AttemptFailed as failed:
                num_failed += failed.has_reached
                if num_failed == self.config.num_attempts:
                    raise Failure(f"{failed} ({num_failed} attempts)") from failed
                pause = failed.has_reached * min(self.config.backoff * 2 ** (num_failed - 1), LONGEST_BACKOFF)

    def _connected(self, address: Address) -> "openai.OpenAI":
        try:
            import openai
        except ImportError as error:
            raise BadInput("asking servers needs the openai package: pip install openai") from error
        return openai.OpenAI(
            base_url=f"{address.url}/v1",
            api_key=address.key or "EMPTY",  # ignored by servers without a key
            timeout=openai.Timeout(self.config.timeout, connect=CONNECT_SECONDS),
            max_retries=0,
            # as `Address` asks: by no proxy of the environment, with its certificates (SSL_CERT_FILE)
            http_client=openai.DefaultHttpxClient(trust_env=False, verify=ssl.create_default_context()),
        )

    def _attempt(self, server: Server, request: ChatRequest) -> Answer:
        """Raises: AttemptFailed, Failure, BadInput."""
        import openai

        optional, left_out = self.optional(request.sampling), set(server.refused)
        while True:
            sent = {key: value for key, value in optional.items() if key not in left_out}
            try:
                payload = self._asked(server, request, sent)
            except openai.APIStatusError as error:
                if refused := refused_keys(error, set(sent)):
                    left_out |= refused
                    continue
                body = error.body  # of {"error": ...} the inner part
                told = server.address.hide(str((body.get("message", body) if isinstance(body, dict) else body) or ""))
                problem = f"{server.url}: {error.status_code} {error.response.reason_phrase}: {told or '(no text)'}"
                if error.status_code in FORBIDDEN:
                    problem += f"; its key is read from {KEY_NAME}" + ("" if server.address.key else ", none is set")
                if error.status_code in STOPPING:
                    raise BadInput(problem) from error
                if may_pass(error.status_code):
                    raise AttemptFailed(problem, rest=retry_after(error.response.headers)) from error
                raise Failure(problem) from error
            except openai.APIConnectionError as error:
                if type(error.__cause__).__name__ in NOT_REACHED:
                    problem = f"{server.url}: cannot be reached: {first_line(error.__cause__ or error)}"
                    raise AttemptFailed(problem, has_reached=False) from error
                if isinstance(error, openai.APITimeoutError):
                    raise AttemptFailed(f"{server.url}: no answer within {self.config.timeout:g} s") from error
                raise AttemptFailed(f"{server.url}: connection lost: {first_line(error.__cause__ or error)}") from error
            self._note_refused(server, left_out)
            left_to_server = tuple(sorted(left_out & optional.keys() & NEUTRAL.keys()))
            return replace(self._read(payload, request, server.url), left_to_server=left_to_server)

    def optional(self, sampling: SamplingConfig) -> dict[str, Any]:
        """The keys that a server may refuse: those that are sent only because it may have a default of its own, and
        those that ask for the answer as the target wrote it."""
        chosen = {"top_k": sampling.top_k or None, "top_p": sampling.top_p, **self.config.extra_body}
        return {key: value for key, value in {**NEUTRAL, **AS_WRITTEN}.items() if chosen.get(key) is None}

    def _asked(self, server: Server, request: ChatRequest, optional: dict[str, Any]) -> bytes:
        """The server's response. Args: optional: those of the `optional` keys to send. Raises: openai's errors."""
        import openai

        sampling, variables = request.sampling, variables_of(request)
        extra = self._extra(sampling, {**optional, **({VARIABLES: variables} if variables else {})})
        try:
            messages: Any = [for_api(message) for message in request.messages]
        except UnreadablePicture as error:
            raise Failure(str(error)) from error
        tools: Any = request.tools
        response = server.client.chat.completions.with_raw_response.create(
            model=self.model,
            messages=messages,
            tools=tools or openai.omit,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=request.seed,
            extra_body=extra,
        )
        return response.content

    def _extra(self, sampling: SamplingConfig, keys: dict[str, Any]) -> dict[str, Any]:
        """Keys of a request that openai's library has no names for, with those that the user gave."""
        extra = {**keys, **({"top_k": sampling.top_k} if sampling.top_k else {})}
        for key, value in self.config.extra_body.items():
            both = isinstance(value, Mapping) and isinstance(extra.get(key), Mapping)
            extra[key] = {**extra[key], **value} if both else value
        return extra

    def _read(self, payload: bytes, request: ChatRequest, url: str) -> Answer:
        """The answer in a server's response. Raises AttemptFailed if it has none."""
        day = {DAY: date.today().isoformat()}  # that a template may have printed
        told = {**variables_of(request), **self.config.extra_body.get(VARIABLES, {}), **day}
        return replace(answer_of(payload, url), variables=told)

    def _note_refused(self, server: Server, left_out: set[str]) -> None:
        """Leave these keys out of later requests to the server, which has just answered one without them."""
        with self._changed:
            new = sorted(left_out - server.refused)
            server.refused |= left_out
        if settings := [key for key in new if key in NEUTRAL]:
            what = "is left to its own default" if len(settings) == 1 else "are left to its own defaults"
            self._say(server, settings, f"{what}; the rows say so")
        if asked := [key for key in new if key in AS_WRITTEN]:
            self._say(server, asked, "rows may lack the ids of answers, and special tokens in their text")

    def _say(self, server: Server, refused: list[str], what: str) -> None:
        print(f"headstart: {server.url}: refuses {', '.join(refused)}: {what}", file=sys.stderr)

    # -----------------------------------------------------------------------------------------------------------------
    # Which server is asked next

    @contextmanager
    def _free_server(self) -> Iterator[Server]:
        """A server for one attempt; an AttemptFailed is recorded as its failure."""
        server, failed = self._acquire(), None
        try:
            yield server
        except AttemptFailed as error:
            failed = error
            raise
        finally:
            with self._changed:
                server.num_busy -= 1
                if failed is None:  # the server responded
                    server.num_failures, self._last_success = 0, time.monotonic()
                else:
                    self._let_rest(server, failed)
                self._changed.notify_all()

    def _acquire(self) -> Server:
        """The least busy server that is not paused; waits for one. A failing server gets one request at a time.

        Raises: BadInput if all servers have failed for longer than `patience`.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                free = [server for server in self._servers if server.is_free(now, self.config.concurrency)]
                if free:
                    server = min(free, key=lambda server: server.num_busy)
                    server.num_busy += 1
                    return server
                patience = self.config.patience
                if now - self._last_success > patience and all(server.num_failures for server in self._servers):
                    problems = "; ".join(server.problem for server in self._servers)
                    raise BadInput(f"no server has answered for {patience:g} s: {problems}")
                until_free = min(server.rests_until for server in self._servers) - now
                self._changed.wait(min(max(until_free, 0.01), 1.0))

    def _let_rest(self, server: Server, failed: AttemptFailed) -> None:
        server.problem, now = str(failed), time.monotonic()
        if server.rests_until <= now:  # otherwise the request was sent before the server was paused
            server.num_failures += 1
        if not failed.has_reached:
            server.num_failures = max(server.num_failures, FAILURES_IN_A_ROW)
        rest = 0.0
        if failed.rest is not None:
            rest = min(failed.rest, self.config.patience)
        elif server.is_failing:
            rest = min(FIRST_REST * 2 ** min(server.num_failures - FAILURES_IN_A_ROW, 10), LONGEST_REST)
        server.rests_until = max(server.rests_until, now + rest)


def answer_of(payload: bytes, url: str) -> Answer:
    """The answer in a server's chat completion (JSON). Raises AttemptFailed if it has none."""
    try:
        data = json.loads(payload)
        [choice, *_] = data["choices"]
        given = {key: value for key, value in choice["message"].items() if value is not None}
        [message] = normalise([{"content": "", **given, "role": "assistant"}], url)
        finish_reason = reason_of(choice) or "stop"
        usage = data.get("usage") or {}
        counts = [int(usage.get(key) or 0) for key in ("prompt_tokens", "completion_tokens")]
        ids = ids_in_response(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        start = " ".join(payload[:60].decode("utf-8", "replace").split())
        raise AttemptFailed(f"{url}: not a chat completion but {start!r}") from error
    if finish_reason in NOT_ANSWERED:
        raise AttemptFailed(f"{url}: the server gave up: finish_reason {finish_reason}")
    answer = {key: message[key] for key in ("role", "content", "reasoning_content") if key in message}
    if message.get("tool_calls"):
        answer["tool_calls"] = message["tool_calls"]
    return Answer(answer, finish_reason, num_prompt_tokens=counts[0], num_tokens=counts[1], ids=ids)


def variables_of(request: ChatRequest) -> dict[str, Any]:
    """What the server's chat template is told; not the day, which servers take from their own clock."""
    return {name: value for name, value in request.variables.items() if name != DAY}


def refused_keys(error: "openai.APIStatusError", sent: set[str]) -> set[str]:
    """Which of the keys that were sent a refusal is about: those that it names, or all if it speaks of unknown keys
    without a name."""
    if error.status_code not in OF_A_KEY:
        return set()
    text = error.response.text
    named = {key for key in sent if re.search(rf"\b{key}\b", text)}
    return named or (sent if re.search(UNKNOWN_KEY, text) else set())


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds until a retry, from the header Retry-After, which has a number or a date; None: there is none."""
    value = headers.get("Retry-After", "")
    try:
        is_number = value.replace(".", "", 1).isdigit()
        return float(value) if is_number else max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
