"""Compile emitted kernels for GPUs that are not there, and read what came out. No driver is asked for."""

from __future__ import annotations

import math
import re
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels.cases import CASES, LARGE, Problem, meta
from kernels.kept import Facts, facts_of

from pumice.language.contraction import ContractionRoles, contraction_roles, packed, stacked
from pumice.language.nodes import Access, indices_of
from pumice.lower import kernel as lowered
from pumice.lower.emit import Argument
from pumice.lower.epilogue import Epilogue
from pumice.lower.reference import EIGHT_BITS
from pumice.schedule.tile import Tile

DTYPES = {name: kind for kind, name in lowered.DTYPES.items()}
NVIDIA = ("sm_80", "sm_90")
TARGETS = (*NVIDIA, "gfx942")
AMD_STAGES = 2
"""More do not fit in the 64 KiB of local memory, and gain nothing there."""


@dataclass(frozen=True)
class Job:
    """A case to compile. sizes: those that differ from LARGE; tile: by default what `tile_of` says.

    activation: of an epilogue with all that one may have; "-" for none.
    """

    case: str
    target: str
    dtype: str = "fp16"
    precision: str = "tf32"
    sizes: tuple[tuple[str, int], ...] = ()
    tile: Tile | None = None
    activation: str = "-"

    @property
    def kernel(self) -> str:
        return self.case

    @property
    def name(self) -> str:
        parts = [self.case, self.target, self.dtype, *([self.precision] if self.dtype == "fp32" else [])]
        parts += [f"{axis}={size}" for axis, size in self.sizes] + ([str(self.tile)] if self.tile else [])
        parts += [f"epilogue {self.activation}"] if self.activation != "-" else []
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of_json(held: dict[str, Any]) -> Job:
        tile = Tile(**held["tile"]) if held["tile"] else None
        return Job(**{**held, "sizes": tuple(map(tuple, held["sizes"])), "tile": tile})


@dataclass(frozen=True)
class Built:
    """What a kernel became.

    turns: whether the loop has more than one turn; chained: whether loads in it wait for an index that is loaded there.
    stage: bytes that one turn of a product loads; shared: bytes of shared memory.
    buffers: how many turns' values lie in it, the fewest of either side.
    copies: (operand, bytes, how many) of asynchronous copies.
    sides: of the operands that a product reads in tiles, whether they are contiguous along the reduction.
    wide: operands with 64-bit addresses, as the source has it.
    serialized: whether ptxas warns that each wgmma is waited for.
    """

    tile: Tile
    product: bool
    adds: bool
    turns: bool = True
    chained: bool = False
    stage: int = 0
    buffers: int = 0
    shared: int = 0
    spilled: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    copies: list[tuple[str, int, int]] = field(default_factory=list)
    sides: dict[str, bool] = field(default_factory=dict)
    wide: list[str] = field(default_factory=list)
    serialized: bool = False
    error: str = ""

    @staticmethod
    def of_error(error: str) -> Built:
        return Built(Tile(1, 1), False, False, error=error)

    @staticmethod
    def of_json(held: dict[str, Any]) -> Built:
        return Built(**{**held, "tile": Tile(**held["tile"]), "copies": [tuple(c) for c in held["copies"]]})


_INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "mfma": r"\bv_mfma",
    "fma": r"\bfma\.rn\.f32",
    "halves": r"_load_ushort",
}


def built(job: Job) -> Built:
    """The job done; an error of the compiler is told, not raised."""
    p, how = _problem(job), lowered.KernelOptions(job.precision)
    if job.activation != "-":
        epilogue = _epilogue(p, job)
        p, how = replace(p, operands={**p.operands, **epilogue.operands}), replace(how, finish=epilogue.signature)
    extents = p.bound.extents
    form = contraction_roles(p.bound.statement, extents)
    tile = job.tile or lowered.tile_of(p.bound, p.operands)
    if tile.stacked:
        form = stacked(form, p.bound.statement) or form
    if tile.packed:
        form = packed(form, p.bound.statement, extents) or form
    if job.target == "gfx942":
        tile = replace(tile, stages=min(tile.stages, AMD_STAGES))
    found = Built(tile, form.product, form.atomic)
    out = torch.empty(p.bound.shape, dtype=torch.float32 if form.atomic else _kept(job), device="meta")
    try:
        given = {**p.operands, "": out}
        launch = lowered.generated_kernel(p.bound, given, tile, how).sized(given, None)
        options = {"num_warps": launch.generated.tile.warps, "num_stages": launch.generated.tile.stages}
        facts = facts_of(_source(launch, p, out), job.target, options, partial(_read, launch))
    except Exception as error:
        return replace(found, error=f"{type(error).__name__}: {str(error)[-1500:]}")
    return replace(
        found,
        turns=bool(form.loops) or math.prod(extents[name] for name in form.reduced) > tile.reduced,
        stage=_stage(form, tile, job.dtype),
        chained=any(name in CASES[job.case].indices for name, _, _ in facts["copies"]),
        sides=_sides(p, form),
        wide=_wide(launch),
        **facts,
    )


