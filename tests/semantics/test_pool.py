"""Pools over present inputs only, against the oracle."""

from dataclasses import dataclass

import cases
import oracle
import pytest
import torch
from oracle import Ints

import pumice as pm
from pumice.errors import DeviceError, DtypeError, GeometryError, OptionError, ShapeError

MODES = ["max", "avg", "sum"]


@dataclass(frozen=True)
class Pool:
    """One pooling; ``stride=None`` is the kernel. ``policy``: default | same | support | floor_unique | given."""

    name: str
    kernel: Ints
    stride: Ints | None = None
    padding: Ints | None = None
    dilation: Ints | None = None
    policy: str = "default"
    spatial: Ints | None = None

    def case(self) -> cases.Case:
        """The convolution with the same relation."""
        return cases.Case(
            self.name,
            self.kernel,
            self.policy,
            self.stride or self.kernel,
            self.dilation or (),
            self.padding,
            spatial=self.spatial,
            voxels=16,
        )

    def __str__(self) -> str:
        return self.name


POOLS = [
    Pool("1d-k2", (2,)),
    Pool("2d-k2", (2, 2)),
    Pool("3d-k2", (2, 2, 2)),
    Pool("4d-k2", (2, 2, 2, 2)),
    Pool("3d-k3-s2", (3, 3, 3), (2, 2, 2)),
    Pool("3d-k3-s2-p1-support", (3, 3, 3), (2, 2, 2), (1, 1, 1)),
    Pool("2d-k3-s2-p1-bounded", (3, 3), (2, 2), (1, 1), spatial=(6, 7)),
    Pool("2d-k3-s1-same", (3, 3), (1, 1)),
    Pool("2d-k2-s3-gaps", (2, 2), (3, 3)),
    Pool("2d-k2-s2-d2", (2, 2), (2, 2), dilation=(2, 2)),
    Pool("2d-k12", (1, 2)),
    Pool("2d-k3-s1-dilating", (3, 3), (1, 1), policy="support"),
    Pool("2d-given", (3, 3), (2, 2), policy="given"),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spec", POOLS, ids=str)
def test_pool_equals_the_oracle(spec: Pool, mode, device):
    case = spec.case()
    ops = cases.operands(case, device=device)
    x = cases.tensor(ops.coords, ops.feats, spatial_shape=case.spatial, batch_size=case.batches)
    out = cases.given(case, ops, device) if spec.policy == "given" else {"default": None}.get(spec.policy, spec.policy)
    y = getattr(pm.ops, f"{mode}_pool")(
        x, spec.kernel, stride=spec.stride, padding=spec.padding, dilation=spec.dilation or 1, out=out
    )
    outs = cases.outputs_of(case, ops.coords)
    assert cases.tuples(y) == outs, cases.diff(cases.tuples(y), outs)
    pairs = oracle.forward_pairs(ops.coords, outs, case.relation)
    values = cases.array(ops.feats)
    cases.assert_close(y.feats, oracle.pool(pairs, len(outs), values, mode), torch.float64, "features")
    dy = torch.randn(y.feats.shape, dtype=torch.float64).to(device)
    y.feats.backward(dy)
    want = oracle.pool_grad(pairs, values, cases.array(dy), mode)
    cases.assert_close(ops.feats.grad, want, torch.float64, "gradient")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_pool_in_low_precision(mode, dtype, device):
    case = POOLS[2].case()
    ops = cases.operands(case, dtype, device)
    y = getattr(pm.ops, f"{mode}_pool")(cases.tensor(ops.coords, ops.feats), 2)
    pairs = oracle.forward_pairs(ops.coords, cases.tuples(y), case.relation)
    assert y.feats.dtype == dtype
    cases.assert_close(y.feats, oracle.pool(pairs, len(y), cases.array(ops.feats), mode), dtype, "features")


@pytest.mark.parametrize("mode", MODES)
def test_pool_of_offsets(mode, device):
    """A window given by its offsets in reverse order, and a cross."""
    ops = cases.operands(cases.Case("offsets", (3, 3), voxels=20), device=device)
    x, pool = cases.tensor(ops.coords, ops.feats), getattr(pm.ops, f"{mode}_pool")
    window = [(i, j) for i in (1, 0, -1) for j in (1, 0, -1)]
    want = cases.array(pool(x, 3, stride=2).feats)
    cases.assert_close(pool(x, 3, stride=2, offsets=window).feats, want, torch.float64, "window")
    cross = [(0, 0), (1, 0), (-1, 0), (0, 2), (0, -2)]
    y, rows = pool(x, 3, stride=1, offsets=cross), {tuple(c): i for i, c in enumerate(ops.coords)}
    near = [[(b, p + i, q + j) for i, j in cross] for b, p, q in ops.coords]
    pairs = [(k, rows[c], o) for o, those in enumerate(near) for k, c in enumerate(those) if c in rows]
    cases.assert_close(y.feats, oracle.pool(pairs, len(y), cases.array(ops.feats), mode), torch.float64, "cross")
    with pytest.raises(OptionError, match="padding=1"):
        pool(x, 3, padding=1, offsets=cross)


UNPOOLS = [
    Pool("3d-k2", (2, 2, 2)),
    Pool("3d-k3-s2", (3, 3, 3), (2, 2, 2)),
    Pool("2d-k3-s3-p0", (3, 3), padding=(0, 0)),
    Pool("2d-k2-s2-d2", (2, 2), (2, 2), dilation=(2, 2)),
]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("spec", UNPOOLS, ids=str)
def test_unpool_equals_the_oracle(spec: Pool, given: bool, reduce: str, device):
    case = spec.case()
    ops = cases.operands(case, device=device)
    fine = cases.tensor(ops.coords, ops.feats)
    # From coordinates that another window made.
    coarse = pm.ops.max_pool(fine, 1, stride=spec.stride or spec.kernel)
    feats = torch.randn(coarse.feats.shape, dtype=torch.float64).to(device).requires_grad_()
    options = {"stride": spec.stride, "padding": spec.padding, "dilation": spec.dilation or 1, "reduce": reduce}
    y = pm.ops.unpool(coarse.replace(feats), spec.kernel, fine if given else None, **options)
    assert y.stride == fine.stride and (not given or y.geometry is fine.geometry)
    pairs = oracle.exchanged_pairs(cases.tuples(coarse), cases.tuples(y), case.relation)
    assert given or {o for _, _, o in pairs} == {*range(len(y))}
    mode = {"sum": "sum", "mean": "avg"}[reduce]
    cases.assert_close(y.feats, oracle.pool(pairs, len(y), cases.array(feats), mode), torch.float64, "features")
    dy = torch.randn(y.feats.shape, dtype=torch.float64).to(device)
    y.feats.backward(dy)
    grad = oracle.pool_grad(pairs, cases.array(feats), cases.array(dy), mode)
    cases.assert_close(feats.grad, grad, torch.float64, "gradient")


def test_unpool_refuses():
    x = pm.ops.max_pool(cases.tensor([(0, 0, 0), (0, 5, 1)], torch.ones(2, 1)), 2)
    with pytest.raises(OptionError, match="'max'"):
        pm.ops.unpool(x, 2, reduce="max")
    with pytest.raises(GeometryError, match="stride"):
        pm.ops.unpool(x, 2, x)


def test_max_of_negative_values_is_negative():
    """An absent voxel is no zero."""
    x = cases.tensor([(0, 0, 0), (0, 0, 1)], torch.tensor([[-3.0], [-2.0]]))
    assert pm.ops.max_pool(x, 2).feats.tolist() == [[-2.0]]
    assert pm.ops.avg_pool(x, 2).feats.tolist() == [[-2.5]]


def test_max_gradient_of_a_tie_is_shared_out_once():
    """However a tie is broken, the gradients of one output add up to its own."""
    x = cases.tensor([(0, 0, 0), (0, 0, 1), (0, 1, 0)], torch.ones(3, 1, dtype=torch.float64, requires_grad=True))
    pm.ops.max_pool(x, 2).feats.sum().backward()
    assert x.feats.grad is not None and x.feats.grad.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batches", [1, 3])
def test_global_pool(mode, batches, device):
    ins = [c for c in cases.compact(3, -3, 3, 9, 3) if c[0] != 1 and c[0] < batches]
    feats = torch.randn(len(ins), 3, dtype=torch.float64).to(device).requires_grad_()
    x = cases.tensor(ins, feats, batch_size=batches)
    y = getattr(pm.ops, f"global_{mode}_pool")(x)
    want = oracle.global_pool(ins, cases.array(feats), batches, mode)
    cases.assert_close(y, want, torch.float64, "features")
    dy = torch.randn(y.shape, dtype=torch.float64).to(device)
    y.backward(dy)
    pairs = [(0, i, c[0]) for i, c in enumerate(ins)]
    grad = oracle.pool_grad(pairs, cases.array(feats), cases.array(dy), mode)
    cases.assert_close(feats.grad, grad, torch.float64, "gradient")


@pytest.mark.parametrize("mode", MODES)
def test_pool_modules_are_their_functions(mode):
    ops = cases.operands(cases.Case("pool", (2, 2)))
    x = cases.tensor(ops.coords, ops.feats)
    name = mode.capitalize()
    for args, more in [((2,), {}), ((3, 2), {}), ((3, 2, 1), {}), ((3, 1), {"out": "support"})]:
        module = getattr(pm.nn, f"{name}Pool2d")(*args, **more)
        keys = dict(zip(("kernel_size", "stride", "padding"), args, strict=False)) | more
        want = getattr(pm.ops, f"{mode}_pool")(x, **keys)
        got = module(x)
        assert cases.tuples(got) == cases.tuples(want) and torch.equal(got.feats, want.feats)
    assert torch.equal(getattr(pm.nn, f"Global{name}Pool")()(x), getattr(pm.ops, f"global_{mode}_pool")(x))


def test_broadcast_over_the_voxels_of_an_item():
    """Item 1 of three has no voxels."""
    coords = [c for c in cases.compact(3, -3, 3, 9, 3) if c[0] != 1]
    x = cases.tensor(coords, torch.randn(len(coords), 4, dtype=torch.float64), batch_size=3)
    values = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    y = pm.ops.broadcast(x, values)
    assert torch.equal(y, values[x.items])
    torch.autograd.gradcheck(lambda v: pm.ops.broadcast(x, v), values)
    torch.autograd.gradgradcheck(lambda v: pm.ops.broadcast(x, v) ** 2, values)
    for wrong in (values[:2], values[0]):
        with pytest.raises(ShapeError, match=rf"must be \[3, C\].*found \[{len(wrong)}"):
            pm.ops.broadcast(x, wrong)
    with pytest.raises(DeviceError, match="values are on meta, x is on cpu"):
        pm.ops.broadcast(x, values.to("meta"))
    with pytest.raises(DtypeError, match="SparseTensor, found Tensor"):
        pm.ops.broadcast(x.feats, values)
