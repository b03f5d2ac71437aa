"""Host time of a pass as a tree of all Python and C calls, without the cost of tracing.

A profile function (sys.setprofile) runs at each call and return. The time between two of its runs belongs to the call
on top of the stack; its own time is left out, and so is the interpreter's to call it, measured beforehand. Threads
started by torch are not traced.
"""

from __future__ import annotations

import operator
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import nn

_clock = time.perf_counter
_ROUNDS = 2000
"""Calls used to measure the cost of an event."""
_SETTLED = 20
"""Rounds of removing excess time: in each, nodes without time left take no further part."""


@dataclass(eq=False)
class Node:
    """A node of the tree: a function called by its parent, or (`layer`) a method of a module of the network.

    file: "" for a C function. own: seconds spent in the function itself over all passes. calls: over all passes.
    """

    name: str
    file: str = ""
    layer: str = ""
    line: int = 0
    parent: Node | None = None
    own: float = 0.0
    calls: int = 0
    children: dict[Any, Node] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds, including all nodes below."""
        return self.own + sum(child.total for child in self.children.values())

    def walk(self) -> Iterator[Node]:
        """This node and all below."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def above(self) -> Iterator[Node]:
        """This node, its parent, and so on."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def __repr__(self) -> str:
        return f"Node({self.layer or self.name}, {self.calls} calls, {1e6 * self.own:.1f} us itself)"


@dataclass(frozen=True)
class Costs:
    """Seconds of overhead per event that the profile function does not see itself, for Python and C functions."""

    python: float = 0.0
    c: float = 0.0

    @staticmethod
    def measured() -> Costs:
        """Measured on this machine now: the least of several tries."""
        return Costs(*(max(0.0, min(_cost(call) for _ in range(5))) for call in (_empty, _of_c)))


def _empty() -> None:
    return None


def _of_c(index: Callable[[int], int] = operator.index) -> None:
    index(0)


def _cost(call: Callable[[], None]) -> float:
    """The overhead per event: the time by which a trace of the call exceeds an untraced run, over its events."""
    spent = []
    for _ in range(3):
        begin = _clock()
        for _ in range(_ROUNDS):
            call()
        spent.append(_clock() - begin)
    tracer = Tracer({}, Costs())
    with tracer:
        for _ in range(_ROUNDS):
            call()
    turns = 2 * _ROUNDS if call is _empty else 4 * _ROUNDS
    return (tracer.root.total - min(spent)) / turns


class Tracer:
    """Context manager that builds the tree. names: of the network's modules, by id."""

    def __init__(self, names: Mapping[int, str], costs: Costs) -> None:
        self.root = Node("pass")
        self._names, self._costs = names, costs
        self._node, self._last = self.root, 0.0
        # By code object: whether the first argument is a module.
        self._methods: dict[CodeType, bool] = {}
        self._before: Any = None

    def __enter__(self) -> Tracer:
        self._before, self._node = sys.getprofile(), self.root
        self._last = _clock()
        sys.setprofile(self._turn)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _turn(self, frame: FrameType, event: str, function: Any) -> None:
        now = _clock()
        node = self._node
        in_c = event[0] == "c"
        node.own += now - self._last - (self._costs.c if in_c else self._costs.python)
        if event == "call":
            node = self._python(node, frame)
        elif event == "c_call":
            node = self._c(node, function)
        elif node.parent is not None:
            # A function entered before the tracer has no parent to return to.
            node = node.parent
        self._node = node
        self._last = _clock()

    def _python(self, node: Node, frame: FrameType) -> Node:
        code = frame.f_code
        layer = self._layer(code, frame)
        key = (code, layer)
        child = node.children.get(key)
        if child is None:
            child = Node(_named(code), code.co_filename, layer, code.co_firstlineno, node)
            node.children[key] = child
        child.calls += 1
        return child

    def _c(self, node: Node, function: Any) -> Node:
        name = getattr(function, "__name__", None) or type(function).__name__
        child = node.children.get(name)
        if child is None:
            child = node.children[name] = Node(name, "", "", 0, node)
        child.calls += 1
        return child

    def _layer(self, code: CodeType, frame: FrameType) -> str:
        """The name of the module whose method this is; "" for other functions."""
        known = self._methods.get(code)
        if known is False or not code.co_argcount:
            return ""
        own = frame.f_locals.get(code.co_varnames[0])
        if known is None:
            known = self._methods[code] = isinstance(own, nn.Module)
        return self._names.get(id(own), "") if known else ""


def _named(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced tree of several passes. passes: their number; wall: mean seconds of an untraced pass."""

    root: Node
    passes: int
    wall: float


def traced(call: Callable[[], object], model: nn.Module, passes: int, wait: Callable[[], object]) -> Traced:
    """Time and trace the call `passes` times each. It must have run before; wait: waits until the device is idle.

    Each pass begins on an idle device and includes the last wait.
    """
    names = {id(module): f"{name} {type(module).__name__}".strip() for name, module in model.named_modules()}
    spent = []
    for _ in range(passes):
        wait()
        begin = _clock()
        call()
        wait()
        spent.append(_clock() - begin)
    tracer = Tracer(names, Costs.measured())
    for _ in range(passes):
        wait()
        with tracer:
            call()
            wait()
    _mended(tracer.root, passes * statistics.fmean(spent))
    return Traced(tracer.root, passes, statistics.fmean(spent))


def _mended(root: Node, most: float) -> None:
    """Clamp negative times to 0, and remove the tracer's own exit.

    A traced pass is slower than its overhead explains, since its caches are colder: time above `most` seconds, those of
    the untraced passes, is removed in proportion to events. It may also be shorter, since a slower host waits less for
    the device.
    """
    root.children = {key: node for key, node in root.children.items() if node.file != __file__}
    nodes = list(root.walk())
    for node in nodes:
        # Keys become numbers: code objects cannot be pickled.
        node.children = dict(enumerate(node.children.values()))
    for node in nodes:
        node.own = max(0.0, node.own)
    for _ in range(_SETTLED):
        excess = sum(node.own for node in nodes) - most
        turns = sum(map(_turns, nodes))
        if excess <= 0:
            return
        for node in nodes:
            node.own = max(0.0, node.own - excess / turns * _turns(node))


def _turns(node: Node) -> int:
    """The number of events that added time to a node: its calls, and returns from its children."""
    return node.calls + sum(child.calls for child in node.children.values()) if node.own else 0
