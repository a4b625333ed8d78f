"""vLLM's side of served states: a connector that hands out the target's hidden states, request by request.

It runs inside vLLM, from 0.32 on, beside the speculative "method" extract_hidden_states, which keeps the states of the
chosen layers in a cache of its own. When a request is finished, its states are taken from there and written by a
thread to FOLDER/NAME, whole or not at all; the answer to the request says where, and which target, layers, dtype and
tokenizer this server has. FOLDER is the server's own setting, `folder` of its kv_connector_extra_config: no client says
where to write.
"""

# pyright: reportMissingImports=false
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import vllm
from headstart_files import SUFFIX, write
from headstart_weights import vocabulary_digest, weights_digest
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

WRITERS = 4  # threads
ADAPTER = "adapter_model.safetensors"  # the weights of one, in its folder
LABEL = re.compile(r"[0-9a-f]{1,64}")
DONE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


@dataclass
class Ready:
    """A finished request whose states are still in the cache."""

    name: str  # of its file
    token_ids: list[int]
    blocks: list[int]  # of the cache


@dataclass
class ReadyRequests(KVConnectorMetadata):
    """What the scheduler tells the workers in a step: by id of the request."""

    requests: dict[str, Ready] = field(default_factory=dict)


class HeadstartStates(KVConnectorBase_V1, SupportsHMA):
    """Writes states. One instance lives with the scheduler and says what is ready, one in each worker; that of the
    first tensor-parallel rank, where the cache of states is, writes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self.folder = Path(transfer.get_from_extra_config("folder", None) or "")
        if not self.folder.is_absolute():
            raise ValueError("kv_connector_extra_config: folder: expected an absolute path")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.group = group_of_states(kv_cache_config)
        self.ready: dict[str, Ready] = {}  # the scheduler's, by id of the request: since it last told the workers
        self.cache: Tensor | None = None  # [blocks, L, block size, D]; None: another worker has it
        self.stream: Any = None  # of the copies to the host, on a GPU
        self.writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="headstart-states")
        self._served = self.writers.submit(served, vllm_config) if role.name == "SCHEDULER" else None

    # -- the scheduler's ----------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False  # nothing is ever read

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output: Any) -> ReadyRequests:
        ready, self.ready = self.ready, {}
        return ReadyRequests(ready)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the blocks are still needed, and what the answer says.

        A request that did not end by itself, such as one whose client is gone, is not written.
        """
        label = (request.kv_transfer_params or {}).get("headstart")
        if request.status.name not in DONE or not LABEL.fullmatch(label or ""):
            return False, None
        name = f"{label}-{uuid4().hex}{SUFFIX}"
        self.ready[request.request_id] = Ready(name, list(request.prompt_token_ids), list(block_ids))
        assert self._served is not None
        served = {**self._served.result(), "adapter": adapter_digest(request.lora_request)}
        return True, {"headstart": {"file": str(self.folder / name), "served": served}}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.group >= len(block_ids):  # it was never scheduled
            return False, None
        return self.request_finished(request, block_ids[self.group])

    # -- the workers' -------------------------------------------------------------------------------------------------

    def get_finished_count(self) -> int:
        return 1  # one worker, that with the cache, says when the states of a request are taken

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if layers and get_tensor_model_parallel_rank() == 0:
            [name] = layers
            self.cache = kv_caches[name]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Hands the states of the ready requests to the writers; returns the ids of these requests, whose blocks are no
        longer needed, and None, as nothing is read."""
        taken = set[str]()
        if self.cache is not None and self.has_connector_metadata():
            for request_id, ready in self._get_connector_metadata().requests.items():
                states = self.start_taking(self.cache, ready)
                self.writers.submit(write, self.folder / ready.name, ready.token_ids, states)
                taken.add(request_id)
        return taken or None, None

    def start_taking(self, cache: Tensor, ready: Ready) -> Callable[[], Tensor]:
        """Start taking the states of a request from the cache, whose blocks may be used again at once.

        Returns: a function that waits for the states [T, L, D] on the host.
        """
        num_tokens, block_size = len(ready.token_ids), cache.shape[2]
        blocks = torch.tensor(ready.blocks[: -(-num_tokens // block_size)], device=cache.device)
        states = cache[blocks].transpose(1, 2).flatten(0, 1)[:num_tokens]  # a copy: [T, L, D]
        if not states.is_cuda:
            return states.contiguous
        if self.stream is None:
            self.stream = torch.cuda.Stream(states.device)
        self.stream.wait_stream(torch.cuda.current_stream(states.device))
        with torch.cuda.stream(self.stream):  # beside the next forward
            host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True).copy_(states, non_blocking=True)
            states.record_stream(self.stream)
            copied = torch.cuda.Event()
            copied.record()

        def wait() -> Tensor:
            copied.synchronize()
            return host

        return wait

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def shutdown(self) -> None:
        self.writers.shutdown()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        return "LBNHC"  # all layers' states of a token beside each other


def group_of_states(kv_cache_config: Any) -> int:
    """The place of the cache of states among the caches. Raises ValueError if it is not on its own."""
    groups = [] if kv_cache_config is None else kv_cache_config.kv_cache_groups
    indices = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if len(indices) == 1:
        return indices[0]
    if len(groups) <= 1:
        return 0
    raise ValueError("this target's states share a cache with others (MLA targets do): vLLM cannot hand them out")


def served(vllm_config: Any) -> dict[str, Any]:
    """What identifies the states of this server."""
    model = vllm_config.model_config
    draft = vllm_config.speculative_config.draft_model_config.hf_config
    identity: dict[str, Any] = {
        "engine": "vllm",
        "version": vllm.__version__,
        "target": model.model,
        "weights": problem_or(weights_digest, model.model, model.revision),
        "vocabulary": None,
        "layers": sorted(draft.eagle_aux_hidden_state_layer_ids),  # the order in which states come
        "num_layers": model.get_total_num_hidden_layers(),
        "hidden_size": model.get_hidden_size(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "max_length": model.max_model_len,
    }
    if not model.skip_tokenizer_init:
        identity["vocabulary"] = problem_or(
            vocabulary_digest,
            model.tokenizer,
            model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
        )
    return json.loads(json.dumps(identity))


def adapter_digest(adapter: Any) -> str | None:
    """Of an adapter's file as it is now: vLLM's requests of one name are equal, whatever they load."""
    if adapter is None:
        return None
    file = Path(adapter.lora_path, ADAPTER)
    return digest_of_file(adapter.lora_path, file.stat().st_mtime_ns if file.is_file() else 0)


@cache
def digest_of_file(folder: str, changed: int) -> str:
    return problem_or(weights_digest, folder, None, ADAPTER)


def problem_or(digest: Callable[..., str], *args: Any, **kwargs: Any) -> str:
    try:
        return digest(*args, **kwargs)
    except Exception as error:  # the client refuses it, with this line
        return f"{type(error).__name__}: {error}"
