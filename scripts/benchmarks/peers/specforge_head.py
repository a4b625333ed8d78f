"""SpecForge's EAGLE-3 (0.2): its draft model, its unrolled loss and its optimizer, at its defaults.

Its trainer wants a served target on a GPU, and one kernel of its loss is for GPUs alone: in its place stands the
reference that its own code has beside it. The teacher is its compact one, over the draft vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from .work import Batch, FrozenTarget

DEPTHS, DECAY = 7, 0.8  # training.ttt_length; ploss_decay of its strategy


class SpecForgeTrainer:
    def __init__(self, target: FrozenTarget, tokens: Tensor, *, steps: int, learning_rate: float | None) -> None:
        from specforge.algorithms.eagle3 import model as unrolled  # type: ignore[import-not-found]
        from specforge.core import loss  # type: ignore[import-not-found]
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # type: ignore[import-not-found]
        from specforge.optimizer import BF16Optimizer  # type: ignore[import-not-found]
        from specforge.utils import padding  # type: ignore[import-not-found]

        class ReferenceLoss:
            apply = staticmethod(loss._compute_loss)

        unrolled.LogSoftmaxLoss = ReferenceLoss
        config = LlamaConfig(**target.model.config.to_dict())
        config.num_hidden_layers, config.draft_vocab_size, config.tie_word_embeddings = 1, len(tokens), False
        draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa").to(torch.bfloat16)
        draft.t2d.fill_(False).index_fill_(0, tokens, True)
        draft.d2t.copy_(tokens - torch.arange(len(tokens)))
        with torch.no_grad():
            draft.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
        draft.freeze_embedding()
        self.config, self.tokens, self.feature_layers = config, tokens, target.feature_layers
        self.model: Any = unrolled.OnlineEagle3Model(draft, length=DEPTHS, attention_backend="sdpa").train()
        rate = 1e-4 if learning_rate is None else learning_rate  # its schema's training.learning_rate
        self._optimizer = BF16Optimizer(self.model, lr=rate, max_grad_norm=0.5, total_steps=steps, warmup_ratio=0.015)
        self._output = target.model.get_output_embeddings().weight.detach()
        self._shifted = padding

    def step(self, batch: Batch) -> float:
        seen = torch.arange(batch.input_ids.shape[1]) < torch.tensor(batch.lengths)[:, None]
        losses = self.model(
            input_ids=self._shifted(batch.input_ids, left=False),
            attention_mask=seen.long(),
            target=None,
            loss_mask=batch.answers.long()[..., None],
            hidden_states=batch.features,
            target_hidden_for_compact=self._shifted(batch.post_norm, left=False),
            target_head_weight=self._output,
        )[0]
        loss = torch.stack([DECAY**depth * each for depth, each in enumerate(losses)]).sum()
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def save(self, folder: Path) -> None:
        """In the layout of its export for SGLang, which vLLM reads too."""
        folder.mkdir(parents=True)
        weights = self.model.draft_model.state_dict()
        kept = {name: value.contiguous() for name, value in weights.items() if "embed_tokens" not in name}
        save_file(kept, folder / "model.safetensors")
        values = self.config.to_dict() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.tokens),
            "eagle_aux_hidden_state_layer_ids": self.feature_layers,
        }
        (folder / "config.json").write_text(json.dumps(values, indent=2))
