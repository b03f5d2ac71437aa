"""Fixtures of this folder."""

from cases import device, one_thread  # noqa: F401
from lined import uncollected  # noqa: F401
