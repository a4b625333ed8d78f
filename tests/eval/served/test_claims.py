"""What would make a server's figures better than they are, or those of other work, is left out of them or said."""

import pytest
from served_blocks import measured
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
