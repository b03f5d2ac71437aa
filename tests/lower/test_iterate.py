"""Loop nests over the levels of sparse operands, against the oracle's loops."""

import itertools
import random

import numpy as np
import pytest
import scipy.sparse
import torch
from einsum_oracle import evaluate
from wide import beyond

import pumice as pm
from benchmarks.harness.timing import on_threads
from pumice.errors import OptionError, ShapeError
from pumice.language.bind import bind
from pumice.language.iteration import IterationChoices
from pumice.language.parse import parse
from pumice.lower import iterate, nest_c
from pumice.lower.iterate_c import widths
from pumice.ops.direct import stored_operand

pytestmark = pytest.mark.skipif(nest_c.unavailable() is not None, reason="no C compiler")


def product(text, pattern=-1, choices=None, **operands):
    """A statement of one product with operands, or the reason why it is not computed by nests."""
    statement = parse(text, {})
    bound = bind(statement, {name: tuple(x.shape) for name, x in operands.items()})
    given = (operands[f.name] for f in statement.terms[0].factors)
    factors = tuple(x if isinstance(x, torch.Tensor) else stored_operand(x) for x in given)
    return iterate.SparseProduct(bound, factors, pattern, choices or IterationChoices()).ready(factors)


def refusal(*args, **options):
    made = product(*args, **options)
    return made if isinstance(made, str) else None


def loops(text, dense):
    """The result by the oracle."""
    return torch.from_numpy(evaluate(text, {name: x.numpy() for name, x in dense.items()}))


def check(text, dense, formats, wanted=None, **options):
    """Evaluate a statement with operands in these formats, and compare it with loops over dense ones."""
    given = {name: pm.sparse(x, formats[name]) if name in formats else x for name, x in dense.items()}
    made = product(text, **options, **given)
    if isinstance(made, str):
        assert made == "it is empty", f"{text}: {made}"
        return made
    got = made.run()
    wanted = loops(text, dense) if wanted is None else wanted
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9, msg=lambda found: f"{text} {formats}\n{found}")
    return made


def draw(*shape, density=1.0, seed=0):
    chance = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(*shape, generator=chance, dtype=torch.float64)
    return x * (torch.rand(*shape, generator=chance) < density)


