"""docs/api.md, made from the signatures and docstrings of the names in `headstart.__all__`.

python -m headstart.benchmarks.pages.api_page
"""

import ast
import re
from inspect import cleandoc
from pathlib import Path
from textwrap import wrap

import headstart

from ...base.files import write_text

ROOT = Path(__file__).parents[2]
PAGE = Path("docs/api.md")
METHODS = {"Target": ["load"]}  # of a class that the page shows beside its docstring
GROUPS = {
    "Load and decode": ["Target", "load_head", "generate"],
    "Train": ["load_run", "train_head"],
    "Measure": ["measure"],
    "Build and store heads": ["build_head", "start_head", "save_head"],
    "Export": ["export_head", "check_export"],
    "Errors": ["BadInput"],
}
INTRODUCTION = """\
# What can I call from Python?

```python
import headstart

target = headstart.Target.load("MODEL")
head = headstart.load_head("runs/mine/final", target)
token_ids, rounds = headstart.generate(target, head, target.tokenizer("Once").input_ids, max_new_tokens=64)
```

These names keep their meaning within a minor version; everything else may move. Other types in the signatures are
imported from their modules, as the files of `examples/` do.
This page is made from the docstrings: `python -m headstart.benchmarks.pages.api_page`.
"""


def definition(name: str) -> ast.FunctionDef | ast.ClassDef:
    """The syntax of a public name, in the file that defines it."""
    path = ROOT / Path(*headstart.PLACES[name].split(".")).with_suffix(".py")
    return member(ast.parse(path.read_text()), name)


def member(node: ast.Module | ast.ClassDef, name: str) -> ast.FunctionDef | ast.ClassDef:
    for one in node.body:
        if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == name:
            return one
    raise LookupError(f"{name} is not defined here")


def signature(node: ast.FunctionDef, name: str) -> str:
    """A call with its types; its arguments on lines of their own where it would be wider than 100 characters."""
    args = ast.unparse(node.args)
    args = re.sub(r"^cls, ", "", args)
    returns = f" -> {ast.unparse(node.returns)}".replace("'", "") if node.returns else ""
    line = f"{name}({args}){returns}"
    if len(line) <= 100:
        return line
    unbroken = [part.replace(" ", "\0") for part in re.split(r"(?<=,) (?=\w+(?::|=)|\*,)", args)]
    lines = wrap(" ".join(unbroken), 96, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join([f"{name}(", *(line.replace("\0", " ") for line in lines), f"){returns}"])


def prose(docstring: str) -> str:
    """A docstring as Markdown: what stands behind Args, Returns and Raises becomes a paragraph or a list."""
    out: list[str] = []
    for block in cleandoc(docstring).split("\n\n"):
        for part in re.split(r"\n(?=(?:Args|Returns|Raises):)", block):
            word, colon, rest = part.partition(":")
            if word in ("Args", "Returns", "Raises"):
                # an entry with an indented continuation is one line
                lines = re.sub(r"\n {8}", " ", rest).strip("\n").split("\n")
                entries = [line.strip() for line in lines if line.strip()]
                inline = not rest.startswith("\n")
                text = " ".join(entries) if inline else "".join(f"\n- {entry}" for entry in entries)
                out.append(f"**{word}{colon}** {text}" if inline else f"**{word}{colon}**\n{text}")
            else:
                out.append(part)
    return "\n\n".join(out)


def entry(name: str) -> str:
    node = definition(name)
    text = f"### {name}\n\n"
    if isinstance(node, ast.FunctionDef):
        text += f"```py\n{signature(node, name)}\n```\n\n"
    text += prose(ast.get_docstring(node) or "") + "\n"
    for method in METHODS.get(name, []):
        inner = member(node, method) if isinstance(node, ast.ClassDef) else None
        assert isinstance(inner, ast.FunctionDef)
        call = signature(inner, f"{name}.{method}")
        text += f"\n```py\n{call}\n```\n\n{prose(ast.get_docstring(inner) or '')}\n"
    return text


def page() -> str:
    groups = (f"## {title}\n\n" + "\n".join(map(entry, names)) for title, names in GROUPS.items())
    return INTRODUCTION + "\n" + "\n".join(groups)


if __name__ == "__main__":
    write_text(ROOT / PAGE, page())
