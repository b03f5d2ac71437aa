"""Fixtures of this folder."""

from cases import device  # noqa: F401
