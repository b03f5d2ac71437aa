"""pumice.compile: a module as a program of fused steps that share memory, without module calls in between."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from pumice.coords import Geometry, Relation
from pumice.engine.stretch import Env, Stretch, run_product, stretches
from pumice.engine.text import aligned
from pumice.engine.trace import (
    CONSTANTS,
    NUMBERS,
    SPARSE,
    CallStep,
    Product,
    ResultForm,
    Snapshot,
    Step,
    TracedModule,
    map_requests,
    nodes_in,
    own_ways,
    trace,
)
from pumice.engine.train_stretch import TrainStretch, train_stretches
from pumice.errors import OptionError
from pumice.nn.conv import Convolution, InverseConv
from pumice.nn.hooks import REQUIRES_GRAD, has_no_backward_hooks, has_no_forward_hooks
from pumice.ops import MapConsumers, SparseTensor, autograd
from pumice.ops.conv import autocast_dtype
from pumice.ops.prepare import RequestedMaps, requested_maps
from pumice.ops.tensor import is_sparse, raw_feats
from pumice.runtime.cache import BoundedCache

_KINDS = 16
"""Maximum number of argument kinds per network: numbers among the arguments may differ in every call."""
INFERENCE, TRAINING = "inference", "training"
_TIMES = 64
"""Maximum number of retraces in a row; then the module is called untraced: its attributes change in every call."""


def compile(net: nn.Module) -> Program:  # noqa: A001
    """Compile a network of sparse layers into a module that runs the whole network as fused steps.

        pm.compile(net)(x) = net(x)

    up to the rounding of fused operations. torch.fx traces the network at the first call. On a GPU, in inference, a
    convolution or linear map, with the batch norm (by running statistics), residual sum and activation that follow, is
    one kernel; the parts of a concatenation are written as columns of one buffer; intermediate features share one
    arena; kernel maps of all levels are built together. In training, a run of convolutions and linear maps, with
    norms, sums, activations and concatenations, is one autograd node. The trace holds for all scenes; only kernels have
    to be compiled ahead.

    Arguments may be tensors, numbers and texts, dictionaries, lists and tuples of these (changed as net changes them),
    and what holds a SparseTensor as a node of torch.utils._pytree, such as tensors of pumice.compat; others may only be
    passed on. The steps are traced again for other numbers, texts and arrangements, up to 16 times; then texts are only
    passed on, and net is called for other numbers. Operations of torch on the features of a tensor fuse as layers of
    pumice.nn do.

    net: any torch.nn.Module. The program shares net's parameters, buffers, submodules and mode, by the same names:
    changes of one show in the other. A submodule with hooks, with control flow that depends on values, or that torch.fx
    cannot trace is called as it is, untraced; `explain()` names it and the line. Under autocast on a CPU, and within
    torch.compile, torch.export or torch.func transforms, the program calls net. Changed modules, options, hooks and
    modes are detected at the next call; changed globals, and changed objects other than lists, dicts and sets in
    modules, are not. Side effects of a forward other than writes to tensors and modules and calls of print happen only
    while it is traced.

    Raises OptionError if net is not a torch.nn.Module; exceptions of net propagate.
    """
    if not isinstance(net, nn.Module):
        raise OptionError(f"compile takes a torch.nn.Module, found {type(net).__name__}")
    return net if isinstance(net, Program) else Program(net)


def uncompiled(net: nn.Module) -> nn.Module:
    """The module that a program was compiled from; other modules as they are."""
    return net._net if isinstance(net, Program) else net


class Program(nn.Module):
    """A compiled module; see pumice.compile."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        own = self.__dict__
        own["_net"] = net
        # Shared: parameters, buffers and submodules are those of net, by the same names.
        own.update({name: net.__dict__[name] for name in _SHARED})
        own["_programs"], own["_last"] = BoundedCache(2 * _KINDS), None

    @property
    def training(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._net.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_net" in self.__dict__:
            self._net.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """net(*args, **kwargs)."""
        net = self._net
        if torch.compiler.is_compiling():
            return net(*args, **kwargs)
        given, form = _values_in(args, kwargs)
        if not _alone(given):
            return net(*args, **kwargs)
        kind, constants = self._key(given, form)
        if kind is None:
            return net(*args, **kwargs)
        program = self._standing(kind, constants, args, kwargs)
        way = None if program.graph is None else program.way(given)
        if way is None:
            return net(*args, **kwargs)
        try:
            found = program.run([value for value in given if not isinstance(value, constants)], way)
        except _Unseen as seen:
            # The module that may branch on it is called as it is from now on.
            refused = program.refused | {seen.within: str(seen)}
            self._programs.keep(kind, Traced(net, args, kwargs, refused, program.times, constants))
            return net(*args, **kwargs)
        result = program.form
        return found if result is None else result.build(found, (*args, *kwargs.values()))

    def _key(self, given: Sequence[Any], form: Hashable) -> tuple[Hashable, tuple[type, ...]]:
        """(key of the trace for such arguments, types of its constants); the key is None if there are too many."""
        traced = len(self._programs.values())
        kind = _kind_of(self._net, given, form, CONSTANTS)
        if traced < _KINDS or self._programs.get(kind) is not None:
            return kind, CONSTANTS
        # Texts, such as names of scans, may differ in every call.
        kind = _kind_of(self._net, given, form, NUMBERS)
        carried = any([isinstance(value, str) for value in given]) and traced < 2 * _KINDS
        return kind if carried or self._programs.get(kind) is not None else None, NUMBERS

    def _standing(
        self, kind: Hashable, constants: tuple[type, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Traced:
        """The trace of a key, made anew if the network has changed since."""
        program = self._programs.get(kind)
        if program is not None and program.stands():
            program.times = 0
        else:
            times = 0 if program is None else program.times + 1
            refused = {} if program is None else program.refused
            if times >= _TIMES:
                refused = {self._net: f"its attributes have changed {times} times, between calls"}
            program = self._programs.keep(kind, Traced(self._net, args, kwargs, refused, times, constants))
        self.__dict__["_last"] = kind
        return program

    def explain(self) -> str:
        """Text: steps for the last call's arguments, the modules in each, and untraced modules with reasons."""
        program = self._programs.get(self._last)
        told = "not traced yet: steps are known after a call with a tensor"
        return told if program is None else program.explain()

    def extra_repr(self) -> str:
        return f"program of {type(self._net).__name__}"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_net" not in self.__dict__:
                raise
            return getattr(self._net, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_net" not in self.__dict__ or name.startswith("_") or name == "training":
            super().__setattr__(name, value)
        else:
            setattr(self._net, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_programs": BoundedCache(2 * _KINDS)}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of net."""
        return self._net.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state of net."""
        return self._net.load_state_dict(*args, **kwargs)

    def _replicate_for_data_parallel(self) -> nn.Module:
        # Replicas have parameters of their own, so they are not programs.
        return self._net._replicate_for_data_parallel()


_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _values_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Hashable]:
    """(values in the arguments, what they are arranged in). Containers are Python's, and what is registered as one."""
    given = (*args, *kwargs.values())
    # By type: a proxy of torch.fx passes isinstance.
    if all([issubclass(type(value), _VALUES) for value in given]):
        return given, (len(args), *kwargs)
    return pytree.tree_flatten(([*args], {**kwargs}), is_sparse)


_VALUES = (SparseTensor, Tensor, *CONSTANTS)


def _kind_of(net: nn.Module, given: Sequence[Any], form: Hashable, constants: tuple[type, ...]) -> Hashable:
    """Key of the traced steps: modes, and types of the arguments, or values if the type is one of `constants`."""
    modes = net.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    kinds = [(type(value), value) if isinstance(value, constants) else type(value) for value in given]
    return constants, *modes, form, *kinds


def _alone(given: Sequence[Any]) -> bool:
    """True if no global module hooks are registered and a tensor is given."""
    if not (has_no_forward_hooks(()) and has_no_backward_hooks(())):
        return False
    return any([isinstance(value, SparseTensor | Tensor) for value in given])


class _Unseen(Exception):
    """A step returned None, True or False; the trace misses branches on it in the forward of `within`."""

    def __init__(self, told: str, within: nn.Module) -> None:
        super().__init__(told)
        self.within = within


class Traced:
    """The trace of a module for one kind of arguments, valid while the module's attributes are unchanged.

    graph: None if the module cannot be traced; why: the reason. refused: modules not to be traced, with reasons. times:
    number of retraces in a row.
    """

    refused: dict[nn.Module, str]
    times: int
    graph: TracedModule | None
    why: str
    form: ResultForm | None
    pyramid: _Pyramid | None

    def __init__(
        self,
        net: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        refused: Mapping[nn.Module, str],
        times: int,
        constants: tuple[type, ...],
    ) -> None:
        self.refused, self.times = {**refused}, times
        traced = refused.get(net) or trace(net, args, kwargs, refused, constants)
        if not isinstance(traced, str) and not any(n.meta["kind"] == SPARSE for n in traced.nodes[:-1]):
            traced = "it takes and makes no SparseTensor"
        self.graph, self.why = (None, traced) if isinstance(traced, str) else (traced, "")
        self.form = None if self.graph is None else self.graph.form
        self._net = net
        modules = [net]
        # (untraced module, reason): traced again once the reason is gone.
        self._watched: list[tuple[nn.Module, str]] = []
        if self.graph is not None:
            known = [module for node, module in self.graph.modules.items() if node not in self.graph.reasons]
            modules = [*dict.fromkeys((net, *self.graph.through, *known))]
            opaque = [self.graph.modules[node] for node in self.graph.reasons]
            self._watched += [(module, reason) for module in opaque if (reason := own_ways(module)) is not None]
            self._root = {"net": net}
            self.pyramid = _pyramid_of(self.graph)
            norms = [s.norm for s in self.graph.steps if isinstance(s, Product) and s.norm is not None]
            self._by_batch = any(norm.training or norm._buffers.get("running_mean") is None for norm in norms)
        self._guards = Snapshot(modules)
        self._parameters = [module._parameters for module in net.modules()]
        self._plans: dict[Any, list[Item]] = {}

    def stands(self) -> bool:
        """True if the trace is still valid."""
        return self._guards.holds() and all([own_ways(module) == reason for module, reason in self._watched])

    def way(self, given: Sequence[Any]) -> str | None:
        """INFERENCE; or TRAINING, if gradients are needed or a norm uses batch statistics; or None to call the module,
        under modes and transforms that fused steps do not support."""
        feats = [raw_feats(x) if isinstance(x, SparseTensor) else x for x in given]
        tensors = [x for x in feats if isinstance(x, Tensor)]
        trains = self._by_batch
        if torch.is_grad_enabled() and not trains:
            every = [p for own in self._parameters for p in own.values() if p is not None]
            trains = any(map(REQUIRES_GRAD, (*every, *tensors)))
        check = autograd.is_plain_call if not trains else autograd.only_reverse_mode_active
        on_gpu = autograd.uses_gpu(tensors[0])
        if trains and (torch._C._len_torch_function_stack() or (not on_gpu and torch.is_autocast_enabled("cpu"))):
            return None
        # On a GPU, products cast their operands themselves; on a CPU, autocast is left to the modules.
        with autograd.autocast_disabled(tensors) if on_gpu else nullcontext():
            return (TRAINING if trains else INFERENCE) if check(tensors) else None

    def run(self, given: Sequence[Any], way: str) -> Any:
        """The result of the steps: a value, or the values of `form`. given: the arguments that are no constants."""
        graph, first = self.graph, _features(given)
        assert graph is not None
        if not _is_current(first):
            with torch.cuda.device(first.device):
                return self.run(given, way)
        env: Env = dict(zip(graph.placeholders, given, strict=True))
        on_gpu = autograd.uses_gpu(first)
        key = way, (autocast_dtype(first) or first.dtype).itemsize if on_gpu else None
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = items(graph, key, self._root)
        begun: list[Callable[[], None]] = []
        pyramid = self.pyramid if on_gpu else None
        for item in plan:
            if pyramid is not None and pyramid.node in env:
                pyramid.prepare(env, lambda: begun.append(item.begin(env)))  # noqa: B023
                pyramid = None
            (begun.pop() if begun else item.begin(env))()
            for node in item.last:
                del env[node]
        return map_arg(graph.result, env.__getitem__)

    def explain(self) -> str:
        """A line for each step."""
        if self.graph is None:
            return f"the module is called as it is: {self.why}"
        rows = [_told(number, step) for number, step in enumerate(self.graph.steps)]
        products = sum(isinstance(step, Product) for step in self.graph.steps)
        opaque = sum(isinstance(step, CallStep) and step.reason is not None for step in self.graph.steps)
        head = f"{len(rows)} steps: {products} convolutions and linear maps, {opaque} modules called as they are"
        return "\n".join((head, *aligned(rows)))


def _features(given: Sequence[Any]) -> Tensor:
    """The features of the first SparseTensor, else the first floating-point tensor, else the first tensor."""
    if type(given[0]) is SparseTensor:
        return raw_feats(given[0])
    every = [raw_feats(x) if isinstance(x, SparseTensor) else x for x in given if isinstance(x, SparseTensor | Tensor)]
    sparse = next((raw_feats(x) for x in given if isinstance(x, SparseTensor)), None)
    return sparse if sparse is not None else next((x for x in every if x.is_floating_point()), every[0])


def _is_current(x: Tensor) -> bool:
    """True if x is on a CPU or on the current device, on which kernels are launched."""
    return not x.is_cuda or x.get_device() == torch._C._cuda_getDevice()


def _told(number: int, step: Step) -> tuple[str, str, str]:
    if isinstance(step, Product):
        behind = [step.norm and "norm", step.residual and "sum", step.activation]
        first = "convolution" if isinstance(step.layer, Convolution) else "linear map"
        return str(number), " + ".join((first, *filter(None, behind))), ", ".join(step.names)
    reason = step.reason if isinstance(step, CallStep) else None
    called = "call" if reason is None else f"called as it is: {reason}"
    return str(number), called, ", ".join(step.names)


# Items


@dataclass(frozen=True, eq=False)
class Item:
    """A step, or several as a stretch. begin(env) prepares it without kernel maps and returns a function that runs it;
    reads, makes: nodes; last: nodes that no later item reads. part: what it runs."""

    begin: Callable[[Env], Callable[[], None]]
    reads: tuple[Node, ...]
    makes: tuple[Node, ...]
    part: Step | Stretch | TrainStretch
    last: tuple[Node, ...] = ()


def _with_maps(run: Callable[[Env], None]) -> Callable[[Env], Callable[[], None]]:
    """The `begin` of an item that has nothing to prepare."""
    return partial(partial, run)


def items(graph: TracedModule, how: tuple[str, int | None], root: Mapping[str, Any]) -> list[Item]:
    """The items that run a graph. how: (INFERENCE or TRAINING, bytes of a feature on a GPU; None on a CPU)."""
    made: list[Item] = []
    way, size = how
    on_gpu = train_stretches(graph) if way is TRAINING else stretches(graph, size or 0)
    for each in graph.steps if size is None else on_gpu:
        if isinstance(each, Stretch | TrainStretch):
            begin = each.begin if isinstance(each, Stretch) else _with_maps(each.run)
            made.append(Item(begin, each.inputs, each.outputs, each))
        elif isinstance(each, Product):
            reads = tuple(n for n in (each.x, each.target, each.residual) if n is not None)
            made.append(Item(_with_maps(_by_modules(each)), reads, (each.node,), each))
        elif isinstance(each, CallStep):
            made.append(Item(_with_maps(_caller(each, root)), tuple(each.node.all_input_nodes), (each.node,), each))
    needed = {*nodes_in(graph.result)}
    for place in range(len(made) - 1, -1, -1):
        touched = dict.fromkeys((*made[place].reads, *made[place].makes))
        made[place] = replace(made[place], last=tuple(node for node in touched if node not in needed))
        needed.update(touched)
    return made


def _by_modules(step: Product) -> Callable[[Env], None]:
    def run(env: Env) -> None:
        env[step.node] = run_product(step, env)

    return run


def _caller(step: CallStep, root: Mapping[str, Any]) -> Callable[[Env], None]:
    """A function that runs a node on the values of its arguments in env, and stores its result there."""
    node, module = step.node, step.module
    target: Any = node.target

    def run(env: Env) -> None:
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "get_attr":
            value = attrgetter(target.partition(".")[2])(root["net"])
        elif module is not None:
            value = module(*args, **kwargs)
        elif node.op == "call_method":
            value = getattr(args[0], target)(*args[1:], **kwargs)
        else:
            value = target(*args, **kwargs)
        if value is None or value is True or value is False:
            told = f"{step.names[0]} gave {value}, on which control flow may depend"
            raise _Unseen(told, node.meta["within"]())
        env[node] = value

    return run


# Kernel maps


@dataclass(frozen=True, eq=False)
class _Pyramid:
    """The kernel maps that a network needs on its argument `node`. dims: spatial dimensions of their relations."""

    node: Node
    maps: RequestedMaps
    dims: set[int]

    def prepare(self, env: Env, meanwhile: Callable[[], object]) -> None:
        """Build all maps together, unless the geometry already has maps. meanwhile: see build_chain."""
        geometry: Geometry = env[self.node].geometry
        if not geometry.maps and len(geometry) and self.dims == {geometry.dim}:
            self.maps.prepare(geometry, meanwhile)


def _pyramid_of(graph: TracedModule) -> _Pyramid | None:
    """Maps from the first sparse argument down, or from the first SparseTensor that is made: per level, submanifold
    windows and the first strided relation."""
    sparse = [n for n in graph.nodes[:-1] if n.meta["kind"] == SPARSE]
    node = next((n for n in sparse if n.op == "placeholder"), sparse[0])
    requests = [*map_requests(graph)]
    convs = [(graph.levels[step.x], step.layer) for step in graph.steps if isinstance(step, Product)]
    level, steps, same = graph.levels[node], [], []
    consumers: tuple[list[Any], list[Any], list[Any]] = [], [], []
    while True:
        # Pools read no layout.
        layers: dict[Relation, list[Any]] = {}
        for own, relation, layer in requests:
            if own == level:
                layers.setdefault(relation, []).extend([] if layer is None else [layer])
        windows = [relation for relation in layers if relation.policy == "same"]
        same.append(tuple(windows))
        consumers[2].append([layers[window] for window in windows])
        relation = next((r for r in layers if r.policy in ("support", "floor_unique")), None)
        if relation is None:
            break
        below = level, relation
        steps.append(relation)
        consumers[0].append(layers[relation])
        back = [layer for own, layer in convs if isinstance(layer, InverseConv) and own == below]
        consumers[1].append([b for b in back if replace(b.relation, policy=relation.policy) == relation])
        level = below
    dims = {one.dim for relations in (steps, *same) for one in relations}
    return _Pyramid(node, requested_maps(steps, same, MapConsumers(*consumers)), dims) if dims else None
