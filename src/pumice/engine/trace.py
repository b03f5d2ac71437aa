"""A module as a list of steps, traced by torch.fx: fused convolutions and linear maps, and calls of everything else."""

from __future__ import annotations

import dis
import linecache
import math
import operator
import threading
import traceback
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx.node import map_arg
from torch.fx.proxy import Attribute, TraceError
from torch.nn import functional
from torch.utils import _pytree as pytree

from pumice.coords import Relation
from pumice.nn import blocks, layers
from pumice.nn.conv import Convolution
from pumice.nn.hooks import ACTIVATIONS, has_no_backward_hooks
from pumice.ops import SparseTensor, cat
from pumice.ops.tensor import NODES, coordinates_of, is_sparse

SPARSE, DENSE, CARRIED = "sparse", "dense", "carried"
NUMBERS = (int, float, type(None))
CONSTANTS = (*NUMBERS, str)
"""Arguments of these types are constants of a trace, which holds for their values alone."""
_NOT_OF_USERS = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
_CONTAINERS = (dict, OrderedDict, list, set, deque)


class Snapshot:
    """Copy of modules' attributes, containers one level deep. tensors: also which parameters and buffers they have."""

    def __init__(self, modules: Iterable[nn.Module], tensors: bool = False) -> None:
        self.modules: tuple[nn.Module, ...] = tuple(modules)
        self._types = [*map(type, self.modules)]
        # Classes of TorchScript modules have no forward.
        self._forwards = {kind: getattr(kind, "forward", None) for kind in self._types}
        self._live = [module.__dict__ for module in self.modules]
        self._kept = [dict(own) for own in self._live]
        left_out = () if tensors else ("_parameters", "_buffers")
        every = [v for own in self._kept for k, v in own.items() if type(v) in _CONTAINERS and k not in left_out]
        # Most containers, such as those of hooks, are empty.
        self._empty, self._filled = [v for v in every if not v], [v for v in every if v]
        self._contents = [(dict if type(v) is OrderedDict else type(v))(v) for v in self._filled]

    def holds(self) -> bool:
        """True if the attributes have not changed since."""
        try:
            # Hooks, submodules, modes, options and a `forward` of an instance are all among the attributes.
            alike = self._live == self._kept and not any(self._empty) and self._filled == self._contents
            alike = alike and [*map(type, self.modules)] == self._types
            return alike and {kind: getattr(kind, "forward", None) for kind in self._forwards} == self._forwards
        except Exception:  # a replaced tensor or array: its == has no truth value
            return False

    def restore(self) -> None:
        """Undo the changes of attributes that `holds` detects."""
        for own, kept in zip(self._live, self._kept, strict=True):
            own.clear()
            own.update(kept)
        for value in self._empty:
            value.clear()
        for value, contents in zip(self._filled, self._contents, strict=True):
            value.clear()
            (value.update if isinstance(value, dict | set) else value.extend)(contents)


# Proxies


def _refused(*_: Any) -> Any:
    raise TraceError("an in-place operator cannot be traced")


class _Value(Proxy):
    """Base class of proxies. Raises TraceError for uses of a result that the trace would not record."""

    def __getattr__(self, name: str) -> Any:
        if name in _UNTRACED or name.startswith("_"):
            raise AttributeError(name) if name.startswith("__") else TraceError(f"the attribute {name!r} of a result")
        return _Attribute(self, name)

    def __hash__(self) -> int:
        raise TraceError("a result cannot be hashed, for use as a key")

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None) -> Any:
        return Proxy.__torch_function__.__func__(Proxy, orig_method, types, args, kwargs)  # pyright: ignore[reportFunctionMemberAccess]

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = __iand__ = __ior__ = _refused  # pyright: ignore[reportAssignmentType]


class _Attribute(Attribute, _Value):
    """Proxy of an attribute of a result: a method or a value."""


_UNTRACED = frozenset(("grad", "grad_fn", "dtype", "layout", "names", "data", "spatial_shape", "parent", "is_sparse"))
"""Attributes that may be None or are compared by identity: the trace would not see a branch on their proxy."""


class _Unknown(_Value):
    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise TraceError("isinstance() of a result of unknown type cannot be traced")


class _Carried(_Value):
    """Proxy of an argument that is neither a tensor nor a constant: it may be passed on."""

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise TraceError("isinstance() of an argument that is no tensor")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else TraceError(f"the attribute {name!r} of an argument")


class _Dense(_Value):
    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Tensor


