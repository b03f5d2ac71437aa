"""Emitted kernels compile for every target, and what comes out is what they are fast with."""

import re
from functools import partial
from importlib.metadata import version
from itertools import permutations

import pytest
from kernels.cases import CASES, LARGE, SMALL_BLOCK, STUDIES, only
from kernels.cross import NVIDIA, TARGETS, Job

from pumice.language.derive import derivative
from pumice.language.formats import parse_format
from pumice.language.nodes import Access, accesses_of, arrays_of
from pumice.language.parse import parse
from pumice.language.rewrite import StorageForm, lower_statement
from pumice.lower.dataflow import CONV, GROUPED_CONV
from pumice.lower.epilogue import ACTIVATIONS
from pumice.lower.maps import FORMS
from pumice.schedule.tile import Tile

PRODUCTS = ("block_group_coo_128", "conv_compacted", "conv_compacted_t:dX", "conv_grouped:dW", "tp")
ONE_TARGET = ("bcsr_", "conv_g_", "conv_online", "conv_table", "tp_own", "tp_grouped", "tp_tables_own")
"""Like others in all but an axis: compiled for sm_90 alone."""
TWO_PRODUCTS = ("block_group_coo_128", "conv_grouped:dW")
"""Of the products those in other dtypes for targets besides sm_90."""


def _all_cases():
    for name, case in CASES.items():
        if STUDIES[case.study].block != SMALL_BLOCK:
            yield from (Job(name, t) for t in TARGETS if t == "sm_90" or not name.startswith(ONE_TARGET))


def _precisions():
    for name in PRODUCTS:
        for target in TARGETS if name in TWO_PRODUCTS else ("sm_90",):
            yield Job(name, target, "bf16")
            yield Job(name, target, "fp32", "tf32")
    for name in PRODUCTS[:2]:
        # For sm_80 the larger tile in float32 spills so much that it takes long to compile.
        for target in TARGETS if name == "conv_compacted" else TARGETS[1:]:
            yield Job(name, target, "fp32", "ieee")
            yield Job(name, target, "fp32", "bf16x3")
            if target in NVIDIA:
                yield Job(name, target, "fp32", "tf32x3")
    sums = Tile(128, 128, 64, warps=8, stages=2, prefetch_indices=True)
    yield from (Job("conv_grouped:dW", target, "fp32", "bf16x6", tile=sums) for target in NVIDIA)


def _doubles():
    for name in ("conv_compacted", "conv_grouped:dW", "tp", "coo"):
        for target in TARGETS if name == "conv_compacted" else ("sm_90",):
            yield Job(name, target, "fp64", "ieee", tile=Tile(64, 64, 16, stages=2))


def _wide():
    for target in TARGETS:
        yield Job("conv_compacted", target, sizes=(("I", 1 << 25),))
        yield Job("conv_compacted", target, sizes=(("N", 1 << 25),))
        yield Job("block_group_coo_32", target, sizes=(("K", 1 << 20),))


def _tiles():
    for tile in (Tile(64, 64, 32, stages=4), Tile(128, 256, 64, warps=8, stages=3), Tile(16, 128, 64, stages=4)):
        yield Job("conv_compacted", "sm_90", tile=tile)
    for target in TARGETS:
        yield Job("coo", target, tile=Tile(16, 128, segment_threads=4))
        for stages in (3, 4):
            yield Job("conv_compacted", target, tile=Tile(128, 128, 64, warps=8, stages=stages, prefetch_indices=True))
        yield Job("conv_compacted", target, "fp32", "tf32", tile=Tile(128, 64, 32, stages=3, prefetch_indices=True))
        yield Job("conv_compacted", target, tile=Tile(64, 64, 64, stages=4, prefetch_indices=True, stream_k_chunk=8))
        yield Job("conv_compacted_t:dX", target, "bf16", tile=Tile(64, 128, 64, stages=5, stream_k_chunk=16))
        yield Job("block_group_coo_32", target, tile=Tile(256, 32, 32, stages=3, swapped=True, prefetch_indices=True))
        yield Job("group_coo", target, tile=Tile(32, 32, segment_threads=16, column_major_grid=True))
        for name in ("coo", "group_coo"):
            yield Job(name, target, tile=Tile(16, 128, 128, stages=2, stacked=True))
        yield Job("coo", target, "bf16", tile=Tile(16, 64, 256, stages=3, stacked=True))


