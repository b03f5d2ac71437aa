"""Norms over the first rows of a buffer, in plain torch: values, gradients, statistics, and what they refuse."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from norms import both_passes

from pumice.coords import Bounds, CoordBuffer
from pumice.coords.buffer import new_status
from pumice.errors import DeviceError, ShapeError
from pumice.lower import norm

EPS = 0.01


def cloud(count, capacity=None):
    """So many living rows of a buffer; without a capacity all of them, as is known."""
    coords = torch.zeros(capacity or count, 4, dtype=torch.int32)
    if capacity is None:
        return CoordBuffer.of(coords, Bounds((0, 0, 0), (9, 9, 9), 1))
    counted = torch.tensor([count], dtype=torch.int32)
    return CoordBuffer(coords, counted, Bounds((0, 0, 0), (9, 9, 9), 1), new_status(coords.device))


def vectors(number, channels=5):
    return list(torch.rand(number, channels, generator=torch.Generator().manual_seed(2)).double() + 0.5)


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def expected(x, told, weight=None, bias=None, residual=None, relu=False):
    """What torch's own norm makes of the living rows; with fewer than two by what is known."""
    (mean, var), own = told.running or (torch.zeros(5).double(), torch.ones(5).double()), len(x) > 1
    mean, var, offset = mean.clone(), var.clone(), 0 if told.offset is None else told.offset
    momentum = 1 / (int(told.tracked) + 1) if told.momentum is None and told.tracked is not None else told.momentum
    y = torch.nn.functional.batch_norm(x + offset, mean, var, weight, bias, own, momentum or 0.0, told.eps)
    y = y if residual is None else y + residual
    return (y.relu() if relu else y), mean, var


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
@pytest.mark.parametrize(("count", "capacity"), [(0, 7), (1, 7), (2, 7), (7, 7), (1, None), (9, None)])
def test_the_first_rows_alone_count(count, capacity, momentum, adds, relu):
    (mean, var, weight, bias, offset), size = vectors(5), capacity or count
    x, residual, grad = rows(size, 5), rows(size, 5, seed=1), rows(size, 5, seed=3)
    # Whatever stands behind the living ones.
    x[count:] = grad[count:] = torch.nan
    told = norm.Statistics((mean.clone(), var.clone()), EPS, True, momentum, torch.tensor(4), offset)
    wanted = norm.Norm(weight, bias, told, residual if adds else None, relu)
    y, own = both_passes(x, cloud(count, capacity), wanted, grad)
    twin = [t.detach().clone().requires_grad_() for t in (x[:count], weight, bias, residual[:count])]
    still = norm.Statistics((mean, var), EPS, True, momentum, torch.tensor(4), offset)
    if count == 0:
        wanted = torch.zeros(0, 5).double(), mean, var
    else:
        wanted = expected(twin[0], still, *twin[1:3], twin[3] if adds else None, relu)
    torch.testing.assert_close(y[:count], wanted[0])
    assert told.running is not None and told.tracked is not None and int(told.tracked) == 4 + (count > 1)
    if count > 1:
        torch.testing.assert_close(told.running, wanted[1:])
    else:
        assert torch.equal(told.running[0], mean) and torch.equal(told.running[1], var)
    if count:
        theirs = torch.autograd.grad(wanted[0], twin[: 3 + adds], grad[:count])
        for got, want in zip(own[: 3 + adds], theirs, strict=True):
            torch.testing.assert_close(got[: len(want)], want)


def test_fewer_than_two_rows_without_statistics_have_mean_0_and_variance_1():
    x, (offset,) = rows(1, 5), vectors(1)
    told = norm.Statistics(None, EPS, True, 0.1, None, offset)
    y = norm.batch_norm(x, cloud(1), (None, None), told)
    torch.testing.assert_close(y, (x + offset) / (1 + EPS) ** 0.5)
    assert norm.batch_norm(rows(0, 5), cloud(0), (None, None), told).shape == (0, 5)


@pytest.mark.parametrize("count", [1, 2, 6])
def test_gradients_are_those_of_differences(count):
    (mean, var, weight, bias), behind = vectors(4), rows(6 - count, 5, seed=4)

    def function(x, weight, bias):
        # Gradients of what stands behind the living rows may be anything.
        told = norm.Statistics((mean, var), EPS)
        return norm.batch_norm(torch.cat([x, behind]), cloud(count, 6), (weight, bias), told)[:count]

    given = [t.requires_grad_() for t in (rows(count, 5), weight, bias)]
    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_rows_are_summed_in_wide_floats(dtype):
    """And have the dtype that they came in; parameters keep theirs."""
    x, (weight, bias) = (rows(5000, 5) + 20).to(dtype).requires_grad_(), vectors(2)
    weight, bias = weight.float().requires_grad_(), bias.float().requires_grad_()
    told = norm.Statistics((torch.zeros(5), torch.ones(5)), EPS, True, 1.0)
    y = norm.batch_norm(x, cloud(5000), (weight, bias), told)
    assert y.dtype == dtype and told.running is not None
    wide = x.detach().double()
    torch.testing.assert_close(told.running[0].double(), wide.mean(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(told.running[1].double(), wide.var(0), rtol=1e-4, atol=0)
    found = torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))
    assert [g.dtype for g in found] == [dtype, torch.float32, torch.float32]
    torch.testing.assert_close(found[2], torch.full((5,), 5000.0))


