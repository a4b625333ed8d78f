"""What a head's config.json keeps of the head, in its own folder and in every export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ...base.errors import BadInput, first_line
from ...base.files import lack_of
from ...base.jsonl import loads
from ...targets.target import Target

PROVENANCE = "headstart_export"  # the key under which an exported config.json keeps the record


@dataclass(frozen=True)
class HeadRecord:
    """The `headstart` part of a head's config.json, which every export copies."""

    head: dict[str, Any]  # its `HeadConfig.as_dict`; of imported heads only `type`
    target_name: str  # folder or hub id of the target that it was trained on; empty: not known
    fingerprint: str | None  # of that target's weights (`stored.fingerprint_of_stored`); None: not known
    training: dict[str, Any] | None = None  # how it was trained, see docs/reference/run_folder.md
    version: str = __version__

    @property
    def family(self) -> str:
        return self.head["type"]

    @property
    def head_fingerprint(self) -> str | None:
        """`fingerprint_of_tensors` of the head's own weights, kept by every export and report; None: not recorded."""
        return (self.training or {}).get("fingerprint")

    @classmethod
    def from_json(cls, raw: Any) -> "HeadRecord":
        """Parse the `headstart` part of a config.json. Raises BadInput if it is damaged."""
        try:
            target, head, training = raw["target"], dict(raw["head"]), raw.get("training")
            record = cls(head, target["name"], target["fingerprint"], training, raw.get("version", ""))
            texts = record.family, record.target_name, record.fingerprint or "", record.version
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"config.json: headstart: damaged: {type(error).__name__}: {first_line(error)}") from error
        if not all(isinstance(text, str) for text in texts) or not isinstance(training, dict | None):
            raise BadInput("config.json: headstart: damaged: names are texts, and training is an object")
        return record

    def to_json(self) -> dict[str, Any]:
        target = {"name": self.target_name, "fingerprint": self.fingerprint}
        known = {"version": self.version, "head": self.head, "target": target}
        return known if self.training is None else {**known, "training": self.training}

    def check_target(self, folder: str | Path, target: Target) -> None:
        """Raises BadInput if the head was trained on another target; a served adapter makes none of it."""
        if self.fingerprint is not None and len(self.fingerprint) < len(target.stored_fingerprint):
            raise BadInput(
                f"head {folder}: saved by Headstart {self.version}, which knew a target by a few of its weights: "
                "train it again"
            )
        if self.fingerprint is not None and self.fingerprint != target.stored_fingerprint:
            raise BadInput(
                f"head {folder}: trained on target {self.target_name} (fingerprint {self.fingerprint[:12]}), "
                f"not on {target.name} ({target.stored_fingerprint[:12]})"
            )


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a head's folder, whoever wrote it. Raises BadInput if it is missing or damaged."""
    path = Path(folder, "config.json")
    if not path.is_file():
        raise BadInput(f"head {folder}: {lack_of(folder, path.name)}")
    try:
        config = loads(path.read_text())
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadInput(f"{path}: no JSON object")
    return config


def read_head_config(folder: str | Path) -> dict[str, Any]:
    """`read_config` of a folder that we wrote. Raises BadInput too if it is not ours."""
    config = read_config(folder)
    if "headstart" not in config:
        raise BadInput(f"{Path(folder, 'config.json')}: no `headstart` key: not a head trained by Headstart")
    return config
