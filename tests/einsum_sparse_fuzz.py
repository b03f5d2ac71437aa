"""Random statements over sparse operands in formats of all kinds of levels: the same case for the same seed.

`PYTHONPATH=src:tests python tests/einsum_sparse_fuzz.py 1000` evaluates a thousand of them against the oracle's loops,
with the gradients of every tenth, and prints what differs; a second number is the first seed. Cases vary in dtypes and
layouts of operands, sizes (0 included) and lowerings with schedules, many of which are refused.
"""

from __future__ import annotations

import itertools
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from einsum_oracle import evaluate
from torch import Tensor

import pumice as pm
from pumice.errors import PumiceError, StatementError
from pumice.language.formats import KINDS, parse_format
from pumice.ops.sparse import Sparse

HALVES = (torch.float16, torch.bfloat16)
SECONDS = 60  # Of a processor, for a case that hangs


@dataclass(frozen=True)
class SparseCase:
    """A statement, its dense operands (0: absent) and the formats of sparse ones. declared: more declarations that the
    oracle does not read; lowering: see pm.einsum."""

    seed: int
    kind: str
    text: str
    tensors: Mapping[str, Tensor]
    formats: Mapping[str, str]
    declared: str = ""
    lowering: str = ""

    def __str__(self) -> str:
        facts = {name: (*x.shape, str(x.dtype)[6:], x.stride()) for name, x in self.tensors.items()}
        about = f"{facts}\n  {dict(self.formats)} {self.lowering}"
        return f"seed {self.seed} ({self.kind}): {self.statement}\n  {about}"

    @property
    def dtype(self) -> torch.dtype:
        """Of the target: the floating dtype of the operands, int64 if all are integers."""
        return next((x.dtype for x in self.tensors.values() if x.is_floating_point()), torch.int64)

    @property
    def statement(self) -> str:
        join = ", " if ";" in self.text else " ; "
        return self.text + (join + self.declared if self.declared else "")

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return {name: pm.sparse(x, self.formats[name]) if name in self.formats else x for name, x in tensors.items()}

    def run(self, tensors: Mapping[str, Tensor] | None = None) -> Tensor | Sparse:
        given = self.stored(self.tensors if tensors is None else tensors)
        return pm.einsum(self.statement, lowering=self.lowering, **given)

    def oracle(self) -> Tensor:
        """The dense target in float64."""
        if self.kind == "positions":
            return self.met()
        arrays = {name: (x.double() if x.is_floating_point() else x).numpy() for name, x in self.tensors.items()}
        sparse = [name for name in self.formats if self.kind in ("joined",)]
        if not self.text.startswith("O["):  # The oracle reads no scalar target: it has an axis of one here.
            head, _, right = self.text.partition(" ")
            return torch.from_numpy(evaluate(f"{head}[one] {right} ; one:1", arrays, sparse=sparse))[0]
        return torch.from_numpy(evaluate(self.text, arrays, sparse=sparse))

    def met(self) -> Tensor:
        """The positions (i, j, k) of entries of A and B and of the window's points, as a dense tensor of ones."""
        stored, a = self.stored(self.tensors), self.tensors["A"]
        every = [_positions(stored[name]) for name in "AB"]
        found = torch.zeros(len(every[0]), len(every[1]), self.tensors["F"].shape[0], dtype=torch.float64)
        steps = [[int(n) for n in each] for each in re.findall(r"(\d)\*p\d\+(\d)\*r", self.text)]
        for *p, r in itertools.product(*map(range, (*a.shape, found.shape[2]))):
            at = tuple(step * x + dilation * r - 1 for x, (step, dilation) in zip(p, steps, strict=True))
            if tuple(p) in every[0] and at in every[1]:
                found[every[0][tuple(p)], every[1][at], r] = 1
        return found


def _positions(x: Sparse) -> dict[tuple[int, ...], int]:
    """By the coordinates of an entry, its position."""
    lists = [x.parts[0].coords[axis].tolist() for axis in x.format.axes if axis in x.parts[0].coords]
    return {at: n for n, at in enumerate(zip(*lists, strict=True))}


