"""pumice.compat.torch_scatter against loops over entries."""

import math

import pytest
import torch

from pumice.compat.torch_scatter import MODULES
from pumice.errors import OptionError, ShapeError

NAMES = MODULES["torch_scatter"]


def groups(src: list, index: list, size: int) -> list[list]:
    return [[x for x, i in zip(src, index, strict=True) if i == n] for n in range(size)]


JOINS = {
    "sum": sum,
    "add": sum,
    "mean": lambda x: sum(x) / max(1, len(x)),
    "max": lambda x: max(x, default=0),
    "min": lambda x: min(x, default=0),
}
SRC, INDEX = [3.0, -1.0, 4.0, 1.0, 5.0, 9.0], [2, 0, 2, 0, 4, 2]


@pytest.mark.parametrize("reduce", JOINS)
@pytest.mark.parametrize("dim_size", [None, 7])
def test_scatter(reduce: str, dim_size: int | None):
    wanted = [float(JOINS[reduce](x)) for x in groups(SRC, INDEX, dim_size or 5)]
    src, index = torch.tensor(SRC), torch.tensor(INDEX)
    torch.testing.assert_close(
        NAMES["scatter"](src, index, dim=0, dim_size=dim_size, reduce=reduce), torch.tensor(wanted)
    )
    found = NAMES[f"scatter_{reduce}"](src, index, 0, None, dim_size)
    torch.testing.assert_close(found[0] if reduce in ("max", "min") else found, torch.tensor(wanted))


def test_places_of_extremes():
    src, index = torch.tensor([[1.0, 7], [7, 7], [2, 0]]), torch.tensor([0, 0, 2])
    values, place = NAMES["scatter_max"](src, index, dim=0)
    assert values.tolist() == [[7, 7], [0, 0], [2, 0]] and place.tolist() == [[1, 0], [3, 3], [2, 2]]
    values, place = NAMES["segment_min_csr"](src, torch.tensor([0, 2, 3]))
    assert values.tolist() == [[1, 7], [2, 0]] and place.tolist() == [[0, 0], [2, 2]]
    values, place = NAMES["segment_max_coo"](src, torch.tensor([0, 1, 1]))
    assert values.tolist() == [[1, 7], [7, 7]] and place.tolist() == [[0, 0], [1, 1]]


def test_out_is_joined_in_place():
    src, index = torch.tensor([1.0, 2, 6]), torch.tensor([0, 1, 1])
    out = torch.tensor([10.0, 4, 3])
    assert NAMES["scatter_sum"](src, index, out=out) is out and out.tolist() == [11, 12, 3]
    out = torch.tensor([1.0, 4, 3])
    assert NAMES["scatter_mean"](src, index, out=out).tolist() == [2, 6, 3]
    out = torch.tensor([3.0, 4, 5])
    values, place = NAMES["scatter_max"](src, index, out=out)
    assert values is out and out.tolist() == [3, 6, 5] and place.tolist() == [3, 2, 3]


@pytest.mark.parametrize("reduce", JOINS)
def test_segments(reduce: str):
    src, indptr = torch.tensor(SRC), torch.tensor([0, 2, 2, 6])
    wanted = [JOINS[reduce](x) for x in (SRC[:2], [], SRC[2:])]
    assert NAMES["segment_csr"](src, indptr, reduce=reduce).tolist() == wanted
    assert NAMES["segment_csr"](src[None], indptr[None], reduce=reduce).tolist() == [wanted]
    index = torch.tensor([0, 0, 2, 2, 2, 2])
    assert NAMES["segment_coo"](src, index, reduce=reduce).tolist() == wanted


def test_gather():
    src = torch.tensor([[1.0], [2], [3]])
    assert NAMES["gather_csr"](src, torch.tensor([0, 2, 2, 3])).flatten().tolist() == [1, 1, 3]
    assert NAMES["gather_coo"](src, torch.tensor([2, 0])).flatten().tolist() == [3, 1]


def test_composites():
    src, index = torch.randn(9, 2, dtype=torch.float64), torch.tensor([0, 1, 0, 3, 3, 3, 1, 0, 0])
    soft, logs = NAMES["scatter_softmax"](src, index, dim=0), NAMES["scatter_log_softmax"](src, index, dim=0)
    spread = NAMES["scatter_std"](src, index, dim=0)
    for n in (0, 1, 3):
        own = index == n
        torch.testing.assert_close(soft[own], src[own].softmax(0))
        torch.testing.assert_close(logs[own], src[own].log_softmax(0))
        torch.testing.assert_close(spread[n], src[own].std(0), rtol=1e-5, atol=1e-6)
    assert spread[2].tolist() == [0, 0]


def test_gradients():
    index = torch.tensor([0, 1, 0, 3])
    src = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    for name in ("scatter_sum", "scatter_mean", "scatter_softmax", "scatter_log_softmax"):
        assert torch.autograd.gradcheck(lambda x, name=name: NAMES[name](x, index, dim=0), (src,))
    pairs = torch.tensor([0, 1, 0, 1])
    assert torch.autograd.gradcheck(lambda x: NAMES["scatter_std"](x, pairs, dim=0), (src,))
    assert torch.autograd.gradcheck(lambda x: NAMES["segment_csr"](x, torch.tensor([0, 3, 4]), reduce="max"), (src,))


def test_what_is_not_there_is_told():
    src, index = torch.ones(3), torch.tensor([0, 0, 1])
    for call in (lambda: NAMES["scatter_mul"](src, index), lambda: NAMES["scatter"](src, index, reduce="mul")):
        with pytest.raises(OptionError, match="logarithms"):
            call()
    with pytest.raises(ShapeError):
        NAMES["segment_csr"](torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int64))
    assert math.prod(NAMES["scatter_add"](src, index).tolist()) == 2
