"""On a GPU: captured graphs decode what eager steps do, and draws stay reproducible."""

import pytest
import torch
from headstart.eval.engine import Engine
from headstart.eval.generate import decode, generate
from headstart.eval.metrics import acceptance
from headstart.eval.settings import chains
from headstart.eval.step_times import Place
from headstart.eval.stopping import Stop
from headstart.eval.synthetic import BlankDrafter, SyntheticDrafter
from headstart.eval.verify import Sampling
from headstart.heads.drafting import DynamicTree, StaticTree
from headstart.heads.registry import HEADS, build_head

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34]]
TREES = {
    "chain": None,
    "static": StaticTree(((0,), (1,), (0, 0), (1, 0))),
    "dynamic": DynamicTree(num_nodes=6, depth=2, top_k=3),
    "sampled": StaticTree(((0,), (1,), (0, 0), (1, 0)), sampled=True),
}


@pytest.fixture(scope="module")
def on_gpu(tiny_target):
    return tiny_target("llama").to("cuda")


@pytest.mark.parametrize("steps", ["graph", "compile"])
@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
def test_recorded_steps_decode_what_eager_ones_do(head_type, tree, steps, on_gpu):
    head = build_head(HEADS[head_type].config_class(type=head_type), on_gpu, seed=1).eval()
    wanted = generate(on_gpu, head, PROMPTS, max_new_tokens=40, tree=TREES[tree], eos_token_ids=[]).token_ids
    engine = Engine(on_gpu, head, batch_size=4, max_length=48, tree=TREES[tree], steps=steps)
    for _ in range(2):
        text = decode(engine, PROMPTS, max_new_tokens=40, stop=Stop.of(on_gpu, eos_token_ids=[]))
        assert text.token_ids == wanted
        assert all(one.draft_seconds > 0 and one.verify_seconds > 0 for one in text.rounds[1:])


@pytest.mark.parametrize("tree", ["chain", "sampled"])
def test_a_captured_graph_draws_from_the_generator(head_type, tree, on_gpu):
    """The same seed gives the same text, another seed another one: draws are not frozen into the graph."""
    head = build_head(HEADS[head_type].config_class(type=head_type), on_gpu, seed=1).eval()
    source = torch.Generator(device="cuda")
    how = {"sampling": Sampling(temperature=1.0, top_p=0.9), "generator": source, "tree": TREES[tree]}
    engine = Engine(on_gpu, head, batch_size=4, max_length=48, steps="graph", **how)

    def text(seed):
        source.manual_seed(seed)
        return decode(engine, PROMPTS, max_new_tokens=40, stop=Stop.of(on_gpu, eos_token_ids=[])).token_ids

    text(0)  # records
    assert text(1) == text(1) != text(2)


def test_captured_rounds_are_timed_again_and_again(on_gpu):
    """Of a head, and of drafts that cost nothing; the prompts are read once, and again where asked."""
    for drafter in (build_head(HEADS["eagle3"].config_class(type="eagle3"), on_gpu, seed=1).eval(), BlankDrafter()):
        place = Place(on_gpu, drafter, chains(drafter, [3]), batch_size=2, context=8, text=PROMPTS[1], steps="graph")
        for reads_again in (False, False, True):
            place.run(reads_again=reads_again)
        assert place.usual.round_ms > 0
        assert all(one.draft_ms > 0 and one.verify_ms > 0 and one.num_tokens == 4 for one in place.found)


def test_captured_synthetic_drafts_are_right_as_often_as_eager_ones(on_gpu):
    head = build_head(HEADS["eagle3"].config_class(type="eagle3"), on_gpu, seed=1).eval()
    drafter = SyntheticDrafter(on_gpu, PROMPTS, [0.8, 0.6, 0.4], max_new_tokens=40, inner=head)
    lengths = []
    for steps in ("eager", "graph"):
        engine = Engine(on_gpu, drafter, batch_size=4, max_length=48, num_draft_tokens=3, steps=steps)
        for _ in range(2):
            text = decode(engine, PROMPTS, max_new_tokens=40, stop=Stop.of(on_gpu, eos_token_ids=[]))
            lengths.append(acceptance(text.rounds, num_draft_tokens=3).length)
    assert len(set(lengths)) == 1 and lengths[0] > 1.5
