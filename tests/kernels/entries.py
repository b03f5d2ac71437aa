"""Convolutions with sparse filters in Triton's interpreter, in a process of its own: over entries, and over blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from unittest.mock import patch

import torch
from kernels.interpret import answering, near, refuses
from torch.nn import functional

import pumice as pm
from pumice.lower import plan
from pumice.lower.block_sums import BlockTile
from pumice.lower.entry_sums import EntrySums, EntryTile
from pumice.nn.pruned import Blocks, _statement
from pumice.ops.operands import flatten_used

Checks = Mapping[str, Callable[[], None]]
TILES = (
    None,
    EntryTile(32, 1, 1, 1),  # The fixed schedule of the paper
    EntryTile(16, 4, 1, 1),
    EntryTile(64, 2, 8, 4),
    EntryTile(8, 4, 2, 2),
)
# text, operands' shapes, of the filter, torch's stride, padding, dilation
CONVOLUTIONS = {
    "1x1": ("p,q", "O[n,m,p,q] = I[n,c,p,q] * F[m,c]", (2, 6, 8, 8), (10, 6, 1, 1), 1, 0, 1),
    "1x1 odd": ("p,q", "O[n,m,p,q] = I[n,c,p,q] * F[m,c]", (3, 6, 7, 7), (9, 6, 1, 1), 1, 0, 1),
    "1x1 strided": ("p,q", "O[n,m,p,q] = I[n,c,2*p,2*q] * F[m,c]", (2, 6, 8, 8), (9, 6, 1, 1), 2, 0, 1),
    "1 axis": ("p", "O[n,m,p] = I[n,c,3*p+2*r-2] * F[m,c,r]", (2, 4, 40), (5, 4, 5), 3, 2, 2),
    "3x3": ("p,q", "O[n,m,p,q] = I[n,c,p+r-1,q+s-1] * F[m,c,r,s]", (2, 5, 7, 9), (9, 5, 3, 3), 1, 1, 1),
    "3x3 valid": ("p,q", "O[n,m,p,q] = I[n,c,p+r,q+s] * F[m,c,r,s]", (1, 5, 7, 9), (9, 5, 3, 3), 1, 0, 1),
    "3x3 strided": ("p,q", "O[n,m,p,q] = I[n,c,2*p+r-1,2*q+s-1] * F[m,c,r,s]", (3, 5, 9, 8), (7, 5, 3, 3), 2, 1, 1),
    "7x7": ("p,q", "O[n,m,p,q] = I[n,c,p+r-3,q+s-3] * F[m,c,r,s]", (1, 3, 9, 9), (4, 3, 7, 7), 1, 3, 1),
    "9x9": ("p,q", "O[n,m,p,q] = I[n,c,p+r-4,q+s-4] * F[m,c,r,s]", (1, 3, 9, 9), (4, 3, 9, 9), 1, 4, 1),
    "3 axes": (
        "p,q,u",
        "O[n,m,p,q,u] = I[n,c,2*p+r-1,2*q+s-1,2*u+t-1] * F[m,c,r,s,t]",
        *((1, 2, 5, 6, 4), (3, 2, 3, 3, 3), 2, 1, 1),
    ),
}


def check_convolution(name: str, tile: EntryTile | None) -> None:
    """The kernel's result and its plain form's are torch's, with outputs that have no entries."""
    outer, text, shape, filter_shape, *options = CONVOLUTIONS[name]
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(filter_shape) * (torch.rand(filter_shape) < 0.3)
    weight[1] = 0
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(shape) - 3]
    stride, padding, dilation = options
    want = convolve(x.double(), weight.double(), None, stride, padding, dilation)
    stored = weight if "F[m,c," in text else weight.flatten(1)
    filter = pm.sparse(stored, f"({' '.join('mcrst'[: stored.ndim])}):C")
    ranges = ", ".join(f"{index}:{size}" for index, size in zip(outer.split(","), want.shape[2:], strict=True))
    with patch.object(EntryTile, "default", EntryTile.default if tile is None else lambda *sizes: tile):
        got = pm.einsum(f"{text} ; {ranges}", I=x, F=filter, lowering="entries")
        with patch.object(EntrySums, "run", EntrySums.run_torch):
            plain = pm.einsum(f"{text} ; {ranges}", I=x, F=filter, lowering="entries")
    near(got, want, 1e-5)
    near(plain, want, 1e-5)


