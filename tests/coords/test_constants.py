"""Tensors that are made once for a device: kept for later calls, and held by who reads them for longer."""

import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pumice.coords.box import Bounds
from pumice.coords.buffer import offset_table
from pumice.coords.codes import CodeLayout
from pumice.coords.relation import Relation
from pumice.coords.tiles import SortSpec, groups_of
from pumice.runtime.cache import cached_per_tensor
from pumice.runtime.launch import cached_device_constant, recording_constants

CPU = torch.device("cpu")


def test_what_is_read_is_held_when_it_is_kept_no_longer():
    made = cached_device_constant(2)(lambda n: torch.full((3,), n))
    with recording_constants() as read:
        first = weakref.ref(made(0))
    left = weakref.ref(made(1))
    for n in (2, 3, 4):
        made(n)
    assert first() is not None and left() is None
    assert torch.equal(read[0], torch.zeros(3, dtype=torch.int64)) and len(read) == 1


def test_it_is_made_once():
    calls = []
    made = cached_device_constant(2)(lambda n: calls.append(n))
    for _ in range(3):
        made(1)
    assert calls == [1]


def test_what_a_transform_has_made_first_serves_behind_it():
    made = cached_device_constant(2)(lambda n: torch.arange(n) * 2)
    torch.func.grad(lambda x: x * made(3).sum())(torch.ones(()))
    assert torch.equal(torch.zeros(3, dtype=torch.int64) + made(3), torch.tensor([0, 2, 4]))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(made(3))
    with torch.inference_mode():
        made(4)
    assert not made(4).is_inference()


def test_what_is_made_without_values_is_not_kept():
    made = cached_device_constant(2)(lambda n: torch.arange(n) * 2)
    with FakeTensorMode():
        assert isinstance(made(3), FakeTensor)
    assert torch.equal(made(3), torch.tensor([0, 2, 4])) and made(3) is made(3)


def test_what_is_computed_with_a_tensor_of_inference_mode_is_not_kept():
    calls = []
    found = cached_per_tensor(lambda x, by: calls.append(x * by))
    with torch.inference_mode():
        by = torch.ones(2)
    for _ in range(2):
        found(torch.ones(2), by)
    assert len(calls) == 2


def test_all_constants_of_maps_are_told():
    relation = Relation.of(3, 3)
    with recording_constants() as read:
        found = [offset_table(relation.offsets, CPU), groups_of(relation, SortSpec(0, 27), CPU)]
        found.append(CodeLayout.of(Bounds((0, 0, 0), (9, 9, 9), 1)).tables(CPU))
    assert all(any(x is y for y in read) for x in found)
    with recording_constants() as other:
        pass
    assert not other
