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
from headstart.engines.heads import build_head, load_head, save_head
from headstart.eval.decoding import generate
from headstart.heads.assistant import AssistantConfig, AssistantHead
from headstart.heads.drafting.drafter import Reading
from headstart.heads.stored.record import PROVENANCE
from headstart.targets.target import Target
from perturbing import perturb
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

    path = tmp_path / "out" / "config.json"  # as others publish it, without our record
    path.write_text(
        json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != PROVENANCE})
    )
    again = load_head(tmp_path / "out", target)
    text = [generate(target, one, [ids[0].tolist()], max_new_tokens=12, eos_token_ids=[]) for one in (head, again)]
    assert text[0].token_ids == text[1].token_ids
    assert [one.num_accepted for one in text[0].rounds] == [one.num_accepted for one in text[1].rounds]


def test_a_target_whose_keys_are_not_made_so_has_none(tiny_target):
    with pytest.raises(BadInput, match="an assistant needs layers with a norm before attention"):
        build_head(AssistantConfig(), tiny_target("gpt_neox"))
