"""Reductions by an index against loops, in every shape and dtype; gradients, order, and what is refused."""

import math

import pytest
import torch

import pumice as pm
from benchmarks.harness.timing import on_threads
from pumice.errors import CoordinateError, DeviceError, DtypeError, OptionError, ShapeError
from pumice.lower import native_scatter, rows
from pumice.ops.scatter import REDUCTIONS

JOINS = {"sum": sum, "mean": lambda x: sum(x) / len(x), "max": max, "min": min}


def looped(src, index, dim, size, reduce):
    """The reduction entry by entry, with the first place of each."""
    index = index.reshape(*[1] * (dim if index.ndim == 1 else 0), *index.shape)
    index = index.reshape(*index.shape, *[1] * (src.ndim - index.ndim)).expand(src.shape)
    shape = [*src.shape]
    shape[dim] = size
    groups = {}
    for at in torch.cartesian_prod(*map(torch.arange, src.shape)).reshape(-1, src.ndim).tolist():
        to = list(at)
        to[dim] = int(index[tuple(at)])
        groups.setdefault(tuple(to), []).append((float(src[tuple(at)]), at))
    if "softmax" in reduce:
        found = torch.zeros(src.shape, dtype=torch.float64)
        for entries in groups.values():
            total = sum(math.exp(value) for value, _ in entries)
            for value, at in entries:
                found[tuple(at)] = value - math.log(total) if reduce == "log_softmax" else math.exp(value) / total
        return found, None
    found, places = torch.zeros(shape, dtype=torch.float64), torch.full(shape, src.shape[dim])
    for to, entries in groups.items():
        found[to] = JOINS[reduce]([value for value, _ in entries])
        if reduce in ("max", "min"):
            places[to] = next(at[dim] for value, at in entries if value == found[to])
    return found, places


def made(shape, dtype=torch.float32, seed=0):
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def indices(count, size, seed=1):
    return torch.randint(0, size, count, generator=torch.Generator().manual_seed(seed))


SHAPES = [((30, 3), 0, (30,)), ((12, 37), 0, (12,)), ((3, 15), -1, (15,)), ((2, 9, 3), 1, (9,)), ((0, 4), 0, (0,))]
SHAPES += [((12, 5), 0, (12, 5)), ((2, 9, 3), 1, (2, 9)), ((2, 9, 3), 1, (2, 9, 3)), ((20,), 0, (20,))]
SHAPES += [((2, 9, 3), 1, (1, 9, 1)), ((5, 0), 0, (5,))]


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize(("shape", "dim", "of"), SHAPES)
@pytest.mark.parametrize("native", [True, False])
def test_every_shape(shape, dim, of, reduce, native, monkeypatch):
    if not native:
        monkeypatch.setattr(native_scatter, "runs", lambda values: False)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        src, index = made(shape, dtype), indices(of, 7)
        wanted, places = looped(src, index, dim % len(shape), 8, reduce)
        got = pm.ops.scatter(src, index, dim, dim_size=8, reduce=reduce)
        assert got.dtype == dtype
        near = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got.double(), wanted, rtol=near, atol=near)
        if reduce in ("max", "min"):
            assert torch.equal(pm.ops.scatter(src, index, dim, dim_size=8, reduce=reduce, places=True)[1], places)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_integers(reduce):
    src, index = made((50, 3), torch.int64), indices((50,), 6)
    wanted, _ = looped(src, index, 0, 6, reduce)
    assert torch.equal(pm.ops.scatter(src, index, 0, reduce=reduce), wanted.floor().long())


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_segments_by_index_and_by_pointers(reduce):
    src, index = made((60, 5)), indices((60,), 9).sort().values
    index = index[index != 4]
    src = src[: len(index)]
    pointers = torch.searchsorted(index, torch.arange(11)).int()
    wanted = pm.ops.scatter(src, index, 0, dim_size=10, reduce=reduce)
    torch.testing.assert_close(pm.ops.segment_reduce(src, index.int(), dim_size=10, reduce=reduce), wanted)
    torch.testing.assert_close(pm.ops.segment_reduce(src, indptr=pointers, reduce=reduce), wanted)
    turned = pm.ops.segment_reduce(src.t(), indptr=pointers, dim=1, reduce=reduce)
    torch.testing.assert_close(turned, wanted.t())


def test_entries_outside_of_pointers_are_left_out():
    src = torch.arange(8.0)
    got = pm.ops.segment_reduce(src, indptr=torch.tensor([1, 3, 3, 7]))
    assert got.tolist() == [3, 0, 18]


