"""Packages that are not installed with pumice."""

import importlib
from typing import Any

from pumice.errors import OptionError


def extra(module: str, name: str) -> Any:
    """The module of an extra of pumice. Raises OptionError that names the extra if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise OptionError(
            f"expected the package {package} (`pip install .[{name}]` in a clone of pumice), found none ({error})"
        ) from error
