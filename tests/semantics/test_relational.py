"""Relational graph convolutions against loops over edges: every aggregation, order, form of the weight and of nodes."""

import copy

import pytest
import torch

import pumice as pm
from pumice.errors import CoordinateError, DtypeError, OptionError, ShapeError
from pumice.nn import RelationalConv
from pumice.ops import relational, relational_op, relational_steps
from pumice.ops.relational_steps import ORDERS

NODES, RELATIONS, EDGES = 12, 5, 60


def made(sources=NODES, targets=NODES, seed=0):
    """Edges with parallel ones, a relation without any, and a node without any."""
    chance = torch.Generator().manual_seed(seed)
    ends = [torch.randint(0, n, (EDGES,), generator=chance) for n in (sources, targets - 1)]
    kinds = torch.randint(0, RELATIONS, (EDGES,), generator=chance)
    kinds[kinds == 2] = 0
    ends[0][:3], ends[1][:3], kinds[:3] = 4, 5, 1
    return torch.stack(ends), kinds


def blocks(weight):
    return torch.stack([torch.block_diag(*own) for own in weight]) if weight.ndim == 4 else weight


def looped(x, weight, edges, kinds, targets, aggr, scale=None):
    """Within each relation, then summed over relations; a max is that of inputs, or of rows of one-hot nodes."""
    weight, onehot = blocks(weight), not x.is_floating_point()
    rows = []
    for node in range(targets):
        total = weight.new_zeros(weight.shape[2])
        for kind in range(len(weight)):
            own = [e for e in range(len(kinds)) if edges[1, e] == node and kinds[e] == kind]
            if not own:
                continue
            inputs = [weight[kind, x[edges[0, e]]] if onehot else x[edges[0, e]] for e in own]
            met = torch.stack([row * (1 if scale is None else scale[e]) for row, e in zip(inputs, own, strict=True)])
            joined = {"mean": met.mean(0), "sum": met.sum(0), "max": met.amax(0)}[aggr]
            total = total + (joined if onehot else joined @ weight[kind])
        rows.append(total)
    return torch.stack(rows)


