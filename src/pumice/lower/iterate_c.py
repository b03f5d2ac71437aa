"""Loop nests over levels of sparse operands, in C.

Sizes, strides, addresses and ranges are arguments in one array of 64-bit integers, in the order of `Emitted.arguments`,
behind [next task, tasks, next thread, points per task]. A search of a level starts where the last one below the same
position ended (`hints`, one per thread and position), if that is not too far: windows that move are found in a few
steps.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pumice.language.iteration import DENSE, HASHED, AxisOf, Count, EntryLoop, LevelOf, LoopNest, LoopStep, Merge, Walk
from pumice.language.nodes import Affine, indices_of

HEADER = 4  # Integers before the arguments
ACROSS = 8  # Vectors of a tile
MULTIPLIER = 0x9E3779B97F4A7C15  # Of hashes: the high word of the product is the first slot

_HEAD = """typedef {real} real;
typedef real v{lanes} __attribute__((vector_size({bytes}), aligned({align}), may_alias));
static inline i64 most(i64 a, i64 b) {{ return a > b ? a : b; }}
static inline i64 least(i64 a, i64 b) {{ return a < b ? a : b; }}
static inline i64 fdiv(i64 a, i64 b) {{ return a / b - (a % b < 0); }}
/* The first place in [a, b) with a coordinate of at least x; h: where the last search ended. */
static inline i64 at_least(const int *c, i64 a, i64 b, i64 x, int *h) {{
    i64 k = *h > a && *h <= b && c[*h - 1] < x ? *h : a, step = 1;
    while (k < b && c[k] < x) {{
        i64 next = k + step;
        if (next >= b || c[next] >= x) {{
            i64 high = least(next, b);
            k++;
            while (k < high) {{ i64 m = (k + high) / 2; if (c[m] < x) k = m + 1; else high = m; }}
            break;
        }}
        k = next; step *= 2;
    }}
    *h = k;
    return k;
}}
static inline i64 probe(const int *table, i64 mask, const i64 *keys, i64 key) {{
    for (unsigned long long h = (unsigned long long)key * {multiplier}ull >> 32;; h++) {{
        const i64 p = table[h & mask];
        if (p < 0 || keys[p] == key) return p;
    }}
}}
static inline i64 find(const int *c, i64 a, i64 b, i64 x, int *h) {{
    const i64 k = at_least(c, a, b, x, h);
    return k < b && c[k] == x ? k : -1;
}}
"""
_MAIN = """static void work(void *data) {{
    i64 *z = data;
    const i64 thread = __atomic_fetch_add(z + 2, 1, __ATOMIC_RELAXED);
    for (;;) {{
        const i64 task = __atomic_fetch_add(z, 1, __ATOMIC_RELAXED);
        if (task >= z[1]) return;
        const i64 L = {start} + task * z[3], H = least(L + z[3], {stop});
        {calls}
    }}
}}
void run(region parallel, int threads, i64 *z) {{ start(parallel, threads, z[1], work, z); }}
"""


class FactorReads(NamedTuple):
    """along: whether the target and the factors have the vector index; valued: whether factors have values; ordered:
    whether the entries of factors are in another order than the positions of their last level; tiled: whether factors
    are stored by tiles of the vector index, so that what a tile reads of them is contiguous."""

    along: tuple[bool, ...]
    valued: tuple[bool, ...]
    ordered: tuple[bool, ...]
    tiled: tuple[bool, ...]


@dataclass(frozen=True)
class Emitted:
    """C source, and what its arguments are: ("start" | "stop", index); ("size", level or axis); ("constant", axis);
    ("stride", factor, index), of a tiled one in rows of a tile, as ("offset", factor); ("rows", factor) of a tile;
    ("values" | "span" | "order", factor); ("pos" | "crd" | "hints", level); ("table" | "mask" | "hash_keys", level);
    ("coordinates", factor, depth); ("hints",): their number."""

    source: str
    arguments: tuple[tuple[Any, ...], ...]


def emitted(nest: LoopNest, reads: FactorReads, length: int, vector: tuple[str, int]) -> Emitted:
    """The C source of a nest. length: points of the vector index; vector: C type and number of the lanes."""
    real, lanes = vector
    slots, size = dict[tuple[Hashable, ...], int](), 4 if real == "float" else 8
    text = [_HEAD.format(real=real, lanes=lanes, bytes=lanes * size, align=size, multiplier=MULTIPLIER)]
    indices, calls, begin = indices_of(nest.target, *(f.access for f in nest.factors)), list[str](), 0
    for count, width, times in [(1, 1, 1)] if nest.sums or not nest.vector else _tiles(length, lanes):
        text.append(_Writer(nest, reads, count, width, lanes, slots, indices).function())
        end = begin + count * width * times
        step = (
            f"for (i64 j = {begin}; j < {end}; j += {count * width}) " if times > 1 else f"{{ const i64 j = {begin}; "
        )
        calls.append(f"{step}tile_{count}_{width}(z, thread, L, H, j);{' }' * (times == 1)}")
        begin = end
    start, stop = (_slot(slots, (end,)) for end in ("first", "last"))
    text.append(_MAIN.format(start=start, stop=stop, calls="\n        ".join(calls)))
    return Emitted("".join(text), tuple(slots))


def widths(length: int, lanes: int) -> list[int]:
    """Points of the vector index in each tile."""
    return [count * width for count, width, times in _tiles(length, lanes) for _ in range(times)]


def _tiles(length: int, lanes: int) -> list[tuple[int, int, int]]:
    """(accumulators, lanes of each, times) of the tiles that cover a vector index: each walks the loops once."""
    whole, vectors = divmod(length // lanes, ACROSS)
    found = [(ACROSS, lanes, whole), (vectors, lanes, 1), (length % lanes, 1, 1)]
    return [(count, width, times) for count, width, times in found if count * times]


def _slot(slots: dict[tuple[Hashable, ...], int], key: tuple[Hashable, ...]) -> str:
    return f"z[{slots.setdefault(key, HEADER + len(slots))}]"


@dataclass(frozen=True)
class _Writer:
    """Writes the function of one tile: `count` vectors of `width` lanes."""

    nest: LoopNest
    reads: FactorReads
    count: int
    width: int
    lanes: int
    slots: dict[tuple[Hashable, ...], int]
    indices: tuple[str, ...]
    lines: list[str] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)

    def z(self, *key: Hashable) -> str:
        return _slot(self.slots, key)

    def put(self, text: str) -> None:
        self.lines.append("    " * (1 + len(self.opened)) + text)

    def open(self, text: str) -> None:
        self.put(text + " {")
        self.opened.append(0)

    def close(self, text: str = "}") -> None:
        self.opened.pop()
        self.put(text)

    @property
    def kind(self) -> str:
        return f"v{self.width}" if self.width > 1 else "real"

    def function(self) -> str:
        nest = self.nest
        self.open("do")
        for level in nest.located:
            self.locate(level)
        if nest.held == 0:
            self.accumulators()
        for number, step in enumerate(nest.steps):
            self.step(number, step)
            if number + 1 == nest.held < len(nest.steps):
                self.accumulators()
        self.product()
        for number in reversed(range(len(nest.steps))):
            if number + 1 == nest.held < len(nest.steps):
                self.store()
            self.close()
        if nest.held == 0:
            self.store()
        self.close("} while (0);")
        head = f"static void tile_{self.count}_{self.width}(const i64 *z, i64 thread, i64 L, i64 H, i64 j)"
        body = "\n".join(self.lines)
        used = sorted({int(n) for n in re.findall(r"z\[(\d+)\]", body)})
        arguments = "".join(f"    const i64 z{n} = z[{n}];\n" for n in used)
        return "".join([head, " {\n", arguments, re.sub(r"z\[(\d+)\]", r"z\1", body), "\n}\n"])

    def name(self, index: str) -> str:
        """The variable of an index, whose name may be no identifier of C."""
        return f"i{self.indices.index(index)}"

    # Loops

    def step(self, number: int, step: LoopStep) -> None:
        loop = step.loop
        if isinstance(loop, EntryLoop):
            self.entries(loop)
        else:
            self.bounds(number, step)
            if isinstance(loop, Count):
                name = self.name(loop.index)
                self.open(f"for (i64 {name} = lo_{number}; {name} < hi_{number}; {name}++)")
            elif isinstance(loop, Walk):
                self.walk(number, loop)
            else:
                self.merge(number, loop)
        for at in step.within:
            if isinstance(loop, EntryLoop):
                self.put(
                    f"if ((unsigned long long)({self.value(at)}) >= (unsigned long long){self.size(at)}) continue;"
                )
        for level in step.located:
            self.locate(level)

    def entries(self, loop: EntryLoop) -> None:
        f = loop.factor
        self.open("for (i64 e = L; e < H; e++)")
        levels = self.nest.factors[f].levels
        for depth in range(len(levels)):
            name = self.nest.factors[f].coordinate(depth).bare or ""
            self.put(f"const i64 {self.name(name)} = ((const int *){self.z('coordinates', f, depth)})[e];")
        self.put(f"const i64 e{f} = e;")

    def bounds(self, number: int, step: LoopStep) -> None:
        """The range of the loop's index: declared, within its axes, of the task."""
        (index,) = step.indices
        own = number == self.nest.parallel
        low, high = ("L", "H") if own else (self.z("start", index), self.z("stop", index))
        self.put(f"i64 lo_{number} = {low}, hi_{number} = {high};")
        for at in step.within:
            expression = self.expression(at)
            c, rest = _split(expression, index)
            r, n = self.text(rest, at), self.size(at)
            if c < 0:
                # n - 1 - the coordinate is in the same range.
                c, r = -c, f"{n} - 1 - ({r})"
            first, last = (
                (f"-({r})", f"{n} - ({r})") if c == 1 else (f"-fdiv({r}, {c})", f"fdiv({n} - 1 - ({r}), {c}) + 1")
            )
            self.put(f"lo_{number} = most(lo_{number}, {first}); hi_{number} = least(hi_{number}, {last});")

    def walk(self, number: int, loop: Walk) -> None:
        (f, d), name = loop.level, self.name(loop.index)
        c, rest = _split(self.nest.factors[f].coordinate(d), loop.index)
        r = self.text(rest, AxisOf(f, self.nest.factors[f].levels[d].axis))
        self.span(loop.level, "e", number)
        windowed = loop.windowed or number == self.nest.parallel
        if windowed:
            ends = [f"{c} * {side} + {r}" for side in (f"lo_{number}", f"(hi_{number} - 1)")]
            first, last = ends if c > 0 else ends[::-1]
            self.put(f"if (lo_{number} >= hi_{number}) continue;")
            self.put(f"const i64 first_{number} = {first}, last_{number} = {last};")
        if windowed and loop.searched:
            self.search(loop.level, f"e_{number}", f"end_{number}", f"first_{number}")
        if number + 1 == len(self.nest.steps) and not windowed:
            self.put("#pragma GCC unroll 4")
        self.open(f"for (; e_{number} < end_{number}; e_{number}++)")
        self.put(f"const i64 c_{number} = {self.crd(loop.level)}[e_{number}]{f' - ({r})' if r != '0' else ''};")
        if windowed:
            self.put(f"if (c_{number} + ({r}) > last_{number}) break;")
            if not loop.searched:
                self.put(f"if (c_{number} + ({r}) < first_{number}) continue;")
        if abs(c) != 1:
            self.put(f"if (c_{number} % {abs(c)}) continue;")
        self.put(f"const i64 {name} = c_{number}{'' if c == 1 else f' / {c}' if c != -1 else ' * -1'};")
        self.put(f"const i64 p{f}_{d} = e_{number};")

    def merge(self, number: int, loop: Merge) -> None:
        texts = []
        for side, level in zip("ab", loop.levels, strict=True):
            f, d = level
            _, rest = _split(self.nest.factors[f].coordinate(d), loop.index)
            r = self.text(rest, AxisOf(f, self.nest.factors[f].levels[d].axis))
            self.span(level, side, number)
            self.search(level, f"{side}_{number}", f"end{side}_{number}", f"lo_{number} + ({r})")
            texts.append(f"{self.crd(level)}[{side}_{number}] - ({r})")
        self.open(f"while (a_{number} < enda_{number} && b_{number} < endb_{number})")
        self.put(f"const i64 x_{number} = {texts[0]}, y_{number} = {texts[1]};")
        self.put(f"if (x_{number} >= hi_{number} || y_{number} >= hi_{number}) break;")
        self.put(f"if (x_{number} < y_{number}) {{ a_{number}++; continue; }}")
        self.put(f"if (x_{number} > y_{number}) {{ b_{number}++; continue; }}")
        for side, (f, d) in zip("ab", loop.levels, strict=True):
            self.put(f"const i64 p{f}_{d} = {side}_{number}++;")
        self.put(f"const i64 {self.name(loop.index)} = x_{number};")

    def search(self, level: LevelOf, place: str, end: str, first: str) -> None:
        """Moves a place in a level to the first coordinate of at least `first`."""
        self.put(f"{place} = at_least({self.crd(level)}, {place}, {end}, {first}, {self.hint(level)});")

    def span(self, level: LevelOf, name: str, number: int) -> None:
        """Declares the positions of a level below the position above."""
        pos, above = f"((const int *){self.z('pos', *level)})", self.above(level)
        end = "end" if name == "e" else f"end{name}"
        self.put(f"i64 {name}_{number} = {pos}[{above}]; const i64 {end}_{number} = {pos}[{above} + 1];")

    def locate(self, level: LevelOf) -> None:
        f, d = level
        stored = self.nest.factors[f].levels[d]
        at = AxisOf(f, stored.axis)
        x, above = self.value(at), self.above(level)
        if stored.kind == DENSE:
            self.put(f"const i64 p{f}_{d} = ({above}) * {self.size(at)} + {x};")
            return
        if stored.kind == HASHED:
            table, keys = f"(const int *){self.z('table', f, d)}", f"(const i64 *){self.z('hash_keys', f, d)}"
            key = f"({above}) * {self.size(at)} + {x}"
            # Outside the operand, the key is that of another position.
            self.put(f"if ((unsigned long long)({x}) >= (unsigned long long){self.size(at)}) continue;")
            self.put(f"const i64 p{f}_{d} = probe({table}, {self.z('mask', f, d)}, {keys}, {key});")
            self.put(f"if (p{f}_{d} < 0) continue;")
            return
        pos = f"((const int *){self.z('pos', f, d)})"
        places = f"{pos}[{above}], {pos}[{above} + 1]"
        self.put(f"const i64 p{f}_{d} = find({self.crd(level)}, {places}, {x}, {self.hint(level)});")
        self.put(f"if (p{f}_{d} < 0) continue;")

    def above(self, level: LevelOf) -> str:
        return f"p{level.factor}_{level.depth - 1}" if level.depth else "0"

    def crd(self, level: LevelOf) -> str:
        return f"((const int *){self.z('crd', *level)})"

    def hint(self, level: LevelOf) -> str:
        return f"(int *){self.z('hints', *level)} + thread * {self.z('hints')} + {self.above(level)}"

    # Expressions

    def expression(self, at: AxisOf) -> Affine:
        return (self.nest.target if at.factor < 0 else self.nest.factors[at.factor].access).indices[at.axis]

    def value(self, at: AxisOf) -> str:
        return self.text([(c, str(atom)) for c, atom in self.expression(at).terms], at)

    def text(self, terms: list[tuple[int, str]], at: AxisOf) -> str:
        """A sum of indices and the constant of an axis."""
        found = [self.name(name) if c == 1 else f"{c} * {self.name(name)}" for c, name in terms]
        if self.expression(at).constant:
            found.append(self.z("constant", *at))
        return " + ".join(found) or "0"

    def size(self, at: AxisOf) -> str:
        return self.z("size", *at)

    # Values

    def address(self, factor: int) -> str:
        """Elements from the address of a factor (the target: -1) to the value at the indices, without the vector's."""
        access = self.nest.target if factor < 0 else self.nest.factors[factor].access
        axes = range(len(access.indices)) if factor < 0 else self.nest.factors[factor].dense
        if factor < 0 and self.nest.pattern >= 0:
            axes = range(len(self.nest.factors[self.nest.pattern].levels), len(access.indices))
        names = [n for n in indices_of(*(access.indices[axis] for axis in axes)) if n != self.nest.vector]
        found = [f"{self.name(name)} * {self.z('stride', factor, name)}" for name in names]
        if factor >= 0 and self.reads.tiled[factor]:
            return f"({' + '.join([*found, self.z('offset', factor)])}) * {self.count * self.width}"
        entries = self.nest.pattern if factor < 0 else factor
        if entries >= 0 and self.nest.factors[entries].levels:
            found.append(f"{self.entry(entries)} * {self.z('span', factor)}")
        return " + ".join(found) or "0"

    def entry(self, factor: int) -> str:
        if isinstance(first := self.nest.steps[0].loop, EntryLoop) and first.factor == factor:
            return f"e{factor}"
        last = f"p{factor}_{len(self.nest.factors[factor].levels) - 1}"
        return f"((const int *){self.z('order', factor)})[{last}]" if self.reads.ordered[factor] else last

    def accumulators(self) -> None:
        """The accumulators, and the place in the target that they belong to."""
        self.put(f"real *t = (real *){self.z('values', -1)} + ({self.address(-1)}){' + j' * self.reads.along[0]};")
        names = ", ".join(f"s{k} = {{0}}" if self.width > 1 else f"s{k} = 0" for k in range(self.count))
        self.put(f"{self.kind} {names};")

    def store(self) -> None:
        for k in range(self.count):
            self.put(f"{self.place('t', self.reads.along[0], k)} += s{k};")

    def place(self, pointer: str, along: bool, k: int) -> str:
        if not along:
            return f"*{pointer}"
        return f"*({self.kind} *)({pointer} + {k * self.width})"

    def product(self) -> None:
        nest = self.nest
        once, vectors = ["1"], []
        for n in range(len(nest.factors)):
            if self.reads.valued[n]:
                along = " + j" * self.reads.along[n + 1]
                along += f" * {self.z('rows', n)}" if self.reads.tiled[n] else ""
                self.put(f"const real *f{n} = (const real *){self.z('values', n)} + ({self.address(n)}){along};")
                (vectors if self.reads.along[n + 1] else once).append(f"f{n}")
        scale = " * ".join(f"*{f}" for f in once[1:]) or "1"
        self.put(f"const real scale = {scale};")
        kept = nest.held < len(nest.steps)
        if not kept:
            self.put(f"real *t = (real *){self.z('values', -1)} + ({self.address(-1)}){' + j' * self.reads.along[0]};")
        if nest.sums:
            self.summed(vectors, "s0" if kept else "*t")
            return
        for k in range(self.count):
            product = " * ".join(["scale", *(self.place(f, True, k) for f in vectors)])
            target = f"s{k}" if kept else self.place("t", self.reads.along[0], k)
            self.put(f"{target} += {product};")

    def summed(self, vectors: list[str], target: str) -> None:
        """The inner loop over a vector index that is summed."""
        wide = f"v{self.lanes}"
        self.put(f"{wide} part = {{0}}; real total = 0; i64 k = 0;")
        product = " * ".join(f"*(const {wide} *)({f} + k)" for f in vectors)
        self.put(f"for (; k + {self.lanes} <= {self.z('length')}; k += {self.lanes}) part += {product};")
        self.put(f"for (; k < {self.z('length')}; k++) total += {' * '.join(f'{f}[k]' for f in vectors)};")
        self.put(f"for (int l = 0; l < {self.lanes}; l++) total += part[l];")
        self.put(f"{target} += scale * total;")


def _split(expression: Affine, index: str) -> tuple[int, list[tuple[int, str]]]:
    """(coefficient of the index, the other terms)."""
    terms = [(c, str(atom)) for c, atom in expression.terms]
    return next(c for c, name in terms if name == index), [(c, name) for c, name in terms if name != index]
