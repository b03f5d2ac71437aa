"""What the language is for, small: structured and unstructured products, convolutions, tensor products.

Values against dense float64, gradients against torch's autograd of the dense form, and by finite differences.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import pumice as pm
from pumice.coords import KernelMap, Relation, kernel_map
from pumice.errors import OptionError
from pumice.lower.maps import FORMS, build_form
from pumice.ops import autograd
from pumice.ops.sparse import Sparse, sparse
from pumice.testing import assert_close, random_tensor

LOWERINGS = ["", "graph", "reference"]
lowerings = pytest.mark.parametrize("lowering", LOWERINGS, ids=["chosen", "graph", "reference"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def holes(x: Tensor, density: float, block: tuple[int, ...] | None = None) -> Tensor:
    """x with blocks of it set to 0."""
    block = block or (1,) * x.ndim
    chance = torch.Generator().manual_seed(3)
    kept = torch.rand([-(-n // b) for n, b in zip(x.shape, block, strict=True)], generator=chance) < density
    for axis, b in enumerate(block):
        kept = kept.repeat_interleave(b, axis)
    return x * kept[tuple(slice(n) for n in x.shape)]


def close(got: object, wanted: object) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def with_gradients(run, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The result of run(inputs), its gradients, and the gradients of their squares."""
    given = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out = run(given)
    first = torch.autograd.grad(out, [*given.values()], normal(*out.shape, seed=9), create_graph=True)
    # A gradient that depends on nothing has none itself.
    total = sum((g * g).sum() for g in first) + 0 * sum(x.sum() for x in given.values())
    second = torch.autograd.grad(total, [*given.values()], materialize_grads=True)
    return [out, *first, *second]


def stored_values(x: Tensor, form: str, values: list[Tensor]) -> Sparse:
    """x in a format, its values exchanged: they carry the gradients."""
    return sparse(x, form).with_values(values)


# Products with a sparse matrix
STRUCTURED = [
    "m:C k:G2 m:B4 k:B4",
    "m:C k:G m:B4 k:B8",
    "(m k):C m:B4 k:B4",
    "m:U k:C m:B4 k:B4",
    "m:C k:G1,2 m:B4 k:B4",
]
UNSTRUCTURED = [
    *["COO", "CSR", "CSC", "DCSR", "ELL", "GroupCOO", "m:C k:G1,4", "m:C k:G*", "m:C k:G3", "m:U k:U", "k:C m:U"],
    *["m:C k:U", "(m k):G", "[m,k] k:C m:G2"],
]
MATRICES = [*((form, (4, 4)) for form in STRUCTURED), *((form, (1, 1)) for form in UNSTRUCTURED)]


@lowerings
@pytest.mark.parametrize(("form", "block"), MATRICES)
def test_products_with_a_sparse_matrix(form, block, lowering):
    a, b = holes(normal(14, 11), 0.35, block), normal(11, 5, seed=1)
    mask = a != 0

    def run(x: Mapping[str, Tensor]) -> Tensor:
        return pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=sparse(x["A"], form), B=x["B"], lowering=lowering)

    def dense(x: Mapping[str, Tensor]) -> Tensor:
        return (x["A"] * mask) @ x["B"]

    close(with_gradients(run, {"A": a, "B": b}), with_gradients(dense, {"A": a, "B": b}))


@pytest.mark.parametrize("form", ["COO", "CSC", "GroupCOO", "m:U k:C m:B4 k:B4"])
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("C[m,n] += A[m,k] * B[k,n]", lambda a, b, c: c + a @ b),
        ("C[m,n] = 2 * A[m,k] * B[k,n] - D[n]", lambda a, b, c: 2 * a @ b - 1.5),
        ("C[n,m] = A[m,k] * B[k,n]", lambda a, b, c: (a @ b).T),
        ("C[k,n] = A[m,k] * E[m,n]", lambda a, b, c: a.T @ c),
        ("C[m] = A[m,k] * B[k,n]", lambda a, b, c: (a @ b).sum(1)),
        ("C[m] = A[m,k]", lambda a, b, c: a.sum(1)),
        ("C[m,k] = A[m,k]", lambda a, b, c: a),
        ("C[m,k] = A[m,k] * B[k,n] * E[m,n]", lambda a, b, c: a * (c @ b.T)),
        ("C[m,n] = A[m,k] * A[n,k]", lambda a, b, c: a @ a.T),
    ],
)
def test_statements_with_a_sparse_matrix(form, text, wanted):
    a, b, c = holes(normal(14, 11), 0.35), normal(11, 5, seed=1), normal(14, 5, seed=2)
    others = {"B": b, "E": c, "D": torch.full((5,), 1.5, dtype=torch.float64), "C": c}
    used = {
        name: x for name, x in others.items() if f"{name}[" in text.partition("=")[2] or (name == "C" and "+=" in text)
    }
    close(pm.einsum(text, A=sparse(a, form), **used), wanted(a, b, c))


