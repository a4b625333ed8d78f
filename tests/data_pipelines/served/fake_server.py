"""Stands in for vLLM with headstart's connector: answers requests with a target's states, in files.

    python fake_server.py -m MODULE --host HOST --port PORT --model FOLDER ...     as `state_process` starts vLLM

Modules of this folder are imported by name.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from headstart.data_pipelines.served.in_vllm.headstart_files import write
from headstart.data_pipelines.served.in_vllm.headstart_weights import digest_of_vocabulary, weights_digest
from headstart.targets.target import Target
from headstart.targets.weights.served_adapter import WEIGHTS

sys.path.append(str(Path(__file__).parents[2]))  # also where it is a program of its own
from http_stand_in import HttpStandIn, JsonHandler  # noqa: E402


class FakeServer:
    """What a server says and does. folder: of the states. told: changes of what it says of itself.

    rows: tokens of each row that it was asked for; labels: who asked. num_away: requests that it drops from here on.
    num_unwritten: answers without a file, from here on. problem: why it cannot write. delay: seconds of an answer, by
    its number.
    """

    def __init__(self, target: Target, layers: list[int], folder: Path, **told: Any):
        self.target, self.layers, self.folder, self.told = target, layers, folder, told
        self.rows: list[int] = []
        self.labels: list[str] = []
        self.delay: Callable[[int], float] = lambda number: 0.0
        self.num_away = self.num_unwritten = 0
        self.problem = ""
        self.has_connector = True
        self.pace = 0.0  # seconds of a row, one after the other
        self._reads = threading.Lock()  # a target runs one forward at a time
        self._digests = weights_digest(target.name), digest_of_vocabulary(target.tokenizer)
        adapter = target.adapter
        self._adapter = None if adapter is None else weights_digest(adapter.path, None, WEIGHTS)
        self.names = [target.name] if adapter is None else [target.name, adapter.name]
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def served(self) -> dict[str, Any]:
        target = self.target
        found = {"engine": "vllm", "version": "0.0", "target": target.name, "weights": self._digests[0]}
        found |= {"vocabulary": self._digests[1], "layers": self.layers}
        found |= {"num_layers": target.num_layers, "hidden_size": target.hidden_size, "quantization": None}
        found["adapter"] = self._adapter
        return {**found, "dtype": str(target.dtype).removeprefix("torch."), "max_length": 256, **self.told}

    @torch.no_grad()
    def states(self, ids: list[int]) -> tuple[torch.Tensor, int, float]:
        """[T, L, D] of the layers, in ascending order; the likeliest next token and its log-probability."""
        target, last = self.target, []
        inputs = tuple(layer for layer in self.layers if layer < target.num_layers)
        with self._reads:
            time.sleep(self.pace)
            hook = target.layers[-1].register_forward_hook(
                lambda layer, given, out: last.append(out[0] if isinstance(out, tuple) else out)
            )
            out = target.forward(torch.tensor([ids]), feature_layers=inputs)
            hook.remove()
        parts = [out.features[0]] + ([last[0].reshape(len(ids), 1, -1)] if target.num_layers in self.layers else [])
        logprob, token = target.logits(out.post_norm[0, -1]).log_softmax(-1).max(-1)
        return torch.cat(parts, 1), int(token), float(logprob)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["model"] == self.names[-1], "the target with its adapter is asked"
        ids = asked["prompt"]
        self.rows.append(len(ids))
        label = asked["kv_transfer_params"]["headstart"]
        self.labels.append(label)
        time.sleep(self.delay(len(self.rows)))
        states, token, logprob = self.states(ids)
        name = f"{label}-{uuid4().hex}.safetensors"
        if self.num_unwritten and not self.problem:
            self.num_unwritten -= 1
        else:
            threading.Thread(target=self._give, args=(name, ids, states)).start()  # when the answer may be out
        said: dict[str, Any] = {"choices": [{"logprobs": {"tokens": [f"token_id:{token}"]}}]}
        said["choices"][0]["logprobs"]["token_logprobs"] = [logprob]
        if self.has_connector:
            said["kv_transfer_params"] = {"headstart": {"file": f"{self.folder}/{name}", "served": self.served}}
        return said

    def _give(self, name: str, ids: list[int], states: torch.Tensor) -> None:
        def given() -> torch.Tensor:
            if self.problem:
                raise OSError(self.problem)
            return states

        write(Path(f"{self.folder}/{name}"), ids, given)

    @contextmanager
    def listening(self, port: int = 0) -> Iterator[str]:
        """Gives its address."""
        fake = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                self.reply_models(fake.names)

            def do_POST(self) -> None:
                asked = json.loads(self.body())
                if fake.num_away:
                    fake.num_away -= 1
                    self.close_connection = True
                    return
                self.reply(fake.answer(asked))

        with HttpStandIn(Handler, port).running() as server:
            yield server.url


def fake_of(words: dict[str, str]) -> FakeServer:
    """Args: words: of the command line, each with the one behind it."""
    layers = json.loads(words["--speculative-config"])["draft_model_config"]["hf_config"]
    transfer = json.loads(words["--kv-transfer-config"])["kv_connector_extra_config"]
    adapter = words["--lora-modules"].partition("=")[2] if "--lora-modules" in words else None
    target = Target.load(words["--model"], dtype=words["--dtype"], adapter=adapter)
    fake = FakeServer(target, layers["eagle_aux_hidden_state_layer_ids"], Path(transfer["folder"]))
    fake.pace = float(os.environ.get("PACE", "0"))
    return fake


def main() -> None:
    """Serve as the command line says, until the process ends."""
    words = dict(zip(sys.argv[1::1], sys.argv[2::1], strict=False))
    with fake_of(words).listening(int(words["--port"])):
        threading.Event().wait()


if __name__ == "__main__":
    main()
