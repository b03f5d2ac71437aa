"""python -m pumice.compat run PROGRAM.py [ARGS...], or run -m MODULE [ARGS...]: a program on pumice's stand-ins."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from pumice.compat.install import LIBRARIES, install
from pumice.errors import OptionError

USAGE = f"""usage: python -m pumice.compat run [--only NAME[=MODE],...] (PROGRAM.py | -m MODULE) [ARGS...]

Runs a program with pumice in place of {", ".join(LIBRARIES)},
or of those named by --only; MODE is a version, as in torchsparse=1.4."""


def main(given: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    if not given or given[0] != "run" or len(given) < 2:
        print(USAGE, file=sys.stderr)
        return 2
    rest = list(given[1:])
    try:
        rest = _installed(rest)
    except OptionError as error:
        print(error, file=sys.stderr)
        return 2
    if rest[:1] == ["-m"] and len(rest) > 1:
        sys.argv = rest[1:]
        sys.path.insert(0, "")
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    elif rest:
        sys.argv = rest
        # Python puts the program's folder first; runpy does not.
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")
    else:
        print(USAGE, file=sys.stderr)
        return 2
    return 0


def _installed(rest: list[str]) -> list[str]:
    """Install what the options name; returns the arguments after them."""
    if rest[0] != "--only":
        install()
        return rest
    for each in rest[1].split(","):
        name, _, mode = each.partition("=")
        install(name, mode=mode or None)
    return rest[2:]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
