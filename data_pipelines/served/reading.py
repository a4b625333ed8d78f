"""From a server's states to stored rows, and what a server must be for that."""

import copy
import hashlib
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ...base.errors import BadInput, first_line
from ...targets.bare import BareTarget
from ...targets.layers.target_output import TargetOutput
from ...targets.target import Target
from ...targets.weights.served_adapter import WEIGHTS
from ...targets.weights.stored import fingerprint_of_stored, read_header, stored_tensors
from ..rows.samples import Sample
from ..storage.extract import checked
from ..storage.features import Reads
from ..storage.quantise import pack
from ..storage.shard_file import PackedStates, StoredSample
from .in_vllm.headstart_weights import digest_of_vocabulary
from .state_server import ServedStates, StateServer, StatesIdentity

AT_ONCE = 32  # requests of a server; batches that wait to be written, or trained on, limit them too
PROBE = "The first words of an answer."
NUM_PROBES = 4  # beginnings of it that are compared
CLOSE = {"float32": 0.01, "bfloat16": 0.25, "float16": 0.1}  # of the same token's log-probability in two engines


class ServedReader:
    """Gives the states of a server, as `extract.start_target` does those of a target here. Used in a `with` block."""

    def __init__(self, target: Target, reads: Reads, server: StateServer, *, storage_dtype: str):
        assert server.served is not None, "checked before"
        self.served = server.served
        self.target, self.reads, self.server, self.storage_dtype = target, reads, server, storage_dtype
        self.layers = [self.served.layers.index(layer) for layer in reads.layers]
        self.last = self.served.layers.index(target.num_layers)
        # on the CPU even where the target is on a GPU: the same states in extraction and in training, behind no step
        self.norm = copy.deepcopy(final_norm(target)).cpu()
        self.threads = ThreadPoolExecutor(AT_ONCE * len(server.places), thread_name_prefix="ask")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.server.close()
        self.threads.shutdown(cancel_futures=True)

    def start(self, samples: Sequence[Sample]) -> Callable[[], list[StoredSample]]:
        """Ask for the states of all samples; returns a function that waits for them."""
        asked = [self.threads.submit(self.row, sample) for sample in samples]
        return lambda: [row.result() for row in asked]

    @torch.no_grad()
    def row(self, sample: Sample) -> StoredSample:
        check_text_alone([sample.pictures])
        features_at, post_norm_at = self.reads.positions(sample.loss_mask)
        states = self._states(sample, features_at | post_norm_at)  # [t, L, D]
        chosen = states[torch.from_numpy(np.flatnonzero(features_at))][:, self.layers]  # [n, L, D]
        last = states[torch.from_numpy(np.flatnonzero(post_norm_at)), self.last]  # [m, D]
        post_norm = self.norm(last)
        parts = [checked(pack(part, self.storage_dtype), self.target) for part in (chosen, post_norm)]
        return StoredSample(sample, PackedStates(features_at, parts[0], post_norm_at, parts[1], self.target.dtype))

    def _states(self, sample: Sample, needed: np.ndarray) -> Tensor:
        """[t, L, D] up to the last position of which states are read; always before the row's end, so that a row fills
        the server's context with the token that it generates."""
        length = int(np.flatnonzero(needed)[-1]) + 1 if needed.any() else 0
        if length:
            return self.server.ask(sample.input_ids[:length].tolist()).states
        return torch.zeros(0, len(self.served.layers), self.target.hidden_size, dtype=self.target.dtype)


class ServedTarget(BareTarget):
    """A target without its layers, which reads rows by a server of its states. server: see `attach`."""

    server: StateServer

    def attach(self, server: StateServer, layers: Sequence[int]) -> None:
        """Read by this server from now on. Args: layers: whose states it was started to give.

        Raises: BadInput as `check_server`."""
        check_server(server, self, layers, max_length=1, revision=None)
        self.server = server

    @torch.no_grad()
    def read_texts(
        self, input_ids: Tensor, *, feature_layers: tuple[int, ...] = (), pictures: Sequence[Sequence[str]] = ()
    ) -> TargetOutput:
        """The states of rows [B, T]; zero at the last position, which no chain reads: a row with the
        token that the server generates must fit its context. Raises BadInput if a row has pictures."""
        check_text_alone(pictures)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = list(threads.map(self.server.ask, input_ids[:, :-1].tolist()))
        states = torch.stack([answer.states for answer in answers]).to(input_ids.device, self.dtype)  # [B, T - 1, L, D]
        states, given = nn.functional.pad(states, (0, 0, 0, 0, 0, 1)), answers[0].served.layers
        features = states[:, :, [given.index(layer) for layer in feature_layers]]  # [B, T, L, D]
        return TargetOutput(features, final_norm(self)(states[:, :, given.index(self.num_layers)]))


