"""Attention over sequences of any lengths against loops over sequences and heads."""

import pytest
import torch
from torch import Tensor

import pumice as pm
from pumice.errors import CoordinateError, DtypeError, OptionError, ShapeError

LENGTHS = {
    "equal": ([4, 4, 4], None),
    "one": ([9], None),
    "different": ([3, 1, 5, 3], None),
    "empty ones": ([3, 0, 5, 0], None),
    "cross": ([3, 2, 4], [5, 2, 1]),
    "cross, equal": ([3, 3], [5, 5]),
    "more queries": ([5, 5], [3, 3]),
    "no keys": ([2, 3], [0, 4]),
    "no tokens": ([0, 0], None),
    "no sequences": ([], None),
}


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def loops(q: Tensor, k: Tensor, v: Tensor, at: list[int], key_at: list[int], causal: bool, scale: float) -> Tensor:
    found = q.new_zeros(len(q), q.shape[1], v.shape[2])
    for b in range(len(at) - 1):
        own, others = slice(at[b], at[b + 1]), slice(key_at[b], key_at[b + 1])
        for head in range(q.shape[1]):
            group = head * k.shape[1] // q.shape[1]
            for t in range(own.start, own.stop):
                last = others.stop - (own.stop - 1 - t) if causal else others.stop
                if last > others.start:
                    near = slice(others.start, last)
                    weight = (scale * k[near, group] @ q[t, head]).softmax(0)
                    found[t, head] = weight @ v[near, group]
    return found


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", LENGTHS)
def test_is_what_loops_say(case: str, causal: bool, heads: int):
    lengths, key_lengths = LENGTHS[case]
    at, key_at = ends(lengths), ends(lengths if key_lengths is None else key_lengths)
    torch.manual_seed(0)
    shapes = ((int(at[-1]), 4, 6), (int(key_at[-1]), heads, 6), (int(key_at[-1]), heads, 5))
    given = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    y = pm.ops.attention(*given, at, None if key_lengths is None else key_at, causal=causal, scale=0.3)
    wanted = loops(*given, at.tolist(), key_at.tolist(), causal, 0.3)
    torch.testing.assert_close(y, wanted)
    if wanted.requires_grad and len(y):
        grad = torch.randn_like(y)
        for got, expected in zip(
            *(torch.autograd.grad(out, given, grad, allow_unused=True) for out in (y, wanted)), strict=True
        ):
            zero = torch.zeros((), dtype=torch.float64)
            got, expected = (zero if g is None else g for g in (got, expected))
            torch.testing.assert_close(*torch.broadcast_tensors(got, expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype):
    at, q = ends([5, 7]), torch.randn(12, 2, 8)
    found = pm.ops.attention(*(q.to(dtype),) * 3, at)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), pm.ops.attention(q, q, q, at), rtol=2e-2, atol=2e-2)


def test_dropout_drops_and_keeps_the_mean():
    at, q, v = ends([64, 64]), torch.zeros(128, 2, 4), torch.ones(128, 2, 4)
    torch.manual_seed(0)
    found = pm.ops.attention(q, q, v, at, dropout=0.5)
    assert 0.9 < float(found.mean()) < 1.1 and float(found.std()) > 0.05


Q = torch.zeros(4, 2, 3)
WRONG = {
    "past the end": (CoordinateError, lambda: pm.ops.attention(Q, Q, Q, ends([2, 3]))),
    "falls": (CoordinateError, lambda: pm.ops.attention(Q, Q, Q, torch.tensor([0, 3, 2, 4]))),
    "number of sequences": (ShapeError, lambda: pm.ops.attention(Q, Q, Q, ends([4]), ends([2, 2]))),
    "floats": (DtypeError, lambda: pm.ops.attention(Q, Q, Q, torch.tensor([0.0, 4]))),
    "dtypes": (DtypeError, lambda: pm.ops.attention(Q, Q.half(), Q, ends([4]))),
    "shape": (ShapeError, lambda: pm.ops.attention(Q[0], Q, Q, ends([4]))),
    "heads": (ShapeError, lambda: pm.ops.attention(Q, Q.expand(4, 2, 3)[:, [0, 0, 0]], Q, ends([4]))),
    "no heads": (ShapeError, lambda: pm.ops.attention(Q, Q[:, :0], Q[:, :0], ends([4]))),
    "dropout": (OptionError, lambda: pm.ops.attention(Q, Q, Q, ends([4]), dropout=1.0)),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_told(case: str):
    error, call = WRONG[case]
    with pytest.raises(error):
        call()
