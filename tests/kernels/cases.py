"""The statements that kernels are emitted for: those of the four case studies, their derivatives, and a few others.

One table serves the interpreter (small random operands) and the cross-compiler (operands of real size, no memory).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement, bind
from pumice.language.derive import derivative, gradient_name
from pumice.language.nodes import Statement, accesses_of
from pumice.language.parse import parse

SMALL_BLOCK = 16
"""The blocks that the interpreter takes; the cross-compiler takes the others."""


@dataclass(frozen=True)
class Study:
    """A forward statement.

    axes: of every operand, and of the target under "", as symbols.
    reach: what the values of an index array are places of: the axis, in units of a block.
    block: the side of a block, 0 where there are none.
    only: the operands by which it is derived, "" for itself; all if empty.
    """

    kind: str
    text: str
    axes: Mapping[str, str]
    reach: Mapping[str, tuple[str, int]]
    block: int = 0
    only: tuple[str, ...] = ()

    @property
    def statement(self) -> Statement:
        return parse(self.text)

    @property
    def values(self) -> list[str]:
        return [name for name in self.axes if name and name not in self.reach]


_SPMM = "C[{m},n] = A_values[{at}] * B[{k},n] ; A_m:sorted"


def _spmm(at: str, k: str, block: int = 0) -> Study:
    if block:
        text = _SPMM.format(m=f"{block}*A_m[p]+m_in", at=f"{at},m_in,k_in", k=f"{block}*A_k[{k}]+k_in")
    else:
        text = _SPMM.format(m="A_m[p]", at=at, k=f"A_k[{k}]")
    inner = " m_in k_in" if block else ""
    axes = {"A_m": "p", "A_k": " ".join(k.split(",")), "A_values": " ".join(at.split(",")) + inner}
    reach = {"A_m": ("M", block or 1), "A_k": ("K", block or 1)}
    return Study("block spmm" if block else "spmm", text, {**axes, "B": "K n", "": "M n"}, reach, block)


_MAPS = {
    "pairs": ("o[p]", "k[p]", "i[p]", "k:sorted", {"o": "p", "k": "p", "i": "p"}, {"o": "N", "k": "V", "i": "I"}),
    "compacted": (
        "rows[tile[e],b]",
        "k[e]",
        "met[e,b]",
        "tile:sorted, rows:distinct, rows:onto",
        {"rows": "T b", "tile": "e", "k": "e", "met": "e b"},
        {"rows": "N", "tile": "T", "k": "V", "met": "I"},
    ),
    "compacted_t": (
        "met[e,b]",
        "k[e]",
        "rows[tile[e],b]",
        "tile:sorted, rows:distinct, rows:onto",
        {"rows": "T b", "tile": "e", "k": "e", "met": "e b"},
        {"rows": "I", "tile": "T", "k": "V", "met": "N"},
    ),
    "grouped": (
        "o[h,q]",
        "k[h]",
        "i[h,q]",
        "",
        {"o": "h q", "k": "h", "i": "h q"},
        {"o": "N", "k": "V", "i": "I"},
    ),
    "compacted_w": (
        "o[e,b]",
        "k[e]",
        "i[e,b]",
        "k:sorted",
        {"o": "e b", "k": "e", "i": "e b"},
        {"o": "N", "k": "V", "i": "I"},
    ),
    "online": (
        "rows[tile[e],b]",
        "k[e]",
        "met[rows[tile[e],b],k[e]]",
        "tile:sorted, rows:distinct, rows:onto",
        {"rows": "T b", "tile": "e", "k": "e", "met": "N V"},
        {"rows": "N", "tile": "T", "k": "V", "met": "I"},
    ),
    "online_t": (
        "met[rows[tile[e],b],k[e]]",
        "k[e]",
        "rows[tile[e],b]",
        "tile:sorted, rows:distinct, rows:onto",
        {"rows": "T b", "tile": "e", "k": "e", "met": "I V"},
        {"rows": "I", "tile": "T", "k": "V", "met": "N"},
    ),
    "online_w": (
        "rows[tile[e],b]",
        "k[e]",
        "met[rows[tile[e],b],k[e]]",
        "k:sorted",
        {"rows": "T b", "tile": "e", "k": "e", "met": "N V"},
        {"rows": "N", "tile": "T", "k": "V", "met": "I"},
    ),
    "table": ("o", "k", "met[o,k]", "", {"met": "N V"}, {"met": "I"}),
    "table_t": ("met[i,k]", "k", "i", "", {"met": "I V"}, {"met": "N"}),
}


ONLY: Mapping[str, tuple[str, ...]] = {"_w": ("W",), "online": ("",), "online_t": ("X",)}
"""By the end of a form's name: the forms that one pass reads, itself or its derivative by this operand."""


def only(form: str) -> tuple[str, ...]:
    return next((own for end, own in ONLY.items() if form.endswith(end)), ())


