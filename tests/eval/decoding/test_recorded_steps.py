"""Steps that are recorded, as CUDA graphs or compiled code, decode what eager ones do."""

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from drafted import untrained
from headstart.base.errors import BadInput
from headstart.engines.heads import HEADS
from headstart.eval.decoding import continuous, replay
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.loop import decode, generate
from headstart.eval.decoding.replay import default_steps
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.stopping import Stop
from headstart.eval.drafters.guessing import Guessing
from headstart.eval.drafters.hybrid import HybridDrafter
from headstart.heads.drafting.trees import DynamicTree, SampledChain
from headstart.targets.caches.ring_cache import DraftWindow
from headstart.targets.cpu import joined_decoder
from headstart.targets.cpu.joined_decoder import JoinedDecoder
from joining import joined_texts
from torch.utils._python_dispatch import TorchDispatchMode

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34]]
TREES = {
    "chain": None,
    "sampled": SampledChain(3),
    "dynamic": DynamicTree(num_nodes=6, depth=2, top_k=3),
}
# what cannot stand in a CUDA graph: values read to the host, shapes that depend on values, constants made from lists
FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "is_nonzero")
ON_THE_HOST = ("tolist", "cpu", "numpy", "new_tensor")  # of a tensor, where no operation tells


class NoHostReads(TorchDispatchMode):
    """Refuses operations that wait for the device or depend on what it holds."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not any(word in name for word in FORBIDDEN), f"{name} inside a recorded step"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def recorded_strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record a step by running it under NoHostReads, and replay it so every time."""

    def record(step: Callable, arguments: tuple) -> Callable:
        step(*arguments)  # rotary tables and a tree's indices are made once

        def run(*tensors: Any) -> Any:
            with NoHostReads(), monkeypatch.context() as patch:
                for name in ON_THE_HOST:
                    patch.setattr(torch.Tensor, name, None)
                return step(*tensors)

        return run

    monkeypatch.setattr(replay, "compiled", record)
    for module in ("tree_nodes", "cache", "state_cache"):  # as on a GPU
        monkeypatch.setattr(f"headstart.targets.caches.{module}.is_readable", lambda _: False)
    monkeypatch.setattr("headstart.targets.caches.attention.is_prompt", lambda _: False)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record by tracing steps whole, without the minutes that a real compiler takes."""

    monkeypatch.setattr(replay, "compiled", partial(replay.compiled, backend="eager"))


def both_ways(target: Any, drafter: Any, tree: Any, **how: Any) -> None:
    """One engine decodes several texts as fresh eager ones do, drafts included."""
    wanted = generate(target, drafter, PROMPTS, max_new_tokens=8, tree=tree, eos_token_ids=[])
    engine = Engine(target, drafter, batch_size=4, max_length=32, tree=tree, steps="compile", **how)
    for _ in range(2):
        found = decode(engine, PROMPTS, max_new_tokens=8, stop=Stop.of(target, eos_token_ids=[]))
        assert found.token_ids == wanted.token_ids
        accepted = [[one.num_accepted for one in text.rounds] for text in (found, wanted)]
        assert accepted[0] == accepted[1], "drafts are the same too"
    assert len(engine.replay.recorded) == (1 if drafter is None or engine.drafts_on_host else 2)


@pytest.mark.fast_only(head_type=["eagle3", "medusa"])
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_no_step_of_any_head_reads_to_the_host(head_type, tree, target, recorded_strictly):
    both_ways(target, untrained(head_type, target), TREES[tree])


@pytest.mark.parametrize("name", ["draft_lm", "eagle3"])
def test_nor_does_one_that_drafts_behind_mask_tokens(name, target, recorded_strictly):
    both_ways(target, untrained(name, target, parallel=True, num_depths=4), None)


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
@pytest.mark.parametrize("name", ["eagle3", "mtp", "block"])
def test_nor_does_one_with_a_draft_window(name, tree, target, recorded_strictly):
    head = untrained(name, target)
    head.draft_window = DraftWindow(4, 2)
    both_ways(target, head, TREES[tree])


def test_nor_does_the_baseline(family, tiny_target, recorded_strictly):
    both_ways(tiny_target(family), None, None)


@pytest.mark.parametrize("drafts", [False, True])
def test_nor_does_a_delta_rule(drafts, tiny_target, recorded_strictly):
    target = tiny_target("qwen3_5")
    both_ways(target, untrained("eagle3", target) if drafts else None, None)


def test_nor_does_sampling(head_type, target, recorded_strictly, monkeypatch):
    """Trees of drawn children, their rejection rule, top-k, top-p and the bonus included."""
    head = untrained(head_type, target)
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9)
    texts = []
    for steps in ("eager", "compile"):
        source = torch.Generator().manual_seed(3)
        how = {"tree": TREES["sampled"], "sampling": sampling, "generator": source}
        engine = Engine(target, head, batch_size=4, max_length=32, **how)
        engine.replay.steps = steps  # compiled code cannot draw; what is asked here is whether it reads
        texts.append(decode(engine, PROMPTS, max_new_tokens=12, stop=Stop.of(target, eos_token_ids=[])).token_ids)
    assert texts[0] == texts[1]


BESIDE = [("eagle3", "traced"), *((name, "recorded_strictly") for name in ("eagle3", "medusa", "block"))]


@pytest.mark.slow
@pytest.mark.parametrize(("head_type", "way"), BESIDE)
def test_nor_does_a_head_that_is_asked_beside_look_ups(head_type, way, target, request, monkeypatch):
    """It is traced whole too. Held are texts, and its guesses of the first rounds, in which no row has ended."""
    request.getfixturevalue(way)
    head = untrained(head_type, target)
    guesses, chains = [], Guessing.chains

    def kept(self: Guessing, *arguments: Any, **how: Any) -> Any:
        guesses.append(chains(self, *arguments, **how))
        return guesses[-1]

    monkeypatch.setattr(Guessing, "chains", kept)
    wanted = generate(target, HybridDrafter(head), PROMPTS, max_new_tokens=12, eos_token_ids=[])
    num_rounds = len(guesses)
    engine = Engine(target, HybridDrafter(head), batch_size=4, max_length=32, steps="compile")
    for _ in range(2):
        found = decode(engine, PROMPTS, max_new_tokens=12, stop=Stop.of(target, eos_token_ids=[]))
        assert found.token_ids == wanted.token_ids
    tokens = [[guess.token for row in each for guess in row] for each in guesses]
    assert tokens[:2] == tokens[num_rounds : num_rounds + 2]
    assert len(engine.replay.recorded) == 2 and all(engine.replay.recorded.values())


@pytest.mark.slow
@pytest.mark.parametrize(("head_type", "tree"), [*((name, "chain") for name in sorted(HEADS)), ("eagle3", "dynamic")])
def test_chains_of_every_head_and_trees_are_traced_whole(head_type, tree, target, traced):
    both_ways(target, untrained(head_type, target), TREES[tree])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_steps_decode_the_same(target):
    both_ways(target, untrained("medusa", target), None)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record as a CUDA graph does: inputs and results stay where they are, and are overwritten. Holds all arguments."""
    recorded = []

    def record(step: Callable, arguments: tuple) -> Callable:
        inputs = [None if one is None else one.clone() for one in arguments]
        outputs = step(*inputs)
        recorded.append(arguments)

        def run(*tensors: Any) -> Any:
            for own, given in zip(inputs, tensors, strict=True):
                assert own is None or own.copy_(given) is own
            for own, new in zip(outputs, step(*inputs), strict=True):
                assert own is None or own.copy_(new) is own
            return outputs

        return run

    monkeypatch.setattr(replay, "compiled", record)
    return recorded