def no_values(tensor):
    return tensor.to("meta")


WRONG = {
    "weight": ({"weight": torch.ones(4)}, ShapeError, "the norm has 4 channels, its input 5"),
    "bias": ({"bias": torch.ones(6)}, ShapeError, "the norm has 6 channels, its input 5"),
    "mean": ({"running": (torch.ones(4), torch.ones(5))}, ShapeError, "4 channels"),
    "variance": ({"running": (torch.ones(5), torch.ones(1))}, ShapeError, "1 channels"),
    "offset": ({"offset": torch.ones(3)}, ShapeError, "3 channels"),
    "weight elsewhere": ({"weight": no_values(torch.ones(5))}, DeviceError, "the norm is on meta, its input on cpu"),
    "mean elsewhere": ({"running": (no_values(torch.ones(5)), torch.ones(5))}, DeviceError, "on meta"),
    "other and elsewhere": ({"weight": no_values(torch.ones(4))}, DeviceError, "on meta"),
    "residual": ({"residual": torch.ones(9, 4)}, ShapeError, r"a residual \[9, 5\] on cpu, found \[9, 4\] on cpu"),
    "rows": ({"residual": torch.ones(8, 5)}, ShapeError, r"found \[8, 5\]"),
}


@pytest.mark.parametrize("which", WRONG)
@pytest.mark.parametrize("kernels", [False, True])
def test_what_does_not_fit_reaches_no_kernel(which, kernels, monkeypatch):
    given, error, text = WRONG[which]
    monkeypatch.setattr(norm, "_by_kernels", lambda x: kernels)
    told = norm.Statistics(given.get("running"), EPS, True, 0.1, None, given.get("offset"))
    wanted = norm.Norm(given.get("weight"), given.get("bias"), told, given.get("residual"))
    with pytest.raises(error, match=text):
        norm.normed(torch.ones(9, 5), cloud(9), wanted)


def test_a_counter_elsewhere_reaches_no_kernel():
    """As of a norm that was moved but for its counter; device 3 stands for a GPU."""
    x = SimpleNamespace(shape=(9, 5), get_device=lambda: 3, device="cuda:3")
    told = norm.Statistics(None, EPS, True, None, torch.tensor(0))
    with pytest.raises(DeviceError, match="num_batches_tracked is on cpu, the input on cuda:3"):
        norm._check(x, norm.Norm(None, None, told))


class Recorder:
    """In place of a fixed kernel: what it is started with."""

    def __init__(self, kernel, constants, warps=4):
        self.seen, self.constants, self.warps = kernel, constants, warps

    def __call__(self, programs, tensors, numbers=()):
        self.seen.append((programs, tensors, numbers, self.constants, self.warps))


@pytest.fixture
def started(monkeypatch):
    """The launches, none of which computes."""
    seen = []
    monkeypatch.setattr(norm, "_by_kernels", lambda x: True)
    monkeypatch.setattr(norm, "BoundKernel", Recorder)
    monkeypatch.setattr(norm, "jitted", lambda name, room: seen)
    for known in (norm._of_blocks, norm._of_parts):
        known.cache_clear()
    yield seen
    for known in (norm._of_blocks, norm._of_parts):
        known.cache_clear()


