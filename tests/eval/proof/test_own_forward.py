"""The engine is held against the model's own code: what it decodes wrongly is neither measured nor proved."""

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.eval.decoding import generate
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.measurement import passes
from headstart.eval.measurement.measure import measure
from headstart.eval.proof import baseline, own_forward, texts
from headstart.eval.proof.baseline import check_baseline
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.proof.own_forward import (
    first_not_own,
    own_attention,
    own_logits,
    own_step_logits,
    rounding,
)
from headstart.eval.proof.runner import Runner
from headstart.eval.proof.sampling_check import check_sampling
from headstart.eval.suites.prompts import Suite
from headstart.targets.caches import cache as caches
from headstart.targets.caches.attention import NAME as GROUPED_ATTENTION
from headstart.targets.target import Target
from wrong_slots import VISIBILITY, hiding_a_slot, one_further

PROMPTS = [[1, 5 + i, 9, (14 + 3 * i) % 61, 33, *range(20, 20 + i)] for i in range(6)]
WRITE = caches.SlotLayer.update


def stale(self, keys, values, *rest, **how):
    """A stale state: what a single token should write is not written."""
    return self.readable_slots(rest[0].extent) if keys.shape[2] == 1 else WRITE(self, keys, values, *rest, **how)


FAULTS = {
    "mask": (caches, "visibility_mask", hiding_a_slot),
    "position": (Target, "read_slots", one_further),
    "scale": (Target, "as_logits", lambda self, logits: logits / 4),
    "state": (caches.SlotLayer, "update", stale),
}


def measured(target, **changes):
    config = MeasureConfig(**{"setting": chain(3), "max_new_tokens": 24, "num_repeats": 1, **changes})
    return measure(target, NgramDrafter(), Suite("six", PROMPTS), config, name="ngram")[0]


# Before anything is timed


@pytest.mark.fast_only(changes=[{}])
@pytest.mark.usefixtures("warming_up")
@pytest.mark.parametrize("changes", [{}, {"batch_size": 3}, {"temperature": 1.0}], ids=["greedy", "batch", "sampled"])
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_what_the_engine_decodes_wrongly_is_not_measured(fault, changes, target, monkeypatch):
    if fault is None:
        assert measured(target, **changes).num_prompts == 6
        return
    monkeypatch.setattr(*FAULTS[fault])
    monkeypatch.setattr(passes, "decode_by_turns", None)  # nothing is decoded for anything else
    with pytest.raises(BadInput) as caught:
        measured(target, **changes)
    message = str(caught.value)
    assert message.startswith("target tiny-llama: ") and message.endswith(": it cannot be measured")
    assert ("the engine's logits differ" if fault == "scale" else "the engine's text differs") in message
    assert "behind prompt 0" in message and "\n" not in message


@pytest.mark.parametrize(("size", "is_long", "num"), [(1, False, 4), (3, False, 4), (1, True, 2)])
def test_the_check_is_of_four_prompts_or_fewer_long_ones_and_64_tokens(size, is_long, num, target, monkeypatch):
    seen, suite = [], Suite("six", PROMPTS)
    monkeypatch.setattr(baseline, "check_text", lambda _, prompt, new, states, **how: seen.append((prompt, new)))
    if is_long:
        monkeypatch.setattr(baseline, "MOST_READ", sum(map(len, PROMPTS[:3])) - 1)
    runner = Runner(target, None, PROMPTS, MeasureConfig(max_new_tokens=80, batch_size=size))
    check_baseline(runner, [suite.subset(range(start, start + size)) for start in range(0, 6, size)])
    assert [prompt for prompt, _ in seen] == PROMPTS[:num]
    assert [new for _, new in seen] == [text[:64] for text in runner(PROMPTS[:num], 0).token_ids]