def normal(*shape, seed=7, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


CASES = [(aggr, order, weighted) for aggr in ("mean", "sum", "max") for order in (None, *ORDERS) for weighted in (0, 1)]
CASES = [
    (a, o, w)
    for a, o, w in CASES
    if not (o == "direct" and (a != "sum" or w)) and not (o == "transform" and a == "max")
]


@pytest.fixture(params=["statements", "joins"])
def joined(request, monkeypatch):
    """Rows are joined by statements, or as on a GPU, by lower.joins, here in plain torch."""
    if request.param == "joins":
        kernels = relational_steps.autograd.only_reverse_mode_active
        for module in (relational, relational_steps):
            monkeypatch.setattr(module, "by_kernels", lambda x: kernels((x,)))


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize(("aggr", "order", "weighted"), CASES)
@pytest.mark.parametrize("form", ["whole", "blocks"])
def test_every_order(aggr, order, weighted, form):
    edges, kinds = made(NODES + 2)
    graph = pm.Graph(edges, kinds, num_nodes=(NODES + 2, NODES), num_relations=RELATIONS)
    x = normal(NODES + 2, 6).requires_grad_()
    weight = normal(RELATIONS, 6, 4) if form == "whole" else normal(RELATIONS, 2, 3, 2)
    scale = normal(EDGES).requires_grad_() if weighted else None
    leaves = [x, weight.requires_grad_(), *([scale] if weighted else [])]
    got = pm.ops.relational_conv(x, weight, graph, aggr=aggr, edge_weight=scale, order=order)
    wanted = looped(x, weight, edges, kinds, NODES, aggr, scale)
    torch.testing.assert_close(got, wanted)
    up = normal(*wanted.shape)
    for ours, theirs in zip(*(torch.autograd.grad(y, leaves, up) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(pm.ops.relational_conv(x, weight, graph, aggr=aggr, edge_weight=scale), wanted)


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("aggr", ["mean", "sum", "max"])
@pytest.mark.parametrize("weighted", [False, True])
def test_one_hot_nodes(aggr, weighted):
    edges, kinds = made()
    layer = RelationalConv(NODES, 4, RELATIONS, aggr=aggr).double()
    scale = normal(EDGES) if weighted else None
    for x in (None, torch.arange(NODES).flip(0)):
        numbers = torch.arange(NODES) if x is None else x
        got = layer(x, edges, kinds, scale)
        wanted = looped(numbers, layer.weight, edges, kinds, NODES, aggr, scale) + layer.root[numbers] + layer.bias
        torch.testing.assert_close(got, wanted)
        up = normal(*wanted.shape)
        grads = (torch.autograd.grad(y, (layer.weight, layer.root, layer.bias), up) for y in (got, wanted))
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("more", [{}, {"num_bases": 3}, {"num_blocks": 2}, {"root_weight": False, "bias": False}])
def test_layers(more):
    edges, kinds = made()
    layer = RelationalConv(6, 4, RELATIONS, **more).double()
    x = normal(NODES, 6).requires_grad_()
    weight = torch.einsum("kb,bio->kio", layer.comp, layer.weight) if "num_bases" in more else layer.weight
    wanted = looped(x, weight, edges, kinds, NODES, "mean")
    if layer.root is not None:
        wanted = wanted + x @ layer.root + layer.bias
    got = layer(x, edges, kinds)
    torch.testing.assert_close(got, wanted)
    leaves = [x, *layer.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)
    graph = pm.Graph(edges, kinds, num_nodes=NODES, num_relations=RELATIONS)
    assert torch.equal(layer(x, graph), got)
    assert torch.equal(copy.deepcopy(layer)(x, graph.to("cpu")), got)


@pytest.mark.usefixtures("joined")
def test_second_derivatives():
    edges, kinds = made()
    graph = pm.Graph(edges, kinds, num_nodes=NODES, num_relations=RELATIONS)
    for aggr, order in (("sum", "direct"), ("sum", "aggregate"), ("mean", "transform"), ("max", "aggregate")):

        def run(x, w, aggr=aggr, order=order):
            return pm.ops.relational_conv(x, w, graph, aggr=aggr, order=order)

        given = normal(NODES, 2).requires_grad_(), normal(RELATIONS, 2, 3).requires_grad_()
        assert torch.autograd.gradcheck(run, given) and torch.autograd.gradgradcheck(run, given)


def test_bipartite_and_types():
    edges, kinds = made(9, 7)
    layer = RelationalConv((6, 3), 4, RELATIONS)
    sources, targets = normal(9, 6, dtype=torch.float32), normal(7, 3, dtype=torch.float32)
    wanted = looped(sources, layer.weight, edges, kinds, 7, "mean") + targets @ layer.root + layer.bias
    torch.testing.assert_close(layer((sources, targets), edges, kinds), wanted)
    own = RelationalConv(6, 4, 2)
    x = {"author": normal(5, 6, dtype=torch.float32), "paper": normal(4, 6, seed=8, dtype=torch.float32)}
    names = {("author", "writes", "paper"): torch.tensor([[0, 4, 2], [1, 1, 3]])}
    names[("paper", "cites", "paper")] = torch.tensor([[0, 1], [2, 2]])
    got = own(x, names)
    flat = torch.cat([*x.values()])
    whole = own(flat, torch.tensor([[0, 4, 2, 5, 6], [6, 6, 8, 7, 7]]), torch.tensor([0, 0, 0, 1, 1]))
    torch.testing.assert_close(torch.cat([got["author"], got["paper"]]), whole)
    prepared = pm.Graph.of_types(names, {"author": 5, "paper": 4})
    torch.testing.assert_close(own(x, prepared)["paper"], got["paper"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("aggr", ["mean", "sum", "max"])
def test_half_precision(dtype, aggr):
    edges, kinds = made()
    layer = RelationalConv(6, 4, RELATIONS, aggr=aggr)
    x = normal(NODES, 6, dtype=torch.float32)
    wanted, near = layer(x, edges, kinds), {"rtol": 0.03, "atol": 0.06}
    with torch.autocast("cpu", dtype):
        got = layer(x, edges, kinds)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), wanted, **near)
    halves = layer.to(dtype)(x.to(dtype), edges, kinds)
    assert halves.dtype == dtype
    torch.testing.assert_close(halves.float(), wanted, **near)


def test_state_dicts_have_the_names_and_shapes_of_pyg():
    def shapes(**more):
        return {name: tuple(x.shape) for name, x in RelationalConv(6, 4, 5, **more).state_dict().items()}

    assert shapes() == {"weight": (5, 6, 4), "root": (6, 4), "bias": (4,)}
    assert shapes(num_bases=3) == {"weight": (3, 6, 4), "comp": (5, 3), "root": (6, 4), "bias": (4,)}
    assert shapes(num_blocks=2) == {"weight": (5, 2, 3, 2), "root": (6, 4), "bias": (4,)}


@pytest.mark.parametrize("name", ["RGCNConv", "FastRGCNConv"])
@pytest.mark.parametrize("more", [{}, {"num_bases": 3}, {"num_blocks": 2}, {"aggr": "sum"}, {"aggr": "max"}])
def test_outputs_of_pyg(name, more):
    peer = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")
    if name == "FastRGCNConv" and more.get("aggr") == "max":
        pytest.skip("its maximum is over all relations")
    edges, kinds = made()
    theirs, ours = getattr(peer, name)(6, 4, RELATIONS, **more), RelationalConv(6, 4, RELATIONS, **more)
    ours.load_state_dict(theirs.state_dict())
    x = normal(NODES, 6, dtype=torch.float32)
    torch.testing.assert_close(ours(x, edges, kinds), theirs(x, edges, kinds))


def test_a_network_learns():
    edges, kinds = made()
    torch.manual_seed(0)
    net = pm.models.RGCN(NODES, 8, 3, RELATIONS, num_bases=2)
    graph = pm.Graph(edges, kinds, num_nodes=NODES, num_relations=RELATIONS)
    labels = torch.arange(NODES) % 3
    steps = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(60):
        steps.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(None, graph), labels)
        loss.backward()
        steps.step()
    assert (net(None, graph).argmax(1) == labels).all()


def test_the_graph_of_edges_is_made_once():
    edges, kinds = made()
    layer = RelationalConv(6, 4, RELATIONS)
    x = normal(NODES, 6, dtype=torch.float32)
    first, one = layer(x, edges, kinds), layer._graph(x, x, edges, kinds)
    assert layer._graph(x, x, edges, kinds) is one
    edges[:] = edges.flip(0).clone()
    assert layer._graph(x, x, edges, kinds) is not one
    assert not torch.equal(layer(x, edges, kinds), first)


@pytest.mark.parametrize("aggr", ["mean", "sum", "max"])
@pytest.mark.parametrize("onehot", [False, True])
def test_compiled(aggr, onehot):
    edges, kinds = made()
    layer = RelationalConv(NODES, 4, RELATIONS, aggr=aggr)
    x = None if onehot else normal(NODES, NODES, dtype=torch.float32)
    graph = pm.Graph(edges, kinds, num_nodes=NODES, num_relations=RELATIONS).prepare()
    got = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, graph)
    wanted = layer(x, edges, kinds)
    torch.testing.assert_close(got, wanted)
    leaves = [*layer.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(y.sum(), leaves) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("aggr", "order"), [("mean", "aggregate"), ("sum", "transform"), ("max", None), ("mean", None)]
)
def test_compiled_as_one_operator(aggr, order, monkeypatch):
    """On a GPU a layer is an operator of compiled code, which takes a graph that is not prepared."""
    monkeypatch.setattr(relational_op, "has_kernels", lambda x: True)
    torch.compiler.reset()
    edges, kinds = made()
    graph = pm.Graph(edges, kinds, num_nodes=NODES, num_relations=RELATIONS)
    layer, x = RelationalConv(6, 4, RELATIONS, aggr=aggr).double(), normal(NODES, 6).requires_grad_()
    layer.order = order
    run = torch.compile(lambda x: layer(x.tanh(), graph).relu(), backend="aot_eager", fullgraph=True)
    leaves, wanted = [x, *layer.parameters()], layer(x.tanh(), graph).relu()
    torch.testing.assert_close(run(x), wanted)
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (run(x), wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)
    call = torch.ops.pumice.relational
    given = x.detach().requires_grad_(), layer.weight.detach().requires_grad_(), graph.number, aggr, order or ""
    torch.library.opcheck(call, given, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    with pytest.raises(OptionError, match="no graph"):
        call(x, layer.weight, -1, aggr, "")


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("order", ["aggregate", "transform"])
@pytest.mark.parametrize("more", [{}, {"bias": False}, {"num_bases": 2}, {"aggr": "sum"}])
def test_a_layer_is_differentiable(order, more):
    """In all of nodes, weights, root and bias, twice, and in some of them."""
    edges, kinds = made()
    graph, layer = (
        pm.Graph(edges, kinds, num_nodes=NODES, num_relations=RELATIONS),
        RelationalConv(3, 2, RELATIONS, **more),
    )
    layer.double().order = order
    names, x = [*dict(layer.named_parameters())], normal(NODES, 3).requires_grad_()

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, graph))

    given = (x, *layer.parameters())
    assert torch.autograd.gradcheck(run, given) and torch.autograd.gradgradcheck(run, given)
    wanted = torch.autograd.grad(layer(x, graph).square().sum(), given)
    for n, leaf in enumerate(given):
        some = [t if k == n else t.detach() for k, t in enumerate(given)]
        torch.testing.assert_close(torch.autograd.grad(run(*some).square().sum(), leaf)[0], wanted[n])
    assert torch.equal(layer(x, graph).sum().detach(), layer(x, graph).detach().sum())


