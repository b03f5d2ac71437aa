"""Every dataflow by name, on every kind of convolution: results and gradients by the oracle, repeats, refusals."""

import copy
import pickle
from collections import Counter
from functools import lru_cache, partial

import cases
import oracle
import pytest
import torch
from cases import Case

import pumice as pm
from pumice.coords import MultiMap, Relation, kernel_map
from pumice.errors import DtypeError, OptionError
from pumice.lower import dataflow as lowered
from pumice.lower import maps, movement
from pumice.lower.dataflow import Pass
from pumice.lower.movement import Slots
from pumice.ops import DATAFLOWS, Dataflow, Dataflows, Epilogue, Grouping, conv_features
from pumice.schedule.dataflow import GROUPINGS, PASSES, chosen, skipping, split_dataflow
from pumice.testing import assert_close, random_tensor

CASES = [
    Case("submanifold k3", (3, 3, 3), channels=(4, 3)),
    Case("strided k2s2", (2, 2, 2), stride=(2, 2, 2), bias=False),
    Case("support k3s2", (3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1), voxels=10),
    Case("transposed", (2, 2, 2), "transposed", stride=(2, 2, 2), voxels=10),
    Case("inverse", (3, 3, 3), "inverse", stride=(2, 2, 2), voxels=8),
    Case("groups", (3, 3), groups=2, channels=(4, 6)),
    Case("depthwise", (3, 3), groups=3, channels=(3, 3)),
    Case("1 channel", (3, 3, 3), channels=(1, 1)),
    Case("D=2, 1 tap", (1, 1)),
    Case("D=1, 2 taps", (2,)),
    Case("few neighbours", (3, 3, 3), low=-300, high=300, voxels=5),
]
LIBRARY = [name for name, flow in DATAFLOWS.items() if flow.grouping is not None or flow.movement == "explicit"]
FEW = ["explicit-gemm", *(f"gather-gemm-scatter-{how}-adaptive" for how in ("vectorised", "fused", "locality-aware"))]
FEW += ["fetch-on-demand", "fetch-on-demand-deterministic", "implicit-gemm-split2", "implicit-gemm-table"]
FEW += ["implicit-gemm-table-split-k"]
"""One of each engine."""


@lru_cache
def wanted(case: Case):
    """Result, the gradient that it is given, and those of x and w, by the oracle."""
    ops = cases.operands(case)
    outs = cases.outputs_of(case, ops.coords)
    pairs = cases.pairs_of(case, ops.coords, outs)
    x, w = cases.array(ops.feats), cases.flat(ops.weight)
    y = oracle.conv(pairs, len(outs), x, w, None if ops.bias is None else cases.array(ops.bias), case.groups)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dx, dw, _ = oracle.conv_grads(pairs, x, w, cases.array(dy), case.groups)
    return y, dy, dx, dw.reshape(ops.weight.shape)


def layer(dtype=torch.float64, channels=(4, 5), kernel=3, stride=1):
    """Features, weight, the map and how many outputs there are."""
    x = random_tensor(40, channels[0], 3, dtype=dtype)
    found, _ = kernel_map(x.geometry, Relation.of(3, kernel, stride=stride))
    chance = torch.Generator().manual_seed(2)
    w = torch.randn(channels[1], kernel**3, channels[0], generator=chance, dtype=torch.float64)
    return x.feats, w.to(dtype), found, found.num_outputs


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", DATAFLOWS)
def test_every_dataflow_is_the_convolution(name, case, device):
    """Inference and training; what is said to repeat is the same bit for bit in the second call."""
    y, dy, dx, dw = wanted(case)
    ops = cases.operands(case, device=device)
    with torch.no_grad():
        cases.assert_close(cases.run(case, ops, name).feats, y, torch.float64, "inference")
    found = []
    for _ in range(2):
        result = cases.run(case, ops, name).feats
        found.append((result, *torch.autograd.grad(result, (ops.feats, ops.weight), dy.to(device))))
    for pass_, once, again, want in zip(PASSES, *found, (y, dx, dw), strict=True):
        cases.assert_close(once.detach(), want, torch.float64, pass_)
        assert torch.equal(once, again) or (device != "cpu" and pass_ not in DATAFLOWS[name].repeats)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_planner_picks_goes_with_others(case, device):
    """A pass that is left to the planner beside named ones, and all of them."""
    y, dy, dx, dw = wanted(case)
    ops = cases.operands(case, device=device)
    named = "implicit-gemm-sorted"
    for asked in (Dataflows(named, "planned", "planned"), Dataflows("planned", named, named), "planned"):
        result = cases.run(case, ops, asked).feats
        found = (result.detach(), *torch.autograd.grad(result, (ops.feats, ops.weight), dy.to(device)))
        for pass_, once, want in zip(PASSES, found, (y, dx, dw), strict=True):
            cases.assert_close(once, want, torch.float64, pass_)
        with torch.no_grad():
            cases.assert_close(cases.run(case, ops, asked).feats, y, torch.float64, "inference")


