"""How kernels are launched, with a kernel that only writes down what it is given: nothing here computes."""

import gc
import sys
import threading
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from modes import deterministic

import pumice as pm
from pumice.coords import Relation, kernel_map
from pumice.errors import DtypeError, OptionError, ShapeError
from pumice.language.bind import bind
from pumice.language.parse import parse
from pumice.lower import call as calls
from pumice.lower import epilogue, maps, plan, segments, tile_family
from pumice.lower import kernel as kernels
from pumice.lower.dataflow import Pass, planned_tile
from pumice.ops import autograd
from pumice.runtime import cache, launch
from pumice.runtime.cache import BoundedCache
from pumice.runtime.workspace import Workspace
from pumice.schedule.dataflow import PLANNED
from pumice.schedule.tile import WHOLE_SEGMENTS, Tile
from pumice.schedule.tuned_tiles import Ledger
from pumice.testing import random_tensor


class OutOfResources(Exception):
    """Stands for triton.runtime.errors.OutOfResources."""


class Compiled:
    """What Triton's launch gives: started by `run` with addresses, and by its own door while a profiler listens."""

    function, packed_metadata = "function", "packed"

    def __init__(self, kernel):
        self.kernel = kernel

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *values):
        assert (stream, function, packed) == (STREAM, self.function, self.packed_metadata)
        assert metadata is enter is leave is None
        self.kernel.direct.append(((x, y, z), values))

    def __getitem__(self, grid):
        return lambda *values: self.kernel.watched.append((grid, values))


STREAM = 7


class Kernel:
    """What Triton's JIT function is to the launcher; `room` is the most stages that fit."""

    room = 99

    def __init__(self, source):
        self.source, self.doors, self.direct, self.watched, self.ahead = source, [], [], [], []

    def __getitem__(self, grid):
        def launch(*values, num_warps, num_stages):
            if num_stages > Kernel.room:
                raise OutOfResources
            self.doors.append((grid, values, num_warps, num_stages))
            return Compiled(self)

        return launch

    def warmup(self, *values, grid, num_warps, num_stages):
        assert grid == (1,) and all(v.is_meta for v in values if isinstance(v, torch.Tensor))
        if num_stages > Kernel.room:
            raise OutOfResources
        self.ahead.append((values, num_warps, num_stages))
        return Compiled(self)


def tuned(monkeypatch, get):
    """Every statement has a tuned tile, which `get` finds."""
    monkeypatch.setattr(Ledger, "is_empty", False)
    monkeypatch.setattr(Ledger, "get", get)


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Every kernel that was made, the last one last."""
    found, ours = {}, Ledger(tmp_path / "tiles.json")
    monkeypatch.setattr(kernels, "interpreted", lambda: True)
    monkeypatch.setattr(kernels, "loaded", lambda source: found.setdefault(source, Kernel(source)))
    monkeypatch.setattr(kernels, "ledger", lambda: ours)
    monkeypatch.setattr(Kernel, "room", 99)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    forget()
    yield found
    forget()


def forget():
    """Nothing that was made ready is kept."""
    for held in (kernels._RUNNERS, plan._PLANS, plan._BUCKETED_PLANS, plan._CHOSEN):
        held.clear()
    calls.TEMPLATES.clear()
    maps.NO_MAPS.clear()
    einsum = import_module("pumice.ops.einsum")
    einsum._cached_einsum.cache_clear()
    einsum._memory_of.cache_clear()


def product(a, b):
    return pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b, lowering="triton")


def operands(rows=48, dtype=torch.float16):
    return torch.zeros(rows, 64, dtype=dtype), torch.zeros(64, 32, dtype=dtype)


def test_the_second_call_goes_there_directly(made):
    a, b = operands()
    for _ in range(3):
        product(a, b)
    (kernel,) = made.values()
    assert len(kernel.doors) == 1 and len(kernel.direct) == 2
    grid, values, *_ = kernel.doors[0]
    assert kernel.direct[0][0] == (*grid, 1, 1)
    assert len(values) == len(kernel.source.arguments) == len(kernel.direct[0][1])
    for argument, value, again in zip(kernel.source.arguments, values, kernel.direct[0][1], strict=True):
        if argument.kind in ("operand", "result", "segment"):
            # Triton's launcher takes addresses as they are, and asks the driver about tensors.
            assert isinstance(value, torch.Tensor) and type(again) is int
            assert argument.kind == "result" or again == value.data_ptr()
        else:
            assert value is not None and value == again


def test_a_profiler_that_listens_is_told(made, monkeypatch):
    from triton import knobs

    a, b = operands()
    product(a, b)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    product(a, b)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", None)
    product(a, b)
    (kernel,) = made.values()
    assert (len(kernel.doors), len(kernel.watched), len(kernel.direct)) == (1, 1, 1)


def test_another_alignment_goes_through_the_door_again(made):
    a, b = operands()
    product(a, b)
    shifted = torch.zeros(48 * 64 + 1, dtype=torch.float16)[1:].view(48, 64)
    product(shifted, b)
    product(shifted, b)
    (kernel,) = made.values()
    assert len(kernel.doors) == 2 and len(kernel.direct) == 1


def test_other_sizes_need_no_other_kernel(made):
    for rows in (33, 48, 100, 1000):
        product(*operands(rows))
    assert len(made) == 1


def test_another_layout_does(made):
    a, b = operands()
    product(a, b)
    product(a.t().contiguous().t(), b)
    assert len(made) == 2


def test_a_tile_without_room_is_made_smaller(made, monkeypatch):
    a, b = operands()
    monkeypatch.setattr(Kernel, "room", 2)
    product(a, b)
    product(a, b)
    stages = [door[3] for kernel in made.values() for door in kernel.doors]
    assert stages == [2]


def test_a_tile_that_was_asked_for_is_not(made, monkeypatch):
    a, b = operands()
    bound = bind(parse("C[m,n] = A[m,k] * B[k,n]"), {"A": a.shape, "B": b.shape})
    monkeypatch.setattr(Kernel, "room", 2)
    with pytest.raises(OutOfResources):
        kernels.runner(bound, a.dtype, Tile(64, 32, 32, stages=3))({"A": a, "B": b})


def test_the_smallest_tile():
    tile, seen = Tile(64, 32, 32, stages=4), []
    while tile is not None:
        seen.append(str(tile))
        tile = tile.smaller()
    assert seen[0] == "64x32x32 w4 s4" and seen[-1] == "16x16x32 w4 s2" and len(set(seen)) == len(seen)


def test_what_was_tuned_counts_from_the_next_call_on(made, monkeypatch):
    a, b = operands()
    product(a, b)
    f = pm.compile_einsum("C[m,n] = A[m,k] * B[k,n]", lowering="triton")
    # The tile with the fewest columns is the fastest here.
    times = iter(range(1000, 0, -1))
    monkeypatch.setattr(kernels, "measured", lambda call, best: call() is None or next(times))
    told = f.tune(A=a, B=b)
    assert told.count(" ms ") > 3
    (tuned,) = kernels.ledger().all().values()
    assert tuned.seconds == 1000 - told.count(" ms ") + 1
    best = told.splitlines()[1].split("ms")[1].strip()
    before = {id(k): len(k.doors) for k in made.values()}
    product(a, b)
    (used,) = [k for k in made.values() if len(k.doors) > before.get(id(k), 0)]
    values = dict(zip([x.variable for x in used.source.arguments], used.doors[-1][1], strict=True))
    assert best.startswith(f"{values['BY']}x{values['BX']}x{values['BR']}")


def test_what_another_process_has_tuned_is_not_timed_again(made, monkeypatch):
    a, b = operands()
    runner = held(b)._sized
    key, ours = kernels.Key("some GPU", "C", (), ()), kernels.ledger()
    timed = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(kernels, "_key", lambda *args: key)
    monkeypatch.setattr(kernels, "tune", lambda *args: timed.append(args))
    with kernels.tuning():
        runner._tile({"A": a, "B": b})
        assert len(timed) == 1
        Ledger(ours.path).put(key, Tile(64, 32, 32, stages=4))
        assert runner._tile({"A": a, "B": b}).stages == 4
    assert len(timed) == 1 and ours.generation == 1


def test_precision_is_part_of_what_was_tuned(made):
    a, b = operands(dtype=torch.float32)
    product(a, b)
    pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b, lowering="triton/ieee")
    seen = {
        dict(zip([x.variable for x in k.source.arguments], door[1], strict=True))["PRECISION"]
        for k in made.values()
        for door in k.doors
    }
    assert seen == {"tf32x3", "ieee"}


@contextmanager
def torch_precision(setting):
    """Within it torch is set to this precision of products of float32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = setting
    try:
        yield
    finally:
        matmul.fp32_precision = before


def test_a_newer_setting_of_precision_is_read(made):
    for setting, expected in {"tf32": "tf32", "ieee": "tf32x3", "none": "tf32x3"}.items():
        with torch_precision(setting):
            assert kernels.float32_precision() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("name", "form"), [("forward", "compacted"), ("dgrad", "compacted_t"), ("wgrad", "grouped")])
def test_the_tile_of_a_pass_is_known_beforehand(name, form, dtype):
    """By tensors without contents; that of a feature gradient in float32 has its sides exchanged."""
    x = random_tensor(300, 96, 3)
    found, _ = kernel_map(x.geometry, Relation.of(3, 3))
    each = {"x": (found.num_inputs, 96), "w": (128, 27, 96), "y": (found.num_outputs, 128)}
    x, w, y = (torch.empty(shape, dtype=dtype, device="meta") for shape in each.values())
    given = {"forward": (x, w), "dgrad": (y, w), "wgrad": (x, y)}[name]
    tile = planned_tile(Pass(name, PLANNED, found, 1), form, given)
    assert tile.swapped == (name == "dgrad" and dtype == torch.float32)
    if not tile.swapped:
        wide = 96 if name != "forward" else 128
        assert tile.rows >= 64 and tile.columns <= 2 * wide and tile.stacked is tile.packed is False