def check_blocks(size: int, stride: int, dtype: torch.dtype, lowering: str) -> None:
    """A layer over blocks, as one kernel: result, gradients of the image and of the kept weights."""
    torch.manual_seed(0)
    kept = torch.rand(3, size, size, 2) < 0.4
    kept[1] = False
    blocks = Blocks(16, 32)
    weight = blocks.join(torch.randn(3, size, size, 2, 16, 32) * kept[..., None, None])
    x, pad = torch.randn(2, 64, 9, 7), size // 2
    weight, x = weight.to(dtype).double().requires_grad_(), x.to(dtype).double().requires_grad_()
    want = functional.conv2d(x, weight, None, stride, pad)
    text = _statement(x.shape[2:], (size, size), (stride, stride), (pad, pad), (1, 1), True)
    stored = weight.detach().to(dtype).flatten(2).squeeze(2) if size == 1 else weight.detach().to(dtype)
    filter = pm.sparse(stored, blocks.format("rs" if size > 1 else "", listed=False))
    values, image = filter.parts[0].values, x.detach().to(dtype).permute(0, 2, 3, 1).contiguous()
    assert values is not None and values.shape == (int(kept.sum()), 16, 32)
    given = [image.requires_grad_(), values.requires_grad_()]
    got = pm.einsum(text, I=image, F=filter.with_values([values]), lowering=lowering)
    limit = 1e-5 if dtype == torch.float32 else 2e-3
    near(got.permute(0, 3, 1, 2), want, limit)
    grad = torch.randn_like(want).to(dtype)
    theirs = torch.autograd.grad(want, [x, weight], grad.double())
    ours = torch.autograd.grad(got, given, grad.permute(0, 2, 3, 1))
    near(ours[0].permute(0, 3, 1, 2), theirs[0], limit)
    near(ours[1], blocks.split(theirs[1])[kept], limit)


def check_other_blocks() -> None:
    """Products of matrices, coefficients and old values; more windows than bits; empty filters; any tile."""
    torch.manual_seed(0)
    kept = torch.rand(4, 2).lt(0.5).repeat_interleave(16, 0).repeat_interleave(32, 1)
    w, x, y = torch.randn(64, 64) * kept, torch.randn(37, 64), torch.randn(37, 64)
    W = pm.sparse(w, "m:U c:C m:B16 c:B32")
    got = pm.einsum("Y[b,m] += 2 * X[b,c] * W[m,c]", X=x, W=W, Y=y, lowering="blocks")
    near(got, y.double() + 2 * x.double() @ w.double().t(), 1e-5)
    near(pm.einsum("Y[b,c] = X[b,m] * W[m,c]", X=x, W=W, lowering="blocks"), x.double() @ w.double(), 1e-5)
    given = {"R": torch.tensor([3, -1, 0]), "K": torch.tensor([1, 0, 3]), "V": torch.randn(3, 16, 16)}
    text = "Y[b,16*R[e]+m] = X[b,16*K[e]+c] * V[e,m,c] ; Y:[_,64]"
    got = pm.einsum(text, X=x, **given, lowering="blocks")
    near(got, pm.einsum(text, X=x, **given, lowering="reference"), 1e-5)
    assert not pm.einsum(text, X=x, **{**given, "R": torch.full((3,), -1)}, lowering="blocks").any()
    wide, image = torch.randn(16, 16, 9, 9), torch.randn(1, 9, 9, 16)
    F = pm.sparse(wide, Blocks(16, 16).format("rs", listed=False))
    want = functional.conv2d(image.permute(0, 3, 1, 2).double(), wide.double(), None, 1, 4)
    for tile in (BlockTile(16, 1, 1, 2), BlockTile(32, 4, 2, 3)):
        with patch.object(BlockTile, "default", lambda *sizes, tile=tile: tile):
            got = pm.einsum("O[n,p,q,m] = I[n,p+r-4,q+s-4,c] * F[m,c,r,s] ; p:9, q:9", I=image, F=F, lowering="blocks")
        near(got.permute(0, 3, 1, 2), want, 1e-5)


