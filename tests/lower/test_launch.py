"""How kernels are launched, with a kernel that only writes down what it is given: nothing here computes."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import pumice as pm
from pumice.lower import plan
from pumice.lower import triton as kernels
from pumice.schedule.ledger import Ledger
from pumice.schedule.tile import Tile


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
        self.source, self.doors, self.direct, self.watched = source, [], [], []

    def __getitem__(self, grid):
        def launch(*values, num_warps, num_stages):
            if num_stages > Kernel.room:
                raise OutOfResources
            self.doors.append((grid, values, num_warps, num_stages))
            return Compiled(self)

        return launch


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
    for held in (kernels._RUNNERS, plan._READY, plan._CHOSEN):
        held.clear()
    einsum = import_module("pumice.ops.einsum")
    einsum._kept.cache_clear()
    einsum._seen_by.cache_clear()


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
    from pumice.language.bind import bind
    from pumice.language.parse import parse

    a, b = operands()
    bound = bind(parse("C[m,n] = A[m,k] * B[k,n]"), {"A": a.shape, "B": b.shape})
    monkeypatch.setattr(Kernel, "room", 2)
    with pytest.raises(OutOfResources):
        kernels.run(bound, {"A": a, "B": b}, a.dtype, Tile(64, 32, 32, stages=3))


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
    best = told.splitlines()[1].split("ms")[1].strip()
    before = {id(k): len(k.doors) for k in made.values()}
    product(a, b)
    (used,) = [k for k in made.values() if len(k.doors) > before.get(id(k), 0)]
    values = dict(zip([x.variable for x in used.source.arguments], used.doors[-1][1], strict=True))
    assert best.startswith(f"{values['BY']}x{values['BX']}x{values['BR']}")


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


def test_a_newer_setting_of_precision_is_read(made, monkeypatch):
    for setting, expected in {"tf32": "tf32", "ieee": "tf32x3", "none": "tf32x3"}.items():
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=setting))
        assert kernels._precision() == expected
