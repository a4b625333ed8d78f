"""Which parameter goes to which optimizer, at which learning rate; and one step of Muon written out."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.engines.heads import build_head, head_class
from headstart.heads.eagle3 import Eagle3Head
from headstart.train.inputs.config import TrainConfig
from headstart.train.optim import MuonAdamW, WideMuon, build_optimizer, learning_rate_share, without_whole_matrices


@pytest.fixture
def config():
    return TrainConfig(
        output_dir="unused", max_steps=10, optimizer="muon", learning_rate=2e-3, matrix_learning_rate=1e-2
    )


@pytest.fixture
def head(head_type, target):
    return build_head(head_class(head_type).config_class(type=head_type), target)


def give_gradients(head, seed=0):
    source = torch.Generator().manual_seed(seed)
    for p in head.parameters():
        p.grad = torch.randn(p.shape, generator=source)


def test_muon_takes_inner_matrices_and_adamw_vectors_and_output_layers(head, config, target):
    optimizer = build_optimizer(head, config)
    assert isinstance(optimizer, MuonAdamW)
    muon, adamw = (part.param_groups for part in optimizer.parts)
    matrices = [p for group in muon for p in group["params"]]
    others = [p for group in adamw for p in group["params"]]
    assert {id(p) for p in matrices + others} == {id(p) for p in head.parameters()}
    assert len(matrices) + len(others) == len(list(head.parameters()))
    assert all(p.ndim == 2 and target.vocab_size not in p.shape for p in matrices)
    assert all(p.ndim < 2 or target.vocab_size in p.shape for p in others)
    assert {group["peak"] for group in muon} == {1e-2} and {group["peak"] for group in adamw} == {2e-3}


OF_TOKENS = {  # of targets with 61 tokens, D 32 and an MLP of 48, for a draft model of 61
    "eagle3 draft_vocab_size=32": "lm_head.weight",
    "eagle3 draft_vocab_size=48": "lm_head.weight",
    "eagle draft_vocab_size=32": "",
    "mtp draft_vocab_size=48": "",
    "medusa num_depths=2 draft_vocab_size=32": "0.1.weight 1.1.weight",
    "draft_lm": "lm_head.weight model.embed_tokens.weight",
    'block output="own" draft_vocab_size=20 markov_rank=8': "lm_head.weight markov_head.markov_w2.weight",
    'block output="own" draft_vocab_size=32 markov_rank=0 selector_rank=4': "lm_head.weight "
    "candidate_selector.successor_codebook",
}


@pytest.mark.parametrize("head", OF_TOKENS)
def test_adamw_takes_matrices_over_a_vocabulary_and_no_others_of_its_size(head, config, tiny_target):
    kind, *keys = head.split()
    target = tiny_target(intermediate_size=61 if kind == "draft_lm" else 48)
    made = build_small(kind, target, **{key: json.loads(value) for key, value in (k.split("=") for k in keys)})
    optimizer = build_optimizer(made, config)
    others = {id(p) for group in optimizer.parts[-1].param_groups for p in group["params"]}
    matrices = {name for name, p in made.named_parameters() if p.ndim == 2 and id(p) in others}
    assert matrices == set(OF_TOKENS[head].split())


def build_small(kind, target, **keys):
    ids = torch.arange(keys["draft_vocab_size"]) if "draft_vocab_size" in keys else None
    return build_head(head_class(kind).config_class(type=kind, **keys), target, draft_token_ids=ids)


def test_a_fitted_head_with_as_many_drafted_tokens_as_channels_takes_a_step(config, tiny_target):
    head = build_small("eagle3", tiny_target(), draft_vocab_size=32)
    assert isinstance(head, Eagle3Head)
    head.input_sizes = torch.ones(head.fc.in_features)
    before = head.fc.weight.detach().clone()
    optimizer = build_optimizer(head, config)
    give_gradients(head)
    optimizer.step()
    assert not torch.equal(head.fc.weight, before)


@pytest.mark.parametrize("of_outputs", [False, True])
def test_a_matrix_with_a_scale_is_updated_as_if_inputs_and_outputs_were_scaled(of_outputs):
    """Two equal functions of x, W x and o (W / (o s)) (s x), stay equal."""
    scale, outputs = torch.rand(6) * 10 + 0.1, torch.rand(4, 1) + 0.1 if of_outputs else torch.ones(4, 1)
    plain, scaled = (torch.nn.Parameter(torch.ones(4, 6)) for _ in range(2))
    plain.data.copy_(scaled.data / (outputs * scale))
    optimizers = [MuonAdamW([{"params": [p], "lr": 1e-2, "weight_decay": 0.1}], []) for p in (plain, scaled)]
    optimizers[1].state[scaled]["scale"] = outputs * scale
    for _ in range(3):
        x = torch.randn(10, 6)
        for optimizer, p, read, by in zip(optimizers, (plain, scaled), (x * scale, x), (outputs.T, 1.0), strict=True):
            optimizer.zero_grad()
            (by * (read @ p.T)).tanh().square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(scaled / (outputs * scale), plain, rtol=1e-3, atol=1e-5)


def test_a_muon_step_turns_the_gradient_into_a_matrix_of_even_directions(head, config):
    """All singular values of the update lie near 0.2 * sqrt(longest side) * learning rate (Liu et al. 2025, eq. 4)."""
    optimizer = build_optimizer(head, config)
    assert isinstance(optimizer, MuonAdamW)
    before = {name: p.detach().clone() for name, p in head.named_parameters()}
    give_gradients(head)
    optimizer.step()
    matrices = {id(p) for group in optimizer.parts[0].param_groups for p in group["params"]}
    for name, p in head.named_parameters():
        change = p.detach() - before[name]
        assert change.abs().max() > 0, name
        if id(p) in matrices:
            sizes = torch.linalg.svdvals(change) / (1e-2 * 0.2 * max(p.shape) ** 0.5)
            assert 0.4 < sizes.median() and sizes.max() < 1.4, name


def test_a_loaded_optimizer_goes_on_as_the_one_saved(head, config):
    """As Accelerate does: state and groups go out as a dict and come back as new objects."""
    optimizer = build_optimizer(head, config)
    give_gradients(head)
    optimizer.step()
    other = copy.deepcopy(head)
    loaded = build_optimizer(other, config)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((head, optimizer), (other, loaded)):
        give_gradients(one, seed=1)
        for group in its.param_groups:
            group["lr"] = 0.5 * group["peak"]
        its.step()
    for (name, a), b in zip(head.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_the_schedule_warms_up_to_one_and_falls_to_its_floor():
    config = TrainConfig(output_dir="unused", max_steps=10, warmup_steps=2, min_lr_ratio=0.1)
    shares = [learning_rate_share(step, config) for step in range(11)]
    assert shares[:3] == [0.5, 1.0, 1.0] and shares[10] == pytest.approx(0.1)
    assert shares[2:] == sorted(shares[2:], reverse=True)


def test_where_matrices_are_in_parts_adamw_takes_muons_place(config):
    with pytest.raises(BadInput, match="train.optimizer muon under fsdp2: it needs whole matrices"):
        without_whole_matrices(config, "fsdp2")
    instead = without_whole_matrices(replace(config, adamw_learning_rate=4e-4), "fsdp2")
    assert (instead.optimizer, instead.learning_rate, instead.matrix_learning_rate) == ("adamw", 4e-4, None)


def test_in_fp32_muon_takes_torchs_own_step_up_to_the_rounding_of_bf16():
    groups = []
    for kind in (WideMuon, torch.optim.Muon):
        source = torch.Generator().manual_seed(0)
        matrices = [torch.nn.Parameter(torch.randn(shape, generator=source)) for shape in ((6, 9), (9, 6))]
        optimizer = kind(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for _ in range(2):
            for matrix in matrices:
                matrix.grad = torch.randn(matrix.shape, generator=source)
            optimizer.step()
        groups.append(matrices)
    for ours, theirs in zip(*groups, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
