"""MTP modules equal DeepSeek-V3's formulas, draft what training scored on every kind of target."""

from typing import Any

import perturbing
import pytest
import torch
from formulas import check_formulas, llama_layer, rms
from headstart.base.errors import BadInput
from headstart.engines.heads import build_head, load_head, save_head
from headstart.eval.decoding.loop import generate
from headstart.heads.base import DraftBatch
from headstart.heads.drafting.drafter import Reading
from headstart.heads.drafting.trees import DynamicTree
from headstart.heads.mtp import MtpConfig
from headstart.targets.target import Target
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GPT2Config, GPT2LMHeadModel

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34]]


def perturbed(target, **changes) -> Any:
    return perturbing.perturbed("mtp", target, scale=0.2, **{"num_depths": 4, **changes}).eval()


def drafting(head, prefix):
    """A head's state behind prefix x_0 .. x_{t+1}."""
    ids = torch.tensor([prefix])
    num_read = ids.shape[1] - 1
    state = head.begin(batch_size=1, max_length=64)
    output = head.target.forward(ids[:, :-1])
    head.commit(state, Reading(ids[:, :-1], ids[:, 1:], output, torch.tensor([0]), torch.tensor([num_read])))
    return state


def teacher_forced(head, prefix, drafted):
    """[K, Vd] what training scores at the chain behind a prefix that goes on with these drafts."""
    row = torch.tensor([[*prefix, *drafted, 3, 4]])
    mask = torch.arange(row.shape[1])[None] >= len(prefix) - 1
    starts, logits = head.teacher_forced_logits(DraftBatch(row, mask, head.target.forward(row)))
    assert starts.positions[0, 0] == len(prefix) - 2
    return logits[0, 0]


# the paper's formulas, in loops


def project(module, token, hidden, position, layout):
    """Equation 21; the embedding beside position 0 is zero in two of the layouts."""
    e = module.driver.target.input_embedding.weight[token]
    e = torch.zeros_like(e) if position == 0 and layout != "qwen3_next" else e
    halves = [rms(e, module.enorm), rms(hidden, module.hnorm)]
    return module.eh_proj.weight @ torch.cat(halves[::-1] if layout == "mimo" else halves)


def naive(head, ids, states, t):
    """Draft logits of the chain at t, depth by depth."""
    config, first = head.config, head.module
    head_matrix = head.target.output_layer.weight
    xs = [project(first, int(ids[p + 1]), states[p], p, config.layout) for p in range(t + 1)]
    for depth in range(head.num_depths):
        out = llama_layer(first.block, torch.stack(xs), head.target.config)[-1]
        fed_back = rms(out, first.norm)
        yield head_matrix @ fed_back
        if t + 2 + depth < len(ids):
            xs.append(project(first, int(ids[t + 2 + depth]), fed_back, t + 1 + depth, config.layout))


@pytest.mark.parametrize("layout", [None, "mimo", "qwen3_next"])
def test_loss_and_logits_are_the_papers(layout, target, make_batch):
    head = perturbed(target, num_depths=3, layout=layout)
    batch = make_batch(target, head, num_rows=2, length=7, prompt=2)
    ids, states = batch.input_ids, batch.output.post_norm
    weights = [0.6**depth / (1 + 0.6 + 0.6**2) for depth in range(3)]
    check_formulas(
        head, batch, lambda row, t: naive(head, ids[row], states[row], t), is_hard=True, decay=lambda k: weights[k]
    )


# drafting


