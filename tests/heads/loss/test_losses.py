"""Every loss equals its formula in plain loops, gradients their closed forms, and mixes, weights and chunks add up."""

import math

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.heads.loss.chunked import summed_loss
from headstart.heads.loss.functions import (
    ALL_LOSSES,
    EXPONENT,
    LOSSES,
    TOP_K,
    DraftVocabulary,
    LossSpec,
    Rows,
    TargetRows,
    check_mix,
    depth_weights_of,
    reads_all_logits,
)

NUM_ROWS, SIZE, VOCAB = 7, 5, 11
CUT = torch.tensor([0, 2, 3, 5, 8, 9])
NUM_CANDIDATES = 3


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def make_rows(cut=None, *, scale=2.0, mix=None, draft=None, target=None, selects=False):
    """Rows whose states are the identity's: hidden holds the draft's logits, teacher_hidden the target's."""
    vocabulary = None if cut is None else DraftVocabulary.of(cut, VOCAB)
    draft = (
        scale * torch.randn(NUM_ROWS, VOCAB if cut is None else len(cut), generator=source(1))
        if draft is None
        else draft
    )
    target = scale * torch.randn(NUM_ROWS, VOCAB, generator=source(2)) if target is None else target
    spec = LossSpec(
        mix=mix or {"soft_ce": 1.0},
        draft_logits=lambda x: x,
        predicted_state=lambda x: 0.5 * x,
        target_logits=lambda x: x,
        restricted_logits=lambda x: x if cut is None else x[:, cut],
        confidence=lambda x: 0.3 * x[:, 0],
        select=(lambda x, logits, ids: logits + 0.2 * x[:, :1] * ids) if selects else None,
        candidates=lambda x, logits: logits.topk(NUM_CANDIDATES, -1).indices,
        vocabulary=vocabulary,
    )
    labels = torch.randint(VOCAB, (NUM_ROWS,), generator=source(3))
    return Rows(spec, draft.clone().requires_grad_(), labels, TargetRows(spec, target))


def exps(logits):
    powers = [math.exp(x) for x in logits]
    return [x / sum(powers) for x in powers]


def naive(name, draft, target, label, columns):
    """One row; columns: the target id of each draft id."""
    q, whole = exps(draft), exps(target)
    p = [whole[c] for c in columns]
    every = {c: 0.0 for c in range(len(target))} | dict(zip(columns, q, strict=True))  # q over the whole vocabulary
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    alpha = sum(min(whole[c], every[c]) for c in every)
    estimate = 1 / (1 + math.exp(-0.3 * draft[0]))
    top = max(range(len(whole)), key=whole.__getitem__)
    best = sorted(range(len(p)), key=lambda i: -p[i])[:TOP_K]
    candidates = sorted(range(len(q)), key=lambda i: -q[i])[:NUM_CANDIDATES]
    scores = exps([draft[i] + 0.2 * draft[0] * i for i in candidates])
    chosen = dict(zip((columns[i] for i in candidates), scores, strict=True))
    return {
        "hard_ce": -math.log(every[label]) if label in columns else 0.0,
        "greedy_gce": (1 - every[top] ** EXPONENT) / EXPONENT if top in columns else 0.0,
        "soft_ce": -sum(a * math.log(b) for a, b in zip(p, q, strict=True)),
        "restricted_ce": -sum(a / sum(p) * math.log(b) for a, b in zip(p, q, strict=True)) * (label in columns),
        "kl": kl,
        "topk_ce": -sum(p[i] * math.log(q[i]) for i in best),
        "l1": sum(abs(whole[c] - every[c]) for c in every),
        "selection": -math.log(chosen[label]) if label in chosen else 0.0,
        "confidence": -alpha * math.log(estimate) - (1 - alpha) * math.log(1 - estimate),
    }[name]


# The formulas


