"""Suites by name: rows as their authors publish them, from a folder, a file or the hub, become the same prompts."""

import pytest
from headstart.base.errors import BadInput
from headstart.eval.suites.named import MT_BENCH, SUITES, load_named, parse_suite

MT = {"question_id": 81, "category": "writing", "turns": ["w5 w6", "w7"]}
ROWS = {  # a row of each suite in its official format, and what it asks
    "spec-bench": ({"question_id": 200, "category": "rag", "turns": ["w5 w6"], "reference": ["w7"]}, "w5 w6"),
    "mt-bench": (MT, "w5 w6"),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "w5 w6", "entry_point": "w7", "canonical_solution": "w8", "test": "w9"},
        "w5 w6",
    ),
    "gsm8k": ({"question": "w5 w6", "answer": "w7 <<1+1=2>> #### 2"}, "w5 w6"),
    "mbpp": (
        {"task_id": 11, "text": "w5", "code": "w8", "test_list": ["w6", "w7"], "test_setup_code": ""},
        "w5 The code should pass these tests: w6 w7",
    ),
}


def load(spec, target, folder, **how):
    return [load_named(parse_suite(spec), target, folder=folder, **{"max_new_tokens": 8, **how})]


def asked(words, target):
    return [10, *target.tokenizer(words).input_ids, 2, 11]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("end", ["", ".gz"])
def test_a_row_of_each_suite_is_read_from_the_folder(name, end, chat_target, written, tmp_path):
    row, words = ROWS[name]
    file = SUITES[name].files[0]
    written(f"suites/{file}{end}", row)
    [suite] = load(name, chat_target, tmp_path / "suites")
    assert (suite.name, suite.prompts) == (name, [asked(words, chat_target)])


@pytest.mark.parametrize("name", ROWS)
def test_a_file_of_any_name_may_be_given(name, chat_target, written, tmp_path):
    path = written("somewhere.jsonl", ROWS[name][0])
    [suite] = load(f"{name}={path}", chat_target, tmp_path / "none")
    assert suite.name == name and suite.sources[0].row == "somewhere.jsonl:1"


def test_spec_bench_has_six_groups(chat_target, written, tmp_path):
    rest = ["translation", "summarization", "qa", "math_reasoning", "rag"]
    path = written("s.jsonl", *({"category": one, "turns": ["w5"]} for one in [*sorted(MT_BENCH), *rest]))
    [suite] = load(f"spec-bench={path}", chat_target, tmp_path)
    assert [one.domain for one in suite.sources] == ["mt_bench"] * 8 + rest
    [suite] = load(f"mt-bench={path}", chat_target, tmp_path)
    assert {one.domain for one in suite.sources} >= MT_BENCH


def test_mt_bench_is_one_suite_under_both_of_its_hub_formats(chat_target, written, tmp_path):
    other = {"prompt": MT["turns"], "prompt_id": 7, "category": "writing", "reference": []}
    suites = [load(f"mt-bench={written('m.jsonl', row)}", chat_target, tmp_path)[0] for row in (MT, other)]
    assert suites[0].digest == suites[1].digest


def test_of_all_mbpp_the_test_split_is_asked(chat_target, written, tmp_path):
    row = ROWS["mbpp"][0]
    sanitised = {"task_id": 14, "prompt": "w5", "code": "w8", "test_list": ["w6", "w7"], "test_imports": []}
    rows = [{**row, "task_id": number} for number in (1, 10, 11, 510, 511)]
    [suite] = load(f"mbpp={written('m.jsonl', *rows, sanitised)}", chat_target, tmp_path)
    assert len(suite.prompts) == 3 and suite.prompts[0] == suite.prompts[2]
    with pytest.raises(BadInput, match="^mbpp: no row of it is in the file$"):
        load(f"mbpp={written('m.jsonl', {**row, 'task_id': 600})}", chat_target, tmp_path)


def test_gsm8k_takes_the_test_rows_not_the_training_rows(chat_target, written, tmp_path):
    written("suites/gsm8k_train.jsonl", {"question": "w40", "answer": ""})
    written("suites/gsm8k_test_dev.jsonl", {"question": "w41", "answer": ""})
    [suite] = load("gsm8k", chat_target, tmp_path / "suites")
    assert suite.prompts == [asked("w41", chat_target)]


# The hub


@pytest.mark.parametrize("name", ROWS)
def test_without_a_file_the_hub_is_asked(name, chat_target, tmp_path, hub_is):
    row, words = ROWS[name]
    calls = []

    def load_dataset(*asked, **how):
        calls.append((asked, how))
        return [row]

    hub_is(load_dataset)
    [suite] = load(name, chat_target, tmp_path)
    assert suite.prompts == [asked(words, chat_target)]
    [((hub, config), how)] = calls
    assert (config, how["split"]) == (SUITES[name].config, SUITES[name].split)
    assert how.get("data_files", hub) == SUITES[name].hub and (hub == "json") == ("data_files" in how)


def test_offline_one_line_names_the_file_to_put_in_place(chat_target, tmp_path, hub_is):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nmore lines")

    hub_is(load_dataset)
    with pytest.raises(BadInput) as caught:
        load("gsm8k", chat_target, tmp_path)
    said = str(caught.value)
    assert said.startswith("--suite gsm8k: openai/gsm8k does not load (Couldn't reach") and "\n" not in said
    assert f"put {tmp_path / 'gsm8k.jsonl'} in place, or give --suite gsm8k=PATH" in said


# Refused


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("spec_bench", "--suite spec_bench: expected one of spec-bench, .*; did you mean spec-bench?"),
        ("gsm8k:main", "expected one of spec-bench, .*, or NAME=PATH"),
        ("gsm8k=gone.jsonl", "--suite gsm8k=gone.jsonl: no such file"),
    ],
)
def test_suites_that_there_are_not_are_refused(spec, problem):
    with pytest.raises(BadInput, match=problem):
        parse_suite(spec)


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_another_shape_are_refused(name, chat_target, written, tmp_path):
    with pytest.raises(BadInput, match=rf"x\.jsonl:1: a row of {name} needs `\w+`, found text"):
        load(f"{name}={written('x.jsonl', {'text': 'w5'})}", chat_target, tmp_path)