@pytest.mark.parametrize("prefix", [[1, 9], [1, 9, 14, 33, 20, 7, 7, 51, 18, 25, 36, 4, 9]])
def test_draft_equals_teacher_forced_on_every_family(prefix, family, tiny_target):
    """Also behind prompts shorter than the chain, and longer than the sliding window."""
    head = perturbed(tiny_target(family))
    drafted = head.propose(drafting(head, prefix), num_draft_tokens=4)
    wanted = teacher_forced(head, prefix, drafted.tokens[0].tolist())
    torch.testing.assert_close(torch.cat(drafted.logits), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", [[1, 9], [1, 9, 14, 33, 20, 7, 7, 51, 18]])
def test_a_window_narrower_than_the_chain(prefix, tiny_target):
    head = perturbed(tiny_target("mistral"))
    head.driver.window = 2
    drafted = head.propose(drafting(head, prefix), num_draft_tokens=4)
    wanted = teacher_forced(head, prefix, drafted.tokens[0].tolist())
    torch.testing.assert_close(torch.cat(drafted.logits), wanted, rtol=1e-3, atol=1e-3)
    head.driver.window = 3
    wider = teacher_forced(head, prefix, drafted.tokens[0].tolist())
    assert len(prefix) == 2 or not torch.allclose(wider, wanted, atol=1e-2)


def test_latent_attention_and_routed_experts():
    """DeepSeek-V3's own layer: keys are cached compressed, and expanded behind the cache."""
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
    sizes |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4, "n_routed_experts": 4, "n_group": 2}
    sizes |= {"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
    config = DeepseekV3Config(**sizes)
    torch.manual_seed(0)
    head = perturbed(Target.of(DeepseekV3ForCausalLM(config), name="tiny-deepseek", fingerprint=""))
    for prefix in ([1, 9], [1, 9, 14, 33, 20, 7, 7, 51, 18]):
        drafted = head.propose(drafting(head, prefix), num_draft_tokens=4)
        wanted = teacher_forced(head, prefix, drafted.tokens[0].tolist())
        torch.testing.assert_close(torch.cat(drafted.logits), wanted, rtol=1e-4, atol=1e-4)


def test_it_trains_and_drafts_in_bfloat16(tiny_model, make_batch, tmp_path):
    target = Target.of(tiny_model("llama").bfloat16(), name="tiny", fingerprint="")
    head = perturbed(target)
    with torch.autocast("cpu", torch.bfloat16):
        head.loss(make_batch(target, head)).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())
    loaded = load_head(save_head(head, tmp_path / "head"), target)
    for tree in (None, DynamicTree(12, 4, 3)):
        assert len(generate(target, loaded, PROMPTS, max_new_tokens=8, eos_token_ids=[], tree=tree).token_ids[0]) == 8


def test_its_layer_has_no_dropout_whatever_the_targets_config_says(tiny_model):
    model = tiny_model("llama")
    model.config.attention_dropout = 0.5
    head = build_head(MtpConfig(), Target.of(model, name="tiny", fingerprint=""))
    layers = [module for module in head.modules() if type(module) is type(head.target.layers[-1])]
    assert layers and not any(part.training for layer in layers for part in layer.modules())


# starts


def test_it_starts_from_the_targets_last_layer(target):
    head = build_head(MtpConfig(), target)
    state = head.state_dict()
    for name, value in target.layers[-1].state_dict().items():
        assert torch.equal(state[f"model.layers.4.{name}"], value)
    final = target.base.norm.state_dict()["weight"]
    assert torch.equal(state["model.layers.4.shared_head.norm.weight"], final)


def test_the_layer_first_reads_the_direction_of_the_residual_stream(tiny_model):
    """hnorm takes out the gain of the final norm, however it is stored."""
    for family in ("llama", "gemma3"):
        model = tiny_model(family)
        torch.nn.init.uniform_(model.base_model.norm.weight, 0.5, 2)
        target = Target.of(model, name="tiny", fingerprint="")
        hidden = torch.randn(3, 32)
        head: Any = build_head(MtpConfig(), target)
        read = head.module.hnorm(model.base_model.norm(hidden))
        torch.testing.assert_close(read / read.norm(dim=-1, keepdim=True), hidden / hidden.norm(dim=-1, keepdim=True))


def test_what_cannot_be_driven_is_refused(target, tiny_target, monkeypatch):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    with pytest.raises(BadInput, match="needs a decoder with rotary positions"):
        build_head(MtpConfig(), Target.of(model, name="tiny-gpt2", fingerprint=""))
    with pytest.raises(BadInput, match="tiny-llama is no local folder"):
        build_head(MtpConfig(init="checkpoint"), target)
    odd = tiny_target("qwen3")
    layer = odd.layers[-1]
    kept = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x, **k: kept(x, **k) + kept(1.5 * x, **{**k, "past_key_values": None}))
    with pytest.raises(BadInput, match=r"cannot drive its layer 3 \(Qwen3DecoderLayer\) alone"):
        build_head(MtpConfig(), odd)
