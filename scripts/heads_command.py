"""`headstart heads`: lists the families of heads, the cost of each on a target, and which one to begin with."""

import inspect
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..base.errors import BadInput

if TYPE_CHECKING:
    from ..targets.target import Target

OURS = "headstart"  # the engine of this package, which drafts with every family
SIZES = ("parameters", "memory_bytes", "serving_bytes")


def heads(
    target: Annotated[str, typer.Option(help="Also say what each costs on it: local folder or hub id.")] = "",
    engine: Annotated[
        str, typer.Option(help="That will serve it: headstart, vllm, sglang or llama.cpp.")
    ] = "headstart",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on stdout instead of a table.")] = False,
) -> None:
    """List the families of heads; with --target what each reads and costs there, and which one to begin with.

    \b
    Examples:
      headstart heads
      headstart heads --target MODEL --engine vllm
      headstart heads --target MODEL --json

    Figures are those of configs/heads/NAME.yaml. Only the target's config is read, so a 70B model takes seconds.

    \b
    parameters     those that are trained
    memory_bytes   in training: 16 per trained parameter (fp32 weight, gradient, AdamW's two moments) and 4 per
                   frozen one of the head; the target and activations come on top
    serving_bytes  all the head's parameters in the target's dtype; embeddings and output layers that a head
                   shares with the target are counted with the target
    """
    from ..engines.export import ENGINES, engines_of
    from ..engines.heads import HEADS
    from ..targets.loading import TargetConfig, default_device
    from ..targets.skeleton import load_skeleton

    if engine not in (OURS, *ENGINES):
        raise BadInput(f"--engine {engine}: expected {OURS} or {', '.join(ENGINES)}")
    skeleton = load_skeleton(TargetConfig(path=target)) if target else stand_in()
    rows = [describe_family(name, skeleton, sized=bool(target)) for name in HEADS]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        show(rows, sized=bool(target))
        if target:
            fitting = [row["name"] for row in rows if row["problem"] is None]
            fitting = [name for name in fitting if engine == OURS or engine in engines_of(name)]
            on_gpu = default_device() != "cpu"
            for line in to_begin_with(fitting, engine=engine, on_gpu=on_gpu, num_modules=own_modules(skeleton)):
                print(line)


def own_modules(target: "Target") -> int:
    """MTP modules that its checkpoint has, as its config says."""
    config = target.model.config.get_text_config()
    return max(int(getattr(config, key, None) or 0) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))


def to_begin_with(fitting: Sequence[str], *, engine: str, on_gpu: bool, num_modules: int) -> tuple[str, str]:
    """Two lines: the family to begin with, and why. Figures: docs/pick_a_head.md, docs/results/gpu.md.

    Args: fitting: families that fit the target and are loaded by the engine. num_modules: MTP modules of the target."""
    where, lookup = ("headstart's own engine", "suffix") if engine == OURS else (engine, "ngram")
    choices = (
        ("mtp", num_modules > 0, "runs/mtp.yaml with head.init=checkpoint",
         "the target's checkpoint has a module that was trained with it; training goes on from there"),
        ("block", on_gpu and engine == OURS, "runs/block.yaml",
         "on a GPU its drafts take one pass: 3.46 times the speed there, EAGLE-3 2.69 (an H200, SmolLM2-135M, orders)"),
        ("eagle3", True, "runs/eagle3.yaml",
         f"of the heads that {where} drafts with it saved most after equal training (SmolLM2-135M, on a CPU)"),
    )  # fmt: skip
    for family, is_apt, run, why in choices:
        if is_apt and family in fitting:
            return f"Begin with {family}: {run}. Measure look-ups first (--drafter {lookup}): they need no training.", (
                f"Why: {why}."
            )
    if fitting:
        return (
            f"Begin with {fitting[0]}: runs/{fitting[0]}.yaml.",
            f"Why: {where} drafts with it; not with EAGLE-3 here.",
        )
    return (
        f"Begin with look-ups: --drafter {lookup}.",
        f"Why: no family both fits this target and is loaded by {where}.",
    )


def describe_family(name: str, skeleton: "Target", *, sized: bool) -> dict[str, Any]:
    """A family as the JSON has it; figures are null without a target, or with a `problem`: why it does not fit it.

    `reads.feature_layers` is null where the family chooses them by the target's depth, and no target is given.
    """
    from ..configs.loader import build, read_config
    from ..engines.heads import head_class
    from ..heads.stored.fit import head_size

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

    from ..targets.target import Target

    with torch.device("meta"):
        return Target.of(AutoModelForCausalLM.from_config(LlamaConfig()), name="any target", fingerprint="")


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
    for unit, factor, least in (("TB", 1e12, 1e12), ("GB", 1e9, 1e7)):
        if size >= least:
            return f"{size / factor:.3g} {unit}"
    return f"{size / 1e6:.3g} MB"
