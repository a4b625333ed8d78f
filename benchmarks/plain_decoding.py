"""Is our baseline a slow one? Decoding without drafts, ours beside that of transformers or llama-server, in turns.

    python -m headstart.benchmarks.plain_decoding MODEL PROMPTS.jsonl
    python -m headstart.benchmarks.plain_decoding MODEL PROMPTS.jsonl --llama-server BINARY --gguf TARGET.gguf

Greedy, one prompt at a time, whole answers on both sides. `xllamacpp` may stand for a binary: that package's, built for
any CPU of its kind.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..engines.neutral_sampling import LLAMA_SERVER
from ..engines.servers.address import Address
from ..engines.servers.llama_server import LlamaServerEngine
from ..engines.servers.process import ServerProcess
from ..eval.decoding.draft_setting import chain
from ..eval.decoding.replay import default_steps
from ..eval.figures.metrics import ratio_and_interval
from ..eval.proof.config import MeasureConfig
from ..eval.proof.own_forward import generation_config
from ..eval.proof.runner import Runner
from ..eval.suites.prompts import load_suite
from ..targets.loading import quiet_loading
from ..targets.target import Target

HEADROOM = 16  # context positions that llama-server needs beyond a prompt and its answer
ANSWER_SECONDS = 3600
LENGTH_SLACK = 0.1  # by which answers may differ in length to be compared in time

Decode = Callable[[list[int]], list[int]]  # a prompt to its new tokens


@dataclass
class TimedAnswers:
    """What one engine decoded, prompt by prompt."""

    seconds: list[float] = field(default_factory=list)  # of whole answers, prefill included, over all repeats
    texts: list[list[int]] = field(default_factory=list)  # new tokens of the first repeat

    def seconds_for(self, texts: Sequence[Sequence[int]], at: Sequence[int]) -> list[float]:
        """Time of the prompts `at`, for as many tokens as these texts have; all of it if an answer ended at once."""
        answers = ((self.seconds[i], self.texts[i], texts[i]) for i in at)
        return [seconds * len(new) / len(own) if own else seconds for seconds, own, new in answers]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("prompts")
    parser.add_argument("--llama-server", help="its binary; default: transformers' generate")
    parser.add_argument("--gguf", help="the target as llama-server loads it")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args(argv)
    target = Target.load(asked.target, dtype=asked.dtype)
    suite = load_suite(asked.prompts, target, max_new_tokens=asked.max_new_tokens)
    if asked.llama_server:
        longest = max(map(len, suite.prompts)) + asked.max_new_tokens + HEADROOM
        command = LlamaServerEngine().command(asked.llama_server, asked.gguf or asked.target, [], [])
        command += LlamaServerEngine().room(1, longest)
        command += ["-t", str(torch.get_num_threads())] if target.device.type == "cpu" else []
        way, name = server_decoding(target, command, asked.max_new_tokens), "llama-server"
    else:
        way, name = their_decoding(target, asked.max_new_tokens), "transformers"
    steps = default_steps(target.device)
    config = MeasureConfig(setting=chain(0), max_new_tokens=asked.max_new_tokens, steps=steps)
    run = Runner(target, None, suite.prompts, config)
    with way as theirs:
        ways = [theirs, lambda prompt: run([prompt], config.seed).token_ids[0]]
        print(told(name, *decode_in_turns(ways, suite.prompts, num_repeats=asked.repeats)))


def told(name: str, theirs: TimedAnswers, ours: TimedAnswers) -> str:
    """Our speed over theirs, on the prompts that both answered at about the same length, and how many texts are equal.
    Scaled to one length, the longer of two answers would look faster, as it has one prefill too."""
    lengths = [(len(a), len(b)) for a, b in zip(theirs.texts, ours.texts, strict=True)]
    alike = [i for i, pair in enumerate(lengths) if max(pair) - min(pair) <= max(1, LENGTH_SLACK * max(pair))]
    same = sum(a == b for a, b in zip(theirs.texts, ours.texts, strict=True))
    equal = f"{same} of {len(lengths)} texts are equal"
    if not alike:
        return f"{name}: no answer is as long as ours, so nothing is compared in time; {equal}"
    seconds = [side.seconds_for(theirs.texts, alike) for side in (theirs, ours)]
    ratio, (low, high) = ratio_and_interval(*seconds)
    ends = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"Our baseline has {ratio:.2f}{ends} times the speed of {name}, over {len(alike)} prompts; {equal}"


@contextmanager
def their_decoding(target: Target, max_new_tokens: int) -> Iterator[Decode]:
    """transformers' `generate` with its defaults (a dynamic cache). The checkpoint's own generation config, which may
    sample or penalise repetition, is replaced meanwhile."""

    def run(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device=target.device)  # [1, T]
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
        return target.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()

    eos = sorted(target.eos_token_ids) or None
    with quiet_loading(), generation_config(target.model, eos_token_id=eos, pad_token_id=0):
        yield run


class LlamaServer(ServerProcess):
    """A server process, which runs during a `with` block."""

    def __init__(self, command: Sequence[str]):
        super().__init__(command, name=command[0], option="--server-bin")

    def answer(self, prompt: Sequence[int], *, max_new_tokens: int) -> tuple[list[int], bool]:
        """Continue a prompt greedily. Returns: the new tokens, and whether the target ended them, and not the limit.
        Raises RuntimeError if the server's own settings would change the target's choices, BadInput if it fails."""
        sampling = {**LLAMA_SERVER, "temperature": 0.0}
        asked: dict[str, Any] = {"prompt": list(prompt), "n_predict": max_new_tokens, **sampling}
        asked |= {"cache_prompt": False, "return_tokens": True, "stream": False}
        said = json.loads(Address(self.url).post("/completion", asked, seconds=ANSWER_SECONDS))
        applied = said.get("generation_settings", {})
        if other := [f"{key} {applied[key]}" for key, value in sampling.items() if applied.get(key, value) != value]:
            raise RuntimeError(f"llama-server: does not answer greedily as asked: {', '.join(other)}")
        return said["tokens"], said.get("stop_type") == "eos"


@contextmanager
def server_decoding(target: Target, command: list[str], max_new_tokens: int) -> Iterator[Decode]:
    """A llama-server. It leaves out the end token, which is put back if the target has only one."""
    ends = sorted(target.eos_token_ids)

    def decode(prompt: list[int]) -> list[int]:
        new, is_ended = server.answer(prompt, max_new_tokens=max_new_tokens)
        return [*new, *ends] if is_ended and len(ends) == 1 and new[-1:] != ends else new

    with LlamaServer(command) as server:
        yield decode


@torch.no_grad()
def decode_in_turns(ways: Sequence[Decode], prompts: Sequence[list[int]], *, num_repeats: int) -> list[TimedAnswers]:
    """Time several ways to decode in turns, prompt by prompt after one that is not timed, so that drifts of the machine
    affect all; the first one changes every time."""
    sides = [TimedAnswers() for _ in ways]
    for number, prompt in enumerate(prompts):
        for way in ways:
            way(prompt)
        seconds, texts = [0.0 for _ in ways], [list[int]() for _ in ways]
        for repeat in range(num_repeats):
            for turn in range(len(ways)):
                which = (number + repeat + turn) % len(ways)
                started = time.perf_counter()
                new = ways[which](prompt)
                seconds[which] += time.perf_counter() - started
                texts[which] = texts[which] or new
        for which, side in enumerate(sides):
            side.seconds.append(seconds[which])
            side.texts.append(texts[which])
    return sides


if __name__ == "__main__":
    main()
