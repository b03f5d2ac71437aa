"""Which output meets which input: one integer relation for every convolution and pooling."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from pumice.errors import OptionError, ShapeError

POLICIES = ("same", "given", "support", "floor_unique", "transposed_support", "cached_inverse")


def as_axes(value: Any, dim: int, name: str, least: int, kinds: Any = int) -> tuple[Any, ...]:
    """`value`, an integer or one per axis, once per axis, each at least `least` and of one of the types `kinds`.

    Raises ShapeError when a sequence has another length than `dim`, OptionError on a value of another type or one that
    is too small.
    """
    found: Any = value if isinstance(value, int | tuple | list) else _integer(value)
    if isinstance(found, str) or not isinstance(found, int | Iterable | kinds):
        raise OptionError(f"{name} takes an integer or one per axis, found {value!r}")
    values: tuple[Any, ...] = tuple(map(_integer, found)) if isinstance(found, Iterable) else (found,) * dim
    if len(values) != dim:
        raise ShapeError(f"{name} has {len(values)} entries, the tensor has {dim} spatial axes")
    for entry in values:
        if not isinstance(entry, kinds) or isinstance(entry, bool) or entry < least:
            raise OptionError(f"{name} takes integers of at least {least}, found {entry!r}")
    return values


def _integer(value: Any) -> Any:
    """Integers of other libraries (numpy, a tensor's entry) as Python's; anything else as it is."""
    try:
        return value if isinstance(value, int) else operator.index(value)
    except TypeError:
        return value


@dataclass(frozen=True)
class Relation:
    """The relation `in = stride * out + dilation * tap - padding`, tap in [0, kernel) per axis, row-major.

    With `custom` offsets the relation is `in = stride * out + custom[k]` and kernel, dilation and padding say
    nothing. `policy` tells which outputs exist:

    same                the inputs' own coordinates
    given               coordinates that the caller names
    support             every output that meets an input: the active set of the dense operator
    floor_unique        the distinct floor(in / stride)
    transposed_support  the roles exchanged: every out = stride * in + dilation * tap - padding
    cached_inverse      back to the coordinates that a forward relation came from

    `bounded` tells whether an input's spatial_shape cuts the outputs off.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    policy: str
    custom: tuple[tuple[int, ...], ...] | None = None
    output_padding: tuple[int, ...] | None = None
    bounded: bool = True

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Of integers alone: it is kept by copies in other processes, too.
        numbers = (self.kernel, self.stride, self.padding, self.dilation)
        return hash((*numbers, self.custom or (), self.output_padding or (), self.bounded))

    def checked(self) -> Relation:
        """Itself. Raises OptionError where `same` does not keep the coordinates at the centre of their windows."""
        if self.policy == "same" and self.custom is None:
            if any(s != 1 for s in self.stride):
                raise OptionError(f"out='same' keeps the coordinates and needs stride 1, found stride {self.stride}")
            centred = _centring(self.kernel, self.dilation)
            if self.padding != centred:
                raise OptionError(
                    f"out='same' centres windows of {self.kernel} by padding {centred}, found {self.padding}; leave "
                    "padding out (spconv ignores it there), or say out='support' for other outputs"
                )
        return self

    def shared(self) -> Relation:
        """The first of those that are equal: whoever looks up what is kept by them finds the same one at once."""
        return _first(self)

    @property
    def dim(self) -> int:
        return len(self.stride)

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """What is added to `stride * out`, for each of the K taps."""
        if self.custom is not None:
            return self.custom
        taps = itertools.product(*(range(k) for k in self.kernel))
        rule = tuple(zip(self.dilation, self.padding, strict=True))
        return tuple(tuple(d * t - p for t, (d, p) in zip(tap, rule, strict=True)) for tap in taps)

    @cached_property
    def reach(self) -> int:
        """The greatest offset along any axis, without its sign."""
        return max((abs(o) for offset in self.offsets for o in offset), default=0)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The least and the greatest offset along each axis."""
        axes = zip(*self.offsets, strict=True) if self.offsets else [(0,)] * self.dim
        return tuple((min(axis), max(axis)) for axis in axes)

    @cached_property
    def planes(self) -> tuple[tuple[int, ...], ...]:
        """For each axis and each offset along it the taps that have it."""
        axes = [sorted({offset[axis] for offset in self.offsets}) for axis in range(self.dim)]
        return tuple(
            tuple(k for k, offset in enumerate(self.offsets) if offset[axis] == value)
            for axis, values in enumerate(axes)
            for value in values
        )

    @cached_property
    def mirrored(self) -> bool:
        """Whether inputs and outputs are one set and tap K-1-k undoes tap k: a submanifold window of odd size."""
        ours = self.offsets
        turned = tuple(tuple(-o for o in offset) for offset in reversed(ours))
        return self.policy == "same" and ours == turned

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Extent of the outputs of an input of extent `shape`: the dense operator's, never below 0."""
        if self.policy == "same":
            return tuple(shape)
        if self.policy == "floor_unique":
            return tuple(-(-n // s) for n, s in zip(shape, self.stride, strict=True))
        axes = zip(shape, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        if self.policy == "transposed_support":
            extra = self.output_padding or (0,) * self.dim
            sizes = ((n - 1) * s - 2 * p + d * (k - 1) + 1 + e for (n, k, s, p, d), e in zip(axes, extra, strict=True))
        else:
            sizes = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes)
        return tuple(max(0, size) for size in sizes)

    @staticmethod
    def of(
        dim: int,
        kernel: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | None = None,
        dilation: int | Sequence[int] = 1,
        policy: str | None = None,
    ) -> Relation:
        """A relation with Pumice's defaults filled in.

        padding: `dilation * (kernel // 2)` for an odd kernel, 0 for an even one. policy: `same` at stride 1; above,
        `support` when padding is given and `floor_unique` when it is not.

        Raises OptionError for a padding of `same` that is not the centred one, and what as_axes raises.
        """
        kernels = as_axes(kernel, dim, "kernel_size", 1)
        strides = as_axes(stride, dim, "stride", 1)
        dilations = as_axes(dilation, dim, "dilation", 1)
        paddings = _centring(kernels, dilations) if padding is None else as_axes(padding, dim, "padding", 0)
        return Relation(kernels, strides, paddings, dilations, policy or _default_policy(strides, padding)).checked()

    @staticmethod
    def of_offsets(
        dim: int,
        offsets: Sequence[Sequence[int]],
        *,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        policy: str | None = None,
    ) -> Relation:
        """A relation over a list of offsets, `in = stride * out + dilation * offsets[k]`; they must differ."""
        spread = as_axes(dilation, dim, "dilation", 1)
        taps = [as_axes(tuple(o), dim, "an offset", -(2**31)) for o in offsets]
        custom = tuple(tuple(a * d for a, d in zip(tap, spread, strict=True)) for tap in taps)
        if len(set(custom)) != len(custom):
            raise OptionError(f"{len(custom)} offsets were given, {len(set(custom))} of them distinct")
        strides, ones = as_axes(stride, dim, "stride", 1), (1,) * dim
        policy = policy or _default_policy(strides, None)
        return Relation(ones, strides, (0,) * dim, ones, policy, custom)

    @staticmethod
    def of_transposed(
        dim: int,
        kernel: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | None = 0,
        dilation: int | Sequence[int] = 1,
        output_padding: int | Sequence[int] = 0,
        bounded: bool = True,
    ) -> Relation:
        """The relation `out = stride * in + dilation * tap - padding` of a transposed convolution."""
        base = Relation.of(dim, kernel, stride=stride, padding=padding, dilation=dilation, policy="transposed_support")
        extra = as_axes(output_padding, dim, "output_padding", 0)
        return replace(base, output_padding=extra, bounded=bounded)


def _centring(kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(d * (k // 2) if k % 2 else 0 for k, d in zip(kernel, dilation, strict=True))


def _default_policy(stride: tuple[int, ...], padding: Any) -> str:
    if all(s == 1 for s in stride):
        return "same"
    return "floor_unique" if padding is None else "support"


@lru_cache(maxsize=4096)
def _first(relation: Relation) -> Relation:
    """The one that was asked for first."""
    return relation
