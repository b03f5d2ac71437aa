"""The reference and the graphs compute what the oracle says, any dtype, any size, and so do the derived gradients."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
import torch._dynamo.utils
from einsum_fuzz import random_case
from einsum_oracle import evaluate
from modes import deterministic
from wide import beyond

import pumice as pm
from pumice.language.bind import BoundStatement, bind
from pumice.language.derive import count, declare, derivative, gradient_name, result_name
from pumice.language.nodes import Statement, accesses_of
from pumice.language.parse import parse
from pumice.lower import graph, plan, reference

LOWERINGS = {"loops": reference.run, "graph": graph.run}
lowerings = pytest.mark.parametrize("run", LOWERINGS.values(), ids=LOWERINGS)
SPMM = "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]"


@dataclass(frozen=True)
class Call:
    """A statement bound to operands."""

    bound: BoundStatement
    operands: dict[str, torch.Tensor]

    @property
    def statement(self) -> Statement:
        return self.bound.statement

    def to(self, dtype: torch.dtype) -> "Call":
        return replace(
            self, operands={n: t.to(dtype) if t.is_floating_point() else t for n, t in self.operands.items()}
        )


def call(text: str, operands: dict) -> Call:
    """The statement of a text; Python ints are given integers, everything else becomes a tensor."""
    integers = {name: value for name, value in operands.items() if isinstance(value, int)}
    tensors = {n: torch.as_tensor(np.asarray(v)) for n, v in operands.items() if not isinstance(v, int)}
    statement = parse(text, integers)
    passed = tensors.get(statement.target.name)
    if passed is not None and statement.reduction in ("max", "min"):
        statement = replace(statement, accumulate=True)
    shape = None if passed is None else passed.shape
    return Call(bind(statement, {n: t.shape for n, t in tensors.items()}, shape), tensors)


def fuzzed(seed: int) -> Call:
    case = random_case(seed)
    return call(case.text, case.operands)


def values(call: Call) -> list[str]:
    """The operands that have a gradient, the target's old values aside."""
    names = {a.name for a in accesses_of(*call.statement.terms) if call.operands[a.name].is_floating_point()}
    return sorted(names - {call.statement.target.name})


def matches(got: torch.Tensor, wanted: np.ndarray, **tolerance: float) -> None:
    torch.testing.assert_close(got, torch.from_numpy(wanted).to(got.dtype), **tolerance)


