"""Prompts for a target and machines that were measured before; traffic that a target served."""

import json
import random

import pytest
import torch
from headstart.eval.decoding import generate
from headstart.scripts.unattended import machine
from headstart.scripts.unattended.running.journal import Machine, Measured, RoundCost
from headstart.targets.target import Target
from words import word_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}w03 {{ m['content'] }} w02 {% else %}w01 {{ m['content'] "
    "}} {% endif %}{% endfor %}{% if add_generation_prompt %}w03 {% endif %}"
)


@pytest.fixture
def machine_is(monkeypatch):
    """machine_is(medusa=1.5, ...): these candidates, with rounds that take 1.5 steps of the target for each K."""

    def given(**costs):
        found = [
            Measured(
                name,
                parameters=1000,
                costs=[RoundCost(1, steps), RoundCost(3, steps)],
                bound=2.0,
                bound_num_draft_tokens=3,
                usual_speedup=2.0,
                step_seconds=0.2,
                out="" if steps < 2 else "dear",
            )
            for name, steps in costs.items()
        ]
        measured = Machine(2.0, "float32", start_seconds=0.1, start_tokens=64, candidates=found)
        monkeypatch.setattr(machine, "measure_machine", lambda *_: measured)

    return given


@pytest.fixture
def worded_target(chat_target):
    """With words of which none begins with another, and a template that puts the same before every answer."""
    word_tokenizer([f"w{i:02}" for i in range(61)], chat_template=TEMPLATE).save_pretrained(chat_target)
    return chat_target


@pytest.fixture
def served_by(worded_target):
    """served_by("greetings", 20): a target's answers to as many prompts of a domain; `by` another one's, at random;
    `adapter`: its folder, of the target that served."""

    def answered(domain, count, *, by="target", temperature=0.0, adapter=None):
        target = Target.load(worded_target, adapter=adapter)
        source = random.Random(domain)
        first = 4 + source.randrange(20)
        asked = [" ".join(f"w{first + source.randrange(30):02}" for _ in range(3)) for _ in range(count)]
        rows = [[{"role": "user", "content": question}] for question in asked]
        kind = {"add_generation_prompt": True, "return_dict": True}
        prompts = [target.tokenizer.apply_chat_template(row, **kind)["input_ids"] for row in rows]
        drawn = torch.Generator().manual_seed(1)
        answers = generate(target, None, prompts, max_new_tokens=20, temperature=temperature, generator=drawn).token_ids
        if by != "target":
            answers = [[source.randrange(3, 61) for _ in range(20)] for _ in prompts]
        texts = [" ".join(f"w{token:02}" for token in answer if token != 2) for answer in answers]
        return [
            {"messages": [*row, {"role": "assistant", "content": text}], "domain": domain, "truncated": True}
            for row, text in zip(rows, texts, strict=True)
            if len(text.split()) > 3
        ]

    return answered


@pytest.fixture
def file_of(tmp_path):
    """file_of("logs", rows): a JSONL file of that name."""

    def write(name, rows):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def traffic(file_of):
    """traffic(40): a file of as many prompts."""
    row = lambda i: {"prompt": f"w{5 + i % 50} w{7 + 3 * i % 50} w{9 + i * i % 50}"}  # noqa: E731
    return lambda count: file_of("traffic", map(row, range(count)))
