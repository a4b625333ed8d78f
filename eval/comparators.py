"""What transformers' own decoding reaches on the same target, prompts and tokens, interleaved with our baseline."""

import time
from typing import Any

import torch

from ..heads.target import Target
from .generate import generate
from .lossless import compare_texts
from .measure import MeasureConfig, rounded
from .metrics import bootstrap_ratio
from .suites import Suite


@torch.no_grad()
def compare_generate(target: Target, suite: Suite, config: MeasureConfig) -> dict[str, Any]:
    """A result entry for `model.generate`: greedy, batch 1, prefill included on both sides.

    Its `speedup` is generate's over our baseline's: below 1, our baseline is the faster one.
    """
    theirs: list[float] = []
    ours: list[float] = []
    texts: dict[str, list[list[int]]] = {"theirs": [], "ours": []}

    def run_theirs(prompt: list[int]) -> tuple[list[int], float]:
        ids = torch.tensor([prompt], device=target.device)  # [1, T]
        how = {"do_sample": False, "max_new_tokens": config.max_new_tokens, "pad_token_id": 0}
        started = time.perf_counter()
        new = target.model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :].tolist()
        return new, time.perf_counter() - started

    def run_ours(prompt: list[int]) -> tuple[list[int], float]:
        text = generate(target, None, prompt, max_new_tokens=config.max_new_tokens)
        return text.token_ids[0], sum(one.seconds for one in text.rounds)

    for run in (run_theirs, run_ours):  # warm-up, not counted
        run(suite.prompts[0])
    for i, prompt in enumerate(suite.prompts):
        seconds = {"theirs": 0.0, "ours": 0.0}
        for repeat in range(config.num_repeats):
            order = [("theirs", run_theirs), ("ours", run_ours)]
            for name, run in order if (i + repeat) % 2 == 0 else order[::-1]:
                new, took = run(prompt)
                seconds[name] += took
                if repeat == 0:
                    texts[name].append(new)
        theirs.append(seconds["theirs"])
        ours.append(seconds["ours"])
    lossless = compare_texts(target, suite.prompts, baseline=texts["theirs"], speculative=texts["ours"])
    num_tokens = sum(map(len, texts["ours"]))
    speedup, interval = bootstrap_ratio(ours, theirs)
    return {
        "engine": "transformers",
        "drafter": "none (generate)",
        "suite": suite.name,
        "temperature": 0.0,
        "batch_size": 1,
        "num_draft_tokens": 0,
        "num_prompts": len(suite.prompts),
        "max_new_tokens": config.max_new_tokens,
        "num_repeats": config.num_repeats,
        "num_tokens": num_tokens,
        "acceptance_length": 1.0,
        "acceptance_rate": [],
        "tokens_per_second": rounded(num_tokens * config.num_repeats / sum(theirs), 2),
        "baseline_tokens_per_second": rounded(num_tokens * config.num_repeats / sum(ours), 2),
        "speedup": rounded(speedup),
        "speedup_ci95": [rounded(x) for x in interval],
        "teacher_forced_acceptance_length": None,
        "lossless": vars(lossless),
    }
