"""Every figure of a report is what its definition says, computed by hand, and can be computed again from the rounds."""

import random
from math import log

import pytest
import torch
from headstart.eval.decoding.loop import Round
from headstart.eval.figures.metrics import (
    LEAST_TIMED,
    acceptance,
    calibration,
    expected_acceptance,
    ratio_and_interval,
    relative_and_interval,
)
from headstart.eval.report.results.one_result import ratio_words
from headstart.heads.base import chain_starts

DRAWS = 2000


def one_round(accepted, committed, *, drafted=3, emitted=None) -> Round:
    return Round(0.1, drafted, accepted, committed, committed if emitted is None else emitted)


# Acceptance, from the engine's rounds


def test_acceptance_of_rounds_made_by_hand():
    """K = 3, two rows. Row 1 ends in the third round: its second draft is the end token, accepted without a bonus."""
    rounds = [
        one_round([0, 0], [1, 1], drafted=0),
        one_round([3, 0], [4, 1]),
        one_round([1, 2], [2, 3]),
        one_round([2, 2], [3, 2]),
        one_round([0, 0], [1, 0]),
    ]
    counted = acceptance(rounds, num_draft_tokens=3)
    assert (counted.num_rounds, counted.num_committed) == (7, 16)
    assert counted.length == 16 / 7
    # accepted, tried: (3: 3) (0: 1) (1: 2) (2: 3) (2: 3) (2 and the end: 2) (0: 1)
    assert counted.tried == [7, 5, 4 - 1]
    assert counted.taken == [5, 4, 1]
    assert counted.rate == [5 / 7, 4 / 5, 1 / 3]


def test_rounds_cut_by_max_new_tokens_count_what_the_target_gave():
    counted = acceptance([one_round([3], [4], emitted=[2])], num_draft_tokens=3)
    assert counted.length == 4 and counted.rate == [1, 1, 1]


def test_nothing_reached_is_no_rate():
    counted = acceptance([one_round([0], [1]), one_round([0], [1], drafted=0)], num_draft_tokens=3)
    assert counted.length == 1 and counted.rate == [0, None, None]
    assert acceptance([one_round([0], [1], drafted=0)], num_draft_tokens=2).length is None


# Acceptance, from teacher-forced hits


EVERY = {t: [1, 1, 1, 1] for t in range(10)}


@pytest.mark.parametrize(
    ("mask", "hits_at", "num_depths", "num_draft", "rounds", "committed", "tried", "taken"),
    [
        # prompt x_0 x_1, answer x_2 .. x_9: t = 1 takes 2, t = 4 none, t = 5 one, t = 7 one and the text ends
        ("0011111111", {1: [1, 1], 2: [1, 1], 4: [0, 1], 5: [1, 0], 7: [1, 1]}, 2, 2, 4, 3 + 1 + 2 + 1, [4, 2], [3, 1]),
        # x_1 .. x_3: the round at t = 0 accepts x_2 and x_3, and nothing follows: no bonus; one token more is one
        ("0111", {0: [1, 1]}, 2, 2, 1, 2, [1, 1], [1, 1]),
        ("01111", {0: [1, 1]}, 2, 2, 1, 3, [1, 1], [1, 1]),
        ("0111011", {0: [1, 1]}, 2, 2, 2, 2 + 1, [2, 1], [1, 1]),
        # several answers in a row are texts of their own: two rounds of two tokens
        ("0011100111", EVERY, 3, 3, 2, 4, [2, 2, 0], [2, 2, 0]),
        # fewer drafts than depths
        ("0111111111", EVERY, 4, 1, 4, 8, [4], [4]),
        # all misses are one token per round
        ("01111", {}, 3, 3, 3, 3, [3, 0, 0], [0, 0, 0]),
    ],
)
def test_rounds_are_walked_through_a_text(mask, hits_at, num_depths, num_draft, rounds, committed, tried, taken):
    """hits_at: {t: hits at each depth}; chains that are not named miss everywhere."""
    starts = chain_starts(torch.tensor([list(map(int, mask))]).bool(), num_depths)
    hits = torch.zeros_like(starts.valid)
    for s, t in enumerate(starts.positions[0].tolist()):
        hits[0, s] = torch.tensor(hits_at.get(t, [0] * num_depths)[:num_depths]).bool() & starts.valid[0, s]
    counted = expected_acceptance(starts, hits, num_draft_tokens=num_draft)
    assert (counted.num_rounds, counted.num_committed) == (rounds, committed)
    assert (counted.tried, counted.taken) == (tried, taken)


