"""Calls over a kernel map started again with nothing looked up but what may have changed, and on maps never seen.

The first call over a map leaves a `Direct`, which later calls over the same map with tensors of the same shapes start,
and a `Template`, which makes the `Direct` of a call over another map of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords.chain_tiles import Tiled
from pumice.lower import kernel as kernels
from pumice.lower import stamp
from pumice.lower.epilogue import NO_EPILOGUE, RESIDUAL, EpilogueSignature
from pumice.lower.plan import Plan, deterministic
from pumice.runtime.cache import BoundedCache
from pumice.schedule.tuned_tiles import ledger


def starts_kernels(x: Tensor) -> bool:
    """Whether calls with this tensor are kernels."""
    return x.is_cuda


def told(tensors: Sequence[Tensor], counting: Sequence[bool], *facts: Hashable) -> Hashable:
    """What the launch of a call depends on: the tensors but for their addresses, and what is set for all calls; an
    object of its own, which is the same where all of it is.

    counting: of which tensors the first axis counts rows. How many is left out: a map, or whoever asks, knows it.
    """
    found: list[Hashable] = [facts, *settings()]
    wide, single = False, torch.float32
    for x, counts in zip(tensors, counting, strict=True):
        kind, shape = x.dtype, x.shape
        if kind is single:
            wide = True
        found += (shape[1:] if counts else shape, x.stride(), kind, x.get_device())
    if wide:
        found.append(kernels.float32_precision())
    return interned(tuple(found))


def settings() -> tuple[Hashable, ...]:
    """What is set for all calls, but for how float32 is multiplied."""
    return deterministic(), ledger().generation, kernels.tuning_mode()


def interned(facts: Hashable) -> Hashable:
    """An object of its own, which stands for long facts: they are compared here alone, and not again wherever something
    is kept under it."""
    return _KNOWN.get(facts) or _KNOWN.keep(facts, object())


@lru_cache(maxsize=256)
def counting(finish: EpilogueSignature) -> tuple[bool, ...]:
    """Of features, a weight and the tensors of an epilogue: which count rows."""
    return (True, False, *[name == RESIDUAL for name in finish.names])


def residual_fits(tensors: Sequence[Tensor], finish: EpilogueSignature, shape: tuple[int, ...]) -> bool:
    """Whether the residual among the tensors of a call, whose rows no key tells, has the result's shape."""
    names = finish.names
    # It is the last of all.
    return not names or names[-1] != RESIDUAL or tensors[-1].shape == shape


class Pattern:
    """What the arrays of the maps of one kind have in common: all but how many rows they have. kind: equal where that
    is the same; leads: from row to row."""

    __slots__ = ("kind", "leads")

    def __init__(self, tokens: Sequence[str], arrays: Sequence[Tensor]) -> None:
        strides, places = tuple(x.stride() for x in arrays), [id(x) for x in arrays]
        # Of an array that is there twice, as in a map that is its own transpose, a template knows one place.
        shared = tuple(map(places.index, places))
        each = tuple((x.shape[1:], x.dtype, x.device) for x in arrays)
        self.kind, self.leads = interned((tuple(tokens), each, strides, shared)), [stride[0] for stride in strides]


class Held:
    """The arrays of a map that a call holds. kind: what the choice of a kernel depends on beside sizes, equal where it
    is the same; far: whether one is so long that addresses need 64 bits. rows, addresses: of the arrays; cuts: their
    segments, once they are found."""

    __slots__ = ("_arrays", "addresses", "cuts", "far", "kind", "rows")

    def __init__(
        self, arrays: Sequence[Tensor], pattern: Pattern, rows: Sequence[int], addresses: Sequence[int]
    ) -> None:
        self._arrays, self.rows, self.addresses = arrays, rows, addresses
        self.far = any([n * lead >= kernels.FAR for n, lead in zip(rows, pattern.leads, strict=True)])
        self.kind = pattern.kind
        self.cuts: stamp.Known = {}

    @staticmethod
    def of(arrays: Sequence[Tensor], pattern: Pattern) -> Held:
        return Held(arrays, pattern, [x.shape[0] for x in arrays], [x.data_ptr() for x in arrays])

    @property
    def arrays(self) -> Sequence[Tensor]:
        return self._arrays

    def pieces(self, number: int, ways: stamp.Ways) -> stamp.Cut | None:
        """The segments of an array in pieces, if they are known beforehand."""
        return None