@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 27, 31])
def test_any_number_of_splits(count, device):
    """By a name made by one rule, a layer's three passes; no more ranges than there are kernel offsets."""
    flow = split_dataflow(count)
    assert chosen(flow.name) == (flow, flow, flow) and flow.splits == count
    x, w, found, rows = layer()
    x, w = (t.to(device).requires_grad_() for t in (x, w))
    found = (
        found if device == "cpu" else kernel_map(random_tensor(40, 4, 3, device=device).geometry, Relation.of(3, 3))[0]
    )
    y, want = (conv_features(x, w, found, rows, dataflow=how) for how in (flow.name, "explicit-gemm"))
    for once, again in zip(_gradients(y, x, w), _gradients(want, x, w), strict=True):
        assert_close(once.detach(), again.detach())
    form = {0: "unsorted", 1: "compacted"}.get(count, f"split{min(count, 27)}")
    assert [lowered.forms(Pass(name, flow, found, 1)) for name in PASSES] == [(form + end,) for end in ("", "_t", "_w")]
    assert len(maps.FORMS[form].arrays(found)) == max(1, min(count, 27))


def _gradients(y, x, w):
    return y, *torch.autograd.grad(y.square().sum(), (x, w))


@pytest.mark.parametrize("name", ["split", "split1", "split0", "split02", "split-2", "split2.5", "splits", "parallel"])
def test_a_number_of_splits_that_is_none(name):
    with pytest.raises(OptionError, match=f"dataflow 'implicit-gemm-{name}' is unknown; .* implicit-gemm-splitN for"):
        chosen(f"implicit-gemm-{name}")
    with pytest.raises(KeyError):
        maps.FORMS[name]
    with pytest.raises(OptionError, match="at least 0, found -1"):
        split_dataflow(-1)


def test_weights_over_tiles_are_those_of_an_offset_in_a_row():
    """Weight-stationary: every tile of an offset, in the order of tiles, with the pairs of the map."""
    _, _, found, _ = layer()
    pairs = {(int(o), int(k)): int(found.rows()[o, k]) for o, k in (found.rows() >= 0).nonzero()}
    for base in ("unsorted", "compacted", "split2", "split5", "online"):
        (part,) = maps.FORMS[f"{base}_w"].arrays(found)
        assert part["k"].tolist() == sorted(part["k"].tolist())
        if base == "online":
            rows = part["rows"][part["tile"].long()]
            part = {"o": rows, "k": part["k"], "i": found.rows()[rows.clamp(min=0).long(), part["k"][:, None].long()]}
            part["i"][rows < 0] = -1
            part["o"] = torch.where(part["i"] < 0, -1, part["o"])
        assert torch.equal(part["o"] < 0, part["i"] < 0) and (part["i"] >= 0).any(1).all()
        taps = part["k"][:, None].expand_as(part["i"])[part["i"] >= 0]
        met = zip(part["o"][part["i"] >= 0].tolist(), taps.tolist(), strict=True)
        assert dict(zip(met, part["i"][part["i"] >= 0].tolist(), strict=True)) == pairs
        assert len(taps) == len(pairs)


def test_weights_over_tiles_are_added_by_as_many_programs_as_fill_a_gpu():
    assert lowered._entries_at_once((128, 27, 128), 100) == 32 == lowered._entries_at_once((128, 27, 128), 6500)
    assert (
        lowered._entries_at_once((256, 27, 384), 3200) == 128 and lowered._entries_at_once((1024, 27, 1024), 64) == 64
    )


