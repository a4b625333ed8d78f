"""A server that runs somewhere: its URL, the model that it serves, its key, short questions to it, and its refusals."""

import http.client
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from ...base.errors import BadInput, first_line

KEY_NAME = "HEADSTART_API_KEY"  # the variable of the environment that has a server's key; no option takes one
T = TypeVar("T")
SHORT = 60.0  # seconds for an answer that takes no decoding
# what a refusal means, by its HTTP status
FORBIDDEN = (401, 403)  # it refuses the key, or wants one
STOPPING = (*FORBIDDEN, 404, 405)  # no request can be answered before the user changes something
OF_A_KEY = (400, 422)  # perhaps of a key of the request that the server does not take
NOT_ANSWERED = ("abort", "error")  # finish reasons of an answer that the server aborted


def may_pass(status: int) -> bool:
    """Whether a refused request may be answered later. Args: status: 0: the connection failed or nothing came."""
    return status in (0, 408, 425, 429) or status >= 500


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself; None: it does not. version: of vLLM. max_model_len: tokens of a question with its
    answer at most."""

    version: str | None = None
    max_model_len: int | None = None


@dataclass(frozen=True)
class Address:
    """url: without a path behind /v1. model: the name by which it serves. key: never shown or stored."""

    url: str
    model: str = ""
    key: str = ""

    def __repr__(self) -> str:
        return f"Address({self.url}, {self.model})"

    @classmethod
    def of(cls, url: str, *, where: str) -> "Address":
        """Args: where: the option. Raises BadInput on another form of URL, or a key that no header can hold."""
        key = os.environ.get(KEY_NAME, "").strip()
        if not re.fullmatch(r"[!-~]*", key):
            raise BadInput(f"{KEY_NAME}: has a line break or other invalid character in it")
        try:
            parts = urlsplit(url)
            is_good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:
            raise BadInput(f"{where}: not a URL") from None
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise BadInput(f"{where}: a URL with a password or parameters; a key is read from {KEY_NAME}")
        if not is_good:
            raise BadInput(f"{where} {url!r}: expected a URL such as http://localhost:8000")
        return cls(url.rstrip("/").removesuffix("/v1"), key=key)

    @property
    def parts(self) -> SplitResult:
        return urlsplit(self.url)

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def hide(self, text: str) -> str:
        """A server's words in one line, without the key if they repeat it."""
        line = " ".join(text.split())[:300]
        return line.replace(self.key, "***") if self.key else line

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises BadInput if nothing answers."""
        return self._asked("GET", path)

    def post(self, path: str, value: Any = None, *, seconds: float = SHORT) -> bytes:
        """The body. Raises BadInput if nothing answers within so long, or the answer is not 200."""
        status, body = self._asked("POST", path, json.dumps(value), seconds=seconds)
        if status != 200:
            raise BadInput(f"{self.url}{path}: {status}: {self.hide(body.decode(errors='replace'))}")
        return body

    def _asked(self, method: str, path: str, body: str | None = None, *, seconds: float = SHORT) -> tuple[int, bytes]:
        parts = self.parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=seconds)
        try:
            headers = {"Content-Type": "application/json", **self.headers()}
            connection.request(method, f"{parts.path}{path}", body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise BadInput(f"{self.url}: cannot be reached: {first_line(error)}") from error
        finally:
            connection.close()

    def serving(self, model: str = "", *, target: str = "") -> "Address":
        """With the name of its model. Args: model: the name that is wanted; empty: that of the target, or of the only
        model that it has. target: folder or hub id; empty: not known.

        Raises: BadInput if it does not answer, refuses the key, or serves no such model, or several others."""
        cards = self._cards()
        names = [card["id"] for card in cards]
        shown = ", ".join([*names[:5], *["..."] * (len(names) > 5)])
        if model and model not in names:
            raise BadInput(f"{self.url}: serves {shown}, not {model}")
        found = {model: model} if model else models_of(cards, target)
        if len(found) > 1:
            wanted = f"give one the target's name, {PurePath(target).name}" if target else "let it serve one alone"
            raise BadInput(f"{self.url}: serves several models, {shown}: {wanted}")
        return replace(self, model=next(iter(found.values())))

    def facts(self) -> ServerFacts:
        """Raises BadInput as `serving`."""
        cards, told = {card["id"]: card for card in self._cards()}, self.json("/version")
        card = cards.get(self.model, {})
        length = card.get("max_model_len") or cards.get(card.get("parent", ""), {}).get("max_model_len")
        return ServerFacts(told.get("version") if isinstance(told, dict) else None, length)

    def _cards(self) -> list[dict[str, Any]]:
        """What it says of each model that it serves, at least its `id`."""
        status, body = self.get("/v1/models")
        if status in FORBIDDEN:
            raise BadInput(
                f"{self.url}: {status}: it refuses the key in {KEY_NAME}" + ("" if self.key else ", none is set")
            )
        try:
            cards = [{**entry, "id": str(entry["id"])} for entry in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            cards = []
        if status != 200 or not cards:
            raise BadInput(f"{self.url}: /v1/models answers {status}: no OpenAI-compatible server")
        return cards

    def read(self, path: str) -> str | None:
        """The text at a path; None if there is none."""
        status, body = self.get(path)
        return body.decode(errors="replace") if status == 200 else None

    def json(self, path: str) -> Any:
        """The JSON at a path; None if there is none."""
        text = self.read(path)
        try:
            return None if text is None else json.loads(text)
        except ValueError:
            return None


def models_of(cards: Sequence[dict[str, Any]], target: str) -> dict[str, str]:
    """Names of the models that may be the target, by what they are: those of its name or path, else of its last part,
    else all. Adapters (with a `parent`) are left out, and two names of one `root` are one model."""
    own = [card for card in cards if not card.get("parent")] or cards
    paths = [{card["id"], str(card.get("root") or card["id"])} for card in own]
    last = PurePath(target).name.lower()
    same = [target in one for one in paths]
    alike = [bool(last) and last in {PurePath(path).name.lower() for path in one} for one in paths]
    chosen = next((some for some in (same, alike) if any(some)), [True] * len(own))
    found = [card for card, is_chosen in zip(own, chosen, strict=True) if is_chosen]
    return {str(card.get("root") or card["id"]): card["id"] for card in reversed(found)}  # of several names the first


def first_answer(addresses: Sequence[Address], ask: Callable[[Address], T]) -> T:
    """What the first of some servers says that does not fail. Raises BadInput, as each of them, if all do."""
    problems = list[str]()
    for address in addresses:
        try:
            return ask(address)
        except BadInput as error:
            problems.append(str(error))
    raise BadInput("; ".join(problems))