class _Sparse(_Value):
    """Proxy of a SparseTensor; isinstance(proxy, SparseTensor) is True."""

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return SparseTensor

    def __getattr__(self, name: str) -> Any:
        if name in _SPARSE_ATTRIBUTES:
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        if name in _SPARSE_METHODS:
            return _Attribute(self, name)
        raise AttributeError(name) if name.startswith("__") else TraceError(f"the attribute {name!r} of a SparseTensor")

    def map(self, function: Callable[[Any], Any]) -> Any:
        return self.replace(function(self.feats))

    def replace(self, feats: Any) -> Any:
        own = feats.node if isinstance(feats, Proxy) else None
        if own is not None and own.target is getattr and own.args == (self.node, "feats"):
            return self
        return self.tracer.create_proxy("call_method", "replace", (self, feats), {})

    def prepare(self, *_: Any, **__: Any) -> Any:
        """No-op: a program builds the kernel maps of its layers itself."""
        return self

    # A SparseTensor is immutable: x += y is x = x + y.
    __iadd__, __isub__, __imul__, __itruediv__ = Proxy.__add__, Proxy.__sub__, Proxy.__mul__, Proxy.__truediv__  # pyright: ignore


_TENSORS = frozenset(("feats", "coords", "items", "item_counts", "valid_mask", "inverse"))
_SPARSE_ATTRIBUTES = _TENSORS | {"geometry", "batch_size", "stride", "dim", "channels", "device", "requires_grad"}
_SAME_ROWS = frozenset(("replace", "half", "bfloat16", "float", "double", "detach", "clone"))
_SPARSE_METHODS = _SAME_ROWS | {"to", "cpu", "cuda", "to_dense", "prune", "split"}
_ARITHMETIC = frozenset((operator.add, operator.sub, operator.mul, operator.truediv, operator.neg))


def _kind_of(node: Node, module: nn.Module | None) -> str | None:
    first = node.args[0] if node.args else None
    kinds = {n.meta.get("kind") for n in node.all_input_nodes}
    if module is not None:
        if not _is_layer(module):
            return None
        if type(module).__name__.startswith("Global"):
            return DENSE
        return first.meta.get("kind") if isinstance(module, nn.Identity) and isinstance(first, Node) else SPARSE
    if node.target in NODES:
        return {"SparseTensor": SPARSE, "Tensor": DENSE}.get(NODES[node.target])
    if node.op == "get_attr" or (node.target is getattr and node.args[1] in _TENSORS):
        return DENSE
    if node.op == "call_method" and isinstance(first, Node) and first.meta.get("kind") == SPARSE:
        return SPARSE if node.target not in ("to_dense", "split") else None
    return SPARSE if node.target in _ARITHMETIC and SPARSE in kinds else None


def layer_type(module: nn.Module) -> type:
    """The class of a module; of a layer of pumice.compat, the class of pumice.nn that it derives from."""
    own = type(module)
    if not own.__module__.startswith("pumice.compat."):
        return own
    return next((base for base in own.__mro__ if _of_layers(base)), own)


def _of_layers(kind: type) -> bool:
    return kind.__module__.startswith("pumice.nn.") and kind.__module__ != blocks.__name__


def _is_layer(module: nn.Module) -> bool:
    """True for a layer of pumice.nn, or one of pumice.compat that derives from it; False for pumice.nn.blocks."""
    return _of_layers(layer_type(module))


def _is_step(module: nn.Module, args: Sequence[Any]) -> bool:
    """True if a call of a layer is recorded, not traced through. Layers of pumice.compat call themselves again, with
    the SparseTensor in what they were given."""
    given = bool(args) and issubclass(type(args[0]), Proxy)
    return _is_layer(module) and (given or layer_type(module) is type(module))


# Tracing


@dataclass(frozen=True)
class ResultForm:
    """What a network returns: values in a pytree `spec` of (result, contents of the dicts that it changes).

    changed: places of these dicts among the arguments; returned: the place of the one that is the result, or None."""

    spec: pytree.TreeSpec
    changed: tuple[int, ...]
    returned: int | None

    def build(self, values: Sequence[Any], args: Sequence[Any]) -> Any:
        """The result from values of a run with the arguments args, whose dicts are changed as the network does."""
        result, contents = pytree.tree_unflatten(values, self.spec)
        for place, new in zip(self.changed, contents, strict=True):
            args[place].clear()
            args[place].update(new)
        return result if self.returned is None else args[self.returned]


class _Root(nn.Module):
    """The traced module: calls the network `net` with the (args, kwargs) that make() returns. form: of its result,
    known after the call; None for a single value."""

    def __init__(self, net: nn.Module, make: Callable[[], tuple[Any, Any]]) -> None:
        super().__init__()
        self.net, self.make, self.form = net, make, None

    def forward(self) -> Any:
        args, kwargs = self.make()
        given = (*args, *kwargs.values())
        before = [pytree.tree_flatten(value, _is_value) for value in given]
        y = self.net(*args, **kwargs)
        changed = tuple(n for n, (a, b) in enumerate(zip(given, before, strict=True)) if not _unchanged(a, b))
        if wrong := [type(given[n]).__name__ for n in changed if type(given[n]) is not dict]:
            raise TraceError(f"its forward changes an argument of type {wrong[0]}")
        returned = next((n for n, value in enumerate(given) if value is y and type(y) is dict), None)
        if not changed and returned is None and issubclass(type(y), Proxy):
            return y
        whole = None if returned is not None else y, [given[n] for n in changed]
        values, spec = pytree.tree_flatten(whole, _is_value)
        self.form = ResultForm(spec, changed, returned)
        return values


