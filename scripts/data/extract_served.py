"""`headstart data extract --engine vllm`: the states come from a vLLM server, one of our own or a running one."""

import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ...configs.errors import BadInput
from ...configs.files import remove
from ...data_pipelines.config import check_choice
from ...data_pipelines.served.reading import ServedReader, check_server, label_of, layers_asked
from ...data_pipelines.served.state_server import StateServer
from ...data_pipelines.served.vllm_process import VllmServer, serving_flags
from ...data_pipelines.storage.features import Reads
from ...heads.loading import TargetConfig
from ...heads.target import Target

STATES, LOG = "states", "vllm.log"  # in the output, until the extraction is finished


@dataclass(frozen=True)
class ExtractEngine:
    """What reads the rows, as the command's options say. Raises BadInput if they contradict each other."""

    name: str
    server: str | None = None  # the address of a running one
    python: str | None = None  # of an environment with vLLM
    flags: str | None = None  # of a server of our own, in shell syntax

    def __post_init__(self) -> None:
        check_choice("--engine", self.name, ("transformers", "vllm"))
        for option, value in (("--server", self.server), ("--vllm-python", self.python), ("--vllm-flags", self.flags)):
            if value is not None and not self.is_vllm:
                raise BadInput(f"{option} {value}: for --engine vllm only")
            if value is not None and self.server not in (None, value):
                raise BadInput(f"{option} {value}: not with --server, which runs already")

    @property
    def is_vllm(self) -> bool:
        return self.name == "vllm"

    @contextmanager
    def reader(
        self,
        target: Target,
        reads: Reads,
        output: Path,
        *,
        source: TargetConfig,
        max_length: int,
        storage_dtype: str,
        console: Console,
    ) -> Iterator[ServedReader]:
        """The server's states, once it has been found to be the right one.

        Args: source: how the target was loaded. max_length: tokens of the longest row.
        """
        clear_server_files(output)
        label = label_of(output)
        with ExitStack() as running:
            if self.server is None:
                arguments = self.arguments(target, reads, output, source=source, max_length=max_length)
                own = VllmServer(arguments, python=self.python or sys.executable, log=output / LOG)
                console.print(own.line, soft_wrap=True, markup=False, highlight=False)
                running.enter_context(own)
                server = StateServer(own.url, label=label, is_gone=own.is_gone)
            else:
                server = StateServer(self.server, label=label)
            check_server(server, target, reads, max_length=max_length, revision=source.revision)
            server.clear()  # of a run that was killed
            with ServedReader(target, reads, server, storage_dtype=storage_dtype) as reader:
                yield reader
            server.clear()
        clear_server_files(output)

    def arguments(
        self, target: Target, reads: Reads, output: Path, *, source: TargetConfig, max_length: int
    ) -> list[str]:
        """Of vLLM's server; the user's come last."""
        states = output / STATES
        states.mkdir()
        folder = Path(tempfile.mkdtemp(dir=states))  # a server that is just ending may still write into another
        words = ["--model", target.name, "--dtype", str(target.dtype).removeprefix("torch.")]
        words += ["--max-model-len", str(max_length), "--no-enable-prefix-caching"]
        words += ["--revision", source.revision] if source.revision else []
        words += ["--trust-remote-code"] if source.trust_remote_code else []
        return [*words, *serving_flags(layers_asked(target, reads), folder), *shlex.split(self.flags or "")]


def clear_server_files(output: Path) -> None:
    """Remove what a server of our own left."""
    remove(output / STATES)
    remove(output / LOG)
