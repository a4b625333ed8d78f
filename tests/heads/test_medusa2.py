"""Medusa-2: the target learns with its heads, is verified as it then is, and stays itself without its adapters."""

import pytest
import torch
from drafted import own_text
from headstart.base.errors import BadInput
from headstart.configs.loader import build, read_config, shipped
from headstart.engines.heads import build_head, load_head, save_head, start_head
from headstart.eval.decoding import generate
from headstart.eval.drafters.registry import build_drafters
from headstart.eval.report.results.document import build_report
from headstart.heads.medusa import MedusaConfig, MedusaHead
from headstart.heads.stored.folder import fingerprint_of_tensors
from headstart.targets.target import Target
from peft import PeftModel
from perturbing import perturb
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34]]
IDS = torch.tensor([[1, 9, 14, 33, 20, 7, 7, 51]])


def medusa2(target, *, trained_looking=False, **changes) -> MedusaHead:
    """`trained_looking` moves the heads and the adapters, so that the target writes another text."""
    head = build_head(MedusaConfig(target_lora_rank=4, num_depths=3, **changes), target, seed=1)
    assert isinstance(head, MedusaHead)
    if trained_looking:
        perturb(head, 0.1, seed=3)
    return head


def logits(target):
    return target.model(IDS).logits


@pytest.mark.parametrize("self_distillation", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
def test_gradients_reach_adapters_and_heads_and_nothing_else(self_distillation, family, tiny_target, make_batch):
    target = tiny_target(family)
    stored = {name: p.clone() for name, p in target.model.named_parameters()}
    head = medusa2(target, trained_looking=True, self_distillation=self_distillation).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        head.loss(make_batch(target, head)).loss.backward()
        for name, parameter in head.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        optimizer.step()
    assert sum(name.startswith("adapter.") for name, _ in head.named_parameters()) > 8
    frozen = {n.replace(".base_layer.", "."): p for n, p in target.model.named_parameters() if ".lora_" not in n}
    assert frozen.keys() == stored.keys() and all(torch.equal(frozen[name], stored[name]) for name in stored)


def test_the_heads_loss_alone_moves_the_target(tiny_target, make_batch):
    """The heads' gradient flows through the target's states, not into its own loss only."""
    target = tiny_target()
    head = medusa2(target, trained_looking=True).train()
    super(MedusaHead, head).loss(make_batch(target, head)).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.adapter.parameters())


