"""Targets with recurrent layers: chains decode the model's own text, whatever is accepted, rejected or batched."""

import copy
from typing import Any

import pytest
import torch
from drafted import own_text, untrained
from headstart.base.errors import BadInput
from headstart.benchmarks.synthetic import BlankDrafter
from headstart.eval.decoding import continuous
from headstart.eval.decoding.draft_setting import DraftSetting
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.loop import decode, generate
from headstart.eval.decoding.stopping import Stop
from headstart.eval.drafters.draft_model import DraftModelDrafter
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.measurement.step_times import TimedCell
from headstart.eval.proof.config import MeasureConfig
from headstart.heads.drafting.trees import DynamicTree
from headstart.targets.caches.state_cache import StateLayer
from headstart.targets.target import Target
from joining import joined_texts
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# by what their layers keep: a delta rule and a short convolution; Mamba-1, whose recurrence is read token by token;
# states in a cache of the model's own. tests/targets/kinds decodes all others
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2},
    "minimax": {"num_local_experts": 2, "block_size": 4},
}
PROMPTS = [[1, 5, 9, 14, 33], [1, 7, 8, 3, 22, 40, 11, 6, 30, 31, 5, 9, 14], [1], [1, 30, 31, 32]]
NUM_NEW = 16
HOW: dict[str, Any] = {"max_new_tokens": NUM_NEW, "eos_token_ids": []}


def make_hybrid(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **HYBRIDS[kind], **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "A_log" not in name:
                parameter.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest) -> tuple[Target, list[list[int]]]:
    """A target, and the model's own texts behind PROMPTS."""
    model = make_hybrid(request.param)
    # of copies: RecurrentGemma leaves states behind, which a prompt of one token would read
    texts = [own_text(copy.deepcopy(model), prompt, NUM_NEW, eos_token_id=None) for prompt in PROMPTS]
    assert max(len(set(text)) for text in texts) > 3, "texts that do not repeat one token"
    return Target.of(model, name=request.param, fingerprint=""), texts


def test_as_its_own_draft_model_every_draft_is_accepted(hybrid):
    target, texts = hybrid
    found = generate(target, DraftModelDrafter(target), PROMPTS, num_draft_tokens=3, **HOW)
    assert found.token_ids == texts and all(num == 3 for done in found.rounds[1:-1] for num in done.num_accepted)


def test_prompts_are_read_in_chunks_as_at_once(hybrid, monkeypatch):
    target, texts = hybrid
    monkeypatch.setattr(Target, "prompt_chunk", 4)
    assert generate(target, NgramDrafter(), PROMPTS, num_draft_tokens=3, **HOW).token_ids == texts


def test_one_engine_decodes_batch_after_batch(hybrid):
    target, texts = hybrid
    engine = Engine(target, NgramDrafter(), batch_size=2, max_length=64, num_draft_tokens=3)
    for rows in ([1, 0], [2, 3], [0, 2]):
        prompts = [PROMPTS[row] for row in rows]
        done = decode(engine, prompts, max_new_tokens=NUM_NEW, stop=Stop(frozenset()))
        assert done.token_ids == [texts[row] for row in rows]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_rows_join_and_leave_a_running_batch(is_ahead, hybrid, monkeypatch):
    """is_ahead: the next round is launched before a round's tokens are read, as on a GPU."""
    monkeypatch.setattr(continuous, "launches_ahead", lambda device: is_ahead)
    target, texts = hybrid
    how = {"batch_size": 3, "max_new_tokens": NUM_NEW, "stop": Stop(frozenset())}
    assert joined_texts(target, PROMPTS * 2, **how) == texts * 2


def test_rounds_are_timed_in_several_passes(hybrid):
    """Each from the prompts on: a state cannot go back to where an earlier pass began."""
    target, _ = hybrid
    settings, config = [DraftSetting("K 3", 3)], MeasureConfig()
    cell = TimedCell(target, BlankDrafter(), settings, config, batch_size=2, context=6, text=PROMPTS[1])
    for _ in range(2):
        cell.run()
    assert len(cell.plain) == 4 and cell.rounds[0].verify_ms > 0


def test_a_state_that_keeps_rejected_drafts_would_change_the_text(hybrid, monkeypatch):
    """The test above can fail: here each round starts from the state behind all drafts of the last one."""
    target, texts = hybrid
    start = StateLayer.start
    late = lambda self, index, is_empty: start(self, torch.where(index > 0, 4, index), is_empty)  # noqa: E731
    monkeypatch.setattr(StateLayer, "start", late)
    assert generate(target, NgramDrafter(), PROMPTS, num_draft_tokens=3, **HOW).token_ids != texts


def test_trees_are_refused_by_name(hybrid):
    target, _ = hybrid
    with pytest.raises(BadInput, match=f"^target {target.name}: decodes chains, not trees"):
        generate(target, untrained("eagle3", target), PROMPTS, tree=DynamicTree(6, 2, 3))


def test_a_copy_of_the_model_computes_with_its_own_weights(hybrid):
    target, _ = hybrid
    other = copy.deepcopy(target.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    ids = torch.tensor([PROMPTS[0]])
    assert not other(ids).logits.any() and target.model(ids).logits.any()


class CompressedLayer(DynamicLayer):
    """As some model may bring along."""


def test_layers_that_keep_what_is_not_known_are_named_before_anything_is_trained(tiny_target, tiny_model, monkeypatch):
    layers = [*DynamicCache(config=tiny_model("llama").config).layers[:3], CompressedLayer()]
    monkeypatch.setattr("headstart.targets.frozen_model.kept_by_layers", lambda config: layers)
    target = tiny_target("llama")
    assert not target.can_decode
    with pytest.raises(BadInput, match="^target tiny-llama: layer 3 keeps a CompressedLayer .* not decoded$"):
        generate(target, None, PROMPTS)
