"""An assistant computes what transformers' own class of Gemma 4's computes with the same weights."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.engines.check import check_export
from headstart.engines.export import export_head
from headstart.engines.heads import build_head, load_head, save_head, start_head
from headstart.eval.decoding import generate
from headstart.heads.assistant import AssistantConfig, AssistantHead
from headstart.heads.drafting.drafter import Reading
from headstart.heads.stored.record import PROVENANCE
from headstart.targets.target import Target
from perturbing import perturb
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "targets" / "kinds"))
from kinds import KINDS  # noqa: E402

VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "one layer": {"num_layers": 1, "hidden_size": 24},
    "centroids": {"num_centroids": 32, "num_chosen": 4},
}
K = 3


@pytest.fixture(params=["gemma4_text", "gemma4_text_ple_shared"])
def target(request, tmp_path) -> Target:
    KINDS[request.param].model().save_pretrained(tmp_path / "target")
    return Target.load(tmp_path / "target", dtype="float32")


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_its_drafts_are_those_of_transformers(name, target, tmp_path):
    """Of a text that is longer than the sliding window."""
    head = build_head(AssistantConfig(**VARIANTS[name]), target, seed=1)
    perturb(head, 0.1, seed=3)
    if isinstance(head, AssistantHead) and head.masked_embedding is not None:
        head.masked_embedding.token_ordering.copy_(torch.randperm(target.vocab_size))
    head.eval()
    save_head(head, tmp_path / "head")
    export_head(tmp_path / "head", tmp_path / "out", to="vllm")
    assert check_export(tmp_path / "out").problems == []
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32").eval()

    ids = torch.randint(3, target.vocab_size, (1, 40))
    read, last = ids[:, :-1], ids[:, -1:]
    output = target.forward(read, feature_layers=head.feature_layers)
    state = head.begin(batch_size=1, max_length=64)
    head.commit(state, Reading(read, ids[:, 1:], output, torch.tensor([0]), torch.tensor([39])))
    drafted = head.propose(state, num_draft_tokens=K)

    whole = target.model(read, output_hidden_states=True, return_shared_kv_states=True)
    hidden, position = whole.hidden_states[-1][:, -1:], torch.tensor([[39]])
    for depth in range(K):
        embedded = torch.cat([target.embed(last), hidden], -1)
        told = {"position_ids": position, "shared_kv_states": whole.shared_kv_states}
        out = theirs(inputs_embeds=embedded, **told)
        logits = out.logits[:, -1]
        assert (drafted.logits[depth] - logits).norm() < 1e-4 * logits.norm()
        last, hidden = out.logits.argmax(-1), out.last_hidden_state
        assert last[0, 0] == drafted.tokens[0, depth]

    as_published(tmp_path / "out")
    assert check_export(tmp_path / "out").problems == []
    again = load_head(tmp_path / "out", target)
    text = [generate(target, one, [ids[0].tolist()], max_new_tokens=12, eos_token_ids=[]) for one in (head, again)]
    assert text[0].token_ids == text[1].token_ids
    assert [one.num_accepted for one in text[0].rounds] == [one.num_accepted for one in text[1].rounds]


def as_published(folder: Path) -> dict[str, Any]:
    """The config that others publish: without our record, its sizes by the older keys, no count of shared layers."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config[PROVENANCE], config["text_config"]["per_layer_config"]
    config["text_config"]["num_kv_shared_layers"] = 0
    path.write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("name", VARIANTS)
def test_training_goes_on_from_a_published_one(name, target, tmp_path, make_batch):
    """With its groups of tokens, which no dtype of the weights rounds."""
    head = build_head(AssistantConfig(**VARIANTS[name]), target, seed=1)
    save_head(head, tmp_path / "head")
    export_head(tmp_path / "head", tmp_path / "out", to="vllm")
    as_published(tmp_path / "out")
    head = start_head(AssistantConfig(**VARIANTS[name]), target, tmp_path / "out").train()
    head.loss(make_batch(target, head)).loss.backward()
    assert all(one.grad is not None for one in head.parameters() if one.requires_grad)
    if name != "centroids":
        return
    with pytest.raises(BadInput, match="head.num_chosen=4"):
        start_head(AssistantConfig(num_centroids=32, num_chosen=5), target, tmp_path / "out")
    with pytest.raises(BadInput, match="head.num_centroids: groups of tokens are an imported head's"):
        head.begin_training([])
    save_head(head, tmp_path / "rounded", dtype=torch.bfloat16)
    assert load_file(tmp_path / "rounded" / "model.safetensors")["masked_embedding.token_ordering"].tolist() == [
        *range(target.vocab_size)
    ]


UNLIKE: dict[str, Any] = {
    "hidden_activation": "silu",
    "sliding_window": 999,
    "rms_norm_eps": 0.1,
    "attention_bias": True,
}


@pytest.mark.parametrize("key", UNLIKE)
def test_what_computes_otherwise_is_refused(key, target, tmp_path):
    save_head(build_head(AssistantConfig(), target, seed=1), tmp_path / "head")
    export_head(tmp_path / "head", tmp_path / "out", to="vllm")
    config = as_published(tmp_path / "out")
    config["text_config"][key] = UNLIKE[key]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=f"text_config.{key}"):
        load_head(tmp_path / "out", target)


def test_a_target_whose_keys_are_not_made_so_has_none(tiny_target):
    with pytest.raises(BadInput, match="an assistant needs layers with a norm before attention"):
        build_head(AssistantConfig(), tiny_target("gpt_neox"))
