"""Inference stretches on a GPU: runs of products as kernels over one arena, concatenations as column slices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional

from pumice.coords import Geometry, KernelMap, Relation, kernel_map
from pumice.engine.trace import CallStep, Product, Step, TracedModule, nodes_in, reads_of
from pumice.errors import GeometryError
from pumice.lower import kernel as kernels
from pumice.lower.call import BoundCall, call_over, find_template, global_settings, product_signature
from pumice.lower.epilogue import Epilogue
from pumice.lower.maps import bound_map, no_map
from pumice.lower.parts import WeightParts, fits_parts, number_of_parts, rounded
from pumice.nn import layers
from pumice.nn.conv import Convolution
from pumice.nn.hooks import TENSOR_GUARDS
from pumice.ops import SparseTensor, autograd, batch_norm, cat, linear
from pumice.ops.conv import AUTOCAST_DTYPES, autocast_dtype, convolve, plan_for_other_tiles
from pumice.ops.conv import compilation as compilation_of_conv
from pumice.ops.linear import compilation as compilation_of_linear
from pumice.ops.linear import linear_features
from pumice.ops.prepare import layer_map
from pumice.ops.sets import same_geometry
from pumice.ops.tensor import from_raw_feats, raw_feats, unchecked_tensor
from pumice.runtime.compile import BACKGROUND, Task
from pumice.runtime.launch import keep_for_graph, outside_inference_mode
from pumice.runtime.streams import is_capturing
from pumice.runtime.workspace import Workspace, workspace

Env = dict[Node, Any]
"""Values by node."""
Tensors = Sequence[Tensor | None]
"""Of products, in the order of Stretch.sources."""
_ALIGNED = 256
"""Bytes: alignment of buffers in the arena."""
_ADDRESS = 16
"""Bytes: alignment of the addresses that kernels take."""
_NONE = -1
_SHARE_OF_LEVEL = 0.4
"""Guess of voxels of a level over those of the finer one, between lidar scans (0.5 to 0.75) and surfaces (0.25)."""


# Module by module


def run_product(step: Product, env: Env) -> SparseTensor:
    """Run a product by its modules; sum and activation are in place where possible."""
    layer, x = step.layer, env[step.x]
    if not isinstance(layer, Convolution):
        y = linear(x, layer.weight, layer.bias)
    else:
        y = layer.forward(x) if step.target is None else layer.forward(x, env[step.target])
    if isinstance(step.norm, layers.BatchNorm):
        y = step.norm.forward(y)
    elif step.norm is not None and y.geometry.trains:
        # Over valid rows.
        y = batch_norm(y, step.norm)
    elif step.norm is not None:
        y = y.replace(step.norm.forward(raw_feats(y)))
    return _finished(step, y, env)


def _finished(step: Product, y: SparseTensor, env: Env) -> SparseTensor:
    if step.residual is not None:
        other = env[step.residual]
        feats, more = raw_feats(y), raw_feats(other)
        alike = feats.dtype == more.dtype and feats.shape == more.shape and other.geometry is y.geometry
        recorded = torch.is_grad_enabled() and (feats.requires_grad or more.requires_grad)
        in_place = alike and feats.is_floating_point() and not recorded
        y = y.replace(feats.add_(more)) if in_place else y + other
    if not step.activation:
        return y
    function, feats = getattr(functional, step.activation), raw_feats(y)
    return y.replace(function(feats, inplace=not (torch.is_grad_enabled() and feats.requires_grad)))


# As kernels


@dataclass(eq=False)
class Buffer:
    """Memory for values of a stretch, [rows, width]. own: a separate tensor, as it is read outside the stretch; else in
    `slot` of the arena. born, last: positions of the first and last product that use it."""

    width: int
    own: bool
    born: int
    last: int
    slot: int = _NONE


@dataclass(frozen=True, eq=False)
class Place:
    """Columns of a buffer that hold the value of a node."""

    buffer: Buffer
    column: int
    channels: int


@dataclass(frozen=True, eq=False)
class Wired:
    """A product with its operands as indices, -1 if absent. x, y, residual: of addresses; at_x, at_y, at_residual,
    target: of geometries; beside: of the geometry of another part of the same buffer, which must be equal. starts: the
    buffer, if the product is the first that writes to it."""

    step: Product
    relation: Relation | None
    x: int
    y: int
    residual: int
    at_x: int
    at_y: int
    at_residual: int
    target: int
    beside: int
    starts: Buffer | None


@dataclass(eq=False)
class Launch:
    """A product as one kernel launch, without its map and the addresses of features and residual.

    key: call signature. addresses: of weight and epilogue vectors. columns: output channels. lead, residual_lead: row
    strides of features and residual, 0 without. dtype: of the result. executor: that passed takes(), or None.
    """

    key: Hashable
    addresses: tuple[int, ...]
    columns: int
    lead: int
    residual_lead: int
    dtype: torch.dtype
    executor: Any = None

    def takes(self, call: BoundCall) -> bool:
        """True if the kernel of a call writes the complete result in its dtype."""
        fits = call.executor.writes_result_dtype is self.dtype
        self.executor = call.executor if fits else None
        return fits

    def rows(self, inputs: int, outputs: int) -> list[int]:
        """Row counts of the call's tensors, as call.rows_of. inputs, outputs: rows of features and result."""
        return [inputs, *[self.columns] * len(self.addresses), *[outputs] * bool(self.residual_lead)]


