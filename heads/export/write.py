"""Which layout each family is exported in for which engine, and the export itself."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from shlex import quote

from ...configs.errors import BadInput
from ...configs.files import new_folder
from ..targets.row_rotary import TWO_SETS
from .block import write_block
from .folder import HeadFolder, read_folder, switching_word, write_config, write_ends, write_tensors
from .llamacpp import Conversion, check_servable, target_folder
from .medusa import ADAPTER_FOLDER, write_blocks, write_published
from .model_contracts import COUNT_KEYS
from .portable import write_eagle, write_eagle3, write_speculators
from .stitched import num_modules, write_stitched
from .windows import IN_SGLANG

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.tiktoken")
CHAT_FILES = ("chat_template*", "generation_config.json")


def write_plain(head: HeadFolder, folder: Path, *, to: str) -> None:
    """A draft model with the target's tokenizer, as a plain folder. Raises BadInput if the target is not local."""
    source = target_folder(head)
    if head.own.get("parallel") and to == "sglang":
        raise BadInput(f"head {head.path}: parallel: SGLang drafts token by token: export to vllm")
    no_modules = {key: 0 for key in COUNT_KEYS if head.config.get(key)}  # a draft model has none of the target's MTP
    write_config(folder, {**head.config, **no_modules, **head.provenance})
    write_tensors(folder, head.tensors)
    for pattern in (*TOKENIZER_FILES, "*.model", *CHAT_FILES):
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    write_ends(folder)


ENGINES = ("vllm", "sglang", "speculators", "hf", "llama.cpp")
WRITERS: dict[str, dict[str, Callable[..., None]]] = {
    "eagle": {"vllm": write_eagle, "sglang": write_eagle},
    "eagle3": {
        "vllm": write_eagle3,
        "sglang": write_eagle3,
        "speculators": write_speculators,
        "llama.cpp": write_eagle3,
    },
    "medusa": {"vllm": write_blocks, "hf": write_published},
    "mtp": dict.fromkeys(("vllm", "sglang", "hf", "llama.cpp"), write_stitched),
    "draft_lm": dict.fromkeys(("vllm", "sglang", "hf", "llama.cpp"), write_plain),
    "block": dict.fromkeys(("vllm", "sglang", "speculators", "llama.cpp"), write_block),
}

# families whose cut draft vocabulary engines read; from others they draft the whole
KEEP_VOCABULARY = ("eagle3", "block")


def export_head(
    source: str | Path,
    output: str | Path,
    *,
    to: str,
    target: str | None = None,
    dtype: str | None = None,
    conversion: Conversion | None = None,
) -> HeadFolder:
    """Write a trained head in an engine's layout, atomically; returns what was exported.

    Args: source: a run or head folder. to: one of ENGINES. target: folder or hub id, if it has moved since the head was
        trained. dtype: as in `read_folder`. conversion: to GGUF, for llama.cpp.
    Raises: BadInput if the engine cannot load the family or this head, the output exists, its path contains a word that
        vLLM takes for another method, or the conversion fails.
    """
    if to not in ENGINES:
        raise BadInput(f"--to {to}: expected one of {', '.join(ENGINES)}")
    if Path(output).exists():
        raise BadInput(f"{output}: exists already")
    head = read_folder(source, target=target, dtype=dtype)
    writers = WRITERS.get(head.family)
    if writers is None:
        raise BadInput(f"head {source}: no serving engine loads {head.family} heads; headstart eval decodes with it")
    if to not in writers:
        raise BadInput(f"head {source}: {to} loads no {head.family} heads; expected --to {' or '.join(writers)}")
    conversion = conversion or Conversion()
    if to == "llama.cpp":
        check_servable(head, conversion)
    word = switching_word(Path(output).absolute(), head.family)
    if word is not None and to != "llama.cpp":
        why = f"`{word}` in its path makes vLLM take {head.family} for another method; name it otherwise"
        raise BadInput(f"{output}: {why}")
    with new_folder(output) as folder:
        writers[to](head, folder, to=to)
        if to == "llama.cpp":
            conversion.run(head, folder, name=Path(output).name)
    return head


