"""vLLM's server (0.32; 0.33 was only read), started for texts or for states, and its counters."""

import json
from collections.abc import Sequence

from ...targets.weights.served_adapter import ServedAdapter
from .address import Address
from .counters import Counters, samples, started_in, total
from .engine import LONGEST_MATCH, ServerEngine

API_SERVER = "vllm.entrypoints.openai.api_server"  # the module that one runs
SPECULATION = "--speculative-config"
LORA_RANKS = 1, 8, 16, 32, 64, 128, 256, 320, 512  # that it takes as the highest
PREFIX = "vllm:spec_decode_num_"


class VllmEngine(ServerEngine):
    """No prefix cache, so that no side profits from what the other has asked."""

    name, title = "vllm", "vLLM"
    extra = {"return_token_ids": True}

    def command(self, python: str, target: str, drafting: Sequence[str], arguments: Sequence[str]) -> list[str]:
        return [python, "-m", API_SERVER, "--model", target, "--no-enable-prefix-caching", *drafting, *arguments]

    def adapting(self, adapter: ServedAdapter) -> list[str]:
        rank = next((rank for rank in LORA_RANKS if rank >= adapter.rank), adapter.rank)
        return ["--enable-lora", "--lora-modules", f"{adapter.name}={adapter.path}", "--max-lora-rank", str(rank)]

    def with_length(self, drafting: Sequence[str], num_draft_tokens: int) -> list[str]:
        words = list(drafting)
        at = words.index(SPECULATION) + 1
        words[at] = json.dumps({**json.loads(words[at]), "num_speculative_tokens": num_draft_tokens})
        return words

    def ngram(self, num_draft_tokens: int, most: int = LONGEST_MATCH) -> list[str]:
        told = {"method": "ngram", "num_speculative_tokens": num_draft_tokens}
        return [SPECULATION, json.dumps({**told, "prompt_lookup_min": 1, "prompt_lookup_max": most})]

    def draft_model(self, folder: str, num_draft_tokens: int) -> list[str]:
        told = {"method": "draft_model", "model": folder, "num_speculative_tokens": num_draft_tokens}
        return [SPECULATION, json.dumps(told)]

    def counters(self, address: Address) -> Counters | None:
        found = samples(address.read("/metrics") or "")  # of several engines, which are added up
        rounds = total(found, f"{PREFIX}drafts")
        if rounds is None:
            return None
        at: dict[int, int] = {}
        for name, labels, value in found:
            if name == f"{PREFIX}accepted_tokens_per_pos":
                at[int(labels["position"])] = at.get(int(labels["position"]), 0) + int(value)
        accepted = total(found, f"{PREFIX}accepted_tokens") or 0
        drafted = total(found, f"{PREFIX}draft_tokens")
        return Counters(rounds, drafted, accepted, [at[i] for i in sorted(at)], started_in(found))
