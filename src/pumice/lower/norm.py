"""Batch normalisation by batch statistics over valid rows, with optional residual and ReLU.

    y[n, c] = relu((x[n, c] - mean[c]) / sqrt(variance[c] + eps) * weight[c] + bias[c] + residual[n, c])   n < count

The residual and the ReLU (gradient 0 where the result is not positive) are optional. Valid rows are the first `count`
rows of a buffer; count stays on the device. Padding rows may hold anything and are not written.

Mean and biased variance are computed in at least float32 and in a fixed order (Ioffe and Szegedy, "Batch
Normalization", ICML 2015, algorithm 1; partial sums merged as in Chan, Golub and LeVeque, "Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances", 1979).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pumice.coords import CoordBuffer
from pumice.errors import DeviceError, ShapeError
from pumice.runtime.launch import BoundKernel, CompiledKernel, has_triton, jitted
from pumice.runtime.workspace import workspace


@dataclass(frozen=True, eq=False)
class Statistics:
    """Running statistics. running: mean and variance, [C] (None: 0 and 1), used for fewer than two rows.

    update_running_stats: with two or more rows, update `running` by `momentum` or (None) as cumulative mean; tracked:
    int64 [], number of updates. offset: [C], a convolution's bias, which the norm cancels; the running mean includes
    it.
    """

    running: tuple[Tensor, Tensor] | None
    eps: float
    update_running_stats: bool = False
    momentum: float | None = None
    tracked: Tensor | None = None
    offset: Tensor | None = None

    @property
    def facts(self) -> tuple[float, ...]:
        """Constants of the kernels."""
        there = self.running is not None, self.update_running_stats, self.tracked is not None, self.offset is not None
        return self.eps, self.momentum is None, *there


@dataclass(frozen=True, eq=False)
class Norm:
    """weight, bias: [C] or None; residual: [N, C] in the dtype of x, or None; relu: apply a ReLU at the end."""

    weight: Tensor | None
    bias: Tensor | None
    statistics: Statistics
    residual: Tensor | None = None
    relu: bool = False


def batch_norm(
    x: Tensor, rows: CoordBuffer, affine: tuple[Tensor | None, Tensor | None], statistics: Statistics
) -> Tensor:
    """x [N, C] -> y [N, C] in x's dtype, no residual or ReLU; updates running statistics in place. rows: holds the
    number of valid rows; affine: weight, bias.

    Differentiable any number of times in x, weight and bias. Raises ShapeError or DeviceError.
    """
    return _BatchNorm.apply(x, *affine, rows, statistics)


@dataclass(frozen=True, eq=False)
class NormState:
    """Saved state of a norm. pair [2, C]: mean and 1 / sqrt(variance + eps), at least float32. has_residual: adds
    one."""

    pair: Tensor
    weight: Tensor | None
    bias: Tensor | None
    relu: bool
    has_residual: bool = False

    def centred(self, x: Tensor) -> Tensor:
        """(x - mean) * scale, in plain torch."""
        mean, scale = self.pair
        return (x - mean) * scale

    def affine(self, centred: Tensor) -> Tensor:
        """centred * weight + bias, in plain torch."""
        y = centred if self.weight is None else centred * self.weight
        return y if self.bias is None else y + self.bias

    @property
    def reads_result(self) -> bool:
        """True if gradients need the result, which cannot be recomputed from x alone."""
        return self.relu and self.has_residual

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """(pair, weight, bias) for kernels; pair stands in for None (see facts)."""
        pair, weight, bias = self.pair, self.weight, self.bias
        return pair, pair if weight is None else weight.contiguous(), pair if bias is None else bias.contiguous()

    @property
    def facts(self) -> tuple[bool, ...]:
        return self.weight is not None, self.bias is not None, self.has_residual, self.relu


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: CoordBuffer, statistics: Statistics
    ) -> Tensor:
        y, state = normed(x, rows, Norm(weight, bias, statistics))
        ctx.rows, ctx.statistics = rows, statistics
        ctx.save_for_backward(x, weight, bias, state.pair)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, pair = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        state = NormState(pair, weight, bias, False)
        if not torch.is_grad_enabled():
            return *gradients(grad, (x, None), ctx.rows, state, (*needed, False))[:3], None, None
        again = recompute_with_autograd(x, ctx.rows, state, ctx.statistics)
        sought = [x if need else None for x, need in zip((x, weight, bias), needed, strict=True)]
        wanted = [x for x in sought if x is not None]
        found = iter(torch.autograd.grad(again, wanted, grad, create_graph=True))
        return *(None if x is None else next(found) for x in sought), None, None


def normed(x: Tensor, rows: CoordBuffer, norm: Norm) -> tuple[Tensor, NormState]:
    """(y, state for the gradients), without autograd. Raises ShapeError or DeviceError if the norm does not fit x."""
    _check(x, norm)
    x = x.contiguous()
    pair = moments(x, rows, norm.statistics)
    state = NormState(pair, norm.weight, norm.bias, norm.relu, norm.residual is not None)
    return normalised(x, rows, state, norm.residual), state


def gradients(
    grad: Tensor, kept: tuple[Tensor, Tensor | None], rows: CoordBuffer, state: NormState, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The needed gradients of x, weight, bias, residual. kept: x, and y if reads_result; grad may have a row stride."""
    kept, grad = (kept[0].contiguous(), kept[1]), grad if grad.stride(1) == 1 else grad.contiguous()
    sums = sums_of(grad, kept, rows, state)
    dx, dresidual = gradient(grad, kept, rows, state, sums) if needed[0] or needed[3] else (None, None)
    dweight = sums[1].to(state.weight.dtype) if needed[1] and state.weight is not None else None
    dbias = sums[0].to(state.bias.dtype) if needed[2] and state.bias is not None else None
    return dx, dweight, dbias, dresidual


