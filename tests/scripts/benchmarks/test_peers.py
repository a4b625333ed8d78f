"""What other trainers are given is what ours are: the same rows in the same states; and their runs leave figures."""

import json
from itertools import islice

import pytest
import torch
from headstart.scripts.benchmarks.peers import train as peers
from headstart.scripts.benchmarks.peers.judge import acceptance
from headstart.scripts.benchmarks.peers.rows import token_row
from headstart.scripts.benchmarks.peers.work import FrozenTarget, Row, batches, frequent_tokens, read_rows
from transformers import LlamaConfig, LlamaForCausalLM

ROWS = [Row([1, 5, 7, 7, 9], 2), Row([1, 4, 7, 3], 1), Row([1, 2, 9], 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2)
    )
    path = tmp_path_factory.mktemp("target")
    model.save_pretrained(path)
    return str(path)


def test_padding_changes_no_state_and_the_last_one_is_before_the_norm(folder):
    target = FrozenTarget(folder, [1, 3])
    batch = target.read(ROWS)
    assert batch.input_ids.shape == (3, 5) and batch.features.shape == (3, 5, 32) and batch.lengths == [5, 4, 3]
    assert batch.answers.tolist()[2] == [False, False, True, False, False]
    torch.testing.assert_close(target.model.model.norm(batch.last), batch.post_norm)
    assert not torch.allclose(batch.last, batch.post_norm)
    alone = target.read(ROWS[2:])
    torch.testing.assert_close(batch.features[2:, :3], alone.features, rtol=0.02, atol=0.02)


def test_a_draft_vocabulary_is_what_answers_have_most_often():
    assert frequent_tokens(ROWS, 2, 16).tolist() == [7, 9]
    assert frequent_tokens(ROWS, 6, 16).tolist() == [0, 1, 3, 4, 7, 9], "those that answers lack come last"


def test_an_epoch_has_each_row_once_and_a_seed_its_own_order():
    seen = [row for batch in islice(batches(ROWS, 1, seed=1), 3) for row in batch]
    assert sorted(map(id, seen)) == sorted(map(id, ROWS))
    orders = {tuple(id(row) for [row] in islice(batches(ROWS, 1, seed=seed), 6)) for seed in range(8)}
    assert len(orders) > 1
    assert len(list(islice(batches(ROWS, 2, seed=1), 2))[1]) == 2, "the remainder is dropped"


def test_a_run_notes_its_steps_and_saves_the_head(folder, tmp_path, monkeypatch):
    class Still:
        model = torch.nn.Linear(1, 1)

        def __init__(self, target, tokens, *, steps, learning_rate):
            self.told = (tokens.tolist(), steps, learning_rate)

        def step(self, batch):
            return float(sum(batch.lengths))

        def save(self, into):
            into.mkdir()
            (into / "told.json").write_text(json.dumps(self.told))

    monkeypatch.setitem(peers.PEERS, "speculators", Still)
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"input_ids": row.input_ids, "prompt_length": row.prompt_length}) for row in ROWS]
    rows.write_text("\n".join(lines) + "\n")
    assert read_rows(rows) == ROWS
    asked = (
        f"speculators --target {folder} --rows {rows} --draft-vocabulary 2 --feature-layers 1 3 --batch-size 3".split()
    )
    peers.main([*asked, "--steps", "2", "--output", str(tmp_path / "run")])
    noted = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in noted] == [1, 2] and {line["tokens"] for line in noted} == {12}
    assert all(line["seconds"] >= line["target_seconds"] > 0 and line["peak_rss_bytes"] > 1e6 for line in noted)
    assert json.loads((tmp_path / "run" / "head" / "told.json").read_text()) == [[7, 9], 2, None]
    peers.main([*asked, "--steps", "2", "--stop-after", "1", "--output", str(tmp_path / "speed")])
    assert [path.name for path in (tmp_path / "speed").iterdir()] == ["metrics.jsonl"]


def test_bad_input_is_one_line_and_exit_code_2(folder, tmp_path, capsys):
    asked = (
        f"--target {folder} --draft-vocabulary 2 --feature-layers 1 3 --rows {tmp_path}/none --output {tmp_path}/run"
    )
    assert peers.main(["specforge", *asked.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "run").exists()


def test_acceptance_is_read_off_an_engines_counters():
    assert acceptance({"num_drafts": 10, "accepted_at": [5, 2, 0]}) == {
        "acceptance_length": 1.7, "acceptance_rate": [0.5, 0.4, 0.0], "num_rounds": 10,
    }  # fmt: skip
    assert acceptance({"error": "ValueError: no"}) == {"error": "ValueError: no"}


def test_a_row_is_the_chat_and_where_its_answer_starts():
    class Letters:
        def apply_chat_template(self, messages, *, add_generation_prompt=False, tokenize):
            text = "".join(f"<{m['role'][0]}>{m['content']}" for m in messages)
            return text + "<a>" * add_generation_prompt

        def __call__(self, text, *, add_special_tokens):
            return type("Ids", (), {"input_ids": [ord(c) for c in text]})

    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    row = token_row(Letters(), chat, 10)
    assert row == {"input_ids": [ord(c) for c in "<u>hi<a>ye"], "prompt_length": 8}
