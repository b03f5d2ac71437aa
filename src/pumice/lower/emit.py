"""Code generator: a statement of one term becomes the source of one Triton kernel.

    gather in the load, product (or dot) in registers, scatter in the store

A program computes a tile of results, rows x columns, and iterates over the reductions in one flat loop. Index tensors
have only the axes they depend on, and are broadcast only where an address or a mask needs two: nothing is reshaped or
transposed before the dot ("lazy broadcasting", Insum section 5). lower/graph.py does the same in plain torch.

`Signature` is the specialisation key of the source; sizes are arguments, so all sizes share a kernel.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pumice.errors import OptionError
from pumice.language.contraction import ContractionRoles, NestedProduct
from pumice.language.nodes import Access, Affine, Index, Statement, accesses_of, arrays_of, index, indices_of
from pumice.lower.epilogue import ACTIVATIONS, MEAN, RESIDUAL, SCALE, SHIFT, VARIANCE

FLOATS = {
    "fp8": "tl.float8e4nv",
    "fp16": "tl.float16",
    "bf16": "tl.bfloat16",
    "fp32": "tl.float32",
    "fp64": "tl.float64",
}
INTEGERS = {"i32": "tl.int32", "i64": "tl.int64"}
_LISTED = 4096  # points of a group of which a program reads all indices, to know how many there are
SMALL = {"i8": "tl.int8", **{name: FLOATS[name] for name in ("fp8", "fp16", "bf16")}}
"""Dtypes whose products tensor cores compute exactly."""


@dataclass(frozen=True)
class Signature:
    """Specialisation key of a kernel's source, besides the statement and its roles.

    dtypes: of the operands and of the result (under ""), by name: fp8, fp16, bf16, fp32, fp64, i8, i32, i64.
    unit: (operand, axis) whose stride is 1.  int64_operands: those that need 64-bit addresses.
    int64_expressions: index expressions whose values need 64 bits.
    static: compile-time extents.  starts: first values of declared ranges.
    strides: compile-time (operand, axis, stride) of packed operands; they determine the width of loads.
    even: the tile axes out of "Y", "R" and "X" whose extent is divisible by the tile.
    single_iteration: one tile covers the reduction.
    split_float32: float32 products are written out as three tf32 products (see _Emitter._halves).
    parts: the right side of a float32 product is stored in so many parts (lower.parts); 0: whole, as other operands.
    in_tf32: "x" if the left side of a product with such a right side needs no rounding, "y" if the result is rounded.
    segment_threads: rows of the tile that share one segment, if segments are the rows.
    slow_axis: the axis, "X" or "Y", of which all others are processed for one block before the next; "": none.
    splits: split-K: several programs share the loop of one tile and accumulate by atomics.
    accumulate: the earlier result (BEFORE, in the layout of the result) is added.
    prefetch_indices: index arrays that are read in the loop are loaded two iterations ahead.
    stream_k: several programs may share a segment; the last one adds up the partial sums.
    epilogue_subtiles: number of column slices that are finished and stored one after another.
    hoisted: loop-invariant address arithmetic is hoisted out of the loop.
    padded: index arrays over rows are padded with -1, so the number of valid rows is not checked.
    lazy: sides of a product are loaded with the axes they depend on; otherwise with an axis for each of rows, columns
    and reduction, and reshaped and transposed for the product ("eager broadcasting", Insum section 5.2.3).
    activation, eps: of the epilogue (lower.epilogue), whose tensors are operands of their names.
    """

    dtypes: tuple[tuple[str, str], ...]
    unit: frozenset[tuple[str, int]] = frozenset()
    int64_operands: frozenset[str] = frozenset()
    int64_expressions: frozenset[Affine] = frozenset()
    static: tuple[tuple[str, int], ...] = ()
    starts: tuple[tuple[str, int], ...] = ()
    strides: tuple[tuple[str, int, int], ...] = ()
    even: str = ""
    single_iteration: bool = False
    split_float32: bool = False
    parts: int = 0
    in_tf32: str = ""
    segment_threads: int = 1
    slow_axis: str = ""
    splits: bool = False
    accumulate: bool = False
    prefetch_indices: bool = False
    stream_k: bool = False
    epilogue_subtiles: int = 1
    hoisted: bool = True
    padded: bool = True
    lazy: bool = True
    activation: str = ""
    eps: float = 0.0


@dataclass(frozen=True)
class Argument:
    """An argument of a kernel.

    kind: "result", "before" (earlier result), "operand", "segment" (rows, starts, stops, ends, firsts, pieces),
    "room" (partial sums of shared segments), "waiting" (counters of finished programs), "extent" of an index, "size" or
    "stride" of an axis of an operand, "zero" (the number 0), or "constant" (constexpr).
    """

    kind: str
    variable: str
    name: str = ""
    axis: int = 0


@dataclass(frozen=True)
class Source:
    """The text of a kernel, its name, and its arguments in order."""

    name: str
    text: str
    arguments: tuple[Argument, ...]
    specialised: tuple[int, ...] = ()
    """Positions of the size arguments on whose divisibility by 16 the kernel is specialised."""


@dataclass(frozen=True)
class Value:
    """An expression of the source and its tile axes, at most two of "YJERX".

    J is the reduction of a product within the left side (language.contraction.NestedProduct), E the entries of a
    segment that are packed along R (language.contraction.packed).
    """

    code: str
    axes: str = ""
    test: str = ""

    def at(self, axes: str) -> str:
        """Code of the expression, broadcastable to `axes`, compared by `test` if there is one."""
        code = self.code
        if len(self.axes) == 1 and len(axes) == 2:
            code = f"{code}[:, None]" if axes[0] == self.axes else f"{code}[None, :]"
        return f"({code} {self.test})" if self.test else code

    @property
    def spread(self) -> str:
        """Code of the expression with an axis for each of rows, columns and reduction, of size 1 if it lacks it."""
        code = f"tl.trans({self.code})" if self.axes == "RX" else self.code
        if self.axes:
            code = f"{code}[{', '.join(':' if axis in self.axes else 'None' for axis in 'YXR')}]"
        return f"({code} {self.test})" if self.test else code


def emit(statement: Statement, roles: ContractionRoles, signature: Signature) -> Source:
    """Generate the kernel of a statement with one term. Raises OptionError if it is not supported."""
    return _Emitter(statement, roles, signature).source()


def depth_of_entry(roles: ContractionRoles, extents: Mapping[str, int]) -> int:
    """Points of the reduction axis per packed entry: its extent rounded up to a power of two."""
    (name,) = roles.reduced
    return 1 << (extents[name] - 1).bit_length()


def contiguous(statement: Statement, unit: frozenset[tuple[str, int]]) -> set[str]:
    """The indices that address an axis of stride 1."""
    accesses = (replace(statement.target, name=""), *accesses_of(*statement.terms, *statement.target.indices))
    found = set()
    for access in accesses:
        for axis, expression in enumerate(access.indices):
            if (access.name, axis) in unit:
                found.update(atom.name for _, atom in expression.terms if isinstance(atom, Index))
    return found


def _leads(roles: ContractionRoles) -> bool:
    """True if the first index of the rows is the first axis of the result."""
    return bool(roles.rows and roles.target.indices) and roles.target.indices[0].bare == roles.rows[0]


def _loading(where: str, mask: str, integer: bool) -> str:
    """Code of a load; masked values are 0, or -1 for integers."""
    return f"tl.load({where}, mask={mask}, other={'-1' if integer else '0.0'})" if mask else f"tl.load({where})"


def _times(coefficient: int, code: str) -> str:
    return code if coefficient == 1 else f"{coefficient} * {code}"


FARTHEST = 1 << 61
"""Largest summand of a 64-bit index expression; subtrahends are clamped to it, and so stay out of bounds."""


def _in_64_bits(code: str, coefficient: int) -> str:
    code = f"tl.cast({code}, tl.int64)"
    return f"tl.minimum({code}, {FARTHEST // -coefficient})" if coefficient < 0 else code


def _joined(axes: str) -> str:
    """The distinct axes, in the order of the tile."""
    return "".join(axis for axis in "YJERX" if axis in axes)


@dataclass
class _Emitter:
    statement: Statement
    roles: ContractionRoles
    signature: Signature
    head: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    bases: dict[str, str] = field(default_factory=dict)
    loads: dict[str, tuple[list[str], str]] = field(default_factory=dict)
    turn: list[str] = field(default_factory=list)
    ahead: list[tuple[str, str, str, str]] = field(default_factory=list)
    entry: tuple[str, str] = ("", "")
    affine: tuple[Value | None, Value | None] | None = None
    arguments: dict[tuple[str, str, int], Argument] = field(default_factory=dict)
    number: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.static = dict(self.signature.static)
        self.starts = dict(self.signature.starts)
        self.strides = {(name, axis): stride for name, axis, stride in self.signature.strides}
        self.dtypes = dict(self.signature.dtypes)
        segment = self.roles.segment
        self.position = segment.position if segment else None
        self.turning = {*self.roles.loops, *self.roles.reduced, *([self.position] if self.position else [])}
        self.even = self.signature.even
        self.turned = self.roles.folds and not self.roles.product
        if self.turned:
            self.turning.update(self.roles.columns)
        taken_off = ((c, atom) for expression in self.signature.int64_expressions for c, atom in expression.terms)
        self.long = {atom.name for c, atom in taken_off if c < 0 and isinstance(atom, Access)}
        self.compute = ""
        self.accumulator = self.summed = "tl.float64" if "fp64" in self.dtypes.values() else "tl.float32"
        # Loop invariants are loaded before the loop.
        self.fixed = set(self.roles.reduced) if self.signature.single_iteration else set[str]()
        if self.roles.within:
            self.fixed.update((self.roles.within.shared, *self.roles.within.summed))
            self.turning.update(self.fixed)

    # The frame of the kernel

    def source(self) -> Source:
        self._check()
        self._programs()
        inner, outer = self._split_factors()
        product = self._product(inner) if inner else None
        self._loop(product)
        self._store(outer, inner != [])
        # Written-out products fix their precision.
        precise = [] if self.signature.split_float32 or self.signature.parts else ["PRECISION"]
        own = ["BR", *precise] if self.roles.product else ["STAGES"] if inner else []
        constants = ["BY", "BX", *own, *self._loop_constants()]
        arguments = (
            *sorted(self.arguments.values(), key=lambda a: _ORDER.index(a.kind)),
            *(Argument("constant", name) for name in constants),
        )
        name = f"_{'dot' if self.roles.product else 'mul'}_{self.dtypes['']}"
        return Source(name, self._text(name, arguments), arguments, self._specialised(arguments))

    def _check(self) -> None:
        signature, roles = self.signature, self.roles
        owned = roles.segment is not None and not roles.laned and not roles.stacked
        if signature.epilogue_subtiles > 1 and (not roles.product or roles.folds or roles.laned or roles.stacked):
            raise OptionError("epilogue_subtiles > 1 requires a matrix product that is not folded, laned or stacked")
        if signature.stream_k and not owned:
            raise OptionError("stream_k_chunk > 0 requires a segmented product whose rows are not the segments")
        if signature.slow_axis == "Y" and (roles.laned or roles.stacked):
            raise OptionError("a swapped tile with column_major_grid requires rows that are not segments")
        if (roles.stacked or roles.packed) and not (signature.hoisted and signature.padded):
            raise OptionError("stacked and packed tiles require hoisted=True and padded=True")
        if not signature.lazy and (not roles.product or roles.within or roles.stacked or roles.packed):
            raise OptionError("lazy=False requires a matrix product that is not nested, stacked or packed")
        if not signature.padded and not (owned and len(roles.rows) == 1):
            raise OptionError("padded=False requires tiles whose rows are the points of one segment")
        if signature.parts and (not roles.product or roles.within or not signature.lazy or len(roles.right) != 1):
            raise OptionError("a stored side is the right side of a matrix product, alone")

    def _text(self, name: str, arguments: Sequence[Argument]) -> str:
        signature = ", ".join(a.variable + (": tl.constexpr" if a.kind == "constant" else "") for a in arguments)
        legend = "\n".join(
            f"    {a.variable}: {a.kind} {a.name}{f' axis {a.axis}' if a.kind in ('size', 'stride') else ''}"
            for a in arguments
            if a.kind != "constant"
        )
        lines = "\n".join(f"    {line}" if line else "" for line in self.head)
        special = self._specialised(arguments)
        sizes = [(n, a.variable) for n, a in enumerate(arguments) if a.kind in ("size", "zero", "extent")]
        decorator = f"@triton.jit(do_not_specialize={[variable for n, variable in sizes if n not in special]})"
        return (
            '"""Written by pumice.lower.emit."""\n\nimport triton\nimport triton.language as tl\n\n\n'
            f'{decorator}\ndef {name}({signature}):\n    """{_doc(self.statement)}\n\n{legend}\n    """\n{lines}\n'
        )

    def _specialised(self, arguments: Sequence[Argument]) -> tuple[int, ...]:
        """Positions of extents that mask contiguous elements: loads are vectorised if these are divisible by 16. Batch
        indices are scalars in a program, and other sizes must not cause recompilation."""
        along = contiguous(self.statement, self.signature.unit).difference(self.roles.batch)
        return tuple(n for n, a in enumerate(arguments) if a.kind == "extent" and a.name in along)

    def _programs(self) -> None:
        """Emit the indices of the program's tile of results."""
        roles, head = self.roles, self.head
        head.append("rest = tl.program_id(0)")
        if self.signature.slow_axis and not self.turned:
            head += self._slow_axis()
        if self.signature.stream_k:
            head.append("unit = rest")
        self._axis("X", roles.columns, "fold" if self.turned else "rest")
        lanes = self._lane_rows() or self._stacked_rows()
        # If the rows lead the result, the batch entries of a row are close in memory: process them together.
        together = not roles.product and roles.segment is None and _leads(roles)
        if not lanes and not together:
            self._axis("Y", roles.rows, "rest")
        for name in reversed(roles.batch):
            if roles.segment and name == roles.segment.index:
                continue
            self._define(name, f"rest % {self._extent(name)}", "")
            head.append(f"rest = rest // {self._extent(name)}")
        if together:
            self._axis("Y", roles.rows, "rest")
        if self.signature.splits:
            head += [f"split = rest % {self._argument('extent', SPLITS)}", f"rest = rest // {self._extent(SPLITS)}"]
        if roles.segment and not lanes:
            rows, starts, stops = (self._segment(part) for part in ("rows", "starts", "stops"))
            self._define(roles.segment.index, f"tl.load({rows} + rest)", "")
            if self.signature.stream_k:
                head.append("item = rest")
            head += [f"start = tl.load({starts} + rest)", f"stop = tl.load({stops} + rest)"]

    def _slow_axis(self) -> list[str]:
        """Lines that make the block along the slow axis the slowest digit of the program id."""
        blocks_x = f"blocks_x = tl.cdiv({self._volume(self.roles.columns)}, BX)"
        if self.signature.slow_axis == "X":
            return [
                blocks_x,
                "others = tl.num_programs(0) // blocks_x",
                "rest = rest % others * blocks_x + rest // others",
            ]
        return [
            blocks_x,
            f"blocks_y = tl.cdiv({self._volume(self.roles.rows)}, BY)",
            "others = tl.num_programs(0) // blocks_y",
            "block, other = rest // others, rest % others",
            "rest = other % blocks_x + blocks_x * (block + blocks_y * (other // blocks_x))",
        ]

    def _stacked_rows(self) -> bool:
        """If stacked: emit rows that are consecutive segments, whose entries one loop reduces; return True."""
        segment, head = self.roles.segment, self.head
        if segment is None or not self.roles.stacked:
            return False
        rows, starts, stops, ends = (self._segment(part) for part in ("rows", "starts", "stops", "ends"))
        head += [
            f"block = rest % {self._argument('extent', STACKS)}",
            f"rest = rest // {self._extent(STACKS)}",
            f"first_row = tl.load({rows} + block)",
            "row = first_row + tl.arange(0, BY)",
            f"in_y = row < tl.load({ends} + block)",
            f"start = tl.load({starts} + block)",
            f"entries = (tl.load({stops} + block) - start) * {self._volume(self.roles.reduced[1:])}",
        ]
        self.values[segment.index] = Value("row", "Y")
        return True

    def _lane_rows(self) -> bool:
        """If segments are the rows: emit rows, `segment_threads` of which share a segment's entries; return True."""
        segment = self.roles.segment
        if segment is None or not self.roles.laned:
            return False
        lanes, head = self.signature.segment_threads, self.head
        rows, starts, stops = (self._segment(part) for part in ("rows", "starts", "stops"))
        count = self._argument("extent", segment.index)
        head += [
            f"blocks_y = tl.cdiv({count}, BY // {lanes})",
            "block = rest % blocks_y",
            "rest = rest // blocks_y",
            f"lane = block * BY + tl.arange(0, BY)  # row * {lanes} + lane",
            f"row = lane // {lanes}",
            f"start = tl.load({starts} + row, mask=row < {count}, other=0) + lane % {lanes}",
            f"stop = tl.load({stops} + row, mask=row < {count}, other=0)",
            f"turns = tl.max(tl.cdiv(tl.maximum(stop - start + lane % {lanes}, 0), {lanes}), 0)",
            f"row = block * (BY // {lanes}) + tl.arange(0, BY // {lanes})",
        ]
        owner = Value(f"tl.load({rows} + row, mask=row < {count}, other=-1)", "Y")
        self.values[segment.index] = self._named("s", owner, self.head)
        return True

    def _axis(self, axis: str, names: Sequence[str], program: str) -> None:
        """Emit the points of the indices along an axis of the tile."""
        total = self._volume(names)
        block, points = f"B{axis}", axis.lower()
        if program == "rest":
            self.head += [f"blocks_{points} = tl.cdiv({total}, {block})"]
            self.head += [f"{points} = rest % blocks_{points} * {block} + tl.arange(0, {block})"]
            if axis == "X" and self.signature.epilogue_subtiles > 1:
                self.head.append("first_x = rest % blocks_x * BX")
            self.head += [f"rest = rest // blocks_{points}"]
            self._points(axis, names, self.head)

    def _points(self, axis: str, names: Sequence[str], lines: list[str]) -> None:
        """Emit each index from the point along the axis; the last index is the fastest."""
        points = axis.lower()
        if axis not in self.signature.even:
            lines.append(f"in_{points} = {points} < {self._volume(names)}")
        rest = points
        for place, name in enumerate(reversed(names)):
            code = rest if place == len(names) - 1 else f"{rest} % {self._extent(name)}"
            self._define(name, code, axis, lines)
            rest = f"({rest} // {self._extent(name)})"

    def _define(self, name: str, code: str, axes: str, lines: list[str] | None = None) -> None:
        start = self.starts.get(name, 0)
        value = Value(f"{code} + {start}" if start else code, axes)
        self.values[name] = self._named("i", value, self.head if lines is None else lines)

    def _named(self, letter: str, value: Value, lines: list[str]) -> Value:
        name = f"{letter}{next(self.number)}"
        lines.append(f"{name} = {value.code}")
        return Value(name, value.axes)

    # The loop

    def _split_factors(self) -> tuple[list[int], list[int]]:
        """(positions of the factors inside the loop, of those multiplied once after it)."""
        inner, outer = [], []
        for place, factor in enumerate(self.statement.terms[0].factors):
            if not isinstance(factor, Access):
                raise OptionError(f"kernels do not support the condition {factor}")
            (inner if self.turning & set(indices_of(factor)) else outer).append(place)
        return inner, outer

    def _product(self, inner: Sequence[int]) -> str:
        """Emit the loop body (loads and one product); return the code of the new accumulator."""
        roles = self.roles
        self._turn()
        self.turn = list(self.body)
        if not roles.product:
            return f"accumulator + {self._multiplied(inner, 'YX').at('YX')}"
        self.compute = compute = self._compute_dtype(inner)
        if compute == "tl.int8":
            self.summed = "tl.int32"
        if roles.within:
            left = self._left_product(roles.within, inner, compute)
        else:
            left = self._multiplied([place for place in roles.left if place in inner], "YR")
        right = self._multiplied([place for place in roles.right if place in inner], "RX")
        if roles.stacked:
            owner = self._load_owner()
            self.entry = owner.code, " * ".join(f"({v.at('RX')}).to({self.accumulator})" for v in (left, right))
            code = f"tl.where({owner.at('YR')} == row[:, None], {left.at('YR')}, 0.0)"
            left = self._named("m", Value(code, "YR"), self.body)
        a, b = self._side(left, "YR", compute), self._side(right, "RX", compute)
        if self.signature.parts:
            return self._stored_product(a, right)
        if not self.signature.split_float32:
            a, b = self._rounded(a, compute), self._rounded(b, compute)
            return f"tl.dot({a}, {b}, accumulator, {self._how(compute)})"
        (a, low_a), (b, low_b) = self._halves(a), self._halves(b)
        # Remainders have their own accumulator, so that NaNs are filtered once, after the loop.
        self.body += [
            f"small = tl.dot({low_a}, {b}, small, input_precision='tf32')",
            f"small = tl.dot({a}, {low_b}, small, input_precision='tf32')",
        ]
        return f"tl.dot({a}, {b}, accumulator, input_precision='tf32')"

    def _stored_product(self, a: str, right: Value) -> str:
        """The product with a right side that is stored in parts (lower.parts): nothing of it is computed here."""
        whole, b = self._named("f", Value(a), self.body).code, right.at("RX")
        if self.signature.parts == 1:
            # Raised by about half of what is cut off: within 6 % as exact as rounding, in a third of the instructions,
            # and exact for tf32. Not if packed: it prevents pipelining.
            raised = _CUT.format(f"({whole} * {_RAISED!r}).to(tl.int32, bitcast=True)")
            as_it_is = self.roles.packed or "x" in self.signature.in_tf32
            a = whole if as_it_is else self._named("f", Value(raised), self.body).code
            return f"tl.dot({a}, {b}, accumulator, input_precision='tf32')"
        left, right_parts = self._thirds(whole), [b, self._part(right, 1), self._part(right, 2)]
        # As in _product, remainders have their own accumulator.
        for m, n in ((0, 2), (1, 1), (2, 0), (0, 1), (1, 0)):
            self.body.append(f"small = tl.dot({left[m]}, {right_parts[n]}, small)")
        return f"tl.dot({left[0]}, {b}, accumulator)"

    def _thirds(self, whole: str) -> list[str]:
        """Cut float32 into three parts of 8 bits, as bfloat16."""
        found = []
        for _ in range(2):
            high = Value(f"({whole}.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)")
            high = self._named("f", high, self.body).code
            found.append(high)
            whole = self._named("f", Value(f"{whole} - {high}"), self.body).code
        return [self._named("h", Value(f"{part}.to(tl.bfloat16)"), self.body).code for part in (*found, whole)]

    def _part(self, first: Value, number: int) -> str:
        """Load a part of the stored side; the parts lie one behind another. first: its first part."""
        access = self._factor(self.roles.right[0])
        size = self._scaled(access.name, 0, self._extent(str(access.indices[0].bare)))
        (pointer, *places), mask = self.loads[first.code]
        where = " + ".join((pointer, f"{number} * {size}", *places))
        return self._named("v", Value(_loading(where, mask, False)), self.body).code

    def _how(self, compute: str) -> str:
        """The precision arguments of tl.dot."""
        if compute == FLOATS["fp8"]:
            # Hopper's tensor cores accumulate fp8 in fewer bits than float32: limit that to one iteration.
            return "input_precision=PRECISION, max_num_imprecise_acc=BR"
        kind = f"out_dtype={self.summed}, " if compute in ("tl.float64", "tl.int8") else ""
        return f"{kind}input_precision=PRECISION"

    def _side(self, value: Value, axes: str, compute: str) -> str:
        """Code of a value as an operand of tl.dot."""
        code = value.at(axes)
        if value.axes != axes:
            sides = {"J": str(self._depth_within()), **{axis: f"B{axis}" for axis in "YRX"}}
            code = f"tl.broadcast_to({code}, ({sides[axes[0]]}, {sides[axes[1]]}))"
        return f"({code}).to({compute})"

    # A product within the left side

    def _left_product(self, within: NestedProduct, inner: Sequence[int], compute: str) -> Value:
        """The left side, itself a matrix product whose reduction fits one tile."""
        extent = self.static[within.shared]
        self.head.append(f"j = tl.arange(0, {self._depth_within()})")
        if extent == self._depth_within():
            self.even += "J"
        else:
            self.head.append(f"in_j = j < {extent}")
        self._define(within.shared, "j", "J")
        sides = [
            self._side(self._written_out([place for place in places if place in inner], within, axes), axes, compute)
            for places, axes in ((within.left, "YJ"), (within.right, "JR"))
        ]
        if not self.signature.split_float32:
            return self._named("m", Value(f"tl.dot({sides[0]}, {sides[1]}, {self._how(compute)})", "YR"), self.body)
        (a, low_a), (b, low_b) = self._halves(sides[0]), self._halves(sides[1])
        self.body += [
            f"between = tl.dot({low_a}, {b}, input_precision='tf32')",
            f"between = tl.dot({a}, {low_b}, between, input_precision='tf32')",
            "between = tl.where(between == between, between, 0.0)",
        ]
        return self._named("m", Value(f"tl.dot({a}, {b}, between, input_precision='tf32')", "YR"), self.body)

    def _rounded(self, code: str, compute: str) -> str:
        """Round float32 to tf32: tensor cores truncate (2.6x the error). Not if packed: it prevents pipelining."""
        if compute != "tl.float32" or self.roles.packed:
            return code
        whole = self._named("f", Value(code), self.body).code
        nearest = f"{_NEAREST.format(whole)} if PRECISION == 'tf32' else {whole}"
        return self._named("f", Value(nearest), self.body).code

    def _halves(self, code: str) -> tuple[str, str]:
        """Split float32 into its tf32 part and the remainder.

        This truncates; Triton's tf32x3 rounds, with twice as many instructions as the products have. The remainder of
        an infinity is NaN; NaN sums of remainders are dropped.
        """
        whole = self._named("f", Value(code), self.body).code
        high = Value(_CUT.format(f"{whole}.to(tl.int32, bitcast=True)"))
        high = self._named("f", high, self.body).code
        return high, self._named("f", Value(f"{whole} - {high}"), self.body).code

    def _depth_within(self) -> int:
        """Tile depth of the inner product's reduction; tensor cores need at least 16."""
        within = self.roles.within
        return max(16, 1 << (self.static[within.shared] - 1).bit_length()) if within else 0

    def _written_out(self, places: Sequence[int], within: NestedProduct, axes: str) -> Value:
        """The product of factors, summed over their short reductions by unrolling."""
        read = set(indices_of(*(self._factor(place) for place in places)))
        names = [name for name in within.summed if name in read]
        found: list[Value] = []
        for point in itertools.product(*(range(self.static[name]) for name in names)):
            for name, value in zip(names, point, strict=True):
                self.values[name] = Value(str(value + self.starts.get(name, 0)))
            found.append(self._multiplied(places, axes))
        if len(found) == 1:
            return found[0]
        joined = _joined("".join(value.axes for value in found))
        return self._named("m", Value(" + ".join(value.at(joined) for value in found), joined), self.body)

    def _load_owner(self) -> Value:
        segment = self.roles.segment
        assert segment is not None
        return self._load(Access(segment.array, (index(segment.position),)), "R")

    def _one_by_one(self) -> list[str]:
        """Recompute a stack row by row if a sum is not finite: the product multiplied inf and NaN by 0."""
        owner, product = self.entry
        loads = [f"{name} = {_loading(where, mask, True)}{cast}" for name, where, mask, cast in self.ahead]
        turn = len(self.turn)
        return [
            "if tl.max(tl.max((accumulator - accumulator != 0).to(tl.int32), 1), 0) > 0:",
            f"    accumulator = tl.zeros((BY, BX), dtype={self.accumulator})",
            "    for turn in tl.range(0, tl.cdiv(entries, BR)):",
            *(f"        {line}" for line in (*self.body[:turn], *loads, *self.body[turn:])),
            "        for y in tl.range(0, BY):",
            f"            mine = {owner} == first_row + y",
            f"            found = tl.sum(tl.where(mine[:, None], {product}, 0.0), 0)",
            "            accumulator += tl.where((tl.arange(0, BY) == y)[:, None], found[None, :], 0.0)",
        ]

    def _compute_dtype(self, inner: Sequence[int]) -> str:
        factors = self.statement.terms[0].factors
        kinds = {self.dtypes[f.name] for f in (factors[place] for place in inner) if isinstance(f, Access)}
        if "fp64" in self.dtypes.values():
            return "tl.float64"
        if self.roles.within:
            # The inner product is not rounded to half precision.
            return "tl.float32"
        return SMALL.get(next(iter(kinds)), "tl.float32") if len(kinds) == 1 else "tl.float32"

    def _multiplied(self, places: Sequence[int], axes: str) -> Value:
        """Load each factor over its own axes, and multiply them."""
        loaded = [self._load(self._factor(place), axes) for place in places]
        if len(loaded) == 1 and self.roles.product:
            return loaded[0]
        if not loaded:
            return Value("1.0")
        joined = _joined("".join(value.axes for value in loaded))
        code = " * ".join(f"({value.at(joined)}).to({self.accumulator})" for value in loaded)
        return self._named("m", Value(code, joined), self.body)

    def _factor(self, place: int) -> Access:
        factor = self.statement.terms[0].factors[place]
        assert isinstance(factor, Access)
        return factor

    def _turn(self) -> None:
        """Emit every reduction index from the iteration number."""
        roles, body = self.roles, self.body
        if roles.stacked:
            self._entries()
            return
        if roles.packed:
            self._pack()
            return
        body.append("rest = turn")
        if not (self.signature.hoisted and self.signature.padded):
            # Always 0, but opaque to the compiler, which only knows that it is divisible by 16: prevents hoisting.
            body.append(f"shift = (turn & {self._argument('zero', '')}) * 16")
        if self.turned:
            body += ["x = rest % BLOCKS * BX + tl.arange(0, BX)", "rest = rest // BLOCKS"]
            self._points("X", roles.columns, body)
        if roles.product:
            self._reduced(roles.reduced)
        for name in reversed([name for name in roles.loops if name != self.position]):
            self._define(name, f"rest % {self._extent(name)}", "", body)
            body.append(f"rest = rest // {self._extent(name)}")
        if self.position is None:
            return
        if self.roles.laned:
            body.append(f"p = start + rest * {self.signature.segment_threads}")
            body.append("in_p = p < stop")
            self.values[self.position] = Value("p", "Y")
        else:
            self._define(self.position, "start + rest", "", body)

    def _reduced(self, names: Sequence[str]) -> None:
        """Emit the points of the reduction; a single index as base plus ramp, to hoist address arithmetic."""
        if self.signature.single_iteration:
            self.head.append("r = tl.arange(0, BR)")
            self._points("R", names, self.head)
            return
        body = self.body
        if len(names) != 1:
            body += ["r = rest % BLOCKS * BR + tl.arange(0, BR)", "rest = rest // BLOCKS"]
            self._points("R", names, body)
            return
        (name,) = names
        start = self.starts.get(name, 0)
        self.head.append("ramp = tl.arange(0, BR)")
        body += ["first = rest % BLOCKS * BR", "rest = rest // BLOCKS"]
        if "R" not in self.signature.even:
            body.append(f"in_r = first + ramp < {self._extent(name)}")
        self.bases[name] = f"(first + {start})" if start else "first"
        self.values[name] = Value("ramp", "R")

    def _entries(self) -> None:
        """Emit the entries of a stack of segments, BR per iteration."""
        position, *inner = self.roles.reduced
        self.body += ["r = turn * BR + tl.arange(0, BR)", "in_r = r < entries"]
        rest = "r"
        for name in reversed(inner):
            self._define(name, f"{rest} % {self._extent(name)}", "R", self.body)
            rest = f"({rest} // {self._extent(name)})"
        self._define(position, f"start + {rest}", "R", self.body)

    def _pack(self) -> None:
        """Emit the segment's entries of an iteration, as many as fit in BR with all of their points."""
        (name,) = self.roles.reduced
        deep = depth_of_entry(self.roles, self.static)
        self.head += [f"PACK: tl.constexpr = BR // {deep}", f"r = tl.arange(0, BR) % {deep}"]
        self._points("R", [name], self.head)
        self.body += ["e = start + turn * PACK + tl.arange(0, PACK)", "in_e = e < stop"]
        assert self.position is not None
        self._define(self.position, "e", "E", self.body)

    def _loop_constants(self) -> list[str]:
        if self.roles.stacked or self.roles.packed:
            return []
        tiled = self.roles.product or self.turned
        names = self.roles.reduced if self.roles.product else self.roles.columns
        if self.signature.single_iteration:
            return []
        return ["BLOCKS"] if tiled and all(name in self.static for name in names) else []

    def _loop(self, product: str | None) -> None:
        head = self.head
        if product is None:
            return
        head.append(f"accumulator = tl.zeros((BY, BX), dtype={self.summed})")
        apart = self.signature.split_float32 or self.signature.parts > 1
        if apart:
            head.append(f"small = tl.zeros((BY, BX), dtype={self.accumulator})")
        turns = [self._extent(name) for name in self.roles.loops if name != self.position]
        if self.roles.stacked:
            turns = ["tl.cdiv(entries, BR)"]
        elif self.roles.packed:
            turns = ["tl.cdiv(stop - start, PACK)"]
        elif self.roles.product or self.turned:
            names, block = (self.roles.reduced, "BR") if self.roles.product else (self.roles.columns, "BX")
            if not self.signature.single_iteration:
                turns.append("BLOCKS")
                if not self._loop_constants():
                    head.append(f"BLOCKS = tl.cdiv({self._volume(names)}, {block})")
        if self.position is not None and not (self.roles.stacked or self.roles.packed):
            turns.insert(0, "turns" if self.roles.laned else "(stop - start)")
        # Triton pipelines loops with a dot by itself, others only with num_stages.
        ahead = "" if self.roles.product else ", num_stages=STAGES"
        first, last = "0", " * ".join(turns) or "1"
        if self.signature.splits:
            head += [
                f"share = tl.cdiv({last}, {self._extent(SPLITS)})",
                f"last = tl.minimum({last}, (split + 1) * share)",
            ]
            first, last = "split * share", "last"
        self._early()
        last = self._until(last)
        if self.ahead:
            head.append(f"end = {last}")
            head += [*self._indices(first, ""), *self._indices(f"{first} + 1", "_next")]
        head.append(f"for turn in tl.range({first}, {last}{ahead}):")
        head += [f"    {line}" for line in (*self.body, f"accumulator = {product}", *self._moved())]
        if apart:
            head.append("accumulator += tl.where(small == small, small, 0.0)")
        if self.roles.stacked:
            head += self._one_by_one()
        if self.summed != self.accumulator:
            head.append(f"accumulator = accumulator.to({self.accumulator})")
        if self.signature.stream_k:
            head += self._pieces()
        self.body = []

    def _until(self, last: str) -> str:
        """The end of the loop: 0 if a negative index shows that the program has no results."""
        if not self.roles.atomic:
            return last
        arrays = (array for expression in self.roles.target.indices for array in expression.arrays)
        valid = [f"({self._load(a, 'YX').code} >= 0)" for a in arrays if set(indices_of(a)) <= set(self.roles.batch)]
        if valid:
            self.head.append(f"until = tl.where({' & '.join(valid)}, {last}, 0)")
            last = "until"
        return self._until_last_point(last)

    def _until_last_point(self, last: str) -> str:
        """The end of the loop over one index: behind the last point that an index array does not mark absent, since
        groups of pairs are padded with -1."""
        roles, points = self.roles, self.roles.reduced
        if self.signature.splits or self.signature.single_iteration or roles.loops or len(points) != 1:
            return last
        (name,), extent = points, self.static.get(points[0], 0)
        listed = [a for a in arrays_of(*self.statement.terms) if {name} <= set(indices_of(a)) <= {name, *roles.batch}]
        if not listed or not 0 < extent <= _LISTED or not all(e.bare for e in listed[0].indices):
            return last
        every = 1 << (extent - 1).bit_length()
        self.head += [f"every = tl.arange(0, {every})", f"in_e = every < {extent}"]
        known = self.values[name], self.bases.pop(name, None)
        self.values[name] = Value("every", "E")
        pointer, _ = self._address(listed[0], self._operand(listed[0].name), self.head)
        self.values[name] = known[0]
        if known[1] is not None:
            self.bases[name] = known[1]
        where = " + ".join([self._operand(listed[0].name), *(value.code for value in pointer)])
        self.head += [
            f"present = {_loading(where, 'in_e', True)} >= 0",
            f"until = tl.minimum({last}, tl.cdiv(tl.max(tl.where(present, every + 1, 0), 0), BR))",
        ]
        return "until"

    def _pieces(self) -> list[str]:
        """Reduce the partial sums of a shared segment in the order of the entries.

        Each program stores its sums, then increments a counter; the last one adds all sums and resets the counter.
        """
        segment = self.roles.segment
        assert segment is not None
        room, waiting = self._argument("room", ""), self._argument("waiting", "")
        firsts, pieces = self._segment("firsts"), self._segment("pieces")
        return [
            f"inner = tl.num_programs(0) // {self._argument('extent', segment.index)}",
            f"pieces_here = tl.load({pieces} + item)",
            f"first_unit = unit - (item - tl.load({firsts} + item)) * inner",
            "spot = tl.arange(0, BY)[:, None] * BX + tl.arange(0, BX)[None, :]",
            "done = pieces_here == 1",
            "if pieces_here > 1:",
            f"    tl.store({room} + tl.cast(unit, tl.int64) * (BY * BX) + spot, accumulator)",
            # All threads must have stored before one of them increments the counter.
            "    tl.debug_barrier()",
            f"    done = tl.atomic_add({waiting} + first_unit, 1, sem='acq_rel') == pieces_here - 1",
            "    if done:",
            f"        tl.store({waiting} + first_unit, 0)",
            f"        accumulator = tl.zeros((BY, BX), dtype={self.accumulator})",
            "        for piece in tl.range(0, pieces_here):",
            "            other = tl.cast(first_unit + piece * inner, tl.int64) * (BY * BX)",
            f"            accumulator += tl.load({room} + other + spot, cache_modifier='.cg')",
        ]

    def _moved(self) -> list[str]:
        """Shift the prefetched indices and load those of the iteration after the next.

        Triton does not pipeline a loop that carries a value unchanged: `| 0` makes it a new value.
        """
        if not self.ahead:
            return []
        zero = self._argument("zero", "")
        moved = [f"{name} = {name}_next | {zero}" for name, *_ in self.ahead]
        return [*moved, *self._indices("turn + 2", "_next")]

    def _indices(self, turn: str, suffix: str) -> list[str]:
        """Load the indices of iteration `turn`, -1 past the end; intermediate variables are renamed."""
        own = {"turn", *(line.partition(" = ")[0] for line in self.turn)}
        pattern = re.compile(rf"\b({'|'.join(map(re.escape, sorted(own)))})\b")

        def renamed(code: str) -> str:
            return pattern.sub(r"\1_ahead", code)

        lines = [f"turn_ahead = {turn}", *map(renamed, self.turn)]
        for name, where, mask, cast in self.ahead:
            guard = " & ".join([f"({renamed(mask)})", "(turn_ahead < end)"] if mask else ["turn_ahead < end"])
            lines.append(f"{name}{suffix} = tl.load({renamed(where)}, mask={guard}, other=-1){cast}")
        return lines

    # Loads

    def _load(self, access: Access, axes: str) -> Value:
        """Load an access over the tile axes it depends on, once; out of bounds 0, or -1 for integers."""
        key = self._key(access)
        if key in self.values:
            return self.values[key]
        lines = self.body if (self.turning - self.fixed) & set(indices_of(access)) else self.head
        pointer, masks = self._spread(access, self._address(access, self._operand(access.name), lines), lines)
        own = _joined("".join(value.axes for value in (*pointer, *masks)))
        if len(own) > 2 or (axes and not set(own) <= set(axes)):
            raise OptionError(f"{access} depends on rows, columns and the reduction of a tile")
        if len(own) == 2:
            for axis in own:
                pointer, masks = self._folded(access, axis, (pointer, masks), lines)
        integer = self.dtypes[access.name] in INTEGERS
        if not self.signature.lazy and not integer and own in ("YR", "RX"):
            return self._loaded_eagerly(access, own, (pointer, masks), lines)
        where = [self._operand(access.name), *(value.at(own) for value in pointer)]
        mask = " & ".join(value.at(own) for value in masks)
        cast = ".to(tl.int32)" if integer and not self.signature.int64_operands and access.name not in self.long else ""
        turns = bool((self.turning - self.fixed) & set(indices_of(access)))
        if integer and turns and self.signature.prefetch_indices and all(e.bare for e in access.indices):
            loaded = Value(f"v{next(self.number)}", own)
            self.ahead.append((loaded.code, " + ".join(where), mask, cast))
        else:
            loaded = self._named("v", Value(_loading(" + ".join(where), mask, integer) + cast, own), lines)
            self.loads[loaded.code] = where, mask
        self.values[key] = loaded
        return loaded

    def _loaded_eagerly(
        self, access: Access, own: str, address: tuple[list[Value], list[Value]], lines: list[str]
    ) -> Value:
        """Load an access over three axes, and give it those of the product's side."""
        pointer, masks = ([value.spread for value in values] for values in address)
        where = " + ".join([self._operand(access.name), *pointer])
        spread = self._named("v", Value(_loading(where, " & ".join(masks), False)), lines)
        code = f"tl.reshape({spread.code}, (BY, BR))" if own == "YR" else f"tl.reshape({spread.code}, (BX, BR))"
        loaded = self._named("v", Value(code if own == "YR" else f"tl.trans({code})", own), lines)
        self.values[self._key(access)] = loaded
        return loaded

    def _folded(
        self, access: Access, axis: str, address: tuple[list[Value], list[Value]], lines: list[str]
    ) -> tuple[list[Value], list[Value]]:
        """Fold the mask along an axis with an index array into the address, negative where masked: one value instead of
        two is exchanged between threads."""
        pointer, masks = address
        arrays = (array for expression in access.indices for array in expression.arrays)
        parts, held = ([v for v in values if v.axes == axis] for values in address)
        if not all(map(self._climbs, access.indices)):
            # A valid address may have negative parts.
            return address
        if not held or len(parts) != 1 or not any(self._array_value(array).axes == axis for array in arrays):
            return address
        there = " & ".join(value.at(axis) for value in held)
        folded = self._named("o", Value(f"tl.where({there}, {parts[0].code}, {_NOWHERE})", axis), lines)
        others = [value for value in pointer if value.axes != axis], [value for value in masks if value.axes != axis]
        return [*others[0], folded], [*others[1], replace(folded, test=">= 0")]

    def _spread(
        self, access: Access, address: tuple[list[Value], list[Value]], lines: list[str]
    ) -> tuple[list[Value], list[Value]]:
        """Repeat addresses of packed entries (negative if masked) for all points, so that each index is loaded once."""
        pointer, masks = address
        axes = {axis for value in (*pointer, *masks) for axis in value.axes}
        if "E" not in axes or (self.dtypes[access.name] in INTEGERS and "R" not in axes):
            return address
        (parts, pointer), (held, masks) = (
            [[v for v in values if ("E" in v.axes) == own] for own in (True, False)] for values in address
        )
        own = _joined("".join(value.axes for value in (*parts, *held)))
        if len(own) > 2:
            raise OptionError(f"{access} depends on rows, columns and the entry of a tile")
        place = " + ".join(value.at(own) for value in parts) or "0"
        if held:
            place = f"tl.where({' & '.join(value.at(own) for value in held)}, {place}, {_NOWHERE})"
        spread = self._repeated(self._named("o", Value(place, own), lines), self._divisor(access), lines)
        return [*pointer, spread], [*masks, replace(spread, test=">= 0")]

    def _repeated(self, value: Value, divisor: int, lines: list[str]) -> Value:
        """Repeat each entry's value for all of its points; tell the compiler that these are equal."""
        deep, axes = depth_of_entry(self.roles, self.static), value.axes.replace("E", "R")
        if deep == 1:
            return Value(value.code, axes)
        at = axes.index("R")
        sides = [f"B{axis}" for axis in axes]
        apart = [*sides[:at], "PACK", str(deep), *sides[at + 1 :]]
        there = ", ".join("None" if place == at + 1 else ":" for place in range(len(apart)))
        equal = [deep if axis == "R" else 1 for axis in axes]
        code = f"tl.broadcast_to({value.code}[{there}], ({', '.join(apart)}))"
        code = f"tl.max_constancy(tl.reshape({code}, ({', '.join(sides)},)), {equal})"
        return self._named("o", Value(f"tl.multiple_of({code}, {[divisor] * len(axes)})", axes), lines)

    def _divisor(self, access: Access) -> int:
        """A power of two that divides the address offsets of entries."""
        axes = [n for n, expression in enumerate(access.indices) if self.position in indices_of(expression)]
        return math.gcd(16, *(self.strides.get((access.name, axis), 1) for axis in axes))

    def _address(self, access: Access, pointer: str, lines: list[str]) -> tuple[list[Value], list[Value]]:
        """(parts of the address, one per set of axes; load conditions)."""
        parts: dict[str, list[str]] = {}
        masks: dict[str, Value] = {}
        for axis, expression in enumerate(access.indices):
            components, conditions = self._components(access, axis, expression, lines)
            for value in components:
                parts.setdefault(value.axes, []).append(self._scaled(access.name, axis, value.code))
            masks.update((value.code, value) for value in conditions)
        # Parts with fewer axes first, so that they are added once.
        ordered = sorted(parts.items(), key=lambda part: len(part[0]))
        return [Value(f"({' + '.join(codes)})", axes) for axes, codes in ordered], list(masks.values())

    def _scaled(self, name: str, axis: int, code: str) -> str:
        if name in self.signature.int64_operands:
            code = f"tl.cast({code}, tl.int64)"
        if (name, axis) in self.signature.unit:
            return code
        if (name, axis) in self.strides:
            return f"{code} * {self.strides[name, axis]}"
        return f"{code} * {self._argument('stride', name, axis)}"

    def _components(
        self, access: Access, axis: int, expression: Affine, lines: list[str]
    ) -> tuple[list[Value], list[Value]]:
        """(the expression as a sum of values of different axes, the conditions for it to be in bounds)."""
        far = expression in self.signature.int64_expressions
        constant = f"tl.cast({expression.constant}, tl.int64)" if far else str(expression.constant)
        sums: dict[str, list[str]] = {"": [constant]} if expression.constant else {}
        conditions: list[Value] = []
        for coefficient, atom in expression.terms:
            for value in self._atom(atom, conditions):
                if not self.signature.hoisted and value.axes and lines is not self.head and isinstance(atom, Index):
                    value = replace(value, code=f"({value.code} + shift)")
                code = _in_64_bits(value.code, coefficient) if far else value.code
                sums.setdefault(value.axes, []).append(_times(coefficient, code))
        values = [Value(f"({' + '.join(codes)})" if len(codes) > 1 else codes[0], axes) for axes, codes in sums.items()]
        if not values:
            values = [Value("0")]
        if expression.bare is None:
            conditions.append(self._inside(access.name, axis, values, lines, self._rises(expression)))
            conditions += [Value(f"({v.code} >= 0)", v.axes) for v in map(self._array_value, expression.arrays)]
            if not self.signature.padded and lines is not self.head and conditions[-1].axes == "Y":
                conditions.append(self._counted())
        return values, conditions

    def _counted(self) -> Value:
        """The condition for valid rows of the tile; only the last segment has padding rows."""
        segment, (row,) = self.roles.segment, self.roles.rows
        assert segment is not None
        place = f"{self.values[segment.index].code} * {self._extent(row)} + {self.values[row].code} + shift"
        return Value(f"({place} < {self._argument('size', '', 0)})", "Y")

    def _array_value(self, access: Access) -> Value:
        return self.values[self._key(access)]

    def _key(self, access: Access) -> str:
        """Cache key of a load; it includes the values of unrolled indices."""
        out = self.roles.within.summed if self.roles.within else ()
        here = [self.values[name].code for name in out if name in indices_of(access) and name in self.values]
        return f"{access}{here}" if here else str(access)

    def _atom(self, atom: Index | Access, conditions: list[Value]) -> list[Value]:
        """The summands of an atom; appends the mask of an index to the conditions."""
        if isinstance(atom, Access):
            return [self._load(atom, "")]
        value = self.values[atom.name]
        if len(value.axes) == 1 and value.axes not in self.even:
            own = atom.name == self.position and self.roles.laned
            name = "in_p" if own else f"in_{value.axes.lower()}"
            if not (self.roles.laned and value.axes == "Y" and atom.name != self.position):
                conditions.append(Value(name, value.axes))
        return [*([Value(self.bases[atom.name])] if atom.name in self.bases else []), value]

    def _rises(self, expression: Affine) -> bool:
        """True if the expression is non-negative whenever its arrays' values are."""
        return expression.constant >= 0 and self._climbs(expression)

    def _climbs(self, expression: Affine) -> bool:
        """As _rises, for the expression without its constant."""
        starts = (self.starts.get(atom.name, 0) for _, atom in expression.terms if isinstance(atom, Index))
        return min((0, *starts, *(coefficient for coefficient, _ in expression.terms))) >= 0

    def _inside(self, name: str, axis: int, values: Sequence[Value], lines: list[str], rises: bool) -> Value:
        axes = _joined("".join(value.axes for value in values))
        total = " + ".join(value.at(axes) for value in values)
        found = self._named("e", Value(total, axes), lines)
        below = f"({found.code} < {self._argument('size', name, axis)})"
        return Value(below if rises else f"(({found.code} >= 0) & {below})", axes)

    # The store

    def _store(self, outer: Sequence[int], looped: bool) -> None:
        head, roles = self.head, self.roles
        self.turning = set()
        self.body = head
        if looped and roles.laned and self.signature.segment_threads > 1:
            lanes = self.signature.segment_threads
            head.append(f"accumulator = tl.sum(tl.reshape(accumulator, (BY // {lanes}, {lanes}, BX)), 1)")
        if self.turned:
            head.append("accumulator = tl.sum(accumulator, 1)[:, None]")
            self._forget_columns()
        if self.signature.epilogue_subtiles > 1:
            self._store_slices(outer)
        else:
            self._store_part(outer, "accumulator" if looped else "", "1" if roles.folds else "BX")

    def _forget_columns(self) -> None:
        self.values = {k: v for k, v in self.values.items() if "X" not in v.axes}

    def _store_slices(self, outer: Sequence[int]) -> None:
        """Finish and store column slices one after another, split from the accumulator by repeated halving."""
        parts, wide = ["accumulator"], self.signature.epilogue_subtiles
        for n in range(1, wide.bit_length()):
            halves = f"(BY, 2, BX // {1 << n})"
            for part in parts:
                split = f"tl.split(tl.permute(tl.reshape({part}, {halves}), (0, 2, 1)))"
                self.head.append(f"{part}_0, {part}_1 = {split}")
            parts = [f"{part}_{side}" for part in parts for side in (0, 1)]
        head, columns = self.head, self._volume(self.roles.columns)
        for n, part in enumerate(parts):
            self.head = self.body = []
            self._forget_columns()
            self.head.append(f"x = first_x + {n} * (BX // {wide}) + tl.arange(0, BX // {wide})")
            self._points("X", self.roles.columns, self.head)
            self._store_part(outer, part, f"BX // {wide}")
            # A compile-time condition skips slices of padding.
            sure = n == 0 or "X" in self.even or not columns.isdigit()
            head += self.head if sure else [f"if {n} * (BX // {wide}) < {columns}:", *(f"    {x}" for x in self.head)]
        self.head = head

    def _store_part(self, outer: Sequence[int], summed: str, width: str) -> None:
        """Compute and store `width` columns of the result. summed: code of the loop's sums, "" without a loop."""
        head, roles = self.head, self.roles
        values = [self._load(self._factor(place), "YX") for place in outer]
        factors = [f"({value.at('YX')}).to({self.accumulator})" for value in values]
        if summed:
            factors.insert(0, summed)
        coefficient = self.statement.terms[0].coefficient
        if coefficient != 1 or not factors:
            factors.append(repr(float(coefficient)))
        head.append(f"result = {' * '.join(factors)}")
        if roles.folds and roles.product:
            head.append("result = tl.sum(result, 1)[:, None]")
        pointer, masks = self._address(Access("", roles.target.indices), self._result(), head)
        if roles.segment and roles.laned:
            masks.append(Value(f"({self.values[roles.segment.index].code} >= 0)", "Y"))
        if self.signature.stream_k:
            masks.append(Value("done"))
        shape = f"({self._rows_of_result()}, {width})"
        # Sums instead of broadcasts: atomics of the interpreter need full arrays.
        place = " + ".join([*(v.at("YX") for v in pointer), f"tl.zeros({shape}, tl.int32)"])
        head.append(f"where = {self._result()} + {place}")
        head.append(f"mask = {' & '.join([*(v.at('YX') for v in masks), f'tl.full({shape}, True, tl.int1)'])}")
        if not summed or roles.folds:
            # Values that were not accumulated may lack an axis.
            head.append(f"result = result + tl.zeros({shape}, {self.accumulator})")
        self._add_before(place)
        self._finish()
        self._write()

    def _rows_of_result(self) -> str:
        return f"BY // {self.signature.segment_threads}" if self.roles.laned else "BY"

    def _add_before(self, place: str) -> None:
        if self.signature.accumulate and not self._shared:
            found = f"tl.load({self._argument('before', BEFORE)} + {place}, mask=mask, other=0.0)"
            self.head.append(f"result += {found}.to({self.accumulator})")

    def _finish(self) -> None:
        """Apply the epilogue; the channels are all axes of the result but the first."""
        indices = self.roles.target.indices
        factor, offset = self._affine() if self.affine is None else self.affine
        if factor is not None:
            self.head.append(f"result = result * {factor.at('YX')}")
        if offset is not None:
            self.head.append(f"result = result + {offset.at('YX')}")
        if RESIDUAL in self.dtypes:
            # Loaded with the mask of the store.
            operand = self._operand(RESIDUAL)
            pointer, _ = self._address(Access(RESIDUAL, indices), operand, self.head)
            where = " + ".join([operand, *(value.at("YX") for value in pointer)])
            self.head.append(f"result += tl.load({where}, mask=mask, other=0.0).to({self.accumulator})")
        if self.signature.activation:
            self.head.append(f"result = {ACTIVATIONS[self.signature.activation].code('result')}")

    def _affine(self) -> tuple[Value | None, Value | None]:
        """(factor, offset) of the epilogue per channel, None if absent."""
        found: dict[str, Value] = {}
        for name in (MEAN, VARIANCE, SCALE, SHIFT):
            if name in self.dtypes:
                loaded = self._load(Access(name, self.roles.target.indices[1:]), "YX")
                found[name] = replace(loaded, code=f"({loaded.code}).to({self.accumulator})")
        mean, variance, scale, shift = map(found.get, (MEAN, VARIANCE, SCALE, SHIFT))
        factors = [] if scale is None else [scale.code]
        factors += [] if variance is None else [f"tl.rsqrt({variance.code} + {self.signature.eps!r})"]
        factor = self._of_channels(" * ".join(factors), found)
        terms = [] if shift is None else [shift.code]
        if mean is not None:
            terms.append(f"-{mean.code}" if factor is None else f"-{mean.code} * {factor.code}")
        return factor, self._of_channels(" + ".join(terms), found)

    def _of_channels(self, code: str, like: Mapping[str, Value]) -> Value | None:
        return self._named("v", Value(code, next(iter(like.values())).axes), self.head) if code else None

    def _early(self) -> None:
        """Load the store's row indices and channel vectors before the loop (3 % on an H200), except for float32, whose
        loops lack the registers."""
        if not self.roles.product or self.roles.laned or self.roles.stacked or self.compute == "tl.float32":
            return
        for expression in self.roles.target.indices:
            for array in expression.arrays:
                self._load(array, "YX")
        if self.signature.epilogue_subtiles == 1:
            self.affine = self._affine()

    @property
    def _shared(self) -> bool:
        """True if several programs add to one entry, by atomics."""
        return self.roles.atomic or self.signature.splits

    def _write(self) -> None:
        if self._shared:
            self.head.append("tl.atomic_add(where, result, mask=mask, sem='relaxed')")
        else:
            self._saturate()
            if "y" in self.signature.in_tf32:
                self.head.append(f"result = {_NEAREST.format('result')}")
            self.head.append(f"tl.store(where, result.to({FLOATS[self.dtypes['']]}), mask=mask)")

    def _saturate(self) -> None:
        """Clamp 8-bit floats, which have no infinity, to +-448; NaN stays."""
        if self.dtypes[""] == "fp8":
            most = "tl.where(result > 448.0, 448.0, result)"
            self.head += ["result = result.to(tl.float32)", f"result = {most}"]
            self.head.append("result = tl.where(result < -448.0, -448.0, result)")

    # Arguments

    def _argument(self, kind: str, name: str, axis: int = 0) -> str:
        key = (kind, name, axis)
        if key not in self.arguments:
            number = sum(a.kind == kind for a in self.arguments.values())
            # Other kinds occur once; segment arrays are called by their name.
            variable = f"{_LETTERS[kind]}{number}" if kind in _LETTERS else _SINGLE.get(kind, name)
            self.arguments[key] = Argument(kind, variable, name, axis)
        return self.arguments[key].variable

    def _operand(self, name: str) -> str:
        return self._result() if name == "" else self._argument("operand", name)

    def _result(self) -> str:
        return self._argument("result", "")

    def _segment(self, part: str) -> str:
        return self._argument("segment", part)

    def _extent(self, name: str) -> str:
        return str(self.static[name]) if name in self.static else self._argument("extent", name)

    def _volume(self, names: Sequence[str]) -> str:
        if all(name in self.static for name in names):
            return str(math.prod(self.static[name] for name in names))
        return " * ".join(self._extent(name) for name in names)