SGLANG_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "draft_lm": "STANDALONE", "mtp": "NEXTN"}
SGLANG_BLOCKS = {"dflash": "DFLASH", "dspark": "DSPARK"}  # their only other flag is the number of verified tokens


def notes(head: HeadFolder) -> list[str]:
    """Remarks for whoever serves a head: what it needs besides its folder, and where engines differ from ours."""
    lines = []
    if head.has_adapter:
        merge = "merge that into the target that you serve"
        lines.append(f"it drafts for the target with {ADAPTER_FOLDER}/ on it: {merge}")
    if head.family in ("mtp", "eagle") and head.own["draft_vocab_size"]:
        name = {"mtp": "MTP modules", "eagle": "EAGLE-1 heads"}[head.family]
        lines.append(f"engines draft the whole vocabulary from {name}: draft_vocab_size has no effect there")
    if head.family == "mtp" and head.own["feedback"] == "pre_norm":
        lines.append("engines feed the next depth from behind the norm: drafts behind the first differ from training")
    rope = (head.target_config or {}).get("rope_parameters") or {}
    if head.family == "mtp" and rope.get("rope_type") == TWO_SETS:
        num = rope["original_max_position_embeddings"]
        why = "engines rotate by the frequencies of long texts, which the modules are not trained on"
        lines.append(f"{why}, if they serve a context of more than {num} tokens")
    if (window := head.own.get("sliding_window")) and head.family in IN_SGLANG:
        lines.append(f"sliding_window {window}: serve it with vLLM; {IN_SGLANG[head.family]}")
    if head.target_config is None:
        lines.append(f"target {head.target} is not there: weights keep their dtype, {head.config['dtype']}")
    return lines


def serve_commands(head: HeadFolder, output: str, *, to: str, target: str | None = None) -> dict[str, str]:
    """By engine, the shell command that serves the exported folder, with names quoted."""
    if head.family == "medusa" and to == "hf":
        return {}  # FasterDecoding's layout, which neither engine reads
    name, num, quoted = quote(target or head.target), head.own["num_depths"], quote(output)
    if head.family == "mtp":
        num = num_modules(head)
        spec = quote(f'{{"method":"mtp","num_speculative_tokens":{num}}}')
        return {
            "vllm": f"vllm serve {quoted} --speculative-config {spec}",
            "sglang": f"python -m sglang.launch_server --model-path {quoted} {sglang_flags(head.family, num)}",
        }
    if to == "llama.cpp":
        return {}
    if to == "speculators":
        return {"vllm": f"vllm serve {quoted}"}
    method = {"draft_lm": "draft_model"}.get(head.method, head.method)
    is_parallel = head.own.get("parallel", False)
    at_once = ',"parallel_drafting":true' if is_parallel else ""
    spec = quote(f'{{"method":"{method}","model":{json.dumps(output)},"num_speculative_tokens":{num}{at_once}}}')
    found = {"vllm": f"vllm serve {name} --speculative-config {spec}"}
    flags = sglang_flags(head.method, num, folder=quoted)
    if flags is not None and not is_parallel and not head.own.get("sliding_window"):
        found["sglang"] = f"python -m sglang.launch_server --model-path {name} {flags}"
    return found


def sglang_flags(
    family: str, num_draft_tokens: int, *, folder: str = "", top_k: int = 1, num_nodes: int = 0
) -> str | None:
    """SGLang's flags for drafting with a head; None for families that it does not load.

    Args: folder: of the exported head; empty for modules that are part of the target. top_k, num_nodes: of a dynamic
        tree, the nodes expanded per level and the nodes in total.
    """
    where = f"--speculative-draft-model-path {folder} " if folder else ""
    if family in SGLANG_BLOCKS:
        how = f"--speculative-algorithm {SGLANG_BLOCKS[family]} {where}"
        return f"{how}--speculative-num-draft-tokens {num_draft_tokens + 1}"
    algorithm = SGLANG_ALGORITHMS.get(family)
    if algorithm is None:
        return None
    return (
        f"--speculative-algorithm {algorithm} {where}--speculative-num-steps {num_draft_tokens} "
        f"--speculative-eagle-topk {top_k} --speculative-num-draft-tokens {(num_nodes or num_draft_tokens) + 1}"
    )
