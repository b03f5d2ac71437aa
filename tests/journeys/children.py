"""What the journeys measure, in processes of their own: nothing that other tests have cached or compiled is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
LIMIT = 600
"""Seconds that a process may take."""
FORGOTTEN = ("TRITON_INTERPRET", "PYTHONWARNINGS", "PUMICE_DATA")


def measured(module: str, **environment: str) -> Any:
    """What `python -m module` prints as JSON; it ends with an error if that does."""
    kept = {name: value for name, value in os.environ.items() if name not in FORGOTTEN}
    paths = os.pathsep.join((str(TESTS.parent / "src"), str(TESTS)))
    own = {"PYTHONPATH": paths, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with TemporaryDirectory(prefix="pumice-journeys-") as folder:
        caches = {"PUMICE_CACHE": f"{folder}/pumice", "TRITON_CACHE_DIR": f"{folder}/triton"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", module],
            env=kept | own | caches | environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
