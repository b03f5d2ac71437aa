"""Batch normalisation by the statistics of the rows that are normalised, with what stands behind it.

    y[n, c] = relu((x[n, c] - mean[c]) / sqrt(variance[c] + eps) * weight[c] + bias[c] + residual[n, c])   n < count

where the residual and the ReLU, max(., 0), whose gradient passes where the result is above 0, may be missing. The
number of rows is the device's: of a buffer the first ones live.

Mean and biased variance of the rows that live, in at least float32, summed in a fixed order (Ioffe and Szegedy, "Batch
Normalization", ICML 2015, algorithm 1; partial sums put together as in Chan, Golub and LeVeque, "Updating Formulae and
a Pairwise Algorithm for Computing Sample Variances", 1979). Rows that do not live may hold anything and are not
written.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pumice.coords import CoordBuffer
from pumice.errors import DeviceError, ShapeError
from pumice.runtime.launch import BoundKernel, has_triton
from pumice.runtime.workspace import workspace


@dataclass(frozen=True, eq=False)
class Statistics:
    """running: mean and variance [C], by which fewer than two rows are normalised (without them: by 0 and 1).

    follows: whether they follow those of at least two rows, by `momentum` or (None) as the mean of all so far; then
    tracked, int64 [], counts how often they did. offset: [C], what the running mean has beyond the rows' own: a
    convolution's bias, which a norm takes away again.
    """

    running: tuple[Tensor, Tensor] | None
    eps: float
    update_running_stats: bool = False
    momentum: float | None = None
    tracked: Tensor | None = None
    offset: Tensor | None = None

    @property
    def facts(self) -> tuple[float, ...]:
        """For a kernel."""
        there = self.running is not None, self.update_running_stats, self.tracked is not None, self.offset is not None
        return self.eps, self.momentum is None, *there


@dataclass(frozen=True, eq=False)
class Norm:
    """weight, bias: [C] or None; residual: [N, C] in the dtype of x, or None; relu: whether a ReLU is behind it all."""

    weight: Tensor | None
    bias: Tensor | None
    statistics: Statistics
    residual: Tensor | None = None
    relu: bool = False


def batch_norm(x: Tensor, rows: CoordBuffer, norm: Norm) -> Tensor:
    """y in the dtype of x [N, C], of whose rows those live that do in the cloud.

    Differentiable any number of times in x, weight, bias and residual. Running statistics are written where they
    follow.
    """
    return _BatchNorm.apply(x, norm.weight, norm.bias, norm.residual, rows, norm.statistics, norm.relu)


@dataclass(frozen=True, eq=False)
class NormState:
    """What the result of a row depends on beside the row: pair [2, C], mean and 1 / sqrt(variance + eps), in at least
    float32. adds: whether there is a residual."""

    pair: Tensor
    weight: Tensor | None
    bias: Tensor | None
    relu: bool
    adds: bool = False

    def apart(self, x: Tensor) -> Tensor:
        """In plain torch: (x - mean) * scale."""
        mean, scale = self.pair
        return (x - mean) * scale

    def affine(self, apart: Tensor) -> Tensor:
        """In plain torch: that, scaled and shifted."""
        y = apart if self.weight is None else apart * self.weight
        return y if self.bias is None else y + self.bias

    @property
    def reads_result(self) -> bool:
        """Whether gradients depend on the result, rather than on what it is made of."""
        return self.relu and self.adds

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """For a kernel; `facts` say which of them stand in for none."""
        pair, weight, bias = self.pair, self.weight, self.bias
        return pair, pair if weight is None else weight.contiguous(), pair if bias is None else bias.contiguous()

    @property
    def facts(self) -> tuple[bool, ...]:
        return self.weight is not None, self.bias is not None, self.adds, self.relu


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        rows: CoordBuffer,
        statistics: Statistics,
        relu: bool,
    ) -> Tensor:
        y, told = normed(x, rows, Norm(weight, bias, statistics, residual, relu))
        ctx.rows, ctx.statistics, ctx.state = rows, statistics, (relu, residual is not None)
        ctx.save_for_backward(x, weight, bias, told.pair, y if told.reads_result else None)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, pair, y = ctx.saved_tensors
        needed = ctx.needs_input_grad[:4]
        told = NormState(pair, weight, bias, *ctx.state)
        if torch.is_grad_enabled():
            again = recompute_with_autograd(x, ctx.rows, told, ctx.statistics, y)
            found = (*gradients_of(again, grad, (x, weight, bias), needed), relu_grad(grad, y) if needed[3] else None)
        else:
            found = gradients(grad, (x, y), ctx.rows, told, needed)
        return *found, None, None, None


def gradients_of(y: Tensor, grad: Tensor, inputs: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Any]:
    """The gradients of those of the given that need one, recorded in turn; None of the others."""
    sought = [x if need else None for x, need in zip(inputs, needed, strict=False)]
    wanted = [x for x in sought if x is not None]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True) if wanted else ())
    return [None if x is None else next(found) for x in sought]


def normed(x: Tensor, rows: CoordBuffer, norm: Norm) -> tuple[Tensor, NormState]:
    """y, and what its gradients need; nothing is recorded.

    Raises ShapeError and DeviceError where the norm does not fit x.
    """
    _check(x, norm)
    x = x.contiguous()
    pair = moments(x, rows, norm.statistics)
    told = NormState(pair, norm.weight, norm.bias, norm.relu, norm.residual is not None)
    return normalised(x, rows, told, norm.residual), told


def gradients(
    grad: Tensor, kept: tuple[Tensor, Tensor | None], rows: CoordBuffer, state: NormState, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Those of x, weight, bias and residual that are needed. kept: x, and y where that is read. Rows of grad may lie
    apart, as those of a part of a concatenation do."""
    kept, grad = (kept[0].contiguous(), kept[1]), grad if grad.stride(1) == 1 else grad.contiguous()
    sums = sums_of(grad, kept, rows, state)
    dx, dresidual = gradient(grad, kept, rows, state, sums) if needed[0] or needed[3] else (None, None)
    dweight = sums[1].to(state.weight.dtype) if needed[1] and state.weight is not None else None
    dbias = sums[0].to(state.bias.dtype) if needed[2] and state.bias is not None else None
    return dx, dweight, dbias, dresidual


