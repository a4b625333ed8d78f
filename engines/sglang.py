"""SGLang (0.5.23): how it calls the ways of drafting, and what it is told of a head."""

from shlex import quote

from ..targets.caches.ring_cache import DraftWindow
from .layouts.serving import EngineSupport, HeadFolder

ALGORITHMS = {
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "assistant": "FROZEN_KV_MTP",
    "draft_lm": "STANDALONE",
    "dflash": "DFLASH",
    "dspark": "DSPARK",
}
WINDOWED = {"eagle": True, "mtp": True, "eagle3": False, "dflash": False}  # drafts with a window; with a sink too
CHAINS = ("assistant",)  # of these heads it drafts no trees
IN_TARGET = ("mtp",)  # it finds these heads in the target's folder
CORPUS, FROM_CORPUS = "corpus.jsonl", 4  # answers that it looks up; drafts of a round that come from them
IN_BLOCKS = ("dflash", "dspark")  # these are told the number of verified tokens alone


def flags(method: str, num_draft_tokens: int, *, folder: str, top_k: int = 1, num_nodes: int = 0) -> str | None:
    """SGLang's flags for drafting with a head; None where it has no such way of drafting.

    Args: folder: of the exported head. top_k, num_nodes: of a dynamic tree, the nodes expanded per level and the nodes
        in total.
    """
    if method not in ALGORITHMS:
        return None
    where = "" if method in IN_TARGET else f" --speculative-draft-model-path {folder}"
    steps = f" --speculative-num-steps {num_draft_tokens} --speculative-eagle-topk {top_k}"
    return (
        f"--speculative-algorithm {ALGORITHMS[method]}{where}{'' if method in IN_BLOCKS else steps} "
        f"--speculative-num-draft-tokens {(num_nodes or num_draft_tokens) + 1}"
    )


def window_flags(method: str, window: DraftWindow | None) -> str | None:
    """Those by which a head that was trained without a window drafts with one; None where it has no such window."""
    if window is None or method not in WINDOWED or (window.sink and not WINDOWED[method]):
        return None if window else ""
    sink = f" --speculative-draft-sink-size {window.sink}" if window.sink else ""
    return f" --speculative-draft-window-size {window.size}{sink}"


def corpus_command(file: str, *, target: str) -> str:
    """The command that looks drafts up in a corpus too, for which half of them are kept."""
    told = f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {2 * FROM_CORPUS + 1}"
    told += f" --speculative-ngram-external-corpus-path {quote(file)}"
    told += f" --speculative-ngram-external-sam-budget {FROM_CORPUS}"
    return f"python -m sglang.launch_server --model-path {quote(target)} {told}"


def command(head: HeadFolder, folder: str, *, target: str, to: str) -> str:
    """The command that serves an exported head."""
    model = folder if head.is_module else target
    told = flags(head.method, head.num_drafted, folder=quote(folder))
    windowed = window_flags(head.method, head.window)
    return f"python -m sglang.launch_server --model-path {quote(model)} {told}{windowed}"


SGLANG = EngineSupport(ALGORITHMS, command)
