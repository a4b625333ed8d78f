"""Reading a trained head's folder, and the export itself."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...configs.errors import BadInput, first_line
from ...configs.files import new_folder
from ..families import head_class, served_families
from ..loading import TargetConfig, read_model_config, torch_dtype
from ..targets.stored import fingerprint_of_stored, stored_tensors
from .llamacpp import Conversion, check_servable
from .record import HeadRecord, read_head_config
from .serving import HeadFolder

ENGINES = ("vllm", "sglang", "speculators", "hf", "llama.cpp")


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
    file = path / "model.safetensors"
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{file}: {first_line(error)}") from error
    if isinstance(wanted, torch.dtype):
        tensors = {name: value.to(wanted) if value.is_floating_point() else value for name, value in tensors.items()}
    kind = str(next(value.dtype for value in tensors.values() if value.is_floating_point())).removeprefix("torch.")
    config |= {"dtype": kind, "torch_dtype": kind}
    return HeadFolder(path, config, record, tensors, name, target_config, head_class(record.family).serving)


def usable(dtype: str | None) -> str:
    """The dtype if drafts are served in it, else `auto`, which means as stored."""
    return dtype if dtype in ("float32", "bfloat16", "float16") else "auto"


def engines_of(family: str) -> tuple[str, ...]:
    """The engines that load heads of a family, the usual one first; none if there is no such family."""
    serving = served_families().get(family)
    return () if serving is None else serving.engines


def switching_word(where: str | Path, family: str) -> str | None:
    """The word in a path or hub id that makes vLLM take its head for another method; None: there is none.

    A path never overrides a method that vLLM is told and that such words are of, so for its families only the last part
    of the path counts.
    """
    words = {name: serving.path_words for name, serving in served_families().items()}
    allowed = words.get(family, ())
    text = Path(where).name.lower() if allowed else str(where).lower()
    return next((word for some in words.values() for word in some if word in text and word not in allowed), None)


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
    serving = head.serving
    if serving is None:
        raise BadInput(f"head {source}: no serving engine loads {head.family} heads; headstart eval decodes with it")
    if to not in serving.engines:
        known = " or ".join(serving.engines)
        raise BadInput(f"head {source}: {to} loads no {head.family} heads; expected --to {known}")
    conversion = conversion or Conversion()
    if to == "llama.cpp":
        check_servable(head, conversion)
    word = switching_word(Path(output).absolute(), head.family)
    if word is not None and to != "llama.cpp":
        why = f"`{word}` in its path makes vLLM take {head.family} for another method; name it otherwise"
        raise BadInput(f"{output}: {why}")
    with new_folder(output) as folder:
        serving.write(head, folder, to=to)
        if to == "llama.cpp":
            conversion.run(head, folder, name=Path(output).name)
    return head


def notes(head: HeadFolder) -> list[str]:
    """Remarks for whoever serves a head: what it needs besides its folder, and where engines differ from ours."""
    lines = head.serving.notes(head) if head.serving else []
    if head.target_config is None:
        lines.append(f"target {head.target} is not there: weights keep their dtype, {head.config['dtype']}")
    elif has_other_weights(head):
        trained = f"those that the head was trained on ({head.record.target_name})"
        lines.append(f"target {head.target}: other weights than {trained}: fewer of its drafts may be accepted")
    return lines


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
    """By engine, the shell command that serves the exported folder, with names quoted."""
    return head.serving.commands(head, output, to=to, target=target or head.target) if head.serving else {}
