"""The sweep over contexts: prompts of exact lengths, an entry per cell and contender, and where sparse drafts lead."""

import json
import sys

import pytest
from headstart.configs.errors import BadInput
from headstart.scripts.benchmarks import long_context


def swept(monkeypatch, path, *arguments):
    words = ["long_context", "--device", "cpu", "--repeats", "1", "--num-batches", "1", "--output", path, *arguments]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    long_context.main()
    return json.loads(path.read_text())


@pytest.mark.slow
def test_a_sweep_has_an_entry_per_cell_and_contender(saved_target, tmp_path, monkeypatch, capsys):
    rows = saved_target.with_name("rows.jsonl")
    work = ["--contexts", 20, 40, "--batch-sizes", 1, 2, "--num-draft-tokens", 2, 3, "--max-new-tokens", 17]
    found = swept(monkeypatch, tmp_path / "out.json", "--target", saved_target, "--prompts", rows, *work)
    keys = ("context", "batch_size", "drafter", "num_draft_tokens")
    contenders = [(name, k) for name in ("sparse-self", "ngram") for k in (2, 3)]
    wanted = [(context, size, *one) for context in (20, 40) for size in (1, 2) for one in contenders]
    assert [tuple(cell[key] for key in keys) for cell in found["cells"]] == wanted
    for cell in found["cells"]:
        assert cell["same_text"] and min(cell["speedup"], cell["draft_ms"], cell["baseline_ms"]) > 0
        assert cell["break_even_length"] == pytest.approx(
            (cell["draft_ms"] + cell["verify_ms"]) / cell["baseline_ms"], rel=0.01
        )
        if cell["drafter"] == "sparse-self":  # the budget holds all of it
            assert cell["acceptance_length"] == cell["num_draft_tokens"] + 1
    assert [one["batch_size"] for one in found["crossover"]] == [1, 2]
    assert "sparse-self" in capsys.readouterr().out


def test_random_weights_attend_to_what_is_near(tmp_path, monkeypatch):
    found = swept(monkeypatch, tmp_path / "out.json", "--target", "random", "--contexts", 600, "--max-new-tokens", 20)
    assert found["cells"][0]["acceptance_length"] > 3 and found["cells"][0]["same_text"]


def test_prompts_have_exactly_the_length_and_end_where_a_row_is_asked():
    rows = [([i] * 10, 4) for i in range(8)]  # of each row the first 4 tokens are the prompt
    found = long_context.prompts_of(rows, length=12, count=3)
    assert [len(one) for one in found] == [12] * 3 and len({one[-1] for one in found}) == 3
    assert all(one == [one[-1] - 1] * 8 + [one[-1]] * 4 or one[-1] < 2 for one in found)
    with pytest.raises(BadInput, match="contexts 70: the prompts make 1 of that length, expected 3"):
        long_context.prompts_of(rows, length=70, count=3)


def test_the_crossover_is_against_the_best_of_the_others():
    def cell(context, drafter, speedup):
        return {"context": context, "batch_size": 1, "drafter": drafter, "speedup": speedup}

    cells = [cell(1, "sparse-self", 0.9), cell(1, "eagle3", 0.5)]  # the baseline is ahead
    cells += [cell(2, "sparse-self", 1.5), cell(2, "sparse-self", 1.2), cell(2, "eagle3", 1.3), cell(2, "ngram", 1.6)]
    assert long_context.crossover(cells)[0]["sparse_self_ahead_from"] is None
    cells += [cell(4, "sparse-self", 1.5), cell(4, "eagle3", 1.4), cell(8, "sparse-self", 1.1), cell(8, "eagle3", 0.8)]
    assert long_context.crossover(cells) == [{"batch_size": 1, "sparse_self_ahead_from": 4, "ahead_at": [4, 8]}]
