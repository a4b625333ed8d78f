"""vLLM that gives states, one that is started for them or one that runs: its flags, and its reader once it is the right
one."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ...base.files import remove
from ...engines.servers.process import ServerProcess
from ...engines.servers.setting import EngineSetting
from ...targets.loading import TargetConfig
from ...targets.target import Target
from ...targets.weights.served_adapter import ServedAdapter, lora_of
from ..storage.features import Reads
from . import in_vllm
from .reading import ServedReader, check_server, label_of, layers_asked
from .state_server import StateServer

CONNECTOR = Path(in_vllm.__path__[0])  # what a server needs on its PYTHONPATH
STATES, LOG = "states", "vllm.log"  # in the folder of what is made of the states, while a server is up
HALF = ("--gpu-memory-utilization", "0.5")  # what vLLM may take of a GPU; its own default is nearly all


@contextmanager
def served_states(
    engine: EngineSetting,
    target: Target,
    reads: Reads,
    folder: Path,
    *,
    source: TargetConfig,
    max_length: int,
    storage_dtype: str,
    console: Console,
    rank: int = 0,
) -> Iterator[ServedReader]:
    """The server's states, once it has been found to be the right one; one of our own ends with the block.

    Args: folder: of what is made of them. source: how the target was loaded. max_length: tokens of the longest row.
    Raises: BadInput, naming what differs, if the server does not give what is read of this target.
    """
    label, adapter = label_of(folder, rank), lora_of(target.adapter)
    with ExitStack() as running:
        if engine.servers:
            server = StateServer(*engine.servers, label=label, adapter=adapter)
        else:
            own = own_server(engine, target, reads, folder, source=source, max_length=max_length)
            console.print(own.line, soft_wrap=True, markup=False, highlight=False)
            running.enter_context(own)
            server = StateServer(own.url, label=label, adapter=adapter, is_gone=own.is_gone)
        check_server(server, target, layers_asked(target, reads), max_length=max_length, revision=source.revision)
        server.clear()  # of a run that was killed
        running.callback(server.clear)
        with ServedReader(target, reads, server, storage_dtype=storage_dtype) as reader:
            yield reader
    if not engine.servers:
        clear_server_files(folder)


def own_server(
    engine: EngineSetting, target: Target, reads: Reads, folder: Path, *, source: TargetConfig, max_length: int
) -> ServerProcess:
    """A server for them, not yet started. Args: as of `served_states`."""
    clear_server_files(folder)
    (folder / STATES).mkdir()
    states = Path(tempfile.mkdtemp(dir=folder / STATES))  # a server that is just ending may still write into another
    words = ["--dtype", str(target.dtype).removeprefix("torch."), "--max-model-len", str(max_length)]
    words += ["--revision", source.revision] if source.revision else []
    words += ["--trust-remote-code"] if source.trust_remote_code else []
    layers, how = (
        layers_asked(target, reads),
        {"arguments": words, "adapter": lora_of(target.adapter), "log": folder / LOG},
    )
    return state_process(engine, target.name, layers, states, **how)


def state_process(
    engine: EngineSetting,
    target: str,
    layers: Sequence[int],
    states: Path,
    *,
    arguments: Sequence[str],
    adapter: ServedAdapter | None,
    log: Path,
    while_starting: Callable[[], object] = lambda: None,
) -> ServerProcess:
    """A server that gives the states of these layers as files in the folder `states`, not yet started. Args: the others
    as of `EngineSetting.process`."""
    before = os.environ.get("PYTHONPATH")
    path = str(CONNECTOR) if not before else f"{CONNECTOR}{os.pathsep}{before}"
    how = {"drafting": serving_flags(layers, states), "arguments": arguments, "environment": {"PYTHONPATH": path}}
    return engine.process(target, **how, adapter=adapter, log=log, while_starting=while_starting)


def beside_training() -> Sequence[str]:
    """Flags of a server on the machine that trains, which leave the training room on its GPU."""
    return HALF if torch.cuda.is_available() else ()


def serving_flags(layers: Sequence[int], folder: Path) -> list[str]:
    """What makes vLLM give the states of these layers, as files in a folder."""
    states: dict[str, Any] = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    states["draft_model_config"] = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    ours: dict[str, Any] = {"kv_connector": "HeadstartStates", "kv_connector_module_path": "headstart_states"}
    ours |= {"kv_role": "kv_producer", "kv_connector_extra_config": {"folder": str(folder.absolute())}}
    return ["--speculative-config", json.dumps(states), "--kv-transfer-config", json.dumps(ours)]


def clear_server_files(folder: Path) -> None:
    """Remove what a server of our own left."""
    remove(folder / STATES)
    remove(folder / LOG)
