"""Runs where vLLM is, not in the project's environment: decodes prompts with heads, notes every draft.

    python client.py JOB.json RESULT.json

JOB: {TARGET: {"folder", "dtype", "engine": options beside ENGINE, "max_new_tokens", "prompts": [[token ids]], or with
"messages" where there are pictures, "heads":
{NAME: {"method", "model", "num_speculative_tokens"}}}}; a head without a "model" lies in the folder that it names as
"within": its target's, or one that says itself how it is served; "mended" names a kernel of MENDED; "then": a head
whose weights take the place of its own before anything is decoded. RESULT: {NAME:
{"texts": token ids, "rounds": per prompt the drafted tokens of every round, "read": the ids of prompts that were
messages, "num_drafts", "accepted_at": drafts
accepted at each position}}, or {"error": its line}.
"""

import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
from vllm.distributed import cleanup_dist_env_and_memory  # type: ignore[import-not-found]

ENGINE: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 1,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "skip_tokenizer_init": True,
    "seed": 0,
    "distributed_executor_backend": "uni",
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 64 << 20,
}


def main() -> None:
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results: dict[str, Any] = {}
    for one in job.values():
        for name, speculation in one["heads"].items():
            started = time.monotonic()
            try:
                with MENDED[speculation.pop("mended", "")]():
                    results[name] = decoded(one, speculation)
            except Exception as error:  # whatever an engine does not take: the others are still of interest
                results[name] = {"error": f"{type(error).__name__}: {error}"}
                release()
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    out.write_text(json.dumps(results))


def decoded(job: dict[str, Any], speculation: dict[str, Any]) -> dict[str, Any]:
    folder, then = speculation.pop("within", job["folder"]), speculation.pop("then", "")
    how = {**ENGINE, **job["engine"], "dtype": job["dtype"]}
    llm = LLM(model=folder, **how, speculative_config=speculation or None)
    drafts: list[list[int]] = []
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    spy_on(executor.driver_worker.worker.model_runner.drafter, drafts)
    if then:
        llm.collective_rpc("load_draft", args=(then,))
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], detokenize=False)
    texts, rounds, read = [], [], []
    for prompt in job["prompts"]:
        drafts.clear()
        if isinstance(prompt, dict):
            done = llm.chat(prompt["messages"], sampling, use_tqdm=False)[0]
            read.append(list(done.prompt_token_ids))
        else:
            done = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        texts.append(list(done.outputs[0].token_ids))
        rounds.append([list(draft) for draft in drafts])
    counts = {"num_drafts": 0, "accepted_at": []}
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            counts["num_drafts"] = int(metric.value)
        if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            counts["accepted_at"] = [int(value) for value in metric.values]
    del llm
    release()
    return {"texts": texts, "rounds": rounds, "read": read, **counts}


def release() -> None:
    gc.collect()
    cleanup_dist_env_and_memory()


@contextmanager
def norms_apart() -> Iterator[None]:
    """DFlash's keys of the context, each layer's by its own norm.

    vLLM normalises those of all layers by one call with a weight for each. Its kernel for CPUs takes the first layer's
    for all (0.32).
    """
    from vllm import _custom_ops as ops  # type: ignore[import-not-found]
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model  # type: ignore[import-not-found]

    def normalised(self: Any, keys: Any) -> Any:
        out = keys.new_empty(keys.shape)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(out[layer], keys[layer], weight, self._rms_norm_eps)
        return out

    with patch.object(DFlashQwen3Model, "_normalize_context_k", normalised):
        yield


