"""Equivariant tensor products of features of O(3), each a sparse einsum over a table of Clebsch-Gordan coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pumice.errors import DtypeError, OptionError, ShapeError
from pumice.ops import Irreps, Sparse, clebsch_gordan, einsum, sparse_from_coords
from pumice.ops.graph import ends_of

MODES = {
    "uvw": ("u", "v", "w", "uvw"),
    "uvu": ("u", "v", "u", "uv"),
    "uvv": ("u", "v", "v", "uv"),
    "uuw": ("u", "u", "w", "uw"),
    "uuu": ("u", "u", "u", "u"),
    "uvuv": ("u", "v", "uv", "uv"),
    "uvu<v": ("q", "q", "q", "q"),
    "u<vw": ("q", "q", "w", "qw"),
}
"""By mode: the channel indices of the first factor, the second, the result and the weight. q: the pairs u < v, of the
channel u of the first factor and the channel v of the second."""
LAYOUTS = ("mul_ir", "ir_mul")


class Instruction(NamedTuple):
    """A path: the positions of its irreps in both factors and the result, how channels meet (see MODES), whether it has
    weights, and a factor under the root of its normalization."""

    first: int
    second: int
    result: int
    mode: str
    has_weight: bool
    path_weight: float = 1.0


class TensorProduct(nn.Module):
    """The tensor product of two features in irreps of O(3), along the paths that instructions name,

        Z[b,k,w] = sum over paths p of c[p] * CG[k,i,j,p] * X[b,i,u] * Y[b,j,v] * W[p,u,v,w]             (mode "uvw")

    where i, j, k are components and u, v, w channels; other modes share channels: "uvu" gives each channel u of X
    a result, with weights [u, v]; "uvv", "uuw", "uuu", "uvuv", "uvu<v" and "u<vw" are alike. The names, the
    normalizations, the order of weights and the state_dict are those of e3nn.o3.TensorProduct.

    forward(x1 [..., irreps_in1.dim], x2 [..., irreps_in2.dim], weight): the leading axes broadcast. weight: None if
    internal, [weight_numel] if shared, else [..., weight_numel]. Differentiable any number of times in all three.

    With `edges` [2, E] (source, target) it is the message passing of MACE and NequIP, without a message in memory:

        out[target[e]] += TP(x1[source[e]], x2[e], weight[e])        x1 [N, ..], x2 [E, ..] -> [num_nodes or N, ..]

    in any order of the edges; edges of -1 are padding.

    Parameters
    ----------
    irreps_in1, irreps_in2, irreps_out: Irreps or text, as "16x0e + 16x1o".
    instructions: (first, second, result, mode, has_weight[, path_weight]) each, or a mode: all paths of it, weighted.
    shared_weights: one weight for all samples (default); internal_weights: it is a parameter (default: if shared).
    in1_var, in2_var, out_var: the variance of each of the irreps, by which paths are normalized (default: 1).
    irrep_normalization: "component", "norm" or "none"; path_normalization: "element", "path" or "none".
    layout: of the last axes: "mul_ir" (e3nn's) has the components of a channel side by side, "ir_mul" the channels of a
        component, which is what the kernels read.
    Raises OptionError for instructions that do not fit the irreps and unknown options, ShapeError for other axes.

    Source: Geiger and Smidt, "e3nn: Euclidean Neural Networks" (section 4.3); as an einsum, Insum (section 6.5).
    """

    weight: Tensor
    output_mask: Tensor
    irreps_in1: Irreps
    irreps_in2: Irreps
    irreps_out: Irreps

    def __init__(
        self,
        irreps_in1: str | Irreps,
        irreps_in2: str | Irreps,
        irreps_out: str | Irreps,
        instructions: str | Sequence[tuple[Any, ...]],
        *,
        shared_weights: bool | None = None,
        internal_weights: bool | None = None,
        in1_var: Sequence[float] | Tensor | None = None,
        in2_var: Sequence[float] | Tensor | None = None,
        out_var: Sequence[float] | Tensor | None = None,
        irrep_normalization: str = "component",
        path_normalization: str = "element",
        layout: str = "mul_ir",
    ) -> None:
        super().__init__()
        self.irreps_in1, self.irreps_in2, self.irreps_out = map(Irreps, (irreps_in1, irreps_in2, irreps_out))
        OptionError.check("layout", layout, LAYOUTS)
        self.layout = layout
        irreps = self.irreps_in1, self.irreps_in2, self.irreps_out
        self.instructions: list[Instruction] = _instructions(irreps, instructions)
        weighted = any(each.has_weight for each in self.instructions)
        self.shared_weights: bool = True if shared_weights is None else shared_weights
        self.internal_weights: bool = self.shared_weights and weighted if internal_weights is None else internal_weights
        if self.internal_weights and not self.shared_weights:
            raise OptionError("internal weights are shared by all samples: expected shared_weights=True, found False")
        variances = _variances(irreps, (in1_var, in2_var, out_var))
        scales = _normalized(irreps, self.instructions, variances, (irrep_normalization, path_normalization))
        self._parts = _parts(irreps, self.instructions, scales, self.shared_weights)
        self.weight_numel: int = sum(math.prod(_weights(irreps, each)) for each in self.instructions if each.has_weight)
        if self.internal_weights and weighted:
            self.weight = nn.Parameter(torch.randn(self.weight_numel))
        else:
            self.register_buffer("weight", torch.empty(0))
        every = zip(self.instructions, scales, strict=True)
        reached = {each.result for each, scale in every if scale and math.prod(_weights(irreps, each))}
        mask = [torch.full((ir.dim,), float(n in reached)) for n, ir in enumerate(self.irreps_out)]
        self.register_buffer("output_mask", torch.cat([torch.empty(0), *mask]))
        self._set_tables()

    def _set_tables(self) -> None:
        """The tables on the module's device, rounded once to its dtype."""
        device, dtype = self.output_mask.device, self.output_mask.dtype
        self._tables = {dtype: [part.tables(device, dtype) for part in self._parts]}

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> TensorProduct:
        super()._apply(fn, recurse)
        self._set_tables()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # e3nn keeps its tables of coefficients in buffers of generated modules.
        for name in [name for name in state_dict if name.startswith(f"{prefix}_compiled_main_")]:
            del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        weight: Tensor | None = None,
        *,
        edges: Tensor | None = None,
        num_nodes: int | None = None,
    ) -> Tensor:
        for name, x in (("x1", x1), ("x2", x2), ("weight", weight), ("edges", edges)):
            if not isinstance(x, Tensor) and (x is not None or name in ("x1", "x2")):
                raise DtypeError(f"{name} is a tensor, found {type(x).__name__}")
        self.irreps_in1.check("x1", x1.shape)
        self.irreps_in2.check("x2", x2.shape)
        x1, x2, weight = self._cast(x1, x2, self._weight(weight))
        if edges is None:
            x1, x2, weight, shape = self._broadcast(x1, x2, weight)
            return self._product(x1, x2, weight, {}).view(*shape, -1)
        if x1.dim() != 2 or x2.dim() != 2 or edges.shape != (2, len(x2)):
            found = f"{list(x1.shape)}, {list(x2.shape)}, {list(edges.shape)}"
            raise ShapeError(f"along edges, x1 is [N, C], x2 [E, D] and edges [2, E], found {found}")
        source, target = ends_of(edges)
        given = {"S": source, "T": target, "N": len(x1) if num_nodes is None else num_nodes}
        return self._product(x1, x2, weight, given)

    def _weight(self, weight: Tensor | None) -> Tensor:
        if weight is None:
            weight = self.weight
        shape = [self.weight_numel] if self.shared_weights else ["...", self.weight_numel]
        if weight.shape[-1:] != (self.weight_numel,) or (self.shared_weights and weight.dim() != 1):
            raise ShapeError(f"weight is {shape}".replace("'", "") + f", found {list(weight.shape)}")
        return weight

    def _cast(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """The operands, under autocast in its dtype, of which tables are kept."""
        kind = operands[0].device.type
        if torch.compiler.is_compiling() or kind == "meta" or not torch.is_autocast_enabled(kind):
            return operands
        if torch.float64 in {x.dtype for x in operands}:
            return operands
        dtype = torch.get_autocast_dtype(kind)
        if dtype not in self._tables:
            self._tables[dtype] = [part.tables(self.output_mask.device, dtype) for part in self._parts]
        return tuple(x.to(dtype) for x in operands)

    def _broadcast(self, x1: Tensor, x2: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
        """The operands with one leading axis, and the leading shape."""
        own = () if self.shared_weights else weight.shape[:-1]
        try:
            shape = torch.broadcast_shapes(x1.shape[:-1], x2.shape[:-1], own)
        except RuntimeError:
            leading = ", ".join(str([*axes]) for axes in (x1.shape[:-1], x2.shape[:-1], own))
            raise ShapeError(f"the leading axes of x1, x2 and weight broadcast; found {leading}") from None
        x1, x2 = (x.expand(*shape, -1).reshape(-1, x.shape[-1]) for x in (x1, x2))
        return x1, x2, weight if self.shared_weights else weight.expand(*shape, -1).reshape(len(x1), -1), shape

    def _product(self, x1: Tensor, x2: Tensor, weight: Tensor, edges: dict[str, Any]) -> Tensor:
        found: dict[int, Tensor] = {}
        every = self._tables.get(x1.dtype) or self._tables[self.output_mask.dtype]
        for part, tables in zip(self._parts, every, strict=True):
            first, second, result = part.channels
            given = {"X": self._split(x1, self.irreps_in1, first), "Y": self._split(x2, self.irreps_in2, second)}
            given |= part.paired(given) | edges
            z = part(given, part.weight(weight) if part.weights else None, tables)
            z = z.flatten(2) if z.dim() > 2 else z[..., None]
            found[result] = found[result] + z if result in found else z
        return self._joined(found, x1.new_zeros(edges["N"] if edges else len(x1), 0))

    def _split(self, x: Tensor, irreps: Irreps, mul: int) -> Tensor:
        """[B, components, mul] of the irreps with `mul` channels; without the last axis for one channel."""
        if self._in_place(irreps):
            return x if mul == 1 else x.unflatten(1, (-1, mul))
        pieces = []
        for each, place in zip(irreps, irreps.slices(), strict=True):
            if each.mul == mul:
                split = (mul, each.size) if self.layout == "mul_ir" else (each.size, mul)
                piece = x[:, place].unflatten(1, split)
                pieces.append(piece.transpose(1, 2) if self.layout == "mul_ir" else piece)
        whole = torch.cat(pieces, 1)
        return whole.squeeze(2) if mul == 1 else whole

    def _in_place(self, irreps: Irreps) -> bool:
        """True if flat features are [B, components, mul]."""
        muls = {each.mul for each in irreps}
        return len(muls) == 1 and (self.layout == "ir_mul" or muls == {1})

    def _joined(self, found: dict[int, Tensor], none: Tensor) -> Tensor:
        """The flat result of results [B, components, mul] by mul. none: [B, 0]."""
        if self._in_place(self.irreps_out) and len(found) == 1:
            return next(iter(found.values())).flatten(1)
        pieces, begin = [none], dict.fromkeys(found, 0)
        for each in self.irreps_out:
            if each.mul not in found:
                pieces.append(none.new_zeros(len(none), each.dim))
                continue
            piece = found[each.mul][:, begin[each.mul] : begin[each.mul] + each.size]
            begin[each.mul] += each.size
            pieces.append((piece.transpose(1, 2) if self.layout == "mul_ir" else piece).flatten(1))
        return torch.cat(pieces, 1)

    def extra_repr(self) -> str:
        return f"{self.irreps_in1} x {self.irreps_in2} -> {self.irreps_out}, {len(self.instructions)} paths"


class FullyConnectedTensorProduct(TensorProduct):
    """The TensorProduct of all paths in mode "uvw", as e3nn.o3.FullyConnectedTensorProduct."""

    def __init__(
        self, irreps_in1: str | Irreps, irreps_in2: str | Irreps, irreps_out: str | Irreps, **options: Any
    ) -> None:
        super().__init__(irreps_in1, irreps_in2, irreps_out, "uvw", **options)


Three = tuple[Irreps, Irreps, Irreps]


def _instructions(irreps: Three, given: str | Sequence[tuple]) -> list[Instruction]:
    if not isinstance(given, str):
        found = [Instruction(*each) for each in given]
        for each in found:
            if reason := _misfit(irreps, each):
                raise OptionError(f"{each} does not fit: {reason}")
        return found
    OptionError.check("mode", given, MODES)
    numbers = [range(len(each)) for each in irreps]
    every = [Instruction(a, b, c, given, True) for a in numbers[0] for b in numbers[1] for c in numbers[2]]
    return [each for each in every if not _misfit(irreps, each)]


def _misfit(irreps: Three, path: Instruction) -> str:
    """Why a path cannot be taken, or ""."""
    if path.mode not in MODES:
        return f"mode {path.mode!r} is unknown; there are {', '.join(MODES)}"
    if not all(0 <= n < len(own) for n, own in zip(path[:3], irreps, strict=True)):
        return f"there are {', '.join(str(len(own)) for own in irreps)} irreps"
    a, b, c = (own[n] for own, n in zip(irreps, path[:3], strict=True))
    if not a.couples(b, c):
        return f"the product of {a} and {b} does not contain {c}"
    sizes: dict[str, int] = {}
    for letters, mul in zip(MODES[path.mode], (a.mul, b.mul), strict=False):
        if sizes.setdefault(letters, mul) != mul:
            return f"{a} and {b} have {a.mul} and {mul} channels, {path.mode} takes as many of both"
    sizes |= _channels(irreps, path)
    wanted = math.prod(sizes[letter] for letter in MODES[path.mode][2])
    if wanted != c.mul:
        return f"the result has {wanted} channels, {c} has {c.mul}"
    if path.mode in ("uvw", "u<vw") and not path.has_weight:
        return f"{path.mode} has weights"
    alone = "w" not in path.mode or path.has_weight or c.mul == 1
    return "" if alone else f"without weights {path.mode} has one result, {c} has {c.mul}"


def _channels(irreps: Three, path: Instruction) -> dict[str, int]:
    """The extents of the channel indices of a path."""
    a, b, c = (own[n].mul for own, n in zip(irreps, path[:3], strict=True))
    first, second, *_ = MODES[path.mode]
    return {"w": c, "q": a * (a - 1) // 2} if first == "q" else {"w": c, second: b, first: a}


def _weights(irreps: Three, path: Instruction) -> list[int]:
    """The shape of a path's weight."""
    sizes = _channels(irreps, path)
    return [sizes[letter] for letter in MODES[path.mode][3]]


def _variances(irreps: Three, given: Sequence[Sequence[float] | Tensor | None]) -> list[list[float]]:
    """The variance of each of the irreps of the factors and the result."""
    found = [
        [1.0] * len(own) if each is None else [float(n) for n in each] for own, each in zip(irreps, given, strict=True)
    ]
    for name, own, each in zip(("in1_var", "in2_var", "out_var"), irreps, found, strict=True):
        if len(each) != len(own):
            raise OptionError(f"{name} has one variance for each of {own}: expected {len(own)}, found {len(each)}")
    return found


def _normalized(
    irreps: Three, paths: Sequence[Instruction], variances: Sequence[Sequence[float]], rules: tuple[str, str]
) -> list[float]:
    """The factor of each path, by which results of inputs of these variances have theirs (e3nn's rule). rules: by irrep
    and by path."""
    by_irrep, by_path = rules
    for value, known in ((by_irrep, ("component", "norm", "none")), (by_path, ("element", "path", "none"))):
        OptionError.check("normalization", value, known)

    def terms(path: Instruction) -> float:
        """The variance of a sum of all products of a path."""
        sizes, first, second = _channels(irreps, path), variances[0][path.first], variances[1][path.second]
        summed = set("".join(MODES[path.mode][:2])) - set(MODES[path.mode][2])
        return first * second * math.prod(sizes[n] for n in summed)

    found = []
    for path in paths:
        a, b, c = (own[n].size for own, n in zip(irreps, path[:3], strict=True))
        alike = [terms(other) for other in paths if other.result == path.result]
        count = {"element": sum(alike), "path": terms(path) * len(alike), "none": 1}[by_path]
        squared = {"component": c, "norm": a * b, "none": 1}[by_irrep] * path.path_weight * variances[2][path.result]
        found.append(math.sqrt(squared / count if count > 0 else squared))
    return found


class _CoefficientTable(NamedTuple):
    """A sparse tensor of a shape, of coords [axes, entries] and values, and the format in which it is stored."""

    coords: np.ndarray
    values: np.ndarray
    shape: tuple[int, ...]
    format: str

    def on(self, device: torch.device, dtype: torch.dtype) -> Sparse:
        given = torch.from_numpy(self.coords), torch.from_numpy(self.values)
        return sparse_from_coords(*given, self.shape, self.format).to(device, dtype)

    def split(self) -> tuple[_CoefficientTable, _CoefficientTable]:
        """As the product of tables [m, i, j] and [k, m, p], where m numbers the pairs (k, p) that occur."""
        pairs, places = np.unique(self.coords[[0, 3]], axis=1, return_inverse=True)
        numbers = np.arange(pairs.shape[1])
        coords = np.stack([places.reshape(-1), self.coords[1], self.coords[2]])
        first = _CoefficientTable(coords, self.values, (len(numbers), *self.shape[1:3]), "(m i j):C")
        mixed = np.stack([pairs[0], numbers, pairs[1]]), np.ones(len(numbers))
        return first, _CoefficientTable(*mixed, (self.shape[0], len(numbers), self.shape[3]), "(k m p):C")


@dataclass(frozen=True, eq=False)
class _Part:
    """Paths of one mode and the same channels, as one statement, or two where all samples share matrices: these mix the
    channels last, along edges after the sum of messages.

    texts, along_edges: the statements; channels: of the factors and the result; weights: the place of each path's in
    the flat weight; weight_shape: of a path's, without axes of size 1; split: the table of each statement; pairs:
    channels are pairs of them."""

    texts: tuple[str, ...]
    along_edges: tuple[str, ...]
    channels: tuple[int, int, int]
    weights: tuple[slice, ...]
    weight_shape: tuple[int, ...]
    split: tuple[_CoefficientTable, ...]
    pairs: bool

    def tables(self, device: torch.device, dtype: torch.dtype) -> tuple[Sparse, ...]:
        """The table of each statement."""
        return tuple(each.on(device, dtype) for each in self.split)

    def paired(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The factors for the pairs of their channels, in modes over pairs."""
        if not self.pairs:
            return {}
        u, v = torch.triu_indices(self.channels[0], self.channels[0], 1, device=given["X"].device)
        both = given["X"].index_select(-1, u), given["Y"].index_select(-1, v)
        return dict(zip("XY", (x.squeeze(-1) if len(u) == 1 else x for x in both), strict=True))

    def __call__(self, given: dict[str, Any], weight: Tensor | None, tables: tuple[Sparse, ...]) -> Tensor:
        held: dict[str, Any] = given if weight is None else {**given, "W": weight}
        for text, table in zip(self.along_edges if "N" in given else self.texts, tables, strict=True):
            held = {**held, "M": einsum(text, CG=table, **{name: x for name, x in held.items() if name in text})}
        return held["M"]

    def weight(self, flat: Tensor) -> Tensor:
        """The weights [..., path, channels] of the flat ones."""
        begin, end = self.weights[0].start, self.weights[-1].stop
        if end - begin == len(self.weights) * math.prod(self.weight_shape):
            return flat[..., begin:end].unflatten(-1, (-1, *self.weight_shape))
        return torch.cat([flat[..., place] for place in self.weights], -1).unflatten(-1, (-1, *self.weight_shape))


def _parts(irreps: Three, paths: Sequence[Instruction], scales: Sequence[float], shared: bool) -> list[_Part]:
    """The statements of these paths, in order of their first paths."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, path in enumerate(paths):
        muls = [own[n].mul for own, n in zip(irreps, path[:3], strict=True)]
        if all(muls) and all(_weights(irreps, path)):
            alike.setdefault((path.mode, path.has_weight, *muls), []).append(number)
    ends = np.cumsum([math.prod(_weights(irreps, path)) if path.has_weight else 0 for path in paths]).tolist()
    return [_part(irreps, [(paths[n], scales[n], ends[n]) for n in numbers], shared) for numbers in alike.values()]


def _part(irreps: Three, paths: Sequence[tuple[Instruction, float, int]], shared: bool) -> _Part:
    first = paths[0][0]
    sizes, has_weight = _channels(irreps, first), first.has_weight
    channels = tuple(own[n].mul for own, n in zip(irreps, first[:3], strict=True))
    numel = math.prod(_weights(irreps, first))
    blocks = [_entries(irreps, path, scale, n if has_weight else 0) for n, (path, scale, _) in enumerate(paths)]
    sums = [sum(each.size for each in own if each.mul == mul) for own, mul in zip(irreps, channels, strict=True)]
    kept = {n: size for n, size in sizes.items() if size > 1}
    shape = sums[2], sums[0], sums[1], len(paths) if has_weight else 1
    coords = np.concatenate([coords for coords, _ in blocks], 1)
    # Measured on an H200 (suite tensor-product): tables where each sample has its own matrices.
    format = "(k i j p):C" if shared or "w" not in first.mode else "[k,i,j,p] p:U k:U i:U j:G"
    table = _CoefficientTable(coords, np.concatenate([values for _, values in blocks]), shape, format)
    texts = _statements(first, kept, shared, False)
    return _Part(
        texts,
        _statements(first, kept, shared, True),
        (channels[0], channels[1], channels[2]),
        tuple(slice(end - numel, end) for _, _, end in paths) if has_weight else (),
        tuple(kept[n] for n in MODES[first.mode][3] if n in kept),
        (table,) if len(texts) == 1 else table.split(),
        "<" in first.mode,
    )


def _entries(irreps: Three, path: Instruction, scale: float, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(coordinates [4, entries] in (k, i, j, path), values) of a path in the table of its part."""
    begin = []
    for own, n in zip(irreps, path[:3], strict=True):
        begin.append(sum(each.size for each in own[:n] if each.mul == own[n].mul))
    table = clebsch_gordan(*(own[n].degree for own, n in zip(irreps, path[:3], strict=True)))
    i, j, k = np.nonzero(table)
    places = k + begin[2], i + begin[0], j + begin[1], np.full_like(i, number)
    return np.stack(places), scale * table[i, j, k]


def _statements(path: Instruction, kept: dict[str, int], shared: bool, edges: bool) -> tuple[str, ...]:
    """The texts of a part. kept: the channel indices of more than one channel."""
    first, second, result, own = ("".join(f",{n}" for n in names if n in kept) for names in MODES[path.mode])
    z, x = ("T[b]", "X[S[b]") if edges else ("b", "X[b")
    factors, alike = f"{x},i{first}] * Y[b,j{second}]", {*first, *second} - {","}
    weight = f" * W[{'' if shared else 'b,'}p{own}]" if path.has_weight else ""
    if shared and result == ",w" and len(alike) == 1:
        u = f",{alike.pop()}"
        texts = [f"M[{z},m{u}] = CG[m,i,j] * {factors}", f"Z[b,k,w] = CG[k,m,p] * M[b,m{u}]{weight}"]
    else:
        texts = [f"Z[{z},k{result}] = CG[k,i,j,p] * {factors}{weight}"]
    return tuple(text + _declared(text) * ("[T" in text) for text in texts)


def _declared(text: str) -> str:
    """The declaration of a result of N rows."""
    return f" ; {text[0]}:[N,_{',_' * (text.partition(' = ')[0].count(',') - 1)}]"