@pytest.mark.parametrize("form", ["COO", "CSR", "ELL", "m:C k:G1,2,4", "m:U k:C m:B2 k:B2", "m:C k:G2 m:B2 k:B2"])
def test_gradients_of_stored_values(form):
    a, b = holes(normal(5, 4), 0.5), normal(4, 3, seed=1)
    values = [part.values.clone().requires_grad_() for part in sparse(a, form).parts]

    def run(b: Tensor, *values: Tensor) -> Tensor:
        return pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=stored_values(a, form, [*values]), B=b, lowering="reference")

    inputs = (b.requires_grad_(), *values)
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_values_without_gradients_get_none():
    a = sparse(holes(normal(5, 4), 0.5), "CSR")
    b = normal(4, 3).requires_grad_()
    pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b).sum().backward()
    close(b.grad, a.to_dense().sum(0)[:, None].expand(4, 3))
    assert a.parts[0].values.grad is None


def test_a_pattern_is_ones():
    a = holes(normal(6, 5), 0.4)
    pattern = sparse(a, "CSR").with_values([None])
    b = normal(5, 2, seed=1).requires_grad_()
    out = pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=pattern, B=b)
    out.sum().backward()
    close(out, (a != 0).double() @ b)
    close(b.grad, (a != 0).double().sum(0)[:, None].expand(5, 2))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("C[m] = A[2*p+r] * B[p,m] * W[r]", None),
        ("C[m,n] = A[m,k] * exists(A[m,k]) * B[k,n]", lambda a, b: a @ b),
        ("C[m] = equal(A[m,k], 0) * B[k,n]", lambda a, b: ((a == 0).double() @ b).sum(1)),
        ("C[m,n] = A[m,k] * B[k,n] ; k:11", lambda a, b: a @ b),
        ("C[m,n] = A[m,k] * B[k,n] ; k:2..7", lambda a, b: a[:, 2:7] @ b[2:7]),
        ("C[m,n] = A[m,k] * A[m,k] * B[k,n]", lambda a, b: (a * a) @ b),
    ],
)
def test_what_has_no_form_over_stored_entries_is_dense(text, wanted):
    a, b = holes(normal(14, 11), 0.4), normal(11, 5, seed=1)
    if wanted is None:
        line, w, b = holes(normal(9), 0.5), normal(3), normal(4, 2)
        dense = torch.stack([line[2 * p : 2 * p + 3] @ w for p in range(4)]) @ b
        return close(pm.einsum(text, A=sparse(line, "k:C"), B=b, W=w), dense)
    used = {"B": b} if "B[" in text else {}
    for form in ("CSR", "m:C k:G2 m:B2 k:B2"):
        close(pm.einsum(text, A=sparse(a, form), **used), wanted(a, b))


# The other operators: an entry that is not stored is not there
def joined(values: Tensor, mask: Tensor, operator: str) -> Tensor:
    """The stored entries of [m, k, n] joined over k; 0 where there is none."""
    some = mask.any(1)
    if operator == "mean=":
        return (values * mask).sum(1) / mask.sum(1).clamp(min=1)
    worst = -torch.inf if operator == "max=" else torch.inf
    filled = values.masked_fill(~mask, worst)
    return torch.where(some, filled.amax(1) if operator == "max=" else filled.amin(1), 0)


@lowerings
@pytest.mark.parametrize("operator", ["max=", "min=", "mean="])
@pytest.mark.parametrize("form", ["COO", "CSR", "CSC", "GroupCOO", "ELL", "m:C k:G3", "k:C m:U", "m:U k:U"])
def test_extremes_and_means_over_what_is_stored(form, operator, lowering):
    a, b = holes(normal(9, 7), 0.4), normal(7, 3, seed=1)
    a[4] = 0
    mask = (a != 0) if "C" in form or "G" in form or form in ("COO", "ELL") else torch.ones_like(a, dtype=torch.bool)
    if form == "k:C m:U":
        mask = (a != 0).any(1)[:, None].expand(9, 7)

    def run(x: Mapping[str, Tensor]) -> Tensor:
        return pm.einsum(f"C[m,n] {operator} A[m,k] * B[k,n]", A=sparse(x["A"], form), B=x["B"], lowering=lowering)

    def dense(x: Mapping[str, Tensor]) -> Tensor:
        values = (x["A"] * (a != 0))[:, :, None] * x["B"][None]
        return joined(values, mask[:, :, None].expand_as(values), operator)

    if form in ("m:U k:U", "k:C m:U"):
        return close(run({"A": a, "B": b}), dense({"A": a, "B": b}))
    close(with_gradients(run, {"A": a, "B": b}), with_gradients(dense, {"A": a, "B": b}))


