"""Decoders whose layers run several times, in stacks (as HRM's): their states, caches and texts."""

from typing import Any

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.eval.decoding import generate
from headstart.eval.drafters.draft_model import DraftModelDrafter
from headstart.heads.registry import HEADS, build_head
from headstart.heads.target import Target
from headstart.heads.targets import runs
from transformers import HrmTextConfig, HrmTextForCausalLM

IDS = torch.tensor([[1, 7, 8, 3, 40, 22, 5]])
PROMPTS = [[1, 5, 9, 14, 33], [1, 7, 8, 3, 22, 40, 11, 6, 30], [1]]


def make_model() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = HrmTextConfig(**sizes, head_dim=8, num_hidden_layers=2, H_cycles=2, L_cycles=2, bos_token_id=1)
    model = HrmTextForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
    return model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(make_model(), name="hrm", fingerprint="")


def test_there_is_a_layer_for_each_run(target):
    low, high = (list(part.layers) for part in (target.base.L_module, target.base.H_module))
    assert list(target.layers) == 2 * (2 * low + high) and target.num_layers == 12 == len(target.kept)


def test_the_states_before_each_run_are_the_models(target):
    theirs = target.model(IDS, output_hidden_states=True).hidden_states
    ours = target.forward(IDS, feature_layers=tuple(range(12)))
    torch.testing.assert_close(ours.post_norm, theirs[-1])
    for i in range(12):
        torch.testing.assert_close(ours.features[:, :, i], theirs[i])


@pytest.mark.parametrize("drafter", ["none", "itself", "eagle3"])
def test_texts_are_the_models_own_alone_and_in_a_batch(drafter, target):
    made = {"none": lambda: None, "itself": lambda: DraftModelDrafter(target)}
    made["eagle3"] = lambda: build_head(HEADS["eagle3"].config_class(type="eagle3"), target, seed=1).eval()
    how: dict[str, Any] = {
        "max_new_tokens": 16,
        "eos_token_ids": [],
        "num_draft_tokens": None if drafter == "none" else 3,
    }
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        own = {"do_sample": False, "max_new_tokens": 16, "min_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
        texts.append(target.model.generate(ids, attention_mask=torch.ones_like(ids), **own)[0, len(prompt) :].tolist())
    assert len(set(texts[0])) > 5, "a text that could not tell right from wrong"
    assert generate(target, made[drafter](), PROMPTS, **how).token_ids == texts
    assert [generate(target, made[drafter](), prompt, **how).token_ids[0] for prompt in PROMPTS] == texts


def test_a_state_of_another_run_is_refused(monkeypatch):
    """The input of a run instead of the state behind the one before: the model adds to it between two stacks."""
    monkeypatch.setattr(
        runs.Entering, "_count", lambda self, layer, args, kwargs, output: (self._keep(args[0]), runs_on(self))[0]
    )
    with pytest.raises(BadInput, match="^target hrm: HrmTextForCausalLM: the state that enters layer 2 is computed in"):
        Target(make_model(), name="hrm", fingerprint="")


def runs_on(entering: runs.Entering) -> None:
    entering.num_runs += 1


def test_no_smaller_draft_model_of_it_is_made(target):
    with pytest.raises(BadInput, match="^head.num_layers 2: hrm has layers that run several times, 12 in all"):
        build_head(HEADS["draft_lm"].config_class(type="draft_lm"), target, seed=1)
