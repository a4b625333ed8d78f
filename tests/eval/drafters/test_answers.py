"""Answers of the target as look-ups: read as the template has them, believed as far as they are right, and never those
of prompts that are measured."""

import struct

import pytest
from drafted import told, untrained
from headstart.base.errors import BadInput
from headstart.engines.heads import save_head
from headstart.eval.decoding import generate
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.drafters.answers import Answers, load_answers
from headstart.eval.drafters.hybrid import HybridDrafter
from headstart.eval.drafters.llamacpp_cache import write_cache
from headstart.eval.drafters.lookup import SuffixDrafter
from headstart.eval.drafters.rates import LookupRates
from headstart.eval.drafters.registry import build_drafter
from headstart.eval.drafters.suffix import SuffixRow, SuffixTrie
from headstart.eval.measurement.measure import measure
from headstart.eval.plan.budget import Budget
from headstart.eval.plan.planner import PlanConfig, Planner
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.suites.prompts import ChatOptions, Suite, load_suite
from headstart.targets.chat.written_ids import AnswerIds, as_entry

PROMPTS = [[1, 5, 9, 7], [1, 7, 8, 3], [2, 4, 6, 8]]
ANSWER = {"role": "assistant", "content": "w6"}


def row_of(answers, *text):
    row = SuffixRow(SuffixTrie(max_depth=8, max_nodes=1000), answers.trie, rates=LookupRates())
    row.read_prompt(text)
    return row


def answered(target, prompts):
    texts = generate(target, None, prompts, max_new_tokens=24).token_ids
    return Answers([(list(prompt), text) for prompt, text in zip(prompts, texts, strict=True)])


def test_what_followed_in_an_answer_is_drafted_where_the_text_does_not_know():
    answers = Answers([([3], [10, 11, 12, 13]), ([3], [10, 11, 12, 14]), ([3], [10, 11, 12, 14])])
    assert row_of(answers, 7, 10).draft(3) == [11, 12, 14], "the most frequent continuation"


def test_the_source_that_was_right_more_often_decides():
    answers = Answers([([3], [10, 20])] * 4)
    row = row_of(answers, 7, 10, 30, 7, 10)
    assert row.draft(1) == [20], "four answers say so, the text once otherwise"
    for _ in range(20):
        row.extend([30, 7, 10])
    assert row.draft(1) == [30], "in this text it is always otherwise"


def test_what_was_right_is_known_to_the_next_text_of_an_engine_and_to_no_other_engine():
    """Else a setting that is measured later would draft by what earlier ones learnt of the same texts."""
    drafter, text = SuffixDrafter(answers=Answers([([3], [10, 20])] * 4)), [7, 10, 30, 7, 10]
    state = told(drafter, [text])
    for round_ in range(20):
        told(drafter, [[10, 30, 7, 10]], state=state, start=4 + 3 * round_)
    again = told(drafter, [text], state=drafter.restart(state, batch_size=1, max_length=99))
    assert drafter.propose(again, num_draft_tokens=1).tokens.tolist() == [[30]]
    assert drafter.propose(told(drafter, [text]), num_draft_tokens=1).tokens.tolist() == [[20]]


def test_the_text_is_the_targets_and_its_own_answer_is_accepted_whole(target):
    answers = answered(target, PROMPTS)
    head = untrained("eagle3", target, num_depths=3)
    drafters = [HybridDrafter(head, answers=answers), SuffixDrafter(answers=answers)]
    for drafter in drafters:
        run = generate(target, drafter, PROMPTS, max_new_tokens=24, num_draft_tokens=3)
        assert run.token_ids == [answer for _, answer in answers.rows]
        assert len(run.rounds) < 12, "of 24 tokens, though the head knows nothing"


def test_answers_to_prompts_that_are_measured_are_left_out(target):
    config = MeasureConfig(setting=chain(3), max_new_tokens=24, num_repeats=1)
    answers = answered(target, PROMPTS)
    known = SuffixDrafter(answers=answers)
    result, _ = measure(target, known, Suite("all", PROMPTS), config, name="suffix+answers")
    own, _ = measure(target, SuffixDrafter(), Suite("all", PROMPTS), config, name="suffix")
    assert result.acceptance_length == own.acceptance_length
    assert not answers.trie.child


@pytest.mark.parametrize("wording", ["w5 w6", " W5\n w6 ", [{"type": "text", "text": "w5 w6"}]])
def test_the_same_question_behind_another_system_prompt_is_left_out(wording, chat_target, written):
    """Of measurements, and of plans."""
    target = chat_target
    chats = [[("user", asked), ("assistant", f"w7 w{8 + i} w9")] for i, asked in enumerate((wording, "w20 w21"))]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    answers, prompts = written("answers.jsonl", *rows), written("prompts.jsonl", {"turns": ["w5 w6"]})
    known = SuffixDrafter(answers=load_answers(answers, target.tokenizer))
    suite = load_suite(prompts, target, max_new_tokens=8, chat=ChatOptions(system="w30 w31 w32"))
    assert known.answers is not None
    assert suite.prompts[0] not in [prompt for prompt, _ in known.answers.rows], "the tokens are others"
    measure(target, known, suite, MeasureConfig(setting=chain(2), max_new_tokens=8, num_repeats=1), name="suffix")
    assert [prompt for prompt, _ in known.answers.looked_up] == [known.answers.rows[1][0]]
    other = SuffixDrafter(answers=load_answers(answers, target.tokenizer))
    config = PlanConfig(measure=MeasureConfig(max_new_tokens=8), trees=[])
    Planner(target, other, suite, config, "suffix+answers", Budget(60.0))
    assert other.answers is not None and len(other.answers.looked_up) == 1


