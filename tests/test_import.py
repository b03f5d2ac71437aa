"""Importing pumice is cheap: no Triton, no plotting, no command line, no GPU."""

import json
import subprocess
import sys

import pytest

HEAVY = {"triton", "plotly", "matplotlib", "typer", "rich"}
MODULES = ("pumice", "pumice.cli", "rich.table")

SCRIPT = """
import json, sys
from importlib import import_module
import torch
found, before = {}, set(sys.modules)
for name in sys.argv[1:]:
    import_module(name)
    found[name] = {"new": sorted(set(sys.modules) - before), "cuda": torch.cuda.is_initialized()}
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def reports() -> dict:
    """What is loaded after each of the modules, one behind the other in a fresh process."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *MODULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _heavy(report: dict) -> set[str]:
    return HEAVY & {name.partition(".")[0] for name in report["new"]}


def test_import_is_light(reports):
    report = reports["pumice"]
    assert "pumice" in report["new"] and "pumice.testing" not in report["new"]
    assert not _heavy(report)
    assert not report["cuda"]


def test_the_tools_room_loads_no_plotting_or_command_line_library(reports):
    assert not _heavy(reports["pumice.cli"])


def test_the_check_can_fail(reports):
    assert _heavy(reports["rich.table"]) == {"rich"}
