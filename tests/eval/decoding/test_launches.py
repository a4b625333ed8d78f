"""How many kernels steps launch, by operations dispatched, and what attention reads of long caches, without a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drafted import untrained
from headstart.benchmarks.engine_cells import SIZES
from headstart.benchmarks.synthetic import BlankDrafter
from headstart.engines.heads import HEADS
from headstart.eval.decoding import generate
from headstart.eval.decoding.engine import DecodeState, Engine
from headstart.heads.base import DraftHead
from headstart.heads.drafting.drafter import Reading
from headstart.heads.drafting.trees import DynamicTree, Proposal
from headstart.heads.stored.fit import build_skeleton_head
from headstart.targets.caches import attention
from headstart.targets.caches.cache import SlotCache
from headstart.targets.caches.split_attention import reads_in_parts
from headstart.targets.cpu import joined_decoder
from headstart.targets.layers.target_output import TargetOutput
from headstart.targets.target import Target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

VIEWS = {"view", "reshape", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "t", "split",
         "split_with_sizes", "unbind", "as_strided", "detach", "alias", "_unsafe_view", "unflatten", "chunk",
         "_reshape_alias", "movedim", "empty", "empty_like", "new_empty", "lift_fresh"}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operations that run something: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


# Long caches: a target of the 8B's heads, and layers of few channels, on no device


def skeleton_of(num_layers: int) -> Target:
    heads: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128}
    config = LlamaConfig(num_hidden_layers=num_layers, max_position_embeddings=20000, **sizes, **heads)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return Target.of(model, name="skeleton", fingerprint="")


@pytest.fixture(scope="module")
def skeleton() -> Target:
    return skeleton_of(4)


def head_of(skeleton: Target, head_type: str, **changes: Any) -> DraftHead:
    return build_skeleton_head(HEADS[head_type].config_class(type=head_type, **changes), skeleton).to(torch.bfloat16)


def reading(width: int, *, start: int, num_features: int) -> Reading:
    """As a drafter gets it in a round of the skeleton."""
    with torch.device("meta"):
        ids, first = torch.zeros(1, width, dtype=torch.long), torch.full((1,), start)
        states = [torch.zeros(1, width, *size, dtype=torch.bfloat16) for size in ((num_features, 64), (64,))]
    return Reading(ids, ids, TargetOutput(*states), first, torch.ones_like(first))


def attended(skeleton: Target, monkeypatch: pytest.MonkeyPatch, context: int, head_type: str | None, **how: Any) -> Any:
    """Queries and keys of every masked attention of a round behind so many tokens; steps: eager or as captured."""
    seen, plain = [], attention.masked_attention

    def watched(query: Any, key: Any, *others: Any, **more: Any) -> Any:
        seen.append((query, key))
        return plain(query, key, *others, **more)

    drafter = head_of(skeleton, head_type) if head_type else None
    engine = Engine(skeleton, drafter, batch_size=1, max_length=context + 60, **how)
    engine.replay.steps, record = "graph", engine.replay
    monkeypatch.setattr(record, "_record", lambda step, arguments: step)
    for steps in ("eager", "graph"):
        engine.replay.steps = steps
        engine.begin_round(context)
        with torch.device("meta"):
            tokens, start = torch.zeros(1, 1, dtype=torch.long), torch.full((1,), context)
        read = reading(engine.depth + 1, start=context, num_features=len(engine.layers)) if drafter else None
        for module in (attention, joined_decoder):
            monkeypatch.setattr(module, "masked_attention", watched, raising=False)
        engine.verify(DecodeState(read, tokens, start), engine.draft(read), [False])
    return seen


@pytest.mark.fast_only(context=[1100, 5000])
@pytest.mark.parametrize("context", [*SIZES["8b"].contexts[1:], 1100, 5000])
@pytest.mark.parametrize("head_type", [None, "eagle3", "mtp"])
def test_rounds_over_long_caches_read_them_in_parts(context, head_type, skeleton, monkeypatch):
    """At every context of the engine's benchmark and between, of target and heads, eager and as captured."""
    seen = attended(skeleton, monkeypatch, context, head_type)
    assert len(seen) >= 8 and all(reads_in_parts(query, key) for query, key in seen)


