"""What the engine itself costs on this machine: a target of a given shape with random weights, baseline and chain.

    python -m headstart.scripts.engine_bench --size 8b --output engine.json      (one GPU, about 5 minutes)
    python -m headstart.scripts.engine_bench --size toy --output engine.json     (CPU, seconds: that it runs)

Random weights accept no drafts; a round costs the same all the same, and that is what is measured: baseline tokens per
second against the machine's copy bandwidth, a round of K drafts in baseline steps, and whether draft, verify and
overhead explain the speedup. Acceptance is measured on real targets only, by `headstart eval`.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..eval.measure import MeasureConfig, measure
from ..eval.report import build_report, write_whole
from ..eval.suites import Suite
from ..heads.loading import default_device
from ..heads.registry import HEADS, build_head
from ..heads.target import Target


@dataclass(frozen=True)
class Shape:
    """A Llama target's sizes, and the work: num_prompts prompts of prompt_length tokens, num_new tokens each."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    dtype: str
    prompt_length: int
    num_new: int
    num_prompts: int


SHAPES = {
    "toy": Shape(32, 64, 4, 4, 2, 128, "float32", 16, 24, 2),
    "1b": Shape(2048, 8192, 16, 32, 8, 128256, "bfloat16", 512, 128, 4),
    "8b": Shape(4096, 14336, 32, 32, 8, 128256, "bfloat16", 512, 128, 4),
}
NUM_DRAFT = 5

# what is asked of a GPU of the H200 class at 8B shape, batch 1
BARS = {
    "baseline_tokens_per_second": (">=", 190.0),
    "share_of_copy_bandwidth": (">=", 0.60),
    "verify_in_baseline_steps": ("<=", 1.25),
    "speedup_over_formula_error": ("<=", 0.10),
}


def random_target(shape: Shape, device: str) -> Target:
    """A Llama of that shape with random weights, made on the device."""
    config = LlamaConfig(
        **{key: value for key, value in asdict(shape).items() if key in LlamaConfig().to_dict() and key != "dtype"},
        head_dim=shape.hidden_size // shape.num_attention_heads,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        kept = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, shape.dtype))
        try:
            model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(kept)
    model.generation_config.eos_token_id = None
    return Target(model, name=f"random Llama, hidden {shape.hidden_size}", fingerprint="random")


def bench(target: Target, shape: Shape, *, head_type: str, steps: str, num_repeats: int) -> dict[str, Any]:
    """One way to run steps: the entry of report.json."""
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape.vocab_size, (shape.num_prompts, shape.prompt_length), generator=source)
    suite = Suite(name="random tokens", prompts=ids.tolist())
    head = build_head(HEADS[head_type].config_class(type=head_type), target).to(target.dtype).eval()
    num_draft = min(NUM_DRAFT, head.max_draft_tokens or NUM_DRAFT)
    config = MeasureConfig(
        num_draft_tokens=num_draft, max_new_tokens=shape.num_new, num_repeats=num_repeats, steps=steps
    )
    entry, _ = measure(target, head, suite, config, name=head_type)
    return entry


def figures(entry: dict[str, Any]) -> dict[str, Any]:
    """What the bars are about, from an entry that knows its share of the copy bandwidth."""
    timing = entry["timing"]
    return {
        "head": entry["drafter"],
        "steps": entry["steps"],
        "num_draft_tokens": entry["num_draft_tokens"],
        "baseline_tokens_per_second": entry["baseline_tokens_per_second"],
        "share_of_copy_bandwidth": entry["baseline_bandwidth"]["share_of_copy"],
        "verify_in_baseline_steps": round((timing["verify_ms"] + timing["overhead_ms"]) / timing["baseline_ms"], 4),
        "speedup_over_formula_error": round(abs(entry["speedup"] / timing["formula_speedup"] - 1), 4),
        **timing,
    }


def judge(found: dict[str, Any]) -> dict[str, bool]:
    """Which bars a set of figures holds."""
    return {
        name: found[name] is not None and (found[name] >= bar if way == ">=" else found[name] <= bar)
        for name, (way, bar) in BARS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=sorted(SHAPES), default="toy")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--heads", nargs="+", default=["eagle3", "medusa"], choices=sorted(HEADS))
    parser.add_argument("--steps", nargs="+", help="eager, graph, compile [default: eager, and graph on a GPU]")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    shape = SHAPES[options.size]
    target = random_target(shape, options.device)
    ways = options.steps or (["graph", "eager"] if options.device.startswith("cuda") else ["eager"])
    shapes = {way: shape if way != "eager" else replace(shape, num_prompts=min(2, shape.num_prompts)) for way in ways}
    entries = [
        bench(target, shapes[way], head_type=head, steps=way, num_repeats=options.repeats)
        for way in ways
        for head in options.heads
    ]
    report = build_report(target, entries)
    found = [figures(entry) for entry in report["results"]]
    document = {
        "environment": report["environment"],
        "shape": asdict(shape),
        "bars": {name: " ".join(map(str, bar)) for name, bar in BARS.items()},
        "figures": found,
        "holds": [{"head": one["head"], "steps": one["steps"], **judge(one)} for one in found],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.output, json.dumps(document, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
