"""Run a command line in this process, as its entry point does."""

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Ran:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def run_command(main, name, monkeypatch, capsys, *args):
    """Call `main` with these arguments in `sys.argv`; returns what it printed and its exit code."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
    capsys.readouterr()
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    caught = capsys.readouterr()
    return Ran(code, caught.out, caught.err)
