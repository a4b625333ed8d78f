"""The table of head families, and head folders: config.json, model.safetensors and, of some, a target's adapter."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import __version__
from ..configs.errors import BadInput, first_line
from ..configs.files import replacing_folder, restore_folder, write_json
from .adapters import adapted_layers, merged_state, read_adapter, write_adapter
from .base import DraftHead, HeadConfig
from .draft_lm import DraftLMHead
from .eagle import EagleHead
from .eagle3 import Eagle3Head
from .hydra import HydraHead
from .medusa import MedusaHead
from .mtp import MtpHead
from .target import Target

HEADS: dict[str, type[DraftHead]] = {
    "medusa": MedusaHead,
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "hydra": HydraHead,
    "mtp": MtpHead,
    "draft_lm": DraftLMHead,
}


ADAPTER = "adapter."  # how the tensors begin that a head puts on the target's layers


def head_class(name: str) -> type[DraftHead]:
    """The family of that name. Raises BadInput with the names there are."""
    if name not in HEADS:
        raise BadInput(f"head.type: {name!r}: expected one of {', '.join(HEADS)}")
    return HEADS[name]


def build_head(
    config: HeadConfig, target: Target, *, draft_token_ids: Tensor | None = None, seed: int = 0
) -> DraftHead:
    """A fresh head for a target, on its device, in fp32; the same seed gives the same weights.

    Args: draft_token_ids: [Vd] ascending target ids, where config.draft_vocab_size is set.

    Raises: BadInput where another head has put its adapters on this target.
    """
    if target.is_adapted:
        raise BadInput(f"target {target.name}: computes with another head's adapters, so {config.type} needs it afresh")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = head_class(config.type)(config, target, draft_token_ids).to(target.device)
    target.check_layers(head.feature_layers)
    return head


def save_head(
    head: DraftHead, folder: str | Path, *, dtype: torch.dtype | None = None, training: dict[str, Any] | None = None
) -> Path:
    """Write a head folder, whole or not at all.

    config.json has the serving keys of the family and, under `headstart`, what `load_head` needs; model.safetensors
    has the tensors under the family's served names, with `d2t` and `t2d` where the draft vocabulary is cut. Adapters of
    the head's own layers are merged into them; those of the target are in peft's two files beside.

    Args: training: what is known of how it was trained, as JSON; it travels with the head through every export.
    """
    folder = Path(folder)
    state = merged_state(head).items()
    tensors = {name: value.detach().to(dtype or value.dtype).cpu().contiguous() for name, value in state}
    if head.vocabulary is not None:
        to_target = head.vocabulary.to_target.cpu()
        tensors["d2t"] = to_target - torch.arange(len(to_target))
        tensors["t2d"] = head.vocabulary.to_draft.cpu() >= 0
    ours = {
        "version": __version__,
        "head": head.config.as_dict(),
        "target": {"name": head.target.name, "fingerprint": head.target.fingerprint},
    }
    if training is not None:
        ours["training"] = training
    kind = str(next(iter(head.parameters())).dtype if dtype is None else dtype).removeprefix("torch.")
    config = {**head.serving_config(), "dtype": kind, "torch_dtype": kind, "headstart": ours}
    with replacing_folder(folder) as temporary:
        write_json(temporary / "config.json", config)
        if head.adapts_target:
            names = [name for name in tensors if name.startswith(ADAPTER)]
            write_adapter({name.removeprefix(ADAPTER): tensors.pop(name) for name in names}, head.target, temporary)
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    return folder


def read_head_config(folder: str | Path) -> dict[str, Any]:
    """The `headstart` part of a head folder's config.json. Raises BadInput where it is none of ours."""
    path = Path(folder, "config.json")
    if not path.is_file():
        raise BadInput(f"head {folder}: {'no config.json in it' if Path(folder).is_dir() else 'no such folder'}")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from error
    if "headstart" not in config:
        raise BadInput(f"{path}: no `headstart` key: not a head trained by Headstart")
    return config["headstart"]


def is_run_head(folder: str | Path) -> bool:
    """Whether it is a head as `save_head` writes it; else others wrote it, or `headstart export`, or it is a hub id."""
    restore_folder(folder)
    try:
        return "headstart" in json.loads(Path(folder, "config.json").read_text())
    except (OSError, ValueError, TypeError):
        return False


