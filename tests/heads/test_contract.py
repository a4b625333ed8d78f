"""The promises of every head in HEADS, and of the example's. A family gets all of them by appearing in the table.

Of families that compute in several ways, variants.json lists the options, each of which must keep the promises.
"""

import json
import runpy
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.engines.export import engines_of
from headstart.engines.heads import HEADS, build_head, load_head, save_head
from headstart.eval.decoding import generate, verify
from headstart.heads.base import DraftBatch, DraftHead, chain_starts
from headstart.heads.drafting.drafter import Reading
from perturbing import losses_on, perturb

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34]]
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_family.py"
GOLDEN = json.loads(Path(__file__).with_name("golden_names.json").read_text())
VARIANTS = json.loads(Path(__file__).with_name("variants.json").read_text())


OWN = "hydra"  # of examples/own_family.py, which is no family of the package
CASES = [" ".join([name, *words]) for name in sorted(HEADS) for words in ([], *([v] for v in VARIANTS.get(name, [])))]
CASES += [] if OWN in HEADS else [OWN]


@pytest.fixture(autouse=True)
def own_family(monkeypatch):
    """The example's family is known to these tests alone."""
    if OWN not in HEADS:
        with monkeypatch.context() as importing:
            importing.setitem(HEADS, OWN, HEADS["medusa"])  # the example sets it: taken away behind this
            family = runpy.run_path(str(EXAMPLE))["HydraHead"]
        monkeypatch.setitem(HEADS, OWN, family)


@pytest.fixture(params=CASES)
def head_type(request) -> str:
    """Every family in the registry, and its variants: its name, then `key=value`."""
    return request.param


def fresh(head_type, target, *, trained_looking=False, **changes) -> DraftHead:
    """An untrained head; `trained_looking` perturbs its weights, so that no zero or copied one hides a fault."""
    family, *words = head_type.split()
    options = {key: json.loads(value) for key, value in (word.split("=") for word in words)}
    drafted = None
    if "draft_vocab_size" in options:  # of small targets, fewer
        drafted = torch.arange(0, target.vocab_size, 3)[: options["draft_vocab_size"]]
        options["draft_vocab_size"] = len(drafted)
    config = HEADS[family].config_class(type=family, **{**options, **changes})
    head = build_head(config, target, draft_token_ids=drafted, seed=1)
    if trained_looking:
        perturb(head, 0.1, seed=3)
    return head.eval()


@pytest.fixture(scope="module")
def references(target) -> list[list[int]]:
    """The greedy texts by transformers' own generate."""
    how = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    rows = [torch.tensor([prompt]) for prompt in PROMPTS]
    model = target.model
    return [model.generate(row, attention_mask=torch.ones_like(row), **how)[0, row.shape[1] :].tolist() for row in rows]


@pytest.fixture(scope="module")
def beyond(tiny_target):
    """beyond(family): the target, and what it writes behind each prompt, longer than a test decodes."""

    @cache
    def write(family):
        target = tiny_target(family)
        return target, generate(target, None, PROMPTS, max_new_tokens=44, eos_token_ids=[]).token_ids

    return write


def test_every_parameter_learns(head_type, target, make_batch):
    head = fresh(head_type, target, trained_looking=True).train()
    head.loss(make_batch(target, head)).loss.backward()
    trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
    assert all(p.grad is None for name, p in head.named_parameters() if name not in trained)
    assert all(p.grad is None for p in target.model.parameters())


@pytest.mark.fast_only(head_type=["eagle3", "medusa"])
def test_processes_that_share_rows_learn_what_one_would(head_type, target, make_batch):
    head = fresh(head_type, target, trained_looking=True)
    batch = make_batch(target, head)
    starts = head.training_starts(batch.loss_mask)

    def learned(parts):
        losses = [head.loss(replace(batch, starts=part), starts.counts(batch.weights)).loss for part in parts]
        sum(losses).backward()
        gradients = [p.grad.clone() for p in head.parameters() if p.grad is not None]
        head.zero_grad()
        return torch.stack([sum(losses).detach(), *(gradient.norm() for gradient in gradients)]), gradients

    most = starts.positions.shape[1]
    for num in (2, most + 1):  # the last of these has no chain left
        (figures, gradients), (whole, expected) = learned([starts.part(i, num) for i in range(num)]), learned([starts])
        torch.testing.assert_close(figures, whole, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-4)


def test_no_supervised_token_still_gives_every_parameter_a_gradient(head_type, target, make_batch):
    """Else data-parallel ranks would wait for each other for ever."""
    head = fresh(head_type, target).train()
    batch = make_batch(target, head)
    out = head.loss(DraftBatch(batch.input_ids, torch.zeros_like(batch.loss_mask), batch.output))
    out.loss.backward()
    assert out.loss.item() == 0
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in head.parameters() if p.requires_grad)


