"""speculators' EAGLE-3 (0.9): its model, loss, alignment of tokens and states, optimizers, schedule, at its defaults.

Its Trainer itself asks for an accelerator. What of its train_epoch matters to the result is here: bf16 autocast over
fp32 weights, gradients clipped at 1, Muon beside AdamW, a linear schedule with 1 % of warm-up.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .work import Batch, FrozenTarget


class SpeculatorsTrainer:
    def __init__(self, target: FrozenTarget, tokens: Tensor, *, steps: int, learning_rate: float | None) -> None:
        from speculators.models.eagle3 import Eagle3DraftModel  # type: ignore[import-not-found]
        from speculators.models.eagle3.data import shift_batch  # type: ignore[import-not-found]
        from speculators.train.cli import create_transformer_layer_config  # type: ignore[import-not-found]
        from speculators.train.config.schema import TrainConfig  # type: ignore[import-not-found]
        from speculators.train.optimizers import build_optimizers  # type: ignore[import-not-found]
        from transformers import get_linear_schedule_with_warmup

        own: dict[str, Any] = {} if learning_rate is None else {"lr": learning_rate}
        config = TrainConfig.from_flat(  # the command's own defaults, resolved
            {"speculator_type": "eagle3", "verifier_name_or_path": target.path, "loss_implementation": "eager", **own}
        )
        arguments = Namespace(**config.flatten())
        vocab_size = target.model.config.vocab_size
        to_draft = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
        layer = create_transformer_layer_config(
            verifier_name_or_path=target.path,
            num_layers=arguments.num_layers,
            draft_arch=arguments.draft_arch,
            hidden_act=arguments.draft_hidden_act,
            sliding_window=arguments.sliding_window,
            full_attention_indices=list(range(arguments.num_layers)),
        )
        given = vars(arguments) | {"draft_vocab_size": len(tokens), "target_layer_ids": target.feature_layers}
        given |= {"draft_attn_impl": "sdpa"}  # flex attention has no backward on a CPU
        self.model: Any = Eagle3DraftModel.from_training_args(
            layer, t2d=to_draft, d2t=tokens - torch.arange(len(tokens)), **given
        ).train()
        self._shifted = shift_batch
        self._asked, _ = Eagle3DraftModel.get_trainer_kwargs(**vars(arguments))
        self._optimizers = build_optimizers(self.model, arguments)
        self._schedules = [get_linear_schedule_with_warmup(each, steps // 100, steps) for each in self._optimizers]

    def step(self, batch: Batch) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            _, loss, _ = self.model(**self._packed(batch), **self._asked)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            schedule.step()
        return loss.item()

    def _packed(self, batch: Batch) -> dict[str, Tensor]:
        """All rows behind one another in one, each a document of its own, as its loader packs them."""
        rows = []
        for i, n in enumerate(batch.lengths):
            row = self._shifted(
                {
                    "input_ids": batch.input_ids[i, :n],
                    "hidden_states": batch.features[i, :n],
                    "verifier_last_hidden_states": batch.last[i, :n],
                    "loss_mask": batch.answers[i, :n],
                    "lengths": torch.tensor([n]),
                    "position_ids": torch.arange(n),
                }
            )
            row["document_ids"] = torch.full_like(row["input_ids"], i)
            rows.append(row)
        return {key: torch.cat([row[key] for row in rows])[None] for key in rows[0] if key != "lengths"}

    def save(self, folder: Path) -> None:
        """By its own code, in its own layout."""
        self.model.save_pretrained(folder)