def test_wide_gradients_of_weights_are_six_products():
    """Of float32, where that is faster; forward products and narrow ones are three."""
    text = "W[k[g],n,c] += y[o[g,q],n] * x[i[g,q],c]"
    for channels, expected in ((128, "bf16x6"), (32, "tf32x3")):
        shapes = {"W": (27, channels, channels), "x": (50, channels), "y": (50, channels)}
        shapes |= {"k": (4,), "o": (4, 16), "i": (4, 16)}
        bound = bind(parse(text), shapes)
        assert kernels.default_precision(bound) == expected
        with torch_precision("tf32"):
            assert kernels.default_precision(bound) == "tf32"
    forward = bind(parse("Y[m,n] = X[m,c] * W[n,c]"), {"X": (500, 128), "W": (128, 128)})
    assert kernels.default_precision(forward) == "tf32x3"
    segments = parse("O[D[P[e]],i] = x[S[P[e]],i] ; P:sorted, O:[6,_]")  # rows of results of no known number
    shapes = {"x": (50, 128), "P": (90,), "S": (70,), "D": (70,)}
    assert kernels.default_precision(bind(segments, shapes)) == "tf32x3"


# operands that are held


def held(b, rows=48):
    """C = A B, with B held."""
    bound = bind(parse("C[m,n] = A[m,k] * B[k,n]"), {"A": (rows, 64), "B": tuple(b.shape)})
    return calls.BoundExecutor(kernels.runner(bound, b.dtype), {"B": b})


def shifted(*shape):
    """A tensor that is not aligned to 16 bytes."""
    return torch.zeros(torch.Size(shape).numel() + 1, dtype=torch.float16)[1:].view(shape)


def addresses(kernel):
    """By name, what each direct launch was given for the operands."""
    names = [(n, x.name) for n, x in enumerate(kernel.source.arguments) if x.kind == "operand"]
    return [{name: values[n] for n, name in names} for _, values in kernel.direct]


def test_what_is_held_is_passed_by_its_address(made):
    a, b = operands()
    other = torch.ones_like(a)
    run = held(b)
    for x in (a, a, other):
        assert run({"A": x}).shape == (48, 32)
    (kernel,) = made.values()
    assert len(kernel.doors) == 1
    assert addresses(kernel) == [{"A": x.data_ptr(), "B": b.data_ptr()} for x in (a, other)]


def test_what_is_held_keeps_its_memory(made):
    a, b = operands()
    run = held(b)
    run({"A": a})
    there = b.data_ptr()
    del b
    torch.ones(64, 32, dtype=torch.float16)
    run({"A": a})
    (kernel,) = made.values()
    assert addresses(kernel)[-1]["B"] == there and run.bound_operands["B"].data_ptr() == there


@pytest.mark.parametrize("which", ["held", "free"])
def test_another_alignment_beside_what_is_held(made, which):
    a, b = operands()
    held(b)({"A": a})
    (run, x) = (held(shifted(64, 32)), a) if which == "held" else (held(b), shifted(48, 64))
    for _ in range(3):
        run({"A": x})
    (kernel,) = made.values()
    # A kernel of its own, by the door; the others by address.
    assert len(kernel.doors) == 2 and len(kernel.direct) == 2
    assert {found["A"] for found in addresses(kernel)} == {x.data_ptr()}


def test_an_address_that_is_not_aligned_goes_by_the_door_later_too(made):
    a, b = operands()
    run = held(b)
    for _ in range(3):
        run({"A": a})
    (kernel,) = made.values()
    assert (len(kernel.doors), len(kernel.direct)) == (1, 2)
    run({"A": shifted(48, 64)})
    assert len(kernel.doors) == 2


OTHERS = {
    "dtype": lambda k: k.long(),
    "layout": lambda k: torch.zeros(48, 2, dtype=torch.int32)[:, 0],
}


@pytest.mark.parametrize("other", OTHERS)
def test_arrays_that_are_held_count_with_dtype_and_layout(made, other):
    """Two calls of the same sizes share a runner, whose kernels for one would misread what the other holds."""
    bound = bind(parse("C[m,n] = A[k[m],n]"), {"A": (64, 32), "k": (48,)})
    a, k = torch.zeros(64, 32).half(), torch.zeros(48, dtype=torch.int32)
    for held_ in (k, OTHERS[other](k)):
        run = calls.BoundExecutor(kernels.runner(bound, torch.float16), {"k": held_})
        for _ in range(2):
            run({"A": a})
    # Each by the door first: Triton's variants tell dtypes.
    assert sum(len(kernel.doors) for kernel in made.values()) == 2
    assert sum(len(kernel.direct) for kernel in made.values()) == 2


def test_a_kernel_made_for_a_number_of_rows_is_for_no_other(made):
    """The few rows of a product whose left side is a product are known when it is compiled."""
    for rows in (20, 100):
        shapes = {"A": (rows, 16), "B": (16, 32), "C": (32, 64)}
        bound = bind(parse("y[m,q] = A[m,j] * B[j,k] * C[k,q]"), shapes)
        assert kernels.runner(bound, torch.float16).resizable == (rows == 100)


def test_devices_have_kernels_of_their_own(made, monkeypatch):
    a, b = operands()
    executor = held(b).executor
    for device in (0, 1):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda x, device=device: device)
        calls.BoundExecutor(executor, {"B": b})({"A": a})
    assert len(executor.templates) == 2


def test_default_tiles_are_those_before_any_tuning(made, monkeypatch):
    tuned(monkeypatch, lambda self, key: Tile(16, 16, 16))
    a, b = operands()
    for source in (kernels.LEDGER, kernels.DEFAULT, kernels.LEDGER):
        with kernels.use_tuning_mode(source):
            product(a, b)
    programs = [door[0][0] for kernel in made.values() for door in kernel.doors]
    again = [launch[0][0] for kernel in made.values() for launch in kernel.direct]
    # 48 x 32 results in tiles of 16 x 16, and by larger ones.
    assert programs == [6, 1] and again == [6]


def test_programs_share_no_loop_where_that_is_not_deterministic():
    bound = bind(parse("C[m,n] = A[k,m] * B[k,n]"), {"A": (100_000, 32), "B": (100_000, 32)})
    assert kernels.runner(bound, torch.float32).splits > 1
    with deterministic():
        assert kernels.runner(bound, torch.float32).splits == 1
    assert kernels.runner(bound, torch.float32).splits > 1


def test_columns_that_are_left_free_count_for_addresses():
    """Of 64 bits: rows lie as far apart as these make them."""
    a, b = operands()
    bound = held(b)._sized.bound
    rows = kernels.INT32_LIMIT // 64
    for spare, far in ((0, False), (23, False), (24, True)):
        run = kernels.runner(bound, torch.float32, finish=epilogue.EpilogueSignature(row_padding=spare))
        assert run.needs_int64((rows, 40)) == far and run.needs_int64((rows, 64))


def test_what_was_tuned_counts_for_what_is_held(made):
    a, b = operands()
    run = held(b)
    run({"A": a})
    runner = run._sized
    tile = Tile(64, 32, 32, stages=4)
    kernels.ledger().put(kernels._key(runner.bound, {"A": a, "B": b}, kernels.float32_precision()), tile)
    run({"A": a})
    run({"A": a})
    stages = [door[3] for kernel in made.values() for door in kernel.doors]
    assert len(stages) == 2 and stages[1] == 4


def test_another_layout_beside_what_is_held(made):
    a, b = operands()
    run = held(b)
    for x in (a, a.t().contiguous().t(), a):
        run({"A": x})
    assert len(made) == 2 and sum(len(kernel.doors) for kernel in made.values()) == 2


def test_nothing_is_kept_of_a_graph_that_is_captured(made, monkeypatch):
    a, b = operands()
    run = held(b)
    for module in (kernels, maps):
        monkeypatch.setattr(module, "is_capturing", lambda device: True)
    run({"A": a})
    run({"A": a})
    assert not run._calls
    for module in (kernels, maps):
        monkeypatch.setattr(module, "is_capturing", lambda device: False)
    run({"A": a})
    run({"A": a})
    assert len(run._calls) == 1


def test_precision_counts_for_what_is_held(made, monkeypatch):
    a, b = operands(dtype=torch.float32)
    run = held(b)
    for precision in ("tf32", "tf32x3", "tf32"):
        monkeypatch.setattr(kernels, "float32_precision", lambda precision=precision: precision)
        run({"A": a})
        run({"A": a})
    doors = [door for kernel in made.values() for door in kernel.doors]
    assert len(doors) == 2 and len(run._calls) == 2


@pytest.fixture
def as_on_gpu(made, monkeypatch):
    """A convolution takes the forms and the kernels of a GPU."""
    monkeypatch.setattr(plan.maps, "_FORMS_OF", {"cpu": plan.maps._FORMS_OF["cuda"]})
    monkeypatch.setattr(plan, "device_of", lambda operands: plan.DEVICES["cuda"])
    return made


def layer(seed):
    """Features, weights, and the map of some voxels."""
    coords = torch.zeros(100, 4, dtype=torch.int32)
    coords[:, 1:] = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))[:100, None] // torch.tensor(
        [100, 10, 1]
    )
    coords[:, 1:] %= 10
    found, _ = kernel_map(pm.SparseTensor(torch.zeros(100, 1), coords).geometry, Relation.of(3, 3))
    return torch.zeros(100, 16, dtype=torch.float16), torch.zeros(16, 27, 16, dtype=torch.float16), found


def test_a_convolution_passes_the_arrays_of_its_own_map(as_on_gpu):
    for x, weight, found in (layer(1), layer(2)):
        before = {id(k): (len(k.doors), len(k.direct)) for k in as_on_gpu.values()}
        for _ in range(3):
            pm.ops.conv_features(x, weight, found, 100)
        used = [k for k in as_on_gpu.values() if (len(k.doors), len(k.direct)) != before.get(id(k))]
        (kernel,) = used
        rows, tiles, taps, met = found.compacted(64)
        own = {t.data_ptr() for t in (x, weight, rows, taps, met)}
        assert own <= set(addresses(kernel)[-1].values()) and addresses(kernel)[-1] == addresses(kernel)[-2]