@pytest.mark.parametrize("name", DATAFLOWS)
@pytest.mark.parametrize("pass_", PASSES)
def test_a_skipped_pass_builds_its_layout_and_runs_nothing(name, pass_, monkeypatch):
    x, w, found, rows = layer()
    y = torch.ones(rows, len(w), dtype=x.dtype)
    flow = getattr(skipping(name, [p for p in PASSES if p != pass_]), pass_)
    given = {"forward": (x, w), "dgrad": (y, w), "wgrad": (x, y)}[pass_]
    shape = Pass(pass_, DATAFLOWS[name], found.without_storages(), 1)(given).shape
    once = found.without_storages()
    monkeypatch.setattr(lowered, "ENGINES", dict.fromkeys(lowered.ENGINES, lambda *given: pytest.fail("it ran")))
    skipped = Pass(pass_, flow, once, 1)
    assert torch.equal(skipped(given), torch.zeros(shape, dtype=x.dtype))
    assert once.cached_keys() or once.transpose().cached_keys(), "its layout was not built"
    then = Epilogue(scale=torch.ones(shape[1], dtype=x.dtype), shift=torch.ones(shape[1], dtype=x.dtype))
    if pass_ == "forward":
        assert torch.equal(skipped(given, then), torch.ones(shape, dtype=x.dtype))


@pytest.mark.parametrize("name", DATAFLOWS)
def test_without_voxels(name):
    x = pm.SparseTensor(torch.zeros(0, 2, requires_grad=True), torch.zeros(0, 3, dtype=torch.int32), dim=2)
    w = torch.randn(3, 3, 3, 2, requires_grad=True)
    for stride in (1, 2):
        y = pm.ops.conv(x, w, stride=stride, dataflow=name).feats
        assert y.shape == (0, 3)
        dx, dw = torch.autograd.grad(y.sum(), (x.feats, w))
        assert dx.shape == (0, 2) and torch.equal(dw, torch.zeros_like(w))


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("groups", [1, 2])
def test_derivatives_of_any_order(name, groups):
    x, w, found, rows = layer(kernel=2, stride=2)
    x, w = x[:, : 2 * groups].clone().requires_grad_(), w[:4, :, :2].clone().requires_grad_()

    def run(x, w):
        return conv_features(x, w, found, rows, groups, dataflow=name)

    assert torch.autograd.gradcheck(run, (x, w), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, w), fast_mode=True)