def recompute_with_autograd(x: Tensor, rows: CoordBuffer, state: NormState, statistics: Statistics) -> Tensor:
    """The result without residual, ReLU and statistics updates, in torch operators."""
    own = moments_torch(x, rows, replace(statistics, update_running_stats=False))
    # Fewer than two rows used running statistics, which may have been updated since.
    again = state.affine(replace(state, pair=torch.where(rows.count > 1, own, state.pair)).centred(x))
    # Gradients of padding rows are undefined.
    return torch.where(rows.valid_mask()[:, None], again, 0).to(x.dtype)


def _check(x: Tensor, norm: Norm) -> None:
    """Raise ShapeError or DeviceError unless the norm fits x: kernels take raw addresses."""
    (rows, channels), device = x.shape, x.get_device()
    statistics, residual = norm.statistics, norm.residual
    for tensor in (norm.weight, norm.bias, statistics.offset, *(statistics.running or ())):
        if tensor is None:
            continue
        # Meta tensors have device index -1 as the CPU's.
        if tensor.shape[0] != channels or tensor.get_device() != device or (device < 0 and tensor.is_meta != x.is_meta):
            if tensor.device != x.device:
                raise DeviceError(f"the norm is on {tensor.device}, its input on {x.device}")
            raise ShapeError(f"the norm has {tensor.shape[0]} channels, its input {channels}")
    if statistics.tracked is not None and statistics.tracked.get_device() != device:
        raise DeviceError(f"num_batches_tracked is on {statistics.tracked.device}, the input on {x.device}")
    if residual is not None and (residual.shape != x.shape or residual.get_device() != device):
        raise ShapeError(
            f"expected a residual {[rows, channels]} on {x.device}, found {list(residual.shape)} on {residual.device}"
        )


_ROWS, _CHANNELS = 64, 64
"""Rows and maximum channels of a program of elementwise kernels."""
_SHARED, _PROGRAMS = 32, 264
"""Channels per program of a reduction, if a divisor, and maximum programs (parts of the rows x blocks of channels).
With at most 132 parts the reductions of a MinkUNet step took 2.4 instead of 1.9 ms on an H200 (fp16, 346,000 voxels of
Waymo), and 4.2 instead of 3.9 ms (2 million)."""
_STAGES, _BUFFERED, _LOADED = 3, 48 << 10, {"moments": (0,), "products": (0, 1, 6)}
"""Reductions: maximum pipeline stages, bytes of load buffers, and positions of [N, C] tensors by kernel. With 3 instead
of 2 stages 10^6 rows of 96 channels took 53 instead of 81 us, and 134 instead of 173 (fp16, H200)."""
_ENTRIES, _JOINED = 4096, 1024
"""Elements per iteration of a reduction, and of its final merge: 32 and 8 registers per thread (four warps). A larger
merge would lower the occupancy of all programs."""


