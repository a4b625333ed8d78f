"""Sampling through drafts is lossless: joint counts of four tokens against exact enumeration, chi-square.

NUM_TABLES random targets and drafts over V tokens, each a table of logits given the last two tokens, share the rows of
one run; each run is one round over a drafted chain or tree, continued by plain samples where it committed fewer than
four. Best guesses are verified in trees, drawn tokens in chains.
"""

import pytest
import torch
from headstart.eval.decoding import verify
from headstart.eval.decoding.sampling import Sampling, random_keys, target_probs
from headstart.eval.decoding.verify import ACCEPT_RULES, AcceptRule, Candidates, accept_sampled, accept_tree

V, NUM_TABLES = 5, 4
NUM_ROWS = 50_000  # enough to see a fault: see the last tests
TREES = {  # parents; of several, row i has the (i // NUM_TABLES)-th in turn
    "chain of 3": [[-1, 0, 1]],
    "3 children": [[-1, -1, -1]],
    "2 x 2": [[-1, -1, 0, 0, 1, 1]],
    "ragged": [[-1, -1, 0, 0, 2, -1, 1]],
    "one per row": [[-1, 0, -1, 1, 1, 0], [-1, -1, 0, 1, -1, 2]],
}
DEPTH = 3
RAW = Sampling(temperature=1.0)
MOST = 1.4  # of chi-square per degree of freedom: by chance it has a deviation of 0.10 to 0.16 over 75 to 200 cells


def sample(weights, source):
    """A token by its weight, of each [..., V]: where the running sum passes a uniform number."""
    sums = weights.cumsum(-1)
    limit = torch.rand(weights.shape[:-1], generator=source)[..., None] * sums[..., -1:]
    return (sums <= limit).sum(-1).clamp(max=weights.shape[-1] - 1)


HOWS = [
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.0, top_p=0.9, top_k=3),
]


