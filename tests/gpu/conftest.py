"""Fixtures of this folder."""

import pytest
import torch


@pytest.fixture
def gpu():
    """The current GPU."""
    return torch.device("cuda", torch.cuda.current_device())