def recompute_with_autograd(
    x: Tensor, rows: CoordBuffer, state: NormState, statistics: Statistics, y: Tensor | None
) -> Tensor:
    """The result but for the residual, in torch's operators, which record gradients of any order; running statistics
    stay as they are. y: the result, where gradients depend on it."""
    own = moments_twin(x, rows, replace(statistics, update_running_stats=False))
    # What fewer than two rows were normalised by may have followed others since.
    again = state.affine(replace(state, pair=torch.where(rows.count > 1, own, state.pair)).apart(x))
    if state.relu:
        again = again.relu() if y is None else torch.where(y > 0, again, 0)
    # Gradients of rows that do not live may be anything.
    return torch.where(rows.valid_mask()[:, None], again, 0).to(x.dtype)


def relu_grad(grad: Tensor, y: Tensor | None) -> Tensor:
    """The gradient of a residual; y: the result where a ReLU is behind it."""
    return grad if y is None else torch.where(y > 0, grad, 0)


def _check(x: Tensor, norm: Norm) -> None:
    """Kernels take addresses as they are."""
    (rows, channels), device = x.shape, x.get_device()
    told, residual = norm.statistics, norm.residual
    for tensor in (norm.weight, norm.bias, told.offset, *(told.running or ())):
        if tensor is None:
            continue
        # On a CPU there are tensors without values, which have no number either.
        if tensor.shape[0] != channels or tensor.get_device() != device or (device < 0 and tensor.is_meta != x.is_meta):
            if tensor.device != x.device:
                raise DeviceError(f"the norm is on {tensor.device}, its input on {x.device}")
            raise ShapeError(f"the norm has {tensor.shape[0]} channels, its input {channels}")
    if told.tracked is not None and told.tracked.get_device() != device:
        raise DeviceError(f"the norm counts on {told.tracked.device}, its input is on {x.device}")
    if residual is not None and (residual.shape != x.shape or residual.get_device() != device):
        raise ShapeError(
            f"the residual is {[rows, channels]} on {x.device}, found {list(residual.shape)} on {residual.device}"
        )


