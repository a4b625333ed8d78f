"""A stand-in for llama-server, for tests of several folders."""

import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "eval" / "measurement" / "fake_llama_server.py"


def write_llama_server(folder: Path) -> Path:
    """The script, which says what it answers, as a program in a folder."""
    binary = folder / "llama-server"
    binary.write_text(f"#!{sys.executable}\n{SCRIPT.read_text()}")
    binary.chmod(0o755)
    return binary
