"""The layout: imports run downwards and in no circle, folders and files stay small, all that is shipped is listed."""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from headstart.configs.loader import shipped
from headstart.train.inputs.config import load_run

ROOT = Path(__file__).resolve().parents[1]
ORDER = ["base", "configs", "targets", "heads", "engines", ("eval", "data_pipelines"), "train", "scripts", "benchmarks"]
FLOORS: dict[str, set[str]] = {}  # the rooms that a room may import
for floor in ORDER:
    below = set(FLOORS)
    FLOORS |= dict.fromkeys([floor] if isinstance(floor, str) else floor, below)
SOURCES = sorted(path for folder in FLOORS for path in (ROOT / folder).rglob("*.py"))
MODULES = {".".join(["headstart", *path.relative_to(ROOT).with_suffix("").parts]): path for path in SOURCES}
MODULES = {name.removesuffix(".__init__"): path for name, path in MODULES.items()}
CHECKOUT_ONLY = "benchmarks"  # not in the wheel
TWO_SIDES = {  # files of one name in a room: what an engine is told and how its server is run; a head and its start
    ("engines", "vllm.py"),
    ("engines", "sglang.py"),
    ("heads", "eagle3.py"),
}
HEAVY = {*"wandb deepspeed datasets peft accelerate pydantic typer rich openai scipy".split()}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Absolute names of all that a file imports, and whether on loading the file (not within a function)."""
    package, found = ["headstart", *path.relative_to(ROOT).parent.parts], []

    def visit(parent: ast.AST, *, on_loading: bool) -> None:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.Import):
                found.extend((alias.name, on_loading) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                base = [*base, *(node.module or "").split(".")] if node.module else base
                found.extend((".".join([*base, alias.name]), on_loading) for alias in node.names)
            elif isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):  # what statements are in
                visit(node, on_loading=on_loading and not isinstance(node, ast.FunctionDef))

    visit(parsed(path), on_loading=True)
    return found


def test_imports_run_downwards_only():
    for path in SOURCES:
        own = path.relative_to(ROOT).parts[0]
        for name, _ in imports(path):
            parts = name.split(".")
            if parts == ["headstart"]:
                assert own == CHECKOUT_ONLY, f"{named(path)}: public names are for users"
            elif parts[0] == "headstart" and parts[1] != "__version__":
                assert parts[1] in FLOORS, f"{named(path)}: {name}: no such folder"
                assert parts[1] == own or parts[1] in FLOORS[own], f"{named(path)} must not know {name}"


def modules_of(path: Path) -> set[str]:
    """The files of ours that a file imports anywhere in it: on loading, in a function or for type checkers alone.

    A name that a package's `__init__` would have to hold is no file: it counts as that package.
    """
    found = set()
    for name, _ in imports(path):
        parts = name.split(".")
        while parts and ".".join(parts) not in MODULES:
            parts.pop()  # what a file defines, and packages that are not ours
        found.add(".".join(parts))
    return found - {""}


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Files on the way from one of them back to itself; empty: there is no such way."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def test_no_files_import_each_other_in_a_circle():
    """Imports within functions and for type checkers count: a circle is one there too."""
    circle = circle_in({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"a"}})
    assert len(circle) == 4 and "a b d a b d".find(" ".join(circle[:3])) >= 0, circle
    circle = circle_in({name: modules_of(path) - {name} for name, path in MODULES.items()})
    assert not circle, " imports ".join(circle)


def test_folders_import_each_other_in_no_circle():
    """Neither rooms nor the folders inside them, so each can be read without those above it."""
    graph: dict[str, set[str]] = {}
    for path in MODULES.values():
        folder = named(path.parent)
        others = {named(MODULES[other].parent) for other in modules_of(path) if other in MODULES}
        graph.setdefault(folder, set()).update(others - {folder})
    circle = circle_in(graph)
    assert not circle, " imports ".join(circle)


def test_engines_know_families_by_one_table():
    """A family is in files of its own there; besides these, only the table imports them."""
    for path in (ROOT / "engines").rglob("*.py"):
        families = [name for name in modules_of(path) if name.startswith("headstart.engines.families.")]
        is_of_families = path.parent.name == "families"
        assert is_of_families or set(families) <= {"headstart.engines.families.table"}, f"{named(path)}: {families}"


def test_folders_and_files_stay_small():
    for folder in {path.parent for path in SOURCES}:
        files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        # a dozen, and the one that somebody adds, as tests/test_walks.py does; a family of heads is a file each
        most = 14 if folder == ROOT / "heads" else 13
        assert len(files) <= most, (
            f"{named(folder)}: {len(files)} files; what belongs together gets a folder of its own"
        )
    for path in SOURCES:
        num_lines = len(path.read_text().splitlines())
        assert num_lines <= 400, f"{named(path)}: {num_lines} lines"


def test_a_room_has_one_file_of_a_name():
    names = [(path.relative_to(ROOT).parts[0], path.name) for path in SOURCES if path.name != "__init__.py"]
    twice = {name for name, count in Counter(names).items() if count > 1}
    assert twice == TWO_SIDES, "a file's name says what none of its room's others is; only these are two sides of one"


def test_this_sees_the_imports_of_a_file():
    assert ("headstart.targets.target.Target", True) in imports(ROOT / "eval" / "decoding" / "loop.py")
    assert ("headstart.train.inputs.config.load_run", False) in imports(ROOT / "scripts" / "cli.py")
    assert ("torch", True) in imports(ROOT / "heads" / "base.py")


def test_the_root_holds_one_python_file():
    """It names what tests/test_api.py holds, and imports nothing of ours but on demand and for type checkers."""
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]
    kinds = [type(node) for node in ast.parse((ROOT / "__init__.py").read_text()).body]
    allowed = [ast.Expr, ast.ImportFrom, ast.ImportFrom, ast.If, *[ast.Assign] * 3, *[ast.FunctionDef] * 2]
    assert kinds == allowed, "a docstring, __version__, the public names and how they are found, no more"


def test_every_package_folder_is_listed():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {ROOT, *(path.parent for path in SOURCES)}
    shipped_folders = {f for f in folders if not named(f).startswith(CHECKOUT_ONLY)}
    assert set(tools["packages"]) == {".".join(["headstart", *f.relative_to(ROOT).parts]) for f in shipped_folders}
    assert all((folder / "__init__.py").is_file() for folder in folders)
    assert tools["package-dir"] == {"headstart": "."}
    known = {folder.name for folder in ROOT.iterdir() if any(folder.glob("*.py"))} - {"tests", "docs", "examples"}
    assert known == set(FLOORS), "a new package folder needs a floor"


def test_every_file_says_what_it_is_for():
    for path in SOURCES:
        assert ast.get_docstring(parsed(path)), f"{path}: no docstring"
        assert path.name not in ("utils.py", "helpers.py", "common.py", "misc.py"), f"{path}: name it by its job"
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_run_config_builds():
    runs = shipped("runs/*.yaml")
    assert runs
    for path in runs:
        run = load_run(path, ["target.path=x", "data.train=x.jsonl", "train.output_dir=x"])
        assert path.read_text().startswith("# "), f"{path}: says its command, hardware, time and the number to expect"
        assert run.head.type in path.name or run.head.type in path.read_text()


def test_nothing_shipped_is_ignored_by_git():
    """`runs/` in .gitignore once hid configs/runs/ as well."""
    if not (ROOT / ".git").exists():
        return
    files = [str(path) for path in (*SOURCES, *shipped())]
    done = subprocess.run(["git", "check-ignore", *files], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == ""


def test_no_weights_are_read_by_pickle():
    """A checkpoint from somebody else must not run code."""
    for path in SOURCES:
        modules = {name.split(".")[0] for name, _ in imports(path)}
        assert not modules & {"pickle", "dill", "joblib", "cloudpickle", "shelve"}, path
        for node in ast.walk(parsed(path)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("torch.load", "torch.save", "yaml.unsafe_load", "eval", "exec"), f"{path}: {called}"


LIGHT = ("targets", "heads", "engines", "eval")


@pytest.mark.parametrize("folder", LIGHT)
def test_heads_and_eval_name_no_heavy_package_on_loading(folder):
    for path in (ROOT / folder).rglob("*.py"):
        loaded = {name.split(".")[0] for name, on_loading in imports(path) if on_loading}
        assert not loaded & HEAVY, path


@pytest.mark.slow
def test_heads_and_eval_import_in_a_serving_image():
    """With torch, transformers, safetensors and rich alone."""
    modules = [
        ".".join(["headstart", *path.relative_to(ROOT).with_suffix("").parts])
        for folder in LIGHT
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    lines = ["import importlib, sys"]
    lines += [f"sys.modules[{name!r}] = None" for name in sorted(HEAVY)]
    lines += [f"importlib.import_module({name!r})" for name in modules]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
