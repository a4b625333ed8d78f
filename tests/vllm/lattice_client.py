"""Run by vLLM's python: its LiLiCorr class on a CPU, with an exported head's tensors, over states of our head.

Arguments: the exported folder, a safetensors file with `hidden` [B, K, D], `context` [B, D], `rows` [V, D] of the
output layer and `embeddings` [V, D], and the file to write: ids, log_probs, scores [B, K, top_k, top_k], tokens [B, K].
"""

# pyright: reportMissingImports=false
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.lilicorr import LiLiCorrHead
from vllm.model_executor.models.utils import AutoWeightsLoader


@torch.no_grad()
def main(folder: Path, given: Path, out: Path) -> None:
    config, told = json.loads((folder / "config.json").read_text()), load_file(given)
    draft, (num_tokens, size) = config["dflash_config"], told["rows"].shape
    store = Path(tempfile.mkdtemp()) / "store"
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)
        head = LiLiCorrHead(
            model_hidden_size=size,
            block_size=draft["block_size"],
            rms_norm_eps=config["rms_norm_eps"],
            config=draft,
        )
        tensors = load_file(folder / "model.safetensors")
        own = [(name.removeprefix("lilicorr."), x) for name, x in tensors.items() if name.startswith("lilicorr.")]
        loaded = AutoWeightsLoader(head).load_weights(own)
        assert loaded == {name for name, _ in own} == {name for name, _ in head.named_parameters()}
        head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
        output = ParallelLMHead(num_tokens, size)
        output.weight_loader(output.weight, told["rows"])
        for module in (*head.modules(), output):
            if (method := getattr(module, "quant_method", None)) is not None:
                method.process_weights_after_loading(module)
        hidden, logits = told["hidden"], LogitsProcessor(num_tokens)
        ids, log_probs = logits.get_top_k_tokens(
            output, hidden.flatten(0, 1), draft["lilicorr_candidate_topk"], return_log_probs=True
        )
        ids, log_probs = (x.view(*hidden.shape[:2], -1) for x in (ids, log_probs))
        has_context = torch.ones(len(hidden), dtype=torch.bool)
        scores = head(told["embeddings"][ids], log_probs, hidden, told["context"], has_context)
    chosen, previous = [], torch.zeros(len(ids), dtype=torch.long)
    for slot in range(ids.shape[1]):  # as its kernel walks, which is for GPUs
        previous = scores[torch.arange(len(ids)), slot, previous].argmax(-1)
        chosen.append(ids[torch.arange(len(ids)), slot, previous])
    found = {"ids": ids, "log_probs": log_probs, "scores": scores, "tokens": torch.stack(chosen, 1)}
    save_file({name: x.contiguous() for name, x in found.items()}, out)


main(*map(Path, sys.argv[1:]))
