"""Comparison with llama.cpp's plain decoding: whole answers of both engines in turns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ....heads.drafter import Drafter
from ....heads.target import Target
from ...suites.prompts import Suite
from ..config import MeasureConfig
from ..result import LLAMA_CPP, Result
from ..resume import BatchStore, kept_in
from ..transformers_baseline import Decode, comparable, time_beside
from .llama_server import LlamaServer, ServerFiles
from .served import HEADROOM


def compare_llama_server(
    target: Target,
    drafter: Drafter | None,
    suite: Suite,
    config: MeasureConfig,
    files: ServerFiles,
    *,
    name: str,
    on_prompt: Callable[[], object] = lambda: None,
    store: BatchStore | None = None,
) -> Result:
    """A result for llama-server without drafts, greedy, beside our baseline or our speculation with a drafter.

    Args: files: its binary, and the target as it reads it. name: what the report calls what ours drafted with.
    Raises: BadInput if the server does not come up.
    """
    config = comparable(config, drafter)
    command = files.command(max_length=max(map(len, suite.prompts)) + config.max_new_tokens + HEADROOM)
    if target.device.type == "cpu":
        command += ["-t", str(torch.get_num_threads())]  # as many as ours; its default is the number of cores
    stored = kept_in(store, target, drafter, suite, config, name=name, engine=" ".join(command))
    theirs = plain_decoding(target, command, config)
    return time_beside(
        theirs, target, drafter, suite, config, engine=LLAMA_CPP, name=name, on_prompt=on_prompt, stored=stored
    )


@contextmanager
def plain_decoding(target: Target, command: list[str], config: MeasureConfig) -> Iterator[Decode]:
    """A server as a `Decode` function. It leaves out the end token, which is put back if the target has only one."""
    ends = sorted(target.eos_token_ids)

    def decode(prompt: list[int]) -> tuple[list[int], int]:
        answer = server.answer(prompt, max_new_tokens=config.max_new_tokens)
        new = list(answer.token_ids)
        if answer.is_ended and len(ends) == 1 and new[-1:] != ends:
            new += ends
        return new, answer.num_tokens

    with LlamaServer(command) as server:
        yield decode
