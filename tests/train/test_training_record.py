"""What a head says of its training: the last validation, how prompts ended, and the same in every export."""

import json

import pytest
from headstart.data_pipelines.storage.samples import Sample
from headstart.data_pipelines.storage.shard_file import StoredSample
from headstart.data_pipelines.storage.shards import Shards, ShardWriter
from headstart.eval.measurement.result import AnswerSettings
from headstart.heads.export.write import export_head
from headstart.heads.registry import head_record
from headstart.train.training_record import answer_settings, common_ending
from run_files import validations


def test_a_head_carries_its_last_or_best_validation_and_the_form_of_its_rows(run, world, tmp_path):
    rows = f"data.validation={world / 'rows.jsonl'}"
    folder = run("eagle3", "a", rows, "train.validate_every=3", "train.decode_tokens=8", "data.max_length=24")
    validated = validations(folder)
    training = head_record(folder / "final").training or {}
    assert (training["steps"], training["validation"]) == validated[-1] and validated[-1][0] == 6
    best = head_record(folder / "best").training or {}
    assert (best["steps"], best["validation"]) == max(validated, key=lambda one: one[1]["acceptance_length"])
    assert (training["max_length"], training["num_depths"], training["target_dtype"]) == (24, 3, "float32")
    assert training["answers"] is training["target_quantization"] is None
    assert len(training["template_hash"]) == 16 and json.loads(json.dumps(training)) == training

    export_head(folder, tmp_path / "served", to="vllm")
    assert head_record(tmp_path / "served").training == training


def test_without_validation_rows_the_record_says_so(run):
    training = head_record(run("medusa", "a", "train.max_steps=1", "train.warmup_steps=0") / "final").training or {}
    assert training["validation"] is None


@pytest.mark.parametrize(
    ("prompts", "ending"),
    [
        ([[5, 9, 7, 8], [6, 7, 8], [7, 8]], [7, 8]),
        ([[5, 9, 7, 8], [6, 7, 9]], []),
        ([[5, 7, 8], [], [1]], [5, 7, 8]),  # a text, with its bos or without, says nothing of how prompts end
    ],
)
def test_the_ending_is_what_all_prompts_share(prompts, ending, tmp_path):
    writer = ShardWriter(tmp_path)
    for prompt in prompts:
        writer.add(StoredSample(Sample.of([*prompt, 3, 4, 2], [False] * len(prompt) + [True] * 3)))
    writer.finish()
    assert common_ending(Shards(tmp_path)) == ending


def test_a_later_piece_of_a_trace_is_no_prompt(tmp_path):
    writer = ShardWriter(tmp_path)
    writer.add(StoredSample(Sample.of([5, 7, 3, 4], [False, False, True, True])))
    writer.add(StoredSample(Sample.of([3, 9, 3, 4], [False, False, True, True], segments=[1, 1, 1, 1])))
    writer.finish()
    assert common_ending(Shards(tmp_path)) == [5, 7]


def test_how_answers_were_sampled_is_read_beside_them(tmp_path):
    way = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": 9, "seed": 0, "num_samples": 1, "thinking": True}
    (tmp_path / "manifest.json").write_text(json.dumps({"settings": {"sampling": {"x.jsonl": way, "y.jsonl": way}}}))
    expected = [AnswerSettings(temperature=0.7, top_p=1.0, top_k=0, thinking=True)]
    assert answer_settings(str(tmp_path / "answers.jsonl")) == expected
    assert answer_settings([str(tmp_path / "answers.jsonl"), "owner/name"]) is None