def test_the_loss_is_the_targets_plus_the_heads(tiny_target, make_batch):
    target = tiny_target()
    head = medusa2(target, trained_looking=True, head_weight=0.3).eval()
    batch = make_batch(target, head)
    with torch.no_grad():
        out, heads = head.loss(batch), super(MedusaHead, head).loss(batch)
        adapted = target.model(batch.input_ids).logits.log_softmax(-1)
        with head.adapter.off():
            before = target.model(batch.input_ids).logits.log_softmax(-1)
    divergence = (before.exp() * (before - adapted)).sum(-1)[:, :-1][batch.loss_mask[:, 1:]].sum()
    torch.testing.assert_close(out.loss, divergence / out.depth_count[0] + 0.3 * heads.loss)
    head.config.self_distillation = False
    entropy = -adapted[:, :-1].gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)[batch.loss_mask[:, 1:]].sum()
    with torch.no_grad():
        torch.testing.assert_close(head.loss(batch).loss, entropy / out.depth_count[0] + 0.3 * heads.loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_the_start_the_target_is_itself(dtype, tiny_model, make_batch):
    model = tiny_model("llama").to(dtype)
    target = Target.of(model, name="tiny", fingerprint=fingerprint_of_tensors(dict(model.named_parameters())))
    before = logits(target)
    head = medusa2(target)
    assert {p.dtype for p in head.parameters()} == {torch.float32}, "master weights"
    assert torch.equal(logits(target), before)
    batch = make_batch(target, head)
    out, heads = head.loss(batch), super(MedusaHead, head).loss(batch)
    assert abs((out.loss - head.config.head_weight * heads.loss).item()) < 1e-6, "no divergence from itself"
    with torch.autocast("cpu", torch.bfloat16):
        out, heads = head.loss(batch), super(MedusaHead, head).loss(batch)
    assert abs((out.loss - head.config.head_weight * heads.loss).item()) < 1e-6


def test_without_adapters_the_target_is_what_was_loaded(tiny_target):
    target = tiny_target()
    before = logits(target)
    head = medusa2(target, trained_looking=True)
    adapted = logits(target)
    assert not torch.allclose(adapted, before, atol=1e-2)
    with head.adapter.off():
        assert torch.equal(logits(target), before)
    assert torch.equal(logits(target), adapted)
    assert all(p.requires_grad for p in head.parameters())
    head.requires_grad_(False)
    with head.adapter.off():
        pass
    assert not any(p.requires_grad for p in head.parameters()), "as it was before"


def test_greedy_is_lossless_against_the_adapted_target(tiny_target):
    target = tiny_target()
    plain = [own_text(target.model, prompt, 30) for prompt in PROMPTS]
    head = medusa2(target, trained_looking=True).eval()
    wanted = [own_text(target.model, prompt, 30) for prompt in PROMPTS]
    assert wanted != plain
    for num_draft in (1, 3):
        assert generate(target, head, PROMPTS, max_new_tokens=30, num_draft_tokens=num_draft).token_ids == wanted
    assert generate(target, None, PROMPTS, max_new_tokens=30).token_ids == wanted, "the baseline too"


def test_save_load_is_identity(tiny_target, make_batch, tmp_path):
    target = tiny_target()
    head = medusa2(target, trained_looking=True).eval()
    batch = make_batch(target, head)
    folder = save_head(head, tmp_path / "head")
    names = {p.name for p in folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors"}
    assert not any("lora" in name for name in load_file(folder / "model.safetensors"))
    other = tiny_target()
    loaded = load_head(folder, other)
    assert loaded.config == head.config and other.is_adapted
    assert not any(p.requires_grad for p in [*loaded.parameters(), *other.model.parameters()])
    again = make_batch(other, loaded)
    assert torch.equal(again.output.post_norm, batch.output.post_norm)
    assert torch.equal(loaded.teacher_forced_logits(again)[1], head.teacher_forced_logits(batch)[1])


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_peft_puts_the_adapter_on_the_model_itself(family, tiny_target, tiny_model, tmp_path):
    target = tiny_target(family)
    head = medusa2(target, trained_looking=True).eval()
    tiny_model(family).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, str(save_head(head, tmp_path / "head"))).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, logits(target))
    wanted = [own_text(theirs, prompt, 20) for prompt in PROMPTS]
    assert generate(target, head, PROMPTS, max_new_tokens=20).token_ids == wanted


def test_it_starts_from_medusa_1(tiny_target, tmp_path):
    """The paper's two stages: heads first, then both."""
    target = tiny_target()
    first = build_head(MedusaConfig(num_depths=3), target, seed=7)
    folder = save_head(first, tmp_path / "first")
    head = start_head(MedusaConfig(num_depths=3, target_lora_rank=4), target, folder, seed=1)
    assert all(torch.equal(p, head.state_dict()[name]) for name, p in first.state_dict().items())
    again = tiny_target()
    second = start_head(head.config, again, save_head(head, tmp_path / "second"), seed=2)
    assert all(torch.equal(p, second.state_dict()[name]) for name, p in head.state_dict().items())
    with pytest.raises(BadInput, match=r"tensor adapter\..*: expected None, found "):
        start_head(MedusaConfig(num_depths=3), tiny_target(), tmp_path / "second")


def test_no_other_drafter_is_measured_on_the_adapted_target(saved_target, tmp_path):
    path = saved_target
    folder = save_head(medusa2(Target.load(path)), tmp_path / "second")
    plain = save_head(build_head(MedusaConfig(num_depths=3), Target.load(path)), tmp_path / "first")
    for specs in ([f"head:{folder}", "ngram"], ["ngram", f"head:{folder}"], [f"head:{plain}", f"head:{folder}"]):
        with pytest.raises(
            BadInput, match="drafter medusa: computes with adapters on the target; measure it by itself"
        ):
            build_drafters(specs, Target.load(path))
    with pytest.raises(BadInput, match="computes with another head's adapters, so medusa needs it afresh"):
        build_drafters([f"head:{folder}", f"head:{plain}"], Target.load(path))
    target = Target.load(path)
    assert build_report(target, []).target.is_adapted is False
    build_drafters([f"head:{folder}"], target)
    assert build_report(target, []).target.is_adapted is True


def test_the_shipped_config_is_the_papers():
    [path] = shipped("heads/medusa2.yaml")
    config = build(MedusaConfig, read_config(path)["head"])
    assert config == MedusaConfig(target_lora_rank=32)