def _conv(form: str, groups: bool) -> Study:
    """A convolution over a form of the kernel map, with or without channel groups."""
    out, tap, met, facts, axes, reach = _MAPS[form]
    g = "g," if groups else ""
    text = f"O[{out},{g}n] = X[{met},{g}c] * W[{g}n,{tap},c]" + (f" ; {facts}" if facts else "")
    g = "g " if groups else ""
    sizes = {**axes, "X": f"I {g}c", "W": f"{g}n V c", "": f"N {g}n"}
    return Study("convolution", text, sizes, {name: (axis, 1) for name, axis in reach.items()}, only=only(form))


def _tensor_product(grouped: bool, own: bool) -> Study:
    """The equivariant tensor product over stored Clebsch-Gordan entries; `own`: weights of each sample."""
    at, path = ("p,q", "L[p]") if grouped else ("p", "L[p]")
    sample = "b," if own else ""
    sort = "L" if grouped else "I"
    text = f"Z[b,I[{at}],w] = V[{at}] * X[b,J[{at}],u] * Y[b,K[{at}]] * W[{sample}{path},u,w] ; {sort}:sorted"
    place = " ".join(at.split(","))
    axes = {"V": place, "I": place, "J": place, "K": place, "L": "p"}
    axes |= {"X": "b nj u", "Y": "b nk", "W": ("b " if own else "") + "nl u w", "": "b ni w"}
    return Study("tensor product", text, axes, {"I": ("ni", 1), "J": ("nj", 1), "K": ("nk", 1), "L": ("nl", 1)})


def _tensor_tables(own: bool) -> Study:
    """The same over tables of the third index and the value by path, result and first factor."""
    sample = "b," if own else ""
    text = f"Z[b,i,w] = V[l,i,j,q] * X[b,j,u] * Y[b,K[l,i,j,q]] * W[{sample}l,u,w]"
    axes = {"V": "l i j q", "K": "l i j q", "X": "b j u", "Y": "b nk", "W": ("b " if own else "") + "l u w"}
    return Study("tensor tables", text, {**axes, "": "b i w"}, {"K": ("nk", 1)})


STUDIES: Mapping[str, Study] = {
    "coo": _spmm("p", "p"),
    "group_coo": _spmm("p,q", "p,q"),
    **{f"bcsr_{block}": _spmm("p", "p", block) for block in (SMALL_BLOCK, 32, 128)},
    **{f"block_group_coo_{block}": _spmm("p,q", "p,q", block) for block in (SMALL_BLOCK, 32, 128)},
    **{f"conv_{form}": _conv(form, False) for form in _MAPS},
    **{f"conv_g_{form}": _conv(form, True) for form in _MAPS},
    "tp": _tensor_product(False, False),
    "tp_own": _tensor_product(False, True),
    "tp_grouped": _tensor_product(True, False),
    "tp_grouped_own": _tensor_product(True, True),
    "tp_tables": _tensor_tables(False),
    "tp_tables_own": _tensor_tables(True),
}
"""The forward statements of the case studies, in the forms that a kernel reads."""

SMALL: Mapping[str, Mapping[str, int]] = {
    "block spmm": {"M": 4 * SMALL_BLOCK, "K": 3 * SMALL_BLOCK, "n": 37, "p": 5, "q": 2},
    "spmm": {"M": 23, "K": 19, "n": 13, "p": 41, "q": 3},
    "convolution": {
        "N": 29,
        "I": 31,
        "V": 5,
        "n": 13,
        "c": 9,
        "p": 37,
        "e": 7,
        "T": 3,
        "b": 11,
        "h": 6,
        "q": 11,
        "g": 2,
    },
    "tensor product": {"b": 9, "ni": 3, "nj": 3, "nk": 4, "nl": 2, "u": 9, "w": 10, "p": 5, "q": 2},
    "tensor tables": {"b": 2, "i": 4, "j": 5, "nk": 4, "l": 2, "u": 9, "w": 10, "q": 2},
}
LARGE: Mapping[str, Mapping[str, int]] = {
    "block spmm": {"M": 4096, "K": 4096, "n": 4096, "p": 1000, "q": 4},
    "spmm": {"M": 100_000, "K": 100_000, "n": 128, "p": 1_000_000, "q": 4},
    "convolution": {
        **{"N": 100_000, "I": 100_000, "V": 27, "n": 128, "c": 128, "p": 1_000_000},
        **{"e": 8_000, "T": 800, "b": 128, "h": 500, "q": 2048, "g": 2},
    },
    "tensor product": {"b": 10_000, "ni": 16, "nj": 16, "nk": 16, "nl": 16, "u": 64, "w": 64, "p": 300, "q": 16},
    "tensor tables": {"b": 10_000, "i": 9, "j": 9, "nk": 9, "l": 11, "u": 32, "w": 32, "q": 2},
}


