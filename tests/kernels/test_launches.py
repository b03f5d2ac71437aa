"""Kernels of coordinates and of norms compile for every target as they are launched, and to what they are fast with."""

import importlib
import importlib.util
from importlib.metadata import version

import pytest
from kernels.cross import NVIDIA

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from kernels.launches import LOWER, jobs, variants

JOBS = tuple(jobs())
COUNTING = (
    "lookup_kernels.search_neighbours",
    "lookup_kernels.count_bits",
    "lookup_kernels.pair_up",
)
"""Kernels that count bits."""

SPILLS = {
    # Coordinates of two sides, compared axis by axis.
    "lookup_kernels.neighbours D=3 K=27 KIND=wide": 32,
    # 128 rows times 32 taps at once.
    "pair_kernels.list_pairs K=125": 128,
    "pair_kernels.list_pairs sm_80 K=125": 216,
    # 32 entries of a thread, each with its mean and its squares: the fastest on sm_90.
    "row_kernels.moments sm_80 ROWS=128 LANES=32 w4": 16,
    # Rows of three channels are copied entry by entry, 32 addresses of a thread.
    "row_kernels.products sm_90 C=3 ROWS=256 STAGES=2": 84,
}
"""Known spills: bytes at most."""

if tuple(map(int, version("triton").split(".")[:2])) < (3, 7):
    # The same source comes out worse.
    SPILLS |= {"pair_kernels.list_pairs K=125": 320}


def chosen(*kernels, targets=None, **constants):
    """The jobs of some kernels with some constants."""
    wanted = set(constants.items())
    return pytest.mark.parametrize(
        "job",
        [
            job
            for job in JOBS
            if (not kernels or job.variant.kernel in kernels)
            and (targets is None or job.target in targets)
            and wanted <= set(job.variant.constants)
        ],
        ids=lambda job: job.name,
    )


def known(job):
    """What is known to spill of a job whose name has all words of an entry."""
    return max((most for words, most in SPILLS.items() if set(words.split()) <= set(job.name.split())), default=0)


def test_every_kernel_is_in_the_table():
    from triton import JITFunction

    files = {
        name: importlib.import_module(f"pumice.coords.{name}")
        for name in ("lookup_kernels", "tile_kernels", "pair_kernels", "chain_kernels", "neighbor_kernels")
    }
    files |= {name: importlib.import_module(f"pumice.lower.{name}") for name in LOWER}
    kernels = {
        f"{file}.{name}"
        for file, module in files.items()
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and not name.startswith("_")
    }
    assert kernels == {variant.kernel for variant in variants()} and len(kernels) > 10


def test_names_tell_jobs_apart():
    assert len({job.name for job in JOBS}) == len(JOBS)


@chosen()
def test_compiles(built, job):
    most = 100 if job.variant.kernel == "block_row_kernels.block_rows" else 48
    assert built.shared <= (64 if job.target == "gfx942" else most) * 1024


@chosen(targets=NVIDIA)
def test_nothing_spills(built, job):
    assert built.spilled <= known(job)


@chosen("lookup_kernels.insert", targets=NVIDIA, KIND="hash")
def test_keys_and_rows_are_entered_at_once(built):
    """Key and row are one word; the least that comes by stays, by one instruction that knows a mask."""
    assert built.instructions["min64"] > 0 and built.instructions["cas64"] == built.instructions["cas32"] == 0


@chosen("lookup_kernels.insert", targets=NVIDIA, KIND="wide")
def test_rows_are_entered_in_32_bits(built):
    assert built.instructions["cas32"] > 0 and built.instructions["cas64"] == 0


@chosen("block_row_kernels.block_rows", targets=("sm_90",))
def test_blocks_are_multiplied_while_others_are_copied(built):
    """Of any width: in 16 bytes at once."""
    assert built.instructions["wgmma"] > 0 and built.instructions["copies"] > 0


READING = ("lookup_kernels.insert", "lookup_kernels.number_rows", "chain_kernels.insert_cells")
"""Kernels that read coordinates."""


@chosen(*READING, targets=NVIDIA, D=3)
def test_the_16_bytes_of_a_row_are_one_load(built, job):
    """By a thread for each row; a "wide" table compares rows axis by axis."""
    constants = dict(job.variant.constants)
    expected = constants["BLOCK"] >= 32 * job.variant.warps and constants.get("KIND") != "wide"
    assert bool(built.instructions["load16"]) == expected


@chosen(*COUNTING, targets=NVIDIA)
def test_bits_are_counted_by_one_instruction(built):
    assert built.instructions["popc"] > 0 and built.instructions["halves"] == 0


MOVEMENT = [f"movement_kernels.{way}_{order}" for way in ("gather", "scatter") for order in ("slots", "stationary")]


def moving(scalar, channels, *dtypes):
    """Jobs that move rows of whole vectors in some dtypes."""
    jobs = [job for job in JOBS if job.variant.kernel in MOVEMENT and job.target in NVIDIA]
    kept = [
        job
        for job in jobs
        if job.variant.tensors[0] in dtypes
        and dict(job.variant.constants)["C"] in channels
        and dict(job.variant.constants).get("SCALAR", False) == scalar
    ]
    return pytest.mark.parametrize("job", kept, ids=lambda job: job.name)


@moving(False, (96, 256), "*fp16", "*bf16")
def test_rows_move_in_vectors(built, job):
    assert built.instructions["wide"] >= 1 and built.instructions["narrow"] == 0
    atomic = dict(job.variant.constants).get("ATOMIC", False)
    assert (built.instructions["add4"] > 0) == (atomic and job.target == "sm_90")


@moving(True, (96, 256), "*fp16", "*bf16")
def test_scalar_movement_is_of_one_element_at_a_time(built, job):
    assert built.instructions["narrow"] > 0 and built.instructions["wide"] == built.instructions["add4"] == 0
