"""Fixtures of this folder."""

from cases import one_thread  # noqa: F401