PRODUCTS = {
    "rows by rows": ("C[i,j] = A[i,k] * B[k,j]", {"A": (9, 12), "B": (12, 7)}, ["m:U k:C", "m:C k:C", "(m k):C"]),
    "dot products": ("C[i,j] = A[i,k] * B[j,k]", {"A": (9, 12), "B": (7, 12)}, ["m:U k:C", "[m,k] k:U m:C"]),
    "elements": ("C[i,j] = A[i,j] * B[i,j]", {"A": (9, 12), "B": (9, 12)}, ["m:U k:C", "(m k):H", "[m,k] k:C m:C"]),
    "transposed": ("C[i,j] = A[i,j] * B[j,i]", {"A": (9, 12), "B": (12, 9)}, ["m:U k:C", "(m k):C"]),
    "diagonal": ("C[i] = A[i,i] * B[i,2]", {"A": (9, 9), "B": (9, 4)}, ["m:U k:C", "(m k):C"]),
    "three": ("C[i,l] = A[i,k] * B[k,j] * D[j,l]", {"A": (5, 6), "B": (6, 7), "D": (7, 4)}, ["m:U k:C", "(m k):C"]),
    "squares": ("C[i] = A[i,k] * A[i,k]", {"A": (9, 12)}, ["m:U k:C", "(m k):C"]),
    "reversed": ("C[p] = A[p-r+2,0] * B[r,1] ; p:9", {"A": (9, 2), "B": (3, 2)}, ["m:C k:C", "(m k):C"]),
    "strided": ("C[p] = A[3*p+2*r-1,0] * B[r,0] ; p:7", {"A": (19, 1), "B": (4, 1)}, ["m:C k:C", "(m k):C"]),
    "window of a target": ("C[2*p+r] = A[p,r] * B[r,p] ; C:[12]", {"A": (5, 3), "B": (3, 5)}, ["m:C k:C", "m:U k:C"]),
    "scaled": ("C[i] = -2.5 * A[i,k] * B[k,i]", {"A": (9, 12), "B": (12, 9)}, ["m:U k:C"]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_matrices(name):
    text, shapes, forms = PRODUCTS[name]
    dense = {key: draw(*shape, density=0.4) for key, shape in shapes.items()}
    wanted = loops(text, dense)
    for number, first in enumerate(forms):
        formats = {key: forms[(number + n) % len(forms)] if n else first for n, key in enumerate(dense)}
        check(text, dense, formats, wanted, choices=IterationChoices(located=((), ("B",))[number % 2]))
    check(text, dense, dict.fromkeys(dense, forms[0]), wanted)


@pytest.mark.parametrize("searched", [True, False])
@pytest.mark.parametrize(("stride", "dilation", "channels"), [(1, 1, 3), (2, 1, 70), (1, 2, 9), (3, 2, 8)])
def test_convolutions_of_sparse_images(stride, dilation, channels, searched):
    image, weight = draw(2, 9, 8, 5, density=0.3), draw(3, 2, 5, channels, density=0.5)
    rows, columns = -(-9 // stride), -(-8 // stride)
    text = (
        f"O[n,p,q,m] = I[n,{stride}*p+{dilation}*r-1,{stride}*q+{dilation}*s-1,c] * F[r,s,c,m] ; p:{rows}, q:{columns}"
    )
    dense = {"I": image, "F": weight}
    wanted = loops(text, dense)
    filters = (None, "r:U s:U c:U m:C", "(r s c m):C", "(r s):C c:U m:U", None)
    images = ("n:U h:U w:U c:C", "(n h w c):C", "(n h w):H c:U", "n:U h:C w:H c:C", "[n,h,w,c] c:U2 (n h w c):C h:M4")
    for image_form, filter_form in zip(images, filters, strict=True):
        formats = {"I": image_form} | ({"F": filter_form} if filter_form else {})
        check(text, dense, formats, wanted, choices=IterationChoices(searched=searched))


def test_every_order_of_loops_is_equal():
    dense = {"I": draw(8, 5, density=0.4), "F": draw(3, 5, 10, density=0.5)}
    text = "O[p,m] = I[p+r-1,c] * F[r,c,m] ; p:8"
    wanted = loops(text, dense)
    for number, order in enumerate(itertools.permutations("prcm")):
        if number % 3 == 0:
            check(text, dense, {"I": "(h c):C", "F": "r:U c:C m:C"}, wanted, choices=IterationChoices(order, ""))
    for order in itertools.permutations("prc"):
        check(text, dense, {"I": "h:C c:C"}, wanted, choices=IterationChoices(order))


@pytest.mark.parametrize("count", [1, 2])
def test_values_at_the_entries_of_a_mask(count):
    mask, image, weight = draw(2, 9, 8, density=0.4), draw(2, 9, 8, 5, density=0.3), draw(3, 3, 5, 19)
    text = "O[n,p,q,m] = M[n,p,q] * I[n,p+r-1,q+s-1,c] * F[r,s,c,m] ; p:9, q:8"
    wanted = loops(text, {"M": mask, "I": image, "F": weight})
    with on_threads(count):
        for form in ("(n p q):C", "n:U p:C q:C", "[n,p,q] q:C (n p):C", "(n p q):H p:M8 q:M4"):
            given = {"M": pm.sparse(mask, form), "I": pm.sparse(image, "(n h w):C c:U"), "F": weight}
            got = product(text, pattern=0, **given).run()
            at = [given["M"].parts[0].coords[name].long() for name in "npq"]
            torch.testing.assert_close(got, wanted[tuple(at)])


def test_sums_over_vectors():
    for inner in (1, 7, 8, 37):
        dense = {"S": draw(9, 8, density=0.4), "P": draw(9, inner), "Q": draw(8, inner)}
        made = check("O[i,j] = S[i,j] * P[i,k] * Q[j,k]", dense, {"S": "(m k):C"})
        assert "vectors of k" in made.planned.source or inner == 1


@pytest.mark.parametrize("seed", beyond(8, range(24)))
def test_random_products(seed):
    """Two or three sparse factors over one to four windows, in random formats, orders and ways."""
    chance = random.Random(seed)
    dim = chance.choice((1, 1, 2, 2, 3, 4))
    sizes, taps = [chance.randint(2, 5) for _ in range(dim)], [chance.randint(1, 3) for _ in range(dim)]
    stride, dilation, shift = chance.randint(1, 3), chance.choice((-1, 1, 2)), chance.randint(-1, 2)
    channels, outputs = chance.randint(1, 3), chance.choice((1, 3, 9, 20))
    p, r = ([f"{letter}{n}" for n in range(dim)] for letter in "pr")
    window = [f"{stride}*{a}{dilation:+d}*{b}{shift:+d}" for a, b in zip(p, r, strict=True)]
    ranges = ", ".join(f"{a}:{size}" for a, size in zip(p, sizes, strict=True))
    factors = [f"I[{','.join(window)},c]", f"F[{','.join(r)},c,m]"]
    dense = {
        "I": draw(*sizes, channels, density=0.5, seed=seed),
        "F": draw(*taps, channels, outputs, density=0.6, seed=seed),
    }
    if chance.random() < 0.5:
        factors.append(f"M[{','.join(p)}]")
        dense["M"] = draw(*sizes, density=0.5, seed=seed)
    chance.shuffle(factors)
    text = f"O[{','.join(p)},m] = {' * '.join(factors)} ; {ranges}"
    formats = {name: random_format(chance, x.ndim) for name, x in dense.items() if name == "I" or chance.random() < 0.6}
    names = [*p, *r, "c", "m"]
    chance.shuffle(names)
    order = tuple(names) if chance.random() < 0.4 else ()
    choices = IterationChoices(order, chance.choice((None, "")), chance.choice(((), ("F",))), chance.random() < 0.7)
    check(text, dense, formats, choices=choices)


def random_format(chance, ndim):
    """Levels of kinds U and C over the axes in a random order, at least one C."""
    axes = [f"a{n}" for n in range(ndim)]
    order = chance.sample(axes, ndim) if chance.random() < 0.4 else axes
    if chance.random() < 0.3:
        return f"[{','.join(axes)}] ({' '.join(order)}):C"
    kinds = [chance.choice("UCCH") for _ in order]
    kinds[chance.randrange(ndim)] = "C"
    return f"[{','.join(axes)}] " + " ".join(f"{a}:{kind}" for a, kind in zip(order, kinds, strict=True))


def test_entries_of_sums_of_indices_are_not_shared():
    """Several points of p write one entry of M: the loop over p is not shared among threads."""
    dense = {"M": draw(40, density=0.6), "X": draw(31, density=0.6), "F": draw(10)}
    given = {"M": pm.sparse(dense["M"], "a:C"), "X": pm.sparse(dense["X"], "a:C"), "F": dense["F"]}
    made = product("O[p+r] = M[p+r] * X[p] * F[r]", pattern=0, **given)
    assert "shared" not in made.planned.source
    wanted = loops("O[p+r] = M[p+r] * X[p] * F[r]", dense)
    torch.testing.assert_close(made.run(), wanted[given["M"].parts[0].coords["a"].long()])


def test_dense_levels_of_many_positions_are_searched():
    entries = (np.ones(3, np.float32), (np.array([0, 10, 1 << 27]), np.array([0, 1, 2])))
    made = pm.sparse(scipy.sparse.coo_array(entries, (1 << 28, 4)), "m:U k:C")
    (found,) = product("C[k] = H[m,k]", H=made).fibers
    assert [len(pos) for pos in found.pos] == [2, 4] and [*found.positions] == [3, 3]
    got = pm.einsum("C[k] = H[m,k] * v[k]", H=made, v=pm.sparse(torch.ones(4), "k:C"))
    assert got.tolist() == [1, 1, 1, 0]


def test_what_is_refused():
    a, b = pm.sparse(draw(3, 4, density=0.5), "m:U k:C"), draw(4, 5)
    text = "C[i,j] = A[i,k] * B[k,j]"
    assert refusal(text, A=a, B=b) is None
    assert "gradients" in refusal(text, A=a, B=b.clone().requires_grad_())
    with torch.no_grad():
        assert refusal(text, A=a, B=b.clone().requires_grad_()) is None
    assert "sparse" in refusal(text, A=draw(3, 4), B=b)
    assert "index arrays" in refusal("C[i] = A[i,K[i]]", A=a, K=torch.zeros(3, dtype=torch.int32))
    assert "sum" in refusal("C[i] max= A[i,k]", A=a)
    assert "empty" in refusal(text, A=pm.sparse(torch.zeros(3, 4), "m:U k:C"), B=b)
    many = ",".join("abcdefghijk")
    ones = pm.sparse(torch.ones([1] * 11), f"({many.replace(',', ' ')}):C")
    assert "11 indices" in refusal(f"C[a] = A[{many}]", A=ones)


def test_einsum_takes_nests_and_their_dtypes():
    image, weight = draw(1, 6, 5, 4, density=0.4), draw(3, 3, 4, 6)
    text = "O[n,p,q,m] = I[n,p+r-1,q+s-1,c] * F[r,s,c,m] ; p:6, q:5"
    wanted = pm.einsum(text, I=image, F=weight)
    for dtype, close in ((torch.float64, 1e-9), (torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 1e-1)):
        got = pm.einsum(text, I=pm.sparse(image.to(dtype), "n:U h:U w:U c:C"), F=weight.to(dtype))
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), wanted, rtol=close, atol=close)
    leaf = weight.clone().requires_grad_()
    sparse = pm.sparse(image, "n:U h:U w:U c:C")
    pm.einsum(text, I=sparse, F=leaf).square().sum().backward()
    dense = weight.clone().requires_grad_()
    pm.einsum(text, I=image, F=dense).square().sum().backward()
    torch.testing.assert_close(leaf.grad, dense.grad)


def test_similar_scenes_share_a_nest():
    made = [
        product(
            "C[i,j] = A[i,k] * B[k,j]",
            A=pm.sparse(draw(40, 40, density=d), "CSR"),
            B=pm.sparse(draw(40, 40, density=0.2), "CSR"),
        )
        for d in (0.2, 0.21)
    ]
    assert len({each.planned.source for each in made}) == 1


CALLS = {
    "rows by rows": ("C[i,j] = A[i,k] * B[k,j]", {"A": (9, 12), "B": (12, 7)}, {"A": "CSR", "B": "m:C k:C"}),
    "window": ("O[p,m] = I[p+r-1,c] * F[r,c,m] ; p:9", {"I": (9, 5), "F": (3, 5, 11)}, {"I": "h:U c:C"}),
    "unsorted": ("O[p] = I[p+r-1] * F[r] ; p:9", {"I": (9,), "F": (3,)}, {"I": "h:H", "F": "r:C"}),
    "pattern": ("O[p,m] = M[p] * I[p,c] * F[c,m] ; O:pattern(M)", {"M": (9,), "I": (9, 5), "F": (5, 11)}, {}),
}


@pytest.mark.parametrize(("channels", "axes"), [(70, (0, 1, 2, 3)), (64, (3, 2, 0, 1)), (41, (2, 3, 1, 0))])
def test_weights_are_stored_by_tiles(channels, axes):
    """Whole tiles, and vectors and single channels beside them; the weight's axes in any order."""
    image, weight = draw(2, 9, 8, 16, density=0.5), draw(4, 3, 16, channels)
    letters, wanted = (
        "rscm",
        torch.nn.functional.conv2d(image.permute(0, 3, 1, 2), weight[1:].permute(3, 2, 0, 1), padding=1).permute(
            0, 2, 3, 1
        ),
    )
    read = ",".join({"r": "r+1"}.get(letters[axis], letters[axis]) for axis in axes)
    text = f"O[n,p,q,m] = I[n,p+r-1,q+s-1,c] * F[{read}] ; p:9, q:8, r:3"
    given = {"I": pm.sparse(image, "n:U h:U w:U c:C"), "F": weight.permute(axes).contiguous()}
    made = product(text, **given)
    # One tile may hold all channels, as 64 with vectors of 16.
    several = len(widths(channels, nest_c.lanes_of(torch.float32)[1])) > 1
    assert bool(made.planned.nest.arrays[1].tiles) == several
    torch.testing.assert_close(made.run(), wanted)
    given["F"].mul_(2)
    torch.testing.assert_close(pm.einsum(text, **given), 2 * wanted)


@pytest.mark.parametrize("name", CALLS)
def test_calls_with_other_operands(name):
    """What formats and shapes determine is computed once: counts, values, coordinates and layouts differ by call."""
    text, shapes, formats = CALLS[name]
    formats = formats or {"M": "a:C", "I": "(a b):C"}
    statement, held = pm.compile_einsum(text), {}
    # Statements of equal text share it, so that other tests may have called this one.
    statement._memory.checked.clear()
    for seed, density in enumerate((0.4, 0.1, 0.9, 0.4, 0.3, 1.0, 0.0, 0.5)):
        dense = {key: draw(*shape, density=density, seed=seed) for key, shape in shapes.items()}
        given = {key: pm.sparse(x, formats[key]) if key in formats else x for key, x in dense.items()}
        if seed == 5:
            given = {
                key: x.mT.contiguous().mT if isinstance(x, torch.Tensor) and x.ndim > 1 else x
                for key, x in given.items()
            }
        wanted = loops(text.replace(" ; O:pattern(M)", ""), dense)
        held[seed] = given, wanted
        for _ in range(2):
            got = statement(**given)
            torch.testing.assert_close(got if isinstance(got, torch.Tensor) else got.to_dense(), wanted)
    for given, wanted in held.values():
        got = statement(**given)
        torch.testing.assert_close(got if isinstance(got, torch.Tensor) else got.to_dense(), wanted)
    assert len(statement._memory.checked) == 1


def test_calls_notice_what_is_written():
    image, weight = draw(6, 5, 4, density=0.5), draw(3, 3, 4, 6, density=0.5)
    text = "O[p,q,m] = I[p+r-1,q+s-1,c] * F[r,s,c,m] ; p:6, q:5"
    given = {"I": pm.sparse(image, "h:U w:U c:C"), "F": pm.sparse(weight, "r:U s:U c:U m:C")}
    for name in "IF":
        before = pm.einsum(text, **given)
        given[name].parts[0].values.mul_(2)
        torch.testing.assert_close(pm.einsum(text, **given), 2 * before)
        given[name].parts[0].values.data.mul_(3)
        torch.testing.assert_close(pm.einsum(text, **given), 6 * before)
    channels = given["I"].parts[0].coords["c"]
    channels.copy_(3 - channels)  # in another order, too
    torch.testing.assert_close(pm.einsum(text, **given), loops(text, {"I": given["I"].to_dense(), "F": 6 * weight}))


def test_explain_shows_the_nest():
    a = pm.sparse(draw(60, 60, density=0.02), "CSR")
    told = pm.compile_einsum("C[i,j] = A[i,k] * B[k,j]").explain(A=a, B=a)
    for piece in ("Count i", "Walk k over level 1 of factor 0", "Walk j over level 1 of factor 1", "void run("):
        assert piece in told, told


def test_schedules_of_nests_over_levels():
    dense = {"A": draw(9, 12, density=0.4), "B": draw(9, 12, density=0.4), "F": draw(12, 10)}
    given = {"A": pm.sparse(dense["A"], "m:U k:C"), "B": pm.sparse(dense["B"], "m:U k:C"), "F": dense["F"]}
    text = "C[i,n] = A[i,k] * B[i,k] * F[k,n]"
    told = {}
    for schedule in ("order i k n", "order i k; vector n", "order i k; locate B", "order i n k; locate A", "direct"):
        torch.testing.assert_close(pm.einsum(text, **given, lowering=f"nest/{schedule}"), loops(text, dense))
        told[schedule] = pm.compile_einsum(text, lowering=f"nest/{schedule}").explain(**given)
    assert "Merge k" in told["order i k n"] and "Walk k over level 1 of factor 0" in told["order i k; locate B"]
    assert "Walk k over level 1 of factor 1" in told["order i n k; locate A"]
    # Gradients take the usual ways.
    leaf = dense["F"].clone().requires_grad_()
    pm.einsum(text, **{**given, "F": leaf}, lowering="nest/order i k n").sum().backward()
    torch.testing.assert_close(leaf.grad, (dense["A"] * dense["B"]).sum(0)[:, None].expand(12, 10))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("order i k", "order i k: expected the indices i, j, k"),
        ("order i j k x", "expected the indices"),
        ("vector k", "vector k: expected an index of dense axes alone, none"),
        ("locate A B", "no sparse factor is left"),
        ("locate X", "the sparse factors that meet are A, B"),
        ("hold 4", "takes order, vector and locate"),
    ],
)
def test_schedules_that_are_refused(schedule, message):
    a = pm.sparse(draw(9, 9, density=0.4), "CSR")
    with pytest.raises(OptionError, match=message):
        pm.einsum("C[i,j] = A[i,k] * B[k,j]", A=a, B=a, lowering=f"nest/{schedule}")


