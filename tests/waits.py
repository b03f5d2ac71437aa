"""What a device is not to be asked for."""

from contextlib import contextmanager

import torch


@contextmanager
def no_wait():
    """An error where anything waits for the device."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