def _is_value(value: Any) -> bool:
    # By type: a proxy answers isinstance in its own way.
    return issubclass(type(value), SparseTensor | Proxy)


def _unchanged(value: Any, before: tuple[list[Any], pytree.TreeSpec]) -> bool:
    values, spec = pytree.tree_flatten(value, _is_value)
    return spec == before[1] and all(a is b for a, b in zip(values, before[0], strict=True))


class _Tracer(Tracer):
    """torch.fx tracer. The smallest module around code that it cannot trace becomes an opaque call.

    through: modules whose forward was traced; refused: modules not to be traced, with reasons; reasons: why a
    module is opaque, by its call."""

    def __init__(self, net: nn.Module, refused: Mapping[nn.Module, str]) -> None:
        super().__init__(autowrap_modules=(math,))
        self.through: list[nn.Module] = []
        self.refused = refused
        self._within = [net]
        self.reasons: dict[Node, str] = {}
        self._thread, self._modes = threading.get_ident(), _modes()
        named = (*net.named_parameters("net", True, False), *net.named_buffers("net", True, False))
        self._names = {id(tensor): name for name, tensor in named}

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        reason = own_ways(m) or self.refused.get(m)
        name = self.path_of_module(m)
        if reason is None and _is_identity(m) and len(args) == 1 and isinstance(args[0], Proxy) and not kwargs:
            self.through.append(m)
            return args[0]
        if reason is None and not (_is_step(m, args) or self.is_leaf_module(m, name)):
            traced, reason = self._traced(m, forward, args, kwargs)
            if reason is None:
                return traced
        if reason is not None and any(issubclass(type(v), _CONTAINERS) for v in (*args, *kwargs.values())):
            raise TraceError(f"a list or dict passed to {name}, which may change it: {reason}")
        proxy = self.create_proxy("call_module", name, args, kwargs)
        if reason is not None:
            self.reasons[proxy.node] = reason
            proxy.node.meta["kind"] = None
            return _Unknown(proxy.node, self)
        return proxy

    def _traced(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, str | None]:
        """Trace a module's forward. Returns (result, None); or (None, reason), with graph and modules restored."""
        operations = _operations(m)
        if operations & _CATCHES:
            # Its forward could catch TraceErrors.
            return None, "its forward catches exceptions"
        nodes, through, before = len(self.graph.nodes), len(self.through), Snapshot(m.modules(), tensors=True)
        self._within.append(m)
        try:
            y, reason = forward(*args, **kwargs), None
        except Exception as error:
            y, reason = None, _place_of(error)
        self._within.pop()
        if not before.holds():
            before.restore()
            reason = reason or "its forward changes attributes of modules"
        made = [*self.graph.nodes][nodes:]
        if operations & _IDENTITY and any(n.meta["within"]() is m and self._unknown(n) for n in made) and not reason:
            reason = "its forward uses `is`, perhaps on the result of a module that is called as it is"
        if reason is None:
            self.through.append(m)
            return y, None
        del self.through[through:]
        for node in reversed(made):
            self.graph.erase_node(node)
        return None, reason

    def _unknown(self, node: Node) -> bool:
        """True if the node calls an opaque module other than layers of pumice.nn and torch.nn: it may return None."""
        if node not in self.reasons:
            return False
        module = self.root.get_submodule(str(node.target))
        return not (_is_layer(module) or self.is_leaf_module(module, str(node.target)))

    def create_node(self, kind: str, *given: Any, **more: Any) -> Node:  # pyright: ignore[reportIncompatibleMethodOverride]
        if kind != "output" and _modes() != self._modes:
            raise TraceError("forward changes autocast, the grad mode, default dtype or stream")
        node = super().create_node(kind, *given, **more)
        # Nodes refer to each other: held by them, a network would keep its memory until the next garbage collection.
        node.meta["within"] = weakref.ref(self._within[-1])
        return node

    def proxy(self, node: Node) -> Proxy:
        if "kind" not in node.meta:
            module = self.root.get_submodule(str(node.target)) if node.op == "call_module" else None
            node.meta["kind"] = node.args[0] if node.op == "placeholder" else _kind_of(node, module)
        kinds: dict[Any, type[_Value]] = {SPARSE: _Sparse, DENSE: _Dense, CARRIED: _Carried}
        return kinds.get(node.meta["kind"], _Unknown)(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:  # noqa: ARG002
        name = self._names.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None or threading.get_ident() != self._thread:
            return attr_val
        return self.create_proxy("get_attr", name, (), {})

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Proxy):
            return a.node
        if isinstance(a, Tensor | SparseTensor):
            name = self._names.get(id(a))
            if name is None:
                raise TraceError("a tensor is neither an argument nor a parameter or buffer")
            return self.create_node("get_attr", name, (), {})
        if not type(a).__module__.startswith("pumice."):
            return super().create_arg(a)
        if any(isinstance(value, Proxy | Tensor) for value in getattr(a, "__dict__", {}).values()):
            raise TraceError(f"tensors within an object of type {type(a).__name__}")
        return a