@pytest.mark.parametrize("length", [20, 200])
def test_no_prompt_is_read_through_kernels_that_are_planned_anew_for_its_length(length, skeleton, monkeypatch):
    """cuDNN's, which take up to half a second for each new shape: of the target and of heads, however short it is."""
    allowed = []
    plain = attention.masked_attention

    def watched(query: Any, *others: Any, **more: Any) -> Any:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(query, *others, **more)

    for module in (attention, joined_decoder):
        monkeypatch.setattr(module, "masked_attention", watched, raising=False)
    for head_type in ("eagle", "eagle3", "mtp", "draft_lm"):
        head = head_of(skeleton, head_type)
        engine = Engine(skeleton, head, batch_size=1, max_length=300)
        with torch.device("meta"):
            tokens, num_valid = torch.zeros(1, length, dtype=torch.long), torch.full((1,), length)
        output, last = engine.prefill(tokens, num_valid)
        before = len(allowed)
        engine.commit_prompts(Reading(tokens, tokens, output, torch.zeros_like(num_valid), num_valid))
        assert len(allowed) > before
        assert last.shape == (1, 1)
    assert allowed and not any(allowed)


# Kernels by layer: a Llama of the 8B's heads on no device, by the difference of two depths


def launches(monkeypatch: pytest.MonkeyPatch, step: Callable[..., Any], *arguments: Any) -> list[str]:
    """What a step runs on a GPU once its caches are there; a device without kernels takes two of these apart."""
    step(*arguments)
    with Launches() as launched, monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", lambda query, *_, **__: query.clone())
        patch.setattr(F, "rms_norm", lambda x, *_: x.clone())
        step(*arguments)
    return launched.names


def launched_per_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> float:
    counts = []
    for num_layers in (2, 6):
        target = skeleton_of(num_layers)
        with torch.device("meta"):
            last, start = torch.zeros(1, 1, dtype=torch.long), torch.full((1,), 9)
        num = {"baseline": 0, "chain": 5, "tree": 5}[kind]
        tree = DynamicTree(num_nodes=5, depth=2, top_k=3) if kind == "tree" else None
        drafter = BlankDrafter() if num else None
        if drafter is not None:
            drafter.drafts_trees = True
        engine = Engine(target, drafter, batch_size=1, max_length=200, num_draft_tokens=num or None, tree=tree)
        parents = torch.zeros(1, num, dtype=torch.long, device="meta") if tree else None
        proposal = Proposal(torch.zeros(1, num, dtype=torch.long, device="meta"), parents)
        engine.begin_round(9)
        counts.append(len(launches(monkeypatch, engine.verify, DecodeState(None, last, start), proposal, [False])))
    return (counts[1] - counts[0]) / 4


@pytest.mark.parametrize(("kind", "before"), [("baseline", 41), ("chain", 43), ("tree", 47)])
def test_a_layer_launches_a_third_fewer_kernels_than_it_did(kind, before, monkeypatch):
    """Queries, keys and values are one product, as are gate and up; norms are one kernel; the mask is tiled once."""
    assert launched_per_layer(kind, monkeypatch) <= before * 2 / 3


@pytest.mark.parametrize(("head_type", "before"), [("eagle3", 272), ("block", 224)])
def test_heads_launch_fewer_kernels_than_they_did(head_type, before, skeleton, monkeypatch):
    """For five drafts: their norms are one kernel each, where each took three casts."""
    engine = Engine(skeleton, head_of(skeleton, head_type), batch_size=1, max_length=160, num_draft_tokens=5)
    engine.begin_round(100)
    names = launches(monkeypatch, engine.draft, reading(6, start=100, num_features=len(engine.layers)))
    assert len(names) <= 0.8 * before and names.count("_to_copy") <= 1


