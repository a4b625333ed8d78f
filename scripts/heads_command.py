"""`headstart heads`: lists the families of heads, and the cost of each on a target."""

import inspect
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..configs.errors import BadInput

if TYPE_CHECKING:
    from ..heads.target import Target

SIZES = ("parameters", "memory_bytes", "serving_bytes")


def heads(
    target: Annotated[str, typer.Option(help="Also say what each costs on it: local folder or hub id.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on stdout instead of a table.")] = False,
) -> None:
    """List the families of heads, and with --target what each reads and costs there.

    \b
    Examples:
      headstart heads
      headstart heads --target MODEL --json

    Figures are those of configs/heads/NAME.yaml. Only the target's config is read, so a 70B model takes seconds.

    \b
    parameters     those that are trained
    memory_bytes   in training: 16 per trained parameter (fp32 weight, gradient, AdamW's two moments) and 4 per
                   frozen one of the head; the target and activations come on top
    serving_bytes  all the head's parameters in the target's dtype; embeddings and output layers that a head
                   shares with the target are counted with the target
    """
    from ..heads.loading import TargetConfig
    from ..heads.registry import HEADS
    from ..heads.targets.skeleton import load_skeleton

    skeleton = load_skeleton(TargetConfig(path=target)) if target else stand_in()
    rows = [describe_family(name, skeleton, sized=bool(target)) for name in HEADS]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        show(rows, sized=bool(target))


def describe_family(name: str, skeleton: "Target", *, sized: bool) -> dict[str, Any]:
    """A family as the JSON has it; figures are null without a target, or with a `problem`: why it does not fit it.

    `reads.feature_layers` is null where the family chooses them by the target's depth, and no target is given.
    """
    from ..configs.loader import build, read_config
    from ..heads.registry import head_class
    from ..heads.targets.fit import head_size

    family = head_class(name)
    config = build(family.config_class, read_config(f"heads/{name}.yaml")["head"], where=f"heads/{name}.yaml: head")
    idea = (inspect.getdoc(inspect.getmodule(family)) or "").splitlines()[0]
    row: dict[str, Any] = {"name": name, "idea": idea, **dict.fromkeys(("reads", *SIZES, "problem"))}
    try:
        size = head_size(config, skeleton)
    except BadInput as error:
        return {**row, "problem": str(error)}
    layers = list(size.feature_layers)
    if not sized:
        layers = config.feature_layers if layers else []
    row["reads"] = {"feature_layers": layers, "post_norm": size.reads_post_norm}
    if sized:
        row |= {key: getattr(size, key) for key in SIZES}
    return row


def stand_in() -> "Target":
    """A target without weights, on which families show what they read."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from ..heads.target import Target

    with torch.device("meta"):
        return Target(AutoModelForCausalLM.from_config(LlamaConfig()), name="any target", fingerprint="")


def show(rows: list[dict[str, Any]], *, sized: bool) -> None:
    """The rows as a table."""
    table = Table("head", "reads") if sized else Table("head", "idea", "reads")
    for name in ("parameters", "training", "serving") if sized else ():
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        what = row["problem"] or reading(row["reads"])
        cells = [row["name"], what] if sized else [row["name"], row["idea"], what]
        if sized and row["problem"] is None:
            cells += [f"{row['parameters']:,}", in_bytes(row["memory_bytes"]), in_bytes(row["serving_bytes"])]
        table.add_row(*cells)
    Console().print(table)


def reading(reads: dict[str, Any]) -> str:
    """What a family reads, in words."""
    layers = reads["feature_layers"]
    words = ["features by the target's depth" if layers is None else f"features {layers}"] if layers != [] else []
    words += ["post_norm"] if reads["post_norm"] else []
    return " and ".join(words) or "tokens only"


def in_bytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e7 else f"{size / 1e6:.3g} MB"
