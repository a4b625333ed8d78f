"""What README and docs/serve.md say of engines is what was measured and what the exporters know."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.engines.export import ENGINES, LAYOUTS, export_head
from headstart.engines.heads import build_head, head_class, save_head
from headstart.engines.llamacpp import target_problem

ROOT = Path(__file__).parents[2]
DFLASH: dict[str, Any] = {"markov_rank": 0, "sample_from_anchor": False}
DFLASH2: dict[str, Any] = {**DFLASH, "conv_group_size": 4, "selector_rank": 8, "selector_top_k": 4}
LILICORR: dict[str, Any] = {**DFLASH, "selector_rank": 8, "selector_top_k": 4, "lattice_layers": 2, "lattice_size": 24}
PARALLEL: dict[str, Any] = {"parallel": True, "mask_token_id": 5}
# by row: the head, and its name in docs/results/vllm.json and llamacpp.json
KINDS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "EAGLE-3": ("eagle3", {}, "eagle3", "eagle3"),
    "P-EAGLE": ("eagle3", PARALLEL, "p-eagle", "p-eagle"),
    "DFlash": ("block", DFLASH, "dflash", "dflash"),
    "DFlash2": ("block", DFLASH2, "dflash2", "dflash2"),
    "LiLiCorr": ("block", LILICORR, "lilicorr", "lilicorr"),
    "DSpark": ("block", {"markov_rank": 8}, "dspark", "dspark"),
    "EAGLE-1": ("eagle", {}, "eagle", "eagle"),
    "MTP": ("mtp", {"layout": "mimo", "num_depths": 1}, "mtp", "mtp"),
    "Medusa": ("medusa", {}, "medusa", "medusa"),
    "draft model": ("draft_lm", {}, "draft_lm", "the target as its own draft model"),
    "PARD": ("draft_lm", PARALLEL, "pard", "pard"),
}
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp"}


def measured(name: str) -> list[str]:
    return [entry["head"] for entry in json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())]


def rows(page: str) -> dict[str, list[str]]:
    """The last cells of a page's table of heads, by the head."""
    lines = (line.strip("|").split("|") for line in (ROOT / page).read_text().splitlines() if line.startswith("|"))
    found = [[cell.strip() for cell in line] for line in lines]
    return {
        match[1]: cells[1:] for cells in found if (match := re.match(r"\[?([\w -]+)", cells[0])) and len(cells) == 4
    }


def exported(tmp_path: Path, target_for: Any, kind: str) -> set[str]:
    """What a head of a kind can be exported to, on a target that engines load it with."""
    family, options, *_ = KINDS[kind]
    head = build_head(head_class(family).config_class(**options), target_for(family))
    save_head(head, tmp_path / "head", dtype=torch.float32)
    # llama.cpp has no graph for MiMo's modules, and the targets of which it has one are not among the tests'
    can = {"llama.cpp"} if family == "mtp" and target_problem("mtp", "qwen3_next") is None else set[str]()
    for to in (*ENGINES, *LAYOUTS):
        try:
            export_head(tmp_path / "head", tmp_path / f"to-{to}", to=to)
        except BadInput:
            continue
        can.add(to)
    return can


@pytest.mark.parametrize("kind", KINDS)
def test_served_here_and_only_exported_are_told_apart(tmp_path, target_for, kind):
    _, _, in_vllm, in_llamacpp = KINDS[kind]
    can = exported(tmp_path, target_for, kind)
    counted = {
        "vllm": (in_vllm, measured("vllm")),
        "llama.cpp": (in_llamacpp, measured("llamacpp")),
        "sglang": ("", []),
    }
    served = {to for to, (name, heads) in counted.items() if any(re.match(rf"{name}(?![\w])", head) for head in heads)}
    assert served <= can
    wanted = [", ".join(TITLES[to] for to in TITLES if to in some) for some in (served, can & set(ENGINES) - served)]
    assert rows("README.md")[kind][1:] == wanted and rows("docs/serve.md")[kind][1:] == wanted
    assert set(re.findall(r"`([^`]+)`", rows("docs/serve.md")[kind][0])) == can
