"""Training stretches on a GPU: runs of convolutions and linear maps, each fused into one autograd node."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from pumice.coords import Geometry, KernelMap, kernel_map
from pumice.engine.stretch import Env, grouped, is_concatenation, is_one_kernel, parts_of, run_by_modules
from pumice.engine.trace import CallStep, Product, Step, TracedModule, is_pure, nodes_in, reads_of
from pumice.engine.train_layers import NONE, Joined, Layer, Planner, TrainPlan, WiredStep, tensors_of
from pumice.engine.train_pass import Started, StepCall
from pumice.lower import kernel as kernels
from pumice.lower.call import global_settings
from pumice.lower.norm import KernelTasks
from pumice.nn import layers
from pumice.nn.conv import Convolution
from pumice.nn.hooks import REQUIRES_GRAD, TENSOR_GUARDS
from pumice.ops import autograd
from pumice.ops.conv import AUTOCAST_DTYPES, autocast_dtype
from pumice.ops.tensor import from_raw_feats, raw_feats, unchecked_tensor
from pumice.runtime.compile import BACKGROUND
from pumice.runtime.streams import is_capturing

_ADDRESS = 15
"""Address bits that are 0: 16-byte alignment."""
_PLANS = 4
"""Plans cached per stretch, one per set of guards: networks frozen by turns (GANs) need several."""


class TrainStretch:
    """A run of products (convolutions, linear maps) and concatenations. inputs: nodes that it reads; outputs: its nodes
    that other steps read. If kernels do not support the tensors, the modules run instead."""

    def __init__(self, steps: Sequence[Step], outside: set[Node], live: set[Node]) -> None:
        """outside: nodes that other steps read; live: nodes that results depend on."""
        self.steps: tuple[Step, ...] = tuple(steps)
        made = {step.node for step in steps}
        reads = dict.fromkeys(node for step in steps for node in reads_of(step) if node not in made)
        kept = {node for step in steps for node in _features_of(step)}
        # Other nodes provide coordinates only.
        self.features: tuple[Node, ...] = tuple(node for node in reads if node in kept)
        self.inputs: tuple[Node, ...] = (*self.features, *(node for node in reads if node not in kept))
        self.outputs: tuple[Node, ...] = tuple(step.node for step in steps if step.node in outside)
        multiplied = {step.x for step in steps if isinstance(step, Product)}
        added = {node for step in steps for node in _features_of(step) if not (_is_first(step, node))}
        self._cast = [node in multiplied and node not in added for node in self.features]
        # A linear map's weight gradient sums over all rows: its input must have zeros in padding rows.
        self._summed = {s.x for s in steps if isinstance(s, Product) and not isinstance(s.layer, Convolution)}
        self._numbers = {node: n for n, node in enumerate((*self.features, *(s.node for s in steps)))}
        geometries = len(self._numbers)
        self._targets = {node: geometries + n for n, node in enumerate(self.inputs[len(self.features) :])}
        self._wired = [self._wire(step) for step in steps]
        self._sources = [each for step in steps if isinstance(step, Product) for each in tensors_of(step)]
        self._live = frozenset(self._numbers[node] for node in self.outputs if node in live)
        self._plans: list[tuple[list[Any], TrainPlan | None]] = []
        self._compiled: list[TrainPlan] = []

    def _wire(self, step: Step) -> WiredStep:
        numbers = self._numbers
        if not isinstance(step, Product):
            return WiredStep(
                step, NONE, numbers[step.node], NONE, NONE, tuple(numbers[part] for part in parts_of(step))
            )
        residual = NONE if step.residual is None else numbers[step.residual]
        target = NONE
        if step.target is not None:
            target = self._targets.get(step.target, numbers.get(step.target, NONE))
        return WiredStep(step, numbers[step.x], numbers[step.node], residual, target)

    def run(self, env: Env) -> None:
        """Put the values of `outputs` into env."""
        if not self._by_kernels(env):
            for step in self.steps:
                run_by_modules(step, env)

    def _by_kernels(self, env: Env) -> bool:
        """Run the kernels. False: call the modules."""
        feats = [env[node].feats if node in self._summed else raw_feats(env[node]) for node in self.features]
        tensors = [where.get(name) for where, name in self._sources]
        dtype = autocast_dtype(feats[0]) or feats[0].dtype
        ready = [_ready(x, dtype if casts else x.dtype) for x, casts in zip(feats, self._cast, strict=True)]
        plan = self._plan(tensors, ready)
        if plan is None or any([t is not None and t.data_ptr() & _ADDRESS for t in tensors]):
            return False
        begun = self._begun(plan, env, ready, tensors)
        if begun is None:
            return False
        outs = begun.run(ready)
        count, made = len(self.features), from_raw_feats if begun.padded else unchecked_tensor
        for node, y in zip(self.outputs, outs, strict=True):
            env[node] = made(y, begun.calls[self._numbers[node] - count].outputs)
        return True

    def _plan(self, tensors: Sequence[Tensor | None], feats: Sequence[Tensor]) -> TrainPlan | None:
        """The plan for these tensors; None: call the modules."""
        there = [t for t in tensors if t is not None]
        like = feats[0]
        facts: list[Any] = [
            global_settings(),
            kernels.float32_precision(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(like.device.type),
            [n for n, t in enumerate(tensors) if t is None],
        ]
        facts += [(x.dtype, x.shape[1:], x.get_device(), x.requires_grad) for x in feats]
        facts += map(type, there)
        for fact in (*TENSOR_GUARDS[1:], torch.Tensor.get_device, REQUIRES_GRAD):
            facts += map(fact, there)
        # The program guards the options of layers.
        for known, plan in self._plans:
            if facts == known:
                return plan
        plain = autograd.are_plain_tensors([*feats, *there])
        plan = self._new_plan(tensors, feats) if plain else None
        self._plans = [(facts, plan), *self._plans[: _PLANS - 1]]
        return plan

    def _new_plan(self, tensors: Sequence[Tensor | None], feats: Sequence[Tensor]) -> TrainPlan | None:
        outputs = [self._numbers[node] for node in self.outputs]
        return Planner(self._wired, (outputs, self._live), feats, tensors).plan()

    def begin_dry(self, env: Env, feats: Sequence[Tensor]) -> Started | None:
        """The stretch bound to its maps, without kernels, for features that may be meta tensors; None: the modules
        would be called."""
        tensors = [where.get(name) for where, name in self._sources]
        plan, rows = self._new_plan(tensors, feats), [x.shape[0] for x in feats]
        if plan is None:
            return None
        calls, _ = self._found(plan, [env[node].geometry for node in self.inputs], rows, (False, False))
        return None if calls is None else Started(plan, calls, tensors, False)

    def number_of(self, node: Node) -> int:
        """Number of the value of a node."""
        return self._numbers[node]

    def _begun(
        self, plan: TrainPlan, env: Env, feats: Sequence[Tensor], tensors: Sequence[Tensor | None]
    ) -> Started | None:
        """The stretch bound to its geometries; None: call the modules."""
        given, rows = [env[node].geometry for node in self.inputs], [x.shape[0] for x in feats]
        is_new, padded = plan not in self._compiled, given[0].buffered is not None
        calls, known = self._found(plan, given, rows, (not is_new, padded))
        # With padding, compile now: no other size's kernel stands in.
        if calls is not None and (is_new or not known or (padded and not is_capturing(feats[0].device))):
            self._compile(plan, calls, feats[0])
            calls, _ = self._found(plan, given, rows, (True, padded))
        return None if calls is None else Started(plan, calls, tensors, padded)

    @staticmethod
    def _found(
        plan: TrainPlan, given: Sequence[Geometry], rows: Sequence[int], how: tuple[bool, bool]
    ) -> tuple[list[StepCall] | None, bool]:
        """(steps with maps and kernels, True if no kernel is left to compile). The steps are None if a sum or
        concatenation mixes geometries, or a step has fewer than two rows. given: input geometries; rows: of their
        features; how: (look up kernels, padded). If padded, kernels are looked up at launch: until then another stream
        may be building the map."""
        count, found, known = len(rows), list[StepCall](), True
        launches, padded = how
        geometries: list[Any] = [*given[:count], *[None] * len(plan.steps), *given[count:]]
        sizes, levels = [*rows], dict[int, int]()
        if any([size != len(one.coords) for size, one in zip(rows, given, strict=False)]):
            return None, False
        # Inlined: a function call takes as long as the rest of a step.
        for number, step in enumerate(plan.steps, count):
            wired, mapped, calls, norm = step.wired, None, None, None
            first = wired.x if wired.x >= 0 else wired.parts[0]
            inputs = outputs = geometries[first]
            before = size = sizes[first]
            beside = None if wired.residual < 0 else geometries[wired.residual]
            if isinstance(step, Joined):
                beside = next((geometries[part] for part in wired.parts if geometries[part] is not outputs), None)
            elif step.relation is not None:
                kept = inputs.maps.get((step.relation, None)) if wired.target < 0 else None
                if kept is None:
                    kept = _map(step, inputs, None if wired.target < 0 else geometries[wired.target])
                mapped, outputs = kept[0], inputs if kept[1] is None else kept[1]
                size = mapped.num_outputs
                if mapped.num_inputs != before or mapped.table.shape[1] != step.shape[1]:
                    return None, False
                if launches and not padded:
                    calls = mapped.get_cached(step.key) or step.calls(mapped)
                    known &= calls.known
            elif not padded and (mapped := step.map_of(before)) is not None and launches:
                calls = step.calls(mapped)
                known &= calls.known
            geometries[number] = outputs
            sizes.append(size)
            if size < 2 or not before or (beside is not None and beside is not outputs):
                return None, False
            if isinstance(step, Layer) and step.norm is not None and launches:
                norm = step.norm.launches(size)
            found.append(StepCall(size, before, outputs, levels.setdefault(size, len(levels)), mapped, calls, norm))
        return found, known

    def _compile(self, plan: TrainPlan, calls: Sequence[StepCall], like: Tensor) -> None:
        """Compile forward and backward kernels in parallel, once for steps that share them."""
        tasks, norms = dict[Hashable, list[Callable[[], object]]](), KernelTasks()
        own = {layer: call for layer, call in zip(plan.steps, calls, strict=True) if isinstance(layer, Layer)}
        with autograd.autocast_disabled((like,)), torch.no_grad():
            for layer, call in own.items():
                if layer.norm is not None and (plan not in self._compiled or call.outputs.buffered is not None):
                    norms |= layer.norm.compilations() | layer.norm.gradient_compilations(layer.steps)
                if call.found is not None:
                    # With padding, kernels depend on the map's sizes.
                    kind = layer.kind_of(call.found) if call.found.buffered is None else id(call.found)
                    if (layer.key, kind) not in tasks:
                        tasks[layer.key, kind] = layer.compilations(like, call.found)
        every, others = itertools.chain(norms.values(), *tasks.values()), list[Callable[[], object]]()
        BACKGROUND.run(every, partial(self._plan_others, own, like, others))
        for begin in others:
            begin()
        self._compiled = [plan, *self._compiled[: _PLANS - 1]]

    @staticmethod
    def _plan_others(layers: Mapping[Layer, StepCall], like: Tensor, begin: list[Callable[[], object]]) -> None:
        """Plan kernels for the other tile height; append compile callables to `begin`."""
        planned = set[Hashable]()
        with autograd.autocast_disabled((like,)), torch.no_grad():
            for layer, call in layers.items():
                if isinstance(call.found, KernelMap) and call.found.buffered is None:
                    kind = layer.key, layer.kind_of(call.found)
                    if kind not in planned:
                        planned.add(kind)
                        begin += layer.plan_for_other_tiles(like, call.found)


def _features_of(step: Step) -> tuple[Node, ...]:
    """The nodes whose features a step reads."""
    if isinstance(step, Product):
        return (step.x,) if step.residual is None else (step.x, step.residual)
    return parts_of(step)


def _is_first(step: Step, node: Node) -> bool:
    """True if a product reads a node as x, not also as residual."""
    return isinstance(step, Product) and node is step.x and node is not step.residual


def _ready(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Features cast as by autocast, contiguous and 16-byte aligned; differentiable."""
    if x.dtype is not dtype and x.dtype in AUTOCAST_DTYPES:
        x = x.to(dtype)
    if not x.is_contiguous() or x.data_ptr() & _ADDRESS:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _map(layer: Layer, inputs: Geometry, target: Geometry | None) -> tuple[KernelMap, Geometry]:
    step = layer.wired.step
    assert isinstance(step, Product) and isinstance(step.layer, Convolution)
    return kernel_map(inputs, *step.layer.map_request(target))


