"""A head with look-ups: the text stays the target's, each is trusted as far as it was right, and a tree holds both."""

import pytest
import torch
from drafted import untrained
from headstart.configs.errors import BadInput
from headstart.eval.decoding import replay
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.loop import decode, generate
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.stopping import Stop
from headstart.eval.drafters.asking import DRAFT_COST, EXPLORED, FIRST, Asking
from headstart.eval.drafters.guessing import Guess
from headstart.eval.drafters.hybrid import HybridDrafter, HybridRow
from headstart.eval.drafters.lookup import SuffixDrafter
from headstart.eval.drafters.rates import MATCH_RATES, PROBABILITIES, PROBABILITY_RATES, HitRates, LookupRates
from headstart.eval.drafters.suffix import SuffixRow, SuffixTrie, tree_proposal
from headstart.eval.measurement.config import MeasureConfig
from headstart.eval.measurement.measure import measure
from headstart.eval.measurement.resume import identity
from headstart.eval.measurement.sampling_check import check_sampling
from headstart.eval.suites.prompts import Suite
from headstart.heads.drafting import DynamicTree, Proposal, StaticTree
from headstart.heads.registry import HEADS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

PROMPTS = [[1, 5, 9, 7, 5, 9, 7, 5, 9], [1, 7, 8, 3]]
LONGER = [[5, 9, 7] * 6, [1, 3, 1, 3]]
TREE = DynamicTree(num_nodes=9, depth=3, top_k=4)


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
    """A head's chain: per depth (token, probability) pairs, the best first."""
    return [[Guess(*pair) for pair in depth] for depth in depths]


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_the_text_is_the_targets_with_every_family(target, head, tree):
    plain = generate(target, None, PROMPTS, max_new_tokens=16).token_ids
    drafted = generate(
        target, HybridDrafter(head), PROMPTS, max_new_tokens=16, tree=tree, num_draft_tokens=None if tree else 2
    )
    assert drafted.token_ids == plain
    assert all(done.num_drafted == (9 if tree else 2) for done in drafted.rounds[1:])


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_sampled_texts_follow_the_targets_distribution(target, tree):
    drafter, prompts = HybridDrafter(untrained("medusa", target, num_depths=3)), PROMPTS * 20
    how = {"max_new_tokens": 12, "temperature": 1.0, "generator": torch.Generator().manual_seed(0)}
    drafted, plain = (
        [[text] for text in generate(target, which, prompts, tree=tree if which else None, **how).token_ids]
        for which in (drafter, None)
    )
    assert check_sampling(target, prompts, drafted, plain, Sampling(temperature=1.0)).p_value > 1e-3


def test_a_sure_head_is_followed_and_a_match_behind_its_guess_is_copied():
    row = row_of(3, 4, 5, 6, 7, 8, 2, 9)
    sure = guesses([(3, 0.99)], [(40, 0.05)], [(41, 0.05)])
    assert row.chain(sure, 3) == [3, 4, 5], "behind 3 the text goes on with 4 5, which the head does not know"


def test_a_long_match_is_copied_where_the_head_is_not_sure():
    row = row_of(*range(2, 20), *range(2, 18))
    unsure = guesses([(50, 0.1)], [(51, 0.1)])
    assert row.chain(unsure, 2) == [18, 19]


def test_what_was_never_right_is_trusted_less():
    row = row_of(3, 4, 5, 6)
    before = row.text.rates.own.at(1)
    for _ in range(30):  # 3 was followed by 4 once, and never is again
        row.extend([3, 30])
    assert before == pytest.approx(MATCH_RATES[1]) and row.text.rates.own.at(2) > row.text.rates.own.at(0)
    head = guesses([(9, 0.9)])
    rate = row.guessed.at(0.9)
    for _ in range(20):
        row.chain(head, 1)
        row.extend([8])
    assert row.guessed.at(0.9) < 0.4 * rate


