"""The Triton source of sums over a small constant table; see pumice.lower.unrolled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from pumice.runtime.compile import Parameter, TritonKernel, digest
from pumice.runtime.launch import Array, KernelLauncher

_LANES = 128  # of a program, at most
_TOGETHER = 32  # of one that has several targets, or sums lanes
_WARP = 32  # lanes that are summed: more would need a barrier


class RowView(NamedTuple):
    """An operand [row, component, lane], each axis optional. rows: "" without, "." for the row itself, else the index
    array of its rows; table: the index array of its components, or ""; lanes: it has lanes."""

    name: str
    rows: str
    table: str
    lanes: bool


class Sum(NamedTuple):
    """coefficient * the product of these factors, to be added to this target; by number."""

    factors: tuple[int, ...]
    target: int
    coefficient: float


class TableSums(NamedTuple):
    """Sums over one table, in one kernel. loop: the index array over whose rows programs loop, "" for none."""

    factors: tuple[RowView, ...]
    targets: tuple[RowView, ...]
    sums: tuple[Sum, ...]
    loop: str

    @property
    def gathered(self) -> list[RowView]:
        """The factors whose rows are gathered, each by its own array."""
        return [view for view in self.factors if view.rows not in ("", ".", self.loop)]

    @property
    def addressed(self) -> list[RowView]:
        """The factors whose rows may not exist."""
        return [view for view in self.factors if view.rows not in ("", ".")]


class EntryTable(NamedTuple):
    """values: of the entries; columns: the component of each entry, in each factor and then in each target."""

    values: tuple[float, ...]
    columns: tuple[tuple[int, ...], ...]


class TableSizes(NamedTuple):
    """Components of the factors and of the targets, and the number of lanes."""

    factors: tuple[int, ...]
    targets: tuple[int, ...]
    lanes: int


class UnrolledKernel(NamedTuple):
    """blocks: of lanes, each with programs of its own; sums: that each target without lanes has for a row."""

    launcher: KernelLauncher
    blocks: int
    sums: int
    warps: int

    def __call__(self, programs: int, tensors: Sequence[Array], numbers: Sequence[float]) -> None:
        self.launcher(programs, tensors, numbers, {}, self.warps)


@lru_cache(maxsize=256)
def launcher(sums: TableSums, table: EntryTable, sizes: TableSizes, double: bool) -> UnrolledKernel:
    block, warps = _lanes_of(sums, sizes.lanes)
    text = source(sums, table, sizes, block, double)
    code = digest(text)
    name = f"pumice_unrolled_{code[:24]}"
    parameters = [*map(Parameter, pointers(sums)), *(Parameter(n, False, False, "i64") for n in numbers(sums))]
    made = KernelLauncher(TritonKernel((name, f"<{name}>", "unrolled"), text, code, parameters))
    blocks = -(-sizes.lanes // block)
    return UnrolledKernel(made, blocks, blocks * _summed(block), warps)


def _lanes_of(sums: TableSums, lanes: int) -> tuple[int, int]:
    """(lanes, warps) of a program."""
    together = not all(view.lanes for view in sums.targets[:1]) or len(sums.targets) > 1
    block = min(1 << (lanes - 1).bit_length(), _TOGETHER if together else _LANES)
    return block, max(1, block // _WARP)


def _summed(block: int) -> int:
    """The sums of lanes that a program stores."""
    return max(1, block // _WARP)


def pointers(sums: TableSums) -> list[str]:
    arrays = [f"a{n}" for n, _ in enumerate(sums.gathered)]
    outs = [f"o{n}" for n, _ in enumerate(sums.targets)]
    return [*(f"f{n}" for n, _ in enumerate(sums.factors)), *arrays, *outs, *(["order", "starts"] * bool(sums.loop))]


def numbers(sums: TableSums) -> list[str]:
    return [*(f"n{n}" for n, _ in enumerate(sums.addressed)), "count", "edges", "spare"]


def shares(sums: TableSums) -> bool:
    """True if programs write rows of their own for b that have no row in the array that they loop over."""
    return bool(sums.loop) and any(view.rows != sums.loop for view in sums.targets)


def source(sums: TableSums, table: EntryTable, sizes: TableSizes, block: int, double: bool) -> str:
    """block: the lanes of a program."""
    extents, blocks = numbers(sums), -(-sizes.lanes // block)
    kind = "tl.float64" if double else "tl.float32"
    writer = _TableWriter(sums, table, sizes, kind, block)
    body = writer.body()
    head = [
        f"part = tl.program_id(0) % {blocks}",
        f"lane = part * {block} + tl.arange(0, {block})",
        f"live = lane < {sizes.lanes}",
        f"row = (tl.program_id(0) // {blocks}).to(tl.int64)",
        *writer.head,
        *(f"t{n}_{k} = tl.zeros([{block}], {kind})" for n, k in writer.kept()),
    ]
    if sums.loop:
        begin, step = "tl.load(starts + row)", ""
        if shares(sums):
            # Rows from `count` on share the b that have no row.
            head += ["own = tl.minimum(row, count)", "step = tl.where(row < count, 1, spare).to(tl.int32)"]
            begin, step = "tl.load(starts + own) + (row - own).to(tl.int32)", ", step"
        loop = f"for at in range({begin}, tl.load(starts + {'own' if step else 'row'} + 1){step}):"
        body = [loop, *(f"    {line}" for line in ["edge = tl.load(order + at).to(tl.int64)", *body])]
    else:
        body = ["edge = row", *body]
    signature = ", ".join([*pointers(sums), *(f'{n}: "i64"' for n in extents)])
    lines = "\n    ".join([*head, *body, *writer.last()])
    return (
        '"""Written by pumice.lower.unrolled."""\n\nimport triton\nimport triton.language as tl\n\n\n'
        f"@triton.jit(do_not_specialize={extents})\ndef unrolled({signature}):\n    {lines}\n"
    )


@dataclass
class _TableWriter:
    """Lines of a kernel. Component i of factor n is the variable fn_i, component k of target n tn_k.

    head: lines before the loop; lines: of the loop; named: the variables of expressions; begun: components of targets
    that have a sum."""

    sums: TableSums
    table: EntryTable
    sizes: TableSizes
    kind: str
    block: int
    head: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)
    begun: set[tuple[int, int]] = field(default_factory=set)

    def kept(self) -> Iterator[tuple[int, int]]:
        """The components of targets that are summed over the loop."""
        for n, view in enumerate(self.sums.targets):
            if view.rows == self.sums.loop:
                yield from ((n, k) for k in range(self.sizes.targets[n]))

    def body(self) -> list[str]:
        """The lines for one b: loads of what is read once, sums, stores last, as no load moves ahead of a store."""
        self.begun.update(self.kept())
        for n, view in enumerate(self.sums.gathered):
            self.lines.append(f"r{n} = tl.load(a{n} + edge).to(tl.int64)")
            self.lines.append(f"in{n} = (r{n} >= 0) & (r{n} < n{self.sums.addressed.index(view)})")
        for n, view in enumerate(self.sums.factors):
            if view.rows != self.sums.loop:
                for i in sorted(set(self.table.columns[n])):
                    self._load(n, i)
        for entries in self._chunks():
            for each in self.sums.sums:
                self._add(each, entries)
        for n, view in enumerate(self.sums.targets):
            if view.rows != self.sums.loop:
                self.lines += self._stores(n, view, "edge", "edges")
        return self.lines

    def last(self) -> Iterator[str]:
        """The lines after the loop."""
        stores = [
            self._stores(n, view, "row", "count")
            for n, view in enumerate(self.sums.targets)
            if view.rows == self.sums.loop
        ]
        yield from (line for lines in stores for line in lines)

    def _chunks(self) -> list[list[int]]:
        """The entries by the operand whose components have the fewest components of others: what was loaded for one is
        seldom needed for the next."""
        columns = self.table.columns
        groups = [_by(column) for column in columns if len(set(column)) > 1]
        if not groups or len(self.sums.sums) == 1:
            return [list(range(len(self.table.values)))]
        return min(groups, key=lambda parts: sum(len({c[q] for q in part}) for part in parts for c in columns))

    def _load(self, n: int, i: int) -> str:
        """The variable of a component of a factor."""
        name, view = f"f{n}_{i}", self.sums.factors[n]
        if self.named.setdefault(name, "") == "loaded":
            return name
        self.named[name] = "loaded"
        gathered, addressed = self.sums.gathered, self.sums.addressed
        row, masks = "", ["live"] * view.lanes
        if view.rows:
            at = f"r{gathered.index(view)}" if view in gathered else "row" if view.rows == self.sums.loop else "edge"
            row = f" + {at} * {self.sizes.factors[n] * (self.sizes.lanes if view.lanes else 1)}"
            masks += [f"in{gathered.index(view)}"] if view in gathered else []
            masks += [f"(row < n{addressed.index(view)})"] if at == "row" else []
        mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
        where = f"f{n}{row} + {i * (self.sizes.lanes if view.lanes else 1)}{' + lane' if view.lanes else ''}"
        (self.lines if view.rows else self.head).append(f"{name} = tl.load({where}{mask}).to({self.kind})")
        return name

    def _name(self, text: str) -> str:
        """The variable of an expression, computed where it is first needed."""
        if text not in self.named:
            self.named[text] = f"v{len(self.named)}"
            self.lines.append(f"{self.named[text]} = {text}")
        return self.named[text]

    def _add(self, each: Sum, entries: Sequence[int]) -> None:
        """A sum over some entries. Entries alike in all lanes are one number; those of one component of the target and
        of one other factor are summed before they are multiplied by it."""
        columns, target = self.table.columns, len(self.sums.factors) + each.target
        wide = [n for n in each.factors if self.sums.factors[n].lanes]
        alike = _grouped(entries, lambda q: (columns[target][q], *(columns[n][q] for n in wide)))
        shared = min(
            range(len(wide)), key=lambda at: len({key[:1] + key[at + 1 : at + 2] for key in alike}), default=-1
        )
        groups: dict[tuple[int, str], list[str]] = {}
        for (k, *places), own in alike.items():
            names = [self._load(n, i) for n, i in zip(wide, places, strict=True)]
            last = names.pop(shared) if names else ""
            product = [self._name(" * ".join(names))] if len(names) > 1 else names
            groups.setdefault((k, last), []).append(" * ".join([self._number(each, own), *product]))
        for (k, last), terms in groups.items():
            inner = " + ".join(terms)
            self._increase(each.target, k, f"{self._name(inner)} * {last}" if last else inner)

    def _number(self, each: Sum, entries: Sequence[int]) -> str:
        """The sum of these entries' products of factors without lanes."""
        narrow = [n for n in each.factors if not self.sums.factors[n].lanes]
        values = [each.coefficient * self.table.values[q] for q in entries]
        if not narrow:
            return repr(sum(values))
        loaded = [[self._load(n, self.table.columns[n][q]) for n in narrow] for q in entries]
        return self._name(" + ".join(" * ".join([repr(v), *names]) for v, names in zip(values, loaded, strict=True)))

    def _increase(self, n: int, k: int, text: str) -> None:
        self.lines.append(f"t{n}_{k} {'+=' if (n, k) in self.begun else '='} {text}")
        self.begun.add((n, k))

    def _stores(self, n: int, view: RowView, row: str, rows: str) -> list[str]:
        """The stores of a target in this row. rows: how many a block has, if lanes are summed."""
        masks = ["live"] * view.lanes + ["(row < count)"] * (row == "row" and bool(self.sums.loop))
        mask = f", mask={' & '.join(masks)}" if masks else ""
        size, parts = self.sizes.targets[n], _summed(self.block)
        found = []
        for k in range(size):
            value = f"t{n}_{k}" if (n, k) in self.begun else "live * 0.0"
            if view.lanes:
                place = f"{row} * {size * self.sizes.lanes} + {k * self.sizes.lanes} + lane"
            else:
                place = f"((part * {parts} + tl.arange(0, {parts})) * {rows} + {row}) * {size} + {k}"
                value = f"tl.sum(tl.reshape({value}, [{parts}, {self.block // parts}]), 1)"
            found.append(f"tl.store(o{n} + {place}, {value}{mask})")
        return found


def _by(column: Sequence[int]) -> list[list[int]]:
    return list(_grouped(range(len(column)), lambda q: (column[q],)).values())


def _grouped(entries: Sequence[int], key: Callable[[int], tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    for q in sorted(entries, key=key):
        found.setdefault(key(q), []).append(q)
    return found