def moments(x: Tensor, rows: CoordBuffer, statistics: Statistics) -> Tensor:
    """Mean and 1 / sqrt(variance + eps) of valid rows [2, C], at least float32; updates running statistics."""
    known = statistics.running
    # Kernels write running statistics in place.
    if not _by_kernels(x) or (known is not None and not (known[0].is_contiguous() and known[1].is_contiguous())):
        return moments_torch(x, rows, statistics)
    pair = _pair(x)
    tracked, offset = statistics.tracked, statistics.offset
    if statistics.update_running_stats and statistics.momentum is None and tracked is not None:
        # Not in the kernel, where all programs read it.
        tracked.add_((rows.count > 1)[0])
    running = (*((pair, pair) if known is None else known), pair if tracked is None else tracked)
    tensors = (x, rows.count, *running, pair if offset is None else offset.contiguous(), pair)
    # Momentum is not a constexpr: schedules change it, and each value would be compiled.
    _by_parts("moments", tensors, statistics.facts, (float(statistics.momentum or 0.0),))
    return pair


def moments_torch(x: Tensor, rows: CoordBuffer, statistics: Statistics) -> Tensor:
    """Twin of moments in plain torch."""
    count, alive = rows.count.clamp(min=1), rows.valid_mask()[:, None]
    wide = torch.where(alive, x.to(torch.promote_types(x.dtype, torch.float32)), 0)
    mean = wide.sum(0) / count
    variance = torch.where(alive, wide - mean, 0).square().sum(0) / count
    return pair_of(mean, variance, rows.count, statistics)


def pair_of(mean: Tensor, variance: Tensor, count: Tensor, statistics: Statistics) -> Tensor:
    """Mean and 1 / sqrt(variance + eps), [2, C], from the biased variance of `count` [1] rows, in plain torch; updates
    running statistics."""
    several, known = count > 1, statistics.running or (torch.zeros_like(mean), torch.ones_like(mean))
    offset = 0 if statistics.offset is None else statistics.offset.detach().to(mean.dtype)
    if statistics.update_running_stats and statistics.running is not None:
        factor: float | Tensor = statistics.momentum or 0.0
        if statistics.tracked is not None:
            statistics.tracked.add_(several[0])
            if statistics.momentum is None:
                factor = 1.0 / statistics.tracked.clamp(min=1).to(mean.dtype)
        share = several.to(mean.dtype) * factor
        unbiased = variance * count.clamp(min=1) / (count - 1).clamp(min=1)
        for own, found in zip(known, (mean + offset, unbiased), strict=True):
            own.add_(share * (found.detach() - own))
    mean = torch.where(several, mean, known[0] - offset)
    return torch.stack([mean, (torch.where(several, variance, known[1]) + statistics.eps).rsqrt()])


def normalised(x: Tensor, rows: CoordBuffer, state: NormState, residual: Tensor | None = None) -> Tensor:
    """y [N, C] in valid rows."""
    if not _by_kernels(x):
        y = state.affine(state.centred(x))
        y = y if residual is None else y + residual
        return (y.relu() if state.relu else y).to(x.dtype)
    y = torch.empty_like(x)
    more = x if residual is None else residual.contiguous()
    _by_blocks("normalise", (x, rows.count, *state.tensors, more, y), state.facts)
    return y