@pytest.mark.parametrize("cut", [None, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("name", [name for name in ALL_LOSSES if name != "feature"])
def test_a_loss_is_its_formula(name, cut):
    rows = make_rows(cut, selects=name == "selection")
    got = ALL_LOSSES[name](rows)
    columns = list(range(VOCAB)) if cut is None else cut.tolist()
    assert cut is None or not set(rows.labels.tolist()) <= set(columns), "some labels cannot be drafted"
    wanted = [
        naive(name, *row, columns)
        for row in zip(rows.hidden.tolist(), rows.target.teacher_hidden.tolist(), rows.labels.tolist(), strict=True)
    ]
    torch.testing.assert_close(got, torch.tensor(wanted), rtol=1e-5, atol=1e-5)


# The gradients


def gradient(rows, name):
    return torch.autograd.grad(LOSSES[name](rows).sum(), rows.hidden, retain_graph=True)[0]


@pytest.mark.parametrize("cut", [None, CUT], ids=["whole", "cut"])
def test_gradients_are_the_closed_forms(cut):
    rows = make_rows(cut)
    q = rows.hidden.detach().softmax(-1)
    whole = rows.target.teacher_hidden.softmax(-1)
    p = whole if cut is None else whole[:, cut]
    covered = p.sum(-1, keepdim=True)
    assert cut is None or (covered < 0.99).any()
    forward = covered * q - p
    lower = (q < p).float()
    distance = -2 * q * (lower - (lower * q).sum(-1, keepdim=True))
    one = torch.nn.functional.one_hot(rows.draft_labels.clamp(min=0), q.shape[-1])
    wanted = {
        "hard_ce": (q - one) * (rows.draft_labels >= 0)[:, None],
        "soft_ce": forward,
        "restricted_ce": (q - p / p.sum(-1, keepdim=True)) * (rows.draft_labels >= 0)[:, None],
        "kl": forward,
        "l1": distance,
    }
    for name, value in wanted.items():
        torch.testing.assert_close(gradient(rows, name), value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_losses_stay_finite_where_draft_and_target_share_nothing():
    far, target = torch.zeros(NUM_ROWS, VOCAB), torch.zeros(NUM_ROWS, VOCAB)
    far[:, 0], target[:, 1] = 500.0, 500.0
    for name in LOSSES:
        rows = make_rows(draft=far, target=target)
        assert LOSSES[name](rows).isfinite().all() and gradient(rows, name).isfinite().all(), name


# Mixes, rows and chunks


@pytest.mark.parametrize("chunk", [2, 100])
def test_a_mix_weighs_losses_and_rows(chunk):
    weights = torch.rand(NUM_ROWS, generator=source(8))
    mix = {"hard_ce": 0.1, "l1": 0.9, "kl": 2.0}
    rows = make_rows(CUT, mix=mix)
    how = {"labels": rows.labels, "teacher_hidden": rows.target.teacher_hidden, "weights": weights, "size": chunk}
    value = summed_loss(rows.hidden, rows.spec, **how)
    wanted = torch.stack([w * (LOSSES[name](rows) * weights).sum() for name, w in mix.items()]).sum()
    torch.testing.assert_close(value, wanted)
    ours, naive_one = (torch.autograd.grad(x, rows.hidden, retain_graph=True)[0] for x in (value, wanted))
    torch.testing.assert_close(ours, naive_one)


def test_what_a_mix_shares_is_computed_once_and_what_it_does_not_need_never():
    seen = []

    def target_logits(x):
        seen.append(len(x))
        return x

    without = {"hard_ce": 1.0, "restricted_ce": 1.0, "feature": 1.0}
    for mix, wanted in ((without, 0), ({name: 1.0 for name in LOSSES}, 1)):
        assert reads_all_logits(mix) == bool(wanted)
        rows = make_rows(mix=mix)
        rows.spec.target_logits = target_logits
        seen.clear()
        summed_loss(rows.hidden, rows.spec, labels=rows.labels, teacher_hidden=rows.target.teacher_hidden, size=100)
        assert len(seen) == wanted


# Depths and mixes


def test_depth_weights_are_the_papers():
    assert depth_weights_of("geometric", decay=0.8, num_depths=3) == pytest.approx([1, 0.8, 0.64])
    assert depth_weights_of("normalised", decay=0.6, num_depths=3) == pytest.approx([0.51, 0.31, 0.18], abs=0.005)
    assert sum(depth_weights_of("normalised", decay=0.6, num_depths=9)) == pytest.approx(1)
    wanted = [1, math.exp(-1 / 4), math.exp(-2 / 4)]
    assert depth_weights_of("exponential", decay=4.0, num_depths=3) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("mix", "problem"),
    [
        ({}, "loss {}: expected at least one of hard_ce"),
        ({"tv": 1.0}, "loss.tv: unknown loss; expected some of hard_ce, greedy_gce, "),
        ({"kl": 0.0}, "loss.kl 0.0: expected a weight above 0"),
        ({"soft_ce": 1.0, "kl": -1.0}, "loss.kl -1.0: "),
        ({"kl": math.nan}, "loss.kl nan: "),
        ({"kl": math.inf}, "loss.kl inf: "),
    ],
)
def test_a_bad_mix_is_named(mix, problem):
    with pytest.raises(BadInput) as caught:
        check_mix(mix, key="loss")
    assert str(caught.value).startswith(problem)


def test_in_mixed_precision_the_targets_distribution_stays_what_the_target_computes():
    weight = torch.randn(VOCAB, SIZE, generator=source(5))
    spec = LossSpec(
        mix={"soft_ce": 1.0},
        draft_logits=lambda x: x,
        predicted_state=lambda x: x,
        target_logits=lambda x: x @ weight.T,
        restricted_logits=lambda x: x @ weight[CUT].T,
    )
    states = 8 * torch.randn(NUM_ROWS, SIZE, generator=source(6))
    with torch.autocast("cpu", torch.bfloat16):
        rows = TargetRows(spec, states)
        found = rows.logits, rows.renormalised
    assert torch.equal(found[0], states @ weight.T)
    torch.testing.assert_close(found[1], (states @ weight[CUT].T).softmax(-1))
