"""On a GPU: captured graphs decode what eager steps do, draws stay reproducible, and training steps are a CPU's."""

import pytest
import torch
import torch.nn.functional as F
from drafted import untrained
from headstart.benchmarks.synthetic import BlankDrafter, SyntheticDrafter
from headstart.eval.decoding.draft_setting import chains
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.loop import decode, generate
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.stopping import Stop
from headstart.eval.drafters.hybrid import HybridDrafter
from headstart.eval.figures.metrics import acceptance
from headstart.eval.measurement.step_times import TimedCell
from headstart.eval.proof.config import MeasureConfig
from headstart.heads.base import DraftBatch
from headstart.heads.drafting.trees import DynamicTree, SampledChain
from headstart.targets.caches.split_attention import masked_attention, reads_in_parts
from headstart.targets.cpu import joined_decoder
from joining import joined_texts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34]]
LONG = [1, *range(3, 60)] * 20
TREES = {
    "chain": None,
    "dynamic": DynamicTree(num_nodes=6, depth=2, top_k=3),
    "sampled": SampledChain(3),
}


@pytest.fixture(scope="module")
def on_gpu(tiny_target):
    return tiny_target("llama").to("cuda")


def head_for(head_type, target, **changes):
    return untrained(head_type, target, **changes).to(target.dtype)


def both_ways(target, drafter, *, steps, tree=None, num_new=40, prompts=PROMPTS):
    """One engine decodes several texts as a fresh eager one does."""
    wanted = generate(target, drafter, prompts, max_new_tokens=num_new, tree=tree, eos_token_ids=[]).token_ids
    longest = max(map(len, prompts)) + num_new
    engine = Engine(target, drafter, batch_size=len(prompts), max_length=longest, tree=tree, steps=steps)
    for _ in range(2):
        text = decode(engine, prompts, max_new_tokens=num_new, stop=Stop.of(target, eos_token_ids=[]))
        assert text.token_ids == wanted
        assert all(one.verify_seconds > 0 for one in text.rounds[1:])
        assert drafter is None or all(one.draft_seconds > 0 for one in text.rounds[1:])
    return engine


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_captured_steps_decode_what_eager_ones_do(head_type, tree, on_gpu):
    both_ways(on_gpu, head_for(head_type, on_gpu), steps="graph", tree=TREES[tree])


# each compiles for a while; that steps of all heads can be compiled is seen on a CPU, in test_recorded_steps.py
@pytest.mark.parametrize(
    ("head_type", "tree"),
    [(head_type, tree) for head_type in ("medusa", "eagle3") for tree in ("chain", "dynamic")],
)
def test_compiled_steps_decode_what_eager_ones_do(head_type, tree, on_gpu):
    both_ways(on_gpu, head_for(head_type, on_gpu), steps="compile", tree=TREES[tree])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_the_captured_baseline_decodes_what_the_eager_one_does(family, tiny_target):
    both_ways(tiny_target(family).to("cuda"), None, steps="graph")


@pytest.mark.parametrize(
    ("family", "prompts"), [("llama", PROMPTS), ("llama", [LONG]), ("qwen2", PROMPTS), ("qwen3", PROMPTS)]
)
def test_compiled_layers_decode_what_eager_ones_do(family, prompts, tiny_target, monkeypatch):
    """Which only large targets have otherwise: with biases, with head norms, and over a cache that is read in parts."""
    monkeypatch.setattr(joined_decoder, "FEWEST_COMPILED", 0)
    target = tiny_target(family, max_position_embeddings=2048).to("cuda")
    both_ways(target, head_for("eagle3", target), steps="graph", prompts=prompts)
    assert target.decoder.compiles and len(target.decoder.compiled) == 1, "once for all layers, and it did not fail"


