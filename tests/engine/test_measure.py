"""How networks are measured: events by part and by pass, the clocks, and that nothing is left behind."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pumice as pm
from pumice.engine.measure import Event, PassTiming, measure, median_parts, on_device, part_of, passes, profiled
from pumice.engine.subject import subject, sum_of_squares_loss, undisturbed
from pumice.errors import DeviceError, DtypeError, OptionError
from pumice.testing import random_tensor

measuring = importlib.import_module("pumice.engine.measure")
MARK = "at::cuda::(anonymous namespace)::spin_kernel(long)"
KERNELS = {
    "neighbours": "map",
    "search_neighbours": "map",
    "clear": "map",
    "pair_counts_0d1d2d": "sort",
    "place_digits": "sort",
    "rank_rows": "sort",
    "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<...>": "sort",
    "_dot_fp16": "conv",
    "_mul_fp32": "conv",
    "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x64": "product",
    "nvjet_hsh_128x128_64x6_2x1_v_bz_TNT": "product",
    "void at::native::indexSelectLargeIndex<c10::Half, long>": "gather",
    "void at::native::vectorized_gather_kernel<16, long>": "gather",
    "gather_slots": "gather",
    "gather_stationary": "gather",
    "scatter_slots": "scatter",
    "scatter_stationary": "scatter",
    "void at::native::(anonymous namespace)::indexFuncLargeIndex": "scatter",
    "void at::native::index_put_with_sort_kernel": "scatter",
    "Memcpy DtoH (Device -> Pinned)": "copy",
    "Memset (Device)": "copy",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>": "other",
    "void at::native::batch_norm_transform_input_channels_last_kernel": "other",
}


def told(*names, start=0, each=1000):
    return [Event(name, start + each * n, each) for n, name in enumerate(names)]


@pytest.mark.parametrize(("name", "part"), KERNELS.items())
def test_parts_by_name(name, part):
    assert part_of(name) == part


def test_every_kernel_of_maps_has_a_part():
    """As their files have them; what they are started by says the same."""
    files = ("lookup_kernels", "chain_kernels", "pair_kernels", "tile_kernels")
    names = [name for file in files for name in measuring.kernels_in(file)]
    assert len(names) == len(set(names)) > 15
    assert {part_of(name) for name in names} == {"map", "sort"}
    source = "".join(path.read_text() for path in (measuring.Path(pm.coords.__file__).parent).glob("*.py"))
    asked = {text.split('"')[0] for text in source.split('kernel("')[1:] if text.partition(".")[0] in files}
    assert {name.partition(".")[2] for name in asked} <= set(names) and len(asked) > 15


def test_passes_begin_with_marks():
    events = [
        *told("before", start=0),
        *told(MARK, "neighbours", "_dot_fp16", "_dot_fp16", start=1000),
        *told(MARK, "relu", start=5000, each=3000),
    ]
    found = passes(reversed(events), 2)
    assert found == [{"map": pytest.approx(1e-6), "conv": pytest.approx(2e-6)}, {"other": pytest.approx(3e-6)}]
    for wrong in (1, 3):
        with pytest.raises(OptionError, match=f"recorded 2 passes, expected {wrong}"):
            passes(events, wrong)
    with pytest.raises(OptionError, match="recorded 0 passes, expected 1"):
        passes(told(MARK), 1)


def test_time_counts_once_where_kernels_run_side_by_side():
    spans = ("neighbours", 0, 1000), ("_dot_fp16", 400, 1000), ("_dot_fp16", 500, 300), ("relu", 5000, 7)
    (found,) = passes([Event(MARK, -5, 5), *(Event(*span) for span in spans)], 1)
    assert found == {"map": pytest.approx(1e-6), "conv": pytest.approx(0.4e-6), "other": pytest.approx(7e-9)}


def test_the_middle_repeat_counts():
    """Of three repeats over two scenes the one with the median total, as seconds of one scene; parts add up."""
    rounds = [
        [{"conv": 9.0}, {"conv": 1.0}],
        [{"conv": 2.0, "map": 1.0}, {"other": 3.0}],
        [{"conv": 1.0}, {"conv": 1.0}],
    ]
    found = median_parts([each for pair in rounds for each in pair], 2)
    assert found == {"map": 0.5, "conv": 1.0, "other": 1.5} and list(found) == ["map", "conv", "other"]


def test_times_on_the_wall_are_medians_of_each_scene():
    """The first scene takes 1, 2 or 9 seconds, the second one 10, 20 or 90."""
    assert measuring._wall([1.0, 20.0, 9.0, 10.0, 2.0, 90.0], 2) == 11.0


def event(name, kind, start=0, took=1, named=False):
    return SimpleNamespace(
        name=lambda: name,
        device_type=lambda: kind,
        start_ns=lambda: start,
        duration_ns=lambda: took,
        is_user_annotation=lambda: named,
    )


def test_what_counts_of_a_trace():
    kinds = torch.autograd.DeviceType
    trace = [
        event("aten::mm", kinds.CPU),
        event("_dot_fp16", kinds.CUDA, 5, 7),
        event("ProfilerStep#1", kinds.CUDA, named=True),
        event("Context Sync", kinds.CUDA),
        event("Stream Wait Event", kinds.CUDA),
        event("Memset (Device)", kinds.CUDA),
    ]
    assert on_device(trace) == [Event("_dot_fp16", 5, 7), Event("Memset (Device)", 0, 1)]


def test_a_real_trace_has_what_is_read(monkeypatch):
    """The interface of torch's profiler, on a CPU: nothing ran on a device."""
    real, cpu = torch.profiler.profile, torch.profiler.ProfilerActivity.CPU
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: real(activities=[cpu]))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    events, walls = profiled([lambda: torch.ones(3) + 1] * 2)
    assert events == [] and len(walls) == 2 and min(walls) > 0