@pytest.mark.usefixtures("joined")
def test_no_edges():
    graph = pm.Graph(torch.zeros(2, 0, dtype=torch.int64), num_nodes=3, num_relations=2)
    for aggr in ("mean", "sum", "max"):
        layer = RelationalConv(4, 5, 2, aggr=aggr)
        x = normal(3, 4, dtype=torch.float32).requires_grad_()
        torch.testing.assert_close(layer(x, graph), x @ layer.root)
        layer(x, graph).sum().backward()


def test_what_is_refused():
    edges, kinds = made()
    graph = pm.Graph(edges, kinds, num_nodes=NODES)
    assert repr(graph) == "Graph(12 -> 12 nodes, 60 edges, 5 relations)"
    x, weight = normal(NODES, 6), normal(RELATIONS, 6, 4)
    conv = pm.ops.relational_conv
    for error, call in (
        (CoordinateError, lambda: pm.Graph(edges, kinds, num_nodes=3)),
        (CoordinateError, lambda: pm.Graph(edges, kinds, num_relations=2)),
        (CoordinateError, lambda: pm.Graph(edges - 1, kinds)),
        (ShapeError, lambda: pm.Graph(edges[0], kinds)),
        (ShapeError, lambda: pm.Graph(edges, kinds[:4])),
        (DtypeError, lambda: pm.Graph(edges.float(), kinds)),
        (OptionError, lambda: pm.Graph.of_types({("a", "b", "c"): edges}, {"a": 20})),
        (CoordinateError, lambda: pm.Graph.of_types({("a", "b", "a"): edges}, {"a": 4})),
        (OptionError, lambda: conv(x, weight, graph, aggr="median")),
        (OptionError, lambda: conv(x, weight, graph, order="direct")),
        (OptionError, lambda: conv(x, weight, graph, aggr="max", order="transform")),
        (ShapeError, lambda: conv(x[:3], weight, graph)),
        (ShapeError, lambda: conv(x, weight[:2], graph)),
        (ShapeError, lambda: conv(x, weight, graph, edge_weight=x[0])),
        (DtypeError, lambda: conv(x.float(), weight, graph)),
        (DtypeError, lambda: conv(x, weight, edges)),
        (CoordinateError, lambda: conv(torch.full((NODES,), 6), weight, graph)),
        (OptionError, lambda: RelationalConv(6, 4, 5, num_bases=2, num_blocks=2)),
        (OptionError, lambda: RelationalConv(6, 4, 5, aggr="add")),
        (ShapeError, lambda: RelationalConv(6, 4, 5, num_blocks=4)),
    ):
        with pytest.raises(error):
            call()
