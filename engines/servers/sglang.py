"""SGLang's server (0.5.23, as its source has it), and its counters, which know no draft positions."""

import shlex
from collections.abc import Sequence

from ...base.errors import BadInput
from ..sglang import flags
from .address import Address
from .counters import Counters, samples, total
from .engine import LONGEST_MATCH, ServerEngine

LAUNCHER = "sglang.launch_server"
STEPS, DRAFT_TOKENS = "--speculative-num-steps", "--speculative-num-draft-tokens"


class SglangEngine(ServerEngine):
    """No prefix cache, and its counters on. In chats that are streamed it gives no token ids."""

    name, title, remembers = "sglang", "SGLang", True
    extra = {"return_token_ids": True}

    def command(self, python: str, target: str, drafting: Sequence[str], arguments: Sequence[str]) -> list[str]:
        line = [python, "-m", LAUNCHER, "--model-path", target, "--disable-radix-cache", "--enable-metrics"]
        return [*line, *drafting, *arguments]

    def with_length(self, drafting: Sequence[str], num_draft_tokens: int) -> list[str]:
        told = {STEPS: num_draft_tokens, DRAFT_TOKENS: num_draft_tokens + 1}  # it counts the token that is verified too
        before = ["", *drafting]
        return [str(told.get(last, word)) for last, word in zip(before, drafting, strict=False)]

    def ngram(self, num_draft_tokens: int, most: int = LONGEST_MATCH) -> list[str]:
        if most != LONGEST_MATCH:
            raise BadInput(f"--drafter ngram:{most}: SGLang is not told how many tokens look-ups go by: take ngram")
        return ["--speculative-algorithm", "NGRAM", DRAFT_TOKENS, str(num_draft_tokens + 1)]

    def draft_model(self, folder: str, num_draft_tokens: int) -> list[str]:
        return shlex.split(flags("draft_lm", num_draft_tokens, folder=shlex.quote(folder)) or "")

    def counters(self, address: Address) -> Counters | None:
        """It counts verifications when a request ends, with its tokens; each one's first token is its prefill's, and
        each verification gives one token beside those accepted."""
        found = samples(address.read("/metrics") or "")
        rounds, tokens, requests = (
            total(found, f"sglang:{name}") for name in ("spec_verify_calls", "generation_tokens", "num_requests")
        )
        if rounds is None or tokens is None:
            return None
        return Counters(rounds, None, tokens - (requests or 0) - rounds)
