"""Which module stands in for which library, and putting it under that library's import names."""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from pumice.errors import OptionError

_LOG = logging.getLogger("pumice.compat")

LIBRARIES: Mapping[str, str] = {
    "spconv": "pumice.compat.spconv",
    "torchsparse": "pumice.compat.torchsparse",
    "MinkowskiEngine": "pumice.compat.minkowski",
    "flex_gemm": "pumice.compat.flexgemm",
    "torch_scatter": "pumice.compat.torch_scatter",
    "torch_cluster": "pumice.compat.torch_cluster",
    "pointops": "pumice.compat.pointops",
    "flash_attn": "pumice.compat.flash_attn",
}
"""By import name, the module that stands in. Its MODULES holds the names of each importable module of the library, by
dotted name: {"spconv.pytorch": {"SubMConv3d": ..., ...}}; of a library with versions, modules_of(mode) gives these.
A function `installing`, if there, is called first."""


def install(*libraries: str, mode: str | None = None) -> None:
    """Put pumice under the import names of these libraries (all of LIBRARIES if none are given), for this process.

    mode: which version's behaviour, for a library that has several: "1.4" or "2.1" of torchsparse (2.1 by default).
    Logs once, as a warning, what was replaced. Raises OptionError for names that are not in LIBRARIES, and for
    modes that a library does not have.
    """
    for name in libraries or LIBRARIES:
        OptionError.check("library", name, LIBRARIES)
        stand_in = importlib.import_module(LIBRARIES[name])
        versions = getattr(stand_in, "modules_of", None)
        if versions is None and mode is not None:
            raise OptionError(f"{name} has one mode, found {mode!r}")
        if hasattr(stand_in, "installing"):
            stand_in.installing()
        _replace(name, stand_in.MODULES if versions is None else versions(mode))


def uninstall(*libraries: str) -> None:
    """Undo `install` (of all libraries if none are given); objects that were imported meanwhile stay as they are."""
    for name in libraries or LIBRARIES:
        for path in [path for path, module in [*sys.modules.items()] if _is_stand_in(path, module, name)]:
            del sys.modules[path]


def _is_stand_in(path: str, module: Any, library: str) -> bool:
    # Not by getattr, which makes lazy modules of others import more.
    return getattr(module, "__dict__", {}).get("__pumice__") == library and path.partition(".")[0] != "pumice"


def _replace(library: str, modules: Mapping[str, Mapping[str, Any]]) -> None:
    roots = {path.partition(".")[0] for path in modules}
    loaded = [path for path in sys.modules if path.partition(".")[0] in roots]
    foreign = sorted(path for path in loaded if not _is_stand_in(path, sys.modules[path], library))
    for path in loaded:
        del sys.modules[path]
    for path, names in modules.items():
        sys.modules[path] = module_of(library, path, names)
    # Parents hold their children, as after an import, unless a name of theirs is the same.
    for path in modules:
        parent, _, child = path.rpartition(".")
        if parent in modules and child not in modules[parent]:
            setattr(sys.modules[parent], child, sys.modules[path])
    was = f" (in place of {len(foreign)} modules already imported)" if foreign else ""
    _LOG.warning("pumice stands in for %s%s", library, was)


def module_of(library: str, path: str, names: Mapping[str, Any]) -> ModuleType:
    """The module `path` of the stand-in for a library."""
    made = ModuleType(path, f"{library} over pumice")
    made.__dict__.update(names, __pumice__=library)
    # A package, so that submodules of it can be named in imports.
    made.__path__ = []
    made.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=True)
    return made
