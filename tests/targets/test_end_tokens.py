"""What ends an answer: all tokens that any source names, the same everywhere, and a line where sources contradict."""

import json

import pytest
from headstart.data_pipelines.answers.conversations import ChatRequest, SamplingConfig
from headstart.engines.layouts.writing import write_ends
from headstart.eval.decoding import generate
from headstart.eval.decoding.stopping import Stop
from headstart.scripts.data.engine_answers import EngineAnswers
from headstart.targets.end_tokens import closing_run, contradiction, said_ends
from headstart.targets.loading import TargetConfig
from headstart.targets.skeleton import load_skeleton
from headstart.targets.target import Target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|> ' + m.content + ' <|end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|stop|>"]  # ids 0 to 5


def tokenizer_of(template, eos):
    vocab = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), 61))])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="w60"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=eos, chat_template=template)


@pytest.fixture
def saved(tiny_model, tmp_path):
    """saved(generation=, config=, eos=, template=): the folder of a target whose sources name these end tokens."""

    def save(*, generation=0, config=0, eos="<|pad|>", template=TEMPLATE):
        model = tiny_model("llama")
        model.config.eos_token_id = config
        model.generation_config.eos_token_id = generation
        model.save_pretrained(tmp_path / "target")
        tokenizer_of(template, eos).save_pretrained(tmp_path / "target")
        return tmp_path / "target"

    return save


@pytest.mark.filterwarnings("ignore:target")
@pytest.mark.parametrize(
    ("sources", "ends"),
    [
        ({"config": 2}, {0, 2}),
        ({"eos": "<|end|>"}, {0, 2}),
        ({}, {0, 2}),  # the template alone closes a turn with <|end|>
        ({"generation": [0, 5], "config": 2}, {0, 2, 5}),
        ({"generation": None, "config": None, "eos": None}, {2}),
        ({"generation": 2, "config": 2, "eos": "<|end|>"}, {2}),
        ({"template": None}, {0}),
    ],
)
def test_every_source_ends_answers_in_every_path(sources, ends, saved):
    folder = saved(**sources)
    target = Target.load(folder)
    assert target.eos_token_ids == ends == load_skeleton(TargetConfig(path=str(folder))).eos_token_ids
    assert Stop.of(target).eos == ends
    if sources.get("template", TEMPLATE):
        for token in ends:
            request = ChatRequest([], None, SamplingConfig(), 0)
            answer = EngineAnswers(target).answer([1, 3, 9], [9, 8, token], request)
            assert (answer.finish_reason, answer.message["content"]) == ("stop", "w9 w8")


@pytest.mark.filterwarnings("ignore:target")
def test_an_answer_ends_with_its_turn_whatever_generation_config_says(saved):
    """Otherwise it runs on through invented turns, on which speed and acceptance are counted."""
    target = Target.load(saved(config=2))
    prompts = [[1, 3, number, 2, 4] for number in range(6, 60)]
    texts = generate(target, None, prompts, max_new_tokens=48).token_ids
    assert any(text[-1] == 2 for text in texts) and not any(2 in text[:-1] for text in texts)


def test_a_contradiction_is_one_line_with_both_values(saved):
    target = Target.load(saved(config=2))
    with pytest.warns(UserWarning) as told:
        assert target.eos_token_ids == {0, 2}
        assert target.eos_token_ids == {0, 2}
    [line] = [str(one.message) for one in told]
    wanted = "generation_config.json ends answers with [0], but config.json [2], the chat template [2]"
    assert wanted in line and "\n" not in line


@pytest.mark.filterwarnings("error")
def test_sources_that_agree_are_not_told_of(saved):
    target = Target.load(saved(generation=[2, 0], config=2, eos="<|end|>"))
    assert target.eos_token_ids == {0, 2}


@pytest.mark.parametrize(
    ("closing", "run", "said"),
    [
        ("<|end|> ", [2], {2}),
        (" <|end|> w9 <|pad|>", [2], {2}),  # what stands behind other text closes no turn
        ("<|stop|> <|end|> ", [5, 2], {2}),  # of several the last one, where none is known,
        ("<|end|> <|pad|> ", [2, 0], {0}),  # else those that are known
        ("w9 w9", [], set()),
    ],
)
def test_what_the_template_closes_a_turn_with(closing, run, said):
    tokenizer = tokenizer_of(TEMPLATE.replace(" <|end|> ", f" {closing}"), "<|pad|>")
    assert closing_run(tokenizer) == run
    assert said_ends(None, None, tokenizer).get("the chat template", frozenset()) == said


def test_a_template_that_takes_no_such_chat_says_nothing():
    assert closing_run(tokenizer_of("{{ raise_exception('no') }}", None)) == []
    assert contradiction({}, "x") is None


@pytest.mark.parametrize("has_file", [True, False])
def test_an_exported_folder_names_all_end_tokens(has_file, saved):
    folder = saved(config=2 if has_file else 0)
    path = folder / "generation_config.json"
    if not has_file:
        path.unlink()
    write_ends(folder)
    assert json.loads(path.read_text())["eos_token_id"] == [0, 2]
    before = path.read_bytes()
    write_ends(folder)
    assert path.read_bytes() == before
