"""Synthetic acceptance: drafts are right as often as asked, and the text stays the target's."""

import pytest
from drafted import untrained
from headstart.configs.errors import BadInput
from headstart.eval.decoding import generate
from headstart.eval.drafters.synthetic import BlankDrafter, SyntheticDrafter, expected_length
from headstart.eval.measurement.metrics import acceptance

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40], [1, 30], [1, 44, 3], [1, 13, 14], [1, 18]]


@pytest.mark.parametrize(("inner", "batch"), [("eagle3", 3), pytest.param("", 1, marks=pytest.mark.slow)])
def test_rates_come_out_and_text_stays(target, batch, inner):
    head = untrained(inner, target) if inner else None
    rates = [0.9, 0.6, 0.3]
    drafter = SyntheticDrafter(target, PROMPTS, rates, max_new_tokens=100, inner=head)
    rounds = []
    for i in range(0, len(PROMPTS), batch):
        rows = PROMPTS[i : i + batch]
        text = generate(target, drafter, rows, max_new_tokens=100, num_draft_tokens=3, eos_token_ids=[])
        plain = generate(target, None, rows, max_new_tokens=100, eos_token_ids=[])
        assert text.token_ids == plain.token_ids
        rounds += text.rounds
    counted = acceptance(rounds, num_draft_tokens=3)
    for rate, found, tried in zip(rates, counted.rate, counted.tried, strict=True):
        assert found is not None
        assert abs(found - rate) < 4 * (rate * (1 - rate) / tried) ** 0.5


def test_other_prompts_are_decoded_losslessly_too(target):
    drafter = SyntheticDrafter(target, PROMPTS[:1], [1.0], max_new_tokens=20)
    text = generate(target, drafter, PROMPTS[1:3], max_new_tokens=20)
    assert text.token_ids == generate(target, None, PROMPTS[1:3], max_new_tokens=20).token_ids


def test_texts_may_end_before_the_known_ones(target):
    drafter = SyntheticDrafter(target, PROMPTS, [1.0], max_new_tokens=100)
    how = {"max_new_tokens": 8, "eos_token_ids": []}
    found = generate(target, drafter, PROMPTS, num_draft_tokens=3, **how)
    assert found.token_ids == generate(target, None, PROMPTS, **how).token_ids
    assert found.rounds[1].num_accepted == [3] * len(PROMPTS)


def test_certain_drafts_are_all_accepted_and_impossible_ones_never(target):
    """Of one drafter's texts, which serve other rates too."""
    certain = SyntheticDrafter(target, PROMPTS[:1], [1.0], max_new_tokens=41)
    never = certain.around(None, [0.0])
    lengths = []
    for drafter in (certain, never, certain):
        text = generate(target, drafter, PROMPTS[0], max_new_tokens=41, num_draft_tokens=4)
        lengths.append(acceptance(text.rounds, num_draft_tokens=4).length)
    assert lengths == [5.0, 1.0, 5.0]


def test_each_prompt_has_its_own_luck(target):
    """Texts of one length are not all accepted alike, in whatever rows they are."""
    prompts = [[1, 5], [1, 6], [1, 7], [1, 8]]
    drafter = SyntheticDrafter(target, prompts, [0.5], max_new_tokens=40)
    how = {"max_new_tokens": 40, "num_draft_tokens": 3, "eos_token_ids": []}
    alone = [[one.num_accepted[0] for one in generate(target, drafter, row, **how).rounds] for row in prompts]
    assert len({tuple(row) for row in alone}) == 4
    together = generate(target, drafter, prompts[::-1], **how).rounds
    for row, wanted in enumerate(alone[::-1]):
        assert [one.num_accepted[row] for one in together][: len(wanted)] == wanted


def test_a_length_follows_from_rates():
    assert expected_length([0.5], 3) == 1 + 0.5 + 0.25 + 0.125
    assert expected_length([0.8, 0.5], 1) == 1.8
    assert expected_length([0.8, 0.5], 2) == pytest.approx(2.2)


def test_blank_drafts_leave_the_text_alone(target):
    for rows in (PROMPTS[:1], PROMPTS[:3]):
        text = generate(target, BlankDrafter(), rows, max_new_tokens=12, num_draft_tokens=7)
        assert text.token_ids == generate(target, None, rows, max_new_tokens=12).token_ids


def test_rates_outside_are_refused(target):
    for wrong in ([], [1.2], [0.5, -0.1]):
        with pytest.raises(BadInput, match="expected one or more between 0 and 1"):
            SyntheticDrafter(target, PROMPTS[:1], wrong, max_new_tokens=8)
