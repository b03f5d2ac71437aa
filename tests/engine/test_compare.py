"""Whether a captured step is the eager one within rounding."""

import pytest
import torch

from pumice.engine.compare import steps_differ

NAMES = "the loss", "the gradient of a.weight"
WANT = torch.tensor(2.0), torch.ones(8)


def moved(by):
    return [want + by * torch.tensor([1.0, -1.0] * 4)[: want.numel()].view_as(want) for want in WANT]


@pytest.mark.parametrize(
    ("error", "others", "more", "differs"),
    [
        (1e-3, [0.0], 16, False),
        (1e-2, [0.0], 16, True),
        (1e-2, [1e-3], 16, False),
        (1e-2, [1e-3], 1, True),
        # The largest change of several counts.
        (1e-2, [1e-3, 1e-2, 0.0], 1, False),
        (3e-2, [1e-3, 1e-2, 0.0], 1, True),
    ],
)
def test_what_roundings_change_is_no_difference(error, others, more, differs):
    told = steps_differ(NAMES, [moved(error), [*WANT], *map(moved, others)], torch.float32, more)
    assert (told is not None) == differs
    assert told is None or told.startswith(f"{NAMES[0]}: rms error {error:.3g} of 2, at most ")


def test_what_is_not_finite_differs_unless_it_should_not_be():
    bad = [torch.tensor(torch.nan), torch.ones(8)]
    assert "the loss" in (steps_differ(NAMES, [bad, [*WANT], [*WANT]], torch.float32, 16) or "")
    assert steps_differ(NAMES, [bad, bad, bad], torch.float32, 16) is None