def _epilogues():
    for target in TARGETS:
        for activation in ACTIVATIONS if target == "sm_90" else ("", "gelu"):
            yield Job("conv_compacted", target, activation=activation)
        yield Job("coo", target, tile=Tile(16, 128, 128, stages=2, stacked=True), activation="relu")


def _packs():
    deep = Tile(128, 32, 64, stages=3, packed=True, prefetch_indices=True)
    for target in TARGETS:
        yield from (Job("conv_compacted", target, sizes=(("c", c), ("n", 32)), tile=deep) for c in (3, 4, 8))
    for kind, channels in (("bf16", 8), ("fp32", 3), ("fp32", 4), ("i8", 16), ("fp8", 8)):
        yield Job("conv_compacted", "sm_90", kind, sizes=(("c", channels), ("n", 64)), activation="relu")
    yield Job("conv_g_compacted", "sm_90", sizes=(("c", 4), ("n", 32)))
    yield Job("conv_compacted", "sm_90", sizes=(("c", 4), ("I", 1 << 30)))


def _bytes():
    yield from (Job("conv_compacted", target, "i8", activation="relu") for target in TARGETS)
    yield Job("conv_compacted", "sm_90", "fp8", activation="relu")
    yield from (Job("conv_compacted", "sm_90", kind, sizes=(("c", 16),), activation="") for kind in ("i8", "fp8"))


def _slices():
    """96 channels over as many tiles as fill the device several times."""
    sizes = (("c", 96), ("n", 96), ("T", 1400))
    for kind in ("fp16", "bf16"):
        yield Job("conv_compacted", "sm_90", kind, sizes=sizes, activation="relu")
    shared = Tile(128, 128, 32, stages=4, prefetch_indices=True, epilogue_subtiles=4, stream_k_chunk=8)
    yield Job("conv_compacted", "sm_90", sizes=sizes, tile=shared, activation="")


STUDIED = (_all_cases, _precisions, _doubles, _wide, _tiles, _epilogues, _packs, _bytes, _slices)
JOBS = tuple(dict.fromkeys(job for made in STUDIED for job in made()))

SPILLS = {
    # Folded columns in tiles of 16 x 512: too many for the registers.
    "tp:dV": 1500,
    "tp_own:dV": 8000,
    "tp_grouped:dV": 1500,
    "tp_grouped_own:dV": 2500,
    # Tiles of 128 x 128 by 4 warps, the fastest on an H200.
    "block_group_coo_128 sm_80 fp16": 48,
    "block_group_coo_128 sm_80 bf16": 48,
    "block_group_coo_128 sm_90 fp32 ieee": 32,
    "block_group_coo_128 sm_90 fp32 bf16x3": 800,
    "block_group_coo_128 sm_90 fp32 tf32x3": 1200,
    # float32 by several products holds its operands in several parts.
    "conv_compacted sm_80 fp32 tf32x3": 16_000,
    "conv_grouped:dW sm_80 fp32 bf16x6 128x128x64 w8 s2 prefetch": 4000,
}
"""Known spills of cases and jobs: bytes at most (registers on AMD)."""
SERIALIZED = {"tp_grouped:dW sm_90 fp16", "tp sm_90 fp32 tf32", "tp_tables:dW sm_90 fp16"}
SERIALIZED |= {"conv_compacted sm_90 fp8 epilogue relu", "conv_compacted sm_90 fp8 c=16 epilogue "}
SERIALIZED |= {"conv_compacted sm_90 fp8 c=8 n=64 epilogue relu"}
"""Where ptxas is known to wait for each wgmma: the left side is a product, made in registers; the sum of each turn of
8-bit floats is added in float32."""
MADE = {"tp_tables:dY"}
"""Where such a side has no buffers of its own."""

if tuple(map(int, version("triton").split(".")[:2])) < (3, 7):
    # The same sources come out worse.
    SPILLS |= {
        "conv_grouped:dW sm_80 fp16": 48,
        "conv_grouped:dW sm_80 bf16": 48,
        "block_group_coo_128 sm_90 fp32 ieee": 64,
        "block_group_coo_128 gfx942 fp32 bf16x3": 32,
    }
    SERIALIZED |= {
        "conv_grouped:dW sm_90 fp16",
        "conv_grouped:dW sm_90 bf16",
        "conv_g_grouped:dW sm_90 fp16",
        "tp sm_90 fp16",
        "tp sm_90 bf16",
        "conv_compacted sm_90 fp32 tf32",
        "conv_compacted sm_90 fp16 128x256x64 w8 s3",
    }