@pytest.mark.parametrize("text", ["O[k] max= A[m,k] * X[k]", "O[m] max= A[m,k] * Y[m]", "O[k] mean= A[m,k] * X[k]"])
@pytest.mark.parametrize("form", ["m:U k:U m:B2 k:B3", "m:C k:U m:B2 k:B3", "m:U k:C m:B2"])
def test_padding_of_blocks_never_counts(form, text):
    a, x, y = -normal(5, 4).abs() - 1, normal(4).abs(), normal(5).abs()
    used = {"X": x} if "X[" in text else {"Y": y}
    try:
        got = pm.einsum(text, A=sparse(a, form), **used)
    except OptionError as error:
        assert "appears nowhere else in the statement" in str(error)
    else:
        close(got, pm.einsum(text, A=a, **used))


def test_buckets_cannot_be_joined_by_max():
    a = sparse(holes(normal(9, 7), 0.4), "m:C k:G1,2,4,8")
    with pytest.raises(OptionError, match="stored in 4 parts"):
        pm.einsum("C[m,n] max= A[m,k] * B[k,n]", A=a, B=normal(7, 3))


# Convolution over a kernel map
CONV = {
    "forward": ("y[o,n] = map[o,k,i] * x[i,c] * w[n,k,c]", "oki,ic,nkc->on"),
    "dgrad": ("dx[i,c] = map[o,k,i] * g[o,n] * w[n,k,c]", "oki,on,nkc->ic"),
    "wgrad": ("dw[n,k,c] = map[o,k,i] * g[o,n] * x[i,c]", "oki,on,ic->nkc"),
}
KERNELS = [(3, 1), (2, 2), (3, 2), (1, 1)]


def conv_map(kernel: int, stride: int) -> tuple[Tensor, KernelMap, Tensor]:
    """Features, a map over them, and the map as a dense tensor [o, k, i]."""
    x = random_tensor(40, 5, 2, dtype=torch.float64)
    found, _ = kernel_map(x.geometry, Relation.of(2, kernel, stride=stride))
    dense = torch.zeros(found.num_outputs, found.volume, found.num_inputs, dtype=torch.float64)
    inputs, outputs, _ = found.pairs()
    dense[outputs.long(), found.taps().long(), inputs.long()] = 1
    return x.feats, found, dense


def call(
    text: str, shape: tuple[int, ...], forms: list[str], found: KernelMap, operands: Mapping[str, Tensor]
) -> Tensor:
    held = dict(pair for form in forms for pair in zip(*build_form(found, form), strict=True))
    used = {name: x for name, x in operands.items() if f" {name}[" in text}
    return autograd.einsum([*used.values(), *held.values()], "|".join((*used, *held)), text, shape)


@pytest.mark.parametrize(("kernel", "stride"), KERNELS)
@pytest.mark.parametrize("forms", [*([form] for form in FORMS), [*FORMS]], ids=[*FORMS, "all"])
def test_convolutions_in_every_form(forms, kernel, stride):
    x, found, dense = conv_map(kernel, stride)
    # The form for weight gradients is one part of several splits.
    told = {form: form.removesuffix("_w").removeprefix("split") for form in forms}
    parts = {form: int(told[form]) if told[form].isdecimal() else FORMS[form].storage_form.parts for form in forms}
    forms = [form for form in forms if parts[form] <= found.volume]
    if not forms:
        pytest.skip("fewer taps than parts")
    operands = {"x": x, "w": normal(4, found.volume, 5), "g": normal(found.num_outputs, 4, seed=1)}
    for text, plain in CONV.values():
        names = [name for name in ("g", "x", "w") if f" {name}[" in text]
        wanted = torch.einsum(plain, dense, *(operands[name] for name in names))
        close(call(text, tuple(wanted.shape), forms, found, operands), wanted)