@dataclass
class Draft:
    """A case in the making. ranges: sizes of the indices."""

    rng: random.Random
    numbers: np.random.Generator
    ranges: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def size(self) -> int:
        """Of an index: seldom none, sometimes more than a vector has lanes."""
        if self.chance(0.05):
            return self.rng.choice((0, 9, 17, 35))
        return self.rng.choice((1, 2, 2, 3, 3, 4, 5))

    def operand(self, name: str, shape: Sequence[int], sparse: float, listed: bool = False) -> None:
        """A float64 operand, sparse with this probability, listed: so that its entries are those that are not 0."""
        x = self.numbers.normal(size=tuple(shape))
        if self.chance(sparse) and len(shape) <= 5:
            self.formats[name] = random_format(self.rng, len(shape), listed)
            x = x * (self.numbers.random(x.shape) < self.rng.choice((0, 0.2, 0.5, 0.5, 0.8, 1)))
        self.tensors[name] = torch.from_numpy(x)


# Formats
def random_format(rng: random.Random, ndim: int, listed: bool = False) -> str:
    """A random valid format of the kinds that the package registers; listed: that stores what is not 0 alone."""
    while True:
        text = _drawn_format(rng, [f"a{n}" for n in range(ndim)])
        try:
            found = parse_format(text)
        except StatementError:
            continue
        if not listed or found.flattened == found.levels:
            return str(found)


def _drawn_format(rng: random.Random, axes: list[str]) -> str:
    order = rng.sample(axes, len(axes)) if rng.random() < 0.6 else list(axes)
    levels = list[str]()
    left = list(order)
    while left:
        kind = rng.choice("CHUUCG")
        count = rng.choice((1, 1, 2, len(left))) if KINDS[kind].fused else 1
        taken, left = left[:count], left[count:]
        sizes = rng.choice(("", "", "2", "2,4", "*")) if kind == "G" else ""
        levels.append(f"({' '.join(taken)}):{kind}{sizes}" if len(taken) > 1 else f"{taken[0]}:{kind}{sizes}")
    if rng.random() < 0.35:
        kind = rng.choice([k for k, found in KINDS.items() if found.sizes == (1,)])
        levels += [f"{axis}:{kind}{rng.choice((1, 2, 3, 4, 8))}" for axis in order if rng.random() < 0.6]
    split = [k for k, found in KINDS.items() if found.sizes == (0, 1)]
    if split and rng.random() < 0.15:
        levels.insert(0, f"{rng.choice(order)}:{rng.choice(split)}{rng.choice((1, 2, 3))}")
    return f"[{','.join(axes)}] {' '.join(levels)}"


# Statements
def contraction(d: Draft) -> tuple[str, str]:
    """Products of 2 or 3 operands over bare indices, and a second term sometimes."""
    names = list("ijkln")[: d.rng.choice((2, 3, 3, 4, 4, 5))]
    d.ranges = {name: d.size() for name in names}
    factors = _factors(d, names, "ABD"[: d.rng.choice((2, 2, 3))])
    used = sorted({name for _, axes in factors for name in axes})
    target = d.rng.sample(used, d.rng.randint(0, min(4, len(used))))
    right = " * ".join(f"{name}[{','.join(axes)}]" for name, axes in factors)
    if target and d.chance(0.1):
        d.tensors["O"] = torch.from_numpy(d.numbers.normal(size=[d.ranges[name] for name in target]))
        return f"{_target(target)} += {right}", ""
    if target and d.chance(0.15):
        right += f" {d.rng.choice('+-')} {d.rng.choice(('', '2*'))}E[{','.join(target)}]"
        d.operand("E", [d.ranges[name] for name in target], 0.6)
        return f"{_target(target)} = {right}", ""
    return f"{_target(target)} = {right}", _pattern(d, factors, target)


