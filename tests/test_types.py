"""Type checkers of users know the type of every name of the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_type_is_known(tmp_path):
    """But for stand-ins of other libraries (pumice.compat.*), which make many of their names in loops."""
    pytest.importorskip("pyright", reason="pyright is not installed")
    # pyright asks the first `python` on the path where packages are.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "pyright", "--verifytypes", "pumice", "--ignoreexternal", "--outputjson"]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}, capture_output=True
    )
    symbols = json.loads(ran.stdout)["typeCompleteness"]["symbols"]
    lacking = [
        f"{each['name']}: {[said['message'] for said in each['diagnostics']]}"
        for each in symbols
        if not each["name"].startswith("pumice.compat.") and not (each["isTypeKnown"] and not each["isTypeAmbiguous"])
    ]
    assert len(symbols) > 6000 and not lacking, "\n".join(lacking)
