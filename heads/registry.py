"""The table of head families, and head folders: config.json and model.safetensors."""

import json
import os
import shutil
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import __version__
from ..configs.errors import BadInput
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
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = head_class(config.type)(config, target, draft_token_ids).to(target.device)
    target.check_layers(head.feature_layers)
    return head


def save_head(head: DraftHead, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write a head folder, whole or not at all.

    config.json has the serving keys of the family and, under `headstart`, what `load_head` needs; model.safetensors
    has the tensors under the family's served names, with `d2t` and `t2d` where the draft vocabulary is cut.
    """
    folder = Path(folder)
    state = head.state_dict().items()
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
    kind = str(next(iter(head.parameters())).dtype if dtype is None else dtype).removeprefix("torch.")
    config = {**head.serving_config(), "dtype": kind, "torch_dtype": kind, "headstart": ours}
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    temporary.chmod(0o755)
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(temporary, folder)
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


def load_head(folder: str | Path, target: Target) -> DraftHead:
    """Load a head for the target it was trained on, in the target's dtype, on its device, in evaluation mode.

    Raises: BadInput where the folder is no head, belongs to another target, or its tensors do not fit.
    """
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
    path = Path(folder, "model.safetensors")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path}: {str(error).splitlines()[0]}") from error
    d2t, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    draft_token_ids = None if d2t is None else d2t + torch.arange(len(d2t))
    head = build_head(config_class(**raw), target, draft_token_ids=draft_token_ids)
    expected = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise BadInput(f"{path}: tensor {name}: expected {expected.get(name)}, found {found.get(name)}")
    head.load_state_dict(tensors)
    return head.to(target.dtype).eval().requires_grad_(False)
