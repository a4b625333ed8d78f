"""Writes a trained head as an engine loads it, and says how the engine is started with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..base.errors import BadInput
from ..base.files import new_folder
from ..heads.families import head_class
from ..heads.nn.layers import window_keys
from ..heads.stored.folder import config_of, read_files
from ..heads.stored.record import HeadRecord, read_head_config
from ..targets.caches.ring_cache import DraftWindow
from ..targets.loading import TargetConfig, read_model_config, torch_dtype
from ..targets.weights.stored import fingerprint_of_stored, stored_tensors
from .families.table import SERVINGS
from .layouts import fp8
from .layouts.serving import EngineSupport, HeadFolder
from .llamacpp import LLAMACPP, Conversion, check_servable
from .sglang import SGLANG, window_flags
from .vllm import VLLM, switching_word

ENGINES: dict[str, EngineSupport] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llama.cpp": LLAMACPP,
}
MERGED = "MERGED_TARGET"  # in commands: the target with the head's adapter merged into it
LAYOUTS = ("speculators", "hf")  # of no engine in particular
GEMMA_3 = "vLLM drafts for the text model of Gemma 3 alone, and with --model-impl transformers: docs/serve.md"


def read_folder(path: str | Path, *, target: str | None = None, dtype: str | None = None) -> HeadFolder:
    """Read a head folder, or the `final` of a run folder.

    Args: target: folder or hub id, if it is not the one that config.json names. dtype: of the exported weights; None:
        the target's, or as stored if the target is not available.
    Raises: BadInput if we did not write the folder, or the config of the given target cannot be read.
    """
    path = Path(path)
    if not (path / "config.json").is_file() and (path / "final").is_dir():
        path = path / "final"
    config = read_head_config(path)
    record = HeadRecord.from_json(config.pop("headstart"))
    if record.family in SERVINGS:  # keys that came later have their defaults
        record = replace(record, head=config_of(record, head_class(record.family).config_class).as_dict())
    name = target or record.target_name
    target_config = None
    try:
        whole = read_model_config(TargetConfig(path=name))
        # a model of several parts keeps its dtype outside its text part
        target_config = {**whole.get_text_config().to_dict(), "dtype": str(whole.dtype).removeprefix("torch.")}
    except BadInput:
        if target is not None:
            raise
    wanted = torch_dtype(dtype or usable((target_config or {}).get("dtype")))
    tensors = read_files(path)
    if isinstance(wanted, torch.dtype):
        tensors = {name: value.to(wanted) if value.is_floating_point() else value for name, value in tensors.items()}
    kind = str(next(value.dtype for value in tensors.values() if value.is_floating_point())).removeprefix("torch.")
    config |= {"dtype": kind, "torch_dtype": kind}
    return HeadFolder(path, config, record, tensors, name, target_config, SERVINGS.get(record.family))


def windowed(head: HeadFolder, window: str, *, to: str) -> HeadFolder:
    """A head trained on whole texts, as an engine or layout has it with a window, given as `--draft-window`; without
    one, the head itself. Raises BadInput where it cannot have it."""
    if not window:
        return head
    wanted = check_windowed(head.method, head.own, window, to=to)
    if to == "sglang":
        return replace(head, window=wanted)
    keys = window_keys(wanted.size, num_layers=head.own["num_layers"])
    record = replace(head.record, head={**head.own, "sliding_window": wanted.size})
    config_of(record, head_class(record.family).config_class)  # which may refuse so small a window
    return replace(head, config={**head.config, **keys}, record=record)


def check_windowed(method: str, own: dict[str, Any], window: str, *, to: str) -> DraftWindow:
    """The window. Raises BadInput where an engine has none for a head of this method and config: SGLang is told of it,
    vLLM reads it in the head's config.json, which has no sink."""
    wanted, trained = DraftWindow.parse(window), own.get("sliding_window", "")
    has_key = to in ("vllm", "speculators") and trained is None and not wanted.sink
    if not has_key and (to != "sglang" or trained or not window_flags(method, wanted)):
        raise BadInput(f"--draft-window {window}: {to} has none for this {method} head")
    return wanted


def in_fp8(head: HeadFolder, *, to: str) -> HeadFolder:
    """A head with its layers' matrices in FP8, the rest in its dtype. Raises BadInput where no engine reads it so."""
    if head.serving is None or to != "vllm" or not fp8.is_read_in_fp8(head.config, head.serving.in_fp8):
        raise BadInput(f"--dtype {fp8.FP8}: {fp8.ONLY}")
    return replace(head, config={**head.config, fp8.KEY: fp8.CONFIG}, tensors=fp8.quantised(head.tensors))


def usable(dtype: str | None) -> str:
    """The dtype if drafts are served in it, else `auto`, which means as stored."""
    return dtype if dtype in ("float32", "bfloat16", "float16") else "auto"