def check_block_refusals() -> None:
    """Other statements are refused with the reason."""
    w, x = torch.randn(32, 32), torch.randn(5, 32)
    given = {"X": x, "W": pm.sparse(w, "m:U c:C m:B16 c:B16")}
    cases = {
        "last axes": ("Y[m,b] = X[b,c] * W[m,c]", given),
        "sides of 16, 32, 64, 128, found [8, 8]": (
            "Y[b,m] = X[b,c] * W[m,c]",
            {**given, "W": pm.sparse(w, "m:U c:C m:B8 c:B8")},
        ),
        "not both of float32": (
            "Y[b,m] = X[b,c] * W[m,c]",
            {"X": x.double(), "W": pm.sparse(w.double(), "m:U c:C m:B16 c:B16")},
        ),
        "no factor holds blocks": ("Y[b,m] = X[b,c] * W[m,c]", {**given, "W": pm.sparse(w, "CSR")}),
        "not one product of two factors": ("Y[b,m] = X[b,c] * W[m,c] * Z[b]", {**given, "Z": torch.ones(5)}),
    }
    refuses("blocks", cases)


def check_prepared(lowering: str) -> None:
    """A plan as a function of one operand reads the others where they are."""
    torch.manual_seed(0)
    x, weight, out = torch.randn(16, 50), torch.randn(32, 16), torch.ones(32, 50)
    text, form = "O[m,p] = I[c,p] * F[m,c]", "(m c):C"
    if lowering != "entries":
        x, out, text, form = x.t().contiguous(), out.t(), "O[p,m] = I[p,c] * F[m,c]", Blocks(16, 16).format("", False)
    filter = pm.sparse(weight, form)
    tensors, names, _ = flatten_used(text, {"I": x, "F": filter}, ())
    call = plan.repeated(plan.plan_for(tensors, names, text, None, lowering), tensors, [0])
    (values,) = (part.values for part in filter.parts)
    assert call is not None and values is not None
    for factor in (1, 3):
        other = torch.randn_like(x)
        near(call([other]), factor * pm.einsum(text, I=other.double(), F=weight.double()), 1e-5)
        values.mul_(3)
    twice = text.replace("=", "+= 2 *", 1)
    tensors, names, _ = flatten_used(twice, {"I": x, "F": filter, "O": out}, ())
    assert plan.repeated(plan.plan_for(tensors, names, twice, None, lowering), tensors, [0]) is None


def check_other_statements() -> None:
    """One factor alone; an index that stands twice in the target."""
    torch.manual_seed(0)
    rows, x = torch.randint(0, 8, (50,)), torch.randn(50, 16)
    given = {"R": rows, "x": x, "v": torch.randn(16)}
    texts = (
        "y[R[p],c] = x[p,c] ; y:[8,_]",
        "y[c,R[p],c] = x[p,c] ; y:[_,9,_]",
        "y[c,R[p]] += 2 * x[p,c] * v[p] ; p:16",
    )
    for text in texts:
        used = {name: t for name, t in given.items() if f"{name}[" in text}
        used["R"] = rows[:16] if "p:16" in text else rows
        used["x"] = x[:16] if "p:16" in text else x
        if "+=" in text:
            used["y"] = torch.randn(16, 9)
        near(pm.einsum(text, **used, lowering="entries"), pm.einsum(text, **used, lowering="reference"), 1e-5)