@pytest.mark.parametrize("forms", [*([form] for form in FORMS), [*FORMS]], ids=[*FORMS, "all"])
def test_gradients_of_convolutions_in_every_form(forms):
    x, found, dense = conv_map(3, 2)
    w = normal(4, found.volume, 5)

    def run(given: Mapping[str, Tensor]) -> Tensor:
        return call(CONV["forward"][0], (found.num_outputs, 4), forms, found, given)

    def plain(given: Mapping[str, Tensor]) -> Tensor:
        return torch.einsum(CONV["forward"][1], dense, given["x"], given["w"])

    close(with_gradients(run, {"x": x, "w": w}), with_gradients(plain, {"x": x, "w": w}))


@pytest.mark.parametrize("form", [name for name, held in FORMS.items() if held.storage_form.parts == 1])
@pytest.mark.parametrize("operator", ["max=", "mean="])
def test_pooling_over_a_map(form, operator):
    x, found, dense = conv_map(2, 2)
    mask = (dense > 0).transpose(0, 1).flatten(0, 1)[:, :, None]

    def run(given: Mapping[str, Tensor]) -> Tensor:
        shape = (found.volume, found.num_outputs, 5)
        return call(f"y[k,o,c] {operator} map[o,k,i] * x[i,c]", shape, [form], found, given)

    def plain(given: Mapping[str, Tensor]) -> Tensor:
        values = given["x"][None].expand(len(mask), -1, -1)
        return joined(values, mask.expand_as(values), operator).unflatten(0, (found.volume, -1))

    close(with_gradients(run, {"x": x}), with_gradients(plain, {"x": x}))


def test_a_coordinate_that_meets_nothing_cannot_tell_padding():
    x, found, _ = conv_map(2, 2)
    with pytest.raises(OptionError, match="its coordinate k appears nowhere else in the statement"):
        call("y[o,c] max= max(k, i, map[o,k,i] * x[i,c])", (found.num_outputs, 5), ["pairs"], found, {"x": x})


def test_convolution_by_windows():
    image, weight = normal(2, 3, 9, 8), normal(4, 3, 3, 3, seed=1)
    for stride in (1, 2):
        size = [-(-n // stride) for n in (9, 8)]
        out = pm.einsum(
            f"O[n,m,p,q] = I[n,c,S*p+r-1,S*q+s-1] * F[m,c,r,s] ; p:{size[0]}, q:{size[1]}", I=image, F=weight, S=stride
        )
        close(out, torch.nn.functional.conv2d(image, weight, stride=stride, padding=1))


# Declared ranges
@lowerings
@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("T = A[i] ; i:2..2", ()),
        ("T max= A[i] ; i:1..1", ()),
        ("T[i] = A[i] ; i:1..1", (1,)),
        ("T[i-1*j+1,i,i] mean= -1 * A ; i:1..1, j:3, T:[4,1,1]", (4, 1, 1)),
    ],
)
def test_an_empty_range_has_no_points(text, shape, lowering):
    a = normal(3) if "[i]" in text.split("=")[1] else normal()
    assert torch.equal(pm.einsum(text, A=a, lowering=lowering), torch.zeros(shape, dtype=torch.float64))


# Means
MEANS = {
    "exists": ("T mean= A[j] * exists(B[i])", (3,), (4,), (4,)),
    "exists, declared": ("T mean= A[j] * exists(B[i-1]) ; i:6, B:[4]", (3,), (4,), (4,)),
    "exists in another term": ("T mean= A[j] + C[j] * exists(B[i])", (3,), (4,), (3,)),
    "equal": ("T mean= A[i] * equal(B[i-1], C[i]) ; i:3", (3,), (2,), (3,)),
    "equal of a sum": ("T mean= A[j] * equal(B[i-1], C[i] * exists(A[k-1])) ; i:3, k:5", (3,), (2,), (3,)),
    "equal in another term": ("T[j] mean= A[j] + equal(B[i-1], C[i]) ; i:3", (3,), (2,), (3,)),
}


@lowerings
@pytest.mark.parametrize("name", MEANS)
def test_means_under_conditions(name, lowering):
    text, *shapes = MEANS[name]
    a, b, c = (torch.ones(shape, dtype=torch.float64) for shape in shapes)
    used = {key: x for key, x in {"B": b, "C": c}.items() if f"{key}[" in text}
    assert torch.autograd.gradcheck(lambda a: pm.einsum(text, A=a, **used, lowering=lowering), a.requires_grad_())
    wanted = pm.einsum(text, A=a, **used, lowering="reference")
    close(pm.einsum(text, A=a, **used, lowering=lowering), wanted)