# Against the oracle
@lowerings
@pytest.mark.parametrize("first", beyond(2, range(0, 400, 40)))
def test_the_oracle_agrees(run, first):
    for seed in range(first, first + 40):
        case, case_call = random_case(seed), fuzzed(seed)
        before = {name: tensor.clone() for name, tensor in case_call.operands.items()}
        got = run(case_call.bound, case_call.operands, torch.float64)
        try:
            matches(got, evaluate(case.text, case.operands), rtol=1e-10, atol=1e-10)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {case.text}") from error
        assert all(torch.equal(tensor, before[name]) for name, tensor in case_call.operands.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", beyond(1, range(400, 480, 20)))
def test_narrow_dtypes_are_computed_in_float32_and_rounded_once(dtype, first):
    for seed in range(first, first + 20):
        narrow = fuzzed(seed).to(dtype)
        exact = reference.run(narrow.bound, narrow.to(torch.float64).operands, torch.float64)
        if not exact.isfinite().all() or (exact.numel() and exact.abs().max() > 6e4):
            continue
        scale = max(1.0, float(exact.abs().max())) if exact.numel() else 1.0
        for run in LOWERINGS.values():
            got = run(narrow.bound, narrow.operands, dtype)
            assert got.dtype == dtype
            torch.testing.assert_close(
                got.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5 * scale, msg=lambda m, s=seed: f"{s}: {m}"
            )


# By hand
@lowerings
@pytest.mark.parametrize(
    ("text", "operands", "wanted"),
    [
        ("C[i] = A[i,k] * B[k]", {"A": np.ones((2, 0)), "B": np.ones(0)}, [0, 0]),
        ("C[X[p]] = A[p] ; C:[2]", {"X": np.zeros(0, int), "A": np.ones(0)}, [0, 0]),
        ("C[p] = A[X[p]]", {"X": np.array([0, -1]), "A": np.ones(0)}, [0, 0]),
        ("C[p] = A[X[p],Y[p]]", {"X": np.array([0, -1]), "Y": np.array([0, 0]), "A": np.ones((2, 0))}, [0, 0]),
        ("C[X[p]] max= A[p] ; C:[0]", {"X": np.array([0, -1]), "A": np.ones(2)}, []),
        ("C[i] max= A[i,k]", {"A": np.ones((2, 0))}, [0, 0]),
        ("C[i] mean= A[i,k]", {"A": np.ones((2, 0))}, [0, 0]),
        ("C[i] max= A[i,k]", {"A": -np.ones((2, 3))}, [-1, -1]),
        ("C[i] max= A[i]", {"A": -np.ones(2), "C": np.array([-3.0, 2])}, [-1, 2]),
        ("C[X[p]] min= A[p]", {"X": np.array([0, 0]), "A": np.ones(2), "C": np.array([3.0, 2])}, [1, 2]),
        ("C[i] = 0 ; i:2", {}, [0, 0]),
        ("C[i] = 3 ; i:1..3", {}, [0, 3, 3]),
        ("C[i] = 2 * a ; i:2", {"a": np.array(1.5)}, [3, 3]),
        ("C[1] = A[i] ; C:[3]", {"A": np.array([1.0, 2])}, [0, 3, 0]),
        ("C[i] = A[i,1]", {"A": np.array([[1.0, 2], [3, 4]])}, [2, 4]),
        ("C[i] = A[2*i-1] ; i:3", {"A": np.array([1.0, 2, 3])}, [0, 2, 0]),
        ("C[i] = D[i] + A[i,k] * B[k]", {"A": np.ones((1, 2)), "B": np.ones(2), "D": np.ones(1)}, [3]),
        ("C[i] = exists(A[i,k])", {"A": np.ones((2, 3))}, [3, 3]),
        ("C[p] = exists(A[X[p]])", {"X": np.array([0, -1, 1]), "A": np.ones(2)}, [1, 0, 1]),
        ("C[p] min= exists(A[X[p]])", {"X": np.array([0, -1, 1]), "A": np.ones(2)}, [1, 0, 1]),
        ("C[i] = equal(L[i], 16777217)", {"L": np.array([16777216, 16777217])}, [0, 1]),
        ("C[i] = A[i,i]", {"A": np.array([[1.0, 2], [3, 4]])}, [1, 4]),
        ("C[X[p]+r] = A[p] ; r:2, C:[3]", {"X": np.array([-1, 0, 2]), "A": np.array([7.0, 1, 2])}, [1, 1, 2]),
    ],
)
def test_by_hand(run, text, operands, wanted):
    made = call(text, operands)
    matches(run(made.bound, made.operands, torch.float64), np.asarray(wanted, dtype=float), rtol=0, atol=0)


@lowerings
def test_integers_stay_exact(run):
    made = call("C[i] = A[i,k]", {"A": np.array([[1 << 40, 1], [3, 4]])})
    assert run(made.bound, made.operands, torch.int64).tolist() == [(1 << 40) + 1, 7]


@lowerings
@pytest.mark.parametrize("operator", ["=", "max=", "min=", "mean="])
def test_what_row_0_holds_does_not_leak(run, operator):
    rows = np.array([[np.nan, np.inf], [1, 2]])
    made = call(f"C[p,n] {operator} B[X[p],n]", {"X": np.array([1, -1, 1]), "B": rows})
    matches(run(made.bound, made.operands, torch.float64), np.array([[1.0, 2], [0, 0], [1, 2]]))
    made = call(f"C[X[p],n] {operator} B[p,n] ; C:[2,_]", {"X": np.array([-1, 1]), "B": rows})
    matches(run(made.bound, made.operands, torch.float64), np.array([[0.0, 0], [1, 2]]))


@lowerings
def test_what_row_0_holds_does_not_leak_into_gradients(run):
    made = call("C[p] = A[p] * B[X[p]]", {"X": np.array([1, -1]), "A": np.ones(2), "B": np.array([np.nan, 2])})
    a, b = (made.operands[name].requires_grad_() for name in "AB")
    run(made.bound, made.operands, torch.float64).sum().backward()
    assert a.grad.tolist() == [2, 0] and b.grad.tolist() == [0, 1]


def test_a_point_that_is_not_there_is_nothing_whatever_its_factors_are():
    made = call("C[i] = A[p] * B[X[p]] ; i:1", {"X": np.array([0, -1]), "A": np.array([1, np.inf]), "B": np.ones(1)})
    assert reference.run(made.bound, made.operands, torch.float64).tolist() == [1]


@lowerings
def test_the_result_is_a_new_tensor(run):
    for text in ("C[i,j] = A[i,j]", "C[j,i] = A[i,j]", "C[i,j] += A[i,j]", "C[i,j] max= A[i,j]", "C[i,j] = a"):
        operands = {"A": np.ones((2, 2)), "a": np.array(1.0), "C": np.zeros((2, 2))}
        made = call(text, operands)
        got = run(made.bound, made.operands, torch.float64)
        got.fill_(7)
        assert got.is_contiguous()
        assert all(not (tensor == 7).any() for tensor in made.operands.values()), text


# Gradients
def random_operands(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(0)
    return {name: chance.normal(size=shape) for name, shape in shapes.items()}


MAPS = {"X": np.array([2, -1, 0, 2]), "Y": np.array([[0, 1], [2, -1], [1, 1], [2, 0]])}
DIFFERENTIABLE = {
    "C[i,j] = A[i,k] * B[k,j]": random_operands(A=(2, 3), B=(3, 2)),
    "C[i,j] += 2 * A[i,k] * B[k,j] - D[i]": random_operands(A=(2, 3), B=(3, 2), C=(2, 2), D=(2,)),
    "C[X[p],n] = A[p,q] * B[Y[p,q],n] ; C:[3,_]": {**MAPS, **random_operands(A=(4, 2), B=(3, 2))},
    "C[n,X[p]] = A[p] * B[n,X[p]] ; C:[_,3]": {**MAPS, **random_operands(A=(4,), B=(2, 3))},
    "C[p] = A[X[p],Y[p,q]]": {**MAPS, **random_operands(A=(3, 3))},
    "C[X[p],Y[p,q]] = A[p,q] ; C:[3,3]": {**MAPS, **random_operands(A=(4, 2))},
    "O[p] = I[2*p+r-1] * W[r] ; p:3": random_operands(I=(5,), W=(3,)),
    "C[i] = a * A[i,i] * A[i,j]": random_operands(a=(), A=(3, 3)),
    "C[p] = equal(X[p], 2) * A[p] + exists(A[X[p]]) * A[p]": {**MAPS, **random_operands(A=(4,))},
    "C[i] max= A[i,k] * B[k]": random_operands(A=(2, 3), B=(3,)),
    "C[X[p]] min= min(q, A[p,q] + B[q]) ; C:[3]": {**MAPS, **random_operands(A=(4, 2), B=(2,))},
    "C[X[p]] mean= mean(q, A[p,q] * B[Y[p,q]]) ; C:[3]": {**MAPS, **random_operands(A=(4, 2), B=(3,))},
    "C[i] max= A[i,k]": random_operands(A=(3, 2), C=(3,)),
}


@lowerings
@pytest.mark.parametrize("text", DIFFERENTIABLE)
def test_gradients_are_right_twice(run, text):
    made = call(text, DIFFERENTIABLE[text])
    floats = [name for name, tensor in made.operands.items() if tensor.is_floating_point()]

    def function(*tensors):
        return run(made.bound, {**made.operands, **dict(zip(floats, tensors, strict=True))}, torch.float64)

    inputs = [made.operands[name].clone().requires_grad_() for name in floats]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def derived(made: Call, operand: str, upstream: torch.Tensor, run) -> torch.Tensor:
    """The gradient of an operand by statements."""
    statement, operands = made.statement, dict(made.operands)

    def carried_out(new: Statement, shape) -> torch.Tensor:
        shapes = {name: tensor.shape for name, tensor in operands.items()}
        return run(bind(declare(new, made.bound.ranges), shapes, shape, strict=False), operands, torch.float64)

    operands[result_name(statement)] = run(made.bound, made.operands, torch.float64)
    if statement.reduction != "sum":
        upstream = upstream / carried_out(count(statement), made.bound.shape).clamp(min=1)
    operands[gradient_name(statement)] = upstream
    shape = made.operands[operand].shape
    return sum((carried_out(new, shape) for new in derivative(statement, operand)), torch.zeros(shape).double())


@lowerings
@pytest.mark.parametrize("first", beyond(1, range(0, 100, 20)))
def test_derived_statements_are_the_gradients(run, first):
    for seed in range(first, first + 20):
        made = fuzzed(seed)
        names = values(made)
        inputs = [made.operands[name].requires_grad_() for name in names]
        result = reference.run(made.bound, made.operands, torch.float64)
        if not inputs or not result.requires_grad:
            continue
        upstream = torch.randn(result.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        wanted = torch.autograd.grad(result, inputs, upstream, allow_unused=True, materialize_grads=True)
        plain = Call(made.bound, {name: tensor.detach() for name, tensor in made.operands.items()})
        for name, gradient in zip(names, wanted, strict=True):
            got = derived(plain, name, upstream, run)
            torch.testing.assert_close(
                got, gradient, rtol=1e-9, atol=1e-9, msg=lambda m, s=seed, n=name: f"seed {s}, {n}: {m}"
            )


def test_ties_share_a_gradient_evenly_however_the_points_are_cut(monkeypatch):
    made = call("C[i] max= A[i,k]", {"A": np.array([[1.0, 1, 0, 1]])})
    monkeypatch.setattr(reference, "POINTS", 2)
    a = made.operands["A"].requires_grad_()
    reference.run(made.bound, made.operands, torch.float64).sum().backward()
    torch.testing.assert_close(a.grad, torch.tensor([[1, 1, 0, 1]]).double() / 3)


@pytest.mark.parametrize("points", [1, 7])
def test_the_reference_in_small_parts(monkeypatch, points):
    monkeypatch.setattr(reference, "POINTS", points)
    for seed in range(8):
        case, made = random_case(seed), fuzzed(seed)
        if made.bound.shape and sum(map(len, made.bound.ranges.values())) < 20:
            got = reference.run(made.bound, made.operands, torch.float64)
            matches(got, evaluate(case.text, case.operands), rtol=1e-10, atol=1e-10)


# Graphs
def einsums(module: torch.fx.GraphModule) -> int:
    return sum(node.target is torch.functional.einsum for node in module.graph.nodes)


def test_at_most_one_einsum_per_term():
    most = 0
    for seed in range(200):
        made = fuzzed(seed)
        found = einsums(graph.prepare(made.bound, made.operands, torch.float64).module)
        assert found <= (len(made.statement.terms) if made.statement.reduction == "sum" else 0), seed
        most = max(most, found)
    assert most > 1


def spmm(groups: int, rows: int, seed: int = 0) -> Call:
    chance = np.random.default_rng(seed)
    operands = {
        "C": chance.normal(size=(rows, 4)),
        "AM": chance.integers(-1, rows, size=groups),
        "AV": chance.normal(size=(groups, 2)),
        "AK": chance.integers(-1, 5, size=(groups, 2)),
        "B": chance.normal(size=(5, 4)),
    }
    return call(SPMM, operands)


def test_one_graph_serves_all_sizes():
    small, large = spmm(3, 4), spmm(30, 6)
    prepared = [graph.prepare(made.bound, made.operands, torch.float64) for made in (small, large)]
    assert prepared[0].module is prepared[1].module
    assert not any(isinstance(node.target, str) for node in prepared[0].module.graph.find_nodes(op="get_attr"))


def test_nothing_is_masked_where_all_is_there():
    for text, shapes in {
        "C[i,j] = A[i,k] * B[k,j]": {"A": (2, 3), "B": (3, 4)},
        "O[p] = I[2*p+r] * W[r]": {"I": (7,), "W": (3,)},
    }.items():
        made = call(text, random_operands(**shapes))
        nodes = graph.prepare(made.bound, made.operands, torch.float64).module.graph.nodes
        assert not {"masked_fill", torch.where} & {node.target for node in nodes}, text


def test_deterministic_algorithms():
    with deterministic():
        for text, operands in DIFFERENTIABLE.items():
            made = call(text, operands)
            got = [run(made.bound, made.operands, torch.float64) for run in LOWERINGS.values()]
            torch.testing.assert_close(*got)


def test_calls_are_made_ready_for_deterministic_algorithms_apart():
    operands = [torch.ones(3), torch.ones(3)]
    before = plan.plan_for(operands, "A|B", "C[i] = A[i] * B[i]", None, "")
    assert plan.plan_for(operands, "A|B", "C[i] = A[i] * B[i]", None, "") is before
    with deterministic():
        assert plan.plan_for(operands, "A|B", "C[i] = A[i] * B[i]", None, "") is not before


def test_refusals(monkeypatch):
    made = spmm(3, 4)
    assert graph.refusal(made.statement, made.bound, made.operands) is None
    monkeypatch.setattr(graph, "LIMIT", 100)
    reason = graph.refusal(made.statement, made.bound, made.operands)
    assert reason and "the gathered operands would take" in reason
    names = [f"i{n}" for n in range(53)]
    wide = call(f"C[i0] = {' * '.join(f'A[{name}]' for name in names)}", {"A": np.ones(1)})
    assert "53 indices" in (graph.refusal(wide.statement, wide.bound, wide.operands) or "")


@pytest.mark.parametrize("backend", beyond(1, ["aot_eager", "inductor"]))
def test_graphs_compile(backend, monkeypatch):
    torch._dynamo.reset()
    compiled: dict[int, object] = {}
    windows = [call("O[p] = I[2*p+r] * W[r]", random_operands(I=(n,), W=(3,))) for n in (9, 15, 21)]
    products = [spmm(3, 4), spmm(17, 4), spmm(30, 9)]
    if backend != "inductor":
        # Its C++ is compiled for the products alone: the windows are one more graph of the kind.
        compile_by = partial(torch.compile, backend=backend)
        monkeypatch.setattr(torch, "compile", lambda *given, options, **how: compile_by(*given, **how))
    for made in products if backend == "inductor" else windows:
        module, arguments = graph.prepare(made.bound, made.operands, torch.float64)
        run = compiled.setdefault(id(module), torch.compile(module, fullgraph=True, dynamic=None, options=None))
        torch.testing.assert_close(run(*arguments), module(*arguments))
    assert len(compiled) == 1


def test_inductor_by_name():
    """Compiled once for all calls, gradients included; never chosen by itself."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    a, b = torch.randn(6, 9) * (torch.rand(6, 9) < 0.5), torch.randn(9, 4, requires_grad=True)
    f = pm.compile_einsum("C[m,n] = A[m,k] * B[k,n]", {"A": "m:C k:G2"}, lowering="inductor")
    given = {"A": pm.sparse(a, "m:C k:G2"), "B": b}
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        got = f(**given)
        torch.testing.assert_close(got, a @ b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1, "a graph is compiled once"
    (grad,) = torch.autograd.grad(got.sum(), b)
    torch.testing.assert_close(grad, a.t() @ torch.ones(6, 4))
    assert plan.LOWERINGS["inductor"].named
    step = spmm(3, 4)
    chosen = plan.PlacedStep(step.statement, step.bound, step.operands, "", None)
    costs = {name: cost for name, cost, _ in plan.step_options(chosen, plan.DEVICES["cpu"], "")}
    assert costs["inductor"] == float("inf") > costs["graph"]
    assert [name for name, *_ in plan.step_options(chosen, plan.DEVICES["cpu"], "inductor")] == ["inductor"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_on_a_gpu(dtype):
    for seed in range(60):
        made = fuzzed(seed).to(dtype)
        wanted = reference.run(made.bound, made.to(torch.float64).operands, torch.float64)
        there = {name: tensor.cuda() for name, tensor in made.operands.items()}
        for run in LOWERINGS.values():
            got = run(made.bound, there, dtype).double().cpu()
            scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
            torch.testing.assert_close(
                got, wanted, rtol=0, atol=20 * torch.finfo(dtype).eps * scale, msg=lambda m, s=seed: f"seed {s}: {m}"
            )


PIECES = {
    "d[p] = a[S[p],n] * b[G[p],n]": {"S": 5000, "G": 5000},
    "d[q,p] = a[S[p],n] * b[G[q,p],n]": {"S": 5000, "G": (3, 5000)},
    "d[p,m] = a[S[p],n] * b[G[p],n] * c[m]": {"S": 5000, "G": 5000},
    "d[p,p] = a[S[p],n] * b[G[p],n]": {"S": 1200, "G": 1200},
    "d[p] = a[S[p],n] * b[G[q],n] * v[p]": {"S": 5000, "G": 3},
}


@pytest.mark.parametrize("text", PIECES)
def test_long_indices_are_taken_in_pieces(text, monkeypatch):
    monkeypatch.setattr(graph, "CACHED", 2048)
    chance = torch.Generator().manual_seed(0)
    operands = {
        n: torch.randint(-1, 9, torch.Size([s] if isinstance(s, int) else s), generator=chance)
        for n, s in PIECES[text].items()
    }
    for name, shape in {"a": (9, 4), "b": (9, 4), "c": (2,), "v": (5000,)}.items():
        if f"{name}[" in text:
            operands[name] = torch.randn(shape, dtype=torch.float64, generator=chance)
    bound = bind(parse(text), {n: t.shape for n, t in operands.items()})
    pieces = graph._piece(bound)
    assert (pieces is None) == ("p,p" in text)
    torch.testing.assert_close(graph.run(bound, operands, torch.float64), reference.run(bound, operands, torch.float64))
