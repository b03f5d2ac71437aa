"""The receptive field of a network: which input voxels decide an output voxel, from the network's trace.

Each node of the trace is a rule: which voxels of other nodes decide its values and its coordinates. Needed boxes are
followed from the result back to the input, in integers:

    in = [stride * a + least, stride * b + most]                       for outputs [a, b], offsets [least, most]
    in = [ceil((a - most) / stride), floor((b - least) / stride)]      of a transposed or inverse relation
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional

from pumice import ops
from pumice.coords import Relation, as_axes
from pumice.engine.program import uncompiled
from pumice.engine.trace import SPARSE, CallStep, Product, Step, TracedModule, layer_type, trace
from pumice.errors import DtypeError, OptionError
from pumice.nn import layers
from pumice.nn.conv import Convolution
from pumice.ops import SparseTensor, cat
from pumice.ops.tensor import coordinates_of

Box = tuple[tuple[int, int], ...]
"""Least and greatest coordinate along each axis."""


@dataclass(frozen=True)
class ReceptiveField:
    """Which input voxels decide an output voxel, per axis, in input voxels.

    An output at coordinate o, which stands for the input coordinate p = o * scale, depends at most on the inputs from
    p - before to p + after; whether it exists, on those from p - before to p + after of `existence`.

    reach, existence: (before, after) of the outputs that see farthest. stride: cells of the coarsest level: moving a
    scene by multiples of it changes no result. scale: size of an output voxel (a Fraction for finer ones)."""

    reach: tuple[tuple[int, int], ...]
    existence: tuple[tuple[int, int], ...]
    stride: tuple[int, ...]
    scale: tuple[int | Fraction, ...]

    def __str__(self) -> str:
        axes = ", ".join(f"-{before} to +{after}" for before, after in self.reach)
        return f"receptive field {axes} voxels; stride {self.stride}"


def receptive_field(net: nn.Module, x: SparseTensor) -> ReceptiveField:
    """The receptive field of a network on tensors like x, from its trace; net is not run.

        net(x)[o] depends on x[i] only if  o * scale - before <= i <= o * scale + after  along each axis

    before, after: of single convolutions as `kernel_size // 2 * dilation`; of networks the sums over their levels. It
    is exact for chains of convolutions, and an upper bound of networks whose branches cancel. Attention and pools over
    whole items have none.

    net: from one SparseTensor to one, in evaluation where it has norms or dropout. x: an example.
    Raises DtypeError if x is not a SparseTensor, and OptionError, which names the module and the reason, for what sees
    the whole scene or is not known: untraced modules, global pools, group norms, norms in training.
    """
    return reads_of_network(net, x).field


class Move(NamedTuple):
    """How coordinates of a source follow from those of a node along all axes: see the module's equations."""

    stride: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    inverse: bool = False

    def box(self, box: Box) -> Box | None:
        """The box of the source that a node's box needs; None if it is empty."""
        found = tuple(map(self._inverse if self.inverse else self._forward, box, self.stride, self.spans))
        return None if any(low > high for low, high in found) else found

    @staticmethod
    def _forward(axis: tuple[int, int], stride: int, span: tuple[int, int]) -> tuple[int, int]:
        return stride * axis[0] + span[0], stride * axis[1] + span[1]

    @staticmethod
    def _inverse(axis: tuple[int, int], stride: int, span: tuple[int, int]) -> tuple[int, int]:
        return -((span[1] - axis[0]) // stride), (axis[1] - span[0]) // stride

    def scale(self, source: Sequence[Fraction]) -> tuple[Fraction, ...]:
        return tuple(c / s if self.inverse else c * s for c, s in zip(source, self.stride, strict=True))


class Edge(NamedTuple):
    """What a node reads: values of `source`, or only which voxels it has; where by `move`, None: the same voxels."""

    source: Any
    move: Move | None = None
    values: bool = True


@dataclass(frozen=True)
class Rule:
    """What decides the values of a node (its coordinates besides), and what its coordinates."""

    node: Node
    values: tuple[Edge, ...]
    places: tuple[Edge, ...]


@dataclass(frozen=True)
class Reads:
    """The rules of a network from its input to its result, in order. scales: size of the voxels of each node, in input
    voxels."""

    rules: tuple[Rule, ...]
    source: Node
    result: Node
    scales: Mapping[Node, tuple[Fraction, ...]]

    @property
    def stride(self) -> tuple[int, ...]:
        """Per axis, the least move of a scene that moves all levels by whole voxels."""
        return tuple(math.lcm(*(c.numerator for c in axis)) for axis in zip(*self.scales.values(), strict=True))

    @property
    def field(self) -> ReceptiveField:
        seen = [self._of_axis(axis) for axis in range(len(self.stride))]
        values, places = zip(*seen, strict=True)
        scale = tuple(int(c) if c.denominator == 1 else c for c in self.scales[self.result])
        return ReceptiveField(values, places, self.stride, scale)

    def _of_axis(self, axis: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(reach, existence) along an axis: over the outputs of one period, which repeat."""
        scale, found = self.scales[self.result][axis], []
        for o in range(int(self.stride[axis] / scale)):
            boxes = self.boxes(((o, o),) * len(self.stride))
            at = o * scale
            if all(low <= high for box in boxes for low, high in box):
                found.append([(math.ceil(at - box[axis][0]), math.ceil(box[axis][1] - at)) for box in boxes])
        return tuple(tuple(map(max, zip(*each, strict=True))) for each in zip(*found, strict=True))  # pyright: ignore

    def halo(self, tile: Sequence[int]) -> tuple[Box, Box]:
        """Boxes of the inputs that decide (values, existence) of the outputs in [0, tile), multiples of the stride."""
        sizes = [int(t / c) for t, c in zip(tile, self.scales[self.result], strict=True)]
        return self.boxes(tuple((0, size - 1) for size in sizes))

    def boxes(self, outputs: Box) -> tuple[Box, Box]:
        """Boxes of the inputs that decide (values, existence) of the outputs in a box."""
        values, places = (self._box(outputs, which) for which in (True, False))
        return values, places

    def _box(self, outputs: Box, values: bool) -> Box:
        needs: dict[tuple[Node, bool], Box] = {(self.result, values): outputs}
        for rule in reversed(self.rules):
            for which in (True, False):
                box = needs.get((rule.node, which))
                if box is None:
                    continue
                for edge in (*rule.values, *rule.places) if which else rule.places:
                    far = box if edge.move is None else edge.move.box(box)
                    if far is not None:
                        key = edge.source, edge.values
                        needs[key] = far if key not in needs else hull(needs[key], far)
        found = [needs[key] for key in ((self.source, True), (self.source, False)) if key in needs]
        return hull(*found) if found else ((0, -1),) * len(outputs)


def hull(*boxes: Box) -> Box:
    """The least box that holds all boxes."""
    return tuple((min(low), max(high)) for low, high in (zip(*axis, strict=True) for axis in zip(*boxes, strict=True)))


def reads_of_network(net: nn.Module, x: SparseTensor) -> Reads:
    """The rules of a network on tensors like x. Raises as receptive_field()."""
    if not isinstance(net, nn.Module):
        raise DtypeError(f"a receptive field is that of a torch.nn.Module, found {type(net).__name__}")
    if not isinstance(x, SparseTensor):
        raise DtypeError(f"a receptive field is one on a SparseTensor, found {type(x).__name__}")
    net = uncompiled(net)
    graph = trace(net, (x,), {}, {})
    if isinstance(graph, str):
        raise OptionError(f"the receptive field of {type(net).__name__} is not known: {graph}")
    rules = tuple(_Rules(net, graph, x.spatial_dim).all())
    result = graph.result
    if not isinstance(result, Node) or result.meta["kind"] != SPARSE:
        raise OptionError(f"the result of {type(net).__name__} is not one SparseTensor, whose receptive field this is")
    (source,) = graph.placeholders
    return Reads(rules, source, result, _scales(rules, source, x.spatial_dim))


def _scales(rules: Sequence[Rule], source: Node, dim: int) -> dict[Node, tuple[Fraction, ...]]:
    """Size of the voxels of each node, in input voxels."""
    scales = {source: (Fraction(1),) * dim}
    for rule in rules:
        first = next((edge for edge in rule.places if edge.source in scales), None)
        if first is not None:
            own = scales[first.source]
            scales[rule.node] = own if first.move is None else first.move.scale(own)
    return scales


def forward_move(relation: Relation) -> Move:
    return Move(relation.stride, relation.spans)


def inverse_move(relation: Relation) -> Move:
    return Move(relation.stride, relation.spans, True)


def _blocks(relation: Relation) -> Move:
    """The inputs whose floor(in / stride) is an output."""
    return Move(relation.stride, tuple((0, s - 1) for s in relation.stride))


class _Rules:
    """Makes the rules of a traced network of D = dim axes."""

    def __init__(self, net: nn.Module, graph: TracedModule, dim: int) -> None:
        self.net, self.graph, self.dim = net, graph, dim
        # The first node on each level, for inverses to the coordinates that a level derives from.
        self.first: dict[Any, Node] = {}
        for node in (*graph.placeholders, *(step.node for step in graph.steps)):
            if node.meta.get("kind") == SPARSE:
                self.first.setdefault(graph.levels[node], node)

    def all(self) -> Iterator[Rule]:
        known = {*self.graph.placeholders}
        for step in self.graph.steps:
            known.add(step.node)
            if step.node.op == "get_attr":
                continue
            rule = self.product(step) if isinstance(step, Product) else self.call(step)
            if not known.issuperset(edge.source for edge in (*rule.values, *rule.places)):
                raise self.unknown(step, "it reads what is not a step")
            yield rule

    def product(self, step: Product) -> Rule:
        if step.norm is not None:
            self.check_norm(step, step.norm)
        layer = step.layer
        if isinstance(layer, Convolution):
            rule = self.over(step, layer.relation, step.x, step.target)
        else:
            rule = _row_wise(step.node, step.x)
        if step.residual is None:
            return rule
        return Rule(step.node, (*rule.values, Edge(step.residual)), (*rule.places, Edge(step.residual, None, False)))

    def over(self, step: Step, relation: Relation, x: Node, target: Any = None) -> Rule:
        """The rule of a relation on x, to the coordinates of `target` if there is one."""
        if relation.policy == "cached_inverse" and not isinstance(target, Node):
            level = self.graph.levels[x]
            target = self.first.get(level[0]) if isinstance(level, tuple) else None
            if target is None:
                raise self.unknown(step, "the coordinates that its input derives from are not in the trace")
        back = relation.policy in ("transposed_support", "cached_inverse", "given_inverse")
        move = inverse_move(relation) if back else forward_move(relation)
        if isinstance(target, Node):
            return Rule(step.node, (Edge(x, move),), (Edge(target, None, False),))
        places = {"same": None, "floor_unique": _blocks(relation)}.get(relation.policy, move)
        return Rule(step.node, (Edge(x, move),), (Edge(x, places, False),))

    def call(self, step: Step) -> Rule:
        assert isinstance(step, CallStep)
        node, module = step.node, step.module
        if step.reason is not None:
            raise self.unknown(step, f"it is called untraced, as {step.reason}")
        if module is not None:
            return self.layer(step, module)
        if node.target in _BY_FUNCTION:
            return self.function(step)
        if node.target is getattr:
            return self.attribute(step)
        if node.op == "call_method" and node.target in ("replace", "prune"):
            x, other = node.all_input_nodes if len(node.all_input_nodes) == 2 else (node.args[0], None)
            kept = node.target == "prune"
            places = (Edge(x, None, False), *([Edge(other)] if kept else []))
            return Rule(node, ((Edge(x) if kept else Edge(other)),), places)
        known = node.target in (_METHODS if node.op == "call_method" else _FUNCTIONS)
        if not known or not _by_rows(node):
            raise self.unknown(step, "it may not compute each voxel by itself")
        return _row_wise(node, *node.all_input_nodes)

    def layer(self, step: Step, module: nn.Module) -> Rule:
        node, kind = step.node, layer_type(module)
        x: Any = node.args[0] if node.args else None
        if isinstance(module, layers._Pool):
            return self.over(step, module.relation(), x)
        if isinstance(module, layers._Resampling) and kind in _BY_LAYER:
            return self.resampled(step, _BY_LAYER[kind], x, module.factor)
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.Dropout):
            self.check_norm(step, module)
        elif not issubclass(kind, _ROW_WISE) or getattr(module, "dim", 1) not in (1, -1):
            named = type(module).__name__
            whole = issubclass(kind, layers.GroupNorm) or named.startswith("Global")
            raise self.unknown(step, f"{named} sees whole items" if whole else f"{named} may not be row-wise")
        return _row_wise(node, *node.all_input_nodes)

    def check_norm(self, step: Step, module: nn.Module) -> None:
        """Raise OptionError for a norm or dropout in training, or a norm without running statistics."""
        by_batch = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
        if module.training or by_batch:
            why = "has no running statistics" if not module.training else "is in training: call net.eval()"
            raise self.unknown(step, f"{type(module).__name__} {why}")

    def attribute(self, step: Step) -> Rule:
        """x.name"""
        x, name = step.node.args
        if name in ("inverse", "item_counts"):
            raise self.unknown(step, "it is of the whole scene")
        return Rule(step.node, (Edge(x, None, name == "feats"),), (Edge(x, None, False),))

    def function(self, step: Step) -> Rule:
        """The rule of a call of pumice.ops."""
        node, name = step.node, _BY_FUNCTION[step.node.target]
        given = inspect.signature(step.node.target).bind(*node.args, **node.kwargs)  # pyright: ignore
        given.apply_defaults()
        found: dict[str, Any] = given.arguments
        x = found.get("x")
        if name == "rows":
            return _row_wise(node, *node.all_input_nodes)
        if name == "pool":
            stride = found["kernel_size"] if found["stride"] is None else found["stride"]
            return self.window(step, found["kernel_size"], found | {"stride": stride})
        if name in ("conv", "conv_transpose", "conv_inverse"):
            kernel = self.tensor(found["weight"]).shape[1:-1]
            return self.window(step, tuple(kernel), found, name)
        return self.resampled(step, name, x, found["factor"], found.get("out"))  # pyright: ignore

    def window(self, step: Step, kernel: Any, given: Mapping[str, Any], name: str = "conv") -> Rule:
        """The rule of a convolution or pool by its arguments."""
        spread = {key: given[key] for key in ("stride", "padding", "dilation")}
        out = given.get("out", given.get("target"))
        policy = out if isinstance(out, str) else "given" if isinstance(out, Node) else None
        if given.get("offsets") is not None:
            del spread["padding"]
            relation = Relation.of_offsets(self.dim, given["offsets"], **spread, policy=policy)
        elif name == "conv_transpose":
            extra = {key: given[key] for key in ("output_padding", "bounded")}
            relation = Relation.of_transposed(self.dim, kernel, **spread, **extra)
        else:
            policy = "cached_inverse" if name == "conv_inverse" else policy
            relation = Relation.of(self.dim, kernel, **spread, policy=policy)
        return self.over(step, relation, given["x"], out)

    def resampled(self, step: Step, name: str, x: Node, factor: Any, out: Any = None) -> Rule:
        """The rule of a layer that exchanges voxels for channels, or of nearest up-sampling."""
        factors = as_axes(factor, self.dim, "factor", 1)
        policy = "floor_unique" if name == "down" else "transposed_support"
        out = next((n for n in step.node.all_input_nodes[1:]), out)
        relation = Relation.of(self.dim, factors, stride=factors, padding=0, policy=policy)
        return self.over(step, relation, x, out)

    def tensor(self, node: Any) -> torch.Tensor:
        """The parameter or buffer that a node reads."""
        return attrgetter(str(node.target).removeprefix("net."))(self.net)

    def unknown(self, step: Step, why: str) -> OptionError:
        of = type(self.net).__name__
        return OptionError(f"the receptive field of {of} is not known at {', '.join(step.names)}: {why}")


def _row_wise(node: Node, *reads: Node) -> Rule:
    # All of them: a sum of tensors on two sets of voxels is on the union.
    return Rule(node, tuple(map(Edge, reads)), tuple(Edge(n, None, False) for n in reads))


def _by_rows(node: Node) -> bool:
    """False if a known function joins or reduces rows by its options."""
    if node.target in (torch.cat, torch.softmax, functional.softmax, functional.log_softmax, "softmax"):
        dims = (*node.args[1:2], *(value for key, value in node.kwargs.items() if key in ("dim", "axis")))
        return dims in ((1,), (-1,))
    if node.target is operator.getitem:
        where = node.args[1]
        return isinstance(where, tuple) and where[0] == slice(None)
    if node.target in (operator.matmul, functional.linear):
        return all(n.op == "get_attr" for n in node.all_input_nodes[1:])
    return True


_BY_LAYER = {layers.SpaceToChannel: "down", layers.ChannelToSpace: "up", layers.UpsampleNearest: "up"}
_BY_FUNCTION: Mapping[Any, str] = {
    **dict.fromkeys((cat, coordinates_of, ops.linear), "rows"),
    **dict.fromkeys((ops.max_pool, ops.avg_pool, ops.sum_pool), "pool"),
    **{getattr(ops, name): name for name in ("conv", "conv_transpose", "conv_inverse")},
    **{ops.space_to_channel: "down", ops.channel_to_space: "up", ops.upsample_nearest: "up"},
}
_ROW_WISE = (layers._Featurewise, layers.Identity, nn.Identity, nn.Linear, nn.LayerNorm, nn.ReLU, nn.LeakyReLU, nn.GELU)
_ROW_WISE = (*_ROW_WISE, nn.SiLU, nn.ELU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardswish, nn.PReLU, nn.Softmax)
_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    (
        operator.add,
        operator.sub,
        operator.mul,
        operator.truediv,
        operator.neg,
        operator.matmul,
        operator.getitem,
        operator.gt,
    )
    + (operator.lt, operator.ge, operator.le, operator.eq, torch.relu, torch.sigmoid, torch.tanh, torch.cat, torch.exp)
    + (torch.softmax, torch.abs, functional.relu, functional.silu, functional.gelu, functional.leaky_relu)
    + (functional.softmax, functional.log_softmax, functional.linear, functional.sigmoid)
)
_METHODS = frozenset(("half", "bfloat16", "float", "double", "detach", "clone", "to", "cpu", "cuda", "relu", "sigmoid"))
_METHODS |= {"tanh", "abs", "exp", "square", "softmax", "long", "int", "bool"}
