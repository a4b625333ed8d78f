"""Running llama.cpp's `llama-server` as a subprocess, and querying greedy answers with their timings."""

import importlib.util
import json
import shlex
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....configs.children import answers_in_time, free_port
from ....configs.errors import BadInput, first_line
from ....configs.neutral_sampling import LLAMA_SERVER
from ....heads.export.gguf_file import read_gguf
from ....heads.export.serving import Serving
from ....heads.families import served_families
from ...drafters.llamacpp_cache import DYNAMIC, cache_flags

LOOKUP_SUFFIX = Path(DYNAMIC).suffix
PACKAGE = "xllamacpp"  # named in a binary's place: the server of this Python package, which `wheel` starts
START_SECONDS = 600  # for reading the weights
ANSWER_SECONDS = 3600


@dataclass(frozen=True)
class ServerAnswer:
    """A greedy answer with the server's own counts and times."""

    token_ids: list[int]
    num_tokens: int  # the end token included
    prompt_ms: float
    decode_ms: float  # from the first token to the last
    num_drafted: int = 0
    num_accepted: int = 0
    is_ended: bool = False  # by the target, and not by the limit

    def num_rounds(self, num_draft_tokens: int) -> int:
        """The target's forwards after the prefill. Args: num_draft_tokens: drafts per round; 0: varying.

        Each forward gives its accepted drafts and one token more. If the text ends within accepted drafts, the server
        also counts those after the end, so the rounds are derived from the number of drafts, K per round.
        """
        if self.is_ended and num_draft_tokens and self.num_drafted % num_draft_tokens == 0:
            return self.num_drafted // num_draft_tokens
        return max(0, self.num_tokens - 1 - self.num_accepted)


@dataclass(frozen=True)
class ServerFiles:
    """binary: llama-server, or PACKAGE. target, head: GGUF files. For MTP modules the head may be the target's file; a
    file of answers may replace the head, for look-ups. args: further flags for every server, in shell syntax.

    Raises: BadInput if a file does not exist or the package is not installed."""

    binary: Path
    target: Path
    head: Path | None = None
    args: str = ""

    def __post_init__(self) -> None:
        for what, path in zip(("--server-bin", "--target", "--head"), self.read, strict=False):
            if not path.is_file():
                raise BadInput(f"{what} {path}: no such file")

    @property
    def read(self) -> list[Path]:
        """The server's own file, and those that it reads."""
        return [path for path in (started_by(self.binary)[1], self.target, self.head) if path]

    @property
    def looks_up(self) -> bool:
        """Whether it drafts by looking up answers, a varying number of tokens up to MOST_DRAFTED."""
        return self.head is not None and self.head.suffix == LOOKUP_SUFFIX

    @property
    def served(self) -> tuple[Serving, str]:
        """What the head's family says of engines, and the method, from its GGUF file. Raises BadInput."""
        assert self.head is not None
        file = read_gguf(self.head)
        if file.problem:
            raise BadInput(f"--head {self.head}: {file.problem}")
        in_order = sorted(served_families().values(), key=lambda serving: serving.order)
        return next((serving, method) for serving in in_order if (method := serving.method_of(file)) is not None)

    def command(self, *, max_length: int, num_draft_tokens: int = 0) -> list[str]:
        """The command of a server with one slot, without its address. num_draft_tokens: K; 0: without the head."""
        line = [
            *started_by(self.binary)[0],
            "-m",
            str(self.target),
            "-c",
            str(max_length),
            "-np",
            "1",
            *shlex.split(self.args),
        ]
        if num_draft_tokens:
            assert self.head is not None
            if self.looks_up:
                return [*line, *cache_flags(self.head)]
            serving, method = self.served
            line += shlex.split(serving.server_flags(method, num_draft_tokens, file=str(self.head)) or "")
            if serving.is_module and self.head != self.target:
                line += ["-md", str(self.head)]
        return line


def started_by(binary: Path) -> tuple[list[str], Path]:
    """The command that starts a server, and its file. Raises BadInput if PACKAGE is named and not installed."""
    if str(binary) != PACKAGE:
        return [str(binary.absolute())], binary
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise BadInput(
            f"--server-bin {PACKAGE}: not installed; pip install {PACKAGE}, or name a binary of llama-server"
        )
    return [sys.executable, "-m", f"{__package__}.wheel"], Path(package.origin)


class LlamaServer:
    """A server process, which runs during a `with` block."""

    def __init__(self, command: Sequence[str]):
        self.command = list(command)
        self.log = tempfile.TemporaryFile("w+", errors="replace")
        self.port = free_port()
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "LlamaServer":
        """Start the server. Raises BadInput, with the end of its log, if it does not become ready."""
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        try:
            self.process = subprocess.Popen([*self.command, *address], stdout=self.log, stderr=self.log, text=True)
        except OSError as error:
            raise BadInput(f"--server-bin {self.command[0]}: {error.strerror}") from error
        try:
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def wait_until_ready(self) -> None:
        url = f"http://127.0.0.1:{self.port}"
        if not answers_in_time(url, seconds=START_SECONDS, pause=0.05, why_gone=self.why_gone):
            raise BadInput(f"{self.command[0]}: not ready after {START_SECONDS} s: {self.last_words()}")

    def why_gone(self) -> str | None:
        """Why it ended; None: it runs."""
        code = None if self.process is None else self.process.poll()
        return None if code is None else f"{self.command[0]}: ended with code {code}: {self.last_words()}"

    def last_words(self) -> str:
        """The last line of its log that contains `error`, else the last line."""
        self.log.seek(0)
        lines = [line.strip() for line in self.log if line.strip()] or ["its log is empty"]
        return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])

    def answer(self, prompt: Sequence[int], *, max_new_tokens: int) -> ServerAnswer:
        """Continue a prompt greedily. Raises RuntimeError, with the server's message, if that fails, or if its own
        settings would change the target's choices."""
        sampling = {**LLAMA_SERVER, "temperature": 0.0}
        asked: dict[str, Any] = {"prompt": list(prompt), "n_predict": max_new_tokens, **sampling}
        asked |= {"cache_prompt": False, "return_tokens": True, "stream": False}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion",
            data=json.dumps(asked).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                said = json.load(response)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"llama-server: {error.read().decode(errors='replace')[:300]}") from error
        except (urllib.error.URLError, OSError) as error:
            raise RuntimeError(f"llama-server: {first_line(error)}; its log: {self.last_words()}") from error
        applied = said.get("generation_settings", {})
        if other := [f"{key} {applied[key]}" for key, value in sampling.items() if applied.get(key, value) != value]:
            raise RuntimeError(f"llama-server: does not answer greedily as asked: {', '.join(other)}")
        timings = said["timings"]
        return ServerAnswer(
            token_ids=said["tokens"],
            num_tokens=timings["predicted_n"],
            prompt_ms=timings["prompt_ms"],
            decode_ms=timings["predicted_ms"],
            num_drafted=timings.get("draft_n", 0),
            num_accepted=timings.get("draft_n_accepted", 0),
            is_ended=said.get("stop_type") == "eos",
        )
