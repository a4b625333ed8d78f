"""Compiled passes compute what they do as written, count the same operations, and are one graph for all sizes."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from headstart.benchmarks.operations import Operations
from headstart.benchmarks.training_step import Shape, build_step, run_step
from headstart.heads.loss import chunked as depth_loss
from headstart.heads.loss import sight
from headstart.heads.loss.fusing import Fusable
from headstart.heads.nn import chain_attention, kept

SHAPE = Shape(
    head="eagle3",
    hidden=32,
    intermediate=48,
    num_heads=4,
    num_kv_heads=2,
    vocabulary=96,
    context=40,
    batch_size=2,
    depths=3,
)
MIXES = {
    "eagle3": {"draft_vocabulary": 48},
    "mtp": {"options": {"loss": {"hard_ce": 1.0}}},
    "medusa": {"options": {"loss": {"greedy_gce": 0.5, "kl": 0.5}}},
}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor")])
def compiler(request, monkeypatch):
    """As on a GPU: chunks of many sizes, blocks of queries, our own attention."""
    compiled, how = {}, {"dynamic": True, "fullgraph": True, "backend": request.param}

    def compile_once(fusable):
        name = fusable.function.__name__
        if name not in compiled:
            compiled[name] = torch.compile(fusable.function, **how)
        return compiled[name]

    monkeypatch.setattr(Fusable, "compiled", property(compile_once))
    monkeypatch.setattr(chain_attention, "is_flash", lambda *_: False)
    monkeypatch.setattr(sight, "QUERY_BLOCK", {"cpu": 16})
    monkeypatch.setattr(depth_loss, "CHUNK", {"cpu": 2**13})
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def gradients_of(head):
    found = [parameter.grad for parameter in head.parameters()]
    return [one for one in found if one is not None]


def step(shape, *, is_fused):
    """Loss, gradients and operations."""
    head, batch = build_step(shape)
    with patch.object(Fusable, "is_fused", is_fused):
        out = head.loss(batch)
        out.loss.backward()
        gradients = gradients_of(head)
        with Operations() as counted:
            head.zero_grad()
            run_step(head, batch, dtype="fp32")
    assert all(map(torch.equal, gradients, gradients_of(head))), "counting is seen"
    return out, gradients, (counted.total, counted.repeated)


@pytest.mark.parametrize("head_type", [pytest.param("eagle3", marks=pytest.mark.slow), "mtp", "medusa"])
def test_fused_passes_give_the_same_loss_and_gradients(head_type, compiler):
    shape = replace(SHAPE, head=head_type, **MIXES[head_type])
    plain, compiled = (step(shape, is_fused=on) for on in (False, True))
    torch.testing.assert_close(compiled[0].loss, plain[0].loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(compiled[0].depth_loss, plain[0].depth_loss, rtol=1e-5, atol=0)
    assert torch.equal(compiled[0].hits, plain[0].hits) and compiled[2] == plain[2]
    for a, b in zip(compiled[1], plain[1], strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.slow
def test_one_compilation_serves_all_sizes(compiler):
    for context in (40, 64, 91):
        step(replace(SHAPE, context=context), is_fused=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= 4, "three functions, one of them for views and for tensors of their own"


def test_without_fusing_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(Fusable, "compiled", property(lambda self: pytest.fail("compiled")))
    step(SHAPE, is_fused=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("head_type", list(MIXES))
def test_fused_passes_on_a_gpu_give_the_same_step(head_type, dtype, monkeypatch):
    """In bf16 gradients differ by its rounding."""
    monkeypatch.setattr(kept, "most_kept", lambda device: 0)
    monkeypatch.setattr(sight, "QUERY_BLOCK_ELSEWHERE", 16)
    monkeypatch.setattr(depth_loss, "most_logits", lambda device: 2**13)
    found = []
    for is_fused in (False, True):
        head, batch = build_step(replace(SHAPE, head=head_type, dtype=dtype, **MIXES[head_type]), device="cuda")
        with patch.object(Fusable, "is_fused", is_fused):
            run_step(head, batch, dtype=dtype)
        found.append(gradients_of(head))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= (1e-4 if dtype == "fp32" else 0.03) * b.norm()