_CUT = "({} & -8192).to(tl.float32, bitcast=True)"
_NEAREST = f"tl.where(tl.abs({{0}}) < 3.4e38, {_CUT.format('({0}.to(tl.int32, bitcast=True) + 4096)')}, {{0}})"
"""float32 rounded to tf32: not NaN, whose bits may overflow, nor the largest values, which would become infinite."""
_RAISED = 1 + 2.0**-11.5
"""Factor on float32 before the last 13 bits are cut off, so that the mean of the cut values is that of the given."""
SPLITS = "#"
"""Key of the number of splits among the extents; not a valid index name."""
_NOWHERE = -(1 << 30)
"""Offset of masked elements: negative, divisible by 16."""
STACKS = "##"
"""Key of the number of segments or stacks of segments among the extents."""

BEFORE = "+"
"""Key of the earlier result, to which a kernel adds, among the operands."""
_LETTERS = {"extent": "n", "size": "size", "stride": "stride", "operand": "t"}
_SINGLE = {"result": "out", "before": "before", "zero": "zero", "room": "room", "waiting": "waiting"}
_ORDER = ("result", "before", "operand", "segment", "room", "waiting", "extent", "size", "zero", "stride", "constant")


def _doc(statement: Statement) -> str:
    return str(statement).replace("\\", "").replace('"""', "")


def grid(roles: ContractionRoles, extents: Mapping[str, int], tile: tuple[int, int], segments: int, lanes: int) -> int:
    """The number of programs. tile: (rows, columns); segments: segments or stacks; lanes: rows per segment."""
    known = {SPLITS: 1, **extents, STACKS: segments}
    return math.prod(-(-math.prod(known[n] for n in names) // by) for names, by in grid_of(roles, tile, lanes))


def grid_of(roles: ContractionRoles, tile: tuple[int, int], lanes: int) -> Iterator[tuple[tuple[str, ...], int]]:
    """Factors of the number of programs: (names, divisor) for ceil(product of extents / divisor)."""
    rows, columns = tile
    own = roles.segment.index if roles.segment else None
    if not roles.folds or roles.product:
        yield tuple(roles.columns), columns
    if roles.laned:
        yield (STACKS,), rows // lanes
    elif roles.stacked:
        yield (STACKS,), 1
    else:
        yield tuple(roles.rows), rows
        if own:
            yield (STACKS,), 1
    yield tuple(n for n in roles.batch if n != own), 1
    yield (SPLITS,), 1
