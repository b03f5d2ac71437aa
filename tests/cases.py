"""Shared cases: the table of convolutions, random clouds, and the two ways to run a case (library, oracle)."""

import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from oracle import Coord, Ints

import pumice as pm
from benchmarks.harness.timing import on_threads
from pumice.env import settings

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]

# Largest error over the largest reference value. Low precision: two units in the last place of the dtype, measured
# against the oracle on the rounded operands, so sums must be carried in fp32.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2 * 2**-10, torch.bfloat16: 2 * 2**-7}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every device that tests can use here; a folder's conftest imports it."""
    return request.param


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors of a few rows: on a busy machine a second thread makes each operator wait for a time slice."""
    with on_threads(1):
        yield


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real scans."""
    folder = settings().data
    if folder is None:
        pytest.skip("PUMICE_DATA is not set: no real scans to read")
    return folder


@dataclass(frozen=True)
class Case:
    """One convolution. ``policy``: same | support | floor_unique | given | transposed | centred | generative |
    inverse | default (the rule of the library decides). ``spatial`` is the spatial_shape of the input."""

    name: str
    kernel: Ints
    policy: str = "default"
    stride: Ints = ()
    dilation: Ints = ()
    padding: Ints | None = None
    low: int = -4
    high: int = 4
    spatial: Ints | None = None
    groups: int = 1
    channels: tuple[int, int] = (2, 3)
    bias: bool = True
    offsets: tuple[Ints, ...] | None = None
    extra: int = 0
    voxels: int = 18
    batches: int = 2

    @property
    def dim(self) -> int:
        """Number of axes."""
        return len(self.offsets[0]) if self.offsets else len(self.kernel)

    @property
    def steps(self) -> Ints:
        """The stride on every axis."""
        return self.stride or (1,) * self.dim

    @property
    def relation(self) -> oracle.Relation:
        """The relation that the case means, default padding filled in."""
        dilation = self.dilation or (1,) * self.dim
        if self.offsets:
            return oracle.custom(self.offsets, self.steps, dilation)
        padding = self.padding
        if padding is None and self.policy == "transposed":
            padding = (0,) * self.dim
        return oracle.relation(self.kernel, self.steps, dilation, padding)

    @property
    def rule(self) -> str:
        """The policy after the defaults of the library."""
        if self.policy != "default":
            return self.policy
        if all(s == 1 for s in self.steps):
            return "same"
        return "floor_unique" if self.padding is None else "support"

    def __str__(self) -> str:
        return self.name


def cloud(dim: int, low: int, high: int, voxels: int, batches: int = 2, seed: int = 0) -> list[Coord]:
    """Distinct random coordinates in [low, high) per axis and batch item, in random order, batches mixed."""
    rng = random.Random(seed)
    found: set[Coord] = set()
    for b in range(batches):
        count = min(voxels, (high - low) ** dim)
        own: set[Coord] = set()
        while len(own) < count:
            own.add((b, *(rng.randrange(low, high) for _ in range(dim))))
        found |= own
    coords = sorted(found)
    rng.shuffle(coords)
    return coords


