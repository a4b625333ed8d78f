"""YAML files with inheritance and overrides, turned into plain dataclasses with strict keys and types."""

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Strict, TypeAdapter, ValidationError, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # pydantic refuses typing.TypedDict before Python 3.12

from ..base.errors import BadInput
from ..base.files import LOCAL, write_text

T = TypeVar("T")
PACKAGE_CONFIGS = Path(__file__).resolve().parent


# ---------------------------------------------------------------------------------------------------------------------
# Reading: file -> bases merged in -> overrides


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The YAML file at `path` as a dict, with its `base:` files merged below it and `key.sub=value` overrides on top.

    `base: other.yaml` is relative to the file that names it, or to the configs in the package. Mappings merge key by
    key; everything else, lists too, is replaced, and so is what lies below a mapping marked `!replace {...}`. An
    override replaces what is at its key, a mapping as a whole; its value is YAML, and nothing after `=` means null. The
    key `base` is reserved. A relative path that is not in the working directory is looked up in the package's configs,
    so `configs/runs/x.yaml` works from an installed wheel.

    BadInput: no such file, a folder, not YAML (with FILE:LINE), a key given twice, a top level that is no mapping, a
    cycle of bases, an override without `=` or through something that is no mapping.
    """
    config = _read_with_bases(find_config(Path(path).expanduser()), chain=())
    for override in overrides:
        _apply_override(config, override)
    return config


def shipped(pattern: str = "**/*.yaml") -> list[Path]:
    """The config files in the package that match a glob pattern, sorted."""
    return sorted(PACKAGE_CONFIGS.glob(pattern))


def find_config(path: Path, *, folder: Path = Path(), named_by: str = "") -> Path:
    """The file at `path` in a folder, else in the package's configs. Raises BadInput; named_by: opens its message."""
    inside = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    for candidate in (folder / path, PACKAGE_CONFIGS / inside):
        if candidate.is_file():
            return candidate
    problem = "a folder, not a file" if (folder / path).is_dir() else "no such file"
    raise BadInput(f"{named_by}{path}: {problem}")


def _read_with_bases(path: Path, *, chain: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in [other.resolve() for other in chain]:
        raise BadInput(f"{' -> '.join(map(str, [*chain, path]))}: base files form a cycle")
    config = _read_yaml(path)
    base = config.pop("base", None)
    if base is None:
        return config
    if not isinstance(base, str):
        raise BadInput(f"{path}: base: should be one file name, got {base!r}")
    base_path = find_config(Path(base), folder=path.parent, named_by=f"{path}: base: ")
    return _merge(_read_with_bases(base_path, chain=(*chain, path)), config)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict) and not isinstance(value, _Replacing)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


class _Replacing(dict):
    """A mapping that replaces the one of the base file instead of being merged into it."""


class _OneKeyOnceLoader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys in a mapping, of which PyYAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if key_node.value in keys:
                problem = f"the key {key_node.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            keys.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _replacing(loader: _OneKeyOnceLoader, node: yaml.MappingNode) -> _Replacing:
    return _Replacing(loader.construct_mapping(node, deep=True))