def test_a_head_that_is_wrong_more_often_than_look_ups_is_asked_again_now_and_then(target):
    """For it may be right by now."""
    drafter, asked = HybridDrafter(untrained("eagle3", target, num_depths=3)), []
    propose, prompts = drafter.head.propose, [[1, 5, 9] * 6]
    drafter.head.propose = lambda *args, **more: asked.append(1) or propose(*args, **more)  # pyright: ignore
    generate(target, drafter, prompts, max_new_tokens=16, num_draft_tokens=1)
    assert asked
    asked.clear()
    drafter.asking.num_rounds = FIRST
    for probability in PROBABILITIES * 500:
        drafter.guessed.add(probability, is_right=False)
    generate(target, drafter, prompts, max_new_tokens=20, num_draft_tokens=1)
    assert not asked and drafter.asking.unasked > 0
    drafter.asking.unasked = EXPLORED
    generate(target, drafter, prompts, max_new_tokens=4, num_draft_tokens=1)
    assert len(asked) == 1


def asked_in(asking, rounds, *, rate, copied, added):
    """How often a head is asked in so many rounds of one row that add `added` tokens to the copied ones when it is."""
    num_asked = 0
    for _ in range(rounds):
        is_asked = asking.decide({0: copied}, rate=rate, depth=3)
        num_asked += is_asked
        asking.count({0: 1 + copied + added * is_asked})
    return num_asked


def seen():
    """Past the first rounds, with averages as they begin."""
    asking = Asking()
    asking.num_rounds = FIRST
    return asking


def test_a_head_is_asked_where_the_tokens_it_adds_are_worth_its_time():
    """At 0.2 of a round, of about 2.5 tokens, that is from 0.5 tokens on."""
    assert asked_in(seen(), 100, rate=0.8, copied=0.5, added=1.5) == 100
    assert asked_in(seen(), 100, rate=0.8, copied=6.0, added=0.0) <= 100 // EXPLORED
    assert asked_in(seen(), 100, rate=0.1, copied=0.5, added=0.0) <= 100 // EXPLORED


def test_a_head_is_asked_in_the_first_rounds_whatever_is_expected_of_it():
    asking = Asking()
    assert asked_in(asking, FIRST, rate=0.1, copied=6.0, added=0.0) == FIRST
    assert asked_in(asking, EXPLORED, rate=0.1, copied=6.0, added=0.0) == 0


def test_a_head_that_adds_less_than_expected_is_asked_less_and_ever_more_rarely():
    asking = seen()
    first = asked_in(asking, 200, rate=0.7, copied=0.8, added=0.0)
    later = asked_in(asking, 2000, rate=0.7, copied=0.8, added=0.0)
    assert 0 < first < 200 and later <= 10, "after 32, 64, 128, 256, 256 ... rounds"
    assert asked_in(asking, 3000, rate=0.7, copied=0.8, added=3.0) > 1000, "until it is worth it again"


def test_a_round_of_rows_counts_those_that_grew():
    asking = Asking()
    before = asking.pace.value
    assert asking.decide({0: 0.2, 1: 0.3}, rate=0.9, depth=3)
    asking.count({1: 4})  # the other has ended
    assert asking.pace.upper == pytest.approx(20 * before + 4)
    assert asking.pace.lower == pytest.approx(20 + 1 + DRAFT_COST)
    asking.count({1: 4})
    assert asking.pace.lower == pytest.approx(20 + 1 + DRAFT_COST), "once a round"


def test_a_head_that_reads_late_drafts_what_one_does_that_reads_at_once(target, head):
    """It is asked every third round in one run, and every round in the other."""
    check_late_reading(target, head)


def test_a_head_with_recurrent_layers_reads_late_too(tiny_target):
    """Prompts are read row by row there, and but for the last tokens."""
    target = tiny_target("qwen3_5")
    head = untrained("draft_lm", target)
    check_late_reading(target, head)
    how = {"max_new_tokens": 14, "eos_token_ids": []}
    for prompts in (PROMPTS, LONGER):
        wanted = generate(target, None, prompts, **how)
        assert generate(target, HybridDrafter(head), prompts, **how).token_ids == wanted.token_ids


