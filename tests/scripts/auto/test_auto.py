"""`headstart auto` as a whole: what it makes, what it refuses, and that it goes on where it was killed."""

import json


def test_one_command_goes_from_prompts_to_a_decision(headstart, chat_target, traffic, in_process, machine_is, tmp_path):
    machine_is(medusa=1.2, hydra=1.3, eagle=2.5)
    line = "auto --budget 6s --max-new-tokens 12"
    more = ("--target", chat_target, "--prompts", traffic(40), "--output", tmp_path / "auto")
    code, out, err = headstart(line, *more)
    assert code == 0, err
    found = json.loads((tmp_path / "auto" / "auto.json").read_text())
    assert found["split"]["held_out"] == 13 and found["split"]["asked"] == 27
    assert found["decision"]["headline"] and found["evaluation"]["num_prompts"] == 13
    print(err)
