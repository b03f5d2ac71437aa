"""Maps with several inputs of an output at one kernel offset: storages, every dataflow over pairs, and what refuses."""

import copy
import pickle

import pytest
import torch

import pumice as pm
from pumice.coords import MultiMap
from pumice.errors import OptionError
from pumice.lower import maps
from pumice.schedule.dataflow import DATAFLOWS

INPUTS, OUTPUTS, TAPS, PAIRS = 17, 11, 4, 90


def edges(seed=0, taps=TAPS):
    generator = torch.Generator().manual_seed(seed)
    inputs, outputs = (torch.randint(0, n, (PAIRS,), generator=generator) for n in (INPUTS, OUTPUTS - 1))
    # The second offset has no pairs; pairs occur several times.
    kinds = torch.randint(0, taps, (PAIRS,), generator=generator)
    kinds[kinds == 1] = 0
    inputs[:5], outputs[:5], kinds[:5] = 3, 2, 0
    return inputs, outputs, kinds


def looped(x, weight, sides, rows):
    y = x.new_zeros(rows, weight.shape[0])
    for i, o, k in zip(*sides, strict=True):
        y[o] = y[o] + weight[:, k] @ x[i]
    return y


def made(seed=0, taps=TAPS):
    inputs, outputs, kinds = edges(seed, taps)
    found, order = MultiMap.of((inputs, outputs), kinds, (INPUTS, OUTPUTS, taps))
    assert torch.equal(found.table.long(), torch.stack([inputs, outputs, kinds], 1)[order])
    return found, (inputs, outputs, kinds)


def over_pairs():
    return [name for name, flow in DATAFLOWS.items() if flow.form in ("pairs", "grouped")]


@pytest.mark.parametrize("flow", [None, *over_pairs()])
@pytest.mark.parametrize("flipped", [False, True])
def test_every_dataflow_over_pairs(flow, flipped, monkeypatch):
    monkeypatch.setattr(maps, "_FEWEST", 8)
    found, (inputs, outputs, kinds) = made()
    if flipped:
        found, inputs, outputs = found.transpose(), outputs, inputs
    x = torch.randn(found.num_inputs, 5, dtype=torch.float64).requires_grad_()
    weight = torch.randn(6, TAPS, 5, dtype=torch.float64).requires_grad_()
    got = pm.ops.conv_features(x, weight, found, found.num_outputs, dataflow=flow)
    wanted = looped(x, weight, (inputs, outputs, kinds), found.num_outputs)
    torch.testing.assert_close(got, wanted)
    up = torch.randn_like(wanted)
    for ours, theirs in zip(*(torch.autograd.grad(y, (x, weight), up) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_needs_one_input_refuses():
    found, _ = made()
    x, weight = torch.randn(INPUTS, 5), torch.randn(6, TAPS, 5)
    for name in DATAFLOWS.keys() - set(over_pairs()):
        with pytest.raises(OptionError, match="one input for each output and kernel offset"):
            pm.ops.conv_features(x, weight, found, OUTPUTS, dataflow=name)


def test_segments():
    found, _ = made()
    for one in (found, found.transpose()):
        order, inputs, segments, sizes, reduced = one.segments()
        assert torch.equal(one.pairs().inputs[order], inputs)
        assert (segments.diff() >= 0).all() and torch.equal(torch.bincount(segments), sizes)
        x = torch.randn(one.num_inputs, 5)
        weight = torch.randn(6, TAPS, 5)
        sums = pm.ops.segment_reduce(x[inputs], segments)
        got = pm.ops.conv_features(sums, weight, reduced, one.num_outputs)
        torch.testing.assert_close(got, pm.ops.conv_features(x, weight, one, one.num_outputs))
        places = reduced.pairs().outputs * TAPS + reduced.taps()
        assert len(places.unique()) == len(places)


def test_grouped_pairs_are_the_pairs():
    found, _ = made()
    for group in (1, 8, 64):
        taps, inputs, outputs = found.grouped(group)
        there = inputs >= 0
        assert torch.equal(there, outputs >= 0)
        listed = torch.stack([inputs[there], outputs[there], taps[:, None].expand_as(inputs)[there]], 1)
        assert torch.equal(listed, found.table)


def test_copies_and_counts():
    found, (_, outputs, _) = made()
    assert torch.equal(found.counts(), torch.bincount(outputs, minlength=OUTPUTS))
    for other in (copy.deepcopy(found.transpose()), pickle.loads(pickle.dumps(found.transpose()))):
        assert other.flipped and (other.num_inputs, other.volume) == (OUTPUTS, TAPS)
        assert torch.equal(other.pairs().inputs, found.pairs().outputs)
    assert torch.equal(found.to("cpu").pairs().inputs, found.pairs().inputs)
    assert repr(found) == "MultiMap(17 -> 11 rows, K=4, 90 pairs)"


def test_no_pairs_and_one_offset():
    empty = torch.zeros(0, dtype=torch.int64)
    found, _ = MultiMap.of((empty, empty), empty, (3, 2, 1))
    y = pm.ops.conv_features(torch.ones(3, 4), torch.ones(5, 1, 4), found, 2)
    assert y.shape == (2, 5) and not y.any()
    one, sides = made(3, 1)
    x, weight = torch.randn(INPUTS, 5), torch.randn(6, 1, 5)
    torch.testing.assert_close(pm.ops.conv_features(x, weight, one, OUTPUTS), looped(x, weight, sides, OUTPUTS))
