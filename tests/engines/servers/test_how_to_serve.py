"""How drafters without a head are served: with what was measured, or with a line that says that it is not that."""

import shlex

import pytest
from headstart.engines.servers.how_to_serve import OTHER, how_to_serve
from headstart.eval.drafters.lookup import NgramDrafter

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": %s}'


@pytest.mark.parametrize(
    ("spec", "remarks", "most"),
    [("ngram", [], NgramDrafter().max_ngram), ("ngram:8", [], 8), ("suffix", [OTHER], 3)],
)
def test_vllm_looks_up_matches_of_every_length_that_ours_does(spec, remarks, most):
    """Told no shortest length, it takes the longest for it, and a text whose last tokens match for fewer drafts
    nothing."""
    *said, command = how_to_serve(spec, 4, has_tree=False, target="T")
    assert said == remarks
    assert shlex.split(command) == ["vllm", "serve", "T", "--speculative-config", NGRAM % most]
