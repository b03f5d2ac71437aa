"""The integer relation between outputs and inputs of a convolution or pooling."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from pumice.errors import OptionError, ShapeError

POLICIES = ("same", "given", "support", "floor_unique", "transposed_support", "cached_inverse", "given_inverse")


def as_axes(value: Any, dim: int, name: str, least: int, kinds: Any = int) -> tuple[Any, ...]:
    """`value`, a number or one per axis, as a tuple of `dim` numbers of the types `kinds`, each at least `least`.

    Raises ShapeError for a sequence of another length, OptionError for a value of another type or below `least`."""
    if type(value) is int and value >= least:
        # The usual case: every new tensor has a stride.
        return (value,) * dim
    found: Any = value if isinstance(value, int | tuple | list) else _integer(value)
    if isinstance(found, str) or not isinstance(found, int | Iterable | kinds):
        raise OptionError(f"{name} takes an integer{' or one per axis' * (dim > 1)}, found {value!r}")
    values: tuple[Any, ...] = tuple(map(_integer, found)) if isinstance(found, Iterable) else (found,) * dim
    if len(values) != dim:
        raise ShapeError(f"{name} has {len(values)} entries, the tensor has {dim} spatial axes")
    for entry in values:
        if not isinstance(entry, kinds) or isinstance(entry, bool) or entry < least:
            raise OptionError(f"{name} takes integers of at least {least}, found {entry!r}")
    return values


def _integer(value: Any) -> Any:
    """`value` as int if it is an integer of another library (numpy, a 0-d tensor); else unchanged."""
    try:
        return value if isinstance(value, int) else operator.index(value)
    except TypeError:
        return value


@dataclass(frozen=True)
class Relation:
    """The relation `in = stride * out + dilation * tap - padding`; taps in [0, kernel) per axis, numbered row-major.

    With `custom` offsets: `in = stride * out + custom[k]`; kernel, dilation and padding are ignored. `policy` selects
    the output coordinates:

    same                the inputs' coordinates (submanifold)
    given               coordinates that the caller passes
    support             every output with an input: the active set of the dense operator (as spconv)
    floor_unique        the distinct floor(in / stride) (as MinkowskiEngine)
    transposed_support  in and out exchanged: every out = stride * in + dilation * tap - padding
    cached_inverse      the input coordinates of the forward relation that is inverted
    given_inverse       coordinates that the caller passes, with in and out exchanged; also if the inputs were made by
                        another relation than this one (as MinkowskiEngine)

    bounded: drop outputs outside output_shape(spatial_shape of the input); output_padding is added to this."""

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
        # Integers only: the hash is pickled, and hashes of strings differ between processes.
        numbers = (self.kernel, self.stride, self.padding, self.dilation)
        return hash((*numbers, self.custom or (), self.output_padding or (), self.bounded))

    def checked(self) -> Relation:
        """The relation itself. Raises OptionError for an unknown policy, and for `same` with a stride above 1 or with
        padding that is not centred."""
        if self.policy not in POLICIES:
            raise OptionError(f"out takes one of {', '.join(POLICIES)}, found {self.policy!r}")
        if self.policy == "same" and self.custom is None:
            if any(s != 1 for s in self.stride):
                raise OptionError(f"out='same' keeps the coordinates and needs stride 1, found stride {self.stride}")
            centred = _centring(self.kernel, self.dilation)
            if self.padding != centred:
                raise OptionError(
                    f"out='same' centres windows of {self.kernel} by padding {centred}, found {self.padding}; omit "
                    "padding (spconv ignores it there), or use out='support' for other outputs"
                )
        return self

    def shared(self) -> Relation:
        """The interned equal relation, so that dictionary lookups hit by identity."""
        return _first(self)

    @property
    def dim(self) -> int:
        return len(self.stride)

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """The K kernel offsets, added to `stride * out`."""
        if self.custom is not None:
            return self.custom
        taps = itertools.product(*(range(k) for k in self.kernel))
        rule = tuple(zip(self.dilation, self.padding, strict=True))
        return tuple(tuple(d * t - p for t, (d, p) in zip(tap, rule, strict=True)) for tap in taps)

    @cached_property
    def reach(self) -> int:
        """The largest absolute offset along any axis."""
        return max((abs(o) for offset in self.offsets for o in offset), default=0)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The minimum and maximum offset along each axis."""
        axes = zip(*self.offsets, strict=True) if self.offsets else [(0,)] * self.dim
        return tuple((min(axis), max(axis)) for axis in axes)

    @cached_property
    def planes(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the offsets in each plane: for each axis and each value along it."""
        axes = [sorted({offset[axis] for offset in self.offsets}) for axis in range(self.dim)]
        return tuple(
            tuple(k for k, offset in enumerate(self.offsets) if offset[axis] == value)
            for axis, values in enumerate(axes)
            for value in values
        )

    @cached_property
    def mirrored(self) -> bool:
        """True if policy is `same` and offset K-1-k is minus offset k, as in a submanifold window of odd size."""
        ours = self.offsets
        turned = tuple(tuple(-o for o in offset) for offset in reversed(ours))
        return self.policy == "same" and ours == turned

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Output extent for input extent `shape`: same: `shape`; floor_unique: ceil(shape / stride); else dense."""
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
        """A relation of a kernel window.

        Default padding: `dilation * (kernel // 2)`, 0 for even kernels. Default policy: `same` at stride 1; otherwise
        `support` if padding is given, else `floor_unique`. Raises as checked() and as_axes()."""
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
        """The relation `in = stride * out + dilation * offsets[k]`. Raises OptionError for duplicate offsets."""
        spread = as_axes(dilation, dim, "dilation", 1)
        taps = [as_axes(tuple(o), dim, "an offset", -(2**31)) for o in offsets]
        custom = tuple(tuple(a * d for a, d in zip(tap, spread, strict=True)) for tap in taps)
        if len(set(custom)) != len(custom):
            raise OptionError(f"offsets must be distinct, found {len(custom)} with {len(set(custom))} distinct")
        strides, ones = as_axes(stride, dim, "stride", 1), (1,) * dim
        policy = policy or _default_policy(strides, None)
        return Relation(ones, strides, (0,) * dim, ones, policy, custom).checked()

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
    return relation