def _target(axes: Sequence[str]) -> str:
    return f"O[{','.join(axes)}]" if axes else "O"


def _factors(d: Draft, names: Sequence[str], operands: str, listed: bool = False) -> list[tuple[str, list[str]]]:
    found = list[tuple[str, list[str]]]()
    for name in operands:
        axes = d.rng.sample(names, d.rng.randint(1, min(4, len(names))))
        found.append((name, axes))
        d.operand(name, [d.ranges[axis] for axis in axes], 0.85, listed)
    return found


def _pattern(d: Draft, factors: Sequence[tuple[str, list[str]]], target: Sequence[str]) -> str:
    """A declaration that the target has the pattern of an operand, or a computed one."""
    for name, axes in factors:
        if name in d.formats and axes == target[: len(axes)] and d.chance(0.7):
            d.formats[name] = random_format(d.rng, len(axes), listed=True)
            return f"O:pattern({name})"
    if target and len(d.formats) == len(factors) and d.chance(0.2):
        return "O:pattern(*)"
    return ""


def convolution(d: Draft) -> tuple[str, str]:
    """Windows over 1 to 4 axes: batch, groups, stride, dilation, an offset; masked sometimes; transposed sometimes."""
    dim, turned = d.rng.choice((1, 1, 2, 2, 3, 4)), d.chance(0.25)
    outer, windows, taps = list[str](), list[str](), list[str]()
    wide, narrow, filters, declared = [], [], [], []
    for n in range(dim):
        p, r = f"p{n}", f"r{n}"
        stride, dilation, offset = d.rng.choice((1, 1, 2, 3)), d.rng.choice((1, 1, 2)), d.rng.choice((0, 0, 1, 2))
        outputs, size = d.rng.randint(1, max(2, 5 - dim)), d.rng.randint(1, 3 if dim < 4 else 2)
        outputs = d.rng.randint(8, 40) if dim < 3 and not n and d.chance(0.15) else outputs
        longest = stride * (outputs - 1) + dilation * (size - 1) + 1
        outer, taps = [*outer, p], [*taps, r]
        windows.append(f"{stride}*{p}+{dilation}*{r}" + (f"-{offset}" if offset else ""))
        wide.append(max(1, longest - d.rng.choice((0, 0, 1, offset))))
        narrow.append(outputs)
        filters.append(size)
        declared += [f"{p}:{outputs}", f"{r}:{size}"]
    batch = ["n"] * d.chance(0.5)
    group = ["g"] * (d.chance(0.25) and dim < 4)
    d.ranges = {"n": d.rng.choice((1, 2)), "g": 2, "c": d.rng.choice((1, 2, 3)), "m": d.rng.choice((1, 2, 3))}
    if dim < 3 and d.chance(0.15):
        d.ranges[d.rng.choice("cm")] = d.rng.randint(8, 20)
    own = outer if not turned else windows
    other = windows if not turned else outer
    sizes = (narrow, wide) if not turned else (wide, narrow)
    target = [*batch, *own, *group, "m"]
    factors = [("I", [*batch, *other, *group, "c"]), ("F", [*taps, *group, "c", "m"])]
    d.operand("I", [*(d.ranges[x] for x in batch), *sizes[1], *(d.ranges[x] for x in group), d.ranges["c"]], 0.9)
    d.operand("F", [*filters, *(d.ranges[x] for x in group), d.ranges["c"], d.ranges["m"]], 0.5)
    pattern = ""
    if d.chance(0.6):
        factors.insert(0, ("Mask", [*batch, *own]))
        d.operand("Mask", [*(d.ranges[x] for x in batch), *sizes[0]], 0.9)
        pattern = _pattern(d, factors[:1], target)
    right = " * ".join(f"{name}[{','.join(axes)}]" for name, axes in d.rng.sample(factors, len(factors)))
    if turned:
        declared.append(f"O:[{','.join(['_'] * len(batch) + [str(n) for n in wide] + ['_'] * (len(group) + 1))}]")
    return f"O[{','.join(target)}] = {right} ; {', '.join(declared)}", pattern