class Traces:
    """A GPU that is not there: what its profiler tells, trace by trace; an exception is raised."""

    def __init__(self, monkeypatch, *traces):
        self.traces, self.taken = list(traces), 0
        monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
        monkeypatch.setattr(torch.cuda, "Event", Timer)
        monkeypatch.setattr(measuring, "profiled", self)

    def __call__(self, calls):
        for call in calls:
            call()
        self.taken += 1
        found = self.traces.pop(0)
        if isinstance(found, Exception):
            raise found
        return found, [0.5] * len(calls)


class Timer:
    def __init__(self, enable_timing):
        pass

    def record(self):
        pass

    def elapsed_time(self, other):
        return 2.0


ONE = [
    *told(MARK, "neighbours", "_dot_fp16"),
    *told(MARK, "_dot_fp16", start=3000),
    *told(MARK, "relu", start=6000, each=3000),
]


def meter():
    return measuring.PassTimer(torch.device("cuda"), 3)


def test_on_a_gpu_kernels_count(monkeypatch):
    traces, ran = Traces(monkeypatch, ONE, ONE), []
    own = meter()
    found = own.measure([lambda: ran.append(1)])
    parts = {"map": pytest.approx(1e-6), "conv": pytest.approx(1e-6)}
    assert found == PassTiming(pytest.approx(2e-6), parts, 0.5, "kernels")
    assert len(ran) == 4 and traces.taken == 1
    assert str(found) == "0.002 ms (kernels: map 0.001, conv 0.001, 500.000 ms wall-clock)"
    own.measure([lambda: None])
    assert own.clock == "kernels"


def test_a_trace_that_lacks_something_is_taken_again(monkeypatch):
    traces = Traces(monkeypatch, ONE[1:], RuntimeError("busy"), ONE)
    assert meter().measure([lambda: None]).clock == "kernels" and traces.taken == 3


def test_without_a_profiler_events_count(monkeypatch):
    """It is said once, and stays so: times of two clocks are not compared."""
    traces = Traces(monkeypatch, *[RuntimeError("CUPTI is taken\nby another")] * 3)
    own = meter()
    for _ in range(2):
        found = own.measure([lambda: None])
        assert (found.total, found.clock, found.parts) == (2e-3, "events", {})
        assert found.note == "the profiler is not available, timed by events (CUPTI is taken)"
    assert traces.taken == 3


def test_a_profiler_that_fails_later_changes_no_clock(monkeypatch):
    Traces(monkeypatch, ONE, *[RuntimeError("gone")] * 3)
    own = meter()
    own.measure([lambda: None])
    with pytest.raises(DeviceError, match="failed after earlier measurements: gone"):
        own.measure([lambda: None])


def test_what_calls_raise_goes_through(monkeypatch):
    Traces(monkeypatch, ONE)

    def fails():
        raise DtypeError("no")

    with pytest.raises(DtypeError, match="no"):
        meter().measure([fails])


