"""Forks the processes of launched runs from one that has imported everything: a start costs one second, not ten.

Run as a script by the tests. Each line of its input is a JSON list: `["start", ENVIRON, ARGUMENTS, LOG]` answers with
the process id of `python -m headstart.train ARGUMENTS` in that environment; `["wait", PID]` with its exit code. Where
there is a file LOG.stuck, rank 1 stops for good in its fourth step.
"""

import json
import os
import sys
import time
from typing import Any

import headstart.train.__main__ as program
import torch._inductor.compile_fx  # noqa: F401  # DeepSpeed imports it at each start
from headstart.heads.loss import chunked
from headstart.heads.nn import kept
from headstart.train import trainer
from headstart.train.loop import Loop


class StuckLoop(Loop):
    def step(self, step: int, batches: Any) -> dict[str, Any] | None:
        if step == 3:
            time.sleep(600)
        return super().step(step, batches)


def become(environ: dict[str, str], log: str) -> None:
    """Take on the environment of a launched process, and write to a file."""
    os.environ.clear()
    os.environ.update(environ)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if "TESTS_CHUNK" in environ:  # sizes at which ranks with other rows differ in what they do
        chunked.CHUNK["cpu"], kept.most_kept = int(environ["TESTS_CHUNK"]), lambda device: int(environ["TESTS_KEPT"])
    if environ.get("RANK") == "1" and os.path.exists(f"{log}.stuck"):
        trainer.Loop = StuckLoop


def serve() -> None:
    for line in sys.stdin:
        word, *values = json.loads(line)
        if word == "wait":
            answer = os.waitstatus_to_exitcode(os.waitpid(values[0], 0)[1])
        else:
            environ, arguments, log = values
            answer = os.fork()
            if answer == 0:
                become(environ, log)
                sys.exit(program.main(arguments))
        print(answer, flush=True)


if __name__ == "__main__":
    serve()