def _is_identity(module: nn.Module) -> bool:
    dropout = isinstance(module, nn.Dropout) and layer_type(module) in (layers.Dropout, nn.Dropout)
    return layer_type(module) in (layers.Identity, nn.Identity) or (dropout and not module.training)


def _modes() -> tuple[Any, ...]:
    """State that a context manager may change: grad and inference mode, default dtype, stream, autocast."""
    cast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), stream, *cast


def own_ways(module: nn.Module) -> str | None:
    """Reason why a module must not be traced, from its attributes and the names in its forward's code; else None."""
    for name in _METHODS.intersection(module.__dict__):
        return f"its {name} is an attribute of the instance"
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    seen = _SEEN_OUTSIDE.intersection(() if code is None or _is_layer(module) else code.co_names)
    if seen:
        return f"its forward calls {', '.join(sorted(seen))}"
    own = has_no_backward_hooks((module,)) and not module._forward_hooks and not module._forward_pre_hooks
    return None if own else "it has hooks"


def _operations(module: nn.Module) -> set[str]:
    """Names of the bytecode instructions of the module's forward."""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    return set() if code is None else {one.opname for one in dis.get_instructions(code)}


_CATCHES = {"CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH"}
_IDENTITY = {"IS_OP", *(f"POP_JUMP{way}_IF{no}_NONE" for way in ("", "_FORWARD", "_BACKWARD") for no in ("", "_NOT"))}
"""Instructions for `is` and branches on None: a proxy is never None, so the trace could take the wrong branch."""
_METHODS = frozenset(("forward", "map_request"))
"""Methods whose replacement on an instance changes a layer's result."""
_SEEN_OUTSIDE = frozenset(("print", "breakpoint", "open", "random", "manual_seed"))
"""Names of functions with side effects or random results: tracing would call them once, and not in later calls."""


def _place_of(error: Exception) -> str:
    """The error's message, after the innermost line of user code that led to it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_OF_USERS)]
    told = str(error).partition("\n")[0] or type(error).__name__
    if not frames:
        return told
    last = frames[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return f"{Path(last.filename).name}:{last.lineno}: {line} ({told})"


# Operations on features


class _Lifting:
    """Rewrites operations on the features of SparseTensors as operations on the tensors, one at a time, so that steps
    can fuse them however they were written:

        x.replace(relu(bn(x.feats) + y.feats))  ->  relu(bn(x) + y)
        x.replace(torch.cat((x.feats, y.feats), 1))  ->  pumice.cat((x, y))

    Only concatenations of tensors that share their coordinates are rewritten, and sums of such tensors with the same
    number of channels: others broadcast.

    of: the SparseTensor of each node of features; channels: of nodes, None if unknown."""

    def __init__(self, graph: TracedModule) -> None:
        self.graph = graph
        self.of: dict[Any, Node] = {}
        self.channels: dict[Any, int | None] = {}

    def rewrite(self, traced: Graph) -> None:
        """Rewrite the nodes of a trace, and fill the levels of its graph."""
        levels, of = self.graph.levels, self.of
        for node in [*traced.nodes][:-1]:
            if node not in self.graph.reasons and _is_convolution(self.graph.modules.get(node)):
                # A step reads the coordinates of a target itself.
                node.args = tuple(_of_geometry(n) for n in node.args)
            self._note(node)
            x, feats = _replaced(node)
            parts = [of[n] for n in node.all_input_nodes if n in of]
            if _is_feats(node):
                (of[node],) = node.all_input_nodes
            elif feats in of and levels[of[feats]] == levels[x]:
                node.replace_all_uses_with(of[feats])
                traced.erase_node(node)
            elif parts and len(parts) == len(node.all_input_nodes) and len({levels[x] for x in parts}) == 1:
                self._rewrite_one(node, parts)
        _read_coordinates_last(traced, self.graph)

    def _note(self, node: Node) -> None:
        """Find the level and the channels of a node."""
        self.graph.levels[node] = _level(node, _product(node, self.graph), self.graph)
        self.channels[node] = self._channels_of(node)

    def _channels_of(self, node: Node) -> int | None:
        module = None if node in self.graph.reasons else self.graph.modules.get(node)
        first: Any = node.args[0] if node.args else None
        if isinstance(module, Convolution):
            return module.out_channels
        if isinstance(module, nn.Linear):
            return module.out_features
        if node.target is cat:
            parts = [self.channels.get(part) for part in first] if isinstance(first, list | tuple) else [None]
            return None if None in parts else sum(filter(None, parts))
        if (feats := _replaced(node)[1]) is not None:
            return self.channels.get(feats)
        kept = isinstance(module, nn.BatchNorm1d | layers._Pool) or _is_activation(node, self.graph) or _is_feats(node)
        kept = kept or node.target in _SAME_ROWS or (node.target is operator.add and node.meta.get("kind") == SPARSE)
        return self.channels.get(first) if kept and isinstance(first, Node) else None

    def _rewrite_one(self, node: Node, parts: Sequence[Node]) -> None:
        """Rewrite an operation on features, if it is one that steps fuse. parts: the SparseTensors of its operands."""
        widths = {self.channels[n] for n in node.all_input_nodes}
        alike = len(widths) == 1 and None not in widths
        if node.target is operator.add and len(parts) == len(node.args) == 2 and alike:
            self._put(node, "call_function", operator.add, tuple(self.of[n] for n in node.args))
        elif _joins_columns(node, parts):
            self._put(node, "call_function", cat, (parts,))
        elif _is_activation(node, self.graph) or type(self.graph.modules.get(node)) in (nn.BatchNorm1d, nn.Linear):
            self._put(node, "call_method", "replace", (parts[0], node))

    def _put(self, node: Node, kind: str, target: Any, args: Any) -> None:
        """Add a node that makes a SparseTensor; what reads features from `node` reads this tensor's."""
        traced = node.graph
        with traced.inserting_after(node):
            x = traced.create_node(kind, target, args)
        with traced.inserting_after(x):
            feats = traced.create_node("call_function", getattr, (x, "feats"))
        x.meta.update(kind=SPARSE, within=node.meta["within"])
        feats.meta.update(kind=DENSE, within=node.meta["within"])
        node.replace_all_uses_with(feats, lambda user: user is not x)
        if not node.users:
            traced.erase_node(node)
        self.of[feats] = x
        self._note(x)
        self._note(feats)