def joined(d: Draft) -> tuple[str, str]:
    """Max, min and mean of entries and of products."""
    names = list("ijkl")[: d.rng.choice((2, 3, 4))]
    d.ranges = {name: d.size() for name in names}
    factors = _factors(d, names, "AB"[: d.rng.choice((1, 2, 2))], listed=True)
    if len(d.formats) == 2 and d.chance(0.9):
        # Coordinates of a sparse operand must not be all that runs over an index.
        d.formats.pop("A")
        factors[0] = "A", d.rng.sample(names, len(names))
        d.operand("A", [d.ranges[axis] for axis in factors[0][1]], 0)
    used = sorted({name for _, axes in factors for name in axes})
    target = d.rng.sample(used, d.rng.randint(0, len(used) - 1))
    right = " * ".join(f"{name}[{','.join(axes)}]" for name, axes in factors)
    operator = d.rng.choice(("max", "min", "mean"))
    summed = [name for name in used if name not in target]
    # Mostly, coordinates of a sparse operand are reduced all together, and those of dense axes alone are summed.
    stored = {axis for name, axes in factors if name in d.formats for axis in axes}
    free = [name for name in summed if name not in stored or d.chance(0.1)]
    inner = d.rng.sample(free, d.rng.randint(0, len(free))) if len(free) < len(summed) else []
    outer = [name for name in summed if name not in inner]
    if inner and d.chance(0.5):
        right = f"sum({','.join(inner)}, {right})"
    elif outer and (inner or d.chance(0.8)):
        right = f"{operator}({','.join(outer)}, {right})"
    return f"{_target(target)} {operator}= {right}", ""


def indexed(d: Draft) -> tuple[str, str]:
    """Products with an index array on an axis of an operand, or of the target."""
    d.ranges = {"i": d.size(), "j": d.size(), "k": d.size(), "e": d.size() + 1}
    rows, columns = d.size(), d.size()
    for name, bound in (("L", rows), ("R", columns)):
        values = d.numbers.integers(-1, bound, size=d.ranges["e"])
        d.tensors[name] = torch.from_numpy(values.astype(np.int64))
    d.operand("A", [rows, d.ranges["k"]], 0.9)
    d.operand("B", [d.ranges["k"], d.ranges["j"]], 0.9)
    d.operand("W", [d.ranges["e"]], 0.5)
    right = "W[e] * A[L[e],k] * B[k,j]"
    if d.chance(0.5):
        return f"O[R[e],j] = {right} ; O:[{columns},_]", ""
    d.tensors.pop("R")
    return f"O[{d.rng.choice(('j', 'e,j', 'j,e'))}] = {right}", ""


def positions(d: Draft) -> tuple[str, str]:
    """Neighbour retrieval: the positions of entries that meet in a window along the first of 1 to 3 axes."""
    dim, taps = d.rng.choice((1, 2, 2, 3)), d.rng.randint(1, 3)
    steps = [(d.rng.choice((1, 1, 2)), d.rng.choice((1, 1, 2))) for _ in range(dim)]
    outer = [d.rng.randint(1, 4) for _ in range(dim)]
    window = ",".join(f"{step}*p{n}+{dilation}*r-1" for n, (step, dilation) in enumerate(steps))
    dense = d.rng.choice((0, 1))
    d.operand("A", outer, 1, listed=True)
    d.operand("B", [step * n + 1 for n, (step, _) in zip(outer, steps, strict=True)], 1, listed=True)
    if dense:
        d.formats["B"] = f"({' '.join(f'a{n}' for n in range(dim))}):{d.rng.choice('CH')} c:U"
        d.tensors["B"] = d.tensors["B"][..., None].expand(*d.tensors["B"].shape, 2)
    d.operand("F", [taps, 2], 0)
    names = ",".join(f"p{n}" for n in range(dim))
    ranges = ", ".join(f"p{n}:{size}" for n, size in enumerate(outer))
    right = f"A[{names}] * B[{window}{',:' * dense}] * F[r,:]"
    return f"O[i,j,k] = {right} ; {ranges}, i:pos(A), j:pos(B), k:pos(F)", ""