def test_draft_equals_teacher_forced(head_type, target):
    """On a row that goes on with the head's own drafts, training scores the very logits that drafting had."""
    head = fresh(head_type, target, trained_looking=True)
    prefix = torch.tensor([[1, 9, 14, 33, 20, 7, 7, 51]])  # x_0 .. x_{t+1}
    num_read = prefix.shape[1] - 1
    state = head.begin(batch_size=1, max_length=64)
    output = target.forward(prefix[:, :-1], feature_layers=head.feature_layers)
    read = Reading(prefix[:, :-1], prefix[:, 1:], output, torch.tensor([0]), torch.tensor([num_read]))
    for _ in range(2):  # what is committed again changes nothing, whatever was drafted in between
        head.commit(state, read)
        drafted = head.propose(state, num_draft_tokens=head.num_depths)

    row = torch.cat([prefix, drafted.tokens, torch.tensor([[3, 4]])], 1)
    mask = torch.arange(row.shape[1])[None] >= num_read
    batch = DraftBatch(row, mask, target.forward(row, feature_layers=head.feature_layers))
    starts, logits = head.teacher_forced_logits(batch)
    assert starts.positions[0, 0] == num_read - 1, "the first chain starts at the last prompt position"
    assert starts.valid[0, 0].all()
    torch.testing.assert_close(logits[0, 0], torch.cat(drafted.logits), rtol=1e-4, atol=1e-4)


# those with layers of the target's kind also behind sliding windows
TREES = [(case, "llama") for case in CASES]
OF_ITS_KIND = [case for case in CASES if case.split()[0] in ("draft_lm", "mtp")]
TREES += [(case, family) for case in OF_ITS_KIND for family in ("mistral", "gemma3")]


@torch.no_grad()
@pytest.mark.parametrize(("head_type", "family"), TREES)
def test_a_trees_nodes_score_what_training_scores_along_their_paths(head_type, family, tiny_target):
    """Two rows of different lengths, each with a tree of its own: parents cross, repeat and are left out."""
    target = tiny_target(family)
    head = fresh(head_type, target, trained_looking=True)
    texts, num_depths = [[1, 9, 14, 33, 20, 7, 51, 8], [1, 33]], head.max_draft_tokens or 4
    tokens = torch.tensor([text + [0] * (8 - len(text)) for text in texts])
    state = head.begin(batch_size=2, max_length=64)
    output = target.forward(tokens, feature_layers=head.feature_layers)
    head.commit(state, Reading(tokens, tokens.roll(-1, 1), output, torch.tensor([0, 0]), torch.tensor([7, 1])))
    head.first_logits(state)
    levels = [  # tokens and parents [2, F] per depth
        ([[5, 6, 7], [8, 9, 10]], [[0, 0, 0], [0, 0, 0]]),
        ([[11, 12, 13, 14], [15, 16, 17, 18]], [[2, 0, 0, 1], [1, 1, 0, 2]]),
        ([[19, 20], [21, 22]], [[3, 0], [2, 2]]),
    ]
    paths: list[list[list[int]]] = [[[]], [[]]]
    for depth, (ids, parents) in enumerate(levels[: num_depths - 1], 1):
        logits = head.expand(state, torch.tensor(ids), torch.tensor(parents), depth=depth)  # [2, F, Vd]
        paths = [[[*paths[r][p], x] for x, p in zip(ids[r], parents[r], strict=True)] for r in (0, 1)]
        for r, node in product((0, 1), range(len(ids[0]))):
            row = torch.tensor([[*texts[r], *paths[r][node], 3, 4]])
            mask = torch.arange(row.shape[1])[None] >= len(texts[r]) - 1
            batch = DraftBatch(row, mask, target.forward(row, feature_layers=head.feature_layers))
            starts, taught = head.teacher_forced_logits(batch, num_depths=num_depths)
            assert starts.positions[0, 0] == len(texts[r]) - 2
            torch.testing.assert_close(logits[r, node], taught[0, 0, depth], rtol=1e-4, atol=1e-4)


@pytest.mark.fast_only(head_type=sorted(HEADS))
@pytest.mark.parametrize(
    ("head_type", "family"), [*((case, "llama") for case in CASES), *((name, "gemma3") for name in sorted(HEADS))]
)
def test_decoding_drafts_what_training_scored(head_type, family, beyond):
    """Over whole ragged batches: the rounds counted in decoding are those that teacher-forced drafts predict."""
    target, whole = beyond(family)
    head = fresh(head_type, target, trained_looking=True)
    text = generate(target, head, PROMPTS, max_new_tokens=24, eos_token_ids=[])
    for i, (prompt, new) in enumerate(zip(PROMPTS, text.token_ids, strict=True)):
        num_draft = text.rounds[1].num_drafted
        # as long as decoding looked ahead: then no chain is cut short by the end of the text
        more = whole[i][: 24 + num_draft + 1]
        assert len(more) == 24 + num_draft + 1
        assert more[:24] == new
        ids = torch.tensor([prompt + more])
        mask = torch.arange(ids.shape[1])[None] >= len(prompt)
        out = head.loss(DraftBatch(ids, mask, target.forward(ids, feature_layers=head.feature_layers)))
        accepted = out.hits[0, :, :num_draft].long().cumprod(-1).sum(-1).tolist()
        at = len(prompt) - 1
        for one in text.rounds[1:]:
            if one.num_committed[i] == 0:
                break
            assert accepted[out.starts.positions[0].tolist().index(at)] == one.num_accepted[i]
            at += one.num_committed[i]


