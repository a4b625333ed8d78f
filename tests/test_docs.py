"""Every command that README, CONTRIBUTING and docs tell people to type: it runs, on tiny stand-ins for what they name.

What needs a server, several processes or another engine is parsed by the same parsers and configs as the real thing.
"""

import json
import re
import shlex
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from headstart.configs.loader import build, read_config
from headstart.data_pipelines.answers.regenerate import RegenerateConfig
from headstart.data_pipelines.rows.config import DataConfig
from headstart.engines.export import read_folder, serve_commands
from headstart.engines.heads import HEADS
from headstart.scripts.cli import app
from headstart.targets.loading import TargetConfig
from headstart.train.inputs.config import TrainConfig, load_run
from typer.main import get_command
from typer.testing import CliRunner
from words import with_template

ROOT = Path(__file__).parents[1]
DOCS = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "reference").glob("*.md")])
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
VERBS = ("headstart", "make", "accelerate", "pip", "python", "vllm")
TEMPLATE = (
    "{% for m in messages %}{{ 'w10 ' if m.role == 'user' else 'w11 ' }}{{ m.content }} w2 {% endfor %}"
    "{% if add_generation_prompt %}w11 {% endif %}"
)
# the smallest work that still goes through all of a command
SMALL = {
    "train": "train.max_steps=1 train.warmup_steps=0 train.batch_size=1 train.accumulation=1 train.precision=fp32 "
    "train.device=cpu train.checkpoint_every=0 train.validate_every=1 head.num_depths=2",
    "eval": "--max-new-tokens 4 --limit 2 --repeats 1 --tree-nodes 4",
    "plan": "--max-new-tokens 4 --limit 2 --num-draft-tokens 1 --batch-size 1 --tree none",
    "plan --engine": "--max-new-tokens 4 --limit 2 --num-draft-tokens 1 --batch-size 1",
    "data prepare": "validation_share=0.3",
    "data regenerate": "sampling.max_tokens=12 num_rows=12 engine.device=cpu",
}