def test_each_pass_has_its_own(monkeypatch):
    """dgrad and wgrad are the forward one's where they are not named."""
    ran: list[tuple[str, str]] = []

    def told(engine, asked, *more):
        ran.append((asked.name, asked.flow.name))
        return engine(asked, *more)

    spies = {name: partial(told, engine) for name, engine in lowered.ENGINES.items()}
    monkeypatch.setattr(lowered, "ENGINES", spies)
    x, w, found, rows = layer()
    x, w = x.clone().requires_grad_(), w.requires_grad_()
    names = "explicit-gemm", "implicit-gemm-table", "gather-gemm-scatter-fused-symmetric"
    for asked, ways in (
        (Dataflows(*names), names),
        (Dataflows(names[0], wgrad=names[2]), (names[0], names[0], names[2])),
    ):
        ran.clear()
        conv_features(x, w, found, rows, dataflow=asked).sum().backward()
        assert ran == list(zip(PASSES, ways, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FEW)
def test_low_precision(name, dtype, device):
    x, w, found, rows = layer(dtype)
    x, w, found = x.to(device), w.to(device), found.to(device)
    x, w = x.clone().requires_grad_(), w.requires_grad_()
    y = conv_features(x, w, found, rows, dataflow=name)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    want = conv_features(*exact, found, rows)
    dy = torch.ones_like(y)
    found_, wanted_ = torch.autograd.grad(y, (x, w), dy), torch.autograd.grad(want, exact, dy.double())
    for a, b in zip((y.detach(), *found_), (want.detach(), *wanted_), strict=True):
        assert a.dtype == dtype
        assert_close(a, b, scale=float(b.square().mean().sqrt()))


@pytest.mark.parametrize("name", FEW)
def test_epilogues_and_autocast(name):
    x, w, found, rows = layer(torch.float32)
    chance = torch.Generator().manual_seed(5)
    held = [torch.randn(size, generator=chance) for size in ((5,), (5,), (rows, 5))]
    then = Epilogue(*held, "silu", torch.float16)
    want = torch.nn.functional.silu(conv_features(x, w, found, rows) * held[0] + held[1] + held[2])
    for grads in (False, True):
        got = conv_features(x, w.requires_grad_(grads), found, rows, 1, then, name)
        assert got.dtype == torch.float16
        assert_close(got.detach(), want)
    given = random_tensor(40, 4, 3, dtype=torch.float32)
    conv = pm.nn.Conv3d(4, 5, 3, dataflow=name)
    with torch.autocast("cpu", torch.bfloat16):
        y = conv(given).feats
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and conv.weight.grad.dtype == torch.float32
    plain = copy.deepcopy(conv)
    plain.dataflow = None
    assert_close(y.detach(), plain(given).feats.detach())


@pytest.mark.parametrize("name", DATAFLOWS)
def test_eight_bits(name):
    x, w, found, rows = layer(torch.float32)
    x, w = (8 * x).round().to(torch.int8), (8 * w).round().to(torch.int8)
    if name in LIBRARY:
        with pytest.raises(DtypeError, match="do not support torch.int8"):
            conv_features(x, w, found, rows, dataflow=name)
    else:
        assert torch.equal(conv_features(x, w, found, rows, dataflow=name), conv_features(x, w, found, rows))
        x, w = (t.float().to(torch.float8_e4m3fn).requires_grad_() for t in (x, w))
        with pytest.raises(DtypeError, match="inference"):
            conv_features(x, w, found, rows, dataflow=name)


@pytest.mark.parametrize("name", DATAFLOWS)
def test_an_infinity_stays_where_it_is_met(name):
    """What fills up groups of pairs is the first row, and is met by nothing."""
    x, w, found, rows = layer()
    x = x.clone()
    x[0] = torch.inf
    x, w = x.requires_grad_(), w.requires_grad_()
    y, want = (conv_features(x, w, found, rows, dataflow=how) for how in (name, None))
    assert torch.equal(y.isfinite(), want.isfinite())
    dy = torch.ones_like(y)
    for a, b in zip(torch.autograd.grad(y, (x, w), dy), torch.autograd.grad(want, (x, w), dy), strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())


GATHERING = [name for name, flow in DATAFLOWS.items() if flow.grouping is not None]


def moves(monkeypatch):
    """A count, kept up to date, of the slots whose rows are gathered and scattered."""
    found: Counter[str] = Counter()

    def counted(name, run, *given):
        (slots,) = (one for one in given if isinstance(one, Slots))
        found[name] += int((slots.rows < slots.count).sum())
        return run(*given)

    monkeypatch.setattr(movement, "_by_kernels", lambda x: False)
    for name, way in (("_gather_torch", "gather"), ("_scatter_torch", "scatter"), ("_sums_torch", "scatter")):
        monkeypatch.setattr(movement, name, partial(counted, way, getattr(movement, name)))
    return found


@pytest.mark.parametrize("name", GATHERING)
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (1, 1), (3, 2)])
def test_the_middle_offset_is_not_moved(name, kernel, stride, monkeypatch, device):
    """Every pass moves the pairs of the other offsets once on either side, and the middle one of a submanifold map not
    at all."""
    x, w, found, rows = layer(kernel=kernel, stride=stride)
    x, w, found = x.to(device), w.to(device), found.to(device)
    y = torch.ones(rows, 5, dtype=x.dtype, device=device)
    pairs = len(found.pairs().inputs) - (rows if stride == 1 else 0)
    counts = moves(monkeypatch)
    for pass_, given, want in (
        ("forward", (x, w), (pairs, pairs)),
        ("dgrad", (y, w), (pairs, pairs)),
        ("wgrad", (x, y), (2 * pairs, 0)),
    ):
        counts.clear()
        lowered.Pass(pass_, DATAFLOWS[name], found, 1)(given)
        assert (counts["gather"], counts["scatter"]) == want
    assert lowered.layout(found, DATAFLOWS[name].grouping).middle == (kernel**3 // 2 if stride == 1 else None)


@pytest.mark.parametrize("kind", GROUPINGS)
def test_a_relation_of_every_node_with_itself_is_not_moved(kind):
    """Among the relations of a graph, wherever it stands; one that exchanges nodes is."""
    ends, exchanged = torch.arange(6), torch.tensor([1, 0, 2, 3, 4, 5])
    taps = torch.arange(3).repeat_interleave(6)
    found, _ = MultiMap.of((torch.cat([exchanged, ends, ends[:0], exchanged]), ends.repeat(3)), taps, (6, 6, 3))
    how = lowered.layout(found, Grouping(kind))
    assert how.middle == 1 and sorted(tap for block in how.blocks for tap in block.taps) == [0, 2]


def test_rows_of_slots():
    """Sorted by kernel offset; padding has no row; the slots of a row ascend."""
    _, _, found, rows = layer()
    how = lowered.layout(found, Grouping("adaptive", epsilon=1.0))
    (block,) = how.blocks
    longest, counts = (block.last - block.first) // 26, found.pairs().sizes
    assert longest == max(int(n) for k, n in enumerate(counts) if k != 13)
    for place, tap in enumerate(block.taps):
        at = slice(place * longest, place * longest + int(counts[tap]))
        have = found.rows()[:, tap] >= 0
        assert torch.equal(how.outputs.rows[at].long(), have.nonzero()[:, 0])
        assert torch.equal(how.inputs.rows[at], found.rows()[have, tap])
    padding = (how.inputs.rows == found.num_inputs).nonzero()[:, 0]
    assert (
        torch.equal(padding, how.outputs.padding)
        and how.inputs.padded
        and len(padding) == 26 * longest - (int(counts.sum()) - rows)
    )
    for side in (how.inputs, how.outputs):
        slots, starts = side.lists
        for row in range(rows):
            want = (side.rows == row).nonzero()[:, 0]
            assert torch.equal(slots[starts[row] : starts[row + 1]].long(), want)


def test_columns_in_slices(monkeypatch):
    x, w, found, rows = layer()
    x, w = x.clone().requires_grad_(), w.requires_grad_()
    ways = []
    for room in (1 << 28, 5000):
        monkeypatch.setattr(lowered, "_COLUMNS", room)
        y = conv_features(x, w, found, rows, dataflow="explicit-gemm")
        ways.append((y, *torch.autograd.grad(y.square().sum(), (x, w))))
    for a, b in zip(*ways, strict=True):
        assert_close(a.detach(), b.detach())


@pytest.mark.parametrize(
    "grouping", [Grouping("adaptive", epsilon=1.0), Grouping("adaptive", size=0), Grouping("fixed")]
)
def test_a_grouping_of_ones_own(grouping):
    flow = Dataflow("mine", "locality-aware", "pairs", "a test", grouping=grouping)
    x, w, found, rows = layer()
    assert_close(conv_features(x, w, found, rows, dataflow=flow), conv_features(x, w, found, rows))


MODULES = {
    "Conv2d": lambda layer, x, fine: layer(x),
    "ConvTranspose2d": lambda layer, x, fine: layer(x),
    "GenerativeConvTranspose2d": lambda layer, x, fine: layer(x),
    "InverseConv2d": lambda layer, x, fine: layer(x, fine),
}


@pytest.mark.parametrize("module", MODULES)
def test_modules_take_one(module):
    torch.manual_seed(0)
    fine = random_tensor(30, 2, 2, dtype=torch.float64)
    x = pm.ops.conv(fine, torch.randn(4, 3, 3, 2, dtype=torch.float64), stride=2)
    made = getattr(pm.nn, module)(4, 6, 3, stride=2, dataflow="explicit-gemm").double()
    assert "dataflow=explicit-gemm" in repr(made)
    got = MODULES[module](pickle.loads(pickle.dumps(made)), x, fine)
    made.dataflow = None
    want = MODULES[module](made, x, fine)
    assert torch.equal(got.coords, want.coords)
    assert_close(got.feats.detach(), want.feats.detach())


def test_products_of_an_output_are_added_by_tap(monkeypatch):
    """Whatever the order of groups is."""
    monkeypatch.setattr(lowered.maps, "group_of", lambda found: 4)
    found, _ = kernel_map(random_tensor(60, 1, 3).geometry, Relation.of(3, 3))
    taps, inputs, places, outputs = lowered._pairs_in_order(found)
    rows, order = found.rows(), places.flatten().argsort()[-len(outputs) :]
    of = taps[:, None].expand_as(places).flatten()[order]
    assert torch.equal(torch.stack([outputs.long(), of.long()], 1), (rows >= 0).nonzero())
    assert torch.equal(inputs.flatten()[order], rows[outputs.long(), of.long()])


@pytest.mark.parametrize("parts", [1, 2, 4, 9, 27])
@pytest.mark.parametrize("groups", [1, 2])
def test_split_k_of_any_number_of_parts(monkeypatch, parts, groups):
    """Parts of as many offsets, the last filled up; their sums are kept in float32 at least."""
    monkeypatch.setattr(lowered, "table_parts", lambda rows, columns, volume: parts)
    made, plans = [], lowered._plans_in_parts
    monkeypatch.setattr(lowered, "_plans_in_parts", lambda *given: made.append(plans(*given)) or made[-1])
    x, w, found, rows = layer(channels=(4, 6))
    x, w = x.clone().requires_grad_(), w[:, :, : 4 // groups].clone().requires_grad_()
    y, want = (conv_features(x, w, found, rows, groups, dataflow=how) for how in ("implicit-gemm-table-split-k", None))
    assert_close(y.detach(), want.detach())
    grads = [torch.autograd.grad(t, (x, w), torch.ones_like(t)) for t in (y, want)]
    for got, right in zip(*grads, strict=True):
        assert_close(got, right)
    shapes = [products.shape for products, _ in made]
    assert [shape[:2] for shape in shapes] == [(rows, parts)] * 2 and {p.dtype for p, _ in made} == {torch.float64}
    half = [t.detach().half() for t in (x, w)]
    assert conv_features(*half, found, rows, groups, dataflow="implicit-gemm-table-split-k").dtype == torch.float16
    assert [made[-1][number].dtype for number in (0, 1)] == [torch.float32, torch.float16]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_maps_are_found_without_arithmetic():
    """pm.prepare runs a model on meta tensors, in whatever dataflows its layers have."""
    net, x = pm.nn.Conv3d(4, 6, 3, stride=2, dataflow="implicit-gemm-unsorted"), random_tensor(40, 4, 3)
    pm.prepare(net, x)
    assert len(x.geometry.maps) == 1
    conv_features(x.feats.to("meta"), torch.ones(5, 27, 4, device="meta"), *layer()[2:], dataflow="explicit-gemm")
    with pytest.raises(OptionError, match="torch.compile.*the automatic dataflow does.*Tuning.remove"):
        torch.compile(net, backend="eager")(x)


def test_what_is_refused():
    x, w, found, rows = layer()
    with pytest.raises(OptionError, match="'gemm' is unknown; there are explicit-gemm, .*implicit-gemm-split-k"):
        conv_features(x, w, found, rows, dataflow="gemm")
    with pytest.raises(OptionError, match="'gemm' is unknown"):
        Dataflows("explicit-gemm", wgrad="gemm")
    with pytest.raises(OptionError, match="'gemm' is unknown"):
        pm.nn.Conv3d(2, 2, 3, dataflow="gemm")
    with pytest.raises(OptionError, match="found list"):
        conv_features(x, w, found, rows, dataflow=["explicit-gemm"])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="movement 'on foot' is unknown"):
        conv_features(x, w, found, rows, dataflow=Dataflow("mine", "on foot", "pairs", "a test"))
    with pytest.raises(OptionError, match="torch.func"):
        torch.func.grad(lambda x: conv_features(x, w, found, rows, dataflow="explicit-gemm").sum())(x)


def test_what_adds_in_any_order_is_refused_where_one_is_asked_for(monkeypatch):
    """On a GPU; on a CPU all repeat."""
    _, _, found, _ = layer()
    on_gpu = copy.copy(found)
    monkeypatch.setattr(pm.lower.plan, "deterministic", lambda: True)
    for flow in DATAFLOWS.values():
        for pass_ in PASSES:
            lowered.check(lowered.Pass(pass_, flow, found, 1))
    monkeypatch.setattr(type(found), "device", property(lambda _: torch.device("cuda")))
    for flow in DATAFLOWS.values():
        for pass_ in PASSES:
            if pass_ in flow.repeats:
                lowered.check(lowered.Pass(pass_, flow, on_gpu, 1))
            else:
                with pytest.raises(OptionError, match=f"the {pass_} pass of dataflow {flow.name} is not deterministic"):
                    lowered.check(lowered.Pass(pass_, flow, on_gpu, 1))