class Stretch:
    """A run of products (convolutions, linear maps) and concatenations, whose parts are column slices of one buffer.

    inputs: nodes that it reads; outputs: its nodes that other steps read.
    """

    features: tuple[Node, ...]
    numbers: dict[Node, int]

    def __init__(self, steps: Sequence[Step], outside: set[Node]) -> None:
        self.steps: tuple[Step, ...] = tuple(steps)
        self.products: tuple[Product, ...] = tuple(step for step in steps if isinstance(step, Product))
        made = {step.node for step in steps}
        reads = [node for step in self.products for node in reads_of(step)]
        self.inputs: tuple[Node, ...] = tuple(dict.fromkeys(node for node in reads if node not in made))
        self.outputs: tuple[Node, ...] = tuple(step.node for step in steps if step.node in outside)
        # Other inputs provide coordinates only.
        self._added = {step.residual for step in self.products}
        self.features = tuple(node for node in self.inputs if node in {*self._added, *(s.x for s in self.products)})
        self.places: dict[Node, Place] = self._placed(outside)
        self._give_slots()
        self.numbers = {node: n for n, node in enumerate((*self.inputs, *(step.node for step in steps)))}
        # A concatenation has the coordinates of its first computed part.
        self._first = {self.places[one.node].buffer: one.node for one in reversed(self.products)}
        own = {self.numbers[step.node] for step in self.products}
        self.geometries: dict[Node, int] = {
            node: n if n in own or node in self.inputs else self.numbers[self._first[self.places[node].buffer]]
            for node, n in self.numbers.items()
        }
        self.values: dict[Buffer, list[tuple[int, int]]] = {}
        for node, place in self.places.items():
            self.values.setdefault(place.buffer, []).append((self.numbers[node], place.column))
        self.wired: list[Wired] = [self._wired(number, step) for number, step in enumerate(self.products)]
        self.sources: list[tuple[Mapping[str, Any], str]] = [each for step in self.products for each in _sources(step)]
        self._known: tuple[list[Any], list[Launch | None] | None] = [], None
        # (product, kind of map) whose kernels were compiled ahead.
        self.compiled: set[tuple[int, Any]] = set()
        self._narrow: dict[int, Tensor] = {}
        self._means: dict[int, Tensor] = {}
        # Weights of float32 products in parts, and the first part by product.
        self._parts: WeightParts | None = None
        self._in_parts: dict[int, Tensor] = {}
        # Buffers that hold numbers of tf32.
        self._in_tf32 = set[Buffer]()

    def _placed(self, outside: set[Node]) -> dict[Node, Place]:
        """Place of each product's and concatenation's value."""
        order = {step.node: place for place, step in enumerate(self.products)}
        last = dict(order)
        for place, step in enumerate(self.products):
            last |= {node: place for node in (step.x, step.residual) if node is not None}
        channels = {step.node: _channels(step) for step in self.products}
        places: dict[Node, Place] = {}
        for step in self.steps:
            if not isinstance(step, CallStep):
                continue
            parts = parts_of(step)
            width, column = sum(channels[part] for part in parts), 0
            touched = [*(order[part] for part in parts), *(last[part] for part in parts), last.get(step.node, 0)]
            buffer = Buffer(width, step.node in outside, min(touched[: len(parts)]), max(touched))
            places[step.node] = Place(buffer, 0, width)
            for part in parts:
                places[part], column = Place(buffer, column, channels[part]), column + channels[part]
        for node, place in order.items():
            if node not in places:
                places[node] = Place(Buffer(channels[node], node in outside, place, last[node]), 0, channels[node])
        return places

    def _give_slots(self) -> None:
        """Assign arena slots: buffers share a slot if their lifetimes do not overlap, if possible those of like sizes.
        As the sizes of levels are unknown, they are guessed."""
        sizes: list[float] = []
        free: list[int] = []
        live: list[Buffer] = []
        for number, step in enumerate(self.products):
            buffer = self.places[step.node].buffer
            if buffer.born == number and not buffer.own:
                needed = buffer.width * _SHARE_OF_LEVEL ** _depth(step.level)
                if not free:
                    free, sizes = [len(sizes)], [*sizes, 0.0]
                # The least growth, then the least left unused.
                buffer.slot = min(free, key=lambda slot: (max(0.0, needed - sizes[slot]), sizes[slot] - needed))
                free.remove(buffer.slot)
                sizes[buffer.slot] = max(sizes[buffer.slot], needed)
                live.append(buffer)
            free += [one.slot for one in live if one.last <= number]
            live = [one for one in live if one.last > number]

    def _wired(self, number: int, step: Product) -> Wired:
        buffer = self.places[step.node].buffer

        def geometry(node: Node | None) -> int:
            return _NONE if node is None else self.geometries[node]

        def value(node: Node | None) -> int:
            return _NONE if node is None else self.numbers[node]

        relation = step.layer.relation if isinstance(step.layer, Convolution) else None
        values = value(step.x), value(step.node), value(step.residual)
        at = geometry(step.x), geometry(step.node), geometry(step.residual), geometry(step.target)
        first = self._first[buffer]
        beside = _NONE if first is step.node else self.geometries[first]
        return Wired(step, relation, *values, *at, beside, buffer if buffer.born == number else None)

    def begin(self, env: Env) -> Callable[[], None]:
        """Prepare weights and launches, without maps. Returns a function that puts the values of `outputs` into env."""
        tensors = [where.get(name) for where, name in self.sources]
        given = [raw_feats(env[node]) for node in self.features]
        dtype, own = autocast_dtype(given[0]), env
        with autograd.autocast_disabled(given):
            if dtype is not None:
                own, tensors = self._cast(env, dtype), self._cast_weights(tensors, dtype)
                given = [raw_feats(own[node]) for node in self.features]
            tensors = self._fold_biases(tensors)
            launches = self._launches(tensors, given)
            if launches is not None and self._parts is not None:
                self._parts.fill([w for n in self._in_parts if (w := tensors[n * len(_TENSORS)]) is not None])
        return partial(self._by_modules, env) if launches is None else partial(self._start, env, own, launches, tensors)

    def _start(self, env: Env, own: Env, launches: Sequence[Launch | None], tensors: Tensors) -> None:
        """Run the products as kernels. own: the inputs, cast for autocast."""
        going = StretchRun(self, own, launches, tensors)
        with autograd.autocast_disabled([going.like]):
            going.all()
            for node in self.outputs:
                env[node] = going.result(node) if going.buffered else going.value(node)

    def _cast(self, env: Env, dtype: torch.dtype) -> Env:
        """The inputs, cast as autocast casts operands of products; residuals are not cast."""
        own = {node: env[node] for node in self.inputs}
        for node in self.features:
            if node not in self._added and raw_feats(own[node]).dtype in AUTOCAST_DTYPES:
                own[node] = unchecked_tensor(raw_feats(own[node]).to(dtype), own[node].geometry)
        return own

    def _cast_weights(self, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
        """Cast weights and biases into tensors that are reused by later calls, so that addresses stay the same."""
        wide = {
            n: x.detach()
            for n, x in enumerate(tensors)
            if x is not None and n % len(_TENSORS) < 2 and x.dtype in AUTOCAST_DTYPES and x.dtype != dtype
        }
        found = {n: self._held(self._narrow, n, x, dtype) for n, x in wide.items()}
        if wide:
            torch._foreach_copy_([*found.values()], [*wide.values()])  # pyright: ignore[reportPrivateImportUsage]
        return [found.get(n, x) for n, x in enumerate(tensors)]

    def _fold_biases(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Fold biases before norms into the means, mean - bias, in tensors that later calls reuse."""
        found, size = [*tensors], len(_TENSORS)
        both: list[tuple[int, Tensor, Tensor]] = []
        for n in range(2, len(tensors), size):
            weight, bias, mean = tensors[n - 2 : n + 1]
            if weight is None or bias is None or mean is None or (bias.shape, bias.dtype) != (mean.shape, weight.dtype):
                # The module itself raises for a mismatch.
                continue
            both.append((n, mean.detach(), bias.detach()))
        for n, mean, bias in both:
            like = torch.promote_types(mean.dtype, bias.dtype)
            found[n - 1], found[n] = None, self._held(self._means, n, mean, like)
        if both:
            means = [self._means[n] for n, _, _ in both]
            torch._foreach_copy_(means, [mean for _, mean, _ in both])  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_sub_(means, [bias for _, _, bias in both])  # pyright: ignore[reportPrivateImportUsage]
        return found

    def _store_parts(self, tensors: Tensors, like: Tensor) -> None:
        """Make memory for weights of float32 products in parts, which every call fills."""
        by_kernels = autograd.uses_gpu(like) and kernels.tuning_mode() != kernels.TIMING
        parts = number_of_parts(kernels.float32_precision()) if by_kernels else 0
        weights = {
            n: weight
            for n, (step, weight) in enumerate(zip(self.products, tensors[:: len(_TENSORS)], strict=True))
            if parts and weight is not None and is_one_kernel(step.layer) and fits_parts(weight)
        }
        self._parts = WeightParts.of([*weights.values()], parts) if weights else None
        self._in_parts = {} if self._parts is None else dict(zip(weights, self._parts.first, strict=True))
        self._in_tf32 = {*self.values} - self._read_whole() if parts == 1 else set()

    def _read_whole(self) -> set[Buffer]:
        """Buffers that others read than products whose weight is in parts, which alone round what they read."""
        found = {buffer for buffer in self.values if buffer.own}
        for number, step in enumerate(self.products):
            read = {step.residual} if number in self._in_parts else {step.residual, step.x}
            found |= {self.places[node].buffer for node in read if node in self.places}
        return found

    def is_in_tf32(self, node: Node | None) -> bool:
        """True if a value of the stretch holds numbers of tf32."""
        return bool(self._in_tf32) and node in self.places and self.places[node].buffer in self._in_tf32

    @staticmethod
    def _held(held: dict[int, Tensor], n: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """The reused tensor number n, reallocated if shape, device or dtype changed."""
        own = held.get(n)
        if own is None or (own.shape, own.device, own.dtype) != (like.shape, like.device, dtype):
            with outside_inference_mode():
                own = held[n] = torch.empty_like(like, dtype=dtype)
        return keep_for_graph(own)

    def _by_modules(self, env: Env) -> None:
        """Run the modules, which have their own rules for mixed dtypes and tensor subclasses."""
        for step in self.steps:
            run_by_modules(step, env)

    def _launches(self, tensors: Sequence[Tensor | None], given: Sequence[Tensor]) -> list[Launch | None] | None:
        """Launches by product, None for a product that is not one kernel; None instead of the list to call the modules.
        tensors: of `sources`; given: features of `features`."""
        there = [t for t in tensors if t is not None]
        facts: list[Any] = [global_settings(), kernels.float32_precision(), [*map(type, tensors)]]
        facts += [(t.dtype, t.shape[1:], t.stride(), t.get_device()) for t in given]
        facts += [[*map(fact, there)] for fact in TENSOR_GUARDS]
        # The program guards the options of layers.
        if facts != self._known[0]:
            self._store_parts(tensors, given[0])
            self._known = facts, self._made(there, tensors, given)
            self.compiled.clear()
        return self._known[1]

    def _made(
        self, there: Sequence[Tensor], tensors: Sequence[Tensor | None], given: Sequence[Tensor]
    ) -> list[Launch | None] | None:
        own = [t for t in (*tensors[:: len(_TENSORS)], *tensors[1 :: len(_TENSORS)], *given) if t is not None]
        if not autograd.are_plain_tensors(there) or len({t.dtype for t in own}) > 1 or not own[0].is_floating_point():
            return None
        parts = [*zip(*[iter(tensors)] * len(_TENSORS), strict=True)]
        widths = [self.places[step.node].channels for step in self.products]
        for step, (weight, bias, mean, *_), width in zip(self.products, parts, widths, strict=True):
            # Replaced weights may not fit the buffers.
            if len(weight) != width or any(x is not None and x.shape != (width,) for x in (bias, mean)):
                return None
            if step.norm is not None and mean is None:
                return None
        # Only layouts matter: features have no rows.
        known = {node: x[:0] for node, x in zip(self.features, given, strict=True)}
        for node, place in self.places.items():
            whole = given[0].new_empty((0, place.buffer.width))
            known[node] = whole[:, place.column : place.column + place.channels]
        return [self._launch(n, known, own) for n, own in enumerate(parts)]

    def _launch(self, number: int, known: Mapping[Node, Tensor], own: Sequence[Any]) -> Launch | None:
        step = self.products[number]
        layer: Any = step.layer
        x = known[step.x]
        if not is_one_kernel(layer):
            return None
        residual = None if step.residual is None else known[step.residual]
        weight, epilogue = self.as_launched(number, own, residual)
        operands = tuple(epilogue.operands.values())
        addresses = tuple(t.data_ptr() for t in (weight, *operands) if t is not residual)
        column = self.places[step.node].column * x.element_size()
        if column % _ADDRESS or any(address % _ADDRESS for address in addresses):
            return None
        key = product_signature((x, weight, *operands), epilogue.signature)
        lead = 0 if residual is None else residual.stride(0)
        return Launch(key, addresses, weight.shape[0], x.stride(0), lead, x.dtype)

    def as_launched(self, number: int, own: Sequence[Any], residual: Tensor | None) -> tuple[Any, Epilogue]:
        """(weight, epilogue) of a product as its kernel takes them. own: the product's tensors."""
        step, weight = self.products[number], self._in_parts.get(number)
        parts = 0 if self._parts is None or weight is None else self._parts.parts
        in_tf32 = "x" * self.is_in_tf32(step.x) + "y" * self.is_in_tf32(step.node)
        epilogue = self.epilogue(step, own, residual).stored(parts, in_tf32)
        return (own[0] if weight is None else weight), epilogue

    def epilogue(self, step: Product, own: Sequence[Any], residual: Tensor | None, all_of_it: bool = True) -> Epilogue:
        """The epilogue of a product; its row padding skips the other columns of the buffer. own: the product's tensors;
        all_of_it: False omits the activation."""
        place, activation = self.places[step.node], step.activation if all_of_it else ""
        room = place.buffer.width - place.channels if is_one_kernel(step.layer) else 0
        bias, vectors = own[1], own[2:]
        if step.norm is None:
            return Epilogue(None, bias, residual, activation, row_padding=room)
        return Epilogue.of_norm(vectors, step.norm.eps, residual, activation, room).with_bias(bias)


def is_one_kernel(layer: Any) -> bool:
    """True if a layer may be one kernel: not for grouped convolutions and named dataflows."""
    return not isinstance(layer, Convolution) or (layer.groups == 1 and layer.dataflow is None)


_TENSORS = ("weight", "bias", "running_mean", "running_var", "weight", "bias")


class _Attributes:
    """Weight and bias of a layer that computes them from its parameters, as a dict."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self._layer, name, default)

    __getitem__ = get


def held_by(layer: Any) -> Any:
    """The dict of a layer's weight and bias."""
    own = getattr(layer, "_parameters", {})
    return own if "weight" in own else _Attributes(layer)


def _sources(step: Product) -> list[tuple[Mapping[str, Any], str]]:
    """(dict, key) of each tensor of a product: weight and bias of the layer, four of the norm."""
    layer: Any = step.layer
    norm: Any = step.norm
    own = [held_by(layer)] * 2
    nothing: Mapping[str, Any] = {}
    own += [nothing] * 4 if norm is None else [norm._buffers, norm._buffers, norm._parameters, norm._parameters]
    return [*zip(own, _TENSORS, strict=True)]


def _depth(level: Any) -> int:
    """Relations between a level and the finest, see trace._level_over."""
    return 1 + _depth(level[0]) if isinstance(level, tuple) else 0


def _channels(step: Product) -> int:
    layer: Any = step.layer
    return layer.weight.shape[0]


def _check_beside(one: Wired, first: Geometry, outputs: Geometry) -> None:
    """Raise GeometryError if parts of a concatenation have different coordinates."""
    if not same_geometry(first, outputs):
        found = f"{len(first)} and {len(outputs)} voxels of two geometries"
        raise GeometryError(f"cat needs one geometry; found {found}, the second of {one.step.names[0]}")


def _kind_of_map(number: int, found: KernelMap | None) -> tuple[int, Any]:
    """(product, signature of its map): equal for the same kernels."""
    return number, None if found is None else bound_map(found).signature


class StretchRun:
    """One execution of a stretch: addresses, geometries and row counts of its values."""

    def __init__(self, stretch: Stretch, env: Env, launches: Sequence[Launch | None], tensors: Tensors) -> None:
        self._stretch, self._env, self._launches, self._tensors = stretch, env, launches, tensors
        count = len(stretch.numbers)
        self._addresses: list[int] = [0] * (count + 1)
        # Index -1, the last entry, stands for absent operands.
        self._geometries: list[Any] = [None] * (count + 1)
        self._rows = [0] * (count + 1)
        for number, node in enumerate(stretch.inputs):
            x = env[node]
            feats = raw_feats(x)
            self._geometries[number], self._addresses[number] = x.geometry, feats.data_ptr()
            self._rows[number] = feats.shape[0]
        self.like: Tensor = raw_feats(env[stretch.features[0]])
        self.buffered: bool = self._geometries[0].buffered is not None
        self._memory: dict[Buffer, tuple[Tensor, int]] = {}

    def _compile(self, maps: Sequence[KernelMap | None]) -> None:
        """Compile the kernels of all products in parallel. maps: of `find_maps`."""
        calls, others = [*self._calls(maps)], list[Task | None]()

        def plan_others() -> None:
            # Planning needs layouts only: one row.
            for number, launch, found in () if self.buffered else calls:
                if found is not None:
                    x, weight, epilogue = self._like_call(number, launch, (1, 1))
                    others.append(plan_for_other_tiles(x, weight, found, epilogue))

        BACKGROUND.run(filter(None, (self._compilation(*call) for call in calls)), plan_others)
        for begin in filter(None, others):
            begin()

    def _calls(self, maps: Sequence[KernelMap | None]) -> Iterator[tuple[int, Launch, KernelMap | None]]:
        """(number, launch, map) of the products with a launch and rows."""
        for number, (one, launch, found) in enumerate(zip(self._stretch.wired, self._launches, maps, strict=True)):
            if launch is not None and self._rows[one.at_x] and self._rows[one.at_y]:
                self._stretch.compiled.add(_kind_of_map(number, found))
                yield number, launch, found

    def _compilation(self, number: int, launch: Launch, found: KernelMap | None) -> Task | None:
        """Task that compiles a product's kernel; None if it is compiled."""
        one = self._stretch.wired[number]
        rows, count = self._rows[one.at_x], self._rows[one.at_y]
        on = bound_map(found or no_map(rows))
        # In buffers, no kernel of another size stands in meanwhile.
        template = find_template(launch.key, on) if self.buffered else None
        if template is not None:
            return template.compilation(on, launch.rows(rows, count), (count, launch.columns))
        x, weight, epilogue = self._like_call(number, launch, (rows, count))
        if found is None:
            return compilation_of_linear(x, weight, epilogue)
        return compilation_of_conv(x, weight, found, epilogue)

    def _call(self, number: int, launch: Launch, maps: Sequence[KernelMap | None]) -> BoundCall | None:
        """The call of a product; compiles all kernels first, unless it did for maps of this kind: some calls are never
        one kernel."""
        one, found = self._stretch.wired[number], maps[number]
        rows = self._rows[one.at_x]
        given = found or no_map(rows), launch.key, launch.rows(rows, self._rows[one.at_y]), launch.columns
        call = call_over(*given)
        if call is not None or _kind_of_map(number, found) in self._stretch.compiled:
            return call
        self._compile(maps)
        return call_over(*given)

    def find_maps(self) -> list[KernelMap | None]:
        """Kernel maps of all products, None for linear maps; fills in geometries and row counts of all values."""
        geometries, counts, maps = self._geometries, self._rows, []
        for one in self._stretch.wired:
            inputs = outputs = geometries[one.at_x]
            found, count = None, counts[one.at_x]
            if one.relation is not None:
                kept = inputs.maps.get((one.relation, None)) if one.target < 0 else None
                found, outputs = kept or self._map(one, inputs)
                outputs = inputs if outputs is None else outputs
                count = found.num_outputs
            geometries[one.at_y], counts[one.at_y] = outputs, count
            if one.beside >= 0 and geometries[one.beside] is not outputs:
                _check_beside(one, geometries[one.beside], outputs)
            maps.append(found)
        return maps

    def _like_call(self, number: int, launch: Launch, rows: tuple[int, int]) -> tuple[Tensor, Tensor, Epilogue]:
        """(features, weight, epilogue) with a product's layouts. rows: (of features, of the result)."""
        lead, like = launch.residual_lead, self.like
        residual = like.new_empty((rows[1], lead))[:, : launch.columns] if lead else None
        weight, epilogue = self._stretch.as_launched(number, self._own(number), residual)
        return like.new_empty((rows[0], launch.lead))[:, : weight.shape[-1]], weight, epilogue

    def _own(self, number: int) -> Tensors:
        return self._tensors[number * len(_TENSORS) : (number + 1) * len(_TENSORS)]

    def all(self) -> None:
        """Launch all products. All maps are requested first: other streams may build those in buffers meanwhile, and
        each product waits only for its own."""
        maps = self.find_maps()
        if self.buffered and not is_capturing(self.like.device):
            self._compile(maps)
        self.allocate([one for one in self._stretch.wired if one.starts is not None])
        at, geometries, counts = self._addresses, self._geometries, self._rows
        call: BoundCall | None
        # Kernels of one stream run in order, so they share a workspace.
        shared: Workspace | None = None
        # Inlined: a function call takes as long as the rest of a step.
        for number, (one, launch, found) in enumerate(zip(self._stretch.wired, self._launches, maps, strict=True)):
            rows, outputs, call = counts[one.at_x], geometries[one.at_y], None
            count = counts[one.at_y]
            # A residual on other coordinates is added by torch; inputs may be unaligned.
            fits = one.residual < 0 or geometries[one.at_residual] is outputs
            if launch is not None and fits and not (at[one.x] | at[one.residual]) % _ADDRESS and rows and count:
                on = found or no_map(rows)
                if rows == on.num_inputs:
                    call = None if self.buffered else on.calls.get(launch.key)
                    if call is None:
                        call = self._call(number, launch, maps)
            if call is not None and launch is not None and (call.executor is launch.executor or launch.takes(call)):
                if (needs := call.needs) is not None and (shared is None or not shared.holds(*needs)):
                    shared = workspace(*needs, self.like.device)
                call.launch((at[one.x], *launch.addresses, at[one.residual]), at[one.y], shared)
            else:
                self._do(number, outputs)

    def _map(self, one: Wired, inputs: Geometry) -> tuple[KernelMap, Geometry]:
        layer: Any = one.step.layer
        relation, target = layer.relation, None
        if one.target >= 0:
            relation, target = layer.map_request(self._geometries[one.target])
        return (layer_map if target is None and layer.dataflow is None else kernel_map)(inputs, relation, target)

    def rows(self, number: int) -> int:
        """Rows of a value, known after `find_maps`."""
        return self._rows[number]

    def allocate(self, starting: Sequence[Wired]) -> None:
        """Allocate the buffers that these products start: separate tensors for those read outside, else one arena."""
        size, like = self.like.element_size(), self.like
        slots: dict[int, int] = {}
        for one in starting:
            buffer, rows = one.starts, self._rows[one.at_y]
            assert buffer is not None
            if buffer.own:
                self._memory[buffer] = like.new_empty((rows, buffer.width)), 0
            else:
                slots[buffer.slot] = max(slots.get(buffer.slot, 0), rows * buffer.width * size)
        begins, total = {}, 0
        for slot, needed in slots.items():
            begins[slot], total = total, total + -(-needed // _ALIGNED) * _ALIGNED
        # Also if empty: value() makes tensors of no rows.
        arena = like.new_empty(total, dtype=torch.uint8) if slots else None
        for one in starting:
            buffer = one.starts
            if arena is not None and buffer is not None and not buffer.own:
                self._memory[buffer] = arena, begins[buffer.slot]
        self._point([one.starts for one in starting if one.starts is not None])

    def _point(self, buffers: Sequence[Buffer]) -> None:
        """Set the addresses of all values in these buffers."""
        size, at = self.like.element_size(), self._addresses
        for buffer in buffers:
            memory, begin = self._memory[buffer]
            base = memory.data_ptr() + begin
            for number, column in self._stretch.values[buffer]:
                at[number] = base + column * size

    def _do(self, number: int, outputs: Geometry) -> None:
        """Run a product by the functions of pumice.ops, and store its result at its place for later kernels."""
        one, own = self._stretch.wired[number], self._own(number)
        step, weight = one.step, own[0]
        layer: Any = step.layer
        assert weight is not None
        env: Env = {node: self.value(node) for node in reads_of(step)}
        within = step.residual is None or env[step.residual].geometry is outputs
        residual = raw_feats(env[step.residual]) if within and step.residual is not None else None
        epilogue, x = self._stretch.epilogue(step, own, residual, within), env[step.x]
        if isinstance(layer, Convolution):
            request = layer.map_request(None if step.target is None else env[step.target])
            y = convolve(x, weight, None, layer.groups, request, layer.dataflow, epilogue)
        else:
            y = x.replace(linear_features(raw_feats(x), weight, epilogue))
        y = y if within else _finished(step, y, env)
        self._geometries[one.at_y], self._rows[one.at_y] = y.geometry, raw_feats(y).shape[0]
        self._keep(one, raw_feats(y))

    def _keep(self, one: Wired, y: Tensor) -> None:
        place = self._stretch.places[one.step.node]
        y = rounded(y) if self._stretch.is_in_tf32(one.step.node) else y
        if place.channels == place.buffer.width:
            y = y.contiguous()
            self._memory[place.buffer] = y, 0
            return self._point([place.buffer])
        if place.buffer not in self._memory:
            self.allocate([one])
        raw_feats(self.value(one.step.node)).copy_(y)
        return None

    def result(self, node: Node) -> SparseTensor:
        """The value of a node of a buffered stretch, as a tensor for other steps."""
        y = self.value(node)
        return from_raw_feats(raw_feats(y), y.geometry)

    def value(self, node: Node) -> SparseTensor:
        """The value of a node as a tensor."""
        place = self._stretch.places.get(node)
        if place is None:
            return self._env[node]
        buffer, number = place.buffer, self._stretch.geometries[node]
        (memory, begin), rows = self._memory[buffer], self._rows[number]
        if memory.dtype is torch.uint8:
            size = rows * buffer.width * self.like.element_size()
            memory = memory[begin : begin + size].view(self.like.dtype).view(rows, buffer.width)
        columns = memory if place.channels == buffer.width else memory[:, place.column : place.column + place.channels]
        return unchecked_tensor(columns, self._geometries[number])


# Stretches of a graph


def stretches(graph: TracedModule, size: int) -> list[Step | Stretch]:
    """The steps of a graph, with runs of products joined to stretches. size: bytes per feature."""
    groups: list[list[Step]] = [[]]
    result, sliced, readers = {*nodes_in(graph.result)}, set[Node](), _readers(graph)
    for step in graph.steps:
        if isinstance(step, CallStep):
            made = {one.node: one for one in groups[-1] if isinstance(one, Product)}
            if not (_is_sliced(step, made, readers, size) and sliced.isdisjoint(parts_of(step))):
                groups += [[step], []]
                continue
            if result.isdisjoint(parts_of(step)):
                sliced.update(parts_of(step))
            else:
                groups += [[step], []]
                continue
        groups[-1].append(step)
    return [*grouped(graph, groups, _made)]


def _made(group: Sequence[Step], outside: set[Node]) -> Sequence[Step | Stretch]:
    return group if len(group) == 1 and isinstance(group[0], CallStep) else [Stretch(group, outside)]


def grouped(
    graph: TracedModule, groups: Sequence[Sequence[Step]], make: Callable[[Sequence[Step], set[Node]], Sequence[Any]]
) -> Iterator[Any]:
    """Yield make(group, its nodes that are read outside the group) of each group of steps."""
    result, readers = {*nodes_in(graph.result)}, _readers(graph)
    for group in groups:
        if group:
            own = {*group}
            yield from make(
                group, {s.node for s in group if s.node in result or not own.issuperset(readers.get(s.node, ()))}
            )


def _readers(graph: TracedModule) -> dict[Node, list[Step]]:
    """The steps that read each node."""
    readers: dict[Node, list[Step]] = {}
    for step in graph.steps:
        for node in reads_of(step):
            readers.setdefault(node, []).append(step)
    return readers


def run_by_modules(step: Step, env: Env) -> None:
    """Run a product or a concatenation by its module or function."""
    own = isinstance(step, Product)
    env[step.node] = run_product(step, env) if own else cat([env[part] for part in parts_of(step)])


def is_concatenation(step: CallStep) -> bool:
    """True for pumice.cat of a list."""
    node = step.node
    return node.target is cat and len(node.args) == 1 and isinstance(node.args[0], list | tuple)


def parts_of(step: Step) -> tuple[Node, ...]:
    """The nodes that a concatenation joins."""
    return tuple(step.node.args[0])  # pyright: ignore[reportArgumentType]


def _is_sliced(step: CallStep, made: Mapping[Node, Product], readers: Mapping[Node, list[Step]], size: int) -> bool:
    """True if the parts of a concatenation can be column slices of one buffer: distinct products of one level, at
    aligned columns. Only products may read the parts and the result."""
    if not is_concatenation(step):
        return False
    parts = parts_of(step)
    if not made.keys() >= {*parts} or len({*parts}) < max(2, len(parts)) or len({made[p].level for p in parts}) > 1:
        return False
    column = 0
    for part in parts:
        if column * size % _ADDRESS or not all(isinstance(r, Product) or r is step for r in readers[part]):
            return False
        column += _channels(made[part])
    return all(isinstance(reader, Product) for reader in readers.get(step.node, ()))
