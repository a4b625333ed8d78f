"""A head with look-ups: the text stays the target's, and each is trusted as far as it was right."""

import pytest
import torch
from drafted import untrained
from headstart.base.errors import BadInput
from headstart.engines.heads import HEADS
from headstart.eval.decoding import replay
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.loop import decode, generate
from headstart.eval.decoding.stopping import Stop
from headstart.eval.drafters.asking import EXPLORED, FIRST
from headstart.eval.drafters.guessing import Guess
from headstart.eval.drafters.hybrid import HybridDrafter, HybridRow
from headstart.eval.drafters.lookup import SuffixDrafter
from headstart.eval.drafters.rates import MATCH_RATES, PROBABILITIES, PROBABILITY_RATES, HitRates, LookupRates
from headstart.eval.drafters.suffix import SuffixRow, SuffixTrie
from headstart.eval.measurement.measure import measure
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.suites.prompts import Suite
from headstart.heads.drafting.trees import DynamicTree, Proposal
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

PROMPTS = [[1, 5, 9, 7, 5, 9, 7, 5, 9], [1, 7, 8, 3]]
LONGER = [[5, 9, 7] * 6, [1, 3, 1, 3]]


class Counting(TorchDispatchMode):
    num_operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def head(target, head_type):
    return untrained(head_type, target, num_depths=3)


def row_of(*text):
    row = HybridRow(
        SuffixRow(SuffixTrie(max_depth=8, max_nodes=1000), rates=LookupRates()),
        HitRates(PROBABILITIES, PROBABILITY_RATES),
    )
    row.read_prompt(text)
    return row


def guesses(*depths):
    """A head's chain of (token, probability) pairs."""
    return [Guess(*pair) for pair in depths]


def test_the_text_is_the_targets_with_every_family(target, head):
    plain = generate(target, None, PROMPTS, max_new_tokens=16).token_ids
    drafted = generate(target, HybridDrafter(head), PROMPTS, max_new_tokens=16, num_draft_tokens=2)
    assert drafted.token_ids == plain
    assert all(done.num_drafted == 2 for done in drafted.rounds[1:])


def test_a_sure_head_is_followed_and_a_match_behind_its_guess_is_copied():
    row = row_of(3, 4, 5, 6, 7, 8, 2, 9)
    sure = guesses((3, 0.99), (40, 0.05), (41, 0.05))
    assert row.chain(sure, 3) == [3, 4, 5], "behind 3 the text goes on with 4 5, which the head does not know"


def test_a_long_match_is_copied_where_the_head_is_not_sure():
    row = row_of(*range(2, 20), *range(2, 18))
    unsure = guesses((50, 0.1), (51, 0.1))
    assert row.chain(unsure, 2) == [18, 19]


def test_what_was_never_right_is_trusted_less():
    row = row_of(3, 4, 5, 6)
    before = row.text.rates.own.at(1)
    for _ in range(30):  # 3 was followed by 4 once, and never is again
        row.extend([3, 30])
    assert before == pytest.approx(MATCH_RATES[1]) and row.text.rates.own.at(2) > row.text.rates.own.at(0)
    head = guesses((9, 0.9))
    rate = row.guessed.at(0.9)
    for _ in range(20):
        row.chain(head, 1)
        row.extend([8])
    assert row.guessed.at(0.9) < 0.4 * rate


def test_a_head_that_is_wrong_more_often_than_look_ups_is_asked_again_now_and_then(target):
    """For it may be right by now. Another setting finds out for itself."""
    drafter, asked = HybridDrafter(untrained("eagle3", target, num_depths=3)), []
    propose, prompts, stop = drafter.head.propose, [[1, 5, 9] * 6], Stop.of(target, eos_token_ids=[])
    drafter.head.propose = lambda *args, **more: asked.append(1) or propose(*args, **more)  # pyright: ignore
    engine = Engine(target, drafter, batch_size=1, max_length=60, num_draft_tokens=1)
    decode(engine, prompts, max_new_tokens=16, stop=stop)
    assert asked
    asked.clear()
    assert engine.state is not None
    learnt = engine.state.learnt
    learnt.asking.num_rounds = FIRST
    for probability in PROBABILITIES * 500:
        learnt.guessed.add(probability, is_right=False)
    decode(engine, prompts, max_new_tokens=20, stop=stop)
    assert not asked and learnt.asking.unasked > 0
    learnt.asking.unasked = EXPLORED
    decode(engine, prompts, max_new_tokens=4, stop=stop)
    assert len(asked) == 1
    generate(target, drafter, prompts, max_new_tokens=4, num_draft_tokens=2, eos_token_ids=[])
    assert len(asked) > 1


