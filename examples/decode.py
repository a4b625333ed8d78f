"""Decode with drafts in a program of your own: `python examples/decode.py MODEL "Once upon a time" [HEAD]`.

HEAD is a run's final/, an export or a hub id; without it, n-grams of the text so far are drafted.
"""

import sys

from headstart.eval.decoding import generate
from headstart.eval.drafters.registry import build_drafter
from headstart.eval.figures.metrics import acceptance
from headstart.targets.target import Target


def main(model: str, prompt: str, head: str = "") -> None:
    target = Target.load(model)
    name, drafter = build_drafter(f"head:{head}" if head else "ngram", target)
    ids = target.tokenizer(prompt).input_ids
    token_ids, rounds = generate(target, drafter, ids, max_new_tokens=64, num_draft_tokens=4)
    print(prompt + target.tokenizer.decode(token_ids[0]))
    counted = acceptance(rounds, num_draft_tokens=4)
    print(f"{name}: {counted.num_rounds} forwards of the target, {counted.length or 1:.2f} tokens each")
    print("accepted at each draft position, where it was reached:", counted.taken, "of", counted.tried)


if __name__ == "__main__":
    main(*sys.argv[1:])
