"""Rows of a ledger for tests: made up, and as lines of a file."""

import json
from dataclasses import asdict, replace

from benchmarks.harness.rows import Row

ROW = Row(
    suite="conv-forward",
    case="scene/k3/C32/fwd/tuned",
    metric="time",
    value=1.0,
    unit="ms",
    p20=1.0,
    p80=1.0,
    dtype="fp16",
    clock="gpu",
    peer="spconv",
    peer_value=2.0,
    peer_source="same run",
    device="GPU",
    versions={"torch": "2"},
    commit="c1",
    date="2026-01-01",
)


def made(**changes):
    """A row of a layer that takes 1 ms, and spconv 2, but for the changes."""
    return replace(ROW, **changes)


def timed(case, value, peer_value, **changes):
    """A row of that case, and the two times."""
    return made(case=case, value=value, peer_value=peer_value, **changes)


def written(path, rows):
    """The rows as a ledger."""
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
    return path
