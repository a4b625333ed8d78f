"""vLLM's side of a head that follows: its workers take new weights of a draft from a folder, where they stand.

A server has it by `--worker-extension-cls headstart_drafts.HeadstartDrafts`, and VLLM_SERVER_DEV_MODE=1 lets it be
called; from 0.32 on. Its tensors keep their places, so that recorded steps hold.
"""

# pyright: reportMissingImports=false
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class HeadstartDrafts:
    """What vLLM's worker becomes a subclass of."""

    def load_draft(self: Any, folder: str) -> None:
        """Draft with an exported head of the family and sizes that the server was started with."""
        draft, config = self.get_draft_model(), self.vllm_config.speculative_config.draft_model_config
        tensors = load_file(Path(folder, "model.safetensors"))
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(draft)
            draft.load_weights(iter(tensors.items()))
            finalize_layerwise_reload(draft, config)
