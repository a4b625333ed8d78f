"""A mixture keeps its proportions wherever it is cut, the order of each source, and never repeats a row."""

import json
from collections import Counter
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
from headstart.base.errors import BadInput
from headstart.base.jsonl import read_jsonl
from headstart.configs.loader import build
from headstart.data_pipelines.masks.chat import encode_row
from headstart.data_pipelines.prepare import PrepareConfig, prepare
from headstart.data_pipelines.rows.config import DataConfig
from headstart.data_pipelines.rows.joined_chats import MOST_OPEN, SHORTEST, ChatJoiner
from headstart.data_pipelines.rows.mixture import interleave
from headstart.data_pipelines.rows.sources import Row, iter_rows
from headstart.data_pipelines.storage.shard_file import StoredSample
from headstart.eval.figures.recorded_training import prompt_hash
from headstart.targets.chat.prompts import prompt_ids
from headstart.train.training_record import learnt_prompts


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """a.jsonl, b.jsonl and c.jsonl, of 600, 300 and 30 rows."""
    monkeypatch.chdir(tmp_path)
    for name, size in (("a", 600), ("b", 300), ("c", 30)):
        lines = (json.dumps({"text": f"{name}{index}"}) + "\n" for index in range(size))
        Path(f"{name}.jsonl").write_text("".join(lines))


def mix(*weights: float | None, **how: Any) -> list[Row]:
    specs = [{"source": f"{name}.jsonl", "weight": weight} for name, weight in zip("abc", weights, strict=False)]
    return list(iter_rows(specs, **how))


def texts(rows: list[Row]) -> list[str]:
    return [row.data["text"] for row in rows]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("weights", [(2.0, 1.0), (0.7, 0.3), (5.0, 4.0)])
def test_two_sources_have_their_shares_to_within_a_row_at_every_cut(weights: tuple[float, ...], seed: int) -> None:
    counts, total = [0, 0], sum(weights)
    for row in mix(*weights, seed=seed):
        counts[row.source == "b.jsonl"] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - sum(counts) * weight / total) <= 1


def test_many_sources_have_their_shares_to_within_a_row_each() -> None:
    weights = [10.0, 5, 1, 1, 0.5]
    streams = [iter([index] * 2000) for index in range(5)]
    seen = Counter()
    for number, index in enumerate(islice(interleave(streams, weights=weights, seed=3), 3000), start=1):
        seen[index] += 1
        assert all(abs(seen[i] - number * weights[i] / sum(weights)) < len(weights) for i in range(5))


def test_each_source_keeps_its_order_and_no_row_comes_twice() -> None:
    rows = texts(mix(3.0, 2.0, 1.0))
    assert len(set(rows)) == len(rows)
    for name in "abc":
        own = [text for text in rows if text.startswith(name)]
        assert own == [f"{name}{index}" for index in range(len(own))]


def test_the_order_is_a_function_of_the_seed() -> None:
    first = texts(mix(1.0, 1.0, seed=0))
    assert texts(mix(1.0, 1.0, seed=0)) == first != texts(mix(1.0, 1.0, seed=1))
    assert texts(mix(1.0, 1.0, seed=0, num_rows=50)) == first[:50]


def test_it_ends_with_the_first_source() -> None:
    counts = Counter(row.source for row in mix(1.0, 1.0, 1.0))
    assert counts["c.jsonl"] == 30 and all(abs(count - 30) <= 1 for count in counts.values())


def test_a_source_without_a_weight_counts_one_beside_others_that_have_one() -> None:
    counts = Counter(row.source for row in mix(2.0, None))
    assert abs(counts["a.jsonl"] - 600) <= 1 and abs(counts["b.jsonl"] - 300) <= 1
    assert [row.source for row in mix(None, None)] == ["a.jsonl"] * 600 + ["b.jsonl"] * 300


def test_num_rows_of_a_source_ends_it() -> None:
    specs = [{"source": "a.jsonl", "weight": 1, "num_rows": 20}, {"source": "b.jsonl", "weight": 3}]
    counts = Counter(row.source for row in iter_rows(specs))
    assert counts["a.jsonl"] == 20 and abs(counts["b.jsonl"] - 60) <= 3


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
    return [json.loads(x) for row in rows for x in joiner.add(row, num_tokens)] + [*map(json.loads, joiner.rest())]


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


def test_answers_of_servers_are_joined_where_their_template_has_the_same_variables():
    today, later = ({"chat_template_kwargs": {"strftime_now": day}} for day in ("1 May", "2 May"))
    for row in joined([*lines(100, **today), *lines(100, **later)]):
        assert len(row["messages"]) > 2 and row["chat_template_kwargs"] in (*today.values(), *later.values())
    variables = [row["chat_template_kwargs"] for row in joined([*lines(3, **today), *lines(3, **later)])]
    assert variables == [*today.values(), *later.values()]


def test_what_cannot_be_joined_is_written_as_it_was():
    for row in (*lines(1, tools=[{"name": "add"}]), b'{"id": "0", "text": "a"}', lines(1)[0]):
        assert joined([row]) == [json.loads(row)]
    late = json.dumps({"id": "0", "source": "a", "messages": [*turns(0), *turns(1, "Be brief.")]}).encode()
    assert joined([late, late]) == [json.loads(late)] * 2, "a system prompt in the middle has its place"
    for trace in ({"reasoning_content": "Hm."}, {"content": "<think>Hm.</think>0."}, {"content": "Hm.[/THINK]0."}):
        traced = json.loads(lines(1)[0])
        traced["messages"][-1] |= trace
        assert joined([json.dumps(traced).encode()] * 2) == [traced] * 2, "templates leave out traces of earlier turns"
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
    assert card.kept == 100
    for split, written in rows.items():
        assert card.splits[split]["rows"] == len(written) < sum(len(row["messages"]) for row in written) / 4
        for row in written:
            assert len(tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)) <= 2048
    told = [turn["content"] for written in rows.values() for row in written for turn in row["messages"]]
    assert sorted(told) == sorted(turn["content"] for i in range(100) for turn in turns(i))


WITH_SYSTEM = ("chatml", "qwen2.5", "qwen3", "llama-3.1")  # whose system prompt stands at the beginning


@pytest.mark.parametrize(
    "name, system",
    [*product(WITH_SYSTEM, (None, "Be kind.")), ("gemma-2", None), ("mistral", None)],
)
def test_a_head_knows_the_prompts_of_all_chats_of_a_joined_row(name, system, chat_tokenizer):
    tokenizer = chat_tokenizer(name)
    chats = [{"id": str(i), "source": "a", "messages": turns(i, system)} for i in range(100)]
    rows = [Row(row, "a:1") for row in joined([json.dumps(chat).encode() for chat in chats])]
    samples = [StoredSample(one) for row in rows for one in encode_row(row, tokenizer, DataConfig(train="a.jsonl"))]
    learnt = learnt_prompts(samples, tokenizer)
    asked = [prompt_ids({"messages": chat["messages"][:-1]}, tokenizer, origin="a:1") for chat in chats]
    assert learnt is not None and learnt.num_rows == len(asked) > 4 * len(rows)
    assert learnt.known() == {prompt_hash(tokenizer.decode(ids)) for ids in asked}
