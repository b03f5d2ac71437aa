"""Random statements over sparse operands in formats of all kinds of levels: the same case for the same seed.

`PYTHONPATH=src:tests python tests/einsum_sparse_fuzz.py 1000` evaluates a thousand of them against the oracle's loops,
with the gradients of every tenth, and prints what differs; a second number is the first seed.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from einsum_oracle import evaluate
from torch import Tensor

import pumice as pm
from pumice.errors import PumiceError, StatementError
from pumice.language.formats import KINDS, parse_format
from pumice.ops.sparse import Sparse

LISTED = [kind for kind, found in KINDS.items() if found.sizes == (0,)]  # neither sizes nor blocks


@dataclass(frozen=True)
class SparseCase:
    """A statement, its dense operands (0: absent) and the formats of sparse ones. declared: more declarations that the
    oracle does not read."""

    seed: int
    kind: str
    text: str
    tensors: Mapping[str, Tensor]
    formats: Mapping[str, str]
    declared: str = ""

    def __str__(self) -> str:
        shapes = {name: tuple(x.shape) for name, x in self.tensors.items()}
        return f"seed {self.seed} ({self.kind}): {self.statement}\n  {shapes}\n  {dict(self.formats)}"

    @property
    def statement(self) -> str:
        join = ", " if ";" in self.text else " ; "
        return self.text + (join + self.declared if self.declared else "")

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return {name: pm.sparse(x, self.formats[name]) if name in self.formats else x for name, x in tensors.items()}

    def run(self, tensors: Mapping[str, Tensor] | None = None) -> Tensor | Sparse:
        return pm.einsum(self.statement, **self.stored(self.tensors if tensors is None else tensors))

    def oracle(self) -> Tensor:
        arrays = {name: x.numpy() for name, x in self.tensors.items()}
        sparse = [name for name in self.formats if self.kind in ("joined",)]
        if not self.text.startswith("O["):  # The oracle reads no scalar target: it has an axis of one here.
            head, _, right = self.text.partition(" ")
            return torch.from_numpy(evaluate(f"{head}[one] {right} ; one:1", arrays, sparse=sparse))[0]
        return torch.from_numpy(evaluate(self.text, arrays, sparse=sparse))


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
    """A random valid format of the kinds that the package registers."""
    while True:
        text = _drawn_format(rng, [f"a{n}" for n in range(ndim)], listed)
        try:
            return str(parse_format(text))
        except StatementError:
            continue


def _drawn_format(rng: random.Random, axes: list[str], listed: bool) -> str:
    order = rng.sample(axes, len(axes)) if rng.random() < 0.6 else list(axes)
    levels = list[str]()
    left = list(order)
    while left:
        kind = rng.choice(LISTED if listed else [*LISTED, "U", "U", "C", "G"])
        count = rng.choice((1, 1, 2, len(left))) if KINDS[kind].fused else 1
        taken, left = left[:count], left[count:]
        sizes = rng.choice(("", "", "2", "2,4", "*")) if kind == "G" else ""
        levels.append(f"({' '.join(taken)}):{kind}{sizes}" if len(taken) > 1 else f"{taken[0]}:{kind}{sizes}")
    if not listed and rng.random() < 0.35:
        kind = rng.choice([k for k, found in KINDS.items() if found.sizes == (1,)])
        levels += [f"{axis}:{kind}{rng.choice((1, 2, 3, 4))}" for axis in order if rng.random() < 0.6]
    split = [k for k, found in KINDS.items() if found.sizes == (0, 1)]
    if not listed and split and rng.random() < 0.15:
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
    """Windows over 1 to 3 axes: batch, groups, stride, dilation, an offset; masked sometimes; transposed sometimes."""
    dim, turned = d.rng.choice((1, 1, 2, 2, 3)), d.chance(0.25)
    outer, windows, taps = list[str](), list[str](), list[str]()
    wide, narrow, filters, declared = [], [], [], []
    for n in range(dim):
        p, r = f"p{n}", f"r{n}"
        stride, dilation, offset = d.rng.choice((1, 1, 2, 3)), d.rng.choice((1, 1, 2)), d.rng.choice((0, 0, 1, 2))
        outputs, size = d.rng.randint(1, 5 - dim), d.rng.randint(1, 3)
        longest = stride * (outputs - 1) + dilation * (size - 1) + 1
        outer, taps = [*outer, p], [*taps, r]
        windows.append(f"{stride}*{p}+{dilation}*{r}" + (f"-{offset}" if offset else ""))
        wide.append(max(1, longest - d.rng.choice((0, 0, 1, offset))))
        narrow.append(outputs)
        filters.append(size)
        declared += [f"{p}:{outputs}", f"{r}:{size}"]
    batch = ["n"] * d.chance(0.5)
    group = ["g"] * d.chance(0.25)
    d.ranges = {"n": d.rng.choice((1, 2)), "g": 2, "c": d.rng.choice((1, 2, 3)), "m": d.rng.choice((1, 2, 3))}
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
    if len(d.formats) == 2:
        d.formats.pop("A")
    used = sorted({name for _, axes in factors for name in axes})
    target = d.rng.sample(used, d.rng.randint(0, len(used) - 1))
    right = " * ".join(f"{name}[{','.join(axes)}]" for name, axes in factors)
    summed = [name for name in used if name not in target]
    inner = d.rng.sample(summed, d.rng.randint(0, len(summed) - 1)) if summed else []
    if inner:
        right = f"sum({','.join(inner)}, {right})"
    return f"{_target(target)} {d.rng.choice(('max', 'min', 'mean'))}= {right}", ""


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


MAKERS = {"contraction": contraction, "convolution": convolution, "joined": joined, "indexed": indexed}


def random_sparse_case(seed: int) -> SparseCase:
    """The case of a seed."""
    rng = random.Random(f"sparse {seed}")
    kind = rng.choice(("contraction",) * 4 + ("convolution",) * 4 + ("joined", "indexed"))
    while True:
        d = Draft(rng, np.random.default_rng([seed, rng.randrange(1 << 30)]))
        text, declared = MAKERS[kind](d)
        if d.formats:
            return SparseCase(seed, kind, text, d.tensors, d.formats, declared)


# Checks
def check(case: SparseCase) -> str:
    """Raise AssertionError if the value differs from the oracle's; "refused: ..." if the package refuses the case."""
    try:
        got = case.run()
    except PumiceError as error:
        return f"refused: {type(error).__name__}: {str(error).splitlines()[0]}"
    dense = got.to_dense() if isinstance(got, Sparse) else got
    torch.testing.assert_close(dense, case.oracle(), rtol=1e-9, atol=1e-9, msg=lambda found: f"{case}\n{found}")
    return "right"