def train_stretches(graph: TracedModule) -> list[Step | TrainStretch]:
    """The steps of a graph, with runs of products joined to stretches."""
    groups: list[list[Step]] = [[]]
    live = _live(graph)
    for step in graph.steps:
        joins = isinstance(step, CallStep) and _is_joined(step)
        if joins or (isinstance(step, Product) and is_one_kernel(step.layer)):
            groups[-1].append(step)
        else:
            groups += [[step], []]

    def made(group: Sequence[Step], outside: set[Node]) -> list[Step | TrainStretch]:
        own = any(isinstance(step, Product) and is_one_kernel(step.layer) for step in group)
        return [TrainStretch(group, outside, live)] if own else [*group]

    return [*grouped(graph, groups, made)]


def _live(graph: TracedModule) -> set[Node]:
    """The nodes that the result or any side effect may depend on."""
    live = {*nodes_in(graph.result)}
    for node in reversed(graph.nodes):
        own = type(graph.modules.get(node)) in _WRITES_NOTHING_ELSE and node not in graph.reasons
        if node in live or not (own or is_pure(node, graph)):
            live.update(node.all_input_nodes)
    return live


_WRITES_NOTHING_ELSE = (layers.BatchNorm, nn.BatchNorm1d, layers.Dropout, nn.Dropout)
"""Modules that write at most to their own statistics."""


def _is_joined(step: CallStep) -> bool:
    """True for a concatenation of sparse tensors by pumice.cat."""
    return is_concatenation(step) and all(
        isinstance(part, Node) and part.meta["kind"] == "sparse" for part in parts_of(step)
    )
