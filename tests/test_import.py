"""Importing pumice is cheap: no Triton, no plotting, no command line, no GPU."""

import json
import subprocess
import sys

HEAVY = {"triton", "plotly", "matplotlib", "typer", "rich"}

SCRIPT = """
import json, sys
import torch
before = set(sys.modules)
import {module}
json.dump({{"new": sorted(set(sys.modules) - before), "cuda": torch.cuda.is_initialized()}}, sys.stdout)
"""


def _import_in_a_fresh_process(module: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(module=module)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _heavy(report: dict) -> set[str]:
    return HEAVY & {name.partition(".")[0] for name in report["new"]}


def test_import_is_light():
    report = _import_in_a_fresh_process("pumice")
    assert "pumice" in report["new"]
    assert not _heavy(report)
    assert not report["cuda"]


def test_the_check_can_fail():
    assert _heavy(_import_in_a_fresh_process("rich.table")) == {"rich"}