def test_the_cost_model_takes_operands_dense():
    image, weight = draw(1, 8, 8, 16, density=0.3), draw(3, 3, 16, 16, density=0.3)
    text, given = "O[n,p,q,m] = I[n,p+r-1,q+s-1,c] * F[r,s,c,m] ; p:8, q:8", {}
    for density, dense in ((0.3, True), (0.01, False)):
        kept = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) < density
        given = {"I": pm.sparse(image, "n:U h:U w:U c:C"), "F": pm.sparse(weight * kept, "r:U s:U c:U m:C")}
        assert ("with F in dense form" in pm.compile_einsum(text).explain(**given)) == dense
        torch.testing.assert_close(pm.einsum(text, **given), pm.einsum(text, I=image, F=weight * kept))


@pytest.mark.parametrize(("image", "weight", "dense"), [(0.5, 0.2, "I"), (0.5, 0.02, "I"), (0.02, 0.3, "F")])
def test_the_cost_model_takes_the_better_operand_dense(image, weight, dense):
    x, w = draw(1, 64, 14, 14, density=image).float(), draw(64, 64, 3, 3, density=weight).float()
    statement = pm.compile_einsum("O[n,m,p,q] = I[n,c,p+r-1,q+s-1] * F[m,c,r,s] ; p:14, q:14")
    given = {"I": pm.sparse(x, "[n,c,h,w] n:U h:U w:U c:C"), "F": pm.sparse(w, "m:U (c r s):C")}
    assert f"with {dense} in dense form" in statement.explain(**given)
    wanted = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
    torch.testing.assert_close(statement(**given).double(), wanted, rtol=1e-4, atol=1e-4)