def by_statistics(x: Tensor, vectors: Sequence[Tensor | None], eps: float) -> Tensor:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias with given statistics. x: contiguous, [N, C]; vectors:
    mean, variance, weight or None, bias or None, [C] each. Not differentiable."""
    mean, variance, weight, bias = vectors
    if not _by_kernels(x):
        return functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
    assert mean is not None and variance is not None
    y = torch.empty_like(x)
    tensors = x, mean, variance, mean if weight is None else weight, mean if bias is None else bias, y
    facts = eps, weight is not None, bias is not None
    _by_blocks("by_statistics", tensors, facts, (x.shape[0],))
    return y


def compilation(like: Tensor, vectors: Sequence[Tensor | None], eps: float) -> tuple[BoundKernel, Callable[[], object]]:
    """(kernel of by_statistics for the dtype of `like`, task that compiles it)."""
    mean, variance, weight, bias = vectors
    assert mean is not None and variance is not None
    dtypes = [
        t.dtype for t in (like, mean, variance, mean if weight is None else weight, mean if bias is None else bias)
    ]
    fixed, _ = _of_blocks("by_statistics", len(mean), (eps, weight is not None, bias is not None), *dtypes, like.dtype)
    return fixed, partial(fixed.compile, like.device, (*dtypes, like.dtype), (1,))


def sums_of(grad: Tensor, kept: tuple[Tensor, Tensor | None], rows: CoordBuffer, state: NormState) -> Tensor:
    """Sums over valid rows of grad and of grad * (x - mean) * scale, [2, C]; kept: as in gradients."""
    x, y = kept
    if not _by_kernels(x):
        alive, centred = rows.valid_mask()[:, None], state.centred(x)
        wide = torch.where(alive, _before_relu(grad, centred, y, state), 0)
        return torch.stack([wide.sum(0), torch.where(alive, wide * centred, 0).sum(0)])
    sums = _pair(x)
    step = grad.stride(0)
    tensors = (grad, x, rows.count, *state.tensors, x if y is None else y, sums)
    _by_parts("products", tensors, (*state.facts, _unit(step)), (step,))
    return sums


def _before_relu(grad: Tensor, centred: Tensor, y: Tensor | None, state: NormState) -> Tensor:
    """Gradient before the ReLU; centred: (x - mean) * scale."""
    grad = grad.to(state.pair.dtype)
    if not state.relu:
        return grad
    return torch.where((state.affine(centred) if y is None else y) > 0, grad, 0)


def gradient(
    grad: Tensor, kept: tuple[Tensor, Tensor | None], rows: CoordBuffer, state: NormState, sums: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x in valid rows, and of the residual; kept: as in gradients, sums: of sums_of."""
    x, y = kept
    if not _by_kernels(x):
        # The statistics of fewer than two rows are constants.
        share = torch.where(rows.count > 1, 1.0 / rows.count.clamp(min=1).to(state.pair.dtype), 0)
        centred = state.centred(x)
        let = _before_relu(grad, centred, y, state)
        found = (let - share * (sums[0] + centred * sums[1])) * state.pair[1]
        found = found if state.weight is None else found * state.weight
        return found.to(x.dtype), let.to(x.dtype) if state.has_residual else None
    dx = torch.empty_like(x)
    # Without a ReLU the residual's gradient is grad.
    dresidual = torch.empty_like(x) if state.reads_result else grad if state.has_residual else None
    more = (x if y is None else y, sums, dx if dresidual is None else dresidual, dx)
    step, tensors = grad.stride(0), (grad, x, rows.count, *state.tensors, *more)
    _by_blocks("gradient", tensors, (*state.facts, _unit(step)), (step,))
    return dx, dresidual


def _unit(step: int) -> int:
    """Largest power of two up to 16 that divides a row stride; 16-byte loads need no more."""
    return min(16, step & -step) or 16


def _by_kernels(x: Tensor) -> bool:
    return x.dtype != torch.float64 and has_triton(x)


def _pair(x: Tensor) -> Tensor:
    """An empty float32 [2, C]."""
    return torch.empty((2, x.shape[1]), dtype=torch.float32, device=x.device)


