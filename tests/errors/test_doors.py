"""Every error at the door: its type, and the numbers in its message."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

import pumice as pm
from pumice.errors import (
    CoordinateError,
    DeviceError,
    DtypeError,
    GeometryError,
    OptionError,
    PumiceError,
    ShapeError,
)
from pumice.ops import autograd

tensor, voxelize, coalesce = (partial(door, dim=2) for door in (pm.SparseTensor, pm.voxelize, pm.coalesce))


def grid(n=3, dim=2, batch=0):
    """int32 coordinates 0..n-1 on a diagonal."""
    return torch.tensor([[batch, *[i] * dim] for i in range(n)], dtype=torch.int32).reshape(n, 1 + dim)


def sparse(n=3, channels=4, dim=2, batch=0, **more):
    """A small SparseTensor."""
    return pm.SparseTensor(torch.ones(n, channels), grid(n, dim, batch), dim=dim, **more)


def weight(*shape):
    """A weight of ones."""
    return torch.ones(*shape)


def points(*rows):
    """Points as a float matrix."""
    return torch.tensor(rows, dtype=torch.float32)


def dilated(x):
    """x with coordinates of its own, one voxel more on each side."""
    return pm.ops.conv(x, weight(4, 3, 3, 4), out="support")


def coalesced(batch=0, **more):
    """Three rows of a diagonal merged."""
    return coalesce(torch.ones(3, 1), grid(batch=batch), **more)


HUGE = torch.zeros(1, 3, dtype=torch.int32).expand(2**31, 3)
LEFT = torch.tensor([0, 0, -1, 0], dtype=torch.int32)


@dataclass(frozen=True)
class Door:
    """A call that must fail, the type of its error, and words (numbers, mostly) that its message must hold."""

    name: str
    error: type[Exception]
    words: tuple[str, ...]
    call: Callable[[], object]

    def __str__(self) -> str:
        return self.name


TENSOR = [
    Door(
        "duplicates",
        CoordinateError,
        ("2 of 5", "[0, 1, 1]", "duplicate", "coalesce"),
        lambda: tensor(torch.ones(5, 1), grid(3)[[0, 1, 1, 1, 2]]),
    ),
    Door(
        "duplicates-far-apart",
        CoordinateError,
        ("1 of 4", "[0, 0, 0]"),
        lambda: tensor(torch.ones(4, 1), grid(3)[[0, 1, 2, 0]]),
    ),
    Door("float-coords", DtypeError, ("int32", "float32"), lambda: tensor(torch.ones(3, 1), grid().float())),
    Door("int64-coords", DtypeError, ("int32", "int64"), lambda: tensor(torch.ones(3, 1), grid().long())),
    Door(
        "seven-columns",
        ShapeError,
        ("7",),
        lambda: pm.SparseTensor(torch.ones(2, 1), torch.zeros(2, 7, dtype=torch.int32), dim=6),
    ),
    Door(
        "one-column",
        ShapeError,
        ("1",),
        lambda: tensor(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32)),
    ),
    Door(
        "flat-coords",
        ShapeError,
        ("[3]",),
        lambda: tensor(torch.ones(3, 1), torch.zeros(3, dtype=torch.int32)),
    ),
    Door("lengths", ShapeError, ("4", "3"), lambda: tensor(torch.ones(4, 1), grid(3))),
    Door("flat-feats", ShapeError, ("[3]",), lambda: tensor(torch.ones(3), grid(3))),
    Door("integer-feats", DtypeError, ("int64",), lambda: tensor(torch.ones(3, 1).long(), grid(3))),
    Door("mixed-devices", DeviceError, ("cpu", "meta"), lambda: tensor(torch.ones(3, 1), grid(3).to("meta"))),
    Door(
        "mixed-devices-feats",
        DeviceError,
        ("cpu", "meta"),
        lambda: tensor(torch.ones(3, 1, device="meta"), grid(3)),
    ),
    Door(
        "too-many-voxels",
        CoordinateError,
        (str(2**31), str(2**31 - 1)),
        lambda: tensor(torch.ones(1, 1).expand(2**31, 1), HUGE),
    ),
    Door(
        "too-many-voxels-meta",
        CoordinateError,
        (str(2**31), str(2**31 - 1)),
        lambda: tensor(torch.ones(2**31, 1, device="meta"), torch.empty(2**31, 3, dtype=torch.int32, device="meta")),
    ),
    Door("negative-batch", CoordinateError, ("-1",), lambda: tensor(torch.ones(3, 1), grid(3, batch=-1))),
    Door("batch-size", CoordinateError, ("2",), lambda: tensor(torch.ones(3, 1), grid(3, batch=2), batch_size=2)),
    Door("outside-the-shape", CoordinateError, ("(2, 2)", "(3, 2)"), lambda: sparse(spatial_shape=(3, 2))),
    Door(
        "below-the-shape",
        CoordinateError,
        ("-5",),
        lambda: tensor(torch.ones(3, 1), grid(3) - torch.tensor([0, 5, 0], dtype=torch.int32), spatial_shape=(9, 9)),
    ),
    Door("shape-length", ShapeError, ("3", "2"), lambda: sparse(spatial_shape=(9, 9, 9))),
    Door("stride-length", ShapeError, ("3", "2"), lambda: sparse(stride=(1, 1, 1))),
    Door("stride-zero", PumiceError, ("0",), lambda: sparse(stride=0)),
    Door("no-inverse", GeometryError, ("voxelize",), lambda: sparse().inverse),
]

CONV = [
    Door("c-in", ShapeError, ("5", "4"), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 5))),
    Door("c-in-groups", ShapeError, ("6", "4"), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 3), groups=2)),
    Door("kernel-axes", ShapeError, ("2", "[2, 3, 3, 3, 4]"), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 3, 4))),
    Door(
        "groups-do-not-divide-in", ShapeError, ("3", "4"), lambda: pm.ops.conv(sparse(), weight(3, 3, 3, 1), groups=3)
    ),
    Door(
        "groups-do-not-divide-out", ShapeError, ("2", "3"), lambda: pm.ops.conv(sparse(), weight(3, 3, 3, 2), groups=2)
    ),
    Door("groups-zero", OptionError, ("0",), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4), groups=0)),
    Door("bias", ShapeError, ("3", "2"), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4), torch.ones(3))),
    Door("dtypes", DtypeError, ("float32", "float64"), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4).double())),
    Door(
        "bias-dtype",
        DtypeError,
        ("float32", "float64"),
        lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4), torch.ones(2).double()),
    ),
    Door("weight-device", DeviceError, ("cpu", "meta"), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4).to("meta"))),
    Door("stride-negative", OptionError, ("-2", "1"), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4), stride=-2)),
    Door("stride-zero", OptionError, ("0", "1"), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4), stride=(1, 0))),
    Door("dilation-negative", OptionError, ("-1", "1"), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4), dilation=-1)),
    Door("padding-negative", OptionError, ("-1", "0"), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4), padding=-1)),
    Door("stride-length", ShapeError, ("3", "2"), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4), stride=(2, 2, 2))),
    Door("stride-float", OptionError, ("2.0",), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4), stride=(2.0, 2.0))),
    Door(
        "policy",
        OptionError,
        ("dilating", "same", "support", "floor_unique"),
        lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4), out="dilating"),
    ),
    Door(
        "same-with-stride",
        OptionError,
        ("same", "2"),
        lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4), out="same", stride=2),
    ),
    Door(
        "given-without-target", PumiceError, ("given",), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4), out="given")
    ),
    Door("target-type", OptionError, ("int",), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4), out=5)),
    Door("target-axes", ShapeError, ("3", "2"), lambda: pm.ops.conv(sparse(), weight(2, 3, 3, 4), out=sparse(dim=3))),
    Door("not-a-sparse-tensor", DtypeError, ("Tensor",), lambda: pm.ops.conv(torch.ones(3, 4), weight(2, 3, 3, 4))),
    Door(
        "offsets-count",
        ShapeError,
        ("3", "2"),
        lambda: pm.ops.conv(sparse(), weight(2, 3, 4), offsets=[(0, 0), (1, 1)]),
    ),
    Door(
        "offsets-twice",
        OptionError,
        ("3", "2"),
        lambda: pm.ops.conv(sparse(), weight(2, 3, 4), offsets=[(0, 0), (1, 1), (0, 0)]),
    ),
    Door(
        "offsets-axes",
        ShapeError,
        ("3", "2"),
        lambda: pm.ops.conv(sparse(), weight(2, 2, 4), offsets=[(0, 0, 0), (1, 1, 1)]),
    ),
    Door("transposed-c-in", ShapeError, ("5", "4"), lambda: pm.ops.conv_transpose(sparse(), weight(2, 3, 3, 5))),
    Door(
        "transposed-beyond-int32",
        CoordinateError,
        (str(2**31 - 1),),
        lambda: pm.ops.conv_transpose(
            tensor(torch.ones(1, 4), grid(1) + torch.tensor([0, 2**30, 0], dtype=torch.int32)),
            weight(2, 2, 2, 4),
            stride=2,
        ),
    ),
    Door(
        "inverse-axes",
        ShapeError,
        ("3", "2"),
        lambda: pm.ops.conv_inverse(sparse(stride=2), weight(2, 2, 2, 4), sparse(dim=3), stride=2),
    ),
    Door(
        "inverse-strides",
        GeometryError,
        ("4", "2"),
        lambda: pm.ops.conv_inverse(sparse(stride=4), weight(2, 2, 2, 4), sparse(), stride=2),
    ),
    Door(
        "inverse-without-target",
        PumiceError,
        ("target",),
        lambda: pm.ops.conv_inverse(sparse(stride=2), weight(2, 2, 2, 4), None, stride=2),
    ),
    Door("pool-kernel", OptionError, ("0",), lambda: pm.ops.max_pool(sparse(), 0)),
    Door("pool-policy", OptionError, ("everywhere", "support"), lambda: pm.ops.avg_pool(sparse(), 2, out="everywhere")),
    Door("module-groups", PumiceError, ("3", "4"), lambda: pm.nn.Conv2d(4, 6, 3, groups=3)),
    Door("module-kernel-axes", PumiceError, ("3", "2"), lambda: pm.nn.Conv2d(4, 6, (3, 3, 3))),
    Door("module-dim", ShapeError, ("3", "2"), lambda: pm.nn.Conv3d(4, 6, 3)(sparse())),
    Door("module-channels", ShapeError, ("5", "4"), lambda: pm.nn.Conv2d(5, 6, 3)(sparse())),
]

SETS = [
    Door("cat-geometries", GeometryError, ("3", "2"), lambda: pm.cat([sparse(3), sparse(2)])),
    Door("cat-nothing", PumiceError, ("0",), lambda: pm.cat([])),
    Door("collate-nothing", PumiceError, ("0",), lambda: pm.collate([])),
    Door("collate-dims", PumiceError, ("2", "3"), lambda: pm.collate([sparse(), sparse(dim=3)])),
    Door("collate-channels", PumiceError, ("4", "5"), lambda: pm.collate([sparse(), sparse(channels=5)])),
    Door("collate-dtypes", PumiceError, ("float32", "float64"), lambda: pm.collate([sparse(), sparse().double()])),
    Door("union-channels", ShapeError, ("4", "5"), lambda: pm.union(sparse(), sparse(channels=5))),
    Door("union-strides", GeometryError, ("1", "2"), lambda: pm.union(sparse(), sparse(stride=2))),
    Door("plus-channels", ShapeError, ("4", "5"), lambda: (lambda x: x + x.replace(torch.ones(3, 5)))(sparse())),
    Door("times-geometries", GeometryError, ("3", "2"), lambda: sparse(3) * sparse(2)),
    Door("replace-rows", ShapeError, ("2", "3"), lambda: sparse(3).replace(torch.ones(2, 4))),
    Door("prune-length", ShapeError, ("2", "3"), lambda: sparse(3).prune(torch.ones(2, dtype=torch.bool))),
    Door("prune-dtype", DtypeError, ("bool", "int64"), lambda: sparse(3).prune(torch.ones(3, dtype=torch.int64))),
    Door("to-dense-outside", CoordinateError, ("(2, 2)", "(1, 1)"), lambda: sparse(3).to_dense((2, 2))),
    Door("to-dense-axes", ShapeError, ("2",), lambda: sparse(3).to_dense((4, 4, 4))),
    Door("from-dense-axes", ShapeError, ("[2, 3]",), lambda: pm.from_dense(torch.ones(2, 3))),
    Door("from-dense-dtype", DtypeError, ("int64",), lambda: pm.from_dense(torch.ones(2, 3, 4).long())),
]

POINTS = [
    Door("nan", CoordinateError, ("1 of 3",), lambda: voxelize(points([0, 0], [float("nan"), 0], [1, 1]), size=1.0)),
    Door("infinite", CoordinateError, ("1 of 2",), lambda: voxelize(points([0, 0], [float("inf"), 0]), size=1.0)),
    Door(
        "nan-with-shape",
        CoordinateError,
        ("1 of 2",),
        lambda: voxelize(points([0, 0], [float("nan"), 0]), size=1.0, spatial_shape=(4, 4)),
    ),
    Door(
        "nan-with-origin-min",
        CoordinateError,
        ("1 of 2",),
        lambda: voxelize(points([0, 0], [float("nan"), 0]), size=1.0, origin="min"),
    ),
    Door("beyond-int32", CoordinateError, (str(2**31 - 1),), lambda: voxelize(points([1e12, 0]), size=0.05)),
    Door("size-zero", OptionError, ("0",), lambda: voxelize(points([0, 0]), size=0)),
    Door("size-negative", OptionError, ("-0.5",), lambda: voxelize(points([0, 0]), size=(1.0, -0.5))),
    Door("size-nan", OptionError, ("nan",), lambda: voxelize(points([0, 0]), size=float("nan"))),
    Door("size-length", ShapeError, ("3", "2"), lambda: voxelize(points([0, 0]), size=(1.0, 1.0, 1.0))),
    Door("origin-length", ShapeError, ("3", "2"), lambda: voxelize(points([0, 0]), size=1.0, origin=(0, 0, 0))),
    Door("origin-unknown", OptionError, ("max", "min"), lambda: voxelize(points([0, 0]), size=1.0, origin="max")),
    Door(
        "rounding-unknown",
        OptionError,
        ("up", "floor", "round"),
        lambda: voxelize(points([0, 0]), size=1.0, rounding="up"),
    ),
    Door(
        "reduce-unknown",
        OptionError,
        ("median", "mean", "sum", "max", "first"),
        lambda: voxelize(points([0, 0]), size=1.0, reduce="median"),
    ),
    Door("feats-length", ShapeError, ("3", "1"), lambda: voxelize(points([0, 0]), torch.ones(3, 1), size=1.0)),
    Door(
        "batch-length",
        ShapeError,
        ("3", "1"),
        lambda: voxelize(points([0, 0]), size=1.0, batch=torch.zeros(3, dtype=torch.int64)),
    ),
    Door("batch-dtype", DtypeError, ("float32",), lambda: voxelize(points([0, 0]), size=1.0, batch=torch.zeros(1))),
    Door(
        "batch-negative",
        CoordinateError,
        ("-1",),
        lambda: voxelize(points([0, 0]), size=1.0, batch=torch.tensor([-1])),
    ),
    Door(
        "batch-size",
        CoordinateError,
        ("3", "2"),
        lambda: voxelize(points([0, 0]), size=1.0, batch=torch.tensor([3]), batch_size=2),
    ),
    Door(
        "batch-device",
        DeviceError,
        ("cpu", "meta"),
        lambda: voxelize(points([0, 0]), size=1.0, batch=torch.zeros(1, dtype=torch.int64, device="meta")),
    ),
    Door("integer-points", DtypeError, ("int64",), lambda: pm.voxelize(torch.zeros(2, 3).long(), size=1.0)),
    Door("five-axes", ShapeError, ("5", "4"), lambda: pm.voxelize(torch.zeros(2, 5), size=1.0, dim=5)),
    Door(
        "interpolate-mode",
        OptionError,
        ("cubic", "nearest", "trilinear"),
        lambda: pm.interpolate(sparse(), torch.zeros(2, 3), "cubic"),
    ),
    Door("interpolate-columns", ShapeError, ("4", "3"), lambda: pm.interpolate(sparse(), torch.zeros(2, 4), "nearest")),
    Door(
        "devoxelize-mode",
        OptionError,
        ("cubic", "nearest", "trilinear"),
        lambda: pm.devoxelize(voxelize(points([0, 0]), size=1.0), points([0, 0]), mode="cubic"),
    ),
    Door("devoxelize-without-points", GeometryError, ("voxelize",), lambda: pm.devoxelize(sparse())),
    Door("devoxelize-without-a-frame", GeometryError, ("voxelize",), lambda: pm.devoxelize(sparse(), points([0, 0]))),
    Door(
        "devoxelize-axes",
        ShapeError,
        ("3", "2"),
        lambda: pm.devoxelize(voxelize(points([0, 0]), size=1.0), points([0, 0, 0])),
    ),
]

CODES = [
    Door("order", OptionError, ("zigzag", "morton", "hilbert"), lambda: pm.serialize(grid(), "zigzag")),
    Door("order-back", OptionError, ("zigzag", "hilbert"), lambda: pm.deserialize(torch.arange(3), 2, "zigzag")),
    Door("depth-zero", OptionError, ("0", "31"), lambda: pm.serialize(grid(), depth=0)),
    Door("depth-32", OptionError, ("32", "31"), lambda: pm.serialize(grid(), depth=32, wide=True)),
    Door("too-many-bits", CoordinateError, ("64", "63", "wide"), lambda: pm.serialize(grid(dim=4), depth=16)),
    Door("too-many-bits-back", CoordinateError, ("64", "63"), lambda: pm.deserialize(torch.arange(3), 4, depth=16)),
    Door(
        "no-room-for-the-batch",
        CoordinateError,
        ("leave 0 bits", "4 takes 3"),
        lambda: pm.serialize(grid(dim=3, batch=4), depth=21),
    ),
    Door(
        "no-room-for-the-batch-wide",
        CoordinateError,
        ("leave 2 bits", "126", "4 takes 3"),
        lambda: pm.serialize(grid(dim=4, batch=4), depth=31, wide=True),
    ),
    Door("below-zero", CoordinateError, ("-1", "65535"), lambda: pm.serialize(grid(1, dim=3) + LEFT)),
    Door("beyond-the-depth", CoordinateError, ("0 to 1", "found 2"), lambda: pm.serialize(grid(3), depth=1)),
    Door("codes-of-floats", DtypeError, ("int64", "float32"), lambda: pm.deserialize(torch.ones(3), 2)),
    Door("codes-of-three-words", ShapeError, ("[4, 3]",), lambda: pm.deserialize(torch.zeros(4, 3).long(), 2)),
    Door("codes-of-five-axes", ShapeError, ("4", "5"), lambda: pm.deserialize(torch.arange(3), 5)),
    Door("codes-below-zero", CoordinateError, ("-7",), lambda: pm.deserialize(torch.tensor([1, -7]), 3)),
    Door(
        "codes-beyond-a-batch",
        CoordinateError,
        (str(2**40), str(2**34 - 1)),
        lambda: pm.deserialize(torch.tensor([2**40]), 3, depth=1),
    ),
    Door(
        "codes-beyond-a-batch-wide",
        CoordinateError,
        ("0 to 0", "found 1"),
        lambda: pm.deserialize(torch.tensor([[1, 0]]), 3, depth=1),
    ),
    Door("codes-of-float-coords", DtypeError, ("int32", "float32"), lambda: pm.serialize(grid().float())),
    Door("codes-of-flat-coords", ShapeError, ("[3]",), lambda: pm.serialize(grid()[:, 0])),
]

COALESCE = [
    Door("coalesce-reduce", OptionError, ("median", "mean", "first"), lambda: coalesced(reduce="median")),
    Door("coalesce-lengths", ShapeError, ("3", "[4, 1]"), lambda: coalesce(torch.ones(4, 1), grid())),
    Door("coalesce-flat-feats", ShapeError, ("[3]",), lambda: coalesce(torch.ones(3), grid())),
    Door("coalesce-integer-feats", DtypeError, ("int64",), lambda: coalesce(torch.ones(3, 1).long(), grid())),
    Door("coalesce-int64-coords", DtypeError, ("int32", "int64"), lambda: coalesce(torch.ones(3, 1), grid().long())),
    Door("coalesce-devices", DeviceError, ("cpu", "meta"), lambda: coalesce(torch.ones(3, 1, device="meta"), grid())),
    Door("coalesce-columns", ShapeError, ("7",), lambda: coalesce(torch.ones(2, 1), torch.zeros(2, 7).int())),
    Door("coalesce-negative-batch", CoordinateError, ("-1",), lambda: coalesced(batch=-1)),
    Door("coalesce-batch-size", CoordinateError, ("2", "1"), lambda: coalesced(batch=2, batch_size=1)),
    Door("coalesce-outside", CoordinateError, ("(2, 2)", "(3, 2)"), lambda: coalesced(spatial_shape=(3, 2))),
    Door("coalesce-stride", ShapeError, ("3", "2"), lambda: coalesced(stride=(1, 1, 1))),
]


HALVED = pm.Relation.of(2, 2, stride=2)
MAPS = [
    Door("map-of-a-tensor", GeometryError, ("SparseTensor", "x.geometry"), lambda: pm.kernel_map(sparse(), HALVED)),
    Door(
        "map-schedule",
        OptionError,
        ("MapSchedule", "'hash'"),
        lambda: pm.kernel_map(sparse().geometry, HALVED, schedule="hash"),
    ),
    Door("prepare-a-number", OptionError, ("list of Relations", "4"), lambda: sparse().prepare(4)),
    Door("prepare-sizes", OptionError, ("list of Relations", "[2, 2]"), lambda: sparse().prepare([2, 2])),
    Door(
        "prepare-windows", OptionError, ("for each level",), lambda: sparse().prepare([HALVED], [pm.Relation.of(2, 3)])
    ),
    Door("prepare-users", OptionError, ("MapConsumers", "int"), lambda: sparse().prepare([HALVED], consumers=4)),
    Door(
        "prepare-other-users",
        ShapeError,
        ("3 maps", "1 down"),
        lambda: sparse().prepare([HALVED], consumers=pm.ops.MapConsumers([()], [()], [[()]])),
    ),
    Door("prepare-levels", ShapeError, ("3", "2"), lambda: sparse().prepare([HALVED], [(), (), ()])),
    Door("prepare-same", GeometryError, ("'same'", "no coordinates"), lambda: sparse().prepare([pm.Relation.of(2, 3)])),
]


FAR = torch.tensor([[0, 0, 0], [0, 10**8, 10**8]], dtype=torch.int32)


def voxels():
    """Points on the diagonal of space, voxelised."""
    return pm.voxelize(points([0, 0, 0], [1, 1, 1]), size=1.0)


GIVEN = [
    Door(
        "batch-wraps",
        CoordinateError,
        (str(5 - 2**32),),
        lambda: pm.voxelize(points([0, 0, 0], [1, 1, 1]), size=1.0, batch=torch.tensor([5 - 2**32, 0])),
    ),
    Door("no-size", OptionError, ("size", "None"), lambda: pm.voxelize(points([0, 0, 0]))),
    Door("size-text", OptionError, ("size", "'small'"), lambda: pm.voxelize(points([0, 0, 0]), size="small")),
    Door("points-text", DtypeError, ("points", "str"), lambda: pm.voxelize("points", size=1.0)),
    Door("points-ragged", DtypeError, ("points", "list"), lambda: pm.voxelize([[0.0], [1.0, 2.0]], size=1.0)),
    Door(
        "grid-fraction",
        OptionError,
        ("spatial_shape", "1.5"),
        lambda: pm.voxelize(points([0, 0, 0]), size=1.0, spatial_shape=(1.5, 2, 2)),
    ),
    Door(
        "grid-negative",
        OptionError,
        ("spatial_shape", "-1"),
        lambda: pm.voxelize(points([0, 0, 0]), size=1.0, spatial_shape=(-1, 2, 3)),
    ),
    Door("grid-axes", ShapeError, ("2", "3"), lambda: pm.voxelize(points([0, 0, 0]), size=1.0, spatial_shape=(2, 3))),
    Door("tensor-grid-fraction", OptionError, ("spatial_shape", "9.5"), lambda: sparse(spatial_shape=9.5)),
    Door("tensor-stride-text", OptionError, ("stride", "'two'"), lambda: sparse(stride="two")),
    Door(
        "devoxelize-batch",
        ShapeError,
        ("[2]", "[3]"),
        lambda: pm.devoxelize(voxels(), points([0, 0, 0], [1, 1, 1]), batch=torch.zeros(3, dtype=torch.int64)),
    ),
    Door(
        "devoxelize-without-batch",
        OptionError,
        ("batch", "2 items", "None"),
        lambda: pm.devoxelize(pm.collate([voxels(), voxels()]), points([0, 0, 0])),
    ),
    Door("kernel-fraction", OptionError, ("kernel_size", "2.5"), lambda: pm.nn.Conv3d(2, 4, 2.5)),
    Door("padding-text", OptionError, ("padding", "'same'"), lambda: pm.nn.Conv3d(2, 4, 3, padding="same")),
    Door("padding-of-same", OptionError, ("(2, 2, 2)", "(1, 1, 1)"), lambda: pm.nn.Conv3d(2, 4, 5, padding=1)),
    Door(
        "padding-of-same-even",
        OptionError,
        ("(0, 0)", "(1, 1)"),
        lambda: pm.ops.conv(sparse(), weight(2, 2, 2, 4), padding=1),
    ),
    Door(
        "padding-of-same-in-a-call",
        OptionError,
        ("(1, 1)", "(0, 0)"),
        lambda: pm.nn.Conv2d(4, 2, 3, padding=0, out="support")(sparse(), out="same"),
    ),
    Door("stride-of-same", OptionError, ("same", "(2, 2, 2)"), lambda: pm.nn.Conv3d(2, 4, 3, 2, out="same")),
    Door("stride-float", OptionError, ("stride", "2.0"), lambda: pm.nn.Conv3d(2, 4, 3, stride=2.0)),
    Door("pool-nothing", OptionError, ("kernel_size", "0"), lambda: pm.nn.MaxPool3d(0)),
    Door("pool-plain", DtypeError, ("SparseTensor", "Tensor"), lambda: pm.nn.MaxPool3d(2)(torch.ones(3, 4))),
    Door("collate-plain", DtypeError, ("SparseTensor", "Tensor"), lambda: pm.collate([torch.ones(3, 4)])),
    Door("cat-plain", DtypeError, ("SparseTensor", "Tensor"), lambda: pm.cat([sparse(), torch.ones(3, 4)])),
    Door("union-plain", DtypeError, ("SparseTensor", "Tensor"), lambda: pm.union(sparse(), torch.ones(3, 4))),
    Door(
        "dense-far",
        CoordinateError,
        ("100000001", "spatial_shape"),
        lambda: tensor(torch.ones(2, 1), FAR).to_dense(),
    ),
    Door("plus-rows", ShapeError, ("[3, 4]", "[2, 4]"), lambda: sparse() + torch.ones(2, 4)),
    Door("minus-channels", ShapeError, ("[3, 1]", "[3, 4]"), lambda: sparse(channels=1) - torch.ones(3, 4)),
    Door("times-cube", ShapeError, ("[1, 3, 4]",), lambda: sparse() * torch.ones(1, 3, 4)),
]


BARE = {
    "to_dense": lambda x: pm.to_dense(x),
    "devoxelize": lambda x: pm.devoxelize(x),
    "interpolate": lambda x: pm.interpolate(x, torch.zeros(1, 3)),
    "max_pool": lambda x: pm.ops.max_pool(x, 2),
    "sum_pool": lambda x: pm.ops.sum_pool(x, 2),
    "avg_pool": lambda x: pm.ops.avg_pool(x, 2),
    "unpool": lambda x: pm.ops.unpool(x, 2),
    "global_sum_pool": lambda x: pm.ops.global_sum_pool(x),
    "broadcast": lambda x: pm.ops.broadcast(x, torch.ones(1, 4)),
    "row_sum": lambda x: pm.ops.row_sum(x, torch.ones(3, 4)),
    "group_norm": lambda x: pm.ops.group_norm(x, 1),
    "space_to_channel": lambda x: pm.ops.space_to_channel(x),
    "channel_to_space": lambda x: pm.ops.channel_to_space(x),
    "upsample_nearest": lambda x: pm.ops.upsample_nearest(x),
    "to_bev": lambda x: pm.ops.to_bev(x),
    "split": lambda x: pm.ops.split(x),
    "prune": lambda x: pm.ops.prune(x, torch.ones(3, dtype=torch.bool)),
    "linear": lambda x: pm.ops.linear(x, torch.ones(2, 4)),
    "conv": lambda x: pm.ops.conv(x, weight(2, 3, 3, 4)),
}
"""Functions of a SparseTensor, given something else."""

PLAIN = [
    *[
        Door(f"{name}-of-{type(x).__name__}", DtypeError, (name, "SparseTensor", type(x).__name__), partial(door, x))
        for name, door in BARE.items()
        for x in (torch.ones(3, 4), None)
    ],
    Door(
        "prepare-features", DtypeError, ("prepare", "Tensor"), lambda: pm.prepare(torch.nn.Identity(), torch.ones(3, 4))
    ),
    Door("cat-of-one", DtypeError, ("cat", "list", "SparseTensor"), lambda: pm.cat(sparse())),
    Door("collate-of-one", DtypeError, ("collate", "list", "SparseTensor"), lambda: pm.collate(sparse())),
    Door("cat-of-a-number", DtypeError, ("cat", "list", "int"), lambda: pm.cat(3)),
    Door("replace-by-an-array", DtypeError, ("dense torch", "ndarray"), lambda: sparse().replace(np.ones((3, 4)))),
    Door("replace-by-itself", DtypeError, ("dense torch", "SparseTensor"), lambda: sparse().replace(sparse())),
    Door("feats-of-coo", DtypeError, ("sparse_coo",), lambda: tensor(torch.ones(3, 1).to_sparse(), grid())),
    Door("mask-of-a-list", DtypeError, ("bool", "list"), lambda: sparse().prune([True, False, True])),
    Door("dense-of-a-list", DtypeError, ("dense", "list"), lambda: pm.from_dense([1.0])),
    Door("positions-of-a-list", DtypeError, ("positions", "list"), lambda: pm.interpolate(sparse(), [[0.0, 0.0, 0.0]])),
    Door("coords-of-a-list", DtypeError, ("int32", "list"), lambda: pm.coalesce(torch.ones(1, 1), [[0, 0, 0, 0]])),
    Door("int64-coords-hint", DtypeError, ("coords.int()",), lambda: tensor(torch.ones(3, 1), grid().long())),
    Door("codes-of-nothing", DtypeError, ("int32", "NoneType"), lambda: pm.serialize(None)),
    Door("codes-of-a-list", DtypeError, ("int64", "list"), lambda: pm.deserialize([1], 3)),
    Door("map-of-a-number", OptionError, ("Relation", "int"), lambda: pm.kernel_map(sparse().geometry, 3)),
    Door("bev-axis", OptionError, ("0 to 1", "'z'"), lambda: pm.ops.to_bev(sparse(), "z")),
    Door("batch-size-text", OptionError, ("batch_size", "'2'"), lambda: sparse(batch_size="2")),
    Door("batch-size-fraction", OptionError, ("batch_size", "2.5"), lambda: sparse(batch_size=2.5)),
    Door("batch-size-of-points", OptionError, ("-1",), lambda: pm.voxelize(points([0, 0, 0]), size=1.0, batch_size=-1)),
    Door("policy-of-a-layer", OptionError, ("support", "'bogus'"), lambda: pm.nn.Conv3d(3, 3, 3, out="bogus")),
    Door(
        "policy-of-offsets", OptionError, ("'bogus'",), lambda: pm.nn.Conv2d(3, 3, None, offsets=[(0, 1)], out="bogus")
    ),
    Door("target-by-name", OptionError, ("out=target", "'given'"), lambda: pm.nn.AvgPool3d(2, out="given")),
    Door("weight-of-a-list", DtypeError, ("weight", "list"), lambda: pm.ops.conv(sparse(), [1])),  # pyright: ignore[reportArgumentType]
    Door("name-of-another", AttributeError, ("tensor_stride", "x.stride"), lambda: sparse().tensor_stride),  # pyright: ignore
    Door("policy-of-a-pool", OptionError, ("support", "'bogus'"), lambda: pm.nn.MaxPool3d(2, out="bogus")),
    Door("no-offsets", OptionError, ("offsets", "none"), lambda: pm.nn.Conv3d(3, 3, None, offsets=[])),
    Door("channels-fraction", OptionError, ("in_channels", "3.0"), lambda: pm.nn.Conv3d(3.0, 3, 3)),
    Door("channels-text", OptionError, ("out_channels", "'3'"), lambda: pm.nn.Conv3d(3, "3", 3)),
    Door("groups-of-a-norm", ShapeError, ("num_groups=0",), lambda: pm.nn.GroupNorm(0, 4)),
    Door("channels-of-a-norm", ShapeError, ("3 channels", "4"), lambda: pm.nn.LayerNorm(3)(sparse())),
]


RELATIONAL = pm.nn.RelationalConv
GRAPHS = [
    Door("graph-of-nothing", DtypeError, ("edge_index", "NoneType"), lambda: pm.Graph(None)),
    Door("graph-channels", OptionError, ("in_channels", "-8"), lambda: RELATIONAL(-8, 4, 2)),
    Door("graph-channels-text", OptionError, ("out_channels", "'4'"), lambda: RELATIONAL(8, "4", 2)),
    Door("graph-no-channels", OptionError, ("in_channels", "None"), lambda: RELATIONAL(None, 4, 2)),
    Door("graph-no-relations", OptionError, ("num_relations", "0"), lambda: RELATIONAL(8, 4, 0)),
    Door("graph-no-bases", OptionError, ("num_bases", "0"), lambda: RELATIONAL(8, 4, 2, num_bases=0)),
    Door("graph-no-blocks", OptionError, ("num_blocks", "0"), lambda: RELATIONAL(8, 4, 2, num_blocks=0)),
]


def coordinates(columns):
    """Five rows of zeros, and features for them."""
    return torch.ones(5, 1), torch.zeros(5, columns, dtype=torch.int32)


COLUMNS = [
    Door(
        "no-batch-column",
        ShapeError,
        ("[N, 4]", "dim=3", "[5, 3]", "pad(coords, (1, 0))", "dim=2"),
        lambda: pm.SparseTensor(*coordinates(3)),
    ),
    Door("four-axes", ShapeError, ("[N, 4]", "dim=3", "[5, 5]", "dim=4"), lambda: pm.SparseTensor(*coordinates(5))),
    Door("too-many-columns", ShapeError, ("[N, 3]", "[5, 4]", "dim=3"), lambda: tensor(*coordinates(4))),
    Door("coalesce-no-batch-column", ShapeError, ("[5, 3]", "dim=2"), lambda: pm.coalesce(*coordinates(3))),
    Door(
        "exported-no-batch-column",
        ShapeError,
        ("[5, 3]", "dim=2"),
        lambda: pm.exportable(torch.nn.Identity())(*coordinates(3)[::-1]),
    ),
    Door(
        "points-with-intensity",
        ShapeError,
        ("[P, 3]", "dim=3", "[2, 4]", "points[:, :3]", "feats", "dim=4"),
        lambda: pm.voxelize(torch.zeros(2, 4), size=1.0),
    ),
    Door("points-of-five-columns", ShapeError, ("[2, 5]", "[:, :3]"), lambda: pm.voxelize(torch.zeros(2, 5), size=1.0)),
    Door("points-of-a-plane", ShapeError, ("[2, 2]", "dim=2"), lambda: pm.voxelize(torch.zeros(2, 2), size=1.0)),
    Door(
        "captured-points-with-intensity",
        ShapeError,
        ("[2, 4]", "points[:, :3]"),
        lambda: pm.capture_points(torch.nn.Identity().eval(), torch.zeros(2, 4), size=1.0),
    ),
    Door("coordinates-first", CoordinateError, ("-7", "(batch, axes...)"), lambda: sparse(1, batch=-7)),
]


ALL = [*TENSOR, *CONV, *SETS, *POINTS, *CODES, *COALESCE, *MAPS, *GIVEN, *PLAIN, *GRAPHS, *COLUMNS]


@pytest.mark.parametrize("door", ALL, ids=str)
def test_door(door: Door):
    with pytest.raises(door.error) as caught:
        door.call()
    assert isinstance(caught.value, PumiceError), type(caught.value)
    for word in door.words:
        assert word in str(caught.value), f"{word!r} is missing from: {caught.value}"


def test_every_error_is_a_builtin_kind_too():
    assert issubclass(ShapeError, ValueError) and issubclass(DtypeError, TypeError)
    assert all(issubclass(e, ValueError) for e in (DeviceError, CoordinateError, GeometryError, OptionError))
    assert all(issubclass(getattr(pm.errors, name), PumiceError) for name in pm.errors.__all__)


def test_a_failed_call_leaves_nothing_behind():
    """A map that could not be made is not kept; the next call works."""
    x = sparse()
    with pytest.raises(PumiceError):
        pm.ops.conv(x, weight(2, 3, 3, 4), out="nowhere")
    assert not x.geometry.maps
    assert len(pm.ops.conv(x, weight(2, 3, 3, 4))) == 3


def test_nothing_is_clamped_in_silence():
    """Batch indices beyond int32 would wrap to small numbers."""
    with pytest.raises(PumiceError):
        voxelize(points([0, 0]), size=1.0, batch=torch.tensor([2**32]))


def test_a_device_without_a_back_end():
    with pytest.raises(pm.errors.DeviceError, match="'xpu' is not supported; expected one of cpu, cuda"):
        autograd.check_device(torch.device("xpu"))