def head_record(folder: str | Path) -> dict[str, Any]:
    """What a head folder or hub id says of its head, read without a target: `head`, its config (of heads that others
    trained the type alone), `target`, name and fingerprint (None: it does not say), and of our runs' heads `training`,
    as docs/run_folder.md has it. Raises BadInput on none."""
    if is_run_head(folder):
        return read_head_config(folder)
    from .importing.importers import record_of

    return record_of(folder)


def load_head(folder: str | Path, target: Target) -> DraftHead:
    """Load a head for the target it was trained on, in the target's dtype, on its device, in evaluation mode.

    Args: folder: a run's (RUN/final), one that `headstart export` wrote, a published head's, or the hub id of such.
    Raises: BadInput where the folder is no head, belongs to another target, or its tensors do not fit.
    """
    if not is_run_head(folder):
        from .importing.importers import import_head

        return import_head(folder, target)
    ours = read_head_config(folder)
    trained_on = ours["target"]
    if trained_on["fingerprint"] != target.fingerprint:
        raise BadInput(
            f"head {folder}: trained on target {trained_on['name']} (fingerprint {trained_on['fingerprint'][:12]}), "
            f"not on {target.name} ({target.fingerprint[:12]})"
        )
    raw = ours["head"]
    config_class = head_class(raw["type"]).config_class
    unknown = set(raw) - {f.name for f in fields(config_class)}
    if unknown:
        raise BadInput(f"head {folder}: config keys of another version of Headstart: {sorted(unknown)}")
    tensors, draft_token_ids = read_tensors(folder)
    head = build_head(config_class(**raw), target, draft_token_ids=draft_token_ids)
    load_weights(head, tensors, folder)
    return head.to(target.dtype).eval().requires_grad_(False)


def start_head(config: HeadConfig, target: Target, folder: str | Path, *, seed: int = 0) -> DraftHead:
    """A head to go on training, in fp32, with the weights and the draft vocabulary of a head folder.

    The folder's target may be another one. A head that adapts its target may start from one that does not.

    Args: folder: as in `load_head`.
    Raises: BadInput where the folder holds another family, another draft vocabulary size or tensors of other shapes.
    """
    tensors, draft_token_ids = read_start(config, target, folder)
    size = None if draft_token_ids is None else len(draft_token_ids)
    if size != config.draft_vocab_size:
        raise BadInput(f"head {folder}: its draft_vocab_size is {size}, not {config.draft_vocab_size}")
    head = build_head(config, target, draft_token_ids=draft_token_ids, seed=seed)
    if adapted_layers(head):
        raise BadInput(
            f"head {folder}: a head with adapters of its own cannot start from it; train.lora_rank adds them"
        )
    if not any(name.startswith(ADAPTER) for name in tensors):
        tensors |= {name: value for name, value in head.state_dict().items() if name.startswith(ADAPTER)}
    load_weights(head, tensors, folder)
    return head


def read_start(config: HeadConfig, target: Target, folder: str | Path) -> tuple[dict[str, Tensor], Tensor | None]:
    """`read_tensors` of whatever `load_head` takes. Raises BadInput where it is another family than the config's."""
    if not is_run_head(folder):
        from .importing.importers import imported_start

        found = imported_start(folder, config, target)
        return dict(found.tensors), found.draft_token_ids
    family = read_head_config(folder)["head"]["type"]
    if family != config.type:
        raise BadInput(f"head {folder}: is of type {family}, not {config.type}")
    return read_tensors(folder)


def read_tensors(folder: str | Path) -> tuple[dict[str, Tensor], Tensor | None]:
    """The tensors of a head folder by the head's names, and the draft token ids [Vd] where its vocabulary is cut."""
    path = Path(folder, "model.safetensors")
    try:
        tensors = load_file(path)
        adapter = read_adapter(Path(folder))
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path}: {first_line(error)}") from error
    tensors |= {ADAPTER + name: value for name, value in adapter.items()}
    d2t, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    return tensors, None if d2t is None else d2t + torch.arange(len(d2t))


def load_weights(head: DraftHead, tensors: dict[str, Tensor], folder: str | Path) -> None:
    """Copy a folder's tensors into a head, in the head's own dtype. Raises BadInput unless they fit one to one."""
    expected = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise BadInput(f"head {folder}: tensor {name}: expected {expected.get(name)}, found {found.get(name)}")
    head.load_state_dict(tensors)
