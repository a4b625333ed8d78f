"""How a drafter of ours is served: command lines for the first engine that drafts so."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import join, quote

from ...base.errors import BadInput
from ...targets.weights.served_adapter import ServedAdapter
from ..export import engines_of, read_folder, serve_commands, windowed
from ..layouts.serving import HeadFolder
from ..llamacpp import Conversion, serve_lines
from .engine import LONGEST_MATCH
from .llama_server import DYNAMIC, cache_flags
from .registry import SERVER_ENGINES

SERVED = "served/drafts"  # a folder whose name switches no engine's method
ALONE = "# no engine drafts with both at once: served, it is the head alone"
OTHER = "# vLLM's n-gram look-ups, not what was measured: its suffix decoding needs the package arctic-inference"
CHAIN = "# drafted as a chain: no tree is served"


def how_to_serve(spec: str, num_draft_tokens: int, *, has_tree: bool, target: str, window: str = "") -> list[str]:
    """Command lines, and comments behind a `#`; none where no engine drafts so.

    Args: spec: the drafter as `headstart eval --drafter` takes it. has_tree: whether it was measured with a tree.
    target: folder or hub id. window: `--draft-window`, of a head."""
    kind, _, argument = spec.partition(":")
    if kind in ("head", "hybrid"):
        length = num_draft_tokens if kind == "head" else None
        commands = serving_a_head(argument.partition(":")[0], target, length, window)
        told = [*[ALONE] * (kind == "hybrid"), *[CHAIN] * has_tree]
        return [*told, *commands] if commands else []
    if kind == "suffix" and argument:
        export = ["headstart", "export", argument, SERVED, "--to", "llama.cpp", "--target", target]
        return [join(export), f"llama-server -m TARGET.gguf {join(cache_flags(Path(SERVED, DYNAMIC)))}"]
    vllm = SERVER_ENGINES["vllm"]
    if kind in ("ngram", "suffix"):
        most = int(argument or LONGEST_MATCH)
        return [*[OTHER] * (kind == "suffix"), join(["vllm", "serve", target, *vllm.ngram(num_draft_tokens, most)])]
    if kind == "draft-model":
        return [join(["vllm", "serve", target, *vllm.draft_model(argument, num_draft_tokens)])]
    return []


def under_adapter(commands: Sequence[str], adapter: str) -> list[str]:
    """Command lines, those that start vLLM with the flags by which it serves an adapter of the target.

    Args: adapter: folder; empty: none. Raises: BadInput if it is none that vLLM serves."""
    if not adapter:
        return [*commands]
    flags = join(SERVER_ENGINES["vllm"].adapting(ServedAdapter.read(adapter)))
    return [f"{line} {flags}" if line.startswith("vllm serve") else line for line in commands]


def serving_a_head(
    head: str, target: str, num_draft_tokens: int | None, window: str, *, engines: Sequence[str] = ("vllm", "sglang")
) -> list[str]:
    """Its export and its server; none of a folder that is no run's, or that no engine loads. Args: num_draft_tokens:
    None: as many as it was trained for. window: as of `windowed`. engines: the first of them that loads it."""
    try:
        folder = read_folder(head, target=target)
    except (BadInput, OSError):
        return []
    export = f"headstart export {quote(head)} {SERVED} --target {quote(target)}"
    export += f" --draft-window {window} --to" if window else " --to"
    for engine in engines:
        try:
            command = commands_of_engine(engine, windowed(folder, window, to=engine), SERVED, num_draft_tokens)
        except BadInput:  # it has no such window
            continue
        if command and not target.endswith(".gguf"):
            return [f"{export} {engine}", *command]
    has_last = "llama.cpp" in engines_of(folder.family) and not window
    is_refused = folder.serving is None or folder.serving.refusals(folder, to="llama.cpp")
    return [f"{export} llama.cpp"] if has_last and not is_refused else []


def commands_of_engine(engine: str, head: HeadFolder, exported: str, num_draft_tokens: int | None) -> list[str]:
    """Command lines that serve a head's export; none where the engine does not load it. Args: exported: its folder.
    num_draft_tokens: as of `serving_a_head`."""
    if num_draft_tokens is not None:
        head = replace(head, record=replace(head.record, head={**head.own, "num_depths": num_draft_tokens}))
    if engine == "llama.cpp":
        return serve_lines(head, exported, Conversion())
    commands = serve_commands(head, exported, to=engine)
    return [commands[engine]] if engine in commands else []