_ROWS, _CHANNELS = 64, 64
"""Rows, and channels at most, of a program that treats each row alone."""
_SHARED, _PROGRAMS = 32, 264
"""Channels of a program that sums, where so many divide them, and programs at most: each part of the rows has one for
each of its blocks of channels. With parts alone at most 132, whatever the channels, the sums of a step of MinkUNet took
2.4 ms of an H200 where they take 1.9 (fp16, 346,000 voxels of Waymo), 4.2 and 3.9 (2 million)."""
_ENTRIES, _JOINED = 4096, 1024
"""How many entries of rows a program sums in one turn, and of parts the last one: with four warps 32 registers and 8,
as the room that it took for more would be all others' loss."""


def moments(x: Tensor, rows: CoordBuffer, statistics: Statistics) -> Tensor:
    """Mean and 1 / sqrt(variance + eps) of the living rows [2, C], in at least float32; running statistics follow."""
    known = statistics.running
    # Kernels write to those that follow as they lie.
    if not _by_kernels(x) or (known is not None and not (known[0].is_contiguous() and known[1].is_contiguous())):
        return moments_twin(x, rows, statistics)
    pair = _pair(x)
    tracked, offset = statistics.tracked, statistics.offset
    if statistics.update_running_stats and statistics.momentum is None and tracked is not None:
        # All programs read what one would write.
        tracked.add_((rows.count > 1)[0])
    told = (*((pair, pair) if known is None else known), pair if tracked is None else tracked)
    tensors = (x, rows.count, *told, pair if offset is None else offset.contiguous(), pair)
    # Not a constant: those who train lower it as they go, and each value would be compiled for.
    _by_parts("moments", tensors, statistics.facts, (float(statistics.momentum or 0.0),))
    return pair


def moments_twin(x: Tensor, rows: CoordBuffer, statistics: Statistics) -> Tensor:
    """As moments, in plain torch."""
    count, several, alive = rows.count.clamp(min=1), rows.count > 1, rows.valid_mask()[:, None]
    wide = torch.where(alive, x.to(torch.promote_types(x.dtype, torch.float32)), 0)
    mean = wide.sum(0) / count
    variance = torch.where(alive, wide - mean, 0).square().sum(0) / count
    known = statistics.running or (torch.zeros_like(mean), torch.ones_like(mean))
    offset = 0 if statistics.offset is None else statistics.offset.detach().to(mean.dtype)
    if statistics.update_running_stats and statistics.running is not None:
        factor: float | Tensor = statistics.momentum or 0.0
        if statistics.tracked is not None:
            statistics.tracked.add_(several[0])
            if statistics.momentum is None:
                factor = 1.0 / statistics.tracked.clamp(min=1).to(mean.dtype)
        share = several.to(mean.dtype) * factor
        unbiased = variance * count / (count - 1).clamp(min=1)
        for own, found in zip(known, (mean + offset, unbiased), strict=True):
            own.add_(share * (found.detach() - own))
    mean = torch.where(several, mean, known[0] - offset)
    return torch.stack([mean, (torch.where(several, variance, known[1]) + statistics.eps).rsqrt()])


def normalised(x: Tensor, rows: CoordBuffer, state: NormState, residual: Tensor | None = None) -> Tensor:
    """The result in living rows."""
    if not _by_kernels(x):
        y = state.affine(state.apart(x))
        y = y if residual is None else y + residual
        return (y.relu() if state.relu else y).to(x.dtype)
    y = torch.empty_like(x)
    more = x if residual is None else residual.contiguous()
    _by_blocks("normalise", (x, rows.count, *state.tensors, more, y), state.facts)
    return y


def sums_of(grad: Tensor, kept: tuple[Tensor, Tensor | None], rows: CoordBuffer, state: NormState) -> Tensor:
    """The sums over living rows of the gradient, and of that * (x - mean) * scale, [2, C]; kept: as in gradients."""
    x, y = kept
    if not _by_kernels(x):
        alive, apart = rows.valid_mask()[:, None], state.apart(x)
        wide = torch.where(alive, _passed(grad, apart, y, state), 0)
        return torch.stack([wide.sum(0), torch.where(alive, wide * apart, 0).sum(0)])
    sums = _pair(x)
    facts = (*state.facts, grad.stride(0))
    _by_parts("products", (grad, x, rows.count, *state.tensors, x if y is None else y, sums), facts)
    return sums


