"""What the host does in a pass, by part, by function and by layer: a traced tree (trace.py), added up.

A place belongs to the part of the first function above it that the tables below know: a call of torch from a module is
the module's, the same call from where maps are found is theirs.
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
"""Functions of C."""
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
"""Parts of paths, the first that fits counts."""


@lru_cache(maxsize=4096)
def part_of_file(path: str) -> str | None:
    """The part that functions of a file belong to; None: that of who calls them."""
    path = path.replace("\\", "/")
    return next((part for place, part in _BY_FILE.items() if place in path), None)


def part_of(node: Node) -> str:
    """The part that a place belongs to. What is a method of a module of the network, wherever it is written, is one of
    its modules."""
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
    """Microseconds of a pass in one function, or one layer. parts: by part; calls: in a pass."""

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
    """A pass in microseconds of the host: by part; by function and by layer, the longest first.

    A layer has what it does itself and in functions, without the layers within it; "" is what no layer does.
    """

    parts: Mapping[str, float]
    functions: Sequence[HostTime]
    layers: Sequence[HostTime]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def shares(traced: Traced) -> Shares:
    """The tree, added up."""
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    functions: dict[tuple[str, str], HostTime] = {}
    layers: dict[str, HostTime] = {}
    for node in traced.root.walk():
        spent, part = 1e6 * node.own / traced.passes, part_of(node)
        parts[part] += spent
        name, where = node.name, place_of(node)
        one = functions.setdefault((name, where), HostTime(name, where))
        one.calls += node.calls / traced.passes
        one.add(part, spent)
        layer = next((above.layer for above in node.above() if above.layer), "")
        held = layers.setdefault(layer, HostTime(layer))
        held.calls += _entered(node, layer) / traced.passes
        held.add(part, spent)
    return Shares({part: v for part, v in parts.items() if v}, _longest(functions.values()), _longest(layers.values()))


def _entered(node: Node, layer: str) -> int:
    """Calls of a layer from outside of it."""
    outer = node.parent is None or next((above.layer for above in node.parent.above() if above.layer), "") != layer
    return node.calls if node.layer == layer and layer and outer else 0


def _longest(found: Iterable[HostTime]) -> list[HostTime]:
    return sorted(found, key=lambda one: -one.total)


def place_of(node: Node) -> str:
    """The file of a function, with its folder and the line; "C" for those of C."""
    if not node.file:
        return "C"
    path = "/".join(node.file.replace("\\", "/").split("/")[-2:])
    return f"{path}:{node.line}"