@pytest.mark.fast_only(head_type=sorted(HEADS))  # variants: the test above has their texts too
def test_greedy_is_lossless(head_type, target, references):
    """For an untrained and a perturbed head, in a ragged batch and row by row, K 1 and the most."""
    untrained, head = fresh(head_type, target), fresh(head_type, target, trained_looking=True)
    most = head.max_draft_tokens or 7
    for one, num_draft in ((untrained, 1), (head, most)):
        assert generate(target, one, PROMPTS, max_new_tokens=16, num_draft_tokens=num_draft).token_ids == references
    alone = [generate(target, head, prompt, max_new_tokens=16).token_ids[0] for prompt in PROMPTS[1:3]]
    assert alone == references[1:3]


def test_the_target_alone_samples_its_own_distribution(tiny_target, chi_square):
    assert chi_square(tiny_target("llama", vocab_size=6, eos_token_id=None, num_hidden_layers=2), None) < 1.5


@pytest.mark.parametrize("head_type", ["eagle3"])  # the engine is the same for all
@pytest.mark.parametrize("mutation", ["greedy behind accepted drafts", "one draft too many accepted"])
def test_a_lossy_engine_is_caught(head_type, mutation, tiny_target, monkeypatch, chi_square):
    """What tests of the distribution must be able to see."""
    target = tiny_target("llama", vocab_size=6, eos_token_id=None, num_hidden_layers=2)
    head = fresh(head_type, target, trained_looking=True, num_depths=2)
    sampled, accepted = verify.choose_tokens, verify.accept_chain

    def greedy_behind(logits, *args, **how):
        return torch.cat([sampled(logits, *args, **how)[:, :1], logits[:, 1:].argmax(-1)], 1)

    def one_too_many(chosen, drafted):
        return (accepted(chosen, drafted) + 1).clamp(max=drafted.shape[1])

    name, broken = ("choose_tokens", greedy_behind) if "greedy" in mutation else ("accept_chain", one_too_many)
    monkeypatch.setattr(f"headstart.eval.decoding.verify.{name}", broken)
    assert chi_square(target, head, num_new=3) > 3


@pytest.mark.fast_only(head_type=sorted(HEADS))
def test_loss_falls(head_type, target, make_batch):
    head = fresh(head_type, target).train()
    losses = losses_on(head, make_batch(target, head), lr=6e-3, num_steps=10)
    assert losses[-1] < 0.9 * losses[0], losses


def test_save_load_is_identity(head_type, target, make_batch, tmp_path):
    head = fresh(head_type, target, trained_looking=True)
    loaded = load_head(save_head(head, tmp_path / "head"), target)
    batch = make_batch(target, head)
    assert loaded.config == head.config
    assert torch.equal(loaded.teacher_forced_logits(batch)[1], head.teacher_forced_logits(batch)[1])


@pytest.mark.parametrize("head_type", ["eagle3"])  # told by the folder, which is the same for all
def test_a_head_of_another_target_is_refused(head_type, target, tiny_target, tmp_path):
    save_head(fresh(head_type, target), tmp_path / "head")
    with pytest.raises(BadInput, match=r"trained on target tiny-llama .* not on tiny-qwen3"):
        load_head(tmp_path / "head", tiny_target("qwen3"))


@pytest.mark.parametrize("head_type", [*sorted(HEADS), OWN])
def test_served_names_and_shapes_are_frozen(head_type, target):
    """What engines load, at D 32, V 61, 2 key heads of 4, H 8, FFN 48: a change here breaks every trained head."""
    if head_type not in GOLDEN:
        assert not engines_of(head_type), "engines load this family: freeze its names in golden_names.json"
        return
    head = fresh(head_type, target, num_depths=2)
    assert {name: list(value.shape) for name, value in head.state_dict().items()} == GOLDEN[head_type]


def test_target_stays_outside(head_type, target):
    head = fresh(head_type, target)
    held = {id(p) for p in target.model.parameters()}
    assert not any(id(p) in held for p in head.parameters())


def test_same_seed_same_weights(head_type, target):
    first, second = fresh(head_type, target), fresh(head_type, target)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_chain_starts_begin_at_the_last_prompt_position():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0, 0, 0]]).bool()
    starts = chain_starts(mask, 3)
    assert starts.positions[0, :3].tolist() == [1, 2, 5]
    assert starts.valid[0].tolist() == [[True, True, False], [True, False, False], [True, False, False]]
    assert not starts.valid[1].any(), "an answer of one token leaves nothing to draft"
