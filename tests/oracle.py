"""The oracle: what every operator means, as float64 scalar loops over Python lists.

It imports nothing of the library and is slow on purpose. A coordinate is a tuple (batch, axis 0, ..., axis D-1) of
integers, features are float64 arrays [N, C], weights are [C_out, K, C_in / groups] with the taps flattened row-major
(last axis fastest). Everything follows from one relation between an input and an output coordinate,

    in = stride * out + dilation * tap - padding        (per axis; same batch)

and from the list of pairs (tap k, input row i, output row o) that satisfy it.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

Coord = tuple[int, ...]
Ints = tuple[int, ...]
Pair = tuple[int, int, int]


# Relation and order
@dataclass(frozen=True)
class Relation:
    """``in = stride * out + dilation * tap - padding`` for each tap of ``taps`` (all per axis)."""

    taps: tuple[Ints, ...]
    stride: Ints
    dilation: Ints
    padding: Ints

    def fine(self, coarse: Coord, tap: Ints) -> Coord:
        """The input that ``tap`` joins to the output ``coarse``."""
        axes = zip(coarse[1:], tap, self.stride, self.dilation, self.padding, strict=True)
        return (coarse[0], *(s * q + d * r - p for q, r, s, d, p in axes))

    def coarse(self, fine: Coord, tap: Ints) -> Coord | None:
        """The output that ``tap`` joins to the input ``fine``; None where the division leaves a remainder."""
        out = [fine[0]]
        for c, r, s, d, p in zip(fine[1:], tap, self.stride, self.dilation, self.padding, strict=True):
            if (c + p - d * r) % s:
                return None
            out.append((c + p - d * r) // s)
        return tuple(out)


def window(kernel: Ints) -> tuple[Ints, ...]:
    """All taps of a dense kernel, row-major: the last axis is the fastest."""
    return tuple(itertools.product(*(range(k) for k in kernel)))


def default_padding(kernel: Ints, dilation: Ints) -> Ints:
    """Centred for odd sizes, d * (k // 2); none for even ones."""
    return tuple(d * (k // 2) if k % 2 else 0 for k, d in zip(kernel, dilation, strict=True))


def relation(kernel: Ints, stride: Ints, dilation: Ints, padding: Ints | None = None) -> Relation:
    """The relation of a dense kernel; ``padding=None`` is the default padding."""
    return Relation(window(kernel), stride, dilation, padding or default_padding(kernel, dilation))


def custom(offsets: Iterable[Ints], stride: Ints, dilation: Ints) -> Relation:
    """The relation of a list of offsets: ``in = stride * out + dilation * offset``."""
    return Relation(tuple(tuple(o) for o in offsets), stride, dilation, (0,) * len(stride))


def morton(coord: Coord) -> tuple[int, int]:
    """Sort key (batch, Morton code). Each axis is biased to c + 2^31; from the highest bit of all axes down, one bit
    per axis is appended to the code, axis 0 first: axis 0 is the most significant of each level."""
    code = 0
    for level in reversed(range(32)):
        for c in coord[1:]:
            code = 2 * code + (((c + 2**31) >> level) & 1)
    return coord[0], code


def ordered(coords: Iterable[Coord]) -> list[Coord]:
    """Without duplicates, sorted by (batch, Morton code): the order of every new set of coordinates."""
    return sorted(set(coords), key=morton)


# Output coordinates
def inside(coord: Coord, shape: Ints | None) -> bool:
    """Whether 0 <= c < S on every axis; True where there is no shape."""
    return shape is None or all(0 <= c < s for c, s in zip(coord[1:], shape, strict=True))


def conv_shape(shape: Ints, kernel: Ints, rel: Relation) -> Ints:
    """Sizes of a dense convolution: floor((S + 2p - d(k-1) - 1) / s) + 1."""
    axes = zip(shape, kernel, rel.stride, rel.dilation, rel.padding, strict=True)
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, d, p in axes)


def transposed_shape(shape: Ints, kernel: Ints, rel: Relation, extra: Ints) -> Ints:
    """Sizes of a dense transposed convolution: (S-1)s - 2p + d(k-1) + 1 + output_padding."""
    axes = zip(shape, kernel, rel.stride, rel.dilation, rel.padding, extra, strict=True)
    return tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 + e for n, k, s, d, p, e in axes)


def support(coords: Sequence[Coord], rel: Relation, shape: Ints | None = None) -> list[Coord]:
    """Every output that some tap joins to some input: the active set of the dense convolution."""
    found = (rel.coarse(c, tap) for c in coords for tap in rel.taps)
    return ordered(q for q in found if q is not None and inside(q, shape))


def floor_unique(coords: Sequence[Coord], stride: Ints) -> list[Coord]:
    """unique(floor(in / stride)): the set never grows."""
    return ordered((c[0], *(x // s for x, s in zip(c[1:], stride, strict=True))) for c in coords)


def transposed_support(coords: Sequence[Coord], rel: Relation, shape: Ints | None = None) -> list[Coord]:
    """Every ``stride * in + dilation * tap - padding``."""
    found = (rel.fine(c, tap) for c in coords for tap in rel.taps)
    return ordered(q for q in found if inside(q, shape))


# Pairs
def forward_pairs(ins: Sequence[Coord], outs: Sequence[Coord], rel: Relation) -> list[Pair]:
    """All (k, i, o) with ``ins[i] = stride * outs[o] + dilation * taps[k] - padding``."""
    row = {c: i for i, c in enumerate(ins)}
    found = ((k, row.get(rel.fine(q, tap)), o) for o, q in enumerate(outs) for k, tap in enumerate(rel.taps))
    return [(k, i, o) for k, i, o in found if i is not None]


def exchanged_pairs(ins: Sequence[Coord], outs: Sequence[Coord], rel: Relation) -> list[Pair]:
    """The pairs of the forward map from ``outs`` (fine) to ``ins`` (coarse), exchanged; tap k stays tap k.
    Both transposed policies, ``transposed_support`` and ``cached_inverse``, are these pairs."""
    return [(k, i, o) for k, o, i in forward_pairs(outs, ins, rel)]


# Convolution
def zeros(rows: int, cols: int) -> list[list[float]]:
    """A matrix of zeros as lists."""
    return [[0.0] * cols for _ in range(rows)]


def grid(rows: list[list[float]], cols: int) -> np.ndarray:
    """Lists back to a float64 array [rows, cols]; keeps the width when there is no row."""
    return np.array(rows, dtype=np.float64).reshape(len(rows), cols)


def conv(pairs: Sequence[Pair], n_out: int, x: np.ndarray, w: np.ndarray, bias=None, groups: int = 1) -> np.ndarray:
    """``out[o, g, n] = bias[g, n] + sum over pairs (k, i, o), c of x[i, g, c] * w[(g, n), k, c]``: [n_out, C_out]."""
    c_out, _, width = w.shape
    share = c_out // groups
    out = [list(map(float, bias)) if bias is not None else [0.0] * c_out for _ in range(n_out)]
    xs, ws = x.tolist(), w.tolist()
    for k, i, o in pairs:
        for n in range(c_out):
            g = n // share
            for c in range(width):
                out[o][n] += xs[i][g * width + c] * ws[n][k][c]
    return grid(out, c_out)


def conv_grads(pairs: Sequence[Pair], x: np.ndarray, w: np.ndarray, dy: np.ndarray, groups: int = 1):
    """Gradients of sum(dy * conv(x, w, bias)) -> (dx [N, C_in], dw like w, db [C_out])."""
    c_out, taps, width = w.shape
    share = c_out // groups
    dx, db = zeros(*x.shape), [0.0] * c_out
    dw = [zeros(taps, width) for _ in range(c_out)]
    xs, ws, dys = x.tolist(), w.tolist(), dy.tolist()
    for k, i, o in pairs:
        for n in range(c_out):
            g = n // share
            for c in range(width):
                dx[i][g * width + c] += dys[o][n] * ws[n][k][c]
                dw[n][k][c] += dys[o][n] * xs[i][g * width + c]
    for row in dys:
        for n in range(c_out):
            db[n] += row[n]
    return grid(dx, x.shape[1]), np.array(dw).reshape(w.shape), np.array(db)


# Pooling
def pool(pairs: Sequence[Pair], n_out: int, x: np.ndarray, mode: str) -> np.ndarray:
    """Sum, average or maximum over the inputs that are present; 0 where none is."""
    met: list[list[int]] = [[] for _ in range(n_out)]
    for _, i, o in pairs:
        met[o].append(i)
    out = zeros(n_out, x.shape[1])
    for o, rows in enumerate(met):
        for c in range(x.shape[1] if rows else 0):
            values = [float(x[i, c]) for i in rows]
            out[o][c] = {"sum": sum(values), "avg": sum(values) / len(values), "max": max(values)}[mode]
    return grid(out, x.shape[1])


def pool_grad(pairs: Sequence[Pair], x: np.ndarray, dy: np.ndarray, mode: str) -> np.ndarray:
    """Gradient of sum(dy * pool(x)) by x; values must not tie under ``max``."""
    met: list[list[int]] = [[] for _ in range(len(dy))]
    for _, i, o in pairs:
        met[o].append(i)
    dx = zeros(*x.shape)
    for o, rows in enumerate(met):
        for c in range(x.shape[1] if rows else 0):
            best = max(rows, key=lambda i: x[i, c])
            for i in rows:
                share = {"sum": 1.0, "avg": 1.0 / len(rows), "max": float(i == best)}[mode]
                dx[i][c] += share * float(dy[o, c])
    return grid(dx, x.shape[1])


def global_pool(coords: Sequence[Coord], x: np.ndarray, batches: int, mode: str) -> np.ndarray:
    """The same over whole batch items -> [batches, C]; an empty item gives 0."""
    pairs = [(0, i, c[0]) for i, c in enumerate(coords)]
    return pool(pairs, batches, x, mode)


# Interpolation
def corners(position: Sequence[float], stride: Ints) -> list[tuple[Coord, float]]:
    """The 2^D voxels around a position (batch, u...) and their multilinear weights. u is in finest voxel units, level
    coordinate v = u / stride, voxel c covers [c, c+1) of it, its centre is c + 0.5."""
    v = [u / t - 0.5 for u, t in zip(position[1:], stride, strict=True)]
    base = [math.floor(a) for a in v]
    found = []
    for step in itertools.product((0, 1), repeat=len(v)):
        weight = 1.0
        for a, b, e in zip(v, base, step, strict=True):
            weight *= (a - b) if e else 1.0 - (a - b)
        found.append(((int(position[0]), *(b + e for b, e in zip(base, step, strict=True))), weight))
    return found


def containing(position: Sequence[float], stride: Ints) -> list[tuple[Coord, float]]:
    """The one voxel that contains a position, with weight 1."""
    return [((int(position[0]), *(math.floor(u / t) for u, t in zip(position[1:], stride, strict=True))), 1.0)]


def interpolation_weights(
    coords: Sequence[Coord], positions: Sequence[Sequence[float]], stride: Ints, mode: str, normalize: bool = True
) -> np.ndarray:
    """Dense matrix [P, N] of weights; an absent voxel gives nothing; ``normalize`` divides by the weights present."""
    row = {c: i for i, c in enumerate(coords)}
    rule = {"nearest": containing, "trilinear": corners}[mode]
    out = zeros(len(positions), len(coords))
    for p, position in enumerate(positions):
        present = [(row[c], a) for c, a in rule(position, stride) if c in row]
        total = sum(a for _, a in present) if normalize else 1.0
        for i, a in present:
            out[p][i] = a / total if total > 0 else 0.0
    return grid(out, len(coords))


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[P, N] x [N, C] as loops."""
    out = zeros(a.shape[0], b.shape[1])
    for p, row in enumerate(a.tolist()):
        for i, weight in enumerate(row):
            for c in range(b.shape[1] if weight else 0):
                out[p][c] += weight * float(b[i, c])
    return grid(out, b.shape[1])


# Voxelise
def voxel_of(point: Sequence[float], size: Sequence[float], origin: Sequence[float], rounding: str) -> Ints:
    """floor((p - origin) / size), or the nearest integer: voxel c then covers [c - 1/2, c + 1/2), halves go up."""
    shift = {"floor": 0.0, "round": 0.5}[rounding]
    return tuple(math.floor((float(p) - o) / s + shift) for p, s, o in zip(point, size, origin, strict=True))


def voxelise(voxels: Sequence[Coord], feats: np.ndarray, reduce: str) -> tuple[list[Coord], np.ndarray, list[int]]:
    """One row per distinct voxel in (batch, Morton) order -> (coords, feats, inverse: row of each point)."""
    coords = ordered(voxels)
    row = {c: i for i, c in enumerate(coords)}
    inverse = [row[v] for v in voxels]
    members: list[list[int]] = [[] for _ in coords]
    for point, i in enumerate(inverse):
        members[i].append(point)
    out = zeros(len(coords), feats.shape[1])
    for i, points in enumerate(members):
        for c in range(feats.shape[1]):
            values = [float(feats[p, c]) for p in points]
            out[i][c] = {"mean": sum(values) / len(values), "sum": sum(values), "max": max(values), "first": values[0]}[
                reduce
            ]
    return coords, grid(out, feats.shape[1]), inverse


# Sets of voxels
def union(a: Sequence[Coord], x: np.ndarray, b: Sequence[Coord], y: np.ndarray) -> tuple[list[Coord], np.ndarray]:
    """Coordinates of either; features add where both are present."""
    coords = ordered([*a, *b])
    row = {c: i for i, c in enumerate(coords)}
    out = zeros(len(coords), x.shape[1])
    for cs, values in ((a, x), (b, y)):
        for c, value in zip(cs, values.tolist(), strict=True):
            for n, v in enumerate(value):
                out[row[c]][n] += v
    return coords, grid(out, x.shape[1])


def dense(coords: Sequence[Coord], x: np.ndarray, batches: int, shape: Ints, origin: Ints) -> np.ndarray:
    """[B, C, *shape]; the voxel c lies at c - origin; zero elsewhere."""
    out = np.zeros((batches, x.shape[1], *shape))
    for coord, value in zip(coords, x.tolist(), strict=True):
        at = tuple(c - o for c, o in zip(coord[1:], origin, strict=True))
        for n, v in enumerate(value):
            out[(coord[0], n, *at)] = v
    return out