def _by_blocks(
    name: str, tensors: tuple[Tensor, ...], facts: tuple[float, ...], numbers: tuple[float, ...] = ()
) -> None:
    """Launch a kernel with a program per block of rows; the last tensor is the result [N, C]."""
    rows, channels = tensors[-1].shape
    fixed, lanes = _of_blocks(name, channels, facts, *[t.dtype for t in tensors])
    fixed(-(-rows // _ROWS) * -(-channels // lanes), tensors, numbers)


def _by_parts(
    name: str, tensors: tuple[Tensor, ...], facts: tuple[float, ...], numbers: tuple[float, ...] = ()
) -> None:
    """Launch a reduction over the rows of the first tensor [N, C]; its last program merges the partial sums."""
    x = tensors[0]
    rows, channels = x.shape
    fixed, lanes = _of_parts(name, channels, facts, *[t.dtype for t in tensors])
    sides = -(-channels // lanes)
    parts = _parts(rows, lanes, sides)
    own = workspace(sides, 8 * parts * channels, x.device)
    fixed(parts * sides, (*tensors, own.scratch, own.counters), (parts, *numbers))


def _parts(rows: int, lanes: int, sides: int) -> int:
    """Number of parts of the rows. sides: blocks of channels."""
    # At least two iterations each: the last program waits for the sums of all.
    turn = _ENTRIES // lanes
    return max(1, min(_PROGRAMS // sides, -(-rows // (2 * turn))))


@lru_cache(maxsize=1024)
def _of_blocks(name: str, channels: int, facts: tuple[float, ...], *_: torch.dtype) -> tuple[BoundKernel, int]:
    """(kernel for tensors of these dtypes, channels of a program)."""
    lanes = _lanes(channels)
    return BoundKernel(jitted(f"row_kernels.{name}", "lower"), (channels, _ROWS, lanes, *facts)), lanes


@lru_cache(maxsize=1024)
def _of_parts(name: str, channels: int, facts: tuple[float, ...], *dtypes: torch.dtype) -> tuple[BoundKernel, int]:
    """As _of_blocks, of a reduction over the rows."""
    lanes = _SHARED if channels % _SHARED == 0 else _lanes(channels)
    # Pipelined for few rows, too: an unpipelined variant has to be compiled.
    stages = min(_STAGES, 1 + _BUFFERED // (_ENTRIES * sum(dtypes[n].itemsize for n in _LOADED[name])))
    shape = channels, _ENTRIES // lanes, lanes, _JOINED // lanes, stages
    return BoundKernel(jitted(f"row_kernels.{name}", "lower"), (*shape, *facts)), lanes


def _lanes(channels: int) -> int:
    """Channels of a program: a divisor of them, unless it is small."""
    divisor = min(_CHANNELS, channels & -channels)
    return divisor if divisor >= _SHARED else min(_CHANNELS, max(16, 1 << (channels - 1).bit_length()))


_SIZES = 64
"""Numbers of rows whose launches are kept."""
Compiled = tuple[CompiledKernel, int, tuple[Any, ...]]
"""(kernel, number of programs, arguments after the addresses), launched by kernel(programs, (*addresses, *arguments),
device)."""


class NormLaunches(NamedTuple):
    """Kernels of a norm for one row count. needs: (counters, bytes) of workspace for the reductions.

    Addresses, 16-byte aligned; pair stands in for absent tensors, x for an absent residual or y:
    moments: x, count, running mean, running variance, tracked, offset, pair, scratch, counters
    normalise: x, count, pair, weight, bias, residual, y
    products: grad, x, count, pair, weight, bias, y, sums, scratch, counters
    gradient: grad, x, count, pair, weight, bias, y, sums, dresidual, dx
    """

    moments: Compiled | None
    normalise: Compiled
    products: Compiled
    gradient: Compiled
    needs: tuple[int, int]


KernelTasks = dict[BoundKernel, Callable[[], object]]
"""What compiles each kernel."""


class NormKernels:
    """Kernels of a norm for features of one dtype on one device, launched on raw addresses.

    statistics: for batch statistics, None if mean and scale are given; facts: NormState.facts; of: example features,
    [N, C]; dtypes: of weight and bias (float32 if None).
    """

    def __init__(
        self,
        statistics: Statistics | None,
        facts: tuple[bool, ...],
        of: Tensor,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        self._device, self._index = of.device, of.device.index or 0
        self._channels, self._facts, self._dtype = of.shape[1], facts, of.dtype
        self._vectors = torch.int32, torch.float32, *dtypes
        self._momentum = 0.0
        self._moments: tuple[BoundKernel, int] | None = None
        if statistics is not None:
            self._momentum = float(statistics.momentum or 0.0)
            self._moved = of.dtype, *_moved_dtypes(statistics)
            self._moments = _of_parts("moments", self._channels, statistics.facts, *self._moved)
        dtypes_of = (of.dtype, *self._vectors, of.dtype, of.dtype)
        self._normalise = _of_blocks("normalise", self._channels, facts, *dtypes_of)
        self._known: dict[tuple[int, int], NormLaunches] = {}

    def launches(self, rows: int, step: int | None = None) -> NormLaunches:
        """The kernels for so many rows. step: row stride of the gradient, default: rows without gaps."""
        key = rows, self._channels if step is None else step
        if (known := self._known.get(key)) is None:
            if len(self._known) >= _SIZES:
                self._known.clear()
            known = self._known[key] = self._sized(*key)
        return known

    def compilations(self) -> KernelTasks:
        """Tasks to compile the missing forward kernels; equal norms share kernels."""
        moments = [] if self._moments is None else [("moments", self._moments[0])]
        return self._tasks([*moments, ("normalise", self._normalise[0])])

    def gradient_compilations(self, steps: Sequence[int] = ()) -> KernelTasks:
        """As `compilations`, for the backward pass. steps: gradient row strides besides the contiguous one."""
        kernels = list[tuple[str, BoundKernel]]()
        for step in (self._channels, *steps):
            (products, _), (gradient, _) = self._reading(step)
            kernels += [("products", products), ("gradient", gradient)]
        return self._tasks(kernels)

    def _tasks(self, kernels: Sequence[tuple[str, BoundKernel]]) -> KernelTasks:
        return {
            one: partial(one.compile, self._device, *self._told(name))
            for name, one in kernels
            if one.compiled(self._index, ()) is None
        }

    def _sized(self, rows: int, step: int) -> NormLaunches:
        products, gradient = self._reading(step)
        (_, lanes), channels = products, self._channels
        sides = -(-channels // lanes)
        parts = _parts(rows, lanes, sides)
        reduced, blocks = parts * sides, -(-rows // _ROWS)

        def made(name: str, kernel: BoundKernel, programs: int, numbers: tuple[float, ...]) -> Compiled:
            return self._compiled(name, kernel), programs, (*numbers, *kernel.constants)

        moments = None
        if self._moments is not None:
            moments = made("moments", self._moments[0], reduced, (parts, self._momentum))
        wide = -(-channels // self._normalise[1])
        return NormLaunches(
            moments,
            made("normalise", self._normalise[0], blocks * wide, ()),
            made("products", products[0], reduced, (parts, step)),
            made("gradient", gradient[0], blocks * -(-channels // gradient[1]), (step,)),
            (sides, 8 * parts * channels),
        )

    def _reading(self, step: int) -> tuple[tuple[BoundKernel, int], tuple[BoundKernel, int]]:
        """The gradient kernels for that row stride."""
        (of_products, _), (of_gradient, _) = self._told("products"), self._told("gradient")
        facts = (*self._facts, _unit(step))
        # The kernel cache is not keyed by workspace dtypes.
        products = _of_parts("products", self._channels, facts, *of_products[:-2])
        return products, _of_blocks("gradient", self._channels, facts, *of_gradient)

    def _told(self, name: str) -> tuple[tuple[torch.dtype, ...], tuple[float, ...]]:
        """(dtypes of tensors, example numbers) of a kernel."""
        dtype, single, shared = self._dtype, torch.float32, (torch.uint8, torch.int32)
        if name == "moments":
            return (*self._moved, *shared), (1, 0.5)
        if name == "normalise":
            return (dtype, *self._vectors, dtype, dtype), ()
        read = dtype, dtype, *self._vectors, dtype, single
        return ((*read, *shared), (1, 1)) if name == "products" else ((*read, dtype, dtype), (1,))

    def _compiled(self, name: str, kernel: BoundKernel) -> CompiledKernel:
        found = kernel.compiled(self._index, ())
        if found is None:
            kernel.compile(self._device, *self._told(name))
            found = kernel.compiled(self._index, ())
        assert found is not None
        return found


def _moved_dtypes(statistics: Statistics) -> tuple[torch.dtype, ...]:
    """Dtypes of the tensors that `moments` takes beside the features."""
    single = torch.float32
    mean, variance = (t.dtype for t in statistics.running) if statistics.running is not None else (single, single)
    tracked, offset = (single if t is None else t.dtype for t in (statistics.tracked, statistics.offset))
    return torch.int32, mean, variance, tracked, offset, single