def test_gather_is_the_inverse():
    src = made((4, 3))
    pointers = torch.tensor([0, 2, 2, 5, 6])
    assert torch.equal(pm.ops.gather(src, indptr=pointers), src[[0, 0, 2, 2, 2, 3]])
    assert torch.equal(pm.ops.gather(src, torch.tensor([3, 0, 3])), src[[3, 0, 3]])
    assert torch.equal(pm.ops.gather(src, torch.tensor([2, 0]), dim=1), src[:, [2, 0]])


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("shape", [(14, 2), (2, 7, 2)])
def test_gradients(reduce, shape):
    dim = len(shape) - 2
    src = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    index = indices((shape[dim],), 4)

    def run(x):
        return pm.ops.scatter(x, index, dim, dim_size=5, reduce=reduce)

    assert torch.autograd.gradcheck(run, src) and torch.autograd.gradgradcheck(run, src)
    assert torch.autograd.gradcheck(lambda x: pm.ops.gather(x, index % 2, dim=dim), src)


def test_nan_infinity_and_ties():
    src = torch.tensor([[-torch.inf], [torch.nan], [1.0], [torch.nan], [2.0], [2.0], [-torch.inf]])
    index = torch.tensor([0, 1, 1, 1, 2, 2, 4])
    for least in ("max", "min"):
        got, place = pm.ops.scatter(src, index, 0, reduce=least, places=True)
        assert place[:, 0].tolist() == [0, 1, 4, 7, 6]
        assert got[3] == 0 and got[0] == got[4] == -torch.inf and got[1].isnan() and got[2] == 2
        plain = rows.max_items_torch(src, index, 5, least == "min")
        assert torch.equal(plain.clamp(min=-1)[:, 0], torch.tensor([0, 1, 4, -1, 6]))


def test_sums_do_not_depend_on_threads():
    src, index = torch.randn(20_000, 7), indices((20_000,), 300)
    found = []
    for count in (1, 3):
        with on_threads(count):
            found.append(pm.ops.scatter(src, index, 0))
    assert torch.equal(*found)


def test_compiled_and_transformed():
    src, index = torch.randn(30, 4), indices((30,), 5)
    for reduce in ("sum", "max", "softmax"):

        def run(x, reduce=reduce):
            return pm.ops.scatter(x, index, 0, dim_size=5, reduce=reduce)

        wanted = run(src)
        torch.testing.assert_close(torch.compile(run, backend="aot_eager")(src), wanted)
        torch.testing.assert_close(torch.func.vmap(run)(torch.stack([src, src]))[1], wanted)
        torch.testing.assert_close(torch.func.jvp(run, (src,), (src,))[0], wanted)


def test_what_is_refused():
    src, index = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    for error, call in (
        (OptionError, lambda: pm.ops.scatter(src, index, 0, reduce="median")),
        (OptionError, lambda: pm.ops.scatter(src, index, 0, places=True)),
        (OptionError, lambda: pm.ops.segment_reduce(src)),
        (DtypeError, lambda: pm.ops.scatter(src, index.float(), 0)),
        (DtypeError, lambda: pm.ops.scatter(src.long(), index, 0, reduce="softmax")),
        (DtypeError, lambda: pm.ops.scatter([1.0], index)),
        (DeviceError, lambda: pm.ops.scatter(src, index.to("meta"), 0)),
        (ShapeError, lambda: pm.ops.scatter(src, index, 2)),
        (ShapeError, lambda: pm.ops.scatter(src, index[:3], 0)),
        (CoordinateError, lambda: pm.ops.scatter(src, index, 0, dim_size=1)),
        (CoordinateError, lambda: pm.ops.scatter(src, index - 1, 0)),
        (CoordinateError, lambda: pm.ops.segment_reduce(src, index)),
        (CoordinateError, lambda: pm.ops.segment_reduce(src, indptr=torch.tensor([0, 5]))),
        (CoordinateError, lambda: pm.ops.gather(src, torch.tensor([4]))),
        (CoordinateError, lambda: pm.ops.gather(src, indptr=torch.tensor([0, 2]))),
    ):
        with pytest.raises(error):
            call()


def test_an_index_that_was_written_is_read_again():
    src, index = torch.ones(3, 1), torch.tensor([0, 0, 1])
    pm.ops.scatter(src, index, 0)
    index[2] = 2
    assert pm.ops.scatter(src, index, 0)[:, 0].tolist() == [2, 0, 1]