@dataclass(frozen=True)
class Case:
    """A forward statement or, with `wrt`, its derivative by that operand, at certain sizes."""

    study: str
    wrt: str = ""
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.study}:d{self.wrt}" if self.wrt else self.study

    @property
    def statement(self) -> Statement:
        statement = STUDIES[self.study].statement
        return derivative(statement, self.wrt)[0] if self.wrt else statement

    def at(self, sizes: Mapping[str, Mapping[str, int]], **other: int) -> Case:
        """The case at the sizes of its kind, some of them exchanged."""
        study = STUDIES[self.study]
        found = {**sizes[study.kind], "m_in": study.block, "k_in": study.block, **other}
        return replace(self, sizes=tuple(found.items()))

    def _shape(self, name: str) -> tuple[int, ...]:
        sizes = dict(self.sizes)
        return tuple(sizes[axis] for axis in STUDIES[self.study].axes[name].split())

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the target."""
        return self._shape(self.wrt)

    @property
    def read(self) -> list[str]:
        """The operands that are read."""
        statement = self.statement
        return sorted({a.name for a in accesses_of(*statement.terms, *statement.target.indices)})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the operands that are read."""
        upstream = gradient_name(STUDIES[self.study].statement)
        return {name: self._shape("" if name == upstream else name) for name in self.read}

    @property
    def indices(self) -> set[str]:
        """The operands that are index arrays."""
        return set(STUDIES[self.study].reach) & set(self.read)


CASES: Mapping[str, Case] = {
    case.name: case
    for name, study in STUDIES.items()
    for case in (Case(name, wrt) for wrt in study.only or ("", *study.values))
}
"""Every forward statement and every first derivative of it, but what no pass reads of a form for others."""


@dataclass(frozen=True)
class Problem:
    """A bound statement with operands."""

    bound: BoundStatement
    operands: Mapping[str, Tensor] = field(repr=False)

    @staticmethod
    def of(text: str | Statement, operands: Mapping[str, Tensor], shape: tuple[int, ...] | None = None) -> Problem:
        statement = parse(text) if isinstance(text, str) else text
        shapes = {name: tuple(t.shape) for name, t in operands.items()}
        return Problem(bind(statement, shapes, shape, strict=isinstance(text, str)), operands)

    def to(self, dtype: torch.dtype) -> Problem:
        """With values in a dtype."""
        cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in self.operands.items()}
        return replace(self, operands=cast)


def problem(case: Case, seed: int = 0) -> Problem:
    """Random operands: index arrays hold -1 (sorted ones begin with it) and leave places out."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {seed}".encode()))
    study, sizes = STUDIES[case.study], dict(case.sizes)
    facts = dict(case.statement.facts)
    operands: dict[str, Tensor] = {}
    for name, shape in case.shapes.items():
        if name in study.reach:
            axis, unit = study.reach[name]
            operands[name] = _places(shape, sizes[axis] // unit, facts.get(name, ""), generator)
        else:
            operands[name] = torch.randn(shape, generator=generator)
    return Problem.of(case.statement, operands, case.shape)


def _places(shape: tuple[int, ...], extent: int, fact: str, generator: torch.Generator) -> Tensor:
    count = torch.Size(shape).numel()
    if fact in ("distinct", "onto"):
        assert fact == "distinct" or count >= extent, f"{count} entries do not reach {extent} places"
        found = torch.full((count,), -1)
        chosen = torch.randperm(extent, generator=generator)[:count]
        found[: len(chosen)] = chosen
        return found.reshape(shape).int()
    found = torch.randint(-1, max(extent, 1), (count,), generator=generator) if extent else torch.full((count,), -1)
    return (found.sort().values if fact == "sorted" else found).reshape(shape).int()


def meta(case: Case, dtype: torch.dtype) -> Problem:
    """Operands without memory."""
    operands = {
        name: torch.empty(shape, dtype=torch.int32 if name in case.indices else dtype, device="meta")
        for name, shape in case.shapes.items()
    }
    return Problem.of(case.statement, operands, case.shape)


def variants(case: Case) -> Iterator[tuple[str, Case]]:
    """The case at sizes that are easy to get wrong."""
    study = STUDIES[case.study]
    used = set(" ".join(study.axes.values()).split())
    entries = next(axis for axis in ("e", "h", "p", "l", "N", "I") if axis in used)
    rows = study.axes[""].split()[0]
    few = {"p": 2} if study.block else {}
    yield "one column", case.at(SMALL, **{"w" if "w" in used else "n": 1}, **few)
    yield "nothing stored", case.at(SMALL, **{entries: 0})
    yield "no rows", case.at(SMALL, **{rows: 0})
    yield "one row", case.at(SMALL, **{rows: study.block or 1})
