"""Short chats joined to long rows: nothing lost or repeated, every row within its length, long and short ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from headstart.configs.errors import BadInput
from headstart.configs.jsonl import read_jsonl
from headstart.configs.loader import build
from headstart.data_pipelines.joined_chats import MOST_OPEN, SHORTEST, ChatJoiner
from headstart.data_pipelines.prepare import PrepareConfig, prepare

LONGEST = 4000


def lines(num: int, **more: Any) -> list[bytes]:
    """Rows of one question and answer, as `headstart data prepare` writes them."""
    return [json.dumps({"id": f"{i:032x}", "source": "a", "messages": turns(i), **more}).encode() for i in range(num)]


def turns(number: int, system: str | None = None) -> list[dict[str, str]]:
    said = [{"role": "system", "content": system}] if system else []
    question, answer = f"How much is {number} and {number}?", f"It is {2 * number}."
    return [*said, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def joined(rows: list[bytes], num_tokens: int = 100) -> list[dict[str, Any]]:
    joiner = ChatJoiner(LONGEST, seed=0)
    return [json.loads(line) for row in rows for line in joiner.add(row, num_tokens)] + list(
        map(json.loads, joiner.rest())
    )


def test_every_turn_is_in_one_row_in_its_order_and_no_row_is_too_long():
    rows = joined(lines(2000))
    assert [turn for row in rows for turn in row["messages"]] == [turn for i in range(2000) for turn in turns(i)]
    lengths = [100 * len(row["messages"]) // 2 for row in rows]
    assert max(lengths) <= LONGEST and len({row["id"] for row in rows}) == len(rows)
    # log-uniform: about as many below the geometric mean of the ends as above
    middle = (SHORTEST * LONGEST) ** 0.5
    assert 0.35 < sum(length < middle for length in lengths) / len(lengths) < 0.65


def test_chats_of_different_system_prompts_are_not_mixed_and_each_prompt_is_said_once():
    rows = [
        json.dumps({"id": str(i), "source": "a", "messages": turns(i, f"Be {i % 2}.")}).encode() for i in range(200)
    ]
    for row in joined(rows):
        system, *others = row["messages"]
        assert system["role"] == "system" and all(turn["role"] != "system" for turn in others)
        numbers = [int(turn["content"].split()[3]) for turn in others if turn["role"] == "user"]
        assert {f"Be {number % 2}." for number in numbers} == {system["content"]}


def test_what_cannot_be_joined_is_written_as_it_was():
    for row in (*lines(1, tools=[{"name": "add"}]), b'{"id": "0", "text": "a"}', lines(1)[0]):
        assert joined([row]) == [json.loads(row)]
    late = json.dumps({"id": "0", "source": "a", "messages": [*turns(0), *turns(1, "Be brief.")]}).encode()
    assert joined([late, late]) == [json.loads(late)] * 2, "a system prompt in the middle has its place"
    [long, after] = joined(lines(2), num_tokens=LONGEST)
    assert long["messages"] == turns(0) and after["messages"] == turns(1)


def test_memory_is_bounded_where_every_chat_has_a_system_prompt_of_its_own():
    joiner = ChatJoiner(LONGEST, seed=0)
    for i in range(MOST_OPEN + 50):
        row = {"id": str(i), "source": "a", "messages": turns(i, str(i))}
        num = len(list(joiner.add(json.dumps(row).encode(), 10)))
        assert num == (i >= MOST_OPEN)
    assert len(list(joiner.rest())) == MOST_OPEN


def test_a_prepared_data_set_is_joined_and_counted(chat_tokenizer, tmp_path):
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    source, output = tmp_path / "chats.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"messages": turns(i)}) + "\n" for i in range(100)))
    settings = {"sources": str(source), "output": str(output), "join_tokens": 2048, "validation_share": 0.2}
    with pytest.raises(BadInput, match="join_tokens needs a tokenizer"):
        build(PrepareConfig, settings)
    with pytest.raises(BadInput, match="join_tokens 16: expected 256 or more"):
        build(PrepareConfig, {**settings, "join_tokens": 16, "tokenizer": str(tmp_path / "tokenizer")})
    card = prepare(build(PrepareConfig, {**settings, "tokenizer": str(tmp_path / "tokenizer")}))
    rows = {split: read_jsonl(Path(output, f"{split}.jsonl")) for split in ("train", "validation")}
    assert card.kept == 100 and sum(split.turns for split in card.splits.values()) == 200
    for split, written in rows.items():
        assert card.splits[split].rows == len(written) < card.splits[split].turns / 2
        for row in written:
            assert len(tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)) <= 2048
    told = [turn["content"] for written in rows.values() for row in written for turn in row["messages"]]
    assert sorted(told) == sorted(turn["content"] for i in range(100) for turn in turns(i))
