"""What would make a server's figures better than they are, or those of other work, is left out of them or said."""

from dataclasses import replace

import pytest
from headstart.engines.servers.registry import SERVER_ENGINES
from headstart.eval.report.served_page import cautions
from headstart.eval.served.blocks import ServedConfig, ServedDrafts, ServedSide, key_of
from served_blocks import ONE, QUESTIONS, measured, served
from serving_stand_in import StandIn


@pytest.mark.parametrize(("others", "num_other"), [((True, False), 0), ((False, True), 6), ((True, True), 6)])
def test_prompts_that_the_two_servers_read_otherwise_are_doubted(others, num_other, tmp_path):
    """Another chat template or another default of its variables: the two do other work."""
    plain, drafting = (StandIn(other_template=other) for other in others)
    drafting.accepted = [1]
    [result] = measured(plain, drafting, tmp_path)
    assert result.prompts.other == num_other
    doubted = "6 prompts (p.jsonl:0 first) are other ids in the two servers"
    assert [doubt.startswith(doubted) for doubt in result.doubts] == [True] * (others[0] != others[1])


@pytest.mark.parametrize(
    ("engine", "drafter", "caution"),
    [
        ("vllm", "suffix at K 4", "its look-ups keep earlier answers"),
        ("vllm", "ngram at K 4", ""),
        ("sglang", "ngram at K 4", "its look-ups keep earlier answers"),
        ("vllm", "its own drafts", "if it looks up earlier answers, these figures flatter"),
        ("vllm", "head:H at K 4", ""),
    ],
)
def test_look_ups_that_have_answered_these_prompts_before_are_said(engine, drafter, caution):
    """vLLM's suffix decoding too, and whatever a running server drafts with where nothing names it."""
    result = replace(served(drafter, 1, 1.5), engine=engine)
    assert result.is_flattered == caution.startswith("its look-ups")
    assert [line for line in cautions([result]) if "answers" in line and (not caution or caution not in line)] == []
    assert any(caution in line for line in cautions([result]))


def test_sampled_answers_are_drawn_anew_in_every_block(tmp_path):
    """With one seed all blocks would hold the same texts, and vLLM draws for a question with a seed by itself."""
    plain = StandIn()
    measured(plain, StandIn(accepted=[1]), tmp_path, temperature=0.7, seed=5)
    assert plain.bodies and not any("seed" in body for body in plain.bodies)
    drafts = ServedDrafts("head", 4, (ServedSide("a"), ServedSide("b")))
    configs = [ServedConfig([ONE], seed=seed) for seed in (5, 6)]
    keys = {key_of(SERVER_ENGINES["vllm"], drafts, QUESTIONS, config, ONE) for config in configs}
    assert len(keys) == 2, "the seed is that of the arrivals"
