"""The launches that journeys are compared with. `PYTHONPATH=src:tests python -m journeys.golden` writes them anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from journeys.children import measured

PATH = Path(__file__).parent / "launches.json"


def launches() -> dict[str, Any]:
    """The launches of each journey as they are now."""
    return measured("journeys.launches", TRITON_INTERPRET="1")


if __name__ == "__main__":
    PATH.write_text(json.dumps(launches(), indent=0) + "\n", encoding="utf-8")