# Networks
class Net(nn.Module):
    """Layers that leave traces: statistics, dropout, a counter."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(pm.nn.Conv3d(4, 8, 3), pm.nn.BatchNorm(8), pm.nn.Dropout(0.5), pm.nn.Conv3d(8, 4, 3))
        self.frozen = pm.nn.BatchNorm(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.calls += 1
        y = self.body(x)
        return {"y": self.frozen(y), "both": [y.feats, len(y)]}


def state(model):
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return tensors, [m.training for m in model.modules()], [p.grad is None for p in model.parameters()]


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_was(mode, training):
    model, x = Net().train(training), random_tensor(60, 4)
    model.frozen.eval()
    held, before, chance = model.calls, state(model), torch.get_rng_state()
    model.body[0].bias.grad = kept = torch.ones(8)
    found = measure(model, [x, x], mode, repeats=2)
    model.body[0].bias.grad = None
    assert found.total == found.wall > 0 and found.clock == "wall" and kept.sum() == 8
    after = state(model)
    assert before[0].keys() == after[0].keys() and all(
        torch.equal(before[0][name], after[0][name]) for name in before[0]
    )
    assert before[1:] == after[1:] and model.calls is held and torch.equal(chance, torch.get_rng_state())
    assert not x.geometry.maps


def test_modes_while_it_runs():
    model, seen = Net().train(), []
    model.frozen.eval()
    model.frozen.register_forward_hook(lambda m, *_: seen.append((model.training, m.training, torch.is_grad_enabled())))
    for mode in ("inference", "training"):
        measure(model, [random_tensor(30, 4)], mode, repeats=1)
    assert set(seen) == {(False, False, False), (True, False, True)}, "what is frozen in training stays frozen"
    with pytest.raises(ZeroDivisionError), undisturbed(model, False):
        raise ZeroDivisionError
    assert model.training


def test_coordinates_and_features_are_a_scene():
    x = random_tensor(30, 4)
    assert measure(Net(), [(x.coords, x.feats)], repeats=1).total > 0


def test_losses():
    model, x = Net(), random_tensor(30, 4)
    y = model(x)
    wanted = y["y"].feats.square().mean() + y["both"][0].square().mean()
    assert torch.allclose(sum_of_squares_loss(y), wanted)
    seen = []
    measure(model, [x], "training", repeats=1, loss=lambda y: seen.append(y) or y["y"].feats.sum())
    assert len(seen) == 2
    with pytest.raises(OptionError, match="returns SparseTensor without a tensor that has gradients; give a loss="):
        sum_of_squares_loss(x)


REFUSED = [
    (DtypeError, "torch.nn.Module, found int", lambda x: (3, [x])),
    (OptionError, "mode='fast' is unknown; there are inference, training", lambda x: (Net(), [x], "fast")),
    (DtypeError, "list of SparseTensors, found SparseTensor", lambda x: (Net(), x)),
    (DtypeError, "list of SparseTensors, found Tensor", lambda x: (Net(), x.feats)),
    (DtypeError, "list of SparseTensors, found generator", lambda x: (Net(), (y for y in [x]))),
    (OptionError, "no scene", lambda x: (Net(), [])),
    (DtypeError, r"pair \(coords, feats\), found ndarray at 1", lambda x: (Net(), [x, x.coords.numpy()])),
    (OptionError, "Linear has no convolution of pumice.nn", lambda x: (nn.Linear(3, 3), [x])),
    (DeviceError, "the model is on cpu, sample 1 on meta", lambda x: (Net(), [x, x.replace(x.feats.to("meta"))])),
    (OptionError, "parameters that require gradients", lambda x: (Net().requires_grad_(False), [x], "training")),
]


@pytest.mark.parametrize(("kind", "message", "make"), REFUSED)
def test_what_is_refused(kind, message, make):
    with pytest.raises(kind, match=message):
        measure(*make(random_tensor(10, 4)))


def test_repeats_that_do_not_exist():
    with pytest.raises(OptionError, match="repeats must be an integer of at least 1, found 0"):
        measure(Net(), [random_tensor(10, 4)], repeats=0)


def test_what_wraps_a_model():
    model, x = Net(), random_tensor(10, 4)
    assert subject(nn.DataParallel(model), [x], "inference").model is model
    with pytest.raises(OptionError, match="do not run under torch.compile: tune takes the model that was compiled"):
        measure(torch.compile(model, backend="eager"), [x])
    half = nn.ModuleList([model, pm.nn.Conv3d(4, 4, 3).to("meta")])
    with pytest.raises(DeviceError, match="found convolutions on cpu and meta"):
        measure(half, [x])
