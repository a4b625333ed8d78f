"""A finished report or plan is not lost to another command, a folder has one writer, and Ctrl-C ends a command."""

import json
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from headstart.base.owned import LOCK
from run_files import contents

FINISHED = {
    "eval": ("report.json", "--drafter ngram --max-new-tokens 8 --repeats 1"),
    "plan": (
        "plan.json",
        "--drafter ngram --max-new-tokens 8 --num-draft-tokens 1 --batch-size 1 --tree none",
    ),
}


@pytest.fixture(params=["eval", pytest.param("plan", marks=pytest.mark.slow)])
def command(request, headstart, saved_target, prompts, tmp_path):
    """command("--option value"): the exit code and the error; .name, .output and .file."""
    file, options = FINISHED[request.param]
    path = prompts({"prompt": "w1 w5 w9"}, {"prompt": "w1 w7 w8 w3 w22"})

    def call(more="", output=tmp_path / "out"):
        line = f"{request.param} --target {saved_target} --prompts {path} --output {output} {options} {more}"
        code, _, err = headstart(line)
        return code, err

    call.__dict__.update(name=request.param, output=tmp_path / "out", file=tmp_path / "out" / file)
    return call


def test_a_finished_one_of_other_settings_is_replaced_only_when_asked(command):
    assert command()[0] == 0
    before = contents(command.output, but=LOCK)
    code, err = command("--max-new-tokens 6")
    assert code == 2 and err.count("\n") == 1
    assert "with max_new_tokens 8, this would be with 6; --overwrite replaces it, or give a new folder" in err
    assert contents(command.output, but=LOCK) == before
    assert command()[0] == 0, "the same command measures anew, as the quickstart does"
    assert command("--max-new-tokens 6 --overwrite")[0] == 0
    assert command()[0] == 2 and command("--max-new-tokens 6")[0] == 0
    assert json.loads(command.file.read_text())


AFTER = [0.3, 5.0, 12.0]  # seconds: importing, loading, measuring
FEW = 6.0  # seconds: the 1.5 that a command has, and what a busy machine adds


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("verb", ["eval", "plan", "auto", "data regenerate"])
def test_ctrl_c_ends_a_command_in_time(verb, after, saved_target, tmp_path):
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"w{i} w{j}"}) + "\n" for i in range(3, 50) for j in range(3, 50)))
    how = {
        "eval": f"--target {saved_target} --drafter ngram --prompts {rows} --repeats 200",
        "plan": f"--target {saved_target} --drafter ngram --prompts {rows}",
        "auto": f"--target {saved_target} --prompts {rows} --budget 5m",
        "data regenerate": f"data/regenerate_local.yaml target={saved_target} sources={rows} output={tmp_path / 'out'}",
    }[verb]
    output = [] if verb.startswith("data") else ["--output", str(tmp_path / "out")]
    command = [sys.executable, "-m", "headstart.scripts.cli", *verb.split(), *how.split(), *output]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what runs in the background of a shell ignores it
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    try:
        time.sleep(after)
        if (code := process.poll()) is not None:
            assert code in (0, 1), process.communicate()[1]
            pytest.skip("it had ended before")
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, said = process.communicate(timeout=FEW)
        assert process.returncode in (130, -signal.SIGINT), f"{said}\n{time.monotonic() - began}"
    finally:
        process.kill()
        process.wait()