@pytest.mark.parametrize("head_type", [*sorted(HEADS), "recurrent"])
def test_a_head_that_reads_late_drafts_what_one_does_that_reads_at_once(head_type, target, tiny_target):
    """It is asked every third round in one run, and every round in the other. Where a head has recurrent layers,
    prompts are read row by row, and but for the last tokens."""
    if head_type == "recurrent":
        target, head_type = tiny_target("qwen3_5"), "draft_lm"
    head = untrained(head_type, target, num_depths=3)
    prompts, rounds = [[1, 5, 9, 7], [1, 7, 8, 3, 6, 4], [1, 2], LONGER[0]], 12
    drafted: list[dict[int, list[list[int]]]] = []
    for every in (1, 3):
        drafter, found, count = HybridDrafter(head), dict[int, list[list[int]]](), iter(range(1000))

        def propose(state, *, num_draft_tokens, drafter=drafter, found=found, count=count, every=every):
            number = next(count)
            if number % every == 0:
                chains = state.guessing.chains(num_draft_tokens)
                found[number] = [[guess.token for guess in chain] for chain in chains]
            return Proposal(torch.zeros(len(state.rows), num_draft_tokens, dtype=torch.long))

        drafter.propose = propose  # pyright: ignore
        generate(target, drafter, prompts, max_new_tokens=rounds, num_draft_tokens=2, eos_token_ids=[])
        drafted.append(found)
    at_once, late = drafted
    assert len(late) > 2 and all(at_once[number] == chains for number, chains in late.items())


@pytest.mark.parametrize(
    ("head_type", "num_draft_tokens"), [(name, 2 + 3 * (i % 2)) for i, name in enumerate(sorted(HEADS))]
)
def test_a_head_reads_and_drafts_in_one_recorded_step(num_draft_tokens, target, head, monkeypatch):
    """Few operations are left outside of it, whatever the head. Texts and drafts are the same, and those of the next
    prompts, for which nothing is recorded again. Chains of two, of five, some of them behind the head's."""

    def record(step, arguments):
        def run(*tensors):
            with _disable_current_modes():
                return step(*tensors)

        return run

    def counted(steps):
        how = {"max_length": 60, "num_draft_tokens": num_draft_tokens, "steps": steps}
        engine = Engine(target, HybridDrafter(head), batch_size=2, **how)
        counts, draft = [], engine.draft

        def drafted(read):
            with Counting() as counting:
                proposal = draft(read)
            counts.append(counting.num_operations)
            return proposal

        monkeypatch.setattr(engine, "draft", drafted)
        stop = Stop.of(target, eos_token_ids=[])
        texts = [decode(engine, rows, max_new_tokens=14, stop=stop) for rows in (PROMPTS, LONGER)]
        drafts = [done.num_accepted for text in texts for done in text.rounds]
        return [text.token_ids for text in texts], drafts, sorted(counts), engine

    monkeypatch.setattr(replay, "compiled", record)
    wanted, found = counted("eager"), counted("compile")
    assert found[:2] == wanted[:2]
    assert len(found[3].replay.recorded) == 2
    assert found[2][len(found[2]) // 2] < 80, "views included"


def test_one_wrong_guess_does_not_silence_a_head_and_those_behind_it_are_not_counted():
    row = row_of(3, 4, 5)
    before, second = row.guessed.mean, row.guessed.at(0.9)
    row.chain(guesses((9, 0.5), (9, 0.9)), 2)
    row.extend([8, 9])
    assert 0.9 * before < row.guessed.mean < before and row.guessed.at(0.9) == second


def test_a_head_that_knows_nothing_costs_a_round_or_two_over_look_ups_alone(tiny_target):
    """While its guesses are found out."""
    target = tiny_target("llama", num_hidden_layers=4, eos_token_id=2)  # whose text repeats itself
    suite = Suite("loop", [[1, 5, 9] * 6])
    config = MeasureConfig(setting=chain(3), max_new_tokens=48, num_repeats=1)
    drafters = SuffixDrafter(), HybridDrafter(untrained("eagle3", target, num_depths=3))
    alone, both = (measure(target, drafter, suite, config, name="d")[0] for drafter in drafters)
    assert alone.acceptance_length > 2 and both.num_rounds <= alone.num_rounds + 2


def test_trees_are_refused(target):
    drafter, tree = HybridDrafter(untrained("eagle3", target, num_depths=3)), DynamicTree(4, 2, 2)
    with pytest.raises(BadInput, match="drafts chains, not trees"):
        generate(target, drafter, PROMPTS[0], max_new_tokens=4, tree=tree)
