"""The glossary's words are the code's, and a class name means one thing."""

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "base configs targets heads engines eval data_pipelines train scripts benchmarks examples".split()
SOURCES = {path: path.read_text() for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}


def test_words_in_code_font_are_in_the_code():
    terms = set(re.findall(r"`([A-Za-z_]\w*)[^`]*`", (ROOT / "docs" / "glossary.md").read_text()))
    words = {word for text in SOURCES.values() for word in re.findall(r"\w+", text)}
    missing = sorted(terms - words)
    assert len(terms) > 15 and not missing, "defined in docs/glossary.md, and in no code"


def test_a_class_name_is_defined_once():
    places = defaultdict(list)
    for path, text in SOURCES.items():
        for name in re.findall(r"^ *class (\w+)[(:]", text, re.M):
            places[name].append(str(path.relative_to(ROOT)))
    twice = {name: at for name, at in places.items() if len(at) > 1}
    assert len(places) > 100 and not twice, "one word, one meaning: docs/glossary.md"
