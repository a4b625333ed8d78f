"""GRPO by TRL, with drafts whose head follows the policy: `python trl_grpo.py MODEL HEAD PROMPTS.jsonl OUTPUT`.

Needs TRL (1.16 is tested): `pip install "headstart[rl]"`. Rows, reward and options are those of grpo.py, beside it.
OUTPUT/policy has TRL's checkpoints, for `headstart eval --checkpoint OUTPUT/policy`, OUTPUT/following/head the head. A
killed run goes on from the last of both. It runs in one process; of several each needs an OUTPUT of its own.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from grpo import acceptance_length, as_ids, head_config, options, reward
from headstart.eval.decoding.loop import generate
from headstart.train.following import FollowingHead, Rollouts
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Drafted(TrainerCallback):
    """Rollouts by our engine for a `GRPOTrainer`, and a head that learns from them; saved when the trainer saves."""

    def __init__(self, asked: Namespace):
        self.asked = asked
        self.following: FollowingHead | None = None

    def roll_out(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """A text for each prompt; a prompt that is to have several comes as often. TRL computes their log-probs."""
        if self.following is None:  # now that the trainer has placed its model, and read its checkpoint
            self.following = FollowingHead(trainer.model, head_config(self.asked), share=self.asked.share)
        ids = [as_ids(trainer.processing_class, prompt) for prompt in prompts]
        how: dict[str, Any] = {"temperature": trainer.temperature, "eos_token_ids": trainer.eos_token_ids}
        how |= {"max_new_tokens": trainer.max_completion_length, "num_draft_tokens": self.asked.draft_tokens}
        drafter = None if self.asked.drafts == "none" else self.following.drafter()
        texts, rounds = generate(self.following.target, drafter, ids, **how)
        if self.asked.drafts == "followed" and trainer.model.training:
            self.following.follow(Rollouts([[*p, *t] for p, t in zip(ids, texts, strict=True)], [*map(len, ids)]))
        told = {"acceptance_length": acceptance_length(rounds)}  # for the reward, which may log
        return {"prompt_ids": ids, "completion_ids": texts, "logprobs": None, **told}

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.following is not None:
            self.following.save()


def rewards(completions: list[str], answer: list[str], **others: Any) -> list[float]:
    others["log_metric"]("acceptance_length", others["acceptance_length"][0])
    return [reward(text, right) for text, right in zip(completions, answer, strict=True)]


def main(words: Sequence[str] | None = None) -> None:
    asked = options(words, about=__doc__)
    drafted, policy = Drafted(asked), Path(asked.output, "policy")
    args = GRPOConfig(
        str(policy),
        max_steps=asked.steps,
        per_device_train_batch_size=asked.prompts_per_step * asked.samples,
        num_generations=asked.samples,
        max_completion_length=asked.max_new_tokens,
        learning_rate=asked.rate,
        lr_scheduler_type="constant",
        bf16=False,  # what is trained is then what was sampled from
        save_steps=asked.save_every,
        logging_steps=1,
        report_to="none",
        seed=asked.seed,
    )
    data = Dataset.from_json(asked.prompts)
    trainer = GRPOTrainer(asked.model, rewards, args, data, rollout_func=drafted.roll_out, callbacks=[drafted])
    trainer.train(resume_from_checkpoint=any(policy.glob("checkpoint-*")))


if __name__ == "__main__":
    main()