def compact(dim: int, low: int, high: int, voxels: int, batches: int = 2, seed: int = 0) -> list[Coord]:
    """As `cloud`, in a box small enough (about half full) that neighbours are common in any dimension."""
    side = max(2, min(high - low, math.ceil((2 * voxels) ** (1 / dim))))
    middle = (low + high) // 2
    start = max(low, middle - side // 2 - 1)
    return cloud(dim, start, start + side, voxels, batches, seed)


def coords_of(case: Case, seed: int = 0) -> list[Coord]:
    """Input coordinates of a case; inside its spatial shape where it has one."""
    if case.spatial is None:
        return compact(case.dim, case.low, case.high, case.voxels, case.batches, seed)
    return cloud(case.dim, 0, min(case.spatial), case.voxels, case.batches, seed)


def target_of(case: Case, ins: list[Coord]) -> list[Coord]:
    """Coordinates that a case is given: for an inverse the finer level (every coordinate that may meet the input and
    some that do not), else a random set around the outputs."""
    rng = random.Random(7)
    if case.rule == "inverse":
        pool = oracle.transposed_support(ins, case.relation)
        far = [(0, *(c + 1000 for c in q[1:])) for q in pool[:2]]
    else:
        pool = oracle.support(ins, case.relation)
        far = [(case.batches - 1, *(c - 1000 for c in q[1:])) for q in pool[:2]]
    chosen = [q for q in pool if rng.random() < 0.6] + far
    rng.shuffle(chosen)
    return chosen


def outputs_of(case: Case, ins: list[Coord]) -> list[Coord]:
    """Output coordinates by the oracle, in the order that the library promises."""
    rel, rule = case.relation, case.rule
    if rule == "same":
        return list(ins)
    if rule in ("given", "inverse"):
        return target_of(case, ins)
    if rule == "floor_unique":
        return oracle.floor_unique(ins, rel.stride)
    if rule == "support":
        shape = oracle.conv_shape(case.spatial, case.kernel, rel) if case.spatial else None
        return oracle.support(ins, rel, shape)
    shape = None
    if case.spatial and rule != "generative":
        shape = oracle.transposed_shape(case.spatial, case.kernel, rel, (case.extra,) * case.dim)
    return oracle.transposed_support(ins, rel, shape)


def pairs_of(case: Case, ins: list[Coord], outs: list[Coord]) -> list[oracle.Pair]:
    """(tap, input row, output row) by the oracle."""
    exchanged = case.rule in ("transposed", "centred", "generative", "inverse")
    return (oracle.exchanged_pairs if exchanged else oracle.forward_pairs)(ins, outs, case.relation)


@dataclass(frozen=True)
class Operands:
    """The numbers of a case: coordinates, features, weight as the library wants it, bias (or None)."""

    coords: list[Coord]
    feats: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


def operands(case: Case, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0) -> Operands:
    """Random leaves that require gradients, representable in ``dtype``."""
    rng = torch.Generator().manual_seed(seed)
    coords = coords_of(case, seed)
    c_in, c_out = case.channels
    kernel = (len(case.offsets),) if case.offsets else case.kernel

    def leaf(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=rng, dtype=torch.float64)
        return values.to(dtype).to(device).requires_grad_()

    bias = leaf(c_out) if case.bias else None
    return Operands(coords, leaf(len(coords), c_in), leaf(c_out, *kernel, c_in // case.groups), bias)


def tensor(coords: list[Coord], feats: torch.Tensor, **more) -> "pm.SparseTensor":
    """A SparseTensor of tuples and features."""
    dim = more.pop("dim", None) or len(coords[0]) - 1
    return pm.SparseTensor(feats, table(coords, dim, feats.device), dim=dim, **more)


def table(coords: list[Coord], dim: int, device="cpu") -> torch.Tensor:
    """int32 [N, 1 + D]."""
    return torch.tensor(coords, dtype=torch.int32, device=device).reshape(len(coords), 1 + dim)


def tuples(x) -> list[Coord]:
    """Coordinates of a SparseTensor (or an integer matrix) as tuples, in row order."""
    matrix = x if isinstance(x, torch.Tensor) else x.coords
    return [tuple(row) for row in matrix.tolist()]


def array(t: torch.Tensor) -> np.ndarray:
    """float64 numpy copy."""
    return t.detach().double().cpu().numpy()


def flat(w: torch.Tensor) -> np.ndarray:
    """Weight [C_out, *kernel, C] -> float64 [C_out, K, C]."""
    return array(w).reshape(w.shape[0], -1, w.shape[-1])


def run(case: Case, ops: Operands, dataflow=None) -> "pm.SparseTensor":
    """The case by the library."""
    feats = ops.feats
    level = case.steps if case.policy == "inverse" else 1
    x = tensor(ops.coords, feats, stride=level, spatial_shape=case.spatial, batch_size=case.batches)
    stride, dilation = case.stride or 1, case.dilation or 1
    common = {"stride": stride, "dilation": dilation, "groups": case.groups, "dataflow": dataflow}
    if case.policy in ("transposed", "centred", "generative"):
        padding = None if case.policy != "transposed" and case.padding is None else case.padding or 0
        return pm.ops.conv_transpose(
            x,
            ops.weight,
            ops.bias,
            padding=padding,
            output_padding=case.extra,
            bounded=case.policy != "generative",
            **common,
        )
    if case.policy == "inverse":
        target = given(case, ops, x.device)
        return pm.ops.conv_inverse(x, ops.weight, target, ops.bias, padding=case.padding, **common)
    out = {"default": None, "given": None}.get(case.policy, case.policy)
    if case.policy == "given":
        out = given(case, ops, x.device)
    return pm.ops.conv(x, ops.weight, ops.bias, padding=case.padding, out=out, offsets=case.offsets, **common)


def given(case: Case, ops: Operands, device) -> "pm.SparseTensor":
    """The target of a case as a SparseTensor (one channel of zeros)."""
    target = target_of(case, ops.coords)
    zeros = torch.zeros(len(target), 1, dtype=ops.feats.dtype, device=device)
    return tensor(target, zeros, dim=case.dim, stride=case.steps if case.rule == "given" else 1)


def assert_close(got: torch.Tensor, want: np.ndarray, dtype: torch.dtype, what: str) -> None:
    """Largest error relative to the largest reference value, with the numbers in the message."""
    assert tuple(got.shape) == want.shape, f"{what}: shape {tuple(got.shape)}, expected {want.shape}"
    if not want.size:
        return
    error, scale = np.abs(array(got) - want).max(), np.abs(want).max()
    limit = TOLERANCE[dtype] * max(scale, 1e-3)
    assert error <= limit, f"{what}: error {error:.3g} over {limit:.3g} ({dtype}, largest value {scale:.3g})"


def check(case: Case, dtype: torch.dtype, device: str) -> None:
    """Coordinates, order, features and all gradients of a case against the oracle."""
    ops = operands(case, dtype, device)
    y = run(case, ops)
    outs = outputs_of(case, ops.coords)
    assert tuples(y) == outs, f"coordinates: {diff(tuples(y), outs)}"
    pairs = pairs_of(case, ops.coords, outs)
    x, w = array(ops.feats), flat(ops.weight)
    bias = None if ops.bias is None else array(ops.bias)
    assert y.feats.dtype == dtype
    assert_close(y.feats, oracle.conv(pairs, len(outs), x, w, bias, case.groups), dtype, "features")
    dy = torch.randn(y.feats.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dy = dy.to(dtype).to(device)
    y.feats.backward(dy)
    dx, dw, db = oracle.conv_grads(pairs, x, w, array(dy), case.groups)
    assert_close(ops.feats.grad, dx, dtype, "gradient of x")
    assert_close(ops.weight.grad, dw.reshape(ops.weight.shape), dtype, "gradient of w")
    if ops.bias is not None:
        assert_close(ops.bias.grad, db, dtype, "gradient of bias")


def diff(got: list[Coord], want: list[Coord]) -> str:
    """What differs between two lists of coordinates, in a line."""
    missing, extra = sorted(set(want) - set(got)), sorted(set(got) - set(want))
    if missing or extra:
        return f"{len(missing)} missing {missing[:4]}, {len(extra)} extra {extra[:4]}"
    if len(got) != len(set(got)):
        return "duplicates"
    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
    return "same set" if at is None else f"same set, order differs from row {at}: {got[at]} instead of {want[at]}"


# The table
CROSS = ((0, 0, 0), (1, 0, 0), (-1, 0, 0), (0, 2, 0), (0, -2, 0), (0, 0, 1), (0, 0, -3))

SAME = [  # stride 1: outputs are the inputs, in the user's order
    Case("same-1d-k3", (3,)),
    Case("same-2d-k3", (3, 3)),
    Case("same-3d-k3", (3, 3, 3)),
    Case("same-4d-k3", (3, 3, 3, 3)),
    Case("same-3d-k1", (1, 1, 1)),
    Case("same-3d-k2-even", (2, 2, 2)),
    Case("same-3d-k4-even", (4, 4, 4)),
    Case("same-2d-k5", (5, 5)),
    Case("same-3d-k133", (1, 3, 3)),
    Case("same-3d-k312", (3, 1, 2)),
    Case("same-3d-k3-d2", (3, 3, 3), dilation=(2, 2, 2)),
    Case("same-3d-k3-d123", (3, 3, 3), dilation=(1, 2, 3)),
    Case("same-2d-k35-p12", (3, 5), "same", padding=(1, 2)),
    Case("same-3d-k3-nobias", (3, 3, 3), bias=False),
    Case("same-3d-k3-spatial", (3, 3, 3), low=0, high=5, spatial=(5, 6, 7)),
    Case("same-2d-k3-batch3", (3, 3), batches=3, voxels=8),
    Case("same-3d-k3-sparse", (3, 3, 3), low=-300, high=300, voxels=6),
]

FLOOR = [  # stride > 1, no padding given: unique(floor(in / stride)), centred or even kernels
    Case("floor-1d-k3-s2", (3,), stride=(2,)),
    Case("floor-2d-k2-s2", (2, 2), stride=(2, 2)),
    Case("floor-3d-k2-s2", (2, 2, 2), stride=(2, 2, 2)),
    Case("floor-3d-k3-s2", (3, 3, 3), stride=(2, 2, 2)),
    Case("floor-4d-k2-s2", (2, 2, 2, 2), stride=(2, 2, 2, 2)),
    Case("floor-3d-k3-s3", (3, 3, 3), stride=(3, 3, 3)),
    Case("floor-3d-k2-s3-gaps", (2, 2, 2), stride=(3, 3, 3)),
    Case("floor-3d-k3-s121", (3, 3, 3), stride=(1, 2, 1)),
    Case("floor-3d-k311-s211", (3, 1, 1), stride=(2, 1, 1)),
    Case("floor-3d-k3-s2-d2", (3, 3, 3), stride=(2, 2, 2), dilation=(2, 2, 2)),
    Case("floor-2d-k4-s2", (4, 4), stride=(2, 2)),
    Case("floor-2d-k3-s2-p1-named", (3, 3), "floor_unique", stride=(2, 2), padding=(1, 1)),
    Case("floor-2d-k3-s2-p0-named", (3, 3), "floor_unique", stride=(2, 2), padding=(0, 0)),
    Case("floor-2d-k3-s1-named", (3, 3), "floor_unique"),
]

SUPPORT = [  # the active set of the dense convolution; unbounded, or bounded by spatial_shape
    Case("support-1d-k3-s2-p1", (3,), stride=(2,), padding=(1,)),
    Case("support-2d-k3-s2-p1", (3, 3), stride=(2, 2), padding=(1, 1)),
    Case("support-3d-k3-s2-p1", (3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1)),
    Case("support-4d-k2-s2-p0", (2, 2, 2, 2), stride=(2,) * 4, padding=(0,) * 4, voxels=10),
    Case("support-3d-k2-s2-p0", (2, 2, 2), stride=(2, 2, 2), padding=(0, 0, 0)),
    Case("support-3d-k3-s3-p1", (3, 3, 3), stride=(3, 3, 3), padding=(1, 1, 1)),
    Case("support-3d-k3-s2-p011", (3, 3, 3), stride=(2, 2, 2), padding=(0, 1, 1), voxels=10),
    Case("support-3d-k311-s211-p0", (3, 1, 1), stride=(2, 1, 1), padding=(0, 0, 0)),
    Case("support-2d-k3-s2-p2-d2", (3, 3), stride=(2, 2), padding=(2, 2), dilation=(2, 2)),
    Case("support-2d-k2-s3-p1", (2, 2), stride=(3, 3), padding=(1, 1)),
    Case("support-2d-k3-s1-dilating", (3, 3), "support", voxels=8),
    Case("support-3d-k3-s1-dilating", (3, 3, 3), "support", voxels=3),
    Case("support-2d-k2-s1-even", (2, 2), "support"),
    Case("support-1d-k4-s2-nopad-named", (4,), "support", stride=(2,)),
    Case("support-2d-k3-s2-p1-bounded", (3, 3), stride=(2, 2), padding=(1, 1), spatial=(7, 6)),
    Case("support-3d-k3-s2-p1-bounded", (3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1), spatial=(5, 6, 7)),
    Case(
        "support-3d-k2-s2-p0-odd-tail-dropped",
        (2, 2, 2),
        stride=(2, 2, 2),
        padding=(0, 0, 0),
        spatial=(5, 5, 5),
        voxels=40,
    ),
    Case("support-2d-k3-s1-p0-bounded-valid", (3, 3), "support", padding=(0, 0), spatial=(6, 5)),
    Case("support-2d-k3-s1-p1-bounded", (3, 3), "support", padding=(1, 1), spatial=(6, 5)),
    Case("support-1d-k3-s3-p1-bounded", (3,), stride=(3,), padding=(1,), spatial=(10,)),
]

GIVEN = [  # outputs wherever the caller says, in the caller's order
    Case("given-1d-k3", (3,), "given"),
    Case("given-2d-k3-s2", (3, 3), "given", stride=(2, 2)),
    Case("given-3d-k3-s1", (3, 3, 3), "given", voxels=6),
    Case("given-3d-k2-s2", (2, 2, 2), "given", stride=(2, 2, 2)),
    Case("given-3d-k3-s2-p1-d2", (3, 3, 3), "given", stride=(2, 2, 2), padding=(1, 1, 1), dilation=(2, 2, 2), voxels=6),
    Case("given-4d-k2-s1", (2, 2, 2, 2), "given", voxels=6),
]

TRANSPOSED = [  # out = stride * in + dilation * tap - padding, bounded by spatial_shape where there is one
    Case("transposed-1d-k3-s2", (3,), "transposed", stride=(2,)),
    Case("transposed-2d-k2-s2", (2, 2), "transposed", stride=(2, 2)),
    Case("transposed-3d-k2-s2", (2, 2, 2), "transposed", stride=(2, 2, 2)),
    Case("transposed-3d-k3-s2-p1", (3, 3, 3), "transposed", stride=(2, 2, 2), padding=(1, 1, 1), voxels=8),
    Case("transposed-4d-k2-s2", (2, 2, 2, 2), "transposed", stride=(2,) * 4, voxels=6),
    Case("transposed-2d-k3-s3-d2", (3, 3), "transposed", stride=(3, 3), dilation=(2, 2)),
    Case("transposed-2d-k3-s1-p1", (3, 3), "transposed", padding=(1, 1)),
    Case("transposed-2d-k3-s2-p1-bounded", (3, 3), "transposed", stride=(2, 2), padding=(1, 1), spatial=(4, 5)),
    Case(
        "transposed-2d-k3-s2-p1-op1-bounded",
        (3, 3),
        "transposed",
        stride=(2, 2),
        padding=(1, 1),
        spatial=(4, 5),
        extra=1,
    ),
    Case("transposed-3d-k312-s212-bounded", (3, 1, 2), "transposed", stride=(2, 1, 2), spatial=(3, 4, 3), voxels=8),
    Case("centred-2d-k3-s2", (3, 3), "centred", stride=(2, 2)),
    Case("centred-2d-k3-s2-bounded", (3, 3), "centred", stride=(2, 2), spatial=(4, 4), voxels=8),
    Case("generative-2d-k3-s2-shape-ignored", (3, 3), "generative", stride=(2, 2), spatial=(4, 4), voxels=8),
    Case("generative-3d-k2-s2", (2, 2, 2), "generative", stride=(2, 2, 2)),
    Case("generative-3d-k3-s2", (3, 3, 3), "generative", stride=(2, 2, 2), voxels=4),
]

INVERSE = [  # back to known coordinates: the pairs of the forward map, exchanged, no flip
    Case("inverse-1d-k3-s2", (3,), "inverse", stride=(2,)),
    Case("inverse-2d-k2-s2", (2, 2), "inverse", stride=(2, 2)),
    Case("inverse-3d-k2-s2", (2, 2, 2), "inverse", stride=(2, 2, 2)),
    Case("inverse-3d-k3-s2", (3, 3, 3), "inverse", stride=(2, 2, 2), voxels=8),
    Case("inverse-3d-k3-s2-p1", (3, 3, 3), "inverse", stride=(2, 2, 2), padding=(1, 1, 1), voxels=8),
    Case("inverse-3d-k311-s211-p0", (3, 1, 1), "inverse", stride=(2, 1, 1), padding=(0, 0, 0)),
    Case("inverse-2d-k3-s3-d2", (3, 3), "inverse", stride=(3, 3), dilation=(2, 2)),
    Case("inverse-4d-k2-s2", (2, 2, 2, 2), "inverse", stride=(2,) * 4, voxels=6),
]

OFFSETS = [  # custom taps: in = stride * out + dilation * offset
    Case("offsets-1d", (3,), offsets=((-2,), (0,), (5,))),
    Case("offsets-3d-cross", (7,), offsets=CROSS),
    Case("offsets-3d-cross-d2", (7,), offsets=CROSS, dilation=(2, 2, 2)),
    Case("offsets-2d-s2", (4,), offsets=((0, 0), (0, 1), (1, -1), (3, 2)), stride=(2, 2)),
    Case("offsets-2d-s2-support", (3,), "support", offsets=((0, 0), (-1, 1), (2, 0)), stride=(2, 2)),
    Case("offsets-2d-given", (3,), "given", offsets=((0, 0), (-1, 1), (2, 0))),
    Case("offsets-3d-single-off-centre", (1,), offsets=((1, 0, 0),)),
]

GROUPS = [  # channel groups, depthwise, a depth multiplier, odd channels
    Case("groups-2", (3, 3, 3), groups=2, channels=(4, 6)),
    Case("groups-3-s2", (3, 3), stride=(2, 2), groups=3, channels=(3, 6)),
    Case("depthwise", (3, 3, 3), groups=5, channels=(5, 5)),
    Case("depthwise-multiplier", (3, 3), groups=3, channels=(3, 9)),
    Case("groups-2-transposed", (2, 2), "transposed", stride=(2, 2), groups=2, channels=(4, 2)),
    Case("groups-2-inverse", (2, 2), "inverse", stride=(2, 2), groups=2, channels=(4, 2)),
    Case("channels-1-1", (3, 3, 3), channels=(1, 1)),
    Case("channels-odd", (3, 3, 3), channels=(7, 5)),
    Case("channels-wide", (3, 3), channels=(17, 33), voxels=10),
]

CASES = [*SAME, *FLOOR, *SUPPORT, *GIVEN, *TRANSPOSED, *INVERSE, *OFFSETS, *GROUPS]


def maps_below(geometry, seen=None):
    """All kernel maps that can be reached from a geometry."""
    seen = {} if seen is None else seen
    if geometry not in seen:
        seen[geometry] = [found for found, _ in geometry.maps.values()]
        for _, outputs in geometry.maps.values():
            if outputs is not None:
                maps_below(outputs, seen)
    return [found for maps in seen.values() for found in maps]