# Intervals


def test_a_constant_ratio_has_an_interval_of_no_width():
    assert ratio_and_interval([2.0, 4.0, 8.0, 2.0], [1.0, 2.0, 4.0, 1.0]) == (2.0, (2.0, 2.0))


def test_few_entries_have_no_interval():
    """Over two prompts it would reach from nothing to 267 times."""
    assert ratio_and_interval([3.0], [2.0]) == (1.5, (None, None))
    assert ratio_and_interval([3.0, 1.0, 2.0], [2.0, 1.0, 1.0])[1] == (None, None)
    assert ratio_words(1.5, (None, None)) == "1.50"
    assert ratio_and_interval([3.0, 0.0], [2.0, 0.0])[1] == (None, None)


def answers(scenario, draws, count, source):
    """Baseline and speculative seconds of so many prompts, [draws, count] each: answers of unequal lengths, cut at 127
    tokens, with speedups that spread, depend on the length, or lean to one side."""
    lean, noise = torch.randn(2, draws, count, generator=source, dtype=torch.double)
    lengths = (4.2 + 0.8 * lean).exp().clamp(max=127)
    speedups = {
        "spread": (0.4 + 0.25 * noise).exp(),
        "longer is faster": (0.4 + 0.15 * lean + 0.2 * noise).exp(),
        "leaning": 0.8 - 0.5 * torch.rand(2, draws, count, generator=source, dtype=torch.double).log().sum(0),
    }[scenario]
    return lengths, lengths / speedups


@pytest.mark.parametrize("scenario", ["spread", "longer is faster", "leaning"])
def test_intervals_hold_the_truth_from_the_least_number_of_prompts_on(scenario):
    """By simulation: each end of the 95 % interval misses the true ratio in 2.5 % of the cases, 4 % at most here."""
    source = torch.Generator().manual_seed(0)
    base, spec = answers(scenario, 1000, 1000, source)
    truth = base.sum() / spec.sum()
    for count in (LEAST_TIMED, 8, 16, 32):
        pairs = zip(*(side.tolist() for side in answers(scenario, DRAWS, count, source)), strict=True)
        assert misses([ratio_and_interval(*pair)[1] for pair in pairs], truth) < 0.04, count


def misses(intervals, truth) -> float:
    """The share of intervals of which an end, the worse one of both, is on the wrong side of the truth."""
    ends = torch.tensor(intervals)
    return max((ends[:, 0] > truth).double().mean().item(), (ends[:, 1] < truth).double().mean().item())


def width(ends) -> float:
    low, high = ends
    return log(high / low)


def test_an_interval_of_one_chosen_among_many_is_wider_by_the_quantile():
    """16 entries of one length: 15 degrees of freedom, 2.131 for one ratio, 2.947 for one of five (t at 0.995)."""
    above, below = [1.0 + 0.01 * (-1) ** i for i in range(16)], [1.0] * 16
    _, one = ratio_and_interval(above, below)
    _, of_five = ratio_and_interval(above, below, num_choices=5)
    assert width(of_five) / width(one) == pytest.approx(2.947 / 2.131, rel=1e-3)


def test_the_widest_interval_is_one_of_numbers():
    """Two long entries that contradict each other, chosen among a thousand: says nothing, and does not overflow."""
    above, below = [1.0, 10.0, 1e-9, 1e-9], [10.0, 1.0, 1e-9, 1e-9]
    ratio, (low, high) = ratio_and_interval(above, below, num_choices=1000)
    assert ratio == 1 and 0 < low < 1e-200 and 1e200 < high < float("inf")