def _passed(grad: Tensor, apart: Tensor, y: Tensor | None, told: NormState) -> Tensor:
    """The gradient of what is normalised; apart: (x - mean) * scale."""
    grad = grad.to(told.pair.dtype)
    if not told.relu:
        return grad
    return torch.where((told.affine(apart) if y is None else y) > 0, grad, 0)


def gradient(
    grad: Tensor,
    kept: tuple[Tensor, Tensor | None],
    rows: CoordBuffer,
    state: NormState,
    sums: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x in living rows, and of the residual; kept: as in gradients, sums: what sums_of gives."""
    x, y = kept
    if not _by_kernels(x):
        # Fewer than two rows were normalised by what does not depend on them.
        share = torch.where(rows.count > 1, 1.0 / rows.count.clamp(min=1).to(state.pair.dtype), 0)
        apart = state.apart(x)
        let = _passed(grad, apart, y, state)
        found = (let - share * (sums[0] + apart * sums[1])) * state.pair[1]
        found = found if state.weight is None else found * state.weight
        return found.to(x.dtype), let.to(x.dtype) if state.adds else None
    dx = torch.empty_like(x)
    # Without a ReLU the residual's is the result's.
    dresidual = torch.empty_like(x) if state.reads_result else grad if state.adds else None
    more = (x if y is None else y, sums, dx if dresidual is None else dresidual, dx)
    _by_blocks("gradient", (grad, x, rows.count, *state.tensors, *more), (*state.facts, grad.stride(0)))
    return dx, dresidual


def _by_kernels(x: Tensor) -> bool:
    return x.dtype != torch.float64 and has_triton(x)


def _pair(x: Tensor) -> Tensor:
    """Two numbers for each channel."""
    return torch.empty((2, x.shape[1]), dtype=torch.float32, device=x.device)


def _by_blocks(name: str, tensors: tuple[Tensor, ...], facts: tuple[float, ...]) -> None:
    """Start a kernel with a program for each block of rows; the last tensor is the result [N, C]."""
    rows, channels = tensors[-1].shape
    fixed, lanes = _of_blocks(name, channels, facts, *[t.dtype for t in tensors])
    fixed(-(-rows // _ROWS) * -(-channels // lanes), tensors)


def _by_parts(
    name: str, tensors: tuple[Tensor, ...], facts: tuple[float, ...], numbers: tuple[float, ...] = ()
) -> None:
    """Start a kernel whose programs share the rows of the first tensor [N, C], and leave their sums for the last of
    them."""
    x = tensors[0]
    rows, channels = x.shape
    (once, ahead), lanes = _of_parts(name, channels, facts, *[t.dtype for t in tensors])
    sides = -(-channels // lanes)
    parts, far = _shares(rows, lanes, sides)
    own = workspace(sides, 8 * parts * channels, x.device)
    fixed = ahead if far else once
    fixed(parts * sides, (*tensors, own.room, own.counters), (parts, *numbers))


def _shares(rows: int, lanes: int, sides: int) -> tuple[int, bool]:
    """Into how many parts rows are shared, and whether loads run ahead: where there are some to run ahead of. sides:
    blocks of channels."""
    # At least two turns each: the last one waits for the sums of all.
    turn = _ENTRIES // lanes
    parts = max(1, min(_PROGRAMS // sides, -(-rows // (2 * turn))))
    return parts, rows > 4 * parts * turn


@lru_cache(maxsize=1024)
def _of_blocks(name: str, channels: int, facts: tuple[float, ...], *_: torch.dtype) -> tuple[BoundKernel, int]:
    """A kernel for tensors of these dtypes, and how many channels a program has."""
    lanes = _lanes(channels)
    return BoundKernel(_kernel(name), (channels, _ROWS, lanes, *facts)), lanes


@lru_cache(maxsize=1024)
def _of_parts(
    name: str, channels: int, facts: tuple[float, ...], *_: torch.dtype
) -> tuple[tuple[BoundKernel, BoundKernel], int]:
    """The same, without and with loads that run ahead."""
    lanes = _SHARED if channels % _SHARED == 0 else _lanes(channels)
    shape = channels, _ENTRIES // lanes, lanes, _JOINED // lanes
    once, ahead = (BoundKernel(_kernel(name), (*shape, stages, *facts)) for stages in (1, 3))
    return (once, ahead), lanes


def _lanes(channels: int) -> int:
    """Channels of a program: such as divide them, if they are not few."""
    divisor = min(_CHANNELS, channels & -channels)
    return divisor if divisor >= _SHARED else min(_CHANNELS, max(16, 1 << (channels - 1).bit_length()))


def _kernel(name: str) -> Any:
    """Its file is imported here first: it needs Triton."""
    return getattr(importlib.import_module("pumice.lower.norm_kernels"), name)


class NormKernels:
    """The kernels of a norm by float32 vectors, for features of one dtype: started with addresses, as they were
    compiled for tensors."""

    def __init__(self, statistics: Statistics, facts: tuple[bool, ...], of: tuple[int, torch.dtype, int]) -> None:
        """facts: as NormState has them; of: the channels, dtype and device of the features."""
        self._channels, dtype, self._device = of
        channels, single, count = self._channels, torch.float32, torch.int32
        vectors = count, single, single, single
        tracked = single if statistics.tracked is None else statistics.tracked.dtype
        moved = (dtype, count, single, single, tracked, single, single)
        self._moments = _of_parts("moments", channels, statistics.facts, *moved)
        self._normalise = _of_blocks("normalise", channels, facts, dtype, *vectors, dtype, dtype)
        self._facts, self._dtypes = facts, (dtype, dtype, *vectors, dtype, single)
        self._back = {channels: self._reading(channels)}

    def _reading(self, step: int) -> tuple[tuple[BoundKernel, BoundKernel], BoundKernel]:
        """The kernels of gradients whose rows are so far apart."""
        back, dtype = (*self._facts, step), self._dtypes[0]
        products, _ = _of_parts("products", self._channels, back, *self._dtypes)
        return products, _of_blocks("gradient", self._channels, back, *self._dtypes, dtype, dtype)[0]

    def over(self, rows: int, beyond: int, step: int | None = None) -> NormLaunches | None:
        """They, for so many rows, which are counted so many bytes beyond an alignment; None where one was not compiled
        yet. step: how far the rows of the result's gradient are apart, by default side by side."""
        (each, lanes), (blocks, wide) = self._moments, self._normalise
        step = self._channels if step is None else step
        products, gradient = self._back.get(step) or self._back.setdefault(step, self._reading(step))
        sides, channels = -(-self._channels // lanes), self._channels
        parts, far = _shares(rows, lanes, sides)
        fixed = each[far], blocks, products[far], gradient
        found = [one.compiled(self._device, at(beyond)) for one, at in zip(fixed, _COUNTS, strict=True)]
        if not rows or any(one is None for one in found):
            return None
        kernels = tuple((one, kernel.constants) for one, kernel in zip(found, fixed, strict=True))
        programs = parts * sides, -(-rows // _ROWS) * -(-channels // wide)
        return NormLaunches(kernels, programs, parts, (sides, 8 * parts * channels), self._device)


def _counts(place: int, tensors: int) -> Callable[[int], tuple[int, ...]]:
    return lambda beyond: (*(0,) * place, beyond, *(0,) * (tensors - place - 1))


_COUNTS = (_counts(1, 9), _counts(1, 7), _counts(2, 10), _counts(2, 10))
"""Where each kernel takes the number of rows among its tensors."""


class NormLaunches:
    """The kernels of a norm over some number of rows. needs: counters and bytes that the programs of one share.

    Each takes the addresses of its tensors in the order of its arguments, on the current device.
    """

    __slots__ = ("_device", "_kernels", "_parts", "_programs", "needs")

    def __init__(
        self, kernels: Any, programs: tuple[int, int], parts: int, needs: tuple[int, int], device: int
    ) -> None:
        self._kernels, self._programs, self._parts, self.needs, self._device = kernels, programs, parts, needs, device

    def moments(self, addresses: Sequence[int], momentum: float) -> None:
        run, constants = self._kernels[0]
        run(self._programs[0], (*addresses, self._parts, momentum, *constants), self._device)

    def normalise(self, addresses: Sequence[int]) -> None:
        run, constants = self._kernels[1]
        run(self._programs[1], (*addresses, *constants), self._device)

    def products(self, addresses: Sequence[int]) -> None:
        run, constants = self._kernels[2]
        run(self._programs[0], (*addresses, self._parts, *constants), self._device)

    def gradient(self, addresses: Sequence[int]) -> None:
        run, constants = self._kernels[3]
        run(self._programs[1], (*addresses, *constants), self._device)