def check_recorded_joining(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few tokens and of more than 128 slots, three at a time: what is recorded for few slots serves again
    when the long ones have left."""
    prompts = [[1, 2, 3], [5] * 118, [4, 5], [0, 1, 0, 3], [2] * 90, [3, 1], [1, 1, 4]]
    alone = [generate(target, None, prompt, max_new_tokens=14).token_ids[0] for prompt in prompts]
    monkeypatch.setattr(continuous, "default_steps", lambda device: "compile")
    assert joined_texts(target, prompts, batch_size=3, max_new_tokens=14) == alone


def test_rows_join_and_leave_recorded_rounds(tiny_target, captured, monkeypatch):
    """Of a row that joins a graph sees caches alone, which are written in place."""
    check_recorded_joining(tiny_target("llama", vocab_size=6, eos_token_id=None), monkeypatch)
    assert len(captured) == 4, "rounds, and the reading of prompts, of few tokens and of more"


@pytest.mark.slow
@pytest.mark.parametrize("num_read", [1, 2, 3])
def test_prompts_that_join_together_are_read_without_the_host(
    family, num_read, tiny_target, recorded_strictly, monkeypatch
):
    monkeypatch.setattr(continuous, "most_read", lambda device, num_rows: num_read)
    check_recorded_joining(tiny_target(family, vocab_size=64), monkeypatch)


@pytest.mark.parametrize(
    ("device", "num_tokens", "steps"), [("cpu", 512, "eager"), ("cuda", 512, "graph"), ("cuda", 64, "eager")]
)
def test_steps_are_recorded_on_a_gpu_where_enough_is_decoded(device, num_tokens, steps):
    assert default_steps(torch.device(device), num_tokens=num_tokens) == steps


@pytest.mark.parametrize(("family", "drafted"), [("llama", False), ("qwen2", True), ("qwen3", True)])
def test_captured_rounds_read_through_compiled_layers(family, drafted, tiny_target, monkeypatch):
    """As on a GPU with a target that is large enough: one compilation for all layers, and the same text."""
    monkeypatch.setattr(replay, "check_steps", lambda steps, device: steps)
    monkeypatch.setattr(joined_decoder, "decodes_joined", lambda device: True)
    monkeypatch.setattr(joined_decoder, "FEWEST_COMPILED", 0)
    monkeypatch.setattr(joined_decoder, "compiled_ahead", partial(joined_decoder.compiled_ahead, backend="eager"))
    target = tiny_target(family)
    head = untrained("eagle3", target) if drafted else None
    wanted = generate(target, head, PROMPTS, max_new_tokens=12, eos_token_ids=[]).token_ids
    engine = Engine(target, head, batch_size=4, max_length=32, steps="graph")
    assert isinstance(target.decoder, JoinedDecoder) and not target.decoder.compiled
    found = decode(engine, PROMPTS, max_new_tokens=12, stop=Stop.of(target, eos_token_ids=[]))
    assert found.token_ids == wanted
    assert list(target.decoder.compiled) == [(4, engine.num_drafted + 1, engine.cache.extent)]


def test_what_cannot_be_recorded_is_one_line(target, monkeypatch):
    with pytest.raises(BadInput, match=r"^steps graph: a CUDA graph needs a GPU, and the target is on cpu; compile"):
        Engine(target, None, batch_size=1, max_length=8, steps="graph")
    with pytest.raises(BadInput, match=r"^steps 'fast': expected one of eager, graph, compile$"):
        Engine(target, None, batch_size=1, max_length=8, steps="fast")
    with pytest.raises(BadInput, match=r"^steps compile: greedy only"):
        Engine(target, None, batch_size=1, max_length=8, steps="compile", sampling=Sampling(temperature=1.0))
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(BadInput, match=r"^steps compile: needs torch 2.11, this is 2.9.1\+cpu$"):
        Engine(target, None, batch_size=1, max_length=8, steps="compile")
