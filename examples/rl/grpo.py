"""GRPO with drafts whose head follows the policy: `python examples/rl/grpo.py MODEL HEAD PROMPTS.jsonl OUTPUT`.

PROMPTS.jsonl has rows with `prompt` and `answer`. The reward is 1 where the last number of a text is the answer or,
where the answer is no number, where the text holds it. OUTPUT/log.jsonl has a row a step, OUTPUT/policy checkpoints for
`headstart eval --checkpoint OUTPUT/policy`, OUTPUT/following/head the head. A killed run goes on from the last of both,
the policy with a new state of AdamW.
"""

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from headstart.base.files import replacing_folder, write_text
from headstart.eval.decoding.loop import Round, generate
from headstart.train.following import FollowingHead, Rollouts
from headstart.train.inputs.config import TrainConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


def options(words: Sequence[str] | None = None, *, about: str | None = __doc__) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "head", "prompts", "output"):
        parser.add_argument(name)
    numbers = {"steps": 100, "prompts-per-step": 4, "samples": 8, "max-new-tokens": 128, "save-every": 10, "seed": 0}
    for name, value in {**numbers, "rate": 1e-6, "head-rate": 1e-4, "share": 0.05}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--drafts", choices=("none", "frozen", "followed"), default="followed")
    parser.add_argument("--draft-tokens", type=int, help="drafts a round; the head's own number where none is said")
    return parser.parse_args(words)


def head_config(asked: argparse.Namespace) -> TrainConfig:
    """How the head learns: at one rate, as long as the loop runs."""
    constant: dict[str, Any] = {"max_steps": 10**9, "warmup_steps": 0, "min_lr_ratio": 1.0, "seed": asked.seed}
    head: dict[str, Any] = {"start_from": asked.head, "learning_rate": asked.head_rate, "batch_size": asked.samples}
    return TrainConfig(output_dir=str(Path(asked.output, "following")), **head, **constant)


def acceptance_length(rounds: Sequence[Round]) -> float:
    """Tokens per forward of the policy, the prefill left out."""
    counts = [num for one in rounds[1:] for num in one.num_committed if num]
    return sum(counts) / max(len(counts), 1)


def reward(text: str, answer: str) -> float:
    """Whether a text gives the answer."""
    if not re.fullmatch(r"-?[\d,]+(\.\d+)?", answer):
        return float(answer in text)
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(answer.replace(",", "")))


def as_ids(tokenizer: Any, prompt: str) -> list[int]:
    if not tokenizer.chat_template:
        return tokenizer(prompt).input_ids
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True).input_ids


def relative(rewards: Tensor, samples: int) -> Tensor:
    """How much better each sample is than the others of its prompt, in their standard deviations."""
    groups = rewards.view(-1, samples)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def policy_loss(policy: Any, rollouts: Rollouts, advantages: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """The loss of a step on the policy's own samples, all their tokens alike; and the hidden states of its forward."""
    lengths, device = [len(row) for row in rollouts.rows], policy.device
    ids = torch.tensor([[*row, *[0] * (max(lengths) - len(row))] for row in rollouts.rows], device=device)
    first = min(rollouts.prompt_lengths)  # no logits of what all prompts cover
    # right-padded, so that causal layers need no mask
    out = policy(ids, output_hidden_states=True, logits_to_keep=max(lengths) - first + 1)
    log_probs = out.logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, first:, None])[..., 0]  # [B, T - first]
    at, begins = torch.arange(first, max(lengths), device=device), torch.tensor(rollouts.prompt_lengths, device=device)
    is_new = (at >= begins[:, None]) & (at < torch.tensor(lengths, device=device)[:, None])
    return -(advantages[:, None] * log_probs * is_new).sum() / is_new.sum(), out.hidden_states


def main(words: Sequence[str] | None = None) -> None:
    asked = options(words)
    output, rows = Path(asked.output), [json.loads(line) for line in Path(asked.prompts).read_text().splitlines()]
    saved, log = sorted(output.glob("policy/step_*")), output / "log.jsonl"
    first = int(saved[-1].name.removeprefix("step_")) if saved else 0
    if log.exists():  # steps behind the last save are taken again
        write_text(log, "".join(log.read_text().splitlines(keepends=True)[:first]))
    device, tokenizer = "cuda" if torch.cuda.is_available() else "cpu", AutoTokenizer.from_pretrained(asked.model)
    policy: Any = AutoModelForCausalLM.from_pretrained(saved[-1] if saved else asked.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.to(device).train().parameters(), lr=asked.rate, weight_decay=0.0)
    following = FollowingHead(policy, head_config(asked), share=asked.share)
    for step in range(first, asked.steps):
        began, spent = time.perf_counter(), following.spent
        # Rollouts, sampled from the policy as it is: in fewer of its forwards where drafts are accepted
        chosen = [rows[(step * asked.prompts_per_step + i) % len(rows)] for i in range(asked.prompts_per_step)]
        prompts = [as_ids(tokenizer, row["prompt"]) for row in chosen for _ in range(asked.samples)]
        drafter = None if asked.drafts == "none" else following.drafter()
        how: dict[str, Any] = {"max_new_tokens": asked.max_new_tokens, "num_draft_tokens": asked.draft_tokens}
        how |= {"temperature": 1.0, "generator": torch.Generator(device).manual_seed(asked.seed + step)}
        texts, rounds = generate(following.target, drafter, prompts, **how)
        told: dict[str, Any] = {"step": step + 1, "rollout_seconds": time.perf_counter() - began}
        rollouts = Rollouts([[*p, *text] for p, text in zip(prompts, texts, strict=True)], [len(p) for p in prompts])
        # The policy's gradient; the head learns from the states that this forward computes anyway
        answers = [row["answer"] for row in chosen for _ in range(asked.samples)]
        rewards = [reward(tokenizer.decode(text), answer) for text, answer in zip(texts, answers, strict=True)]
        loss, hidden = policy_loss(policy, rollouts, relative(torch.tensor(rewards, device=device), asked.samples))
        loss.backward()
        if asked.drafts == "followed":
            done = following.follow(Rollouts(rollouts.rows, rollouts.prompt_lengths, following.states_of(hidden)))
            told |= {"head_steps": done.steps, "expected": done.acceptance and done.acceptance.acceptance_length}
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told |= {"acceptance_length": acceptance_length(rounds), "reward": sum(rewards) / len(rewards)}
        if (step + 1) % asked.save_every == 0 or step + 1 == asked.steps:
            with replacing_folder(output / "policy" / f"step_{step + 1:06d}") as folder:
                policy.save_pretrained(folder)
            following.save()
        told |= {"seconds": time.perf_counter() - began, "following_seconds": following.spent - spent}
        print(json.dumps(told), flush=True)
        with log.open("a") as file:
            file.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