@pytest.mark.parametrize("num_layers", [2, 9])
def test_moving_a_path_takes_as_many_kernels_whatever_the_layers(num_layers):
    cache, path = SlotCache(num_layers=num_layers, max_length=64), torch.tensor([[5, 9], [7, 8]])
    cache.seek(torch.arange(16).expand(2, -1), extent=16)
    source, kept = torch.Generator().manual_seed(1), []
    for layer in range(num_layers):
        keys, values = (torch.randn(2, 2, 16, 4, generator=source) for _ in range(2))
        cache.update(keys, values, layer)
        kept.append((keys, values))
    with Launches() as launched:
        cache.move(path, torch.tensor([[3, 4], [3, 4]]))
    assert len(launched.names) <= 6
    for layer, written in zip(cache.layers, kept, strict=True):
        for held, before in zip((layer.keys, layer.values), written, strict=True):
            assert held is not None
            for row in range(2):
                assert torch.equal(held[row][:, 3:5], before[row][:, path[row]])
                assert torch.equal(held[row][:, 5:16], before[row][:, 5:])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_joined_layers_decode_what_the_models_own_do(family, tiny_target, monkeypatch):
    """As on a GPU, here on a CPU: texts, drafts and features; and weights take no memory twice."""
    target, prompts = tiny_target(family), [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6]]
    head = untrained("eagle3", target)
    for tree in (None, DynamicTree(num_nodes=4, depth=2, top_k=2)):
        how: dict[str, Any] = {"max_new_tokens": 20, "eos_token_ids": [], "tree": tree}
        wanted = generate(target, head, prompts, **how)
        joined = tiny_target(family)
        monkeypatch.setattr(joined_decoder, "decodes_joined", lambda device: True)
        head_of_joined = untrained("eagle3", joined)
        found = generate(joined, head_of_joined, prompts, **how)
        monkeypatch.undo()
        assert joined.decoder is not None and target.decoder is None
        assert found.token_ids == wanted.token_ids
        assert [one.num_accepted for one in found.rounds] == [one.num_accepted for one in wanted.rounds]
        layer: Any = joined.layers[1]
        attention_, mlp = layer.self_attn, layer.mlp
        for one, other in ((attention_.q_proj, attention_.v_proj), (mlp.gate_proj, mlp.up_proj)):
            assert one.weight.untyped_storage().data_ptr() == other.weight.untyped_storage().data_ptr()
        ids = torch.tensor([prompts[1]])
        assert torch.equal(joined.model(ids).logits, target.model(ids).logits), "and the model computes as before"


def test_layers_are_compiled_for_captured_rounds_and_not_for_lengths_that_come_once(skeleton, monkeypatch):
    """Eagerly, attention reads another number of slots every few rounds, and each would be compiled for."""
    compiled, planned, forward, layer = [], [], skeleton.forward, joined_decoder.decoder_layer

    def watched(*arguments: Any, is_round: bool, **how: Any) -> Any:
        compiled.append(is_round)
        return forward(*arguments, is_round=is_round, **how)

    def seen(*arguments: Any) -> Any:
        planned.append(torch.backends.cuda.cudnn_sdp_enabled())
        return layer(*arguments)

    monkeypatch.setattr(skeleton, "forward", watched)
    monkeypatch.setattr(joined_decoder, "decoder_layer", seen)
    last, start = torch.zeros(1, 1, dtype=torch.long, device="meta"), torch.full((1,), 9, device="meta")
    for steps in ("eager", "graph"):
        monkeypatch.setattr("headstart.eval.decoding.replay.check_steps", lambda steps, device: steps)
        engine = Engine(skeleton, None, batch_size=1, max_length=200, steps=steps)
        monkeypatch.setattr(engine.replay, "_record", lambda step, arguments: step)
        engine.begin_round(9)
        engine.verify(DecodeState(None, last, start), Proposal(last[:, :0]), [False])
    assert compiled == [False, True]
    assert planned == [False] * 4 + [True] * 4, "of 4 layers; cuDNN's attention is planned for each shape too"
