"""Every kind of target does what the record says, and the record says nothing that is wrong or crashes."""

from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.eval.decoding import generate
from headstart.targets.caches.cache import SlotCache
from headstart.targets.check import lengths
from headstart.targets.layers.temperature import BY_BETA, FLOORS
from headstart.targets.loading import TargetConfig, load_model
from headstart.targets.target import Target
from kinds import FAST, KINDS, without_recipe
from planted import Planted
from record import PAGE, Record, usual
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from walk import NUM_NEW, PROMPTS, TREE, Walk, outcome, walked

RECORD = Record.read()
FAST_STEPS = "load", "states", "plain", "chains", "trees", "batches"


@pytest.mark.parametrize("name", FAST)
def test_unlike_kinds_do_what_the_record_says(name):
    expected = {step: line for step, line in RECORD.outcomes[name].items() if step in ("transformers", *FAST_STEPS)}
    assert walked(KINDS[name], FAST_STEPS) == expected, "`make targets` writes the record anew"


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_does_what_the_record_says(name):
    if KINDS[name].model_type not in CONFIG_MAPPING:
        pytest.skip("not in this release of transformers")
    expected = RECORD.outcomes[name]
    assert walked(KINDS[name]) == {**usual(KINDS[name], expected), **expected}, "`make targets` writes the record anew"


def test_every_kind_is_recorded():
    assert list(RECORD.outcomes) == list(KINDS)
    assert set(FAST) <= KINDS.keys() and "bert" in without_recipe()


def test_texts_are_longer_than_all_lengths_at_which_a_forward_changes():
    """Windows, chunks, kept keys and the position from which on queries are scaled, of some kind of each type of model
    that can be loaded; other kinds of it may show what short texts are."""
    longest, shorter, longer = max(map(len, PROMPTS)) + NUM_NEW, set[tuple[str, str]](), set[tuple[str, str]]()
    for name, kind in KINDS.items():
        if kind.model_type not in CONFIG_MAPPING or {"transformers", "load"} & RECORD.outcomes[name].keys():
            continue
        config = kind.config().get_text_config()
        found = lengths(config) | {key: getattr(config, key, None) or 0 for key in FLOORS}
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get(BY_BETA):
            found["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        for key, number in found.items():
            (shorter if number < longest else longer).add((config.model_type, key))
    assert longer - shorter == set()


def test_nothing_is_wrong_or_crashes():
    lines = [f"{name}, {step}: {line}" for name, found in RECORD.outcomes.items() for step, line in found.items()]
    bad = [line for line in lines if ": refused: " not in line and ", transformers: crashed: " not in line]
    assert not bad, "\n".join(bad)


def test_the_page_is_the_record_s():
    assert PAGE.read_text().startswith(RECORD.page()), "`make targets` writes it anew"
    summary = f"{len(RECORD.outcomes)} kinds, on a CPU: {RECORD.summary()}"
    assert summary in " ".join((PAGE.parents[2] / "README.md").read_text().split()), "the README has its figures"


@pytest.fixture(scope="module")
def mistral(tmp_path_factory) -> Walk:
    """A target with a sliding window."""
    walk = Walk(KINDS["mistral"], tmp_path_factory.mktemp("mistral"))
    walk.transformers()
    return walk


def test_a_planted_fault_is_seen(mistral, monkeypatch):
    """A window that is not kept, a tree whose nodes see their cousins, logits that are off, a crash, a refusal."""
    steps = mistral.steps
    assert {outcome(steps[step], mistral.folder) for step in ("load", "states", "plain", "trees")} == {"ok"}

    def seen(step: str) -> str:
        return outcome(steps[step], mistral.folder)

    mask = SlotCache.mask
    with monkeypatch.context() as patch:
        patch.setattr(SlotCache, "mask", lambda self, positions, *, window=None, **how: mask(self, positions, **how))
        assert seen("plain").startswith("wrong: prompt of 5: new token 12 differs")  # the 17th token
        assert seen("batches").startswith("wrong: prompt of 5 in a batch of 3: new token 12")
    with monkeypatch.context() as patch:
        patch.setattr(SlotCache, "mask", lambda self, positions, *, seen=None, **how: mask(self, positions, **how))
        assert seen("chains") == "ok" and seen("trees").startswith("wrong")
    logits = Target.logits
    with monkeypatch.context() as patch:
        patch.setattr(Target, "logits", lambda self, states: logits(self, states) * 1.01)
        assert seen("states") == "wrong: logits: off by 0.01 of the largest"
    for error, line in ((RuntimeError("lost\nand"), "crashed: RuntimeError: lost"), (BadInput("no"), "refused: no")):
        with monkeypatch.context() as patch:
            patch.setattr(Target, "logits", lambda self, states, error=error: (_ for _ in ()).throw(error))
            assert seen("states") == line


def test_planted_drafts_are_accepted_in_part(mistral):
    """So that rounds of all kinds happen: none accepted, some, all."""

    def taken(**how: Any) -> set[int]:
        drafter = Planted(mistral.whole_texts)
        done = generate(mistral.target, drafter, PROMPTS, max_new_tokens=NUM_NEW, eos_token_ids=[], **how)
        return {num for one in done.rounds[1:] for num in one.num_accepted}

    assert taken(num_draft_tokens=4) == {0, 2, 4} and taken(tree=TREE) == {0, 2, 3}


@pytest.mark.parametrize("kind, dtype", [("llama", "bfloat16"), ("deepseek_v3", "bfloat16"), ("gpt_oss", "float16")])
def test_weights_have_the_dtypes_that_transformers_loads_them_in(kind, dtype, tmp_path):
    """Of some models in fp32: routers, and norms in fp16."""
    KINDS[kind].model().save_pretrained(tmp_path)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype)).state_dict()
    found = load_model(TargetConfig(path=str(tmp_path), dtype=dtype))[0].state_dict()
    assert {name: weight.dtype for name, weight in found.items()} == {
        name: value.dtype for name, value in wanted.items()
    }
    assert all(torch.equal(weight, wanted[name]) for name, weight in found.items())
