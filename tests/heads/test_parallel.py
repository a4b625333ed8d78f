"""Heads that draft behind mask tokens in one pass: PARD and P-EAGLE."""

import json
from dataclasses import replace

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.engines.check import check_folder
from headstart.engines.export import export_head, serve_commands
from headstart.engines.heads import build_head, load_head, save_head
from headstart.eval.decoding import generate
from headstart.heads.base import DraftBatch
from headstart.heads.drafting.trees import DynamicTree
from headstart.heads.families import HEADS
from headstart.heads.loss.chains import chain_starts
from headstart.targets.target import Target
from perturbing import perturb
from safetensors.torch import load_file, save_file

FAMILIES = ["draft_lm", "eagle3"]


def built(family, target, **options):
    """A head whose every weight is away from its start."""
    head = build_head(HEADS[family].config_class(**{"num_depths": 4, "parallel": True, **options}), target, seed=1)
    return perturb(head, 0.1, seed=3).eval()


# plain, sliding windows, both kinds, rotary over a part
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "gpt_neox"])
def test_pard_is_the_model_on_a_text_with_mask_tokens_behind_it(kind, tiny_target):
    target = tiny_target(kind)
    head = built("draft_lm", target, mask_token_id=60)
    ids = torch.tensor([[1, 5, 9, 33, 20, 7, 7, 51, 4, 4]])
    starts, logits = head.teacher_forced_logits(DraftBatch(ids, ids > 0, target.forward(ids)))
    for i, t in enumerate(starts.positions[0].tolist()):
        read = torch.cat([ids[:, : t + 2], torch.full((1, 3), 60)], 1)
        wanted = head.reader.model(input_ids=read).logits[0, t + 1 :]  # [K, V]  # pyright: ignore
        valid = starts.valid[0, i]
        torch.testing.assert_close(logits[0, i][valid], wanted[valid], rtol=1e-4, atol=1e-5)


def test_all_chains_of_pard_are_read_row_by_row_and_drawn_ones_at_once(target, make_batch, monkeypatch):
    """In validation a row has all its chains, with many times the mask tokens of those that a step draws."""
    head = built("draft_lm", target)
    batch, forward, num_rows = make_batch(target, head), head.reader.forward, list[int]()
    monkeypatch.setattr(head.reader, "forward", lambda ids, **how: num_rows.append(len(ids)) or forward(ids, **how))
    starts = chain_starts(batch.loss_mask, 4)
    by_row, at_once = (
        torch.stack(list(head.unroll(batch, replace(starts, has_gaps=gaps))), 2) for gaps in (False, True)
    )
    torch.testing.assert_close(by_row[starts.valid], at_once[starts.valid])
    assert num_rows == [1, 1, 1, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_reads_once_and_any_k_or_tree_keeps_the_text(family, target, monkeypatch):
    head, prompts = built(family, target), [[1, 5, 9], [1, 7, 8, 3, 22, 40]]
    wanted = generate(target, None, prompts, max_new_tokens=12).token_ids
    for num_draft in (1, 4):
        assert generate(target, head, prompts, max_new_tokens=12, num_draft_tokens=num_draft).token_ids == wanted
    tree = DynamicTree(num_nodes=9, depth=3, top_k=3)
    assert generate(target, head, prompts, max_new_tokens=12, tree=tree).token_ids == wanted
    calls = []
    owner, name = (head.reader, "read_slots") if family == "draft_lm" else (head, "_decode")
    inner = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **how: calls.append(1) or inner(*args, **how))
    text = generate(target, head, prompts[:1], max_new_tokens=12, num_draft_tokens=4)
    assert len(calls) <= len(text.rounds) + 1, "one forward in each round, and one of the prompt"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_trains_on_fewer_chains_at_each_depth(family, target):
    torch.manual_seed(1)
    head = built(family, target, num_depths=7, chains_per_row=300)
    starts = head.training_starts(torch.arange(1000)[None] > 9)
    shares = starts.valid[0].float().mean(0).tolist()
    assert starts.valid.shape[1] == 300 and shares == pytest.approx([1, 0.7, 0.49, 0.343, 0.24, 0.2, 0.2], abs=0.08)
    assert (starts.valid[..., 1:] <= starts.valid[..., :-1]).all(), "a depth goes on from the one before"


@pytest.mark.parametrize(("family", "method"), [("draft_lm", "draft_model"), ("eagle3", "eagle3")])
def test_vllm_is_told_to_draft_behind_the_mask_token_and_others_are_refused(
    family, method, saved_target, make_batch, tmp_path
):
    target = Target.load(saved_target)
    head = built(family, target, mask_token_id=7)
    save_head(head, tmp_path / "run" / "final")
    exported = export_head(tmp_path / "run", tmp_path / "out", to="vllm")
    commands = serve_commands(exported, "served", to="vllm")
    assert f'"method":"{method}"' in commands["vllm"] and '"parallel_drafting":true' in commands["vllm"]
    assert "sglang" not in commands
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pard_token"] == 7
    assert check_folder(tmp_path / "out").problems == []
    for to in ("sglang", "llama.cpp"):
        with pytest.raises(BadInput, match=r"parallel|pard_token"):
            export_head(tmp_path / "run", tmp_path / to, to=to)
    batch, path = make_batch(target, head), tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    wanted = head.teacher_forced_logits(batch, num_depths=3)[1]
    for _ in range(2):  # ours, and as others would have published it
        loaded = load_head(tmp_path / "out", target)
        torch.testing.assert_close(loaded.teacher_forced_logits(batch, num_depths=3)[1], wanted)
        config.pop("headstart_export", None)
        path.write_text(json.dumps(config))
    config = {key: value for key, value in config.items() if key not in ("pard_token", "ptd_token_id")}
    path.write_text(json.dumps({**config, "pard_token": 61, "mask_token_id": 61}))
    assert any("pard_token: " in problem for problem in check_folder(tmp_path / "out").problems)


def test_a_mask_state_of_another_size_is_found(saved_target, tmp_path):
    save_head(built("eagle3", Target.load(saved_target)), tmp_path / "run" / "final")
    export_head(tmp_path / "run", tmp_path / "out", to="vllm")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    save_file({**tensors, "mask_hidden": torch.zeros(1, 1, 32)}, tmp_path / "out" / "model.safetensors")
    assert any("mask_hidden: expected [1, 1, 96]" in problem for problem in check_folder(tmp_path / "out").problems)


def test_pard_of_layers_that_no_mask_keeps_apart_is_refused(tiny_target, make_batch):
    target = tiny_target("qwen3_5")
    head = built("draft_lm", target)
    with pytest.raises(BadInput, match=r"^target draft_lm: linear_attention reads a row as one text.*parallel=false$"):
        head.loss(make_batch(target, head))