@pytest.mark.parametrize("channels", [1, 3, 4, 8, 16])
def test_few_channels_are_packed_forward_and_backward(as_on_gpu, channels):
    """As many taps as there is room for are one turn's, of what is gathered and of its gradient."""
    x, weight, found = layer(1)
    y = pm.ops.conv_features(x[:, :channels].contiguous(), weight[..., :channels].contiguous(), found, 100)
    assert y.shape == (100, 16)
    x, weight = x[:, :channels].contiguous().requires_grad_(), weight[..., :channels].contiguous().requires_grad_()
    torch.autograd.grad(pm.ops.conv_features(x, weight, found, 100).sum(), (x, weight))
    texts = [kernel.source.text for kernel in as_on_gpu.values()]
    assert sum("PACK" in text for text in texts) == (2 if channels >= 8 else 1)


def test_a_packed_tile_of_what_has_no_packs_is_refused(made):
    a, b = operands()
    bound = bind(parse("C[m,n] = A[m,k] * B[k,n]"), {"A": tuple(a.shape), "B": tuple(b.shape)})
    with pytest.raises(OptionError, match="cannot be packed"):
        kernels.runner(bound, torch.float16, Tile(16, 16, 16, packed=True))({"A": a, "B": b})


def test_a_packed_tile_of_fewer_channels_has_room_for_one_entry(as_on_gpu, monkeypatch):
    """The ledger keeps sizes to half a power of two."""
    tuned(monkeypatch, lambda self, key: Tile(64, 16, 4, packed=True))
    x, weight, found = layer(1)
    pm.ops.conv_features(x, weight, found, 100)
    (kernel,) = as_on_gpu.values()
    values = dict(zip([a.variable for a in kernel.source.arguments], kernel.doors[0][1], strict=True))
    assert values["BR"] == 16


@pytest.mark.parametrize("aimed", [True, False])
def test_what_programs_share_is_held_until_their_kernel_is_under_way(as_on_gpu, monkeypatch, aimed):
    """Freed before, it might be another thread's by then."""
    if not aimed:
        monkeypatch.setattr(calls.BoundExecutor, "_instantiate", lambda *given: None)
    ours, alive = [], []

    def lent(count, size, device):
        memory = np.zeros(count, np.int32), np.zeros(size, np.uint8)
        ours.append([weakref.ref(array) for array in memory])
        return Workspace(*map(torch.from_numpy, memory))

    run = Compiled.run

    def started(self, *given):
        alive.append([array() is not None and array().ctypes.data in given for array in ours[-1]])
        run(self, *given)

    for module in (kernels, calls):
        monkeypatch.setattr(module, "workspace", lent)
    monkeypatch.setattr(Compiled, "run", started)
    tuned(monkeypatch, lambda self, key: Tile(64, 16, 16, stream_k_chunk=2))
    x, weight, found = layer(1)
    for _ in range(3):
        pm.ops.conv_features(x, weight, found, 100)
    (kernel,) = as_on_gpu.values()
    assert len(kernel.direct) == 2 and alive == [[True, True], [True, True]]


def test_segments_that_are_whole_need_no_room(as_on_gpu, monkeypatch):
    """By the kernel that shares them where they are cut."""
    asked = []
    for module in (kernels, calls):
        real = module.workspace
        monkeypatch.setattr(module, "workspace", lambda *given, real=real: asked.append(given[:2]) or real(*given))
    for chunk in (2, WHOLE_SEGMENTS):
        tuned(monkeypatch, lambda self, key, chunk=chunk: Tile(64, 16, 16, stream_k_chunk=chunk))
        x, weight, found = layer(1)
        for _ in range(2):
            asked.clear()
            pm.ops.conv_features(x, weight, found, 100)
            ((programs, size),) = asked
            assert size == (programs * 64 * 16 * 4 if chunk == 2 else 0)
        forget()
    assert len(as_on_gpu) == 1


def test_on_amd_no_segments_are_shared(as_on_gpu, monkeypatch):
    """Nor by a tile that asks for it."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    x, weight, found = (t.repeat_interleave(4, -1) if isinstance(t, torch.Tensor) else t for t in layer(1))
    pm.ops.conv_features(x, weight, found, 100)
    assert as_on_gpu and not any("waiting" in kernel.source.text for kernel in as_on_gpu.values())
    forget()
    tuned(monkeypatch, lambda self, key: Tile(64, 16, 16, stream_k_chunk=2))
    x, weight, found = layer(1)
    with pytest.warns(RuntimeWarning, match="not on AMD"):
        pm.ops.conv_features(x, weight, found, 100)
    assert as_on_gpu and not any("waiting" in kernel.source.text for kernel in as_on_gpu.values())


def test_a_convolution_and_its_gradients_are_three_kernels(as_on_gpu):
    x, weight, found = layer(1)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    for _ in range(3):
        y = pm.ops.conv_features(x, weight, found, 100)
        dx, dw = torch.autograd.grad(y.sum(), (x, weight))
        assert (y.shape, dx.shape, dw.shape) == ((100, 16), x.shape, weight.shape) and dw.dtype == weight.dtype
    kernels_ = list(as_on_gpu.values())
    assert len(kernels_) == 3 and all(len(k.doors) == 1 and len(k.direct) == 2 for k in kernels_)


def test_gradients_have_their_forms_after_a_call_without(as_on_gpu):
    x, weight, found = layer(1)
    with torch.autocast("cpu", torch.float16):
        pm.ops.conv_features(x, weight, found, 100)
    assert len(as_on_gpu) == 1 and not found.has(("form", "grouped"))
    y = pm.ops.conv_features(x.requires_grad_(), weight.requires_grad_(), found, 100)
    torch.autograd.grad(y.sum(), (x, weight))
    assert len(as_on_gpu) == 3 and found.has(("form", "grouped"))


@pytest.mark.parametrize(
    ("problem", "fits_not"),
    [
        (RuntimeError("PassManager::run failed"), True),
        (OutOfResources(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_what_a_kernel_does_to_memory_is_no_tile_that_does_not_fit(problem, fits_not):
    """While tuning, the first is passed over; the second must be heard of."""
    assert kernels._is_unfit(problem) is fits_not


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_convolution_of_bytes_writes_what_its_epilogue_says(as_on_gpu, kind):
    x, weight, found = layer(1)
    x, weight = x.to(kind), weight.to(kind)
    assert pm.ops.conv_features(x, weight, found, 100).dtype == torch.float32
    for dtype in (torch.float16, torch.float8_e4m3fn):
        epilogue = pm.ops.Epilogue(scale=torch.ones(16), dtype=dtype)
        assert pm.ops.conv_features(x, weight, found, 100, epilogue=epilogue).dtype == dtype
    names = [kernel.source.name for kernel in as_on_gpu.values()]
    assert names == ["_dot_fp32", "_dot_fp16", "_dot_fp8"]
    # What is larger than the largest becomes that.
    assert ["448.0" in kernel.source.text for kernel in as_on_gpu.values()] == [False, False, True]
    assert all("tl.int8" in k.source.text or "tl.float8e4nv" in k.source.text for k in as_on_gpu.values())


def test_what_a_device_cannot_write_is_cast_behind_the_kernel(as_on_gpu, monkeypatch):
    monkeypatch.setattr(kernels, "without_fp8", lambda device: "it cannot")
    x, weight, found = layer(1)
    epilogue = pm.ops.Epilogue(scale=torch.ones(16), dtype=torch.float8_e4m3fn)
    assert pm.ops.conv_features(x, weight, found, 100, epilogue=epilogue).dtype == torch.float8_e4m3fn
    assert [kernel.source.name for kernel in as_on_gpu.values()] == ["_dot_fp32"]


def test_an_epilogue_asks_for_no_other_tile(as_on_gpu):
    """Its tensors are float32 beside values of 8 bits or of 16."""
    x, weight, found = layer(1)
    for kind in (torch.int8, torch.float16):
        given = x.to(kind), weight.to(kind)
        pm.ops.conv_features(*given, found, 100)
        pm.ops.conv_features(*given, found, 100, epilogue=pm.ops.Epilogue(scale=torch.ones(16)))
    depths = [k.doors[0][1][[a.variable for a in k.source.arguments].index("BR")] for k in as_on_gpu.values()]
    assert depths == [128, 128, 64, 64]


def a_map(seed, voxels):
    chosen = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))[:voxels]
    coords = torch.stack([torch.zeros_like(chosen), chosen // 100, chosen // 10 % 10, chosen % 10], 1).int()
    return kernel_map(pm.SparseTensor(torch.zeros(voxels, 1), coords).geometry, Relation.of(3, 3))[0]


@pytest.mark.parametrize("differentiable", [False, True])
def test_a_new_map_of_about_the_same_sizes_is_not_planned_for(as_on_gpu, monkeypatch, differentiable):
    """What is chosen for one is cast for the others, with their sizes and arrays, whatever came first."""
    planned, emitted, cast = [], [], []
    prepared, made = plan._prepared, kernels.generated_kernel
    monkeypatch.setattr(plan, "_prepared", lambda *given: planned.append(1) or prepared(*given))
    monkeypatch.setattr(kernels, "generated_kernel", lambda *given: emitted.append(1) or made(*given))
    sized, at = kernels.GeneratedKernel.sized, calls.CallTemplate.instantiate
    monkeypatch.setattr(kernels.GeneratedKernel, "sized", lambda *given: cast.append(1) or sized(*given))
    monkeypatch.setattr(calls.CallTemplate, "instantiate", lambda *given: cast.append(1) or at(*given))
    weight = torch.zeros(16, 27, 16, dtype=torch.float16, requires_grad=differentiable)
    for place, voxels in enumerate((912, 916, 920, 926)):
        before = len(planned), len(emitted), len(cast)
        x = torch.zeros(voxels, 16, dtype=torch.float16, requires_grad=differentiable)
        with torch.set_grad_enabled(differentiable):
            y = pm.ops.conv_features(x, weight, a_map(voxels, voxels), voxels)
        assert y.shape == (voxels, 16)
        if differentiable:
            gradients = torch.autograd.grad(y.sum(), (x, weight))
            assert [g.shape for g in gradients] == [x.shape, weight.shape]
        assert len(cast) > before[2]
        assert ((len(planned), len(emitted)) == before[:2]) == (place > 0), voxels


def test_maps_of_other_sizes_are_planned_for(as_on_gpu, monkeypatch):
    planned, prepared = [], plan._prepared
    monkeypatch.setattr(plan, "_prepared", lambda *given: planned.append(1) or prepared(*given))
    weight = torch.zeros(16, 27, 16, dtype=torch.float16)
    for voxels in (200, 900):
        before = len(planned)
        pm.ops.conv_features(torch.zeros(voxels, 16, dtype=torch.float16), weight, a_map(1, voxels), voxels)
        assert len(planned) > before


@pytest.fixture
def straight(as_on_gpu, monkeypatch):
    """Convolutions go straight to their kernels."""
    monkeypatch.setattr(autograd, "uses_gpu", lambda x: True)
    return as_on_gpu


def grid(count, seed):
    """So many voxels of a small grid."""
    places = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))[:count]
    coords = torch.stack([torch.zeros_like(places), places // 100, places // 10 % 10, places % 10], 1).int()
    return pm.SparseTensor(torch.zeros(count, 1), coords).geometry


def voxels(count, seed, channels=16, dtype=torch.float16):
    """Features and the map of so many voxels of a small grid."""
    found, _ = kernel_map(grid(count, seed), Relation.of(3, 3))
    return torch.zeros(count, channels, dtype=dtype), found


def finish(count, channels=16):
    """An epilogue with all that a residual block's end has."""
    vectors = torch.rand(4, channels)
    return pm.ops.Epilogue(*vectors[:2], torch.zeros(count, channels).half(), "relu", None, *vectors[2:], 1e-5)


