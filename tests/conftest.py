"""What every test shares: the GPU skip, the folder of real scans, thread count, caches, hypothesis profiles."""

import gc
import os
from pathlib import Path

import pytest
import torch
from jaxtyping import install_import_hook

# Shapes in signatures are checked under test, and only there.
with install_import_hook(["pumice.lower.reference"], "beartype.beartype"):
    import pumice  # noqa: F401

from cases import data_folder  # noqa: F401
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

MAX_THREADS = 4
COMPILED = Path(__file__).resolve().parents[1] / "build" / "tests" / "inductor"

# A test's time says nothing on a shared machine, so neither deadlines nor slow generation fail one.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
hypothesis_settings.register_profile("local", **_COMMON)
hypothesis_settings.register_profile("ci", derandomize=True, print_blob=True, **_COMMON)
hypothesis_settings.load_profile("ci" if os.environ.get("CI") else "local")


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def pytest_configure() -> None:
    # The tensors of the tests are small: more threads only wait for each other, and for those of other workers.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, min(_usable_cores() // workers, MAX_THREADS)))
    # What Inductor makes C++ compilers do is kept between runs, by the text of the source; its graphs are not, as they
    # do not hear of changes of our operators.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED))
    os.environ |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    # A pool of processes, each of which imports torch, costs more than it compiles.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if needy and not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="torch.cuda.is_available() is False")
        for item in needy:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    """What is there before a file's first test, tests and filled caches, is not searched for garbage again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def seeded() -> None:
    """The same random numbers in every run."""
    torch.manual_seed(0)