def read_cache(path):
    """n-gram -> token -> count, as llama.cpp reads it."""
    numbers, read = list(struct.unpack(f"={path.stat().st_size // 4}i", path.read_bytes())), {}
    while numbers:
        *ngram, count = numbers[:5]
        pairs, numbers = numbers[5 : 5 + 2 * count], numbers[5 + 2 * count :]
        read[tuple(ngram)] = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return read


def test_llama_cpps_cache_has_what_followed_each_ngram(tmp_path):
    answers = Answers([([9], [1, 2, 3]), ([9], [1, 2, 4]), ([8], [1, 2, 3])])
    num_ngrams = write_cache(answers, tmp_path)
    read, static = read_cache(tmp_path / "answers.ngrams"), read_cache(tmp_path / "bigrams.ngrams")
    assert len(read) == num_ngrams
    assert static == {ngram: behind for ngram, behind in read.items() if ngram[1] >= 0 > ngram[2]} and static
    assert read[2, -1, -1, -1] == read[1, 2, -1, -1] == {3: 2, 4: 1}
    assert read[9, 1, 2, -1] == {3: 1, 4: 1} and read[8, 1, 2, -1] == {3: 1}


def test_rows_are_read_as_the_target_reads_them(chat_target, written, tmp_path):
    rows = [{"prompt": "w10", "response": "w11"}, {"input_ids": [4, 5, 6, 7], "prompt_length": 2}]
    path = written("answers.jsonl", *rows, {"messages": [{"role": "user", "content": "w5"}, ANSWER]})
    first, *others = load_answers(path, chat_target.tokenizer).rows
    assert (first[0], first[1][:1]) == ([10], [11]) and others == [([4, 5], [6, 7]), ([10, 5, 2, 11], [6, 2])]
    head = save_head(untrained("medusa", chat_target), tmp_path / "head")
    assert build_drafter(f"suffix:{path}", chat_target)[0] == "suffix+answers"
    assert build_drafter(f"hybrid:{head}:{path}", chat_target)[0] == "hybrid+medusa+answers"


AGENT = [
    {"role": "assistant", "content": "w3"},
    {"role": "user", "content": "w5"},
    {**ANSWER, "tool_calls": [{"type": "function", "function": {"name": "w8", "arguments": {}}}]},
    {"role": "tool", "content": "w9"},
    {"role": "assistant", "content": "w7"},
    {"role": "user", "content": "w30"},
    {"role": "assistant", "content": "w31"},
]


@pytest.mark.parametrize("has_ids", [False, True])
def test_every_turn_of_the_assistant_is_looked_up(has_ids, chat_target, written):
    """Calls of tools too, which an agent writes more often than answers; each under its own question."""
    template = chat_target.tokenizer.chat_template.replace("m.role == 'tool'", "false")
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }} {% endfor %}"
    chat_target.tokenizer.chat_template = template.replace("{{ m.content }} ", "{{ m.content }} " + calls)
    begun = [11, 3, 2, 10, 5, 2, 11]
    wrote = [[6, 8, 2], [7, 2], [31, 2]]
    prompts = [begun, [*begun, 6, 8, 2, 11, 9, 2, 11], [*begun, 6, 8, 2, 11, 9, 2, 11, 7, 2, 10, 30, 2, 11]]
    answers = zip((2, 4, 6), map(AnswerIds, prompts, wrote), strict=True)
    path = written("answers.jsonl", {"messages": AGENT, **(as_entry(answers) if has_ids else {})})
    found = load_answers(path, chat_target.tokenizer)
    assert found.rows == list(zip(prompts, wrote, strict=True))
    assert found.questions == ["w5", "w5", "w30"]
    found.leave_out([], ["w5"])
    assert found.looked_up == found.rows[2:]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "no answer"}, "an answer needs `messages`"),
        ({"prompt": "hi", "response": 3}, "the answer should be text"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "should be the assistant's"),
        ({"messages": [{"role": "tool", "content": "w5"}, ANSWER]}, "the chat template refuses the messages"),
    ],
)
def test_a_row_without_an_answer_is_named(chat_target, written, row, problem):
    path = written("answers.jsonl", row)
    with pytest.raises(BadInput, match=problem) as caught:
        load_answers(path, chat_target.tokenizer)
    assert str(caught.value).startswith(f"{path}:1: ")