def shown(page: Path) -> list[list[str]]:
    """The commands in a page's blocks, as words."""
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```", page.read_text(), re.S | re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines if re.match(rf"({'|'.join(VERBS)})\s", line)]
    return [line for line in words if line]


@pytest.fixture(scope="module")
def world(saved_target, lora, tmp_path_factory):
    """A folder with what the pages name: MODEL, SMALLER, adapters, rows, a trained, an exported and a published
    head."""
    folder = tmp_path_factory.mktemp("docs")
    with_template(saved_target, folder / "MODEL", TEMPLATE)
    shutil.copytree(folder / "MODEL", folder / "SMALLER")
    shutil.copytree(folder / "MODEL", folder / "runs/grpo/policy/step_10")
    (folder / "VLLM/bin").mkdir(parents=True)
    (folder / "VLLM/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/serving_stand_in.py "$@"\n')
    (folder / "VLLM/bin/python").chmod(0o755)
    for name in ("sql", "support"):
        shutil.copytree(lora(folder / "MODEL"), folder / "loras" / name)
    asked = [f"w{20 + i} w{3 + i}" for i in range(12)]
    chats = [[("user", one), ("assistant", f"{one} w7 w8 w9 w{13 + i} w14 w15")] for i, one in enumerate(asked)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    lines = [json.dumps(row) + "\n" for row in rows]
    for name in ("CHATS", "TRACES", "data/trajectories", "data/mine/train", "data/answers/answers"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    for name in ("mine/validation.jsonl", "validation/answers.jsonl"):
        (folder / "data" / name).parent.mkdir(exist_ok=True)
        (folder / "data" / name).write_text("".join(lines[:2]))
    (folder / "PROMPTS.jsonl").write_text("".join(json.dumps({"prompt": f"w{i} w30"}) + "\n" for i in range(3, 6)))
    (folder / "suites").mkdir()
    questions = [{"question": f"w{i} w30", "answer": "w7"} for i in range(3, 6)]
    turns = [{"category": "qa", "turns": [f"w{i} w30", "w7"]} for i in range(3, 6)]
    published = {"suites/gsm8k.jsonl": questions, "suites/spec_bench.jsonl": turns, "QUESTIONS.jsonl": turns}
    for name, found in published.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in found))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(shlex.split("headstart train runs/eagle3.yaml target.path=MODEL data.train=CHATS.jsonl "
                        "train.output_dir=runs/mine data.validation=data/mine/validation.jsonl"))  # fmt: skip
        run(shlex.split("headstart eval --target MODEL --head runs/mine/final --prompts PROMPTS.jsonl "
                        "--output runs/mine/eval"))  # fmt: skip
        run(shlex.split("headstart export runs/mine served/mine --to vllm"))
        shutil.copytree("served/mine", "OWNER/NAME")
        config = json.loads(Path("OWNER/NAME/config.json").read_text())
        del config["headstart_export"]
        Path("OWNER/NAME/config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def here(world, tmp_path, monkeypatch):
    shutil.copytree(world, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COLUMNS", "200")


def run(words: list[str]) -> str:
    """A `headstart` command, made small; returns what it printed. What it would write is not there yet."""
    verb = " ".join(words[1:3]) if words[1] == "data" else words[1]
    verb = "plan --engine" if verb == "plan" and "--engine" in words else verb
    for word, value in zip(words, [*words[1:], ""], strict=True):
        output = value if word == "--output" else word.partition("=")[2] if "output" in word else ""
        output = words[3] if verb == "export" else output
        shutil.rmtree(output or "nothing", ignore_errors=True)
    extra = shlex.split(SMALL.get(verb, ""))
    done = CliRunner().invoke(app, [*words[1:], *extra], catch_exceptions=False)
    assert done.exit_code == 0, (words, done.output)
    return done.output


def parsed(words: list[str]) -> None:
    """A command that cannot run here: its options, files and config keys exist."""
    line = " ".join(words)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), line
    elif words[0] == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        end = words.index("-m")
        launch = launch_command_parser().parse_args(words[2 : end + 1] + ["headstart.train"])
        assert (ROOT / launch.config_file).is_file() and words[end + 1] == "headstart.train", line
    elif words[0] == "pip":
        assert words[1] == "install" and set(words[2:]) <= {"-e", "."}, line
    elif words[:2] == ["python", "-c"]:
        compile(words[2], line, "exec")
    elif words[0] == "vllm" or words[:2] == ["python", "-m"]:
        head = read_folder("runs/mine")
        served = shlex.split(serve_commands(head, "served/mine", to="vllm")["vllm" if words[0] == "vllm" else "sglang"])
        assert [one for one in words if one.startswith("--")] == [one for one in served if one.startswith("--")], line
        if words[0] == "vllm":
            mine, ours = json.loads(words[-1]), json.loads(served[-1])
            assert mine.keys() == ours.keys() and mine["method"] == ours["method"], line
    else:
        raise AssertionError(f"what is this? {line}")


def commands_of(page: Path) -> list[list[str]]:
    """But for runs that nobody watches, which take minutes and have tests of their own."""
    shown_here = [line for line in shown(page) if line[0] == "headstart" and "CONFIG" not in line]
    return [line for line in shown_here if line[1] not in ("auto", "refit")]


RUN = [
    pytest.param(page, marks=[] if page.stem == "README" else pytest.mark.slow) for page in PAGES if commands_of(page)
]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page, here):
    for words in commands_of(page):
        if words[1] == "train":
            load_run(words[2], words[3:])
        if words[1:3] == ["data", "regenerate"]:
            build(RegenerateConfig, read_config(words[3], words[4:]))
        if any(word.startswith("engine.server=") or word == "--server" for word in words):
            continue
        run(words)


def test_the_other_commands_of_the_pages_parse(here):
    for page in PAGES:
        for words in shown(page):
            if words[0] != "headstart":
                parsed(words)


def test_an_exported_head_prints_what_the_page_says(here):
    told = run(shlex.split("headstart export runs/mine served/again --to vllm"))
    assert re.search(r"vllm serve /\S*/MODEL --speculative-config", told), "found from every folder"
    assert re.search(r"sglang.launch_server --model-path /\S*/MODEL --", told)


def in_text() -> list[tuple[str, str]]:
    return [(page.stem, code) for page in PAGES for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text())]


def test_config_keys_named_in_the_text_exist():
    families = {field.name for head in HEADS.values() for field in fields(head.config_class)}
    known = {
        "train": {field.name for field in fields(TrainConfig)},
        "data": {field.name for field in fields(DataConfig)},
        "target": {field.name for field in fields(TargetConfig)},
        "head": families,
        "sampling": set(yaml.safe_load((ROOT / "configs/data/regenerate_server.yaml").read_text())["sampling"]),
    }
    for page, code in in_text():
        for section, key in re.findall(r"(?<![\w./])(train|data|target|head|sampling)\.(\w+)(?![\w/]*\.)", code):
            if (section, key) not in {("data", "py"), ("target", "py"), ("train", "json")} and "jsonl" not in key:
                assert key in known[section] or key in ("py", "json"), (page, code)


def test_commands_and_options_that_are_named_or_shown_exist():
    commands = get_command(app).commands  # type: ignore[attr-defined]
    shown = [(page.stem, line) for page in PAGES for line in re.findall(r"^\s*(headstart .*)$", page.read_text(), re.M)]
    names = set()
    for page, code in [*in_text(), *shown]:
        found = re.match(r"headstart (data \w+|\w+)(.*)$", code)
        if found:
            names.add(found[1])
            verb, _, of_group = found[1].partition(" ")
            command = commands[verb].commands[of_group] if of_group else commands[verb]
            options = {"--help"} | {option for one in getattr(command, "params", []) for option in one.opts}
            own = re.sub(r'"[^"]*"', "", found[2])  # without what it passes on
            assert set(re.findall(r"--[a-z-]+", own)) <= options, (page, code)
    assert names >= {"train", "eval", "data prepare", "data extract"}


def test_every_promise_names_a_test_that_exists():
    pages = ROOT / "docs" / "reference" / "reliability.md", ROOT / "SECURITY.md"
    named = [one for page in pages for one in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())]
    assert len(named) > 20
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), (path, test)


def test_every_page_is_in_the_site():
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_entries_of_the_log_are_dated_in_order_and_short():
    """At most 15 lines of at most 200 characters each."""
    contents, *topics = sorted((ROOT / "docs" / "log").glob("*.md"))
    assert contents.name == "README.md"
    for topic in topics:
        assert f"]({topic.name})" in contents.read_text(), f"{topic.name} is not in the table of topics"
        entries = re.split(r"^## ", topic.read_text(), flags=re.MULTILINE)[1:]
        dates = [entry[:10] for entry in entries]
        assert dates == sorted(dates), f"{topic.name}: newer entries stand behind older ones"
        for entry in entries:
            title, *lines = [line for line in entry.splitlines() if line]
            assert re.match(r"20\d\d-\d\d-\d\d \S", title), f"{topic.name}: {title}: begins with no date"
            assert len(lines) <= 15 and max(map(len, lines)) <= 200, f"{topic.name}: {title}"


def test_every_page_begins_with_the_question_that_it_answers():
    """But the log's, which are of the past."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "log" not in page.relative_to(ROOT / "docs").parts]
    assert len(pages) > 30
    for page in pages:
        title = page.read_text().splitlines()[0]
        assert title.startswith("# ") and title.endswith("?"), page
