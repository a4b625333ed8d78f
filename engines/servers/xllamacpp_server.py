"""llama.cpp's server as the Python package xllamacpp has it built, by those flags of llama-server that we give it."""

import argparse
import functools
import importlib
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

FIELDS: dict[str, tuple[str, type]] = {  # of its CommonParams
    "-m": ("model.path", str),
    "-c": ("n_ctx", int),
    "-np": ("n_parallel", int),
    "-t": ("cpuparams.n_threads", int),
    "-md": ("speculative.draft.mparams.path", str),
    "--spec-draft-n-max": ("speculative.draft.n_max", int),
    "--spec-draft-p-min": ("speculative.draft.p_min", float),
    "--lookup-cache-dynamic": ("speculative.ngram_cache.lookup_cache_dynamic", str),
    "--lookup-cache-static": ("speculative.ngram_cache.lookup_cache_static", str),
    "--port": ("port", int),
}


def parameters(package: Any, arguments: Sequence[str]) -> Any:
    """Flags as `CommonParams`. Exits with 2, and the flag's name, on one that is not known here."""
    start = "COMMON_SPECULATIVE_TYPE_"
    members = [name for name in dir(package.common_speculative_type) if name.startswith(start)]
    kinds = {name.removeprefix(start).lower().replace("_", "-"): name for name in members}
    parser = argparse.ArgumentParser(prog="xllamacpp", allow_abbrev=False, usage=argparse.SUPPRESS)
    for flag, (field, kind) in FIELDS.items():
        parser.add_argument(flag, dest=field, type=kind, default=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--spec-type", choices=kinds, default="none")
    told = vars(parser.parse_args(arguments))
    params = package.CommonParams()
    params.hostnames = [told.pop("host")]
    params.speculative.types = [getattr(package.common_speculative_type, kinds[told.pop("spec_type")])]
    for field, value in told.items():
        *path, name = field.split(".")
        setattr(functools.reduce(getattr, path, params), name, value)
    return params


def main() -> None:
    """Serve until the process is ended. What is wrong is in the server's own log."""
    package = importlib.import_module("xllamacpp")
    wanted = parameters(package, sys.argv[1:])
    try:
        server = package.Server(wanted)  # answers while it exists
    except RuntimeError:
        sys.exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):  # it has handlers that end its loop, and not the process
        signal.signal(number, signal.SIG_DFL)
    print(f"listening on {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
