"""Runs where vLLM is, not in the project's environment: decodes prompts with heads, notes every draft.

    python client.py JOB.json RESULT.json

JOB: {TARGET: {"folder", "dtype", "max_new_tokens", "prompts": [[token ids]], "heads": {NAME: {"method", "model",
"num_speculative_tokens"}}}}; a head without a "model" lies in the folder that it names as "within": its target's, or
one that says itself how it is served; for "norms_apart" see there. RESULT: {NAME: {"texts": token ids, "rounds": per
prompt the drafted tokens of every round, "num_drafts", "accepted_at": drafts accepted at each position}}.
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
                with norms_apart() if speculation.pop("norms_apart", False) else nullcontext():
                    results[name] = decoded(one, speculation)
            except Exception as error:  # whatever an engine does not take: the others are still of interest
                results[name] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    out.write_text(json.dumps(results))


def decoded(job: dict[str, Any], speculation: dict[str, Any]) -> dict[str, Any]:
    folder = speculation.pop("within", job["folder"])
    llm = LLM(model=folder, dtype=job["dtype"], **ENGINE, speculative_config=speculation or None)
    drafts: list[list[int]] = []
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    spy_on(executor.driver_worker.worker.model_runner.drafter, drafts)
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], detokenize=False)
    texts, rounds = [], []
    for prompt in job["prompts"]:
        drafts.clear()
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
    gc.collect()
    cleanup_dist_env_and_memory()
    return {"texts": texts, "rounds": rounds, **counts}


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