def launches(kernels_):
    return [(grid, values) for kernel in kernels_.values() for grid, values in kernel.direct]


@pytest.mark.parametrize("ended", [False, True], ids=["bare", "epilogue"])
def test_another_map_gets_a_launch_with_its_own_arrays(straight, monkeypatch, ended):
    weight = torch.zeros(16, 27, 16, dtype=torch.float16)
    clouds = [voxels(count, 0) for count in (400, 399, 397, 395)]
    ends = [finish(len(x)) if ended else None for x, _ in clouds]
    # Triton makes a variant where 16 divides a size, and another where it does not.
    for (x, found), end in zip(clouds[:2] * 2, ends[:2] * 2, strict=True):
        pm.ops.conv_features(x, weight, found, len(x), epilogue=end)
    # From now on nothing is looked up.
    monkeypatch.setattr(import_module("pumice.ops.conv"), "_checked_forward", None)
    for (x, found), end in zip(clouds, ends, strict=True):
        y = pm.ops.conv_features(x, weight, found, len(x), epilogue=end)
        assert y.shape == (len(x), 16) and y.dtype == torch.float16
        rows, _, taps, met = found.compacted(64)
        own = {t.data_ptr() for t in (x, weight, rows, taps, met, *(end.operands.values() if end else ()), y)}
        assert any(own <= set(values) for _, values in launches(straight))


def test_gradients_over_another_map_get_launches_with_its_own_arrays(straight, monkeypatch):
    weight = torch.zeros(16, 27, 16, dtype=torch.float16, requires_grad=True)

    def step(count):
        x, found = voxels(count, 0)
        x.requires_grad_()
        y = pm.ops.conv_features(x, weight, found, count)
        grad = torch.ones_like(y)
        gradients = torch.autograd.grad(y, (x, weight), grad)
        assert [g.shape for g in gradients] == [x.shape, weight.shape]
        assert all(g.dtype == torch.float16 for g in gradients)
        return found, [t.data_ptr() for t in (x, weight, y, grad, gradients[0])]

    for count in (400, 399, 400, 399):
        step(count)
    # From now on nothing is planned.
    monkeypatch.setattr(plan, "bound_plan", None)
    for kernel in straight.values():
        kernel.direct.clear()
    found, (x, w, y, grad, dx) = step(397)
    values = [set(values) for _, values in launches(straight)]
    assert len(values) == 3

    def read(form):
        tokens, arrays = maps.form_operands(found, form)
        return {t.data_ptr() for name, t in zip(tokens, arrays, strict=True) if name.endswith(("rows", "met"))}

    for form, tensors in (("compacted", {x, w, y}), ("compacted_t", {grad, w, dx}), ("compacted", {x, grad})):
        assert any(tensors | read(form) <= own for own in values), form