def checked(target):
    """The check alone, on three prompts in one batch."""
    runner = Runner(target, None, PROMPTS[:3], MeasureConfig(max_new_tokens=24, batch_size=3))
    check_baseline(runner, [Suite("three", PROMPTS[:3])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_is_decoded_as_by_its_own_code(family, dtype, tiny_model):
    checked(Target.of(tiny_model(family).to(dtype), name=family, fingerprint=""))


def test_a_fault_that_changes_no_token_of_a_text_is_found_by_its_logits(tiny_model, monkeypatch):
    """As in half precision on a trained target, whose texts one wrong position leaves as they are."""
    target = Target.of(tiny_model("llama").bfloat16(), name="half", fingerprint="")
    checked(target)
    monkeypatch.setattr(Target, "decoder", None)
    monkeypatch.setattr(*FAULTS["position"])
    monkeypatch.setattr(baseline, "first_not_own", lambda *_: None)
    with pytest.raises(BadInput, match="the engine's logits differ from the model's own by .* on average"):
        checked(target)


# The proof of a text that differs


def narrow_mask(positions, **how):
    """Rounds of 4 tokens do not see the second one; prompts and rounds of one token do."""
    return hiding_a_slot(positions, **how) if positions.shape[1] == 4 else VISIBILITY(positions, **how)


@pytest.mark.slow
def test_a_fault_that_the_replay_repeats_is_not_proved(target, monkeypatch):
    """As of a target whose masks the engine does not know: the replay has them too, and writes the same wrong texts."""
    monkeypatch.setattr(caches, "visibility_mask", narrow_mask)
    report = measured(target).lossless
    assert report.unexplained == report.checked == 6
    monkeypatch.setattr(texts, "first_not_own", lambda *_, **how: None)
    assert measured(target).lossless.proved == 6, "there is nothing that only the model's own forward could see"


def test_a_wrong_baseline_proves_nothing(target):
    """Where the two texts part, both tokens must be as good."""
    prompt = PROMPTS[0]
    [right] = generate(target, None, prompt, max_new_tokens=8).token_ids
    wrong = [*right[:3], (right[3] + 1) % 61, *right[4:]]

    def first(new, baseline=()):
        return first_not_own(target, prompt, new, baseline=baseline)

    assert first(right) is None and first(right, wrong) == 3 == first(wrong, right)
    assert first(right, right[:5]) is None


def test_a_tie_of_rounding_is_the_models_own_in_half_precision_alone(tiny_model):
    """Token 40's row of the output layer is the best token's, but for the last bit that bf16 has."""
    for dtype, is_own in ((torch.float32, False), (torch.bfloat16, True)):
        target = Target.of(tiny_model("llama").to(dtype), name="tiny", fingerprint="")
        [[first]] = generate(target, None, PROMPTS[0], max_new_tokens=1).token_ids
        weight = target.output_layer.weight.data
        weight[40] = weight[first].float() * (1 - 2**-8)
        logits = own_logits(target, PROMPTS[0], [first])
        assert first_not_own(target, PROMPTS[0], [first], logits) is None
        assert (first_not_own(target, PROMPTS[0], [40], logits) is None) == is_own


# The model's own forward


def test_it_is_the_model_as_it_is_without_us(tiny_target, tiny_model):
    target, model, prompt, new = tiny_target("llama"), tiny_model("llama"), PROMPTS[1], [3, 4, 5, 6]
    wanted = model(torch.tensor([[*prompt, *new[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
    names = []

    def note(module, *_):
        names.append(target.config._attn_implementation)

    hook = target.layers[0].self_attn.register_forward_pre_hook(note)
    assert torch.equal(own_logits(target, prompt, new), wanted)
    hook.remove()
    assert names == ["sdpa"] and target.config._attn_implementation == GROUPED_ATTENTION
    with pytest.raises(RuntimeError), own_attention(target):
        raise RuntimeError
    assert target.config._attn_implementation == GROUPED_ATTENTION


def test_rounding_by_hand(target, tiny_model):
    logits = torch.tensor([[1.0, 3.0, -64.0, 0.0], [0.0, 2.0, 4.0, -torch.inf]])
    assert rounding(target, logits)[0] == pytest.approx(1e-3 * float(logits[0].std()))
    assert rounding(target, logits)[1] == pytest.approx(1e-3 * float(torch.tensor([0.0, 2, 4, 0]).std()))
    half = Target.of(tiny_model("llama").bfloat16(), name="half", fingerprint="")
    assert rounding(half, logits).tolist() == [1.0, 0.0625]


def test_where_the_whole_forward_rounds_otherwise_the_models_own_steps_decide(target):
    """Its `generate`, forced along a text: the same logits but for rounding, and choices of its own."""
    prompt = PROMPTS[0]
    [text] = generate(target, None, prompt, max_new_tokens=6).token_ids
    steps, whole = own_step_logits(target, prompt, text), own_logits(target, prompt, text)
    assert torch.allclose(steps, whole, atol=1e-5)
    assert first_not_own(target, prompt, text, -whole) is None
    other = [*text[:2], (text[2] + 1) % 61, *text[3:]]
    assert first_not_own(target, prompt, other, -whole) == 2
    kept = target.model.generation_config
    assert own_step_logits(target, prompt, other)[2].argmax() == text[2] and target.model.generation_config is kept


def test_logits_that_are_no_numbers_are_nobodys_choice(target, monkeypatch):
    nothing = torch.full((2, 61), torch.nan)
    monkeypatch.setattr(own_forward, "own_step_logits", lambda *_: nothing)
    assert first_not_own(target, PROMPTS[0], [5, 6], nothing) == 0


def test_sampled_texts_are_tested_against_the_models_own_distribution(target, monkeypatch):
    """Of wrong logits, both sides draw the same wrong texts, and our own forward would agree with them."""
    monkeypatch.setattr(*FAULTS["scale"])
    source, prompts = torch.Generator().manual_seed(0), PROMPTS * 4
    drawn = generate(target, None, prompts, max_new_tokens=24, temperature=1.0, generator=source).token_ids
    texts = [[text] for text in drawn]
    assert not check_sampling(target, prompts, texts, Sampling(temperature=1.0)).holds