class Setting:
    """Targets and drafts, and what one round over a tree commits.

    draft: `close` to the target, or `sharp`: unlike it and sure of itself.
    """

    def __init__(self, tree: str, *, how: Sampling, draft: str = "close", seed: int = 0):
        self.source = torch.Generator().manual_seed(seed)
        shape = (NUM_TABLES, V, V, V)  # [table, last but one, last, V]
        self.logits = 1.5 * torch.randn(shape, generator=self.source)
        noise = torch.randn(shape, generator=self.source)
        draft_logits = self.logits + 0.7 * noise if draft == "close" else 2 * self.logits + 2 * noise
        self.target, self.draft = target_probs(self.logits, how), draft_logits.softmax(-1)
        self.how, self.rows = how, torch.arange(NUM_ROWS)
        self.table = self.rows % NUM_TABLES
        trees = torch.tensor(TREES.get(tree, [[-1]]))
        self.parents = trees[self.rows // NUM_TABLES % len(trees)]  # [B, S]

    def grow(self, *, sampled: bool) -> None:
        """Draft the tree: of a node the most probable children, or drawn ones."""
        rows, num_nodes = self.rows, self.parents.shape[1]
        self.before = torch.zeros(len(rows), num_nodes + 1, dtype=torch.long)  # [B, S + 1] last token but one
        self.last = torch.ones_like(self.before)  # [B, S + 1]
        self.draft_probs = torch.zeros(len(rows), num_nodes + 1, V)
        self.draft_probs[:, 0] = self.draft[self.table, 0, 1]
        left = self.draft_probs.clone()
        for j in range(num_nodes):
            parent = self.parents[:, j] + 1
            weights = left[rows, parent]  # [B, V]
            token = sample(weights, self.source) if sampled else weights.argmax(-1)
            left[rows, parent, token] = 0
            self.before[:, j + 1], self.last[:, j + 1] = self.last[rows, parent], token
            self.draft_probs[:, j + 1] = self.draft[self.table, self.last[rows, parent], token]
            left[:, j + 1] = self.draft_probs[:, j + 1]
        self.drafted = self.last[:, 1:]

    def at_nodes(self, tables):
        """The rows [B, S + 1, V] of the tables at the root and behind each node."""
        return tables[self.table[:, None], self.before, self.last]

    def accept(self, rule: str):
        """deterministic: children of the draft's order, the target's choice followed. sampled: rejection of a chain."""
        self.grow(sampled=rule == "sampled")
        if rule == "deterministic":
            chosen = sample(self.at_nodes(self.target), self.source)
            return accept_tree(chosen, self.drafted, self.parents, depth=DEPTH)
        probs = self.at_nodes(self.target)
        return accept_sampled(probs, self.draft_probs[:, :-1], self.drafted, generator=self.source)

    def accept_by(self, rule: AcceptRule, *, sampled: bool, offered: torch.Tensor | None = None):
        """By a rule of the table: of best guesses, or of drawn ones; of a chain perhaps only `offered` ones.

        The rule processes the target's logits for these; for all, which are many, it gets processed ones."""
        self.grow(sampled=sampled)
        logits, how = (self.target.log(), RAW) if offered is None else (self.logits, self.how)
        drafted = Candidates(
            tokens=self.drafted,
            parents=self.parents,
            depth=DEPTH,
            is_chain=bool((self.parents == torch.arange(-1, self.parents.shape[1] - 1)).all()),
            read_logits=lambda: self.at_nodes(logits),
            read_best=None,
            draft_probs=self.draft_probs[:, :-1] if sampled else None,
            sampling=how,
            keys=random_keys([NUM_ROWS, self.parents.shape[1] + 1], torch.device("cpu"), self.source),
            generator=self.source,
            offered=offered,
        )
        return rule(drafted)

    def text(self, result):
        """The first four tokens [B, 4]: accepted, bonus, then plain samples of the target."""
        before, last = torch.zeros_like(self.rows), torch.ones_like(self.rows)
        tokens = []
        for i in range(DEPTH + 1):
            plain = sample(self.target[self.table, before, last], self.source)
            node = result.path[:, min(i, DEPTH - 1)]
            token = torch.where(result.num_accepted == i, result.bonus, plain)
            token = torch.where(result.num_accepted > i, self.drafted[self.rows, node], token)
            tokens.append(token)
            before, last = last, token
        return torch.stack(tokens, 1)

    def chi_square(self, result) -> float:
        """Per degree of freedom, of the joint counts of four tokens in every table."""
        expected = torch.bincount(self.table, minlength=NUM_TABLES).double()[:, None, None] * self.target[:, :1, 1]
        code, pairs = self.table, self.target[:, 1:2]  # [M, 1, V] so far; pairs [M, 1, V, V] given its last two
        for _ in range(DEPTH):
            expected = (expected[..., None] * pairs).flatten(1, 2)  # [M, cells, V]
            pairs = self.target.repeat(1, expected.shape[1] // V, 1, 1)
        for token in self.text(result).unbind(1):
            code = code * V + token
        expected = expected.flatten()
        counts = torch.bincount(code, minlength=len(expected)).double()
        big = expected >= 5
        terms = (counts - expected)[big] ** 2 / expected[big]
        small = (counts[~big].sum() - expected[~big].sum()) ** 2 / expected[~big].sum().clamp(min=1)
        return float((terms.sum() + small) / (int(big.sum()) + 1 - NUM_TABLES))


# Lossless


WAYS = {  # whether children are sampled, how the target is, and how like it the draft is
    "guessed, sharp": (False, HOWS[0], "close"),
    "guessed, top-k": (False, HOWS[1], "close"),
    "sampled, raw": (True, RAW, "sharp"),
    "sampled, sharp": (True, HOWS[0], "close"),
}


GUESSED, SAMPLED = [way for way in WAYS if not WAYS[way][0]], [way for way in WAYS if WAYS[way][0]]
CASES = [(tree, GUESSED[i % 2]) for i, tree in enumerate(TREES)] + [("chain of 3", way) for way in SAMPLED]


@pytest.mark.fast_only(tree=["chain of 3"])
@pytest.mark.parametrize(
    ("tree", "sampled", "how", "draft"),
    [(tree, *WAYS[way]) for tree, way in CASES],
    ids=[f"{way}, {tree}" for tree, way in CASES],
)
@pytest.mark.parametrize("rule", ACCEPT_RULES.values(), ids=lambda rule: rule.name)
def test_a_rule_of_the_table_is_lossless(rule, sampled, how, draft, tree):
    if sampled or not rule.needs_draft_probs:
        setting = Setting(tree, how=how, draft=draft)
        assert setting.chi_square(setting.accept_by(rule, sampled=sampled)) < MOST


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rule", ACCEPT_RULES.values(), ids=lambda rule: rule.name)
def test_it_is_where_only_some_drafts_of_a_chain_are_verified(rule, sampled):
    if sampled or not rule.needs_draft_probs:
        setting = Setting("chain of 3", how=HOWS[0])
        offered = setting.rows // NUM_TABLES % (DEPTH + 1)
        result = setting.accept_by(rule, sampled=sampled, offered=offered)
        assert (result.num_accepted <= offered).all() and setting.chi_square(result) < MOST


def test_one_drawn_token_stands_as_often_as_the_distributions_overlap():
    setting = Setting("one child", how=RAW, draft="sharp")
    rate = setting.accept("sampled").num_accepted.double().mean().item()
    overlap = torch.minimum(setting.target, setting.draft)[:, 0, 1].sum(-1).mean().item()
    assert abs(rate - overlap) < 4 * (overlap * (1 - overlap) / NUM_ROWS) ** 0.5


# What these tests must be able to see


@pytest.mark.parametrize("residual", [lambda target, draft, token: target, lambda target, draft, token: draft])
def test_a_rejection_that_takes_the_draft_for_nothing_or_for_the_target_is_caught(residual, monkeypatch):
    monkeypatch.setattr(verify, "residual_behind", residual)
    setting = Setting("chain of 3", how=RAW, draft="sharp")
    assert setting.chi_square(setting.accept("sampled")) > 3


@pytest.mark.fast_only(tree=["chain of 3"])
@pytest.mark.parametrize(("tree", "rule"), [("chain of 3", "sampled"), ("ragged", "deterministic")])
def test_a_bonus_token_without_logits_processing_is_caught(tree, rule):
    """As the first EAGLE did where a whole path was accepted."""
    setting = Setting(tree, how=HOWS[0])
    result = setting.accept(rule)
    num = result.num_accepted
    node = torch.where(num > 0, result.path.gather(1, (num - 1).clamp(min=0)[:, None])[:, 0], -1)
    leaf = ~(setting.parents == node[:, None]).any(1)
    raw = setting.at_nodes(setting.logits)[setting.rows, node + 1].softmax(-1)
    result.bonus = torch.where(leaf, sample(raw, setting.source), result.bonus)
    assert setting.chi_square(result) > 3