def every(jobs=JOBS):
    return pytest.mark.parametrize("job", list(jobs), ids=lambda job: job.name)


@every()
def test_compiles(built):
    assert built.shared <= 227 * 1024


@every()
def test_nothing_spills(built, job):
    # What an epilogue spills it does once a tile, behind the loop.
    known = 800 if job.activation != "-" else SPILLS.get(job.name, SPILLS.get(job.case, 0))
    assert built.spilled <= known


@every(_slices())
def test_slices_spill_nothing(built):
    """With a residual, for which whole tiles of so many sums have no registers."""
    assert built.tile.epilogue_subtiles == 4 and built.spilled == 0


@every(job for job in JOBS if job.target == "gfx942")
def test_fits_local_memory(built):
    assert built.shared <= 64 * 1024


# Matrix products
def exact(job):
    return job.dtype in ("fp32", "fp64") and job.precision == "ieee"


@every(job for job in JOBS if not exact(job))
def test_products_use_matrix_units(built, job):
    if not built.product:
        return
    if job.target == "sm_90" and built.tile.rows >= 64 and built.tile.warps % 4 == 0:
        assert built.instructions["wgmma"] > 0
    else:
        assert built.instructions["mfma" if job.target == "gfx942" else "mma"] > 0


@every(job for job in JOBS if job.target == "sm_90")
def test_no_product_waits_for_each_instruction(built, job):
    assert not built.serialized or job.name in SERIALIZED


