"""`accelerate launch -m headstart.train CONFIG key=value ...`: `headstart train` on several devices."""

import sys

from ..base.ending import ending_in_time
from ..base.errors import BadInput
from .inputs.config import load_run
from .trainer import train_head


def main(arguments: list[str]) -> int:
    """Train; returns the exit code, 2 on bad input."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: accelerate launch -m headstart.train CONFIG [key=value ...]    (see: headstart train --help)")
        return 0 if arguments else 2
    try:
        with ending_in_time():
            train_head(load_run(arguments[0], arguments[1:]))
    except BadInput as error:
        print(f"headstart: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
