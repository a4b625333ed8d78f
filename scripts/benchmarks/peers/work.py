"""What every trainer is given: rows of token ids in batches, and the frozen target's states of them.

Needs torch and transformers alone, so that it also runs in an environment that holds another trainer.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ....configs.jsonl import read_jsonl


@dataclass(frozen=True)
class Row:
    """Token ids, of which those behind the first `prompt_length` are the target's answer."""

    input_ids: list[int]
    prompt_length: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows padded on the right, and what the target makes of them; row b is as long as `lengths[b]`.

    input_ids, answers: [B, T], the latter true on answer tokens; features: [B, T, F * H], HF `hidden_states` of the
    feature layers side by side; last: [B, T, H], the last layer's output before the final norm; post_norm: [B, T, H].
    """

    input_ids: Tensor
    lengths: list[int]
    answers: Tensor
    features: Tensor
    last: Tensor
    post_norm: Tensor


class Trainer(Protocol):
    """Another project's draft head, loss and optimizer; model: what is trained, with what is frozen."""

    model: Any

    def step(self, batch: Batch) -> float:
        """One update on this batch; returns its loss, before the update."""
        ...

    def save(self, folder: Path) -> None:
        """Write the head to a new folder, in a layout that vLLM reads."""
        ...


def read_rows(path: Path) -> list[Row]:
    """JSONL of `input_ids` and `prompt_length`. Raises BadInput if there is no such file, or a line is no object."""
    return [Row(value["input_ids"], value["prompt_length"]) for value in read_jsonl(path)]


def frequent_tokens(rows: Sequence[Row], size: int, vocab_size: int) -> Tensor:
    """[size] ascending ids of the tokens that answers have most often; where those are fewer, the lowest others."""
    counts = Counter(token for row in rows for token in row.input_ids[row.prompt_length :])
    ordered = [token for token, _ in counts.most_common()]
    ordered += [token for token in range(vocab_size) if token not in counts]
    return torch.tensor(sorted(ordered[:size]))


def batches(rows: Sequence[Row], size: int, *, seed: int) -> Iterator[list[Row]]:
    """Epoch after epoch without end, each in a new random order, its remainder dropped."""
    source = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=source).tolist()
        for start in range(0, len(rows) - size + 1, size):
            yield [rows[i] for i in order[start : start + size]]


class FrozenTarget:
    """A causal LM in bf16 that states are read from."""

    def __init__(self, path: str, feature_layers: Sequence[int]) -> None:
        self.path = path
        self.feature_layers = list(feature_layers)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        self._last: Tensor | None = None
        self.model.model.norm.register_forward_pre_hook(self._keep)

    def _keep(self, _: Any, inputs: tuple[Tensor, ...]) -> None:
        self._last = inputs[0]

    @torch.no_grad()
    def read(self, rows: Sequence[Row]) -> Batch:
        """One forward over the rows, padded on the right."""
        lengths = [len(row.input_ids) for row in rows]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        answers = torch.zeros_like(ids, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, : lengths[i]] = torch.tensor(row.input_ids)
            answers[i, row.prompt_length : lengths[i]] = True
        out = self.model.model(ids, use_cache=False, output_hidden_states=True)  # padding on the right is not looked at
        assert self._last is not None
        return Batch(
            input_ids=ids,
            lengths=lengths,
            answers=answers,
            features=torch.cat([out.hidden_states[i] for i in self.feature_layers], -1),
            last=self._last,
            post_norm=out.last_hidden_state,
        )