def check_half() -> None:
    """Half precision is summed in float32 and rounded once; infinities stay where they are."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 6, 8, 8).half(), (torch.randn(5, 6) * (torch.rand(5, 6) < 0.5)).half()
    got = pm.einsum("O[n,m,p,q] = I[n,c,p,q] * F[m,c]", I=x, F=pm.sparse(weight, "CSR"), lowering="entries")
    assert got.dtype == torch.float16
    near(got, torch.einsum("ncpq,mc->nmpq", x.double(), weight.double()), 1e-3)
    weight[:, 0] = 0
    x[:, 0] = torch.inf
    again = pm.einsum("O[n,m,p,q] = I[n,c,p,q] * F[m,c]", I=x, F=pm.sparse(weight, "CSR"), lowering="entries")
    assert again.isfinite().all(), "an entry that is not there was read"


def check_statements() -> None:
    """Matrix products, factors of several values per entry, coefficients, old values; gradients of all."""
    torch.manual_seed(0)
    a, b, c = torch.randn(7, 9) * (torch.rand(7, 9) < 0.4), torch.randn(9, 12), torch.randn(7, 12)
    sparse = pm.sparse(a, "CSR")
    near(pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=sparse, B=b, lowering="entries"), a.double() @ b.double(), 1e-5)
    got = pm.einsum("C[m,n] += 2 * A[m,k] * B[k,n]", A=sparse, B=b, C=c, lowering="entries")
    near(got, c.double() + 2 * a.double() @ b.double(), 1e-5)
    rows, columns, u, v = torch.tensor([0, 2, 2, 6]), torch.tensor([8, 0, 3, 8]), torch.randn(4), torch.randn(4)
    text = "y[R[e],n] = u[e] * v[e] * B[K[e],n] ; y:[7,_]"
    want = torch.zeros(7, 12).double().index_add(0, rows, (u * v)[:, None].double() * b[columns].double())
    near(pm.einsum(text, R=rows, K=columns, u=u, v=v, B=b, lowering="entries"), want, 1e-5)


def check_refusals() -> None:
    """Other statements are refused with the reason."""
    a = pm.sparse(torch.eye(4), "CSR")
    cases = {
        "a dense index is summed": ("y[m] = A[m,k] * B[k,n]", {"A": a, "B": torch.ones(4, 3)}),
        "one factor has dense indices, found 2": (
            "y[m,n] = A[m,k] * B[k,n] * D[m,n]",
            {"A": a, "B": torch.ones(4, 3), "D": torch.ones(4, 3)},
        ),
        "a factor is not of float32": (
            "C[m,n] = A[m,k] * B[k,n]",
            {"A": pm.sparse(torch.eye(4).double(), "CSR"), "B": torch.ones(4, 3).double()},
        ),
    }
    refuses("entries", cases)


def checks() -> Checks:
    found = {f"{name} {n}": partial(check_convolution, name, t) for name in CONVOLUTIONS for n, t in enumerate(TILES)}
    kinds = product((1, 3), (1, 2), (torch.float32, torch.float16), ("blocks", "triton"))
    found |= {
        f"blocks {kernel} {stride} {dtype} {name}": partial(check_blocks, kernel, stride, dtype, name)
        for kernel, stride, dtype, name in kinds
    }
    return {
        **found,
        **{f"prepared {name}": partial(check_prepared, name) for name in ("entries", "blocks", "triton")},
        "other blocks": check_other_blocks,
        "blocks refused": check_block_refusals,
        "half": check_half,
        "others": check_other_statements,
        "statements": check_statements,
        "refusals": check_refusals,
    }


GROUPS: Mapping[str, Callable[[], Checks]] = {"entries": checks}
answer = answering(GROUPS)
