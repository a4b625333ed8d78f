"""Running servers that give the target's states for token ids, what they say of themselves, and their files.

A file per answer, on a disk or in shared memory that both sides see; the one who asked removes it.
"""

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from http.client import HTTPException
from pathlib import Path
from threading import Event, Lock
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...base.differing import first_difference
from ...base.errors import BadInput, first_line
from ...engines.servers.address import Address, first_answer
from ...targets.weights.served_adapter import ServedAdapter
from .in_vllm.headstart_files import FAILED

REQUEST_SECONDS = 3600.0  # of one answer
PATIENCE = 600.0  # seconds for which a server may be away, such as for a restart
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds between two attempts
FILE_SECONDS = 60.0  # until a file is there; the server answers when it begins to write
SHORTEST, LONGEST = 0.001, 0.05  # seconds between two looks
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # by no proxy of the environment
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
    adapter: str | None  # `weights_digest` of the adapter with which they were computed
    max_length: int  # tokens of a row, with one that is generated

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        known = {field.name: told[field.name] for field in fields(cls)}
        return cls(**{**known, "layers": tuple(told["layers"])})

    def check_same(self, other: "StatesIdentity", *, url: str) -> None:
        """Raises BadInput, naming what differs, if a server is another one than before."""
        if difference := first_difference(asdict(self), asdict(other)):
            raise BadInput(f"server {url}: is another one than before: {difference}")


@dataclass(frozen=True)
class ServedStates:
    """The states of a row of T tokens, as the server gives them."""

    states: Tensor  # [T, L, D] in the server's dtype, L in the order of served.layers
    served: StatesIdentity
    next_token: int  # the likeliest one after the row
    next_logprob: float


class Gone(BadInput):
    """A server that was not to be waited for."""


class Lost(Exception):
    """States that did not come, such as those of a server that was ended after its answer: they may be asked again."""


def taken(path: Path, *, patience: float) -> dict[str, Tensor]:
    """The tensors of an answer's file, which is then removed.

    Raises: BadInput if this process does not see the file, or the server could not write it; Lost if none comes.
    """
    until, pause = time.monotonic() + patience, SHORTEST
    while not path.exists():
        failed = path.with_suffix(FAILED)
        if failed.exists():
            why = failed.read_text()
            failed.unlink(missing_ok=True)
            raise BadInput(f"{path}: the server could not write it: {why}")
        if not path.parent.is_dir():
            raise BadInput(f"{path.parent}: not seen here: the server's folder of states must be on a shared disk")
        if time.monotonic() > until:
            raise Lost(f"{path}: not there {patience:g} s after the answer")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    finally:
        path.unlink(missing_ok=True)


@dataclass
class StatePlace:
    """One of the servers, and how it is doing."""

    address: Address
    num_busy: int = 0
    lost_at: float = -math.inf  # time.monotonic() of its last failure: for a while others are asked first


class StateServer:
    """A server by its address, or several that share the rows out, where a lost one's go to the others; `ask` may be
    called from many threads at a time.

    served: what the first said at first; every answer must come from a server that says the same.
    """

    def __init__(
        self,
        *urls: str,
        label: str,
        adapter: ServedAdapter | None = None,
        is_gone: Callable[[], str | None] = lambda: None,
    ):
        """Args: urls: such as http://localhost:8000. label: hex digits, by which the server marks what is
        for this asker. adapter: of the target, by whose name it is asked. is_gone: why it is not to be waited for;
        None: it is.

        Raises: BadInput if no such server answers.
        """
        self.places = [StatePlace(Address.of(url, where="engine.server")) for url in urls]
        self.url = ", ".join(place.address.url for place in self.places)
        self.label, self.is_gone, self.patience, self.file_patience = label, is_gone, PATIENCE, FILE_SECONDS
        self._folders = set[Path]()  # of the servers' files
        self._closed, self._choosing = Event(), Lock()
        self.served: StatesIdentity | None = None
        name = "" if adapter is None else adapter.name
        self.model = first_answer([place.address for place in self.places], lambda one: one.serving(name)).model

    def ask(self, token_ids: Sequence[int]) -> ServedStates:
        """The states of a row [T].

        Raises: BadInput if the server refuses the row, is another one than before, or stays away; Gone by `is_gone`.
        """
        lost_since, pause = math.inf, FIRST_PAUSE
        while True:
            place = self._taken()
            try:
                return self._attempt(place.address, list(map(int, token_ids)))
            except Lost as lost:
                place.lost_at = time.monotonic()
                lost_since = min(lost_since, place.lost_at)
                why = self.is_gone()
                if why is not None:
                    raise Gone(f"server {self.url}: {why}") from lost
                if time.monotonic() - lost_since > self.patience:
                    raise BadInput(f"server {self.url}: {lost}; gave up after {self.patience:g} s") from lost
            finally:
                with self._choosing:
                    place.num_busy -= 1
            if self._closed.wait(pause):
                raise BadInput(f"server {self.url}: no longer asked")
            pause = min(2 * pause, LONGEST_PAUSE)

    def _taken(self) -> StatePlace:
        """The least busy server of those that were not lost just now, if there are any."""
        with self._choosing:
            now = time.monotonic()
            place = min(self.places, key=lambda one: (now - one.lost_at < LONGEST_PAUSE, one.num_busy))
            place.num_busy += 1
            return place

    def clear(self) -> None:
        """Remove what this asker left at the server when it was killed. No answer may be under way."""
        for path in (path for folder in self._folders for path in folder.glob(f"*{self.label}-*")):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let threads that wait for the server to come back give up."""
        self._closed.set()

    def _attempt(self, address: Address, ids: list[int]) -> ServedStates:
        """Raises: Lost if another attempt may do."""
        asked: dict[str, Any] = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        asked |= {"logprobs": 1, "return_tokens_as_token_ids": True, "kv_transfer_params": {"headstart": self.label}}
        said = self._request(address, asked)
        try:
            told = said["kv_transfer_params"]["headstart"]
            path, served = Path(told["file"]), StatesIdentity.of(told["served"])
            likely = said["choices"][0]["logprobs"]
            token, logprob = int(likely["tokens"][0].removeprefix("token_id:")), float(likely["token_logprobs"][0])
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise BadInput(f"server {address.url}: {NOT_OURS}") from error
        self._folders.add(path.parent)
        tensors = taken(path, patience=self.file_patience)
        if self.served is None:
            self.served = served
        self.served.check_same(served, url=address.url)
        if tensors["token_ids"].tolist() != ids:
            raise BadInput(f"server {address.url}: gave the states of other tokens than were asked for")
        return ServedStates(tensors["states"], served, token, logprob)

    def _request(self, address: Address, asked: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", **address.headers()}
        url = f"{address.url}/v1/completions"
        request = urllib.request.Request(url, data=json.dumps(asked).encode(), headers=headers)
        try:
            with DIRECT.open(request, timeout=REQUEST_SECONDS) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            told = address.hide(error.read().decode(errors="replace"))
            problem = f"{error.code} {error.reason}: {told}"
            if error.code >= 500 or error.code in (408, 425, 429):
                raise Lost(problem) from error
            raise BadInput(f"server {address.url}: {problem}") from error
        except (OSError, ValueError, HTTPException) as error:  # no connection, or one that broke
            raise Lost(first_line(error)) from error
