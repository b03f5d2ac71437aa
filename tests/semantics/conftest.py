"""Fixtures of this folder."""

from cases import device, one_thread  # noqa: F401