def _read(launch: lowered.SizedLaunch, compiled: Any, log: str) -> Facts:
    """What is asserted of what the compiler made."""
    text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    return {
        "buffers": _buffers(compiled.asm["ttgir"]),
        "shared": compiled.metadata.shared,
        "spilled": spilled(compiled.asm, log),
        "instructions": {name: len(re.findall(pattern, text)) for name, pattern in _INSTRUCTIONS.items()},
        "copies": _copies(text, launch),
        "serialized": "C7514" in log or "serialized" in log,
    }


def _problem(job: Job) -> Problem:
    return meta(CASES[job.case].at(LARGE, **dict(job.sizes)), DTYPES[job.dtype])


def _epilogue(p: Problem, job: Job) -> Epilogue:
    shape = p.bound.shape
    scale, shift = (torch.empty(shape[1:], device="meta") for _ in range(2))
    return Epilogue(scale, shift, torch.empty(shape, dtype=_kept(job), device="meta"), job.activation)


def _kept(job: Job) -> torch.dtype:
    """The dtype of results."""
    return torch.float16 if DTYPES[job.dtype] in EIGHT_BITS else DTYPES[job.dtype]


def _source(launch: lowered.SizedLaunch, p: Problem, out: torch.Tensor) -> Any:
    """The kernel for these arguments, specialised as a launch does it."""
    from triton.compiler import ASTSource

    fn = launch.generated.kernel.function
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, argument in enumerate(launch.generated.source.arguments):
        value = launch.values[place]
        kind = _kind(argument, p, out)
        special = not fn.params[place].do_not_specialize
        if argument.kind == "constant" or (kind == "i32" and special and value == 1):
            constants[(place,)], kind = value, "constexpr"
        elif special and (value is None or value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
        signature[argument.variable] = kind
    return ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attributes)


def _kind(argument: Argument, p: Problem, out: torch.Tensor) -> str:
    if argument.kind in ("operand", "result"):
        kind = lowered.DTYPES[(p.operands[argument.name] if argument.name else out).dtype]
        return "*" + {"fp8": "fp8e4nv"}.get(kind, kind)
    if argument.kind == "room":
        return "*fp64" if torch.float64 in {out.dtype, *(t.dtype for t in p.operands.values())} else "*fp32"
    return "*i32" if argument.kind in ("segment", "waiting") else "i32"


def _stage(form: ContractionRoles, tile: Tile, dtype: str) -> int:
    """Bytes of one turn's tiles of both sides."""
    return (tile.rows + tile.columns) * tile.reduced * DTYPES[dtype].itemsize if form.product else 0


def _sides(p: Problem, form: ContractionRoles) -> dict[str, bool]:
    if not form.product:
        return {}
    accesses = [factor for factor in p.bound.statement.terms[0].factors if isinstance(factor, Access)]
    tiled = [a for a in accesses if set(form.reduced) & set(indices_of(a))]
    return {a.name: form.reduced[-1] in indices_of(a.indices[-1]) for a in tiled}


def _buffers(ttgir: str) -> int:
    """The fewest buffers of the float tiles that the pipeliner allocated; 0 where it allocated none."""
    found = re.findall(r"local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+)x\d+x\d+x(?:b?f\d+|i8)", ttgir)
    return min(map(int, found), default=0)


def spilled(asm: dict[str, Any], log: str) -> int:
    """Bytes (AMD: registers) that spill: from the listing, from what ptxas said, or from the binary's stack."""
    if "amdgcn" in asm:
        return sum(map(int, re.findall(r"\.vgpr_spill_count:\s+(\d+)", asm["amdgcn"])))
    found = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    return sum(map(int, found)) if found else _stack(asm["cubin"])


def _stack(cubin: bytes) -> int:
    import tempfile

    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"STACK:(\d+)", said)))


def _copies(ptx: str, launch: lowered.SizedLaunch) -> list[tuple[str, int, int]]:
    """The asynchronous copies: the line of the source that each comes from names the operand."""
    lines = launch.generated.source.text.splitlines()
    names = {a.variable: a.name for a in launch.generated.source.arguments if a.kind == "operand"}
    found: Counter[tuple[str, int]] = Counter()
    line = 0
    for text in ptx.splitlines():
        if place := re.match(r"\s*\.loc\s+\d+\s+(\d+)", text):
            line = int(place[1])
        if copy := re.search(r"cp\.async\.c[ag]\.shared\.global .*?,.*?\], (0x[0-9a-f]+|\d+)", text):
            pointer = re.search(r"tl\.load\((\w+) ", lines[line - 1]) if 0 < line <= len(lines) else None
            found[(names.get(pointer[1], "?") if pointer else "?", int(copy[1], 0))] += 1
    return [(name, size, count) for (name, size), count in sorted(found.items())]


def _wide(launch: lowered.SizedLaunch) -> list[str]:
    """The operands ("" is the result) whose addresses are counted in 64 bits."""
    found = set()
    for a in launch.generated.source.arguments:
        pointer = {"operand": rf"tl\.load\({a.variable} .*", "result": r"where = .*"}.get(a.kind)
        lines = re.findall(pointer, launch.generated.source.text) if pointer else []
        if any("tl.int64" in line for line in lines):
            found.add(a.name)
    return sorted(found)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    return asdict(built(Job.of_json(job)))