_OneKeyOnceLoader.add_constructor("!replace", _replacing)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=_OneKeyOnceLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BadInput(f"{path}:{line}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:  # of numbers too long, nesting too deep
        raise BadInput(f"{path}: cannot be read: {_one_line(error)}") from error
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise BadInput(f"{path}: the top level should be a mapping of keys, got {_shown(config)}")
    return config


def _apply_override(config: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise BadInput(f"override {override!r}: should be key=value or key.sub=value")
    try:
        value = yaml.load(text, Loader=_OneKeyOnceLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"override {override!r}: the value is not YAML: {_one_line(error)}") from error
    for depth, key in enumerate(keys[:-1], start=1):
        inner = {} if config.get(key) is None else config[key]
        if not isinstance(inner, dict):
            raise BadInput(f"override {override!r}: {'.'.join(keys[:depth])} is no mapping but {_shown(inner)}")
        config[key] = dict(inner)  # a copy: a YAML anchor may put the same mapping under another key too
        config = config[key]
    config[keys[-1]] = value


# ---------------------------------------------------------------------------------------------------------------------
# Building: dict -> dataclass. Each dataclass becomes a strict typed dict for pydantic, then the object itself.


def build(cls: type[T], raw: Mapping[str, Any], *, where: str = "") -> T:
    """The dataclass `cls`, nested dataclasses included, from nested mappings such as `read_config` returns.

    Strict: an unknown key, a missing one, or a value of another type is BadInput with the dotted path, which opens with
    `where`. Only these are converted: text such as `1e-4` and whole numbers where a float is wanted, lists where a
    tuple is. A ValueError from `__post_init__` becomes BadInput with the path too.
    """
    try:
        return _checks_of(cls).validate_python(raw)
    except ValidationError as error:
        raise BadInput(_first_problem(error, raw, where)) from error


@cache
def _checks_of(cls: type) -> TypeAdapter[Any]:
    """Made once: that takes far longer than a check."""
    return TypeAdapter(_typed(cls))


def _typed(annotation: Any) -> Any:
    """The annotation with every dataclass and scalar in it replaced by one that pydantic checks strictly."""
    origin, args = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _typed_dataclass(annotation)
    if annotation is float:
        return Annotated[float, BeforeValidator(_number), Strict()]
    if annotation in (int, bool, str):
        return Annotated[annotation, Strict()]
    if origin is Annotated:
        expanded = AfterValidator(os.path.expanduser)
        return Annotated[(_typed(args[0]), *(expanded if part is LOCAL else part for part in annotation.__metadata__))]
    if origin in (Union, UnionType):
        return Union[tuple(_typed(arg) for arg in args)]  # noqa: UP007 (built from a tuple)
    if origin is None or origin is Literal or not args:
        return annotation
    return origin[tuple(arg if arg is ... else _typed(arg) for arg in args)]


def _typed_dataclass(cls: type) -> Any:
    hints = get_type_hints(cls, include_extras=True)
    keys = {}
    for field in dataclasses.fields(cls):
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        if field.init:
            keys[field.name] = NotRequired[_typed(hints[field.name])] if has_default else _typed(hints[field.name])
    shape = with_config(ConfigDict(arbitrary_types_allowed=True))(TypedDict(cls.__name__, keys))  # type: ignore
    return Annotated[shape, BeforeValidator(partial(_known_keys_only, list(keys))), AfterValidator(lambda d: cls(**d))]


def _number(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value  # pydantic then says what it should have been


def _known_keys_only(known: list[str], value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise PydanticCustomError("not_a_mapping", "should be a mapping of keys")
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = {"key": str(key), "near": near[0] if near else "", "known": ", ".join(known)}
            raise PydanticCustomError("unknown_key", "unknown key", hint)
    return value


def _first_problem(error: ValidationError, raw: Any, where: str) -> str:
    """One line for the first faulty key; what the members of a union expected is joined by 'or'."""
    errors = error.errors(include_url=False)
    problems = [(_dotted(where, detail["loc"], raw, detail["type"]), detail) for detail in errors]
    problems.sort(key=lambda problem: problem[1]["type"] != "unknown_key")  # a typo explains the missing key beside it
    path, first = problems[0]
    others = len({other for other, _ in problems} - {path})
    more = f" (and {others} more)" if others else ""
    if first["type"] == "unknown_key":
        key, near, known = (first["ctx"][name] for name in ("key", "near", "known"))  # pyright: ignore
        hint = f"did you mean {_join(path, near)}?" if near else f"known keys are {known}"
        return f"{_join(path, key)}: unknown key; {hint}{more}"
    path = path or "config"
    if first["type"] == "missing":
        return f"{path}: required key is missing{more}"
    if first["type"] == "value_error":
        return f"{path}: {_one_line(first['ctx']['error'])}{more}"  # pyright: ignore
    wanted = [item["msg"].removeprefix("Input ").removeprefix("should be ") for at, item in problems if at == path]
    return f"{path}: should be {' or '.join(dict.fromkeys(wanted))}, got {_shown(first['input'])}{more}"


def _dotted(where: str, loc: tuple[int | str, ...], raw: Any, kind: str) -> str:
    """The path of an error in the user's data: pydantic's location without its labels for members of a union."""
    path = where
    for index, part in enumerate(loc):
        if isinstance(raw, Mapping) and part in raw:
            raw, path = raw[part], _join(path, str(part))
        elif isinstance(raw, list) and isinstance(part, int):
            raw, path = raw[part], _join(path, str(part))
        elif kind == "missing" and index == len(loc) - 1:
            path = _join(path, str(part))
    return path


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


# ---------------------------------------------------------------------------------------------------------------------
# Writing: dataclass -> file


def dump_config(config: Any, path: str | Path) -> None:
    """Writes a config dataclass as YAML in field order, so that `build(type(config), read_config(path))` equals it."""
    text = yaml.dump(dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    write_text(path, text)


class _Dumper(yaml.SafeDumper):
    """SafeDumper without anchors: a value used twice is written two times."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(_Replacing, yaml.SafeDumper.represent_dict)