def engines_of(family: str) -> tuple[str, ...]:
    """What a head of a family can be exported to: engines, the usual one first, and layouts; none of no such family."""
    serving = SERVINGS.get(family)
    if serving is None:
        return ()
    methods = serving.methods or (family,)
    loading = (name for name, engine in ENGINES.items() if any(method in engine.names for method in methods))
    return *loading, *serving.layouts


def check_to(to: str) -> None:
    """Raises BadInput if a head cannot be exported to this."""
    if to not in (*ENGINES, *LAYOUTS):
        raise BadInput(f"--to {to}: expected one of {', '.join((*ENGINES, *LAYOUTS))}")


def written_for(to: str) -> str:
    """The engine for which a family writes the folder that this one loads, mostly its own; layouts are themselves."""
    return ENGINES[to].reads or to if to in ENGINES else to


def export_head(
    source: str | Path,
    output: str | Path,
    *,
    to: str,
    target: str | None = None,
    dtype: str | None = None,
    conversion: Conversion | None = None,
    window: str = "",
) -> HeadFolder:
    """Write a trained head in an engine's layout, atomically; returns what was exported.

    Args:
        source: a run or head folder.
        to: of ENGINES or LAYOUTS.
        target: folder or hub id, if it has moved since the head was trained.
        dtype: as in `read_folder`; it must be given where the target is not available. Or `fp8`: of
            the layers' matrices, the rest in the target's; for vLLM.
        conversion: to GGUF, for llama.cpp.
        window: see `windowed`.
    Raises: BadInput if the engine cannot load the family or this head, the output exists, its path contains a word that
        vLLM takes for another method, or the conversion fails.
    """
    check_to(to)
    if Path(output).exists():
        raise BadInput(f"{output}: exists already")
    is_fp8 = dtype == fp8.FP8
    dtype = None if is_fp8 else dtype
    head = windowed(read_folder(source, target=target, dtype=dtype), window, to=to)
    serving, known = head.serving, engines_of(head.family)
    if serving is None or not known:
        raise BadInput(f"head {source}: no serving engine loads {head.family} heads; headstart eval decodes with it")
    if to not in known:
        raise BadInput(f"head {source}: {to} loads no {head.family} heads; expected --to {' or '.join(known)}")
    head = in_fp8(head, to=to) if is_fp8 else head
    conversion = conversion or Conversion()
    if to == "llama.cpp":
        check_servable(head, conversion)
    if head.target_config is None and dtype is None:
        why = "not there, and weights take its dtype: name it with --target, or a dtype with --dtype"
        raise BadInput(f"target {head.target}: {why}")
    for problem in serving.refusals(head, to=written_for(to)):
        raise BadInput(f"head {head.path}: {problem}")
    word = switching_word(Path(output).absolute(), head.family)
    if word is not None and to != "llama.cpp":
        why = f"`{word}` in its path makes vLLM take {head.family} for another method; name it otherwise"
        raise BadInput(f"{output}: {why}")
    with new_folder(output) as folder:
        serving.write(head, folder, to=written_for(to))
        if to == "llama.cpp":
            conversion.run(head, folder, name=Path(output).name)
    return head


def notes(head: HeadFolder) -> list[str]:
    """Remarks for whoever serves a head: what it needs besides its folder, and where engines differ from ours."""
    lines = head.serving.notes(head) if head.serving else []
    if head.target_config is None:
        lines.append(f"target {head.target} is not there: weights are in {head.config['dtype']}")
    elif has_other_weights(head):
        trained = f"those that the head was trained on ({head.record.target_name})"
        lines.append(f"target {head.target}: other weights than {trained}: fewer of its drafts may be accepted")
    is_gemma = (head.target_config or {}).get("model_type") == "gemma3_text"  # of Gemma 3 with images too
    return [*lines, GEMMA_3] if is_gemma and head.family in ("eagle", "eagle3", "block") else lines


def has_other_weights(head: HeadFolder) -> bool:
    """Whether the target's folder holds other weights than the head was trained on, as far as both are known."""
    if head.record.fingerprint is None or not Path(head.target).is_dir():
        return False
    try:
        stored = stored_tensors(head.target)
    except BadInput:  # not in safetensors
        return False
    text = read_model_config(TargetConfig(path=head.target)).get_text_config()
    return fingerprint_of_stored(stored, num_layers=text.num_hidden_layers) != head.record.fingerprint


def serve_commands(head: HeadFolder, output: str, *, to: str, target: str | None = None) -> dict[str, str]:
    """By engine, the shell command that serves the exported folder, with names quoted: of each engine that loads the
    layout and to which this head could be exported. Args: target: None: the head's; MERGED where it has an adapter."""
    serving, target = head.serving, target or (MERGED if head.has_adapter else head.target)
    loading = {
        name: engine.command
        for name, engine in ENGINES.items()
        if serving and engine.command and head.method in engine.names
        if serving.layout(written_for(to)) in engine.layouts and not serving.refusals(head, to=written_for(name))
        if name == "vllm" or fp8.KEY not in head.config
    }
    return {name: tell(head, output, target=target, to=to) for name, tell in loading.items()}
