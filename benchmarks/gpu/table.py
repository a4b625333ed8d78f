"""Prints the most telling figures of a rung's files: a line for each cell, and for each training run its losses.

python -m headstart.benchmarks.gpu.table FOLDER
"""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

from ...base.jsonl import iter_jsonl
from ..store import Figures, describe

KEYS = """failed baseline_ms baseline_tokens_per_second baseline_gigabytes_per_second draft_ms verify_ms
    round_in_baseline_steps num_tokens model_chooses_too largest_logit_gap acceptance_length speedup
    texts_unexplained sampling_p_value tokens_per_second share_of_rows_over_step share_before_the_queues_end step_ms
    round_ms seconds_reading seconds_recording mfu peak_bytes first_step_seconds torch num_cores
    copy_gigabytes_per_second product_teraflops first_compile_seconds ahead_seconds seconds""".split()


def lines_of(folder: Path) -> list[str]:
    """The table's lines, by file."""
    lines = []
    for path in sorted(folder.glob("*.xml")):
        suite = ElementTree.parse(path).getroot()[0].attrib
        lines.append(f"{path.stem}: " + ", ".join(f"{suite[key]} {key}" for key in ("tests", "failures", "skipped")))
    for path in sorted(folder.glob("*.json")):
        document: Figures = json.loads(path.read_text())
        cells = document.get("cells")
        for name, cell in cells.items() if isinstance(cells, dict) else ():  # others are the product's own reports
            told = {key: cell[key] for key in KEYS if key in cell}
            lines.append(f"{path.stem}: {name}: {describe(told)}")
    for path in sorted(folder.glob("*.jsonl")):
        losses = [row["loss"] for _, row in iter_jsonl(path) if "loss" in row]
        lines.append(f"{path.stem}: losses {' '.join(f'{loss:.5f}' for loss in losses)}")
    return lines


if __name__ == "__main__":
    print("\n".join(lines_of(Path(sys.argv[1]))))