MAKERS = {
    "contraction": contraction,
    "convolution": convolution,
    "joined": joined,
    "indexed": indexed,
    "positions": positions,
}


# Variations
def varied(case: SparseCase, rng: random.Random) -> SparseCase:
    """The case with other dtypes and layouts of its operands, sometimes with a lowering."""
    kind = rng.choice((torch.float64,) * 6 + (torch.float32, torch.float32, *HALVES, torch.int64, torch.bool))
    tensors = {name: _as_kind(x, kind, rng) for name, x in case.tensors.items()}
    if rng.random() < 0.3:
        tensors = {name: _strided(x, rng) for name, x in tensors.items()}
    lowering = _lowering(case, rng) if rng.random() < 0.35 else ""
    return replace(case, tensors=tensors, lowering=lowering)


def _as_kind(x: Tensor, kind: torch.dtype, rng: random.Random) -> Tensor:
    """The operand in a floating dtype, or sometimes in one without fractions."""
    if not x.is_floating_point() or kind.is_floating_point:
        return x.to(kind) if x.is_floating_point() else x
    return x if rng.random() < 0.4 else (3 * x).to(kind)


def _strided(x: Tensor, rng: random.Random) -> Tensor:
    """The same values in another layout: axes in another order, every second element, from an offset on."""
    order = rng.sample(range(x.ndim), x.ndim)
    wide = x.new_zeros([2 * x.shape[axis] + 1 for axis in order])
    part = wide[tuple(slice(1, None, 2) for _ in order)].copy_(x.permute(order))
    return part.permute([order.index(axis) for axis in range(x.ndim)])


def _lowering(case: SparseCase, rng: random.Random) -> str:
    """A lowering, mostly nests with a schedule of the indices of the statement or of the entries' coordinates."""
    names = [*dict.fromkeys(re.findall(r"\b([a-z]\d?)\b(?!\()", case.text.partition(";")[0]))]
    chosen, one = rng.sample(names, len(names)), rng.choice(names)
    levels = [f"order {' '.join(chosen)}", f"vector {one}", f"locate {' '.join(rng.sample([*case.formats], 1))}"]
    entries = [
        f"order {' '.join(rng.sample([*names, 'e'], 2))}",
        rng.choice((f"vector {one}", f"vector {one}; pack {rng.choice('AIB')}", f"vector {one} 2; pack I")),
        f"split({rng.choice((one, 'a0', 'a1'))}, {rng.choice((1, 2, 3))})",
        f"parallel {rng.choice((one, 'a0'))}{rng.choice(('', ' chunk 2'))}",
        f"unroll e {rng.choice((2, 3))}",
        f"hold {rng.choice((1, 2, 8))}",
    ]
    parts = levels if len(case.formats) > 1 or case.kind == "convolution" and rng.random() < 0.5 else entries
    schedule = "; ".join(rng.sample(parts, rng.choice((1, 1, 2))))
    presets = ("skimcaffe", "deepsparse", "xnnpack", "direct", "map-based")
    return rng.choice(["nest", "graph", "reference", f"nest/{rng.choice(presets)}", *[f"nest/{schedule}"] * 6])


def random_sparse_case(seed: int) -> SparseCase:
    """The case of a seed."""
    rng = random.Random(f"sparse {seed}")
    kind = rng.choice(("contraction",) * 4 + ("convolution",) * 4 + ("joined", "indexed", "positions"))
    while True:
        d = Draft(rng, np.random.default_rng([seed, rng.randrange(1 << 30)]))
        text, declared = MAKERS[kind](d)
        if d.formats:
            return varied(SparseCase(seed, kind, text, d.tensors, d.formats, declared), rng)