def check_late_reading(target, head):
    prompts, rounds = [[1, 5, 9, 7], [1, 7, 8, 3, 6, 4], [1, 2]], 12
    drafted: list[dict[int, list[list[int]]]] = []
    for every in (1, 3):
        drafter, found, count = HybridDrafter(head), dict[int, list[list[int]]](), iter(range(1000))

        def propose(state, *, num_draft_tokens, drafter=drafter, found=found, count=count, every=every):
            number = next(count)
            if number % every == 0:
                chains = state.guessing.chains(num_draft_tokens, num_ranks=1)
                found[number] = [[guess.token for guess, *_ in chain] for chain in chains]
            return Proposal(torch.zeros(len(state.rows), num_draft_tokens, dtype=torch.long))

        drafter.propose = propose  # pyright: ignore
        generate(target, drafter, prompts, max_new_tokens=rounds, num_draft_tokens=2, eos_token_ids=[])
        drafted.append(found)
    at_once, late = drafted
    assert len(late) > 2 and all(at_once[number] == chains for number, chains in late.items())


DRAFTED = [(None, 2), (None, 5), (TREE, None)]


@pytest.mark.parametrize(
    ("head_type", "tree", "num_draft_tokens"), [(name, *DRAFTED[i % 3]) for i, name in enumerate(sorted(HEADS))]
)
def test_a_head_reads_and_drafts_in_one_recorded_step(tree, num_draft_tokens, target, head, monkeypatch):
    """Few operations are left outside of it, whatever the head. Texts and drafts are the same, and those of the next
    prompts, for which nothing is recorded again. Chains of two, of five, some of them behind the head's, and trees."""

    def record(step, arguments):
        def run(*tensors):
            with _disable_current_modes():
                return step(*tensors)

        return run

    def counted(steps):
        how = {"max_length": 60, "num_draft_tokens": num_draft_tokens, "tree": tree, "steps": steps}
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


def test_one_wrong_guess_does_not_silence_a_head():
    row = row_of(3, 4, 5)
    before = row.guessed.mean
    row.chain(guesses([(9, 0.5)]), 1)
    row.extend([8])
    assert 0.9 * before < row.guessed.mean < before


def test_guesses_behind_a_wrong_one_are_not_counted():
    row = row_of(3, 4, 5)
    totals = row.guessed.num_counted
    row.chain(guesses([(9, 0.9)], [(9, 0.5)], [(9, 0.5)]), 3)
    row.extend([9, 8, 7])
    assert row.guessed.num_counted == totals + 2


def test_a_tree_holds_the_heads_chain_its_other_guesses_and_copies():
    row = row_of(*range(2, 20), *range(2, 18))
    head = guesses([(50, 0.6), (51, 0.3)], [(60, 0.6), (61, 0.2)])
    paths = row.tree(head, num_nodes=6, depth=2)
    assert {(18,), (18, 19), (50,), (50, 60), (51,)} <= set(paths)
    assert all(path[:-1] in {(), *paths[:i]} for i, path in enumerate(paths)), "parents first"
    assert paths[1][:1] == paths[0], "and then the likeliest child"
    proposal = tree_proposal([paths], 20)
    assert proposal.tokens.shape == (1, 20) and proposal.parents is not None
    assert (proposal.parents < torch.arange(20)).all()


def test_a_head_that_knows_nothing_costs_a_round_or_two_over_look_ups_alone(tiny_target):
    """While its guesses are found out."""
    target = tiny_target("llama", num_hidden_layers=4, eos_token_id=2)  # whose text repeats itself
    suite = Suite("loop", [[1, 5, 9] * 6])
    config = MeasureConfig(setting=chain(3), max_new_tokens=48, num_repeats=1)
    drafters = SuffixDrafter(), HybridDrafter(untrained("eagle3", target, num_depths=3))
    alone, both = (measure(target, drafter, suite, config, name="d")[0] for drafter in drafters)
    assert alone.acceptance_length > 2 and both.num_rounds <= alone.num_rounds + 2


def test_fixed_trees_are_refused_and_the_head_decides_what_it_is(target):
    head, other = untrained("eagle3", target, num_depths=3), untrained("eagle3", target, num_depths=3)
    with pytest.raises(BadInput, match="chains and dynamic trees"):
        generate(target, HybridDrafter(head), PROMPTS[0], max_new_tokens=4, tree=StaticTree(((0,), (1,))))
    with torch.no_grad():
        next(other.parameters()).add_(1)
    assert identity(HybridDrafter(head)) != identity(HybridDrafter(other))