class HeldTiles(Held):
    """Those of tiles that were laid out with others (coords.chain_tiles), without a tensor for each."""

    __slots__ = ("_tiled",)

    def __init__(self, tiled: Tiled, pattern: Pattern) -> None:
        parts = tiled.parts
        super().__init__((), pattern, [part.shape[0] for part in parts], [part.data_ptr() for part in parts])
        self._tiled = tiled

    @property
    def arrays(self) -> Sequence[Tensor]:
        return self._tiled.tiles()

    def pieces(self, number: int, ways: stamp.Ways) -> stamp.Cut | None:
        if number != _TILE_OF_ENTRY or ways.stacked or (ways.laned and not ways.chunk):
            return None
        found = self._tiled.pieces.get(ways.chunk)
        if found is None:
            self._tiled.wanted.add(ways.chunk)
            return None
        return stamp.Cut(found, found.size, dict(zip(_PIECES, found.addresses(), strict=True)))


_TILE_OF_ENTRY = 1
"""Place of the tiles of entries among the arrays of tiles."""
_PIECES = ("rows", "starts", "stops", "firsts", "pieces")


class Direct:
    """A call with its kernel, sizes and held addresses known. places: where its tensors belong among the arguments, and
    which of them."""

    __slots__ = ("aimed", "places", "runner", "shape")

    def __init__(
        self,
        aimed: stamp.Aimed,
        runner: kernels.KernelExecutor,
        shape: tuple[int, ...],
        places: tuple[tuple[int, int], ...],
    ) -> None:
        self.aimed, self.runner, self.shape, self.places = aimed, runner, shape, places

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The result; None where the kernel takes no tensors like these, which nothing but their addresses tells."""
        runner = self.runner
        out = runner.allocate_output(tensors[0], self.shape)
        if not self.aimed.start(tensors, self.places, out):
            return None
        return out if out.dtype is runner.dtype else out.to(runner.dtype)


class Template:
    """What calls over maps of one kind have in common, whatever their sizes are.

    other: the template of the same calls at sizes for which the result is accumulated, or is not, unlike here."""

    __slots__ = ("_family", "_free", "_held", "_known", "_rows", "other", "runner")

    def __init__(
        self,
        family: stamp.TileFamily,
        runner: kernels.KernelExecutor,
        held: Mapping[str, int],
        free: Mapping[str, int],
    ) -> None:
        """held: which array of a map each held operand is; free: which of the call's tensors each other one is."""
        self._family, self.runner, self._held, self._free = family, runner, held, free
        self.other: Template | None = None
        self._known: dict[stamp.Mould, _ArgumentPlaces] = {}
        # The result, an array of the map, or one of the call's tensors.
        self._rows = tuple((0, 0) if not n else (1, held[n]) if n in held else (2, free[n]) for n in family.names)

    def over(self, held: Held, rows: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> Direct | None:
        """The call over another map; rows: as `counted` tells them. None where addresses need 64 bits, and where the
        planner has to choose."""
        if held.far or self.runner.needs_int64(shape):
            return None
        for count, lead in rows:
            # Of the others it is as it was.
            if count * lead >= kernels.FAR:
                return None
        counts = [count for count, _ in rows]
        found = self.at(held, counts, shape)
        return self.other.at(held, counts, shape) if found is None and self.other is not None else found

    def compile(self, held: Held, counts: Sequence[int], shape: tuple[int, ...]) -> None:
        """Compile the kernel of `at` with these."""
        self._family.at(self._sizes(held, counts, shape), waits=True)

    def at(self, held: Held, counts: Sequence[int], shape: tuple[int, ...]) -> Direct | None:
        """The call over a map with tensors of so many rows; shape: of the result."""
        # As `_sizes`, without a call.
        rows = [held.rows[n] if side == 1 else shape[0] if side == 0 else counts[n] for side, n in self._rows]
        mould = self._family.at(rows)
        if mould is None:
            return None
        places, cut = self._known.get(mould) or self._known.setdefault(mould, self._places(mould)), None
        if mould.array is not None:
            number = places.array
            cut = mould.cut_of(held, number, rows)
            if cut is None:
                return None
        addresses = held.addresses
        aimed = mould.cast(places.slots, [addresses[n] for n in places.held], rows, cut)
        return None if aimed is None else Direct(aimed, self.runner, shape, places.free)

    def compilation(
        self, held: Held, rows: Sequence[tuple[int, int]], shape: tuple[int, ...]
    ) -> Callable[[], object] | None:
        """What compiles the kernel of the call `over` another map; None if it is compiled."""
        sizes = self._sizes(held, [count for count, _ in rows], shape)
        return None if self._family.is_compiled(sizes) else partial(self._family.at, sizes, True)

    def _sizes(self, held: Held, counts: Sequence[int], shape: tuple[int, ...]) -> list[int]:
        """Numbers of rows in the order of the family's operands."""
        return [held.rows[n] if side == 1 else shape[0] if side == 0 else counts[n] for side, n in self._rows]

    def _places(self, mould: stamp.Mould) -> _ArgumentPlaces:
        slots = mould.slots(self._held)
        held = tuple(self._held[name] for _, name in slots.held)
        free = tuple((place, self._free[name]) for place, name in slots.free)
        return _ArgumentPlaces(slots, held, free, -1 if mould.array is None else self._held.get(mould.array, -1))


class _ArgumentPlaces(NamedTuple):
    """Where tensors belong among the arguments of a kernel: of held operands which array of the map each is, of the
    others (place, which of the call's tensors); array: which array of the map has its segments."""

    slots: stamp.Slots
    held: tuple[int, ...]
    free: tuple[tuple[int, int], ...]
    array: int


class Call:
    """A call over a map, as others like it are known.

    tensors: those that no map holds; counting: which of them count rows. shape: the result's. kind: what calls have in
    common that one template serves: all but rows.
    """

    __slots__ = ("counting", "kind", "shape", "tensors")

    def __init__(
        self, tensors: Sequence[Tensor], counting: Sequence[bool], shape: tuple[int, ...], kind: Hashable
    ) -> None:
        self.tensors, self.counting, self.shape, self.kind = tensors, counting, shape, kind

    def from_template(self, held: Held) -> Direct | None:
        """The call as one like it was carried out; its tensors fit but for their rows, which are known to."""
        return cast(self.kind, held, counted(self.tensors, self.counting), self.shape)

    def ahead(
        self,
        ready: Plan,
        held: Held,
        tensors: Sequence[Tensor],
        numbers: Sequence[int],
        finish: EpilogueSignature = NO_EPILOGUE,
    ) -> Callable[[], None] | None:
        """Keep the template of a call that has not run, and return what compiles its kernel, for any thread;
        None where there is a template, or the call is not one kernel. tensors, numbers: as for `leave`."""
        if TEMPLATES.get(self.kind) is not None or (finish != NO_EPILOGUE and not ready.applies_epilogue):
            return None
        run, order = _alone(ready), _order(ready, tensors, numbers, finish)
        given = {name: tensors[n] for name, n in order.items()}
        if run is None or run.make_family(given) is None:
            return None
        template = _template(ready, held, given, order)
        if template is None:
            return None
        TEMPLATES.keep(self.kind, template)
        counts = [count for count, _ in counted(self.tensors, self.counting)]
        return partial(template.compile, held, counts, self.shape)

    def leave(
        self,
        ready: Plan,
        held: Held,
        tensors: Sequence[Tensor],
        numbers: Sequence[int],
        finish: EpilogueSignature = NO_EPILOGUE,
    ) -> Direct | None:
        """Keep the template of a call that was carried out; the call for others like it.

        tensors: the call's, with those of the epilogue last; numbers: which of them each one is that `ready` takes.
        """
        if len(ready.steps) != 1 or (finish != NO_EPILOGUE and not ready.applies_epilogue):
            return None
        order = _order(ready, tensors, numbers, finish)
        given = {name: tensors[n] for name, n in order.items()}
        template = _template(ready, held, given, order)
        if template is not None:
            known = TEMPLATES.get(self.kind)
            if known is not None and (known.runner.splits > 1) != (template.runner.splits > 1):
                known.other = template
            else:
                TEMPLATES.keep(self.kind, template)
        return _of_ready(ready, given, order)


def _order(ready: Plan, tensors: Sequence[Tensor], numbers: Sequence[int], finish: EpilogueSignature) -> dict[str, int]:
    """Which of a call's tensors each operand of its first step is, by name, and those of the epilogue."""
    order = {name: numbers[n] for name, n in ready.steps[0].places if n < len(numbers)}
    return order | {name: n for n, name in enumerate(finish.names, len(tensors) - len(finish.names))}


def counted(tensors: Sequence[Tensor], counting: Sequence[bool]) -> list[tuple[int, int]]:
    """How many rows each tensor has, and how far they are apart: 0 where they are as many in all calls of a kind."""
    return [
        (x.shape[0], x.stride(0) if counts else 0) if x.ndim else (0, 0)
        for x, counts in zip(tensors, counting, strict=True)
    ]


def cast(kind: Hashable, held: Held, rows: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> Direct | None:
    """A call as one of this kind (see Call) was carried out, over another map. rows: as `counted` tells them; shape:
    the result's."""
    template = TEMPLATES.get(kind)
    return None if template is None else template.over(held, rows, shape)


def _of_ready(ready: Plan, tensors: Mapping[str, Tensor], order: Mapping[str, int]) -> Direct | None:
    """What a call that was carried out leaves where it is one kernel, which holds all but these tensors.

    order: the places of the tensors, by their names, among those of later calls.
    """
    run = _alone(ready)
    aimed = None if run is None else run.prepared_launch(tensors)
    if run is None or aimed is None:
        return None
    return Direct(aimed, run.like, ready.shape, tuple((place, order[name]) for place, name in aimed.slots.free))


def _template(ready: Plan, held: Held, tensors: Mapping[str, Tensor], order: Mapping[str, int]) -> Template | None:
    """The same for other maps; held: the arrays of the call's own."""
    run, places = _alone(ready), {id(x): n for n, x in enumerate(held.arrays)}
    family = None if run is None or held.far else run.family(tensors)
    if run is None or family is None or not all(id(x) in places for x in run.bound_operands.values()):
        return None
    return Template(family, run.like, {name: places[id(x)] for name, x in run.bound_operands.items()}, order)


def held_by(ready: Plan) -> list[Tensor] | None:
    """The operands that the one kernel of a plan holds; None where it is more than a kernel."""
    run = _alone(ready)
    return None if run is None else [*run.bound_operands.values()]


def _alone(ready: Plan) -> kernels.BoundExecutor | None:
    """The one kernel that a call is."""
    run = ready.steps[0].run if len(ready.steps) == 1 else None
    return run if isinstance(run, kernels.BoundExecutor) and run.like.dtype == ready.dtype else None


TEMPLATES: BoundedCache[Template] = BoundedCache(2048)
_KNOWN: BoundedCache[object] = BoundedCache(1 << 14)