@pytest.mark.parametrize("first", [torch.float16, torch.float32], ids=["half first", "wide first"])
def test_gradients_of_two_dtypes_have_templates_of_their_own(straight, monkeypatch, first):
    """Under autocast the gradient of a float32 weight is not the rounded one of a half that has all else alike."""
    kept, keep = set(), calls.TEMPLATES.keep
    monkeypatch.setattr(calls.TEMPLATES, "keep", lambda key, value: kept.add(key) or keep(key, value))
    places = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:400]
    coords = torch.stack([torch.zeros_like(places), places // 100, places // 10 % 10, places % 10], 1).int()
    counts = []
    for dtype in (first, torch.float32 if first == torch.float16 else torch.float16):
        for count in (400, 400, 399):
            x = pm.SparseTensor(torch.zeros(count, 16).half().requires_grad_(), coords[:count])
            weight = torch.zeros(16, 3, 3, 3, 16, dtype=dtype, requires_grad=True)
            with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
                y = pm.ops.conv(x, weight).feats
            (found,) = torch.autograd.grad(y, weight, torch.zeros(count, 16).half())
            assert found.dtype == dtype
        counts.append(len(kept))
    assert counts[1] > counts[0]


def test_a_straight_call_is_the_one_with_every_check(straight, monkeypatch):
    """Grid and all arguments but the result are those of a call that looks everything up."""
    weight = torch.zeros(16, 27, 16, dtype=torch.float16)
    clouds = [voxels(count, 0) for count in (400, 399, 397)]

    def starts():
        kept = [pm.ops.conv_features(x, weight, found, len(x)) for x, found in clouds for _ in range(2)]
        results = {t.data_ptr() for t in kept}
        return [(g, tuple("result" if v in results else v for v in values)) for g, values in launches(straight)][-2:]

    starts()
    straight_ = starts()
    monkeypatch.setattr(autograd, "uses_gpu", lambda x: False)
    monkeypatch.setattr(calls.CallTemplate, "instantiate", lambda *given: None)
    assert starts() == straight_


TILES = {
    "default": None,
    "pieces": Tile(64, 16, 16, stream_k_chunk=16),
    "other pieces": Tile(64, 16, 16, stream_k_chunk=8),
    "whole": Tile(64, 16, 16),
    "swapped": Tile(64, 16, 16, swapped=True),
    "slabs": Tile(64, 32, 16, column_major_grid=True),
}


def passes(counts, clouds, weight):
    """A convolution and its gradients over each of the clouds, anew each time."""
    for count in counts:
        found = clouds[count]
        x = torch.zeros(count, weight.shape[-1], dtype=weight.dtype, requires_grad=True)
        y = pm.ops.conv_features(x, weight, found, count)
        torch.autograd.grad(y, (x, weight), torch.zeros_like(y))


@pytest.mark.parametrize("tile", TILES)
def test_what_is_cast_is_what_is_made_anew(straight, monkeypatch, tile):
    """Grid, sizes and strides of a call over another map, and which variant of its kernel: those of a call for which
    nothing is kept, for rows that 16 divides and others."""
    # The gradient of a weight has no segments that could be shared.
    tuned(monkeypatch, lambda self, key: None if key.statement.startswith("dw") else TILES[tile])
    weight = torch.zeros(24, 27, 16, dtype=torch.float16, requires_grad=True)
    seen = []

    def run(self, x, y, z, *given):
        own = [a.kind in ("operand", "result", "segment", "room", "waiting") for a in self.kernel.source.arguments]
        seen.append((self.kernel.source.text, x, [None if o else v for o, v in zip(own, given[6:], strict=True)]))

    monkeypatch.setattr(Compiled, "run", run)
    cast, whole = [], calls.CallTemplate.instantiate
    monkeypatch.setattr(calls.CallTemplate, "instantiate", lambda *given: cast.append(whole(*given)) or cast[-1])
    counts = (400, 399, 397, 416, 395)
    # Triton's variants are there for all of them.
    for _ in range(2):
        passes(counts, {n: voxels(n, 0)[1] for n in counts}, weight)
    seen.clear(), cast.clear()
    passes(counts, {n: voxels(n, 0)[1] for n in counts}, weight)
    ours = list(seen)
    assert len(ours) == len(cast) == 15 and None not in cast
    monkeypatch.setattr(autograd, "uses_gpu", lambda x: False)
    monkeypatch.setattr(calls.CallTemplate, "instantiate", lambda *given: None)
    seen.clear()
    passes(counts, {n: voxels(n, 0)[1] for n in counts}, weight)
    assert sorted(ours, key=str) == sorted(seen, key=str)


def test_arrays_of_a_map_that_are_not_aligned_are_no_straight_call(straight, monkeypatch):
    """Addresses are looked at once for each map, and their alignment with them."""
    weight, conv = torch.zeros(16, 27, 16).half(), import_module("pumice.ops.conv")
    for count in (400, 399, 400, 399):
        x, found = voxels(count, 0)
        pm.ops.conv_features(x, weight, found, count)
    seen = []
    monkeypatch.setattr(conv, "_checked_forward", lambda x, *given: seen.append(x) or x)
    for odd in (False, True):
        x, found = voxels(397, 0)
        tokens, arrays = maps.planner_operands(found, False)
        if odd:
            moved = [torch.cat([a.new_zeros(1), a.flatten()])[1:].view(a.shape) for a in arrays]
            found.keep(("default forms", False), (tokens, moved))
        pm.ops.conv_features(x, weight, found, 397)
        assert len(seen) == odd


def test_keys_that_are_forgotten_cost_time_alone(straight, monkeypatch):
    """What is kept under a key that was told is not found again, and is no other call's."""
    monkeypatch.setattr(cache, "INTERNED", BoundedCache(1))
    x, found = voxels(100, 0)
    for dtype in (torch.float16, torch.float32) * 3:
        weight = torch.zeros(16, 27, 16, dtype=dtype)
        assert pm.ops.conv_features(x.to(dtype), weight, found, 100).dtype == dtype
    assert [len(kernel.doors) for kernel in straight.values()] == [1, 1]


def test_what_calls_leave_keeps_no_memory(straight):
    """Templates and keys outlive maps, and hold nothing of theirs."""
    weight, refs = torch.zeros(16, 27, 16, dtype=torch.float16, requires_grad=True), []
    for count in (400, 399, 400, 399, 397):
        x, found = voxels(count, 0)
        passes([count], {count: found}, weight)
        with torch.no_grad():
            for _ in range(2):
                y = pm.ops.conv_features(x, weight, found, count, epilogue=finish(count))
        arrays = [a for differentiable in (False, True) for a in maps.planner_operands(found, differentiable)[1]]
        refs += [weakref.ref(thing) for thing in (x, y, found, found.table, *arrays)]
    assert calls.TEMPLATES.values()
    del x, y, found, arrays
    for kernel in straight.values():
        # What the kernel that stands in for others has written down.
        kernel.doors.clear()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_two_threads_may_forget_at_once():
    kept, wrong, before = BoundedCache(2), [], sys.getswitchinterval()

    def go(number):
        try:
            for n in range(20000):
                kept.keep((number, n % 5), n)
        except Exception as problem:
            wrong.append(problem)

    threads = [threading.Thread(target=go, args=(number,)) for number in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong and len(kept.values()) <= 2 + len(threads)


def test_equal_facts_are_one_key_and_others_are_not():
    x, weight = torch.zeros(30, 16), torch.zeros(8, 27, 16)

    def key(x, weight, *facts):
        return calls.call_signature((x, weight), (True, False), *facts)

    same = key(x, weight, "a")
    assert key(torch.zeros(99, 16), weight.clone(), "a") is same
    others = [(x, weight, "b"), (x[:, :8], weight, "a"), (x[:, ::2], weight, "a"), (x.half(), weight, "a")]
    others += [(x, weight[:4], "a"), (x, weight.transpose(1, 2), "a"), (x.to("meta"), weight.half(), "a")]
    assert len({key(*each) for each in [*others, (x, weight, "a")]}) == len(others) + 1


def test_maps_are_of_one_kind_where_all_but_rows_is_the_same():
    arrays = [torch.zeros(n, 64, dtype=torch.int32) for n in (20, 20)]

    def kind(arrays, tokens="ab"):
        return maps.MapSignature.of(tuple(tokens), 27, arrays).key

    same = kind(arrays)
    assert kind([a.clone() for a in arrays]) is same
    longer, wide = torch.zeros(40, 64, dtype=torch.int32), torch.zeros(20, 32, dtype=torch.int32)
    assert kind([longer, arrays[1]]) is same
    assert len({same, kind([arrays[0]] * 2), kind([wide, arrays[1]])}) == 3
    others = kind(arrays, "ac"), kind([a.long() for a in arrays])
    assert len({same, *others, kind([a.t().contiguous().t() for a in arrays])}) == 4


def test_a_straight_call_is_checked_all_the_same(straight):
    weight, (x, found), (y, other) = torch.zeros(16, 27, 16).half(), voxels(100, 0), voxels(101, 1)
    for _ in range(2):
        pm.ops.conv_features(x, weight, found, 100)
    # The map's own calls, and the template of others, tell no rows.
    with pytest.raises(ShapeError, match="x is \\[100, C_in\\]"):
        pm.ops.conv_features(y, weight, found, 100)
    with pytest.raises(ShapeError, match="rows are the 100 outputs"):
        pm.ops.conv_features(x, weight, found, 101)
    with pytest.raises(ShapeError, match="x is \\[101, C_in\\]"):
        pm.ops.conv_features(x, weight, other, 101)
    with pytest.raises(ShapeError, match="rows are the 101 outputs"):
        pm.ops.conv_features(y, weight, other, 100)
    pm.ops.conv_features(x, weight, found, 100, epilogue=finish(100))
    with pytest.raises(ShapeError, match="residual of the epilogue is \\[101, 16\\]"):
        pm.ops.conv_features(y, weight, other, 101, epilogue=finish(100))
    with pytest.raises(ShapeError, match="weight is"):
        pm.ops.conv_features(y, weight[:, :26], other, 101)


@pytest.mark.parametrize("turned", [False, True], ids=["a view", "a copy"])
def test_a_straight_call_has_the_weight_that_its_kernel_reads(straight, turned):
    """A window whose axes are no single one is copied for each call: what is kept must not take the weight itself."""
    x, found = voxels(100, 0)
    weight = torch.zeros(16, 3, 3, 3, 16).half()
    weight = weight.transpose(1, 3) if turned else weight
    conv = import_module("pumice.ops.conv")
    for _ in range(3):
        conv._features(x, weight, found, 100, None)
    assert launches(straight)
    assert any(weight.data_ptr() in values for _, values in launches(straight)) is not turned


def test_a_straight_call_sees_what_was_set_meanwhile(straight, monkeypatch):
    """Precision, layouts and alignment count, and what was tuned."""
    (x, found), weight = voxels(100, 0, dtype=torch.float32), torch.zeros(16, 27, 16)

    def sources():
        before = {k: len(k.direct) + len(k.doors) for k in straight.values()}
        pm.ops.conv_features(x, weight, found, 100)
        return [k for k in straight.values() if len(k.direct) + len(k.doors) != before.get(k)]

    (first,) = [k for _ in range(3) for k in sources()][-1:]
    monkeypatch.setattr(kernels, "float32_precision", lambda: "tf32")
    sources()
    assert any("tf32" in values for kernel in straight.values() for _, values, *_ in kernel.doors)
    doors = sum(len(kernel.doors) for kernel in straight.values())
    x = torch.zeros(100 * 16 + 1)[1:].view(100, 16)
    sources()
    assert sum(len(kernel.doors) for kernel in straight.values()) == doors + 1


def test_what_is_no_epilogue_is_refused_before_a_kernel_is_sought(straight):
    x, convolve = pm.SparseTensor(torch.zeros(100, 16), grid(100, 0)), import_module("pumice.ops.conv").convolve
    asked = pm.coords.Relation.of(3, 3), None
    with torch.no_grad(), pytest.raises(pm.errors.OptionError, match="epilogue takes a pumice.ops.Epilogue, found str"):
        convolve(x, torch.zeros(16, 3, 3, 3, 16), None, 1, asked, epilogue="relu")


def test_a_linear_map_and_its_norm_are_one_kernel_whatever_rows_there_are(as_on_gpu):
    linear = import_module("pumice.ops.linear")
    maps.NO_MAPS.clear()
    weight, vectors = torch.zeros(32, 16).half(), torch.rand(4, 32)
    end = pm.ops.Epilogue(*vectors[:2], None, "", None, *vectors[2:], 1e-5)
    for rows in (399, 399, 397, 395, 395):
        x = torch.zeros(rows, 16).half()
        y = linear.linear_features(x, weight, end)
        assert y.shape == (rows, 32) and y.dtype == torch.float16
        last = (x, weight, *end.operands.values(), y)
    (kernel,) = as_on_gpu.values()
    assert len(kernel.doors) == 1 and len(kernel.direct) == 4
    assert {t.data_ptr() for t in last} <= set(kernel.direct[-1][1])


@pytest.mark.parametrize("channels", [(1, 32), (32, 1), (1, 1), (32, 32)], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["by rows", "by columns"])
def test_the_kernel_for_some_rows_is_the_one_for_others(as_on_gpu, channels, turned):
    """Rows are masked even where a tile divides their number, though they lie one behind the other: another call
    starts the same kernel with other rows."""
    linear = import_module("pumice.ops.linear")
    weight, vectors = torch.zeros(channels[::-1]).half(), torch.rand(4, channels[1])
    end = pm.ops.Epilogue(*vectors[:2], None, "", None, *vectors[2:], 1e-5)
    whole = torch.zeros(channels[0], 2048).half().t() if turned else torch.zeros(2048, channels[0]).half()
    for rows in (1024, 1100):
        forget()
        linear.linear_features(whole[:rows], weight, end)
    (source,) = as_on_gpu
    assert len(as_on_gpu[source].doors) == 2
    # As often as there are rows.
    assert "in_" in source.text


def test_other_size_classes_start_kernels_of_their_own_tiles(as_on_gpu, monkeypatch):
    """By address, compiled without a launch; sizes of one class share a kernel."""
    linear = import_module("pumice.ops.linear")
    monkeypatch.setattr(autograd, "uses_gpu", lambda x: True)
    weight, whole = torch.zeros(96, 64).half(), torch.zeros(1 << 17, 64).half()
    for rows in (1100, 40, 1 << 17, 33):
        linear.linear_features(whole[:rows], weight, pm.ops.Epilogue(shift=torch.zeros(96)))
    kernels_ = list(as_on_gpu.values())
    assert sum(len(kernel.doors) for kernel in kernels_) == 1
    # 33 rows take the tile of 40, and 131,072 that of 1,100.
    assert sum(len(kernel.direct) for kernel in kernels_) == 3
    (_, warps, stages), *more = [one for kernel in kernels_ for one in kernel.ahead]
    assert not more and (warps, stages) != kernels_[0].doors[0][2:]


def test_another_kernel_serves_until_its_own_is_compiled(as_on_gpu, monkeypatch):
    """On a GPU nobody waits for the kernel of another size class; where results are to be deterministic a call does."""
    linear = import_module("pumice.ops.linear")
    monkeypatch.setattr(autograd, "uses_gpu", lambda x: True)
    made, tasks = [], []
    kind, init = tile_family.TileFamily, tile_family.TileFamily.__init__
    monkeypatch.setattr(kind, "__init__", lambda self, *given: (init(self, *given), made.append(self))[0])
    monkeypatch.setattr(tile_family.BACKGROUND, "submit", tasks.append)
    weight, whole = torch.zeros(96, 64).half(), torch.zeros(1 << 17, 64).half()
    end = pm.ops.Epilogue(shift=torch.zeros(96))
    for _ in range(2):
        linear.linear_features(whole[:1100], weight, end)
    (family,) = made
    first = family.at([1100, 96, 1100, 96])
    cpu, choose = family.device, family._source.choose
    monkeypatch.setattr(family._source, "choose", lambda like, key, device, *more: choose(like, key, cpu, *more))
    monkeypatch.setattr(tile_family, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(family, "device", torch.device("cuda"))
    many = [40, 96, 40, 96]
    assert family.key(many) != family.key([1100, 96, 1100, 96])
    for count in range(1, 5):
        # Sizes that are asked for once or twice are not worth a compilation.
        assert family.at(many) is first and len(tasks) == (count >= 3)
    tasks[0]()
    own = family.at(many)
    assert own is not first and own is not None and own.is_compiled and len(tasks) == 1
    family._by_size.pop(family.key(many)), family._waiting.clear()
    monkeypatch.setattr(type(own), "is_compiled", property(lambda self: self is first))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert family.at(many) is own and len(tasks) == 1


def test_a_template_needs_no_call_before(as_on_gpu, monkeypatch):
    """What a program compiles before its first call is what it starts then."""
    conv, linear = import_module("pumice.ops.conv"), import_module("pumice.ops.linear")
    monkeypatch.setattr(autograd, "uses_gpu", lambda x: True)
    x, weight, found = layer(1)
    end = pm.ops.Epilogue(shift=torch.zeros(16))
    task = conv.compilation(x, weight, found, end)
    assert task is not None and conv.compilation(x, weight, found, end) is None
    task()
    assert not any(kernel.doors for kernel in as_on_gpu.values())
    pm.ops.conv_features(x, weight, found, 100, epilogue=end)
    assert [(len(k.doors), len(k.direct)) for k in as_on_gpu.values()] == [(0, 1)]
    task = linear.compilation(x, weight[:, 0].contiguous(), end)
    assert task is not None
    task()
    linear.linear_features(x, weight[:, 0].contiguous(), end)
    assert [(len(k.doors), len(k.direct)) for k in as_on_gpu.values()] == [(0, 1)] * 2


def test_sorted_tiles_and_others_are_read_alike(as_on_gpu):
    _, _, found = layer(1)
    tokens, arrays = plan.maps.form_operands(found, "compacted")
    others, more = plan.maps.form_operands(found, "unsorted")

    def signature(tokens, arrays, volume=27):
        return maps.MapSignature.of(tokens, volume, arrays).key

    assert tokens != others and signature(tokens, arrays) is signature(others, more)
    tiles = plan.maps.other_tiles(found)
    high = tiles.arrays(arrays[0].device)
    assert tiles.block == plan.maps.tile_rows_for(tiles.outputs) != plan.maps.tile_rows_for(100)
    assert {x.shape[1] for x in high if x.ndim > 1} == {tiles.block}
    assert signature(tiles.tokens, high) is signature(tokens, high)
    assert signature(tokens, high) is not signature(tokens, arrays)
    assert signature(tokens, arrays, 8) is not signature(tokens, arrays)


@pytest.mark.parametrize("statement", ["O[m[e],n] = x[t[e],c] * w[n,k[e],c]", "d[n,k[e],c] = x[t[e],c] * g[m[e],n]"])
@pytest.mark.parametrize("channels", [1, 16])
def test_the_kernel_for_some_entries_is_the_one_for_others(statement, channels):
    parsed, sources = parse(statement), []
    for entries in (4096, 4100):
        lists = {name: torch.zeros(entries, dtype=torch.int32) for name in "mtk"}
        x, g, w = torch.zeros(300, channels), torch.zeros(300, 16), torch.zeros(16, 27, channels)
        named = {**lists, **({"x": x, "w": w} if statement[0] == "O" else {"x": x, "g": g})}
        out = torch.zeros_like(g if statement[0] == "O" else w)
        bound = bind(parsed, {name: tensor.shape for name, tensor in named.items()}, out.shape)
        given = {**named, "": out}
        sources.append(kernels.generated_kernel(bound, given, Tile(16, 16, 16), kernels.KernelOptions()).source)
    assert sources[0] == sources[1]


def test_a_number_of_programs_is_no_part_of_a_kernel():
    """Each program of the gradient of a weight has one entry: it does not matter by what their number is divisible."""
    text = "dw[n,k[e],c] = x[met[e,b],c] * grad[rows[tile[e],b],n] ; tile:sorted, rows:distinct, rows:onto"
    lists = {name: torch.zeros(33, dtype=torch.int32) for name in ("k", "tile")}
    wide = {"met": torch.zeros(33, 64, dtype=torch.int32), "rows": torch.zeros(9, 64, dtype=torch.int32)}
    given, out = {"x": torch.zeros(300, 32), "grad": torch.zeros(300, 32), **lists, **wide}, torch.zeros(32, 27, 32)
    bound = bind(parse(text), {name: tensor.shape for name, tensor in given.items()}, out.shape)
    source = kernels.generated_kernel(bound, {**given, "": out}, Tile(32, 32, 32), kernels.KernelOptions()).source
    assert source.specialised and all(source.arguments[place].name != "e" for place in source.specialised)


def test_a_residual_of_about_as_many_rows_is_refused(as_on_gpu):
    """Sizes that round alike are one kernel's, which reads as many rows as there are results."""
    linear = import_module("pumice.ops.linear")
    maps.NO_MAPS.clear()
    weight, x = torch.zeros(16, 16).half(), torch.zeros(399, 16).half()
    for rows in (399, 397):
        linear.linear_features(x[:rows], weight, finish(rows))
    with pytest.raises(ShapeError, match="residual of the epilogue is \\[395, 16\\], found shape \\[393, 16\\]"):
        linear.linear_features(x[:395], weight, finish(393))
    with pytest.raises(ShapeError, match="residual of the epilogue is \\[399, 16\\], found shape \\[393, 16\\]"):
        # Also where a call like it was carried out.
        linear.linear_features(x, weight, finish(393))


def test_a_map_with_segments_far_longer_than_others_is_no_straight_call(straight, monkeypatch):
    """They are another kernel's, which another map may do without."""
    weight, conv = torch.zeros(16, 27, 16).half(), import_module("pumice.ops.conv")
    for count in (400, 399, 400, 399):
        x, found = voxels(count, 0)
        pm.ops.conv_features(x, weight, found, count)
    whole, seen = segments.SegmentRule.find, []
    monkeypatch.setattr(conv, "_checked_forward", lambda x, *given: seen.append(x) or x)
    for apart in (False, True):
        if apart:
            found_apart = lambda *given: replace(whole(*given), outliers=whole(*given))  # noqa: E731
            monkeypatch.setattr(segments.SegmentRule, "find", found_apart)
        x, found = voxels(397, 0)
        pm.ops.conv_features(x, weight, found, 397)
        assert len(seen) == apart


def test_a_map_that_is_its_own_transpose_is_no_template_for_one_that_is_not(straight):
    """Its two forms of tiles share rows and inputs: which of them a kernel reads, the arrays do not tell."""
    weight = torch.zeros(16, 27, 16, dtype=torch.float16, requires_grad=True)
    ends = [grid(400, seed) for seed in (1, 2)]
    across, _ = kernel_map(ends[0], Relation.of(3, 3, policy="given"), ends[1])
    x, own = voxels(400, 0)
    assert own.symmetric and not across.symmetric
    for found in (own, own, across, across):
        y = pm.ops.conv_features(x.requires_grad_(), weight, found, 400)
        torch.autograd.grad(y.sum(), (x, weight))
    rows, _, taps, met = across.compacted(64)
    forward = {t.data_ptr() for t in (x, weight, rows, taps, met)}
    assert any(forward <= set(values) for _, values in launches(straight))


def test_a_layer_that_was_called_before_goes_straight_to_its_kernel(straight, monkeypatch):
    """Nothing is checked again; what does not fit is checked all the same."""
    x, _ = voxels(100, 0)
    layer, other = (pm.nn.Conv3d(n, 16, 3, bias=False).half() for n in (16, 17))
    tensors = [pm.SparseTensor(x, grid(100, seed).coords) for seed in (0, 0, 0)]
    with torch.no_grad():
        for tensor in tensors[:2]:
            layer(tensor)
        conv = import_module("pumice.ops.conv")
        checks, whole = [], conv._check_weight
        monkeypatch.setattr(conv, "_check_weight", lambda *given, **more: checks.append(1) or whole(*given, **more))
        before = len(launches(straight))
        for tensor in tensors:
            y = layer(tensor)
            assert y.geometry is tensor.geometry and y.feats.shape == (100, 16) and y.dtype == torch.float16
        assert not checks and len(launches(straight)) == before + 3
        with pytest.raises(ShapeError, match="17 channels"):
            other(tensors[0])
        with pytest.raises(DtypeError, match=r"x is torch.float32, weight is torch.float16"):
            layer(tensors[0].to(torch.float32))
        assert len(checks) == 2
    assert layer(tensors[0]).feats.requires_grad and len(checks) == 2, "it fits where gradients are asked for, too"
    with pytest.raises(ShapeError, match="17 channels"):
        other(tensors[0])
    layer.weight = torch.nn.Parameter(layer.weight.detach().flatten(1, 3))
    with pytest.raises(ShapeError, match="3 kernel axes"):
        layer(tensors[0])
    assert len(checks) == 4


# calls that autograd records


def recorded(x, weight, found):
    from pumice.ops.conv import differentiable_call

    return differentiable_call(x, weight, found, found.num_outputs)


def counted(kernels_):
    """How many kernels there are, and how often they were started by Triton's door and by addresses."""
    return len(kernels_), sum(len(k.doors) for k in kernels_.values()), sum(len(k.direct) for k in kernels_.values())


@pytest.fixture
def planned(monkeypatch):
    """One entry for each call that was planned."""
    seen, plan_of = [], plan.bound_plan
    monkeypatch.setattr(plan, "bound_plan", lambda *given: seen.append(1) or plan_of(*given))
    return seen


def both(call, x, weight):
    """The call and its gradients."""
    y = call.compute((x, weight))
    dx, dw = call.gradients((x, weight), torch.zeros_like(y), (x.dtype, weight.dtype))
    assert (y.shape, dx.shape, dw.shape) == ((len(x), 16), x.shape, weight.shape)
    return y


def turned(x):
    """The same values, column by column."""
    return x.t().contiguous().t()


TUNED = SimpleNamespace(generation=77, is_empty=True)
SETTINGS = {
    "deterministic": lambda patch: patch.setattr(calls, "deterministic", lambda: True),
    "tuned since": lambda patch: patch.setattr(kernels, "ledger", lambda: TUNED),
    "tiles": lambda patch: patch.setattr(kernels, "tuning_mode", lambda: kernels.DEFAULT),
    "precision": lambda patch: patch.setattr(kernels, "float32_precision", lambda: "tf32"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_recorded_call_is_another_one_where_something_else_is_set(straight, monkeypatch, setting):
    dtype = torch.float32 if setting == "precision" else torch.float16
    (x, found), weight = voxels(400, 0, dtype=dtype), torch.zeros(16, 27, 16, dtype=dtype)
    call = recorded(x, weight, found)
    both(call, x, weight)
    before, keys = counted(straight), {*call._launches}
    both(call, x, weight)
    assert counted(straight) == (before[0], before[1], before[2] + 3) and {*call._launches} == keys and len(keys) == 3
    with monkeypatch.context() as patch:
        SETTINGS[setting](patch)
        both(call, x, weight)
        assert len({*call._launches} - keys) == 3


def test_float32_precision_is_no_matter_of_narrower_floats(straight, monkeypatch):
    (x, found), weight = voxels(400, 0), torch.zeros(16, 27, 16, dtype=torch.float16)
    call = recorded(x, weight, found)
    both(call, x, weight)
    keys = {*call._launches}
    monkeypatch.setattr(kernels, "float32_precision", lambda: "tf32")
    both(call, x, weight)
    assert {*call._launches} == keys


def test_precision_of_a_recorded_call_is_that_of_its_kernel(straight):
    (x, found), weight = voxels(400, 0, dtype=torch.float32), torch.zeros(16, 27, 16)
    call, seen = recorded(x, weight, found), []
    for setting in ("ieee", "tf32", "ieee", "tf32"):
        for kernel in straight.values():
            kernel.doors.clear(), kernel.direct.clear()
        with torch_precision(setting):
            call.compute((x, weight))
        (kernel,) = [k for k in straight.values() if k.doors or k.direct]
        values = kernel.doors[0][1] if kernel.doors else kernel.direct[0][1]
        seen.append(dict(zip([a.variable for a in kernel.source.arguments], values, strict=True))["PRECISION"])
    assert seen == ["tf32x3", "tf32", "tf32x3", "tf32"]


@pytest.mark.parametrize("which", ["x", "weight", "grad"])
def test_a_recorded_call_with_other_strides_is_another_kernel(straight, planned, which):
    (x, found), weight = voxels(400, 0), torch.zeros(16, 27, 16, dtype=torch.float16)
    grad, call = torch.zeros(400, 16, dtype=torch.float16), recorded(x, weight, found)

    def run(x, weight, grad):
        y = call.compute((x, weight))
        call.gradients((x, weight), grad, (x.dtype, weight.dtype))
        return y

    run(x, weight, grad)
    given = {"x": x, "weight": weight, "grad": grad}
    other = weight.transpose(0, 2).contiguous().transpose(0, 2) if which == "weight" else turned(given[which])
    assert other.stride() != given[which].stride() and other.shape == given[which].shape
    before = counted(straight)
    for _ in range(2):
        run(**{**given, which: other})
    kinds, doors, _ = counted(straight)
    # The forward pass takes no gradient, and each gradient not what it is the gradient of.
    assert kinds - before[0] == doors - before[1] == 2
    read = {a for kernel in straight.values() for _, values in kernel.direct for a in values}
    assert other.data_ptr() in read
    # What was there before is as it was.
    before = counted(straight)
    run(x, weight, grad)
    assert counted(straight) == (before[0], before[1], before[2] + 3)


def test_a_gradient_of_another_dtype_is_another_kernel(straight):
    (x, found), weight = voxels(400, 0), torch.zeros(16, 27, 16, dtype=torch.float16)
    call = recorded(x, weight, found)
    for number, dtype in enumerate((torch.float16, torch.float32, torch.bfloat16)):
        grad = torch.zeros(400, 16, dtype=dtype)
        for _ in range(2):
            dx, dw = call.gradients((x, weight), grad, (torch.float16, torch.float32))
            assert (dx.dtype, dw.dtype) == (torch.float16, torch.float32)
        assert counted(straight)[1:] == (2 * number + 2, 2 * number + 2)


def test_gradients_that_nobody_wants_are_not_computed(straight):
    (x, found), weight = voxels(400, 0), torch.zeros(16, 27, 16, dtype=torch.float16)
    call, grad = recorded(x, weight, found), torch.zeros(400, 16, dtype=torch.float16)
    assert call.gradients((x, weight), grad, (None, None)) == [None, None] and counted(straight)[0] == 0
    dx, dw = call.gradients((x, weight), grad, (None, torch.float16))
    assert dx is None and dw is not None and counted(straight)[:2] == (1, 1)


def test_calls_that_are_recorded_for_two_maps_have_one_template(straight, planned):
    """Of about as many voxels, in whatever order they come; another dtype or another weight's is another call."""
    weight = torch.zeros(16, 27, 16, dtype=torch.float16)
    for count in (400, 399):
        x, found = voxels(count, 0)
        both(recorded(x, weight, found), x, weight)
    before = len(planned)
    for count in (398, 397, 396):
        x, found = voxels(count, 0)
        both(recorded(x, weight, found), x, weight)
    assert len(planned) == before
    for other in (torch.zeros(16, 27, 16, dtype=torch.bfloat16), torch.zeros(32, 27, 16, dtype=torch.float16)):
        x, found = voxels(398, 0, dtype=other.dtype)
        recorded(x, other, found).compute((x, other))
        assert len(planned) > before
        before = len(planned)


# kernels of fixed constants


class Plain(Kernel):
    """A kernel as runtime.launch starts it; interpreted: it leaves nothing that could be started again."""

    def __init__(self, interpreted=False):
        super().__init__(None)
        self.interpreted = interpreted

    def __getitem__(self, grid):
        def start(*values, num_warps):
            self.doors.append((grid, values, num_warps))
            return None if self.interpreted else Compiled(self)

        return start


@pytest.fixture
def current(monkeypatch):
    """The device that is current; -1 stands for that of a CPU's tensors."""
    there = SimpleNamespace(device=-1, entered=[])
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: there.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)

    @contextmanager
    def entered(device):
        there.entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", entered)
    return there


def fixed(constants=(16, 0.1, True), warps=8, **options):
    kernel = Plain(**options)
    return kernel, launch.BoundKernel(kernel, constants, warps)


def test_a_fixed_kernel_is_compiled_once(current):
    kernel, start = fixed()
    for number in (3, 5, 7):
        a, b = torch.zeros(number, 4), torch.zeros(9)
        start(number, (a, b), (number,))
        if number == 3:
            assert kernel.doors == [((3,), (a, b, 3, 16, 0.1, True), 8)]
        else:
            assert kernel.direct[-1] == ((number, 1, 1), (a.data_ptr(), b.data_ptr(), number, 16, 0.1, True))
    assert len(kernel.doors) == 1 and len(kernel.direct) == 2


def test_a_fixed_kernel_of_another_alignment_is_another_variant(current):
    kernel, start = fixed()
    a, b = torch.zeros(8, dtype=torch.float16), shifted(8)
    first, second = (a, b), (b, a)
    for number, tensors in enumerate(((a, a), first, second, (b, b))):
        start(1, tensors)
        assert len(kernel.doors) == number + 1 and not kernel.direct
    for number, tensors in enumerate(((b, b), second, first, (a, a), (shifted(3), a))):
        start(1, tensors)
        assert kernel.direct[-1] == ((1, 1, 1), (*(t.data_ptr() for t in tensors), 16, 0.1, True))
        assert len(kernel.direct) == number + 1
    assert len(kernel.doors) == 4


def test_a_fixed_kernel_without_programs_is_not_started(current):
    kernel, start = fixed()
    a = torch.zeros(8)
    start(0, (a,))
    start(1, (a,))
    start(0, (a,))
    assert len(kernel.doors) == 1 and not kernel.direct
    start(1, (a,))
    assert len(kernel.direct) == 1


def test_nothing_is_collected_while_graphs_are_captured():
    """On any thread, and as before afterwards, whatever happens within."""
    held, go = threading.Event(), threading.Event()

    def captures():
        with launch.without_collection():
            held.set()
            assert go.wait(10)

    other = threading.Thread(target=captures)
    other.start()
    assert held.wait(10) and not gc.isenabled()
    go.set()
    with pytest.raises(KeyError), launch.without_collection():
        assert not gc.isenabled()
        raise KeyError
    other.join()
    assert gc.isenabled()
    gc.disable()
    try:
        with launch.without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_fixed_kernels_of_other_constants_are_others(current):
    """Of one launcher, which keeps what was compiled for each."""
    kernel = Plain()
    launcher, a = launch.KernelLauncher(kernel), torch.zeros(8)
    for constants, warps in (((16, 0.1), 4), ((16, 0.2), 4), ((32, 0.1), 4), ((16, 0.1), 8)):
        launcher(1, (a,), (), dict(zip("AB", constants, strict=True)), warps)
        assert kernel.doors[-1] == ((1,), (a, *constants), warps)
    assert len(kernel.doors) == 4
    launcher(1, (a,), (), {"A": 16, "B": 0.2})
    assert len(kernel.doors) == 4 and kernel.direct == [((1, 1, 1), (a.data_ptr(), 16, 0.2))]


def test_a_fixed_kernel_that_is_interpreted_goes_by_the_door(current):
    kernel, start = fixed(interpreted=True)
    for _ in range(3):
        start(2, (torch.zeros(8),))
    assert len(kernel.doors) == 3 and not kernel.direct


class Handing:
    """Triton's launcher: it looks for memory, and hands all on to what is written in C, `launch`.

    hand: how it does; started: what arrives.
    """

    def __init__(self, hand, room=0):
        self.hand, self.room, self.asked, self.started = hand, room, 0, []
        self.launch = self.in_c = lambda *given: self.started.append(given)

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *values):
        self.asked += 1
        if self.room:
            self.room = x * y * z * self.room
        self.hand(self, (x, y, z, stream, function, False), (packed, metadata, enter, leave), values)


def twice_handed(own, first, more, values):
    own.launch(*first, *more, *values)
    own.launch(*first, *more, *values)


HANDING = {
    "one by one": (lambda own, first, more, values: own.launch(*first, None, *more, *values), 0, True),
    "as one": (lambda own, first, more, values: own.launch(*first, *more, None, ("a", "b"), values), 0, True),
    "with memory": (lambda own, first, more, values: own.launch(*first, *more, *values), 64, False),
    "two kernels": (twice_handed, 0, False),
    "other values": (lambda own, first, more, values: own.launch(*first, *more, *map(str, values)), 0, False),
    "without the stream": (lambda own, first, more, values: own.launch(*first[:3], *more, *values), 0, False),
    "in no order": (lambda own, first, more, values: own.launch(*values, *first, *more), 0, False),
    "of a number": (lambda own, first, more, values: own.launch(first[0] + 0, *first[1:], *more, *values), 0, False),
    "not at all": (lambda own, first, more, values: own.started.append((*first, *more, *values)), 0, False),
}


def test_a_launcher_that_is_written_in_c_itself_is_called(current):
    class Sealed(Handing):
        launch = property(lambda own: own.in_c, lambda own, given: own.sealed(given))

        def sealed(self, given):
            if hasattr(self, "in_c"):
                raise AttributeError("launch is read-only")

    own = Sealed(HANDING["one by one"][0])
    start = launch.CompiledKernel(SimpleNamespace(run=own, function="function", packed_metadata="packed"))
    assert own.asked == 0
    start(3, [1, 2], 0)
    assert own.asked == len(own.started) == 1 and own.started[0][-2:] == (1, 2)


@pytest.mark.parametrize("name", HANDING)
def test_kernels_are_started_past_a_launcher_that_hands_on_alone(current, name):
    """What is written in C gets the same, whichever way it is reached."""
    hand, room, past = HANDING[name]
    own, other = Handing(hand, room), Handing(hand, room)
    start = launch.CompiledKernel(SimpleNamespace(run=own, function="function", packed_metadata="packed"))
    assert own.launch is own.in_c
    own.started.clear()
    asked, own.room = own.asked, room
    for programs, values in ((5, [1, 2, 0.5]), (7, (3, 4, 0.25)), (5, [1, 2, 0.5])):
        start(programs, values, 0)
        other(programs, 1, 1, STREAM, "function", "packed", None, None, None, *values)
        other.room = own.room = room
    assert own.started == other.started and len(own.started) >= 3
    assert own.asked == asked + (0 if past else 3)


def test_a_launcher_that_is_asked_starts_kernels_of_others_meanwhile(current):
    """Another thread may come by it: what that starts is started."""
    seen = []

    def hand(own, first, more, values):
        seen.append(own is not shared and shared.launch is shared.in_c)
        own.launch(*first, *more, *values)

    shared = Handing(hand)
    launch.CompiledKernel(SimpleNamespace(run=shared, function="function", packed_metadata="packed"))(3, [1], 0)
    assert seen == [True] and len(shared.started) == 1


def on(device, tensor):
    """A tensor as a launcher sees one of another device."""
    return SimpleNamespace(get_device=lambda: device, data_ptr=tensor.data_ptr, dtype=tensor.dtype)


def test_a_fixed_kernel_runs_where_its_tensors_lie(current):
    """Whichever device is current, and what was compiled for one is not started on another."""
    kernel, start = fixed()
    current.device, a = 0, torch.zeros(8)
    for device, entered in ((1, 1), (1, 2), (0, 2), (0, 2)):
        start(1, (on(device, a),))
        assert len(current.entered) == entered and set(current.entered) == {1}
    assert len(kernel.doors) == 2 and len(kernel.direct) == 2
    current.device = 1
    start(1, (on(1, a),))
    assert len(current.entered) == 2 and len(kernel.doors) == 2 and len(kernel.direct) == 3


def test_a_fixed_kernel_tells_a_profiler(current, monkeypatch):
    from triton import knobs

    kernel, start = fixed()
    start(1, (torch.zeros(8),))
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    start(1, (torch.zeros(8),))
    assert (len(kernel.doors), len(kernel.watched), len(kernel.direct)) == (1, 1, 0)


@pytest.mark.parametrize("ended", [False, True], ids=["bare", "epilogue"])
def test_a_template_is_told_the_rows_of_every_tensor(straight, monkeypatch, ended):
    """Also of those that have as many in all calls: what a kernel asks of them is not known here."""
    weight, seen, at = torch.zeros(16, 27, 16, dtype=torch.float16), [], calls.CallTemplate.instantiate
    monkeypatch.setattr(
        calls.CallTemplate,
        "instantiate",
        lambda self, on, rows, shape: seen.append([*rows]) or at(self, on, rows, shape),
    )
    for count in (400, 399, 397):
        x, found = voxels(count, 0)
        end = finish(count) if ended else None
        pm.ops.conv_features(x, weight, found, count, epilogue=end)
    tensors = (x, weight, *(end.operands.values() if end else ()))
    assert seen and seen[-1] == [t.shape[0] for t in tensors]


def test_rows_that_are_far_apart_have_no_template(straight, monkeypatch):
    """Addresses then need 64 bits, and the kernel that was compiled has fewer."""
    (x, found), weight = voxels(400, 0), torch.zeros(16, 27, 16, dtype=torch.float16)
    pm.ops.conv_features(x, weight, found, 400)
    (known,) = calls.TEMPLATES.values()
    on, rows = maps.bound_map(found), (400, 16)

    def instantiated(lead, shape=(400, 16)):
        template = calls.CallTemplate(known.family, known.executor, known._arrays, known._tensors, (lead, 0))
        return template.instantiate(on, rows, shape)

    leads = 16, (kernels.INT32_LIMIT - 1) // 400, kernels.INT32_LIMIT // 400 + 1
    assert [instantiated(lead) is None for lead in leads] == [False, False, True]
    # Rows that all calls have, as those of a weight, do not count.
    assert known._strides == (16, 0)
    assert instantiated(16, (kernels.INT32_LIMIT // 16, 16)) is None


def test_each_device_has_a_binary_of_its_own(straight, monkeypatch):
    """Of a kernel that two devices share."""
    (x, found), weight = voxels(400, 0), torch.zeros(16, 27, 16, dtype=torch.float16)
    pm.ops.conv_features(x, weight, found, 400)
    (template,) = calls.TEMPLATES.values()
    on, made = maps.bound_map(found), {}
    for index in (0, 1, 0, 1):
        monkeypatch.setattr(template.family, "device", torch.device("cpu", index))
        call = template.instantiate(on, (400, 16), (400, 16))
        assert call is not None and made.setdefault(index, call.kernel) is call.kernel
    assert made[0] is not made[1]


def test_maps_take_tiles_whose_kernels_are_there(monkeypatch):
    """While those for one height are compiled in the background; it does not matter how that ends."""
    waiting, heights = [], plan.maps.TileHeights()
    monkeypatch.setattr(plan.maps.BACKGROUND, "submit", waiting.append)
    usual, sizes = plan.maps.tile_rule(), (10, 10**6)

    def blocks():
        return [heights.rule().block(rows) for rows in sizes]

    def fails():
        raise RuntimeError("the compiler")

    assert heights.rule() == usual and blocks() == [64, 128]
    for height, other in ((64, 128), (128, 64)):
        heights.compile(height, fails)
        heights.compile(height, lambda: None)
        assert blocks() == [other, other]
        with pytest.raises(RuntimeError):
            waiting.pop(0)()
        assert blocks() == [other, other]
        waiting.pop(0)()
        assert blocks() == [64, 128]
    # Of two heights neither is there.
    heights.compile(64, fails), heights.compile(128, fails)
    assert heights.rule() == usual


def test_a_kernel_compiled_ahead_is_loaded_onto_its_device(current, monkeypatch):
    """Triton loads it onto the device that is current when its launcher is taken."""
    there, loaded = [None], []

    @contextmanager
    def entered(device):
        there.append(device)
        yield
        there.pop()

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(launch, "CompiledKernel", lambda made: loaded.append((made, there[-1])))
    kernel = SimpleNamespace(warmup=lambda *values, grid, **options: "made")
    start, gpu = launch.BoundKernel(kernel, ()), torch.device("cuda", 1)
    start.compile(gpu, [torch.int32], ())
    assert loaded == [("made", gpu)]
    assert start.known and start.compiled(0, [0]) is None