def check_text_alone(pictures: Sequence[Sequence[str]]) -> None:
    """Raises BadInput if there are pictures, as a server is asked for the states of ids alone."""
    if any(pictures):
        raise BadInput("rows with pictures: their states are read by the target in this process alone, not by a server")


def layers_asked(target: Target, reads: Reads) -> list[int]:
    """The layers whose states a server must give: those of the features, and the last one's output."""
    return sorted({*reads.layers, target.num_layers})


def fields_of_served(served: StatesIdentity) -> dict[str, Any]:
    """What the manifest says beside `extract.fields_of`."""
    names = {"engine": "engine", "engine_version": "version", "engine_quantization": "quantization"}
    return {key: getattr(served, name) for key, name in names.items()}


def label_of(output: Path, rank: int = 0) -> str:
    """Hex digits of a process that writes there, the same after a restart and no other's: what a kill left can be
    removed."""
    return hashlib.sha256(f"{platform.node()} {output.absolute()} {rank}".encode()).hexdigest()[:16]


def check_server(
    server: StateServer, target: Target, layers: Sequence[int], *, max_length: int, revision: str | None
) -> None:
    """Ask for short rows and compare: the server's target, layers, dtype, tokenizer and context with ours, and the
    log-probabilities that it gives tokens with those that our final norm and output layer give them.

    Args: layers: whose states are needed, the last one's output too. max_length: tokens of the longest row.
        revision: of the target on the hub.
    Raises: BadInput, naming what is wrong.
    """
    final_norm(target)
    ids = target.tokenizer(PROBE, add_special_tokens=False)["input_ids"] or [0]
    answer = server.ask(ids)
    served, where = answer.served, f"server {server.url}"
    try:
        weights = fingerprint_of_stored(stored_tensors(target.name, revision=revision))
    except OSError as error:
        raise BadInput(f"target {target.name}: {first_line(error)}") from error
    if served.weights != weights:
        theirs, ours = f"{served.target} (weights {served.weights[:12]})", f"{target.name} ({weights[:12]})"
        raise BadInput(f"{where}: serves target {theirs}, not {ours}")
    adapter = target.adapter and fingerprint_of_stored(read_header(Path(target.adapter.path, WEIGHTS)))
    if served.adapter != adapter:
        theirs, ours = served.adapter, f"{target.adapter and target.adapter.path} ({adapter})"
        raise BadInput(f"{where}: gives states with adapter {theirs}, not {ours}")
    if set(layers) - set(served.layers) or served.num_layers != target.num_layers:
        asked, given = list(layers), list(served.layers)
        raise BadInput(f"{where}: gives the states of layers {given} of {served.num_layers}, asked for are {asked}")
    dtype = str(target.dtype).removeprefix("torch.")
    if served.dtype != dtype:
        raise BadInput(f"{where}: computes in dtype {served.dtype}, target.dtype is {dtype}")
    vocabulary = digest_of_vocabulary(target.tokenizer)
    if served.vocabulary not in (None, vocabulary):
        raise BadInput(f"{where}: has another tokenizer: vocabulary {served.vocabulary}, not {vocabulary}")
    if served.max_length < max_length:
        raise BadInput(f"{where}: its max-model-len is {served.max_length}, rows have up to {max_length} tokens")
    beginnings = [ids[:length] for length in range(1, len(ids))][1 - NUM_PROBES :]
    for one in [answer, *map(server.ask, beginnings)]:
        check_post_norm(one, target, where)


@torch.no_grad()
def check_post_norm(answer: ServedStates, target: Target, where: str) -> None:
    """Raises BadInput if the target's own final norm and output layer make something else of the last layer's output
    than the server does."""
    last = answer.states[-1:, answer.served.layers.index(target.num_layers)]  # [1, D]
    logprobs = target.logits(final_norm(target)(last.to(target.device)))[0].log_softmax(-1)
    ours, theirs = float(logprobs[answer.next_token]), answer.next_logprob
    if not abs(ours - theirs) < CLOSE[answer.served.dtype]:
        problem = f"gives a token the log-probability {theirs:.3f}, where its states give {ours:.3f}"
        raise BadInput(f"{where}: {problem}: between the last layer and the logits it computes something else than we")


def final_norm(target: Target) -> nn.Module:
    """Raises BadInput if the target has none that is known."""
    if target.final_norm is None:
        raise BadInput(f"target {target.name}: has no final norm under a known name, so its states cannot be served")
    return target.final_norm
