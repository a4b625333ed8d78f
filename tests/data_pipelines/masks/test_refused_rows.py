"""A row that cannot be encoded ends no run: it is left out, counted by reason and named; if most are, it is refused."""

import json
from collections import Counter
from typing import Any

import pytest
from headstart.configs.errors import BadInput
from headstart.data_pipelines.config import DataConfig
from headstart.data_pipelines.masks.chat import encode_rows
from headstart.data_pipelines.prepare import PrepareConfig, prepare
from headstart.data_pipelines.sources import Row

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok."}]}
REFUSED = {"messages": [{"role": "system", "content": "Be kind."}, *GOOD["messages"]]}  # by gemma-2's template
BAD = [
    (REFUSED, "refused by the chat template"),
    ({"messages": [{"role": "narrator", "content": "hi"}]}, "malformed"),
    ({"messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "ok"}]}, "malformed"),
    ({"messages": [{"role": "user", "content": "hi"}]}, "malformed"),  # no answer
    ({**GOOD, "tools": "{"}, "malformed"),
    ({**GOOD, "chat_template_kwargs": {"tokenize": False}}, "malformed"),
]


def encoded(rows: list[dict[str, Any]], tokenizer: Any) -> tuple[int, Counter[str], list[str]]:
    counts, problems = Counter[str](), list[str]()
    named = (Row(row, f"a.jsonl:{line}") for line, row in enumerate(rows, start=1))
    samples = encode_rows(named, tokenizer, DataConfig(train="a.jsonl"), counts=counts, problems=problems)
    return len(list(samples)), counts, problems


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_one_bad_row_is_left_out_counted_by_reason_and_named(bad, reason, chat_tokenizer):
    num, counts, [problem] = encoded([GOOD, bad, GOOD], chat_tokenizer("gemma-2"))
    assert num == 2 and counts == Counter({"kept": 2, "dropped": 1, reason: 1, "cut": 0, "split": 0})
    assert problem.startswith("a.jsonl:2: ")


def test_if_most_rows_are_refused_the_first_is_named(chat_tokenizer):
    tokenizer = chat_tokenizer("gemma-2")
    assert encoded([GOOD, REFUSED], tokenizer)[0] == 1
    with pytest.raises(BadInput, match=r"^a.jsonl:2: .*System role.* \(2 of 3 rows are refused\)$"):
        encoded([GOOD, REFUSED, REFUSED], tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(BadInput, match="^a.jsonl:1: tokenizer of .* has no chat template"):
        encoded([GOOD, GOOD], tokenizer)


def test_ids_of_another_target_are_refused_at_once(chat_tokenizer):
    with pytest.raises(BadInput, match=r"^a.jsonl:2: input_ids\[1\] is 99999, outside the vocabulary"):
        encoded([GOOD, {"input_ids": [1, 99999], "prompt_length": 1}, GOOD], chat_tokenizer("gemma-2"))


def test_prepare_drops_what_the_template_of_its_tokenizer_refuses(chat_tokenizer, tmp_path):
    def lines(path, rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    chat_tokenizer("gemma-2").save_pretrained(tmp_path / "tokenizer")
    asked = [{"messages": [{"role": "user", "content": f"hi {i}"}, GOOD["messages"][1]]} for i in range(4)]
    rows = lines(tmp_path / "rows.jsonl", [*asked[:2], REFUSED, *asked[2:]])
    settings = {"sources": str(rows), "validation_share": 0, "tokenizer": str(tmp_path / "tokenizer")}
    card = prepare(PrepareConfig(output=str(tmp_path / "out"), **settings))
    assert card.kept == 4 and card.dropped == {"refused_by_template": 1}
    assert card.examples["refused_by_template"][0].startswith(f"{rows}:3: ")
    most = lines(tmp_path / "most.jsonl", [*asked[:1], REFUSED, REFUSED])
    with pytest.raises(BadInput, match=r"most.jsonl:2: .*\(2 of 3 rows are refused\)$"):
        prepare(PrepareConfig(output=str(tmp_path / "most"), **{**settings, "sources": str(most)}))
