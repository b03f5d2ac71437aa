"""Fixtures of this folder."""

import pytest
import torch


@pytest.fixture
def gpu():
    """The current GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda", torch.cuda.current_device())