def test_captured_steps_follow_a_text_into_longer_contexts(on_gpu):
    """128 slots, then 256: two recordings of each step, and the second reads what the first has written."""
    engine = both_ways(on_gpu, head_for("eagle3", on_gpu), steps="graph", num_new=190)
    assert set(engine.replay.recorded) == {(name, size) for name in ("draft", "verify") for size in (128, 256)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_cache_read_in_parts_is_as_exact_as_one_read_whole(dtype):
    """Torch's own kernels in fp32 may multiply in fewer bits."""
    query, key, value = (torch.randn(1, 8, size, 128, device="cuda").to(dtype) for size in (24, 4096, 4096))
    hidden = torch.arange(4096, device="cuda") > 3000 + torch.arange(24, device="cuda")[:, None]
    mask = torch.zeros(1, 1, 24, 4096, device="cuda").masked_fill(hidden, torch.finfo(dtype).min).to(dtype)
    assert reads_in_parts(query, key)
    exact = F.scaled_dot_product_attention(*(x.double() for x in (query, key, value)), attn_mask=mask.double())
    whole = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    parts = masked_attention(query, key, value, mask)
    errors = [((mixed - exact).norm() / exact.norm()).item() for mixed in (parts, whole)]
    assert errors[0] < max(2 * errors[1], 1e-5) and errors[0] < 1e-2


def test_captured_steps_decode_behind_a_long_prompt(tiny_target):
    target = tiny_target("llama", max_position_embeddings=2048).to("cuda")
    both_ways(target, head_for("eagle3", target), steps="graph", prompts=[LONG])


def test_a_head_that_is_asked_beside_look_ups_is_captured(on_gpu):
    engine = both_ways(on_gpu, HybridDrafter(head_for("eagle3", on_gpu)), steps="graph")
    assert len(engine.replay.recorded) == 2 and all(engine.replay.recorded.values())


@pytest.mark.parametrize("batch_size", [2, 16])
def test_rows_join_and_leave_captured_rounds(batch_size, on_gpu):
    """Of 16 rows two prompts are read together."""
    prompts = [*PROMPTS, [1, *range(3, 60), *range(3, 40)]] * 5
    texts = joined_texts(on_gpu, prompts, batch_size=batch_size, max_new_tokens=40)
    assert texts == [generate(on_gpu, None, prompt, max_new_tokens=40).token_ids[0] for prompt in prompts]


@pytest.mark.parametrize("drafts", [False, True])
def test_captured_rounds_of_recurrent_layers_decode_what_eager_ones_do(drafts, tiny_target):
    target = tiny_target("qwen3_5").to("cuda")
    both_ways(target, head_for("eagle3", target) if drafts else None, steps="graph")


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_captured_steps_decode_the_same_in_bfloat16(tree, tiny_target):
    target = tiny_target("llama").to("cuda")
    for parameter in target.model.parameters():
        parameter.data = parameter.data.bfloat16()
    both_ways(target, head_for("eagle3", target), steps="graph", tree=TREES[tree])


@pytest.mark.parametrize("tree", ["chain", "sampled"])
def test_a_captured_graph_draws_from_the_generator(head_type, tree, on_gpu):
    """The same seed gives the same text, another seed another one: draws are not frozen into the graph."""
    source = torch.Generator(device="cuda")
    how = {"sampling": Sampling(temperature=1.0, top_p=0.9), "generator": source, "tree": TREES[tree]}
    engine = Engine(on_gpu, head_for(head_type, on_gpu), batch_size=4, max_length=48, steps="graph", **how)

    def text(seed):
        source.manual_seed(seed)
        return decode(engine, PROMPTS, max_new_tokens=40, stop=Stop.of(on_gpu, eos_token_ids=[])).token_ids

    text(0)  # records
    assert text(1) == text(1) != text(2)


def test_captured_rounds_are_timed_again_and_again(on_gpu):
    """Of a head, and of drafts that cost nothing; the prompts are read once, and again where asked."""
    for drafter in (untrained("eagle3", on_gpu), BlankDrafter()):
        settings, config = chains(drafter, [3]), MeasureConfig(steps="graph")
        cell = TimedCell(on_gpu, drafter, settings, config, batch_size=2, context=8, text=PROMPTS[1])
        for reads_again in (False, False, True):
            cell.run(reads_again=reads_again)
        assert cell.baseline.round_ms > 0
        assert all(one.draft_ms > 0 and one.verify_ms > 0 and one.num_tokens == 4 for one in cell.rounds)


def test_captured_synthetic_drafts_are_right_as_often_as_eager_ones(on_gpu):
    head = untrained("eagle3", on_gpu)
    drafter = SyntheticDrafter(on_gpu, PROMPTS, [0.8, 0.6, 0.4], max_new_tokens=40, inner=head)
    lengths = []
    for steps in ("eager", "graph"):
        engine = Engine(on_gpu, drafter, batch_size=4, max_length=48, num_draft_tokens=3, steps=steps)
        for _ in range(2):
            text = decode(engine, PROMPTS, max_new_tokens=40, stop=Stop.of(on_gpu, eos_token_ids=[]))
            lengths.append(acceptance(text.rounds, num_draft_tokens=3).length)
    assert len(set(lengths)) == 1 and lengths[0] > 1.5


def test_a_training_step_has_the_loss_and_gradients_of_a_cpu(head_type, target, on_gpu, make_batch):
    """In fp32 to rounding; under autocast about."""
    here, there = head_for(head_type, target).train(), head_for(head_type, on_gpu).train()
    batch = make_batch(target, here)
    ids, mask = batch.input_ids.cuda(), batch.loss_mask.cuda()
    moved = DraftBatch(ids, mask, on_gpu.forward(ids, feature_layers=there.feature_layers))
    wanted, found = here(batch).loss, there(moved).loss
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-3, atol=1e-4)
    wanted.backward()
    found.backward()
    for (name, one), other in zip(here.named_parameters(), there.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        error = (other.grad.cpu() - one.grad).norm() / one.grad.norm().clamp_min(1e-6)
        assert error < 1e-2, name
    with torch.autocast("cuda", torch.bfloat16):
        rough = there(moved).loss
    rough.backward()
    torch.testing.assert_close(rough.cpu(), wanted, rtol=0.05, atol=0.05)
    assert all(one.grad is not None and one.grad.isfinite().all() for one in there.parameters())
