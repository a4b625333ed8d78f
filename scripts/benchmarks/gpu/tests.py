"""The GPU suite's first stage: the tests that need a GPU, and what became of them, as JSON.

    python -m headstart.scripts.benchmarks.gpu.tests OUTPUT.json [PYTEST ARGUMENT ...]

Exit code 1 where one failed, or where there is a GPU and none passed.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ....eval.report.document import device_name, write_whole
from ....heads.loading import default_device


class Outcomes:
    """A plugin of pytest that keeps how each test ended."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.skipped: list[str] = []
        self.failed: dict[str, str] = {}  # with the end of the traceback

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr)[-2000:]
        elif report.skipped:
            self.skipped.append(report.nodeid)
        elif report.when == "call":
            self.passed.append(report.nodeid)


def main() -> int:
    output, outcomes = Path(sys.argv[1]), Outcomes()
    code = pytest.main(["-m", "gpu", *sys.argv[2:]], plugins=[outcomes])
    found = {
        "device": device_name(torch.device(default_device())),
        "torch": torch.__version__,
        "num_passed": len(outcomes.passed),
    }
    found |= {"num_skipped": len(outcomes.skipped), "failed": outcomes.failed}
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, json.dumps(found, indent=2) + "\n")
    return 1 if code or (torch.cuda.is_available() and not outcomes.passed) else 0


if __name__ == "__main__":
    sys.exit(main())
