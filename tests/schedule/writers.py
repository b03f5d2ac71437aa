"""What other processes do to a ledger. They load the few files that they need, and not torch."""

import importlib.util
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType

if "pumice" not in sys.modules:
    _ROOT = importlib.util.find_spec("pumice")
    assert _ROOT is not None and _ROOT.origin is not None
    _bare = ModuleType("pumice")
    _bare.__path__ = [str(Path(_ROOT.origin).parent)]
    sys.modules["pumice"] = _bare

from filelock import FileLock

from pumice.schedule.dataflow import DATAFLOWS
from pumice.schedule.tile import Tile
from pumice.schedule.tuned_plans import PlanKey, Plans, TunedPlan
from pumice.schedule.tuned_tiles import Key, Ledger


def key(writer: int, number: int) -> Key:
    return Key("some GPU", f"C{writer}[i] = A[i]", ("fp16",), (number,))


def put_many(path: Path, writer: int, count: int, start) -> None:
    """Put `count` tiles once all writers are there; ends with an error where one was not kept."""
    warnings.simplefilter("error")
    own = Ledger(path)
    start.wait()
    for number in range(count):
        own.put(key(writer, number), Tile(16, 1 << writer), seconds=number + 1)


def hold(path: Path, ready) -> None:
    """Begin to write, and never end."""
    with FileLock(f"{path}.lock"):
        path.with_name(f"{path.name}.0.tmp").write_text('{"version": 2, "tiles": [\n{"key": {"dev')
        ready.set()
        time.sleep(600)


def keep_plans(path: Path, writer: int, count: int, start) -> None:
    """Keep `count` plans once all writers are there, as ranks do that tune at once."""
    warnings.simplefilter("error")
    own, flows = Plans(path), {"a": DATAFLOWS["implicit-gemm-unsorted"]}
    start.wait()
    for number in range(count):
        key = PlanKey.of("some GPU", "float16", "training", f"{writer}.{number}", ((10.0, 2.0),))
        assert own.near(key, ((10.0, 2.0),)) is None
        own.keep(key, TunedPlan(flows, ((10.0, 2.0),), {"total": 1.0}, {"total": 0.5}))