def _is_feats(node: Node) -> bool:
    """True for x.feats of a SparseTensor."""
    args: Any = node.args
    return node.target is getattr and args[1] == "feats" and args[0].meta["kind"] == SPARSE


def _of_geometry(node: Any) -> Any:
    """x for x.geometry, if x is a SparseTensor; else the node."""
    args: Any = node.args if isinstance(node, Node) and node.target is getattr else (None, "")
    return args[0] if args[1] == "geometry" and args[0].meta["kind"] == SPARSE else node


def _read_coordinates_last(traced: Graph, graph: TracedModule) -> None:
    """Let results that are coordinates alone read the last tensor that has them, so that no other is kept for these."""
    last = {graph.levels[n]: n for n in traced.nodes if n.meta.get("kind") == SPARSE and n.target is not coordinates_of}
    made: dict[Node, Node] = {}
    for node in [n for n in traced.nodes if n.target is coordinates_of and all(u.op == "output" for u in n.users)]:
        (own,) = node.all_input_nodes
        x = last[graph.levels[own]]
        node.args = (x,)
        if made.setdefault(x, node) is not node:
            node.replace_all_uses_with(made[x])
            traced.erase_node(node)


def _joins_columns(node: Node, parts: Sequence[Node]) -> bool:
    """True for torch.cat of features by columns; the parts are in the order of the operands."""
    given: Any = node.args[0] if node.args else ()
    if node.target not in (torch.cat, torch.concat) or not isinstance(given, list | tuple) or len(given) != len(parts):
        return False
    dims = (*node.args[1:], *node.kwargs.values())
    return len(dims) == 1 and dims[0] in (1, -1) and not node.kwargs.keys() - {"dim", "axis"}


def _is_activation(node: Node, graph: TracedModule) -> bool:
    """True for an activation that a step may fuse, on features."""
    if node in graph.modules:
        return node not in graph.reasons and type(graph.modules[node]) in ACTIVATIONS
    return node.target in _FUNCTIONS and len(node.args) == 1


# Steps


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a program. node: of its result; names: of the modules or functions that it runs."""

    node: Node
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class CallStep(Step):
    """A call of a module, function or method. reason: why the module was not traced, None for other calls."""

    module: nn.Module | None = None
    reason: str | None = None


@dataclass(frozen=True, eq=False)
class Product(Step):
    """A convolution or linear map of x, with the norm, residual sum and activation that follow.

    layer: of a linear map, a module of torch or pumice, or what else has its weight and bias.
    target: node whose coordinates the result takes, or None. level: of the result, see _level.
    """

    layer: Any = None
    x: Any = None
    target: Node | None = None
    norm: nn.BatchNorm1d | None = None
    residual: Node | None = None
    activation: str = ""
    level: Any = None


class _Link(NamedTuple):
    """The only operation on a value, and its result's node: the `replace` if the operation takes plain features."""

    operation: Node
    result: Node


