"""Modules of this folder import each other by name, in the tests as in refresh.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