# Indices that do not fit in 64 bits
@lowerings
@pytest.mark.parametrize(
    ("text", "places", "wanted"),
    [
        ("y[i] = x[4611686018427387904*i] ; i:5", None, [1, 0, 0, 0, 0]),
        ("y[i] = x[4611686018427387904*i-4611686018427387904] ; i:4", None, [0, 1, 0, 0]),
        ("y[i] = x[-4*X[i]+1] ; i:2", [1 << 62, 0], [0, 2]),
        ("y[4611686018427387904*i+1] = x[i] ; i:3, y:[3]", None, [0, 1, 0]),
    ],
)
def test_indices_do_not_wrap_around(text, places, wanted, lowering):
    operands = {"x": torch.tensor([1.0, 2, 3])} | ({} if places is None else {"X": torch.tensor(places)})
    assert pm.einsum(text, **operands, lowering=lowering).tolist() == wanted


# Equivariant tensor product
TENSOR_PRODUCT = {
    "shared": ("Z[b,i,w] = CG[i,j,k,l] * X[b,j,u] * Y[b,k] * W[l,u,w]", "ijkl,bju,bk,luw->biw"),
    "per sample": ("Z[b,i,w] = CG[i,j,k,l] * X[b,j,u] * Y[b,k] * W[b,l,u,w]", "ijkl,bju,bk,bluw->biw"),
}
CG_FORMATS = [
    "(i j k l):C",
    "[i,j,k,l] l:C (i j k):G",
    "[i,j,k,l] l:C (i j k):G4",
    "[i,j,k,l] (l i):C (j k):G",
    "i:C j:C k:C l:C",
]


@pytest.mark.parametrize("form", CG_FORMATS)
@pytest.mark.parametrize("weights", TENSOR_PRODUCT)
def test_tensor_products(form, weights):
    text, plain = TENSOR_PRODUCT[weights]
    cg = holes(normal(4, 3, 4, 3), 0.15)
    batch = (5,) if weights == "per sample" else ()
    inputs = {"CG": cg, "X": normal(5, 3, 3, seed=1), "Y": normal(5, 4, seed=2), "W": normal(*batch, 3, 3, 2, seed=3)}

    def run(x: Mapping[str, Tensor]) -> Tensor:
        return pm.einsum(text, **{**x, "CG": sparse(x["CG"], form)})

    def dense(x: Mapping[str, Tensor]) -> Tensor:
        return torch.einsum(plain, x["CG"] * (cg != 0), x["X"], x["Y"], x["W"])

    close(with_gradients(run, inputs), with_gradients(dense, inputs))


def test_tensor_products_by_finite_differences():
    cg = sparse(holes(normal(2, 2, 2, 2), 0.3), "(i j k l):C")
    inputs = [cg.parts[0].values.clone(), normal(2, 2, 2, seed=1), normal(2, 2, seed=2), normal(2, 2, 1, seed=3)]

    def run(values: Tensor, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return pm.einsum(TENSOR_PRODUCT["shared"][0], CG=cg.with_values([values]), X=x, Y=y, W=w, lowering="reference")

    given = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


# Lowerings by name
def test_a_lowering_by_name_has_gradients():
    a, b = holes(normal(6, 5), 0.5).requires_grad_(), normal(5, 3, seed=1).requires_grad_()

    def run(a: Tensor, b: Tensor) -> Tensor:
        return pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=sparse(a, "CSR"), B=b, lowering="nest")

    got, wanted = (torch.autograd.grad(out.square().sum(), [a, b]) for out in (run(a, b), a @ b))
    close([got[0], got[1]], [wanted[0] * (a != 0), wanted[1]])


# Narrow dtypes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["GroupCOO", "CSR", "m:C k:G2 m:B4 k:B4"])
def test_narrow_dtypes(form, dtype):
    a, b = holes(normal(20, 16), 0.4).to(dtype), normal(16, 8, seed=1).to(dtype)
    inputs = [a.requires_grad_(), b.requires_grad_()]
    out = pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=sparse(a, form), B=b)
    grads = torch.autograd.grad(out.float().square().sum(), inputs)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wanted = wide[0] @ wide[1]
    assert out.dtype == dtype and [g.dtype for g in grads] == [dtype, dtype]
    assert_close(out.detach(), wanted.detach())
    first, second = torch.autograd.grad(wanted, wide, 2 * out.detach().double())
    assert_close(grads[0], first * (a != 0))
    assert_close(grads[1], second)
