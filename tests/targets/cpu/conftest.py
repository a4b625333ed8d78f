"""The kinds of targets, which the tests of the kernels run through too, are imported by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kinds"))
