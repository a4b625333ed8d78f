"""What every command leaves behind: beside another command, after a failing system call, after kills.

HEADSTART_FAULTS=all lets every call fail in turn, HEADSTART_KILLS=20 kills as often; without, some of them are tried.
"""

import errno
import io
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from headstart.base import files
from headstart.base.owned import LOCK, OwnedFolder
from headstart.engines.heads import HEADS, build_head, save_head
from headstart.scripts import cli
from headstart.targets.target import Target
from run_files import contents
from safetensors import SafetensorError, safe_open, serialize_file
from words import with_template

TEMPLATE = "w1 {% for m in messages %}{{ m.content }} w2 {% endfor %}{% if add_generation_prompt %}w6 {% endif %}"
MEASURED = "--target {w}/target --drafter ngram --prompts {w}/prompts.jsonl --max-new-tokens 6 --output {out}"
OWNED = {  # made with a marker, filled in the course of time
    "train": "train {w}/run.yaml train.output_dir={out}",
    "data prepare": "data prepare data/prepare.yaml sources=[{w}/chats.jsonl] validation_share=0.5 output={out}",
    "data extract": "data extract {w}/run.yaml --output {out} --device cpu --shard-bytes 3000",
    "data regenerate": "data regenerate data/regenerate_local.yaml sources={w}/prompts.jsonl target={w}/target "
    "sampling.max_tokens=5 sampling.temperature=0 engine.batch_size=2 output={out}",
    "eval": f"eval {MEASURED} --repeats 1",
    "plan": f"plan {MEASURED} --num-draft-tokens 1 --batch-size 1 --tree none",
}
WHOLE = {  # appear at once
    "export": "export {w}/head {out} --to vllm",
}
PUSH = {"push": "push {w}/head me/mine --base-model owner/target --dry-run"}
COMMANDS = {**OWNED, **WHOLE, **PUSH}


