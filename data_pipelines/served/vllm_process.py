"""A vLLM server of our own, which gives states: its command, its start, and its end with this process."""

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...configs.children import answers_in_time, end_with_parent, free_port
from ...configs.errors import BadInput
from . import in_vllm

CONNECTOR = Path(in_vllm.__path__[0])  # what a server needs on its PYTHONPATH
MODULE = "vllm.entrypoints.openai.api_server"
START_SECONDS = 7200.0  # for reading the weights of large targets
END_SECONDS = 30.0
LAST_BYTES = 200_000  # of a log, in which an error is looked for
QUOTED = re.compile(r"(?:^|\] )(\w*(?:Error|Exception): .+)")


def serving_flags(layers: Sequence[int], folder: Path) -> list[str]:
    """What makes vLLM give the states of these layers, as files in a folder."""
    states: dict[str, Any] = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    states["draft_model_config"] = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    ours: dict[str, Any] = {"kv_connector": "HeadstartStates", "kv_connector_module_path": "headstart_states"}
    ours |= {"kv_role": "kv_producer", "kv_connector_extra_config": {"folder": str(folder.absolute())}}
    return ["--speculative-config", json.dumps(states), "--kv-transfer-config", json.dumps(ours)]


class VllmServer:
    """A server process, which runs during a `with` block. url: its address."""

    def __init__(self, arguments: Sequence[str], *, python: str, log: Path):
        """Args: arguments: of vLLM's server, without its address. python: of an environment with vLLM."""
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        self.command = [python, "-m", MODULE, "--host", "127.0.0.1", "--port", str(port), *arguments]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def line(self) -> str:
        """The command as one would type it."""
        return shlex.join([f"PYTHONPATH={CONNECTOR}", *self.command])

    def __enter__(self) -> Self:
        """Start the server and wait for it. Raises BadInput, with what its log says, if it does not become ready."""
        before = os.environ.get("PYTHONPATH")
        path = str(CONNECTOR) if not before else f"{CONNECTOR}{os.pathsep}{before}"
        # killed at once, it would leave its workers behind
        ended = partial(end_with_parent, os.getpid(), signal.SIGTERM)
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "PYTHONPATH": path},
                    start_new_session=True,  # the terminal's Ctrl-C is for us, who end it
                    preexec_fn=ended,
                )
        except OSError as error:
            raise BadInput(f"--vllm-python {self.command[0]}: {error.strerror}") from error
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the server with its workers."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        with suppress(ProcessLookupError):  # its session, which it leads
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def is_gone(self) -> str | None:
        """Why it ended; None: it runs."""
        code = None if self.process is None else self.process.poll()
        return None if code is None else f"vLLM ended with code {code}: {self.last_words()}"

    def last_words(self) -> str:
        """The first error that its log quotes, which causes the later ones, else the last line."""
        text = self.log.read_bytes()[-LAST_BYTES:].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()] or ["its log is empty"]
        told = next((quoted[1] for line in lines if (quoted := QUOTED.search(line))), lines[-1])
        return told[:400]

    def _wait_until_ready(self) -> None:
        if not answers_in_time(self.url, seconds=START_SECONDS, pause=0.2, why_gone=self.is_gone):
            raise BadInput(f"vLLM: not ready after {START_SECONDS:g} s: {self.last_words()}")
