"""Compile an emitted kernel for a GPU that is not there, and read what came out. No driver is asked for."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pumice.lower.emit import Source
from pumice.lower.triton import loaded

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Built:
    """What a compiled kernel is made of."""

    asm: dict[str, Any]
    shared: int

    @property
    def ptx(self) -> str:
        return self.asm.get("ptx", "")

    def count(self, pattern: str) -> int:
        text = self.ptx or self.asm["amdgcn"]
        return len(re.findall(pattern, text))

    def spills(self, folder: Path) -> int:
        """Bytes that spill, from ptxas's own resource usage or the AMD listing."""
        if "amdgcn" in self.asm:
            return sum(map(int, re.findall(r"\.vgpr_spill_count:\s+(\d+)", self.asm["amdgcn"])))
        return _stack(self.asm["cubin"], folder)


def build(
    source: Source, dtypes: dict[str, str], constants: dict[str, Any], target: str, warps: int = 4, stages: int = 3
) -> Built:
    """Compile; sizes and strides count as multiples of 16, as they are where speed matters."""
    fn = loaded(source)
    types: dict[str, str] = {}
    for a in source.arguments:
        if a.kind in ("operand", "result"):
            types[a.variable] = "*" + dtypes[a.name]
        elif a.kind == "segment":
            types[a.variable] = "*i32"
        elif a.kind != "constant":
            types[a.variable] = "i32"
    names = [a.variable for a in source.arguments]
    given = {a.variable: constants[a.variable] for a in source.arguments if a.kind == "constant"}
    aligned = {a.variable for a in source.arguments if a.kind in ("operand", "result", "segment", "stride")}
    compiled = compile(
        ASTSource(
            fn=fn,
            signature={n: "constexpr" if n in given else types[n] for n in names},
            constexprs={(names.index(n),): v for n, v in given.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in aligned},
        ),
        target=TARGETS[target],
        options={"num_warps": warps, "num_stages": stages},
    )
    return Built(compiled.asm, compiled.metadata.shared)


def _stack(cubin: bytes, folder: Path) -> int:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = folder / "k.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"STACK:(\d+)", text)))
