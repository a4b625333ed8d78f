"""llama.cpp's `llama-server`: how it is started, and what it drafts with."""

import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ...base.errors import BadInput
from ..families.table import SERVINGS
from ..layouts.gguf_file import read_gguf
from ..layouts.serving import Serving
from ..llamacpp import flags
from ..neutral_sampling import LLAMA_SERVER
from .asking import Arrived
from .counters import Counters
from .engine import DEFAULT_K, LONGEST_MATCH, ServerEngine

DYNAMIC, STATIC = "answers.ngrams", "bigrams.ngrams"  # files of answers that it looks up
LOOKUP_SUFFIX = Path(DYNAMIC).suffix
MOST_DRAFTED = 8  # tokens that it looks up at most, fixed in llama.cpp
PACKAGE = "xllamacpp"  # named in a binary's place: the server of this Python package, which `xllamacpp_server` starts


def served_as(head: Path) -> tuple[Serving, str]:
    """What a head's family says of engines, and the method, from its GGUF file. Raises BadInput."""
    file = read_gguf(head)
    if file.problem:
        raise BadInput(f"--head {head}: {file.problem}")
    every = SERVINGS.values()
    return next((serving, method) for serving in every if (method := serving.method_of(file)) is not None)


def cache_flags(dynamic: str | Path) -> list[str]:
    """llama-server's flags to look up in a dynamic file, and in the static file next to it if there is one."""
    static = Path(dynamic).with_name(STATIC)
    also = ["--lookup-cache-static", str(static)] if static.is_file() else []
    return ["--spec-type", "ngram-cache", "--lookup-cache-dynamic", str(dynamic), *also]


def started_by(binary: str) -> list[str]:
    """What starts a server. Raises BadInput if there is no such file, or PACKAGE is named and not installed."""
    if binary != PACKAGE:
        return [str(existing("--server-bin", binary).absolute())]
    if importlib.util.find_spec(PACKAGE) is None:
        raise BadInput(
            f"--server-bin {PACKAGE}: not installed; pip install {PACKAGE}, or name a binary of llama-server"
        )
    return [sys.executable, "-m", f"{__package__}.xllamacpp_server"]


def existing(option: str, file: str) -> Path:
    """Raises BadInput if there is no such file."""
    if not Path(file).is_file():
        raise BadInput(f"{option} {file}: no such file")
    return Path(file)


class LlamaServerEngine(ServerEngine):
    """It loads GGUF files. Each of its answers says what was drafted for it and accepted."""

    name, title, option, is_salted, remembers = "llama-server", "llama-server", "--server-bin", False, True
    program = ""
    extra = {"cache_prompt": False}
    neutral = LLAMA_SERVER

    def command(self, python: str, target: str, drafting: Sequence[str], arguments: Sequence[str]) -> list[str]:
        if not python:
            raise BadInput("--engine llama-server: name its binary with --server-bin or in LLAMA_SERVER")
        if not target.endswith(".gguf"):
            raise BadInput(f"--target {target}: llama-server serves TARGET.gguf")
        return [*started_by(python), "-m", str(existing("--target", target)), *drafting, *arguments]

    def room(self, num_slots: int, length: int) -> list[str]:
        return ["-np", str(num_slots), "-c", str(num_slots * length)]

    def head_file(self, file: str, target: str, num_draft_tokens: int | None) -> tuple[list[str], int] | None:
        if not file.endswith((".gguf", LOOKUP_SUFFIX)):
            raise BadInput(f"--head {file}: llama-server takes HEAD.gguf, or {DYNAMIC} to look up")
        head = existing("--head", file)
        if head.suffix == LOOKUP_SUFFIX:
            if num_draft_tokens not in (None, MOST_DRAFTED):
                raise BadInput(
                    f"--num-draft-tokens: llama-server looks up at most {MOST_DRAFTED} tokens, as it decides"
                )
            return cache_flags(head), MOST_DRAFTED
        serving, method = served_as(head)
        length = num_draft_tokens or DEFAULT_K
        words = shlex.split(flags(method, length, file=shlex.quote(file)) or "")
        return [*words, *(["-md", file] if serving.is_module and file != target else [])], length

    def ngram(self, num_draft_tokens: int, most: int = LONGEST_MATCH) -> list[str]:
        raise BadInput(f"--drafter ngram: llama-server looks up in a file of answers: --head {DYNAMIC}")

    def draft_model(self, folder: str, num_draft_tokens: int) -> list[str]:
        return shlex.split(flags("draft_lm", num_draft_tokens, file=shlex.quote(folder)) or "")

    def counted_in(self, answers: Sequence[Arrived], num_draft_tokens: int | None) -> Counters | None:
        """A forward gives its accepted drafts and a token more; the first token is the prefill's. Where a text ends
        within accepted drafts, the server counts those behind the end too: but no forward had more than K drafts."""
        told = [(max(0, answer.num_tokens - 1), *answer.drafted) for answer in answers if answer.drafted is not None]
        if not told:
            return None
        rounds = sum(
            max(tokens - accepted, -(-drafted // (num_draft_tokens or drafted or 1)))
            for tokens, drafted, accepted in told
        )
        return Counters(rounds, sum(drafted for _, drafted, _ in told), sum(tokens for tokens, *_ in told) - rounds)
