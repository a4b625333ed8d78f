"""The smoke run's corpus keeps its promises: checkable answers, disjoint splits, the same text for the same seed."""

import ast
import re

import pytest
from headstart.benchmarks.quickstart import toy_corpus
from headstart.benchmarks.quickstart.toy_corpus import (
    FAMILIES,
    contrast_prompts,
    is_right,
    python_sources,
    reasoning_problems,
)

PROBLEMS = reasoning_problems(800, 0)


def _questions(problems: list[dict]) -> set[str]:
    return {problem["messages"][0]["content"] for problem in problems}


def test_every_reference_answer_is_right() -> None:
    assert all(is_right(problem, problem["messages"][1]["content"]) for problem in PROBLEMS)


@pytest.mark.parametrize("kind", FAMILIES)
def test_another_problems_answer_is_wrong(kind: str) -> None:
    problems = [problem for problem in PROBLEMS if problem["kind"] == kind]
    pairs = [(one, two) for one in problems[:20] for two in problems if one["answer"] != two["answer"]]
    assert pairs
    assert not any(is_right(one, two["messages"][1]["content"]) for one, two in pairs)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("12", "The answer is 12."),
        ("12", "<think>\nIt is 12."),
        ("12", "<think>\n12\n</think>\n\nThe answer is 121."),
        ("12", "<think>\n12\n</think>\n\nThe answer is 12 or 13."),
        ("Mia 3", "<think>\n</think>\n\nMia or Ben has 3."),
        ("Mia 3", "<think>\n</think>\n\n"),
    ],
)
def test_open_traces_and_vague_answers_are_wrong(answer: str, text: str) -> None:
    assert not is_right({"answer": answer}, text)


def test_reference_traces_open_and_close_once() -> None:
    for problem in PROBLEMS:
        assert [message["role"] for message in problem["messages"]] == ["user", "assistant"]
        content = problem["messages"][1]["content"]
        assert content.startswith("<think>\n") and content.count("</think>\n\n") == 1


def test_every_sum_in_a_trace_is_true() -> None:
    sums = [s for p in PROBLEMS for s in re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", p["messages"][1]["content"])]
    assert len(sums) > len(PROBLEMS)
    assert all(int(a) + int(b) * (1 if sign == "+" else -1) == int(c) for a, sign, b, c in sums)


def test_all_kinds_occur_and_held_out_questions_are_distinct() -> None:
    assert {problem["kind"] for problem in PROBLEMS} == set(FAMILIES)
    held_out = reasoning_problems(300, 0, held_out=True)
    assert len(_questions(held_out)) == len(held_out)


def test_held_out_questions_never_occur_in_training_whatever_the_seed() -> None:
    held_out = _questions(reasoning_problems(400, 0, held_out=True))
    for seed in (0, 1, 2):
        assert not held_out & _questions(reasoning_problems(2000, seed))


def test_the_seed_decides_the_corpus() -> None:
    assert reasoning_problems(50, 3) == reasoning_problems(50, 3) != reasoning_problems(50, 4)
    assert contrast_prompts(8, 3) == contrast_prompts(8, 3) != contrast_prompts(8, 4)
    assert python_sources(3) == python_sources(3)


def test_sources_split_by_file_and_respect_their_sizes() -> None:
    train, held_out = python_sources(0, num_chars=50_000, chars_per_file=5_000)
    assert 50_000 <= sum(map(len, train)) < 55_000
    assert held_out and not set(train) & set(held_out)
    assert max(map(len, train + held_out)) <= 5_000


def test_undecodable_and_unreadable_sources_are_passed_over(tmp_path, monkeypatch) -> None:
    (tmp_path / "bad.py").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "good.py").write_text("def good(): pass\n")
    monkeypatch.setattr(toy_corpus.os, "__file__", str(tmp_path / "os.py"))
    train, held_out = python_sources(0)
    assert train + held_out == ["def good(): pass\n"]


def test_contrast_prompts_are_distinct_passages_of_held_out_files() -> None:
    prompts, held_out = contrast_prompts(32, 0), python_sources(0)[1]
    assert len(set(prompts)) == 32
    for prompt in prompts:
        assert prompt.startswith(("def ", "class ")) and 100 <= len(prompt) <= 261
        assert any(prompt in text for text in held_out)


def test_the_corpus_needs_only_the_standard_library() -> None:
    with open(toy_corpus.__file__) as source:
        tree = ast.parse(source.read())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"os", "random", "re", "zlib", "collections.abc", "pathlib"}
