"""Plain decoding of others beside ours: it runs, ways take turns, and answers of other lengths are not compared."""

import time

import pytest
from headstart.benchmarks.plain_decoding import TimedAnswers, decode_in_turns, main, told


def test_transformers_is_timed_beside_our_baseline(saved_target, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{i} w{i + 1} w5"}}\n' for i in range(3)))
    main([str(saved_target), str(prompts), "--max-new-tokens", "6", "--repeats", "1"])
    said = capsys.readouterr().out
    assert "times the speed of transformers, over 3 prompts; 3 of 3 texts are equal" in said


def test_ways_take_turns():
    order = []

    def way(name, seconds):
        def run(prompt):
            order.append(name)
            time.sleep(seconds)
            return [*prompt, 1]

        return run

    timed = decode_in_turns([way("a", 0.0), way("b", 0.01)], [[5], [6]], num_repeats=3)
    assert order == list("ab" + "abbaab" + "ab" + "baabba")
    assert timed[0].texts == timed[1].texts == [[5, 1], [6, 1]]
    assert all(b >= 0.03 for b in timed[1].seconds) and timed[0].seconds_for([[1], []], [0, 1])[1] == 0


def test_answers_of_other_lengths_are_not_compared_in_time():
    """Two equally fast sides with 200 ms of prefill and 10 ms a token: scaled, the longer answer would look faster."""
    texts = [[[1] * 96, [1] * 50], [[1] * 10, [1] * 49]]
    theirs, ours = (TimedAnswers([0.2 + 0.01 * len(text) for text in side], side) for side in texts)
    said = told("another", theirs, ours)
    assert "over 1 prompts; 0 of 2" in said and float(said.split()[3]) == pytest.approx(1, abs=0.02)