@contextmanager
def states_moved() -> Iterator[None]:
    """Mamba-2's states after as many drafts as were accepted.

    vLLM's kernels for CPUs (0.32) do not go by that number, so with drafts of any kind its texts are other ones.
    """
    import torch  # type: ignore[import-not-found]
    import vllm.model_executor.layers.mamba.mamba_mixer2 as mixer  # type: ignore[import-not-found]

    convolution, update = mixer.causal_conv1d_update, mixer.selective_state_update

    def convolved(x: Any, states: Any, weight: Any, bias: Any, activation: str, **how: Any) -> Any:
        if how["num_accepted_tokens"] is None:
            return convolution(x, states, weight, bias, activation, **how)
        out, width = torch.empty_like(x), weight.shape[1]
        for row, start, end, last in rows(how["query_start_loc"], how["num_accepted_tokens"]):
            state = states[how["conv_state_indices"][row, 0]]  # [D, width - 1 + K]
            read = torch.cat([state[:, last : last + width - 1], x[start:end].T], 1)
            made = torch.nn.functional.conv1d(read[None], weight[:, None], bias, groups=len(weight))[0]
            out[start:end] = torch.nn.functional.silu(made.T)
            state[:, : read.shape[1] - 1] = read[:, 1:]
        return out

    def updated(states: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any, **how: Any) -> None:
        if how["num_accepted_tokens"] is None:
            return update(states, x, dt, A, B, C, D, dt_bias, **how)
        heads_of_group = x.shape[1] // B.shape[1]
        for row, start, end, last in rows(how["cu_seqlens"], how["num_accepted_tokens"]):
            state = states[how["state_batch_indices"][row, last]]  # [heads, head size, state size]
            for i in range(start, end):
                step = torch.nn.functional.softplus(dt[i] + dt_bias)[..., None]
                key, query = (part[i].repeat_interleave(heads_of_group, 0)[:, None] for part in (B, C))
                state = state * torch.exp(step * A) + step * key * x[i][..., None]
                how["out"][i] = (state * query).sum(-1) + D * x[i]
                states[how["dst_state_batch_indices"][row, i - start]] = state

    def rows(starts: Any, accepted: Any) -> Iterator[tuple[int, int, int, int]]:
        """Of each row its number, the place of its first token and that behind its last, and its last accepted one."""
        for row, count in enumerate(accepted.tolist()):
            yield row, int(starts[row]), int(starts[row + 1]), count - 1

    with patch.multiple(mixer, causal_conv1d_update=convolved, selective_state_update=updated):
        yield


@contextmanager
def slots_by_length() -> Iterator[None]:
    """Keys of drafts behind the first where they belong, on targets whose positions have three axes.

    vLLM (0.32) writes them where the first axis says, and a picture's tokens share one position of it: so they replace
    keys of the prompt (https://github.com/vllm-project/vllm/issues/54498).
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer  # type: ignore[import-not-found]

    update = SpecDecodeBaseProposer._update_positions_dependent_metadata

    def updated(self: Any, positions: Any, metadata: Any, batch_size: int, padded: int, block_size: int) -> Any:
        positions = update(self, positions, metadata, batch_size, padded, block_size)
        last = metadata.seq_lens[:batch_size].long() - 1
        blocks = metadata.block_table_tensor[:batch_size].gather(1, (last // block_size)[:, None])[:, 0]
        self._slot_mapping_buffer[:batch_size] = blocks * block_size + last % block_size
        return positions

    with patch.object(SpecDecodeBaseProposer, "_update_positions_dependent_metadata", updated):
        yield


MENDED = {
    "": nullcontext,
    "norms_apart": norms_apart,
    "states_moved": states_moved,
    "slots_by_length": slots_by_length,
}


def spy_on(drafter: Any, drafts: list[list[int]]) -> None:
    """Keeps what the drafter proposes, a row of tokens each time: there is one prompt at a time."""
    propose = drafter.propose

    def kept(*args: Any, **kwargs: Any) -> Any:
        proposed = propose(*args, **kwargs)
        rows = proposed.tolist() if hasattr(proposed, "tolist") else proposed
        drafts.append(rows[0] if rows and isinstance(rows[0], list) else rows)
        return proposed

    drafter.propose = kept


if __name__ == "__main__":
    main()
