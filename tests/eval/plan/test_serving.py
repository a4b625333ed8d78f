"""Continuous batching: whoever comes and goes, each request's text is what it is alone; and so are its drafts."""

import pytest
from headstart.eval.decoding.draft_setting import DraftSetting
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.loop import Texts, generate, prefill, run_round
from headstart.eval.decoding.replay import Stopwatch
from headstart.eval.decoding.stopping import Stop
from headstart.eval.drafters.draft_model import DraftModelDrafter
from headstart.eval.drafters.lookup import NgramDrafter, SuffixDrafter
from headstart.eval.drafters.sparse_self import SparseSelfDrafter
from headstart.eval.measurement.config import MeasureConfig
from headstart.eval.plan.load import ServedRequest, serve
from headstart.eval.plan.server import LiveServer
from headstart.heads.drafting import DynamicTree
from headstart.heads.registry import HEADS, build_head

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40], [1, 30], [1, 44, 3, 3, 3], [1, 13, 14, 15, 16, 17, 18], [1, 18]]
LENGTHS = 24


def drafter_of(name, target, tiny_target):
    if name in HEADS:
        return build_head(HEADS[name].config_class(type=name), target, seed=1).eval()
    if name == "sparse-self":
        return SparseSelfDrafter(target, 32)
    others = {"ngram": NgramDrafter, "suffix": SuffixDrafter, "sparse-self": lambda: SparseSelfDrafter(target, 32)}
    return others[name]() if name in others else DraftModelDrafter(tiny_target("llama", num_hidden_layers=2))


def served(target, drafter, setting, requests, *, size=4, eos=frozenset({2})):
    """The mean number of rows; the answers stand in the requests."""
    config, stop = MeasureConfig(max_new_tokens=LENGTHS), Stop(frozenset(eos))
    server = LiveServer(target, drafter, setting, PROMPTS, config, max_batch_size=size, stop=stop)
    return serve(server, requests)


EVERY_DRAFTER = [*sorted(HEADS), "ngram", "suffix", "draft-model", "sparse-self", "none"]
FAST = ("eagle3", "suffix", "draft-model", "none")  # what heads draft in a crowd: the next test


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in EVERY_DRAFTER]
)
@pytest.mark.parametrize("at_once", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_texts_are_those_of_requests_alone(name, at_once, target, tiny_target):
    """12 requests, all at once or by and by, at most 4 rows: every engine size is used, rows move between them."""
    drafter = None if name == "none" else drafter_of(name, target, tiny_target)
    requests = [ServedRequest(i % len(PROMPTS), 0.0 if at_once else 0.004 * i) for i in range(12)]
    rows = served(target, drafter, DraftSetting("K 3", 3) if drafter else None, requests)
    for request in requests:
        alone = generate(target, None, PROMPTS[request.prompt], max_new_tokens=LENGTHS, eos_token_ids={2})
        assert request.token_ids == alone.token_ids[0]
        assert request.arrival < request.first <= request.finish and request.tokens == len(request.token_ids)
    assert 1 <= rows <= 4


@pytest.mark.parametrize("name", sorted(HEADS))
def test_drafts_are_those_of_a_request_alone(name, target):
    """The same drafts in a crowd as alone, round by round: a row that moved kept its keys, values and states."""
    head, prompts, watch = drafter_of(name, target, None), PROMPTS[1:4], Stopwatch(target.device)
    alone = []
    for prompt in prompts:
        engine = Engine(target, head, batch_size=1, max_length=40, num_draft_tokens=3)
        texts = Texts([prompt], 20, Stop(frozenset()))
        alone.append(drafts(engine, texts, prefill(engine, texts, watch).state, watch))
    setting, config, stop = DraftSetting("K 3", 3), MeasureConfig(max_new_tokens=20), Stop(frozenset())
    server = LiveServer(target, head, setting, PROMPTS, config, max_batch_size=3, stop=stop)
    for number in range(1, 4):
        server.join(ServedRequest(number, 0.0))
    crowd = drafts(server.batch.engine, server.batch.texts, server.batch.state, watch)
    for row in range(len(prompts)):
        assert [one[row] for one in crowd] == [one[0] for one in alone[row]]


def drafts(engine, texts, state, watch):
    """What four rounds draft, [round][row]."""
    found = []
    for _ in range(4):
        found.append(engine.draft(state.read).tokens.tolist())
        _, state = run_round(engine, texts, state, watch)
    return found


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_trees_and_ends_after_one_token(name, target):
    """Trees too; and texts that end with their first token leave at once."""
    head = drafter_of(name, target, None)
    tree = DraftSetting("dynamic:5", 3, DynamicTree(num_nodes=5, depth=3, top_k=2))
    first = [generate(target, None, prompt, max_new_tokens=1).token_ids[0][0] for prompt in PROMPTS]
    requests = [ServedRequest(i, 0.0) for i in range(len(PROMPTS))]
    served(target, head, tree, requests, eos=frozenset({first[0], first[2]}))
    for i, request in enumerate(requests):
        alone = generate(target, None, PROMPTS[i], max_new_tokens=LENGTHS, eos_token_ids={first[0], first[2]})
        assert request.token_ids == alone.token_ids[0]
    assert len(requests[0].token_ids) == 1


def test_an_idle_server_waits_for_the_next_arrival(target):
    requests = [ServedRequest(0, 0.0), ServedRequest(1, 1000.0)]
    served(target, None, None, requests)
    assert requests[0].finish < 100 and requests[1].first > 1000
