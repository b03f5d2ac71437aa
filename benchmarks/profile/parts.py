"""Host time of a pass by part, by function and by layer, added up over a traced tree (trace.py).

The part of a node is that of the nearest function above that the tables below list: a torch call made by a module
counts as the module's, the same call made while maps are built counts as theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from benchmarks.profile.trace import Node, Traced

OTHER = "other"
WAITING, ALLOCATING = "waiting for results", "allocating"
MAPS, LAYING, READY = "finding maps", "laying maps out", "making calls ready"
STARTING, ON_CPU, MODULES = "starting kernels", "arithmetic on the CPU", "modules and their operators"
PARTS = (MAPS, LAYING, READY, STARTING, ON_CPU, MODULES, ALLOCATING, WAITING, OTHER)
"""In the order of tables and colours."""

_BY_NAME: Mapping[str, str] = {
    **dict.fromkeys(("tolist", "item", "synchronize", "_cuda_synchronize", "wait_stream", "cpu"), WAITING),
    **dict.fromkeys(("empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros", "full"), ALLOCATING),
    **dict.fromkeys(("new_full", "ones", "empty_strided", "full_like", "new_ones", "pin_memory"), ALLOCATING),
}
"""Parts of C functions, by name."""
_BY_FILE: Mapping[str, str] = {
    "pumice/runtime/launch.py": STARTING,
    "pumice/lower/kernel.py": STARTING,
    "pumice/lower/call.py": STARTING,
    "pumice/engine/stretch.py": STARTING,
    "pumice/engine/train_pass.py": STARTING,
    "/triton/": STARTING,
    **dict.fromkeys(
        (f"pumice/coords/{name}.py" for name in ("tiles", "tile_kernels", "chain_tiles", "pair_kernels", "segments")),
        LAYING,
    ),
    **dict.fromkeys((f"pumice/lower/{name}.py" for name in ("maps", "segments")), LAYING),
    **dict.fromkeys((f"pumice/lower/{name}.py" for name in ("cpu", "dataflow")), ON_CPU),
    "pumice/coords/": MAPS,
    "pumice/ops/prepare.py": MAPS,
    "pumice/ops/": READY,
    "pumice/lower/": READY,
    "pumice/schedule/": READY,
    "pumice/language/": READY,
    "pumice/nn/": MODULES,
    "pumice/models/": MODULES,
    "torch/nn/": MODULES,
}
"""Parts by substring of the file's path; the first match counts."""


@lru_cache(maxsize=4096)
def part_of_file(path: str) -> str | None:
    """The part of functions of a file; None: they count as their caller's."""
    path = path.replace("\\", "/")
    return next((part for place, part in _BY_FILE.items() if place in path), None)


def part_of(node: Node) -> str:
    """The part of a node. Methods of the network's modules are MODULES, in whatever file they are unless the file has a
    part of its own."""
    if not node.file and node.name in _BY_NAME:
        return _BY_NAME[node.name]
    for above in node.above():
        found = part_of_file(above.file) if above.file else None
        if found is not None:
            return found
        if above.layer:
            return MODULES
    return OTHER


@dataclass
class HostTime:
    """Microseconds per pass of one function or layer, by part. calls: per pass."""

    name: str
    where: str = ""
    calls: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def add(self, part: str, spent: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + spent


@dataclass(frozen=True)
class Shares:
    """Host microseconds per pass: by part; by function and by layer, the longest first.

    A layer includes the functions it calls but not the layers within; the name "" is time outside of layers.
    """

    parts: Mapping[str, float]
    functions: Sequence[HostTime]
    layers: Sequence[HostTime]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def shares(traced: Traced) -> Shares:
    """Add up the traced tree."""
    parts: dict[str, float] = {}
    functions: dict[tuple[str, str], HostTime] = {}
    layers: dict[str, HostTime] = {}
    for node in traced.root.walk():
        spent, part = 1e6 * node.own / traced.passes, part_of(node)
        parts[part] = parts.get(part, 0.0) + spent
        name, where = node.name, place_of(node)
        one = functions.setdefault((name, where), HostTime(name, where))
        one.calls += node.calls / traced.passes
        one.add(part, spent)
        layer = next((above.layer for above in node.above() if above.layer), "")
        held = layers.setdefault(layer, HostTime(layer))
        held.calls += _entered(node, layer) / traced.passes
        held.add(part, spent)
    # A part that was called stays if its time is less than what tracing takes.
    return Shares(
        {part: parts[part] for part in PARTS if part in parts}, _longest(functions.values()), _longest(layers.values())
    )


def _entered(node: Node, layer: str) -> int:
    """The node's calls if they enter the layer from outside, else 0."""
    outer = node.parent is None or next((above.layer for above in node.parent.above() if above.layer), "") != layer
    return node.calls if node.layer == layer and layer and outer else 0


def _longest(found: Iterable[HostTime]) -> list[HostTime]:
    return sorted(found, key=lambda one: -one.total)


def place_of(node: Node) -> str:
    """folder/file:line of a function; "C" for C functions."""
    if not node.file:
        return "C"
    path = "/".join(node.file.replace("\\", "/").split("/")[-2:])
    return f"{path}:{node.line}"