@pytest.fixture(scope="module")
def world(saved_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read: target, run.yaml, chats.jsonl, prompts.jsonl, head, and two evaluations, one and two."""
    folder = tmp_path_factory.mktemp("world")
    target = Target.load(with_template(saved_target, folder / "target", TEMPLATE))
    save_head(build_head(HEADS["medusa"].config_class(type="medusa", num_depths=2), target), folder / "head")
    said = [{"role": role, "content": "w5 w9 w7"} for role in ("user", "assistant")]
    chats = [{"messages": [{**said[0], "content": f"w{3 + i} w{50 - i}"}, said[1]]} for i in range(20)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    prompts = [{"messages": [{"role": "user", "content": f"w1 w{5 + i} w9"}]} for i in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    train = {"max_steps": 4, "batch_size": 2, "warmup_steps": 1, "device": "cpu", "checkpoint_every": 2}
    data = {"train": str(saved_target.with_name("rows.jsonl")), "validation": str(saved_target.with_name("rows.jsonl"))}
    train |= {"validate_every": 2, "decode_tokens": 4, "output_dir": "unused"}
    head = {"type": "medusa", "num_depths": 2}
    run = {"target": {"path": str(folder / "target")}, "head": head, "data": data, "train": train}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    assert call(words("eval", folder, folder / "one")) == (0, "")
    shutil.copytree(folder / "one", folder / "two")
    return folder


def words(name: str, world: Path, out: Path) -> list[str]:
    return shlex.split(COMMANDS[name].format(w=world, out=out))


def call(line: list[str]) -> tuple[int, str]:
    """The command in this process: exit code, and what it says that begins with its name. No other exception leaves."""
    before, sys.argv = sys.argv, ["headstart", *line]
    said, code = io.StringIO(), 0
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            cli.main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        sys.argv = before
    return code, "".join(line for line in said.getvalue().splitlines(keepends=True) if line.startswith("headstart: "))


def result(name: str, out: Path) -> Any:
    """What must be the same however often the command was interrupted."""
    if name == "train":
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses = [(row["step"], row.get("loss"), row.get("validation")) for row in rows]
        return losses, (out / "final" / "model.safetensors").read_bytes()
    if name == "eval":
        results = json.loads((out / "report.json").read_text())["results"]
        return [(one["acceptance_length"], one["num_rounds"], one["lossless"]) for one in results]
    if name == "plan":
        return json.loads((out / "plan.json").read_text())["acceptance"]
    last = {"data prepare": "*.jsonl", "data regenerate": "answers.jsonl", "data extract": "*.safetensors"}
    return {path.name: path.read_bytes() for path in sorted(out.glob(last.get(name, "*"))) if path.is_file()}


def check_whole(out: Path) -> None:
    """No file is half-written under its own name; those that grow row by row aside."""
    for path in out.rglob("*") if out.is_dir() else ():
        if ".unfinished" in str(path) or not path.is_file():
            continue
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".yaml":
            assert yaml.safe_load(path.read_text()), path
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as tensors:
                assert len(list(tensors.keys())), path
        elif path.suffix == ".html":
            assert path.read_text().rstrip().endswith("</html>"), path


@pytest.fixture(scope="module")
def undisturbed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """undisturbed(command): its result in one go, how many calls may fail in it, and the seconds it takes."""

    @cache
    def run(name: str) -> tuple[Any, int, float]:
        out = tmp_path_factory.mktemp("undisturbed") / "out"
        assert call(words(name, world, out.with_name("first")))[0] == 0  # what is imported and written but once
        start = time.monotonic()
        with Failing(out.parent, at=0) as failing:
            assert call(words(name, world, out))[0] == 0
        return result(name, out), failing.num_calls, time.monotonic() - start

    return run


# Two commands, one folder


@pytest.mark.fast_only(second=["train", "data prepare", "export"])
@pytest.mark.parametrize("second", [*OWNED, *WHOLE])
def test_a_command_touches_no_folder_of_another(second, world, tmp_path):
    """Every pairing: the first fills the folder, or has finished; the second is told in one line, and ends with 2."""
    for number, first in enumerate([*OWNED, *WHOLE]):
        out = tmp_path / str(number) / "out"
        with ExitStack() as holding:
            if first in OWNED:
                holding.enter_context(OwnedFolder(out, command=f"headstart {first}"))
            else:
                out.mkdir(parents=True)
            (out / "theirs").write_text("theirs")
            before = contents(out.parent, but=LOCK)
            code, said = call(words(second, world, out))
        if second in WHOLE:
            expected = f"{out}: exists already"
        elif first in WHOLE:
            expected = f"{out}: holds other files (theirs), not those of headstart {second}; give a new folder"
        elif first == second:
            expected = f"{out}: in use by process {os.getpid()} on "
        else:
            expected = f"{out}: belongs to headstart {first}; give headstart {second} another folder"
        assert code == 2 and expected in said and said.count("\n") == 1, (first, said)
        assert contents(out.parent, but=LOCK) == before and os.listdir(out.parent) == ["out"]


# Failing calls


class Failing:
    """Counts the calls that write below a folder, and lets one fail, a write when half of it is done.

    Calls: opening a file to write, writing to it, fsync, rename, replace, mkdir, safetensors' own writing.
    """

    def __init__(self, root: Path, *, at: int, number: int = errno.ENOSPC):
        self.root, self.at, self.number, self.num_calls = str(root), at, number, 0
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> "Failing":
        set_, open_ = self.patch.setattr, io.open
        for name in ("replace", "rename", "mkdir", "fsync"):
            set_(os, name, self.guarded(getattr(os, name)))
        set_(files, "_exchange", self.guarded(files._exchange))
        set_("safetensors.torch.serialize_file", self.serializing(serialize_file))
        set_(io, "open", self.opening(open_))
        set_("builtins.open", self.opening(open_))
        set_(tempfile, "tempdir", self.root)
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()

    def is_next(self) -> bool:
        self.num_calls += 1
        return self.num_calls == self.at

    def error(self, path: object = None) -> OSError:
        return OSError(self.number, os.strerror(self.number), *([str(path)] if path else []))

    def guarded(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **how: Any) -> Any:
            is_ours = isinstance(arguments[0], int) or str(arguments[0]).startswith(self.root)
            if is_ours and self.is_next():
                raise self.error(None if isinstance(arguments[0], int) else arguments[0])
            return real(*arguments, **how)

        return act

    def serializing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(tensors: Any, path: Any, *rest: Any, **how: Any) -> Any:
            if self.is_next():
                Path(path).write_bytes(b"half")
                raise SafetensorError(f"Error while serializing: {os.strerror(self.number)} (os error {self.number})")
            return real(tensors, path, *rest, **how)

        return act

    def opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(path: Any, mode: str = "r", *rest: Any, **how: Any) -> Any:
            if not set(mode) & set("wax+") or not str(path).startswith(self.root):
                return real(path, mode, *rest, **how)
            if self.is_next():
                raise self.error(path)
            file = real(path, mode, *rest, **how)
            write = file.write

            def writing(data: Any) -> int:
                if self.is_next():
                    write(data[: len(data) // 2])
                    raise self.error()
                return write(data)

            file.write = writing
            return file

        return act


FAST = ("data prepare", "export")  # the others as slow tests


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in COMMANDS]
)
def test_a_failing_call_leaves_the_old_or_the_new(name, world, undisturbed, tmp_path):
    """One line and exit code 2, no file half-written under its name, and the same command then finishes."""
    wanted, num_calls, _ = undisturbed(name)
    assert num_calls >= 3
    tried = range(1, num_calls + 1)
    if os.environ.get("HEADSTART_FAULTS") != "all":
        tried = sorted(random.Random(name).sample(tried, min(6 if name in FAST else 3, num_calls)))
    for at in tried:
        number = (errno.ENOSPC, errno.EIO, errno.EROFS)[at % 3]
        out = tmp_path / str(at) / "out"
        out.parent.mkdir()
        with Failing(out.parent, at=at, number=number) as failing:
            code, said = call(words(name, world, out))
        assert failing.num_calls >= at
        told = code == 2 and said.count("\n") == 1 and os.strerror(number) in said
        assert told or code == 0, (at, code, said)  # 0: what failed was no part of the result
        check_whole(out)
        if code and not (name in WHOLE and out.exists()):  # that appeared whole, and then its folder was not synced
            assert call(words(name, world, out))[0] == 0, at
        assert result(name, out) == wanted, at


# Kills


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_kills_at_random_moments_leave_what_is_there_without(name, world, undisturbed, tmp_path):
    """kill -9; between two of them the same command goes on, or begins anew."""
    wanted, _, seconds = undisturbed(name)
    chance, out, raised = random.Random(7), tmp_path / "out", tmp_path / "raised"
    num_kills = 0
    while num_kills < int(os.environ.get("HEADSTART_KILLS", 3)):
        child = os.fork()
        if not child:
            try:
                os._exit(call(words(name, world, out))[0])
            except BaseException:
                raised.write_text(traceback.format_exc())
            finally:
                os._exit(99)
        time.sleep(chance.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        check_whole(out)
        assert code in (0, -signal.SIGKILL), raised.read_text() if code == 99 else code
        num_kills += code != 0
        if code == 0 or (name in WHOLE and out.exists()):  # killed behind its end
            assert result(name, out) == wanted
            shutil.rmtree(out, ignore_errors=True)
    assert call(words(name, world, out))[0] == 0
    assert result(name, out) == wanted