def check_gradients(case: SparseCase) -> None:
    """Gradients of stored entries, against finite differences in float64."""
    kept = {name: x != 0 for name, x in case.tensors.items() if name in case.formats}
    names = [name for name, x in case.tensors.items() if x.is_floating_point()]

    # Copies: gradcheck writes to its inputs through .data, which caches of what depends on a tensor do not see.
    def run(*values: Tensor) -> Tensor:
        given = {**case.tensors, **dict(zip(names, [x.clone() for x in values], strict=True))}
        given |= {name: given[name] * kept[name] for name in kept}
        stored: dict[str, Any] = {n: _refilled(case, n, x, kept[n]) if n in kept else x for n, x in given.items()}
        got = pm.einsum(case.statement, **stored)
        return got.to_dense() if isinstance(got, Sparse) else got

    leaves = [case.tensors[name].clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(run, leaves, raise_exception=True), str(case)


def _refilled(case: SparseCase, name: str, x: Tensor, kept: Tensor) -> Sparse:
    """The operand with the entries of the case; finite differences change no zero into an entry."""
    return pm.sparse(torch.where(kept, x, 0), case.formats[name])


def report(first: int, count: int, each_gradient: int = 10) -> Counter[str]:
    """What became of these seeds; prints what is not right."""
    found = Counter[str]()
    for seed in range(first, first + count):
        case = random_sparse_case(seed)
        try:
            outcome = check(case)
            if outcome == "right" and seed % each_gradient == 0 and case.kind != "joined":
                check_gradients(case)
                found["gradients"] += 1
        except Exception as error:
            outcome = f"WRONG {type(error).__name__}"
            print(f"{case}\n  {outcome}: {str(error)[-600:]}\n", flush=True)
        found[f"{case.kind}: {outcome.partition(':')[0]}"] += 1
        if outcome.startswith("refused"):
            found[outcome[:110]] += 1
    return found


if __name__ == "__main__":
    count, first = (*map(int, sys.argv[1:]), *(1000, 0)[len(sys.argv) - 1 :])
    for outcome, times in sorted(report(first, count).items()):
        print(f"{times:6d}  {outcome}")