@pytest.mark.parametrize(
    ("count", "channels", "lanes", "parts"),
    [
        (0, 64, 32, 1),
        (100, 64, 32, 1),
        (1024, 32, 32, 4),
        (5000, 96, 32, 20),
        (5000, 5, 16, 10),
        (5000, 40, 64, 40),
        # As many programs at most, whatever the channels.
        (100_000, 32, 32, 264),
        (10_000, 256, 32, 33),
        (9, 8480, 32, 1),
    ],
)
def test_programs_share_rows_and_channels(started, count, channels, lanes, parts):
    x = torch.zeros(count, channels)
    norm.moments(x, cloud(count), norm.Statistics(None, EPS))
    ((programs, tensors, numbers, constants, warps),) = started
    assert (programs, numbers, warps) == (parts * -(-channels // lanes), (parts, 0.0), 4)
    assert constants[:3] == (channels, 4096 // lanes, lanes) and constants[4] == 3
    # Room for two sums of each part, and a counter for each block of channels.
    room, counters = tensors[-2:]
    assert room.numel() >= 8 * parts * channels and counters.numel() >= -(-channels // lanes) and not counters.any()


def test_kernels_read_vectors_and_rows_in_a_row(started):
    """A weight between others, rows that are columns: what lies otherwise is copied; statistics that do are written by
    torch."""
    table = torch.rand(5, 2)
    x, residual, grad = (torch.rand(5, 9).t() for _ in range(3))
    told = norm.Statistics(None, EPS, False, None, None, table[:, 1])
    y, normed = norm.normed(x, cloud(9), norm.Norm(table[:, 0], table[:, 1], told, residual, True))
    norm.gradients(grad, (x, y), cloud(9), normed, (True,) * 4)
    assert len(started) == 4
    for _, tensors, *_ in started:
        assert all(t.is_contiguous() for t in tensors)
    kept = torch.rand(5, 2)
    before, count = kept.clone(), len(started)
    follows = norm.Statistics((kept[:, 0], kept[:, 1]), EPS, True, 0.5)
    norm.moments(x, cloud(9), follows)
    assert len(started) == count
    torch.testing.assert_close(kept[:, 0], (before[:, 0] + x.mean(0)) / 2)


def test_what_kernels_are_told(started):
    """Facts are constants, and each dtype and fact has a kernel of its own, which is made once."""
    x, (mean, var, weight, offset), tracked = torch.zeros(9, 5), [v.float() for v in vectors(4)], torch.tensor(2)
    cases = {
        (EPS, True, False, False, False, False): norm.Statistics(None, EPS),
        (EPS, False, True, True, True, True): norm.Statistics((mean, var), EPS, True, 0.2, tracked, offset),
        (EPS, False, True, False, True, False): norm.Statistics((mean, var), EPS, False, 0.2, tracked),
        (0.5, True, True, True, True, False): norm.Statistics((mean, var), 0.5, True, None, tracked),
    }
    for facts, told in cases.items():
        # A momentum that changes as training goes on is no fact: the kernel is the same.
        for momentum in (told.momentum, told.momentum and 0.7):
            norm.moments(x, cloud(9), replace(told, momentum=momentum))
            assert started[-1][3][5:] == facts and started[-1][2] == (1, momentum or 0.0)
    # What the mean of all is of, torch counts before programs read it.
    assert int(tracked) == 4 and norm._of_parts.cache_info().misses == 4
    norm.moments(x.half(), cloud(9), norm.Statistics(None, EPS))
    assert norm._of_parts.cache_info().misses == 5
    pair = torch.zeros(2, 5)
    for relu in (False, True):
        for residual in (None, torch.zeros(9, 5)):
            told = norm.NormState(pair, weight, None, relu, residual is not None)
            norm.normalised(x, cloud(9), told, residual)
            assert started[-1][3][3:] == (True, False, residual is not None, relu)
            assert told.reads_result == (relu and residual is not None)


def test_a_residual_without_a_relu_has_the_gradient_itself(started):
    x, grad, sums = torch.zeros(9, 5), torch.ones(9, 5), torch.zeros(2, 5)
    told = norm.NormState(torch.zeros(2, 5), None, None, False, True)
    assert norm.gradient(grad, (x, None), cloud(9), told, sums)[1] is grad
    none = norm.NormState(torch.zeros(2, 5), None, None, True, False)
    assert norm.gradient(grad, (x, None), cloud(9), none, sums)[1] is None


def test_known_statistics(monkeypatch):
    """The CPU's result is torch's; on a GPU one kernel takes them where they lie."""
    x, vectors = torch.randn(9, 32), [torch.randn(32), torch.rand(32) + 0.5, torch.randn(32), torch.randn(32)]
    for given in (vectors, [*vectors[:2], None, None]):
        mean, variance, weight, bias = given
        wanted = torch.nn.functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, EPS)
        torch.testing.assert_close(norm.by_statistics(x, given, EPS), wanted)
    started = []
    monkeypatch.setattr(norm, "_by_kernels", lambda x: True)
    monkeypatch.setattr(norm, "_by_blocks", lambda *given: started.append(given))
    y = norm.by_statistics(x, [*vectors[:2], None, vectors[3]], EPS)
    ((name, tensors, facts, numbers),) = started
    assert name == "by_statistics" and facts == (EPS, False, True) and numbers == (9,)
    assert all(a is b for a, b in zip(tensors, (x, *vectors[:2], vectors[0], vectors[3], y), strict=True))