def test_presets_of_an_image_read_through_windows():
    image, weight = draw(2, 7, 6, 5, density=0.4), draw(3, 3, 5, 11)
    text = "O[n,p,q,m] = I[n,p+r-1,q+s-1,c] * F[r,s,c,m] ; p:7, q:6"
    given, wanted = {"I": pm.sparse(image, "n:U h:U w:U c:C"), "F": weight}, loops(text, {"I": image, "F": weight})
    for schedule in ("nest/deepsparse", "nest/direct", "nest", "nest/order n r p s q c; vector m"):
        torch.testing.assert_close(pm.einsum(text, **given, lowering=schedule), wanted)
    told = pm.compile_einsum(text, lowering="nest/deepsparse").explain(**given).split("typedef")[0]
    assert [line.split()[1] for line in told.splitlines() if line.strip().startswith(("Count", "Walk"))] == [*"npqrsc"]
    with pytest.raises(OptionError, match="the target is written through windows"):
        pm.einsum(text, **given, lowering="nest/skimcaffe")
    leaf = weight.clone().requires_grad_()
    pm.einsum(text, I=given["I"], F=leaf, lowering="nest/deepsparse").sum().backward()
    dense = weight.clone().requires_grad_()
    pm.einsum(text, I=image, F=dense).sum().backward()
    torch.testing.assert_close(leaf.grad, dense.grad)


def test_offsets_beyond_int32_windows_are_bounded():
    """A window far outside its operand has no points."""
    dense = {"I": draw(6, 2, density=0.6), "F": draw(3, 2)}
    text = "O[p] = I[p+r+2000000000,c] * F[r,c] ; p:4"
    got = product(text, I=pm.sparse(dense["I"], "h:C c:C"), F=dense["F"]).run()
    assert np.all(got.numpy() == 0)


def test_a_target_that_does_not_fit_is_refused():
    diagonal = scipy.sparse.coo_array((np.ones(3, np.float32), (np.arange(3), np.arange(3))), (1 << 24, 1 << 24))
    a = pm.sparse(diagonal, "COO")
    with pytest.raises(ShapeError, match=r"16777216.*16777216"):
        pm.einsum("C[i,j] = A[i,k] * B[k,j]", A=a, B=a)
    got = pm.einsum("C[i,j] = A[i,k] * B[k,j] ; C:pattern(*)", A=a, B=a)
    assert got.nnz == 3 and got.parts[0].coords["i"].tolist() == [0, 1, 2]