@dataclass(eq=False)
class TracedModule:
    """A traced module. modules: called modules by node; through, reasons: see _Tracer; placeholders: nodes of the
    arguments that are no constants; result: the returned node, or the values of `form`; levels: by node, see _level."""

    nodes: tuple[Node, ...]
    modules: Mapping[Node, nn.Module]
    through: tuple[nn.Module, ...]
    reasons: Mapping[Node, str]
    placeholders: tuple[Node, ...]
    result: Any
    form: ResultForm | None = None
    levels: dict[Node, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


def _norm(step: Product, link: _Link, graph: TracedModule) -> Product | None:
    module = graph.modules.get(link.operation)
    if module is None or link.operation in graph.reasons:
        return None
    # A norm of torch.nn takes features, one of pumice.nn a SparseTensor.
    kind = layers.BatchNorm if link.result is link.operation else nn.BatchNorm1d
    own = layer_type(module)
    # In evaluation a synchronised norm reads running statistics, as any other.
    own = layers.BatchNorm if own is layers.SyncBatchNorm and not module.training else own
    return replace(step, norm=module) if own is kind else None


def _residual(step: Product, link: _Link, graph: TracedModule) -> Product | None:
    node = link.operation
    if node.target is not operator.add or len(node.args) != 2:
        return None
    a, b = node.args
    other = a if b is step.node else b
    if not isinstance(other, Node) or other is step.node or other.meta["kind"] != SPARSE:
        return None
    # The sum of two products is fused into the later one.
    order = {n: place for place, n in enumerate(graph.nodes)}
    last = _replaced(other)[1] or other
    waits = isinstance(graph.modules.get(last), Convolution | nn.Linear | nn.BatchNorm1d)
    return None if waits and order[other] > order[step.node] else replace(step, residual=other)


def _activation(step: Product, link: _Link, graph: TracedModule) -> Product | None:
    node, module = link.operation, graph.modules.get(link.operation)
    if module is not None and node not in graph.reasons:
        name = ACTIVATIONS.get(layer_type(module), "")
        name = name if (link.result is not node) == (not _is_layer(module)) else ""
    else:
        name = _FUNCTIONS.get(node.target, "") if len(node.args) == 1 and link.result is not node else ""
    return replace(step, activation=name) if name else None


_FUNCTIONS: Mapping[Any, str] = {torch.relu: "relu", functional.relu: "relu", functional.silu: "silu", "relu": "relu"}

PATTERN: tuple[Callable[[Product, _Link, TracedModule], Product | None], ...] = (_norm, _residual, _activation)
"""Functions that fuse the operation after a product into its step, or return None; applied in order, once each."""


_TRACING = threading.RLock()


def trace(
    net: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    refused: Mapping[nn.Module, str],
    constants: tuple[type, ...] = CONSTANTS,
) -> TracedModule | str:
    """Trace net(*args, **kwargs) into steps, which hold for any tensors in place of those given; or return the reason
    why net cannot be traced. refused: modules not to be traced, with reasons; constants: types of arguments for whose
    values alone the steps hold."""
    placeholders: list[Node] = []

    def argument(value: Any) -> Any:
        if isinstance(value, constants):
            return value
        kind = SPARSE if isinstance(value, SparseTensor) else DENSE if isinstance(value, Tensor) else CARRIED
        proxy = tracer.create_proxy("placeholder", f"argument_{len(placeholders)}", (kind,), {})
        placeholders.append(proxy.node)
        return proxy

    def make() -> tuple[Any, Any]:
        return pytree.tree_map(argument, ([*args], {**kwargs}), is_leaf=is_sparse)

    tracer, root = _Tracer(net, refused), _Root(net, make)
    through, reasons = tracer.through, tracer.reasons
    try:
        # torch.fx patches Module.__call__ in all threads; call_module runs the calls of other threads unchanged.
        with _TRACING:
            traced = tracer.trace(root)
    except Exception as error:  # such as a result that a graph cannot hold
        return _place_of(error)
    finally:
        # A tracer refers to itself, by the functions that torch.fx patches with: it must not keep net and arguments.
        vars(tracer).clear()
    modules = {n: root.get_submodule(str(n.target)) for n in traced.nodes if n.op == "call_module"}
    reasons = {n: reason for n, reason in reasons.items() if n in modules}
    whole = next((reason for n, reason in reasons.items() if modules[n] is net), None)
    if whole is not None:
        return whole
    graph = TracedModule((), modules, tuple(through), reasons, tuple(placeholders), None)
    _Lifting(graph).rewrite(traced)
    for node in reversed(traced.nodes):
        # Dead code without side effects.
        if not node.users and node.op not in ("placeholder", "output") and is_pure(node, graph):
            traced.erase_node(node)
    graph.nodes = tuple(traced.nodes)
    graph.result, graph.form = graph.nodes[-1].args[0], root.form
    graph.steps = _steps(graph)
    return graph


def _steps(graph: TracedModule) -> list[Step]:
    """Products with the operations fused into them, and calls of all other nodes."""
    alone = _norms_apart(graph)
    changing = [place for place, n in enumerate(graph.nodes) if not is_pure(n, graph) and n not in alone]
    products, within = _products(graph, changing)
    steps: list[Step] = []
    for node in graph.nodes[:-1]:
        graph.levels[node] = _level(node, products.get(node), graph)
        if node in products:
            steps.append(replace(products[node], level=graph.levels[node]))
        elif node.op != "placeholder" and node not in within:
            names = (_name_of(node, graph),)
            steps.append(CallStep(node, names, graph.modules.get(node), graph.reasons.get(node)))
    return steps


def _norms_apart(graph: TracedModule) -> set[Node]:
    """Calls of batch norms whose running statistics no other node reads or writes."""
    called = Counter(graph.modules.values())
    read = tuple(str(n.target).rpartition(".")[0] for n in graph.nodes if n.op == "get_attr")
    return {
        node
        for node, module in graph.modules.items()
        if layer_type(module) in (layers.BatchNorm, nn.BatchNorm1d)
        and node not in graph.reasons
        and called[module] == 1
        and str(node.target) not in read
    }


def _products(graph: TracedModule, changing: Sequence[int]) -> tuple[dict[Node, Product], set[Node]]:
    """Products by result node, and all other nodes fused into them. changing: positions of nodes with side effects."""
    order = {n: place for place, n in enumerate(graph.nodes)}
    found: dict[Node, Product] = {}
    within: set[Node] = set()
    for node in graph.nodes:
        step, own = _product(node, graph), [node]
        if step is None:
            continue
        if node.op == "call_method":
            # A linear map of features, and what gives it these, stand before the tensor of its result.
            linear = _replaced(node)[1]
            within.update([linear, *(n for n in linear.all_input_nodes if len(n.users) == 1)])
        for row in PATTERN:
            link = _following(step.node)
            more = row(step, link, graph) if link is not None else None
            if more is None or link is None:
                continue
            # The fused step runs at its last node: no node in between may change what the step reads, or read what the
            # step changes.
            between = [p for p in changing if order[node] < p < order[link.result]]
            inside = {*own, link.operation, *_feats_of(step.node)}
            if between and not inside.issuperset(graph.nodes[min(between) : order[link.result]]):
                break
            own += [*([] if link.result is link.operation else _feats_of(step.node)), link.operation, link.result]
            names = (*more.names, _name_of(link.operation, graph))
            step = replace(more, node=link.result, names=names)
        found[step.node] = step
        within.update(n for n in own if n is not step.node)
    return found, within


def _is_convolution(layer: nn.Module | None) -> bool:
    """True for a convolution of pumice.nn or pumice.compat; False for classes of users, whose forward may differ."""
    return isinstance(layer, Convolution) and layer_type(layer).__module__ == Convolution.__module__


def _linear_product(node: Node, graph: TracedModule) -> Product | None:
    """The product of x.replace(linear(x.feats)), as _Lifting writes it."""
    x, made = _replaced(node)
    linear = None if made in graph.reasons else graph.modules.get(made)
    if type(linear) is not nn.Linear or len(made.users) > 1 or len(made.args) != 1 or made.kwargs:
        return None
    feats: Any = made.args[0]
    if not isinstance(feats, Node) or feats.target is not getattr or feats.args != (x, "feats"):
        return None
    return Product(node, (_name_of(made, graph),), linear, x)


def _replaced(node: Node) -> tuple[Any, Any]:
    """(x, feats) of a node x.replace(feats), else (None, None)."""
    args: Any = node.args
    return args if node.target == "replace" and len(args) == 2 and not node.kwargs else (None, None)


def _product(node: Node, graph: TracedModule) -> Product | None:
    if node.op == "call_method":
        return _linear_product(node, graph)
    layer = graph.modules.get(node)
    if layer is None or node in graph.reasons or not node.args or not isinstance(node.args[0], Node):
        return None
    of_ours = _is_convolution(layer)
    if not (of_ours or layer_type(layer) is layers.Linear) or node.args[0].meta["kind"] != SPARSE:
        return None
    more = (*node.args[1:], *node.kwargs.values())
    target = more[0] if more else None
    if len(more) > 1 or not (target is None or isinstance(target, Node)) or (target is not None and not of_ours):
        return None
    if target is not None and target.meta["kind"] != SPARSE:
        return None
    layer = getattr(layer, "linear_map", None) or layer
    return Product(node, (_name_of(node, graph),), layer, node.args[0], target)


def _following(node: Node) -> _Link | None:
    """The only operation on a value, or on its features if `replace` puts the result back; else None."""
    users = list(node.users)
    if len(users) == 1:
        return _Link(users[0], users[0])
    feats = _feats_of(node)
    result = next((n for n in users if n.target == "replace" and n.args[0] is node and not n.kwargs), None)
    if len(users) != 2 or len(feats) != 1 or result is None or len(feats[0].users) != 1:
        return None
    (operation,) = feats[0].users
    alone = operation.args[:1] == (feats[0],) and list(operation.users) == [result] and result.args[1:] == (operation,)
    return _Link(operation, result) if alone else None


def _feats_of(node: Node) -> list[Node]:
    return [n for n in node.users if n.target is getattr and n.args[1] == "feats"]


def is_pure(node: Node, graph: TracedModule) -> bool:
    """True if a node is known to have no side effects and to draw no random numbers."""
    if node.op == "call_module":
        module = graph.modules[node]
        quiet = not (isinstance(module, nn.Dropout | nn.modules.batchnorm._BatchNorm) and module.training)
        known = _is_layer(module) or layer_type(module) in (nn.BatchNorm1d, nn.Linear, *ACTIVATIONS)
        return known and quiet and node not in graph.reasons and not getattr(module, "inplace", False)
    if node.op == "call_function":
        alone = len(node.args) == 1 and not node.kwargs
        known = node.target is getattr or node.target in _ARITHMETIC or node.target in NODES
        return known or (node.target in _FUNCTIONS and alone)
    return node.op in ("placeholder", "get_attr") or (node.op == "call_method" and node.target in _SAME_ROWS)


def _level(node: Node, product: Product | None, graph: TracedModule) -> Any:
    """Key of the geometry of a node's value: nodes with equal keys share one Geometry object."""
    levels, first, module = graph.levels, node.args[0] if node.args else None, graph.modules.get(node)
    if product is not None:
        own = _level_of_product(product, graph)
        return own if product.residual is None or levels[product.residual] == own else node
    own = levels.get(first, node) if isinstance(first, Node) else node
    if node.target is cat:
        return levels[first[0]] if isinstance(first, list | tuple) and isinstance(first[0], Node) else node
    if node.target in _ARITHMETIC:
        return own if {levels[n] for n in node.all_input_nodes if n.meta["kind"] == SPARSE} == {own} else node
    if node in graph.reasons:
        return node
    if isinstance(module, layers._Pool):
        return _level_over(own, module.relation())
    kept = isinstance(module, layers._Featurewise | layers.GroupNorm | layers.Identity)
    return own if kept or (node.op == "call_method" and node.target in _SAME_ROWS) else node


def _level_of_product(product: Product, graph: TracedModule) -> Any:
    own, layer = graph.levels[product.x], product.layer
    if not isinstance(layer, Convolution):
        return own
    if product.target is not None:
        return graph.levels[product.target]
    if layer.relation.policy == "cached_inverse":
        return own[0] if isinstance(own, tuple) else product.node
    return _level_over(own, layer.relation)


def _level_over(level: Any, relation: Relation) -> Any:
    """Level of the outputs of a relation over `level`."""
    return level if relation.policy == "same" else (level, relation)


def map_requests(graph: TracedModule) -> Iterator[tuple[Any, Relation, Convolution | None]]:
    """(level of the inputs, relation, convolution or None for a pool) of each kernel map that a step reads, except on
    given coordinates."""
    for step in graph.steps:
        if isinstance(step, Product):
            if isinstance(step.layer, Convolution) and step.target is None:
                yield graph.levels[step.x], step.layer.relation, step.layer
        elif isinstance(step, CallStep) and isinstance(step.module, layers._Pool) and step.reason is None:
            (x,) = step.node.all_input_nodes
            yield graph.levels[x], step.module.relation(), None


def _name_of(node: Node, graph: TracedModule) -> str:
    target = node.target
    if node in graph.modules:
        return str(target).removeprefix("net").removeprefix(".") or "net"
    if target is getattr:
        return f".{node.args[1]}"
    return getattr(target, "__name__", str(target)) if node.op == "call_function" else str(target)


def reads_of(step: Step) -> tuple[Node, ...]:
    """The nodes that a step reads: of a product's target, only the coordinates."""
    if isinstance(step, Product):
        return tuple(n for n in (step.x, step.residual, step.target) if n is not None)
    return tuple(step.node.all_input_nodes)


def nodes_in(value: Any) -> list[Node]:
    """All nodes in a nested structure."""
    found: list[Node] = []
    map_arg(value, found.append)
    return found