@every(job for job in JOBS if job.target in NVIDIA)
def test_stages_become_buffers(built, job):
    """As many as Triton makes of them: an index that is waited for halves the turns that are under way."""
    ahead = built.tile.stages - 1
    alone = built.tile.packed and not widths_of_packs(job)
    if built.product and built.turns and not alone:
        assert built.buffers >= max(1, ahead // 2 if built.chained else ahead)


@every(job for job in JOBS if job.target in NVIDIA and job.tile is None and job.dtype != "fp32")
def test_loads_run_ahead(built, job):
    """Two buffers at least of both sides, where there is a loop. Stacks rather fill the device with many programs."""
    if built.product and built.turns and not built.tile.stacked:
        assert built.buffers >= 2
        assert built.shared >= 2 * built.stage or job.case in MADE


@every(job for job in JOBS if job.target == "sm_90" and job.dtype == "fp32" and job.precision == "tf32")
def test_float32_runs_ahead(built):
    if built.product and built.turns and not built.serialized:
        assert built.shared >= 2 * built.stage


@every(job for job in JOBS if job.target in NVIDIA)
def test_values_are_copied_in_sixteen_bytes(built, job):
    """Both sides of a product; index arrays and factors of a whole row may be copied in fours.

    Of a pack as many as an entry has side by side, where that is a power of two; else one by one, halves by no copy.

    So may be a side in float32 that is not contiguous along the reduction: wgmma wants it turned around.
    """
    if not built.product:
        return
    copied = {(operand, size) for operand, size, _ in built.copies if operand in built.sides}
    if built.tile.packed:
        assert {size for _, size in copied} == widths_of_packs(job)
        return
    turned = job.target == "sm_90" and job.dtype == "fp32"
    for operand, size in copied:
        assert size == 16 or (turned and not built.sides[operand]), f"{operand}: {size} bytes at once, {built.copies}"
    assert copied or not built.turns


def widths_of_packs(job):
    channels, bits = dict(job.sizes)["c"], {"fp32": 32, "i8": 8, "fp8": 8}.get(job.dtype, 16)
    together = channels if channels & (channels - 1) == 0 else 1
    return {size for size in (min(16, together * bits // 8),) if size >= 4}


@every(job for job in _packs() if job.target == "sm_90" and widths_of_packs(job))
def test_packs_run_ahead_on_hopper(built):
    """Their indices are moved, and not their values, which lie where wgmma reads them."""
    assert built.tile.packed and built.buffers >= (built.tile.stages if built.tile.prefetch_indices else 2)


@every(job for job in _packs() if job.target == "gfx942")
def test_packs_are_loaded_at_once(built, job):
    assert (built.instructions["halves"] > 0) == (not widths_of_packs(job))


@every(_wide())
def test_large_operands_have_long_addresses(built, job):
    wanted = {"I": ["X"], "N": [""], "K": ["B"]}[job.sizes[0][0]]
    assert built.wide == wanted


@every(job for job in JOBS if not job.sizes)
def test_others_have_short_addresses(built):
    assert built.wide == []


# The table
SPMM = "C[m,n] = A[m,k] * B[k,n]"
PRODUCT = "Z[b,i,w] = CG[i,j,k,l] * X[b,j,u] * Y[b,k] * W[{w},u,w]"
STORAGES = {
    "COO": (SPMM, {"A": "COO"}),
    "GroupCOO": (SPMM, {"A": "GroupCOO"}),
    "BCSR": (SPMM, {"A": "BCSR"}),
    "BlockGroupCOO": (SPMM, {"A": "BlockGroupCOO"}),
    **{f"convolution {name}": (CONV, {"map": held.storage_form}) for name, held in FORMS.items()},
    **{f"grouped convolution {name}": (GROUPED_CONV, {"map": held.storage_form}) for name, held in FORMS.items()},
    "tensor product": (PRODUCT.format(w="l"), {"CG": "(i j k l):C"}),
    "tensor product, own weights": (PRODUCT.format(w="b,l"), {"CG": "(i j k l):C"}),
    "tensor product by path": (PRODUCT.format(w="l"), {"CG": "[i,j,k,l] l:C (i j k):G"}),
    "tensor product by path, own weights": (PRODUCT.format(w="b,l"), {"CG": "[i,j,k,l] l:C (i j k):G"}),
}
"""The case studies as users write them, and the formats that they are stored in."""


def canonical(statement):
    """The text with names numbered in the order of their mention; of all orders of the factors the first."""
    (term,) = statement.terms
    return min(_numbered(statement, order) for order in permutations(term.factors))


def _numbered(statement, factors):
    names: dict[str, str] = {}
    # All blocks are one statement.
    text = re.sub(r"\d+\*", "B*", " * ".join([str(statement.target), *map(str, factors)]))
    renamed = re.sub(r"[^\W\d]\w*", partial(_renamed, names), text)
    return renamed, ",".join(sorted(f"{names[name]}:{fact}" for name, fact in statement.facts))


def _renamed(names, match):
    return names.setdefault(match[0], f"x{len(names)}")


def statements(text, formats, wanted=()):
    """The format-conscious statements and their derivatives by everything that is read as a value. wanted: those that
    the passes read which a form is for, all if empty."""
    stored = {n: StorageForm.of(parse_format(f)) if isinstance(f, str) else f for n, f in formats.items()}
    for step in lower_statement(parse(text), stored).steps:
        if not wanted or "" in wanted:
            yield step
        for name in dict.fromkeys(f.name for f in step.terms[0].factors if isinstance(f, Access)):
            if not wanted or name.upper() in wanted:
                yield from derivative(step, name)


@pytest.mark.parametrize("study", STORAGES)
def test_the_table_holds_every_statement(study):
    known = {canonical(case.statement) for case in CASES.values()}
    for statement in statements(*STORAGES[study], only(study)):
        assert canonical(statement) in known, f"no case for {statement}"


def test_the_table_agrees_with_itself():
    """Every operand has a shape, and index arrays are those that the statement indexes with."""
    for case in (case.at(LARGE) for case in CASES.values()):
        named = {access.name for access in accesses_of(*case.statement.terms, *case.statement.target.indices)}
        assert set(case.shapes) == named
        assert case.indices == {array.name for array in arrays_of(case.statement.target, *case.statement.terms)}


@pytest.mark.parametrize("target", TARGETS)
def test_unrolled_tables(compiler, target):
    """A message and the kernel of its three gradients spill nothing, and need no shared memory."""
    found = compiler.ask("kernels.unrolled_targets", target)
    assert set(found) == {"message", "gradients"}
    assert not any(facts["spilled"] or facts["shared"] for facts in found.values()), found
