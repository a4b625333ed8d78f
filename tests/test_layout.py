"""The layout holds: imports run downwards, everything shipped is listed, and heads are measured in a small image."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from headstart.configs.loader import shipped
from headstart.train.config import load_run

ROOT = Path(__file__).resolve().parents[1]
FLOORS = {
    "configs": set(),
    "heads": {"configs"},
    "eval": {"configs", "heads"},
    "data_pipelines": {"configs", "heads"},
    "train": {"configs", "heads", "eval", "data_pipelines"},
    "scripts": {"configs", "heads", "eval", "data_pipelines", "train"},
}
SOURCES = sorted(path for folder in FLOORS for path in (ROOT / folder).rglob("*.py"))
CHECKOUT_ONLY = ("scripts/quickstart", "scripts/benchmarks")  # not in the wheel
HEAVY = ("wandb", "deepspeed", "datasets", "peft", "accelerate", "pydantic", "typer", "rich", "matplotlib")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> list[tuple[str, bool]]:
    """Absolute names of all that a file imports, and whether on loading the file (not within a function)."""
    package = ["headstart", *path.relative_to(ROOT).parent.parts]
    tree, found = ast.parse(path.read_text()), []
    inner = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in inner) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            found += [(".".join([*base, alias.name]), id(node) not in inner) for alias in node.names]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_imports_run_downwards_only(path):
    own = path.relative_to(ROOT).parts[0]
    for name, _ in imports(path):
        parts = name.split(".")
        if parts[0] == "headstart" and parts[1] != "__version__":
            assert parts[1] in FLOORS, f"{name}: no such folder"
            assert parts[1] == own or parts[1] in FLOORS[own], f"{own} must not know {name}"


def test_this_sees_the_imports_of_a_file():
    assert ("headstart.heads.target.Target", True) in imports(ROOT / "eval" / "generate.py")
    assert ("headstart.train.config.load_run", False) in imports(ROOT / "scripts" / "cli.py")
    assert ("torch", True) in imports(ROOT / "heads" / "base.py")


def test_the_root_holds_one_python_file():
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]
    [docstring, version] = ast.parse((ROOT / "__init__.py").read_text()).body
    assert isinstance(docstring, ast.Expr) and isinstance(version, ast.Assign), "a docstring and __version__, no more"


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
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path}: no docstring"
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
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("torch.load", "torch.save", "yaml.unsafe_load", "eval", "exec"), f"{path}: {called}"


@pytest.mark.parametrize("folder", ["heads", "eval"])
def test_heads_and_eval_name_no_heavy_package_on_loading(folder):
    for path in (ROOT / folder).rglob("*.py"):
        loaded = {name.split(".")[0] for name, on_loading in imports(path) if on_loading}
        assert not loaded & set(HEAVY), path


@pytest.mark.slow
def test_heads_and_eval_import_in_a_serving_image():
    """With torch, transformers, safetensors and rich alone."""
    modules = [
        ".".join(["headstart", *path.relative_to(ROOT).with_suffix("").parts])
        for folder in ("heads", "eval")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    lines = ["import importlib, sys"]
    lines += [f"sys.modules[{name!r}] = None" for name in HEAVY]
    lines += [f"importlib.import_module({name!r})" for name in modules]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
