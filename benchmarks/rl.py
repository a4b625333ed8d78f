"""Does a head that follows keep up with a policy? `python -m headstart.benchmarks.rl MODEL HEAD PROMPTS.jsonl OUTPUT`.

examples/rl/grpo.py trains on all rows but the last; every ten steps the policy samples answers to those, drafted by
nothing, by the head as it was and by the one that followed, in turns. OUTPUT/results.json has for each such point the
policy's divergence from its start, and of both heads the acceptance length with its 95 % interval over prompts; and the
share of the run's time that following took. Options behind OUTPUT are the example's.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.files import write_json, write_text
from ..engines.heads import load_head
from ..eval.decoding.loop import generate
from ..eval.figures.metrics import Sums, ratio_and_interval, relative_and_interval
from ..heads.base import DraftHead
from ..targets.target import Target

EVERY, AT_ONCE = 10, 8  # steps between two points; rows that are decoded together


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "head", "prompts", "output"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    asked, rest = parser.parse_known_args(words)
    grpo, output = example(), Path(asked.output)
    rows = Path(asked.prompts).read_text().splitlines()
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / "prompts.jsonl", "\n".join(rows[: -asked.held_out]))
    start = Target.load(asked.model, dtype="float32")
    prompts = [grpo.as_ids(start.tokenizer, json.loads(row)["prompt"]) for row in rows[-asked.held_out :]]
    points = []
    for step in range(0, asked.steps + 1, EVERY):
        moved, followed = start, asked.head
        if step:
            run = [asked.model, asked.head, str(output / "prompts.jsonl"), str(output), "--steps", str(step)]
            grpo.main([*run, "--save-every", str(EVERY), "--max-new-tokens", str(asked.max_new_tokens), *rest])
            moved = Target.load(asked.model, dtype="float32", adapter=output / "policy" / f"step_{step:06d}")
            followed = str(output / "following" / "head")
        heads = {"plain": None, "frozen": load_head(asked.head, moved), "followed": load_head(followed, moved)}
        points.append({"step": step, **point(moved, start, heads, prompts, asked.max_new_tokens, seed=step)})
        print(json.dumps(points[-1]), flush=True)
        write_json(output / "results.json", {"points": points, "following": share_of_time(output / "log.jsonl")})


def example() -> Any:
    """examples/rl/grpo.py as a module."""
    path = Path(__file__).parents[1] / "examples" / "rl" / "grpo.py"
    spec = importlib.util.spec_from_file_location("grpo", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def point(
    moved: Target,
    start: Target,
    heads: dict[str, DraftHead | None],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    seed: int,
) -> dict[str, Any]:
    """The figures of a policy at a step. Args: heads: by name; None: no drafts."""
    counts: dict[str, Sums] = {name: ([], []) for name in heads}  # committed tokens and rounds of each prompt
    seconds, tokens, kl = dict.fromkeys(heads, 0.0), dict.fromkeys(heads, 0), list[Tensor]()
    for first in range(0, len(prompts), AT_ONCE):
        some = prompts[first : first + AT_ONCE]
        for name, head in heads.items():
            how: dict[str, Any] = {"temperature": 1.0, "generator": torch.Generator(moved.device).manual_seed(seed)}
            began = time.perf_counter()
            texts, rounds = generate(moved, head, some, max_new_tokens=max_new_tokens, **how)
            seconds[name] += time.perf_counter() - began
            tokens[name] += sum(map(len, texts))
            for row in range(len(some)):
                committed = [one.num_committed[row] for one in rounds[1:] if one.num_committed[row]]
                if name != "plain" and committed:
                    counts[name][0].append(sum(committed))  # type: ignore[attr-defined]
                    counts[name][1].append(len(committed))  # type: ignore[attr-defined]
            if name == "plain":
                kl += [divergence(moved, start, p, text) for p, text in zip(some, texts, strict=True)]
    figures: dict[str, Any] = {"kl": round(float(torch.cat(kl).mean()), 5)}
    for name in ("frozen", "followed"):
        figures[name] = ratio_and_interval(*counts[name])
    figures["tokens_per_second"] = {name: round(tokens[name] / seconds[name], 1) for name in heads}
    if len(counts["frozen"][0]) == len(counts["followed"][0]):
        figures["followed_over_frozen"] = relative_and_interval(counts["followed"], counts["frozen"])
    return figures


@torch.no_grad()
def divergence(moved: Target, start: Target, prompt: list[int], text: list[int]) -> Tensor:
    """[n] KL(policy || its start) at each token of an answer, in nats."""
    ids = torch.tensor([[*prompt, *text]], device=moved.device)
    at = slice(len(prompt) - 1, len(prompt) + len(text) - 1)
    now, before = (one.logits(one.forward(ids).post_norm[:, at])[0].log_softmax(-1) for one in (moved, start))
    return (now.exp() * (now - before)).sum(-1)


def share_of_time(log: Path) -> dict[str, float] | None:
    """Of the run's time, what following took, and its optimizer steps; None before the first step."""
    if not log.exists():
        return None
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    spent = sum(row.get("following_seconds", 0.0) for row in rows)
    steps = sum(row.get("head_steps", 0) for row in rows)
    return {"share": round(spent / sum(row["seconds"] for row in rows), 4), "head_steps": steps}


if __name__ == "__main__":
    main()
