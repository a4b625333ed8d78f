"""The page that shows the algorithm writes the engine's texts, round for round."""

import pytest
import torch
from drafted import untrained
from headstart.eval.decoding import generate
from headstart.eval.decoding.one_round import decode_plainly
from headstart.eval.decoding.sampling import Sampling, random_keys
from headstart.eval.drafters.lookup import NgramDrafter

PROMPT = [1, 7, 8, 3, 7, 8, 3, 7]
WAYS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.9)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "ngram", "target"])
def test_the_plain_round_writes_the_engines_text(kind, way, target, target_as_drafter):
    drafter = NgramDrafter() if kind == "ngram" else target_as_drafter(target) if kind == "target" else None
    drafter = drafter or untrained(kind, target)
    how = {"num_draft_tokens": 3, "max_new_tokens": 32}
    source = torch.Generator().manual_seed(5)
    engine = generate(target, drafter, PROMPT, eos_token_ids=[], generator=source, **how, **vars(WAYS[way]))
    seed = random_keys([1], target.device, torch.Generator().manual_seed(5))
    plain = decode_plainly(target, drafter, PROMPT, sampling=WAYS[way], seed=seed, **how)
    assert plain.new == engine.token_ids[0] and len(set(plain.new)) > 3
    assert len(plain.accepted) == len(engine.rounds) - 1
    assert plain.accepted[:-1] == [one.num_accepted[0] for one in engine.rounds[1:-1]], "the last is cut"
