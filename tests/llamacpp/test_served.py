"""Heads of SmolLM2-135M-Instruct in llama.cpp's own server, in F32: the text is the target's, and as many drafts are
accepted in a round as in our engine."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart.benchmarks.quickstart.prompts import orders
from headstart.benchmarks.quickstart.target import get
from headstart.data_pipelines.rows.parallel import chunks
from headstart.engines.check import check_export
from headstart.engines.export import export_head
from headstart.engines.heads import build_head, head_class, save_head
from headstart.engines.llamacpp import Conversion
from headstart.eval.decoding import generate
from headstart.eval.suites.prompts import Suite
from headstart.heads.base import DraftBatch, DraftHead
from headstart.heads.block import BlockHead
from headstart.targets.target import Target

# LENGTH: a first token and whole rounds of K + 1, so that all drafts can be accepted up to the text's end
NUM_PROMPTS, LENGTH, K = 32, 21, 3
DFLASH2: dict[str, Any] = {"num_depths": K, "sample_from_anchor": False, "markov_rank": 0, "start": "fitted"}
DFLASH2 |= {"num_layers": 1, "conv_group_size": 16, "selector_rank": 64}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3, cut vocabulary": ("eagle3", {"start": "fitted", "num_depths": K, "draft_vocab_size": 1024}),
    "eagle3, whole vocabulary": ("eagle3", {"start": "fitted", "num_depths": K}),
    "dspark": ("block", {"num_depths": K, "markov_rank": 64, "draft_vocab_size": 1024, "output": "own"}),
    "dflash2": ("block", DFLASH2),
    "dflash2 with a window": ("block", DFLASH2 | {"sliding_window": 16}),
    "the target as its own draft model": ("draft_lm", {"num_depths": K}),
}
LEAST = {
    "the target as its own draft model": 3.99
}  # tokens per forward; others 1.3, so that there is something to compare
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def world(llamacpp, tmp_path_factory) -> tuple[Target, Suite, list[list[int]]]:
    """The target in F32, prompts, and its own answers to them."""
    from headstart.targets.weights.gguf import cache_folder

    folder = cache_folder() / "smollm2-135m-instruct"
    if not (folder / "config.json").is_file():
        get("smollm2-135m-instruct", folder)
    target = Target.load(folder, dtype="float32")
    chats = [[{"role": "user", "content": text}] for text in orders(NUM_PROMPTS, seed=1, held_out=True)]
    ids = [target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True) for chat in chats]
    suite = Suite("orders", [one["input_ids"] for one in ids])
    answers = generate(
        target, None, suite.prompts, max_new_tokens=LENGTH, eos_token_ids=sorted(target.eos_token_ids)
    ).token_ids
    return target, suite, answers


@pytest.fixture(scope="module")
def target_gguf(tmp_path_factory) -> Path:
    """Where the first case leaves the converted target for the others."""
    return tmp_path_factory.mktemp("served") / "target.gguf"


@torch.no_grad()
def draft_what_followed(head: BlockHead, answers: list[list[int]]) -> None:
    """A Markov head alone, which says what came most often behind each token of the answers: random codes, one each."""
    assert head.markov_head is not None and head.vocabulary is not None
    head.lm_head.weight.zero_()
    first, second = head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight
    second.copy_(torch.randn(second.shape, generator=torch.Generator().manual_seed(1)) / second.shape[1] ** 0.5)
    pairs = Counter(pair for answer in answers for pair in pairwise(answer))
    for (before, token), _ in reversed(pairs.most_common()):
        first[before] = 12 * second[head.vocabulary.to_draft[token]]


def learn_by_heart(head: DraftHead, texts: list[DraftBatch]) -> None:
    """Some steps on the answers themselves: untrained, DFlash2's convolutions and selector have no effect."""
    optimizer = torch.optim.AdamW([one for one in head.parameters() if one.requires_grad], lr=2e-3)
    for batch in texts * 2:
        head.loss(replace(batch, starts=head.training_starts(batch.loss_mask))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def texts_of(target: Target, head: DraftHead, suite: Suite, answers: list[list[int]]) -> Iterator[DraftBatch]:
    """Prompts and answers, for a start in closed form: without a step of training, drafts are accepted."""
    for prompt, answer in zip(suite.prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        output = target.forward(ids, feature_layers=tuple(head.feature_layers))
        yield DraftBatch(ids, torch.ones_like(ids).bool(), output)


@pytest.mark.parametrize("name", HEADS)
def test_llama_server_keeps_the_text_and_accepts_as_many_drafts_as_we_do(
    name, llamacpp, served, world, target_gguf, tmp_path, figures
):
    (server, checkout), (target, suite, answers) = llamacpp, world
    family, options = HEADS[name]
    if family == "draft_lm":
        options = options | {"path": target.name}
    config = head_class(family).config_class(**options)
    ids = None
    if config.draft_vocab_size:  # what the target writes, and the first others
        written = dict.fromkeys(token for answer in answers for token in answer)
        ids = torch.tensor(sorted(list(dict.fromkeys([*written, *range(2048)]))[: config.draft_vocab_size]))
    head = build_head(config, target, draft_token_ids=ids, seed=1)
    if isinstance(head, BlockHead) and head.markov_head is not None:
        draft_what_followed(head, answers)
    elif family != "draft_lm":
        head.begin_training(texts_of(target, head, suite, answers))
    if options.get("selector_rank"):
        learn_by_heart(head, list(texts_of(target, head, suite, answers)))
    save_head(head, tmp_path / "run" / "final")
    out, conversion = tmp_path / "out", Conversion(checkout, "f32", None if target_gguf.exists() else "f32")
    export_head(tmp_path / "run", out, to="llama.cpp", dtype="float32", conversion=conversion)
    assert check_export(out).problems == []
    if not target_gguf.exists():
        (out / "target.gguf").rename(target_gguf)

    theirs = served(server, target_gguf, out / "head.gguf", suite, tmp_path / "measured", length=LENGTH, num_draft=K)
    ends = sorted(target.eos_token_ids)
    how = {"max_new_tokens": LENGTH, "eos_token_ids": ends, "num_draft_tokens": K}
    rounds = [done for part in chunks(suite.prompts, size=8) for done in generate(target, head, part, **how).rounds[1:]]
    # of the last round's tokens only those that the text has room for, as there
    ours = sum(sum(done.num_emitted) for done in rounds) / sum(one > 0 for done in rounds for one in done.num_committed)
    assert theirs.acceptance is not None and theirs.acceptance.acceptance_length is not None and theirs.texts
    texts = theirs.texts.report
    assert ours > LEAST.get(name, 1.3)
    assert texts.identical == texts.checked == NUM_PROMPTS and not theirs.failed
    assert theirs.acceptance.acceptance_length - 1 == pytest.approx(ours - 1, rel=0.02)
    figures.append(
        {
            "head": name,
            "K": K,
            "acceptance_length": round(ours, 4),
            "llama_server_acceptance_length": theirs.acceptance.acceptance_length,
            "identical_texts": f"{texts.identical}/{texts.checked}",
        }
    )
