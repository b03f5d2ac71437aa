"""What waits for a device, and what waits for the background."""

import time
from contextlib import contextmanager

import torch

from pumice.runtime.compile import BACKGROUND


@contextmanager
def no_wait():
    """An error where anything waits for the device."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def wait_for_background():
    """Until no task is left there: some hold memory of the device while they run."""
    while BACKGROUND.left:
        time.sleep(0.02)