# Checks
def check(case: SparseCase) -> str:
    """Raise AssertionError if the value differs from the oracle's; "refused: ..." if the package refuses the case."""
    try:
        got = case.run()
    except PumiceError as error:
        told = re.sub(r"`.*?`|\S*[\[\]()':*]\S*|\b[A-Z]?[a-z]?\d*\b|\d+", "", str(error).splitlines()[0])
        return f"refused: {type(error).__name__}: {' '.join(told.split())[:70]}"
    dense, wanted = got.to_dense() if isinstance(got, Sparse) else got, case.oracle()
    assert case.kind == "positions" or dense.dtype == case.dtype, f"{case}\n{dense.dtype}"
    near = max(1e-9, 8 * torch.finfo(case.dtype).eps if case.dtype.is_floating_point else 0)
    far = near * max(1.0, float(wanted.abs().max())) if wanted.numel() else near
    torch.testing.assert_close(dense.double(), wanted, rtol=near, atol=far, msg=lambda found: f"{case}\n{found}")
    return "right"


def differentiable(case: SparseCase) -> bool:
    """True if differences tell its gradients, soon: there are no kinks, and all operands are float64 and small."""
    if sum(x.numel() for x in case.tensors.values()) > 200:
        return False
    exact = all(x.dtype == torch.float64 or name in "LR" for name, x in case.tensors.items())
    return exact and case.kind not in ("joined", "positions")


def check_gradients(case: SparseCase) -> None:
    """Gradients of stored entries, against finite differences in float64."""
    kept = {name: x != 0 for name, x in case.tensors.items() if name in case.formats}
    names = [name for name, x in case.tensors.items() if x.is_floating_point()]

    # Copies: gradcheck writes to its inputs through .data, which caches of what depends on a tensor do not see.
    def run(*values: Tensor) -> Tensor:
        given = {**case.tensors, **dict(zip(names, [x.clone() for x in values], strict=True))}
        given |= {name: given[name] * kept[name] for name in kept}
        stored: dict[str, Any] = {n: _refilled(case, n, x, kept[n]) if n in kept else x for n, x in given.items()}
        got = pm.einsum(case.statement, lowering=case.lowering, **stored)
        return got.to_dense() if isinstance(got, Sparse) else got

    leaves = [case.tensors[name].clone(memory_format=torch.contiguous_format).requires_grad_() for name in names]
    assert torch.autograd.gradcheck(run, leaves, raise_exception=True), str(case)


def _refilled(case: SparseCase, name: str, x: Tensor, kept: Tensor) -> Sparse:
    """The operand with the entries of the case; finite differences change no zero into an entry."""
    return pm.sparse(torch.where(kept, x, 0), case.formats[name])


def report(first: int, count: int, each_gradient: int = 10) -> Counter[str]:
    """What became of these seeds; prints what is not right."""
    found = Counter[str]()
    for seed in range(first, first + count):
        case = random_sparse_case(seed)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # Ends the process, also in a loop of C.
        print(f"\r{seed}", end="\r", file=sys.stderr, flush=True)
        try:
            outcome = check(case)
            if outcome == "right" and seed % each_gradient == 0 and differentiable(case):
                check_gradients(case)
                found["gradients"] += 1
        except Exception as error:
            outcome = f"WRONG {type(error).__name__}"
            print(f"{case}\n  {outcome}: {str(error)[-600:]}\n", flush=True)
        found[f"{case.kind}: {outcome.partition(':')[0]}"] += 1
        if outcome.startswith("refused"):
            found[outcome] += 1
        elif case.lowering:
            found[f"{outcome} with {case.lowering.partition(' ')[0]}"] += 1
    return found


if __name__ == "__main__":
    count, first = (*map(int, sys.argv[1:]), *(1000, 0)[len(sys.argv) - 1 :])
    for outcome, times in sorted(report(first, count).items()):
        print(f"{times:6d}  {outcome}")