def test_the_best_of_many_that_gain_nothing_is_not_shown_to_gain():
    """By simulation: of eight settings as fast as no drafts the one with the highest lower end is above 1 in 2.5 % of
    the cases at most (4 % here), and in more than 8 % where the choice is not allowed for."""
    source = torch.Generator().manual_seed(0)
    base = torch.rand(DRAWS // 4, 1, 16, generator=source, dtype=torch.double) + 0.5
    spec = base * (0.2 * torch.randn(DRAWS // 4, 8, 16, generator=source, dtype=torch.double)).exp()
    spec *= base.sum() * 8 / spec.sum()

    def wrong(num_choices: int) -> float:
        def lowest(pair) -> float:
            return ratio_and_interval(*pair, num_choices=num_choices)[1][0] or 0.0

        cases = zip(base[:, 0].tolist(), spec.tolist(), strict=True)
        return sum(max(lowest((plain, each)) for each in settings) > 1 for plain, settings in cases) / len(spec)

    assert wrong(8) < 0.04 < 0.08 < wrong(1)


def test_a_quotient_of_ratios_is_paired():
    """What both settings share in a prompt is in neither the quotient nor its interval."""
    base, hard = [4.0, 1.0, 9.0, 2.0], [1.0, 0.2, 3.0, 0.9]
    quotient, ends = relative_and_interval((base, hard), (base, [2 * each for each in hard]))
    assert (quotient, ends) == (pytest.approx(2.0), (pytest.approx(2.0), pytest.approx(2.0)))
    assert relative_and_interval(([3.0], [2.0]), ([3.0], [1.0])) == (0.5, (None, None))


def test_paired_intervals_hold_the_truth_and_are_narrower():
    """By simulation, as above: two settings whose speedups vary by prompt alike, and a tenth each of their own."""
    source = torch.Generator().manual_seed(0)

    def drawn(draws, count):
        base, spec = answers("longer is faster", draws, count, source)
        own = 0.1 * torch.randn(2, draws, count, generator=source, dtype=torch.double)
        return base, spec * own[0].exp(), 1.2 * spec * own[1].exp()

    base, first, second = drawn(1000, 1000)
    truth = (second.sum() / first.sum()).item()
    for count in (LEAST_TIMED, 8, 16, 32):
        cases = list(zip(*(side.tolist() for side in drawn(DRAWS, count)), strict=True))
        paired = [relative_and_interval((b, f), (b, s))[1] for b, f, s in cases]
        assert misses(paired, truth) < 0.04, count
    ends, single = torch.tensor(paired), torch.tensor([ratio_and_interval(b, f)[1] for b, f, _ in cases])
    assert (ends.log().diff().mean() / single.log().diff().mean()).item() < 0.8


def estimated_rounds(rows):
    """A round for each (estimates, number accepted), all drafts verified."""
    return [
        Round(0.0, len(estimates), [accepted], [accepted + 1], [accepted + 1], estimates=[list(estimates)])
        for estimates, accepted in rows
    ]


def test_the_calibration_error_is_averaged_over_tenths_by_their_drafts():
    rows = [((0.95, 0.55), 0), ((0.93, 0.5), 1), ((0.91, 0.75), 2), ((0.97, 0.35), 1)]
    told = calibration(estimated_rounds(rows), verified=2)
    assert told is not None and told.num_drafts == [0, 0, 0, 1, 0, 1, 0, 1, 0, 4], "of chains that went on"
    by_hand = abs(4 * 0.94 - 3) + abs(0.5 - 0) + abs(0.75 - 1) + abs(0.35 - 0)
    assert told.error == pytest.approx(by_hand / 7, abs=1e-4)
    assert told.estimated[9] == 0.94 and told.accepted[9] == 0.75


def test_true_estimates_have_the_error_of_chance_and_others_more():
    source, rows, off = random.Random(3), [], []
    for _ in range(4000):
        estimates = [source.uniform(0.05, 0.95) for _ in range(3)]
        accepted = next((k for k, chance in enumerate(estimates) if source.random() > chance), 3)
        rows.append((estimates, accepted))
        off.append(([estimate**2 for estimate in estimates], accepted))
    told, wrong = (calibration(estimated_rounds(those), verified=3) for those in (rows, off))
    assert told is not None and wrong is not None
    assert told.error == pytest.approx(told.error_by_chance, rel=0.5) and told.error < 0.02
    assert wrong.error > 0.1 > 3 * wrong.error_by_chance
