"""Configs inherit, overrides win, and every wrong key or value is refused by its full path."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from headstart.base.errors import BadInput
from headstart.configs import loader
from headstart.configs.loader import build, dump_config, read_config, shipped


@dataclass(kw_only=True)
class Head:
    type: Literal["eagle3", "medusa"]
    feature_layers: list[int] | None = None
    dropout: float = 0.0


@dataclass(kw_only=True)
class Optim:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    num_steps: int = 10
    fused: bool = False

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr should be above 0, got {self.lr}")


@dataclass(kw_only=True)
class Run:
    name: str
    head: Head
    optim: Optim = field(default_factory=Optim)
    train: str | list[str] = "train.jsonl"
    suites: dict[str, Optim] = field(default_factory=dict)
    stages: list[Optim] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    max_norm: float | None = 1.0


def raw_run(**changes: Any) -> dict[str, Any]:
    return {"name": "a", "head": {"type": "eagle3"}, **changes}


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(files))}.yaml"


def message(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(BadInput) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# Reading


def test_a_file_inherits_its_bases_key_by_key(tmp_path: Path) -> None:
    """Each is found beside the file that names it."""
    (tmp_path / "runs").mkdir()
    path = write(tmp_path / "runs", run="base: ../middle.yaml\noptim: {lr: 3}\nlayers: [9]\n")
    write(
        tmp_path,
        middle="base: bottom.yaml\noptim: {lr: 2, num_steps: 5}\nhead: {type: medusa}\n",
        bottom="name: bottom\noptim: {lr: 1, fused: true}\nlayers: [1, 2, 3]\n",
    )
    optim = {"lr": 3, "num_steps": 5, "fused": True}
    assert read_config(path) == {"name": "bottom", "optim": optim, "layers": [9], "head": {"type": "medusa"}}


def test_overrides_win_and_are_read_as_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, run="base: low.yaml\noptim: {lr: 1, num_steps: 2}\nhead: {type: eagle3, k: 1}\n", low="a: 1")
    overrides = ["optim.lr=1e-4", "a=[1, 2]", "new.deep.key=x=y", "optim.num_steps=null", "head={type: medusa}", "e="]
    assert read_config(path, overrides) == {
        "a": [1, 2],
        "optim": {"lr": "1e-4", "num_steps": None},
        "head": {"type": "medusa"},
        "new": {"deep": {"key": "x=y"}},
        "e": None,
    }


def test_a_mapping_marked_replace_is_not_merged(tmp_path: Path) -> None:
    path = write(
        tmp_path, run="base: mid.yaml\nhead: {loss: {c: 3}}\n", mid="base: low.yaml\nhead: {loss: !replace {b: 2}}\n"
    )
    write(tmp_path, low="head: {k: 1, loss: {a: 1}}\n")
    assert read_config(tmp_path / "mid.yaml") == {"head": {"k": 1, "loss": {"b": 2}}}
    assert read_config(path) == {"head": {"k": 1, "loss": {"b": 2, "c": 3}}}
    assert read_config(path, ["head.loss.d=4"])["head"]["loss"] == {"b": 2, "c": 3, "d": 4}
    assert read_config(path, ["head.loss={d: 4}"])["head"]["loss"] == {"d": 4}
    run = build(Run, raw_run() | read_config(write(tmp_path, alone="suites: !replace {a: {lr: 1e-4}}\n")))
    assert run.suites == {"a": Optim(lr=1e-4)}
    assert "not YAML: expected a mapping" in message(read_config, write(tmp_path, bad="a: !replace 3\n"))


def test_an_override_touches_one_of_two_keys_that_share_an_anchor(tmp_path: Path) -> None:
    path = write(tmp_path, run="a: &x {k: 1}\nb: *x\n")
    assert read_config(path, ["a.k=2"]) == {"a": {"k": 2}, "b": {"k": 1}}


def test_a_config_of_the_package_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, elsewhere = tmp_path / "package", tmp_path / "elsewhere"
    (package / "runs").mkdir(parents=True)
    elsewhere.mkdir()
    write(package / "runs", x="from: package\n")
    monkeypatch.setattr(loader, "PACKAGE_CONFIGS", package)
    monkeypatch.chdir(elsewhere)
    for name in ("configs/runs/x.yaml", "runs/x.yaml"):
        assert read_config(name) == {"from": "package"}
    assert read_config(write(elsewhere, own="base: runs/x.yaml\nmine: 1\n")) == {"from": "package", "mine": 1}
    (elsewhere / "runs").mkdir()
    write(elsewhere / "runs", x="from: here\n")
    assert read_config("runs/x.yaml") == {"from": "here"}


def test_shipped_lists_the_configs_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heads").mkdir()
    first, second = write(tmp_path, b=""), write(tmp_path / "heads", a="")
    monkeypatch.setattr(loader, "PACKAGE_CONFIGS", tmp_path)
    assert shipped() == [first, second]
    assert shipped("heads/*.yaml") == [second]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"run": "a: 1\nb: [1,\nc: 2\n"}, r"run.yaml:\d: not YAML: "),
        ({"run": "a: 1\nb: 2\na: 3\n"}, "run.yaml:3: not YAML: the key 'a' is given twice$"),
        ({"run": "- a\n- b\n"}, r"run.yaml: the top level should be a mapping of keys, got \['a', 'b'\]$"),
        ({"run": "base: gone.yaml\n"}, "run.yaml: base: gone.yaml: no such file$"),
        ({"run": "base: [a, b]\n"}, r"run.yaml: base: should be one file name, got \['a', 'b'\]$"),
        ({"run": "base: b.yaml", "b": "base: run.yaml"}, "run.yaml -> .*b.yaml -> .*run.yaml: base files form a cycle"),
        ({"run": "base: run.yaml"}, "run.yaml -> .*run.yaml: base files form a cycle$"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    assert re.search(problem, message(read_config, write(tmp_path, **files)))


def test_a_missing_file_a_folder_and_bytes_are_named(tmp_path: Path) -> None:
    assert message(read_config, "runs/gone.yaml") == "runs/gone.yaml: no such file"
    assert message(read_config, tmp_path) == f"{tmp_path}: a folder, not a file"
    (tmp_path / "b.yaml").write_bytes(b"a: \xff\n")
    assert message(read_config, tmp_path / "b.yaml").startswith(f"{tmp_path / 'b.yaml'}: cannot be read: ")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("optim.lr", "should be key=value or key.sub=value"),
        ("=3", "should be key=value or key.sub=value"),
        ("a..b=3", "should be key=value or key.sub=value"),
        ("name.sub=3", "name is no mapping but 'x'"),
        ("list.0=3", "list is no mapping but [1]"),
        ("a=[1", "the value is not YAML: "),
    ],
)
def test_a_bad_override_is_shown(tmp_path: Path, override: str, problem: str) -> None:
    path = write(tmp_path, run="name: x\nlist: [1]\n")
    assert message(read_config, path, [override]).startswith(f"override {override!r}: {problem}")


# Building


def test_nested_mappings_become_nested_dataclasses() -> None:
    raw = raw_run(optim={"lr": 2, "betas": [0, 0.5]}, suites={"a": {"lr": 1}}, stages=[{"num_steps": 3}])
    run = build(Run, raw | {"extra": {"any": [1, {"k": None}]}, "max_norm": None, "train": ["a"]})
    assert run == Run(
        name="a",
        head=Head(type="eagle3"),
        optim=Optim(lr=2.0, betas=(0.0, 0.5)),
        suites={"a": Optim(lr=1.0)},
        stages=[Optim(num_steps=3)],
        extra={"any": [1, {"k": None}]},
        max_norm=None,
        train=["a"],
    )
    assert isinstance(run.optim.lr, float) and isinstance(run.optim.betas, tuple)


def test_floats_that_yaml_reads_as_text_are_floats(tmp_path: Path) -> None:
    raw = read_config(write(tmp_path, run="name: 'n'\nhead: {type: medusa}\noptim: {lr: 1e-4, betas: [9e-1, 1]}\n"))
    assert raw["optim"]["lr"] == "1e-4"
    run = build(Run, raw | {"max_norm": "5e-1", "name": "1e-4"})
    assert (run.optim.lr, run.optim.betas, run.max_norm, run.name) == (1e-4, (0.9, 1.0), 0.5, "1e-4")


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (
            raw_run(head={"type": "eagle3", "featur_layers": [1]}),
            "head.featur_layers: unknown key; did you mean head.feature_layers?",
        ),
        (raw_run(optmi={}), "optmi: unknown key; did you mean optim?"),
        (
            raw_run(head={"type": "eagle3", "zzz": 1}),
            "head.zzz: unknown key; known keys are type, feature_layers, dropout",
        ),
        (raw_run(stages=[{}, {"lrr": 1}]), "stages.1.lrr: unknown key; did you mean stages.1.lr?"),
        (raw_run(suites={"chat": {"lrr": 1}}), "suites.chat.lrr: unknown key; did you mean suites.chat.lr?"),
        ({"nmae": "a", "head": {"type": "eagle3"}}, "nmae: unknown key; did you mean name?"),
        ({"head": {"type": "eagle3"}}, "name: required key is missing"),
        (raw_run(head={}), "head.type: required key is missing"),
        (raw_run(head=3), "head: should be a mapping of keys, got 3"),
        (raw_run(head={"type": "eagel"}), "head.type: should be 'eagle3' or 'medusa', got 'eagel'"),
        (raw_run(optim={"lr": "fast"}), "optim.lr: should be a valid number, got 'fast'"),
        (raw_run(optim={"lr": True}), "optim.lr: should be a valid number, got True"),
        (raw_run(optim={"num_steps": "3"}), "optim.num_steps: should be a valid integer, got '3'"),
        (raw_run(optim={"fused": 1}), "optim.fused: should be a valid boolean, got 1"),
        (raw_run(name=3), "name: should be a valid string, got 3"),
        (raw_run(train=3), "train: should be a valid string or a valid list, got 3"),
        (
            raw_run(head={"type": "eagle3", "feature_layers": [1, "x"]}),
            "head.feature_layers.1: should be a valid integer, got 'x'",
        ),
        (raw_run(optim={"lr": -1.0}), "optim: lr should be above 0, got -1.0"),
        (raw_run(optim={"lr": "a", "fused": 2}), "optim.lr: should be a valid number, got 'a' (and 1 more)"),
    ],
)
def test_a_wrong_key_or_value_is_named_by_its_full_path(raw: dict[str, Any], problem: str) -> None:
    assert message(build, Run, raw) == problem


# Writing


def test_a_dumped_config_builds_an_equal_object(tmp_path: Path) -> None:
    betas = (0.5, 0.25)
    run = Run(
        name="1e-4: é #",
        head=Head(type="medusa", feature_layers=[3, -1], dropout=1e-05),
        optim=Optim(lr=3e-4, betas=betas),
        suites={"x": Optim(betas=betas)},
        stages=[Optim(), Optim(num_steps=1)],
        extra={"nested": [1, None, {"k": [True, "null", "3", 1e22]}]},
        max_norm=None,
    )
    path = tmp_path / "new" / "config.yaml"
    dump_config(run, path)
    assert build(Run, read_config(path)) == run
    text = path.read_text(encoding="utf-8")
    assert list(read_config(path))[:4] == ["name", "head", "optim", "train"]
    assert "&" not in text and "*" not in text and "é" in text


def test_a_mapping_marked_replace_is_dumped_as_any_other(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, run="name: a\nhead: {type: eagle3}\nextra: !replace {k: 1}\n"))
    dump_config(build(Run, config), tmp_path / "again.yaml")
    assert read_config(tmp_path / "again.yaml")["extra"] == {"k": 1}


def test_a_failed_dump_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    dump_config(Head(type="medusa"), path)
    before = path.read_text()
    with pytest.raises(Exception, match="cannot represent an object"):
        dump_config(Run(name="a", head=Head(type="eagle3"), extra={"bad": object()}), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_key_of_several_lines_is_refused_in_one():
    assert message(build, Head, {"path\nof": 1}, where="head").startswith("head.path\\nof: unknown key")
