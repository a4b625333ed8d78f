"""While the main process prepares a run, the others wait for as long as that takes, and say that they do."""

import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from headstart.configs.errors import BadInput
from headstart.train import main_process
from torch._C._distributed_c10d import HashStore


@pytest.fixture
def rank(monkeypatch):
    """rank(i): an accelerator of two processes that share a store; broadcasts of these tests go through the store."""
    store, broadcast = HashStore(), {"since": 0.0}
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(main_process, "turns", Counter(), raising=False)

    def joined(problem: list) -> None:
        if threading.current_thread() is threading.main_thread():  # the rank that waits
            broadcast.update(since=time.perf_counter())

    monkeypatch.setattr(main_process, "broadcast_object_list", joined)

    def make(index: int) -> Any:
        return SimpleNamespace(is_main_process=index == 0, process_index=index, num_processes=2, broadcast=broadcast)

    return make


def test_ranks_wait_outside_of_collectives_until_the_main_process_is_done(rank, monkeypatch, capsys):
    """A collective gives up after ten minutes; tokenising takes longer than that. Each turn is waited for."""
    monkeypatch.setattr(main_process, "HEARTBEAT_SECONDS", 0.05, raising=False)
    waiting = rank(1)
    for _ in range(2):
        ended = []

        def prepare(ended: list[float] = ended) -> None:
            time.sleep(0.5)
            ended.append(time.perf_counter())

        main = threading.Thread(target=main_process.on_main, args=(rank(0), prepare))
        main.start()
        main_process.on_main(waiting, lambda: pytest.fail("the main process alone works"))
        main.join()
        assert waiting.broadcast["since"] >= ended[0], "no collective was begun before"
    assert capsys.readouterr().err.count("waiting for the main process") >= 4


def test_a_main_process_that_fails_keeps_nobody_waiting(rank):
    def fail() -> None:
        raise BadInput("data.train: no such file")

    with pytest.raises(BadInput, match="no such file"):
        main_process.on_main(rank(0), fail)
    began = time.perf_counter()
    main_process.on_main(rank(1), lambda: None)
    assert time.perf_counter() - began < 5


def test_nobody_waits_for_ever(rank, monkeypatch):
    monkeypatch.setattr(main_process, "LONGEST_WAIT_SECONDS", 0.2, raising=False)
    with pytest.raises(BadInput, match="the main process has not been done"):
        main_process.on_main(rank(1), lambda: None)
