"""Finding all kernel maps of a network before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pumice.coords import Relation, kernel_map, pyramid
from pumice.errors import OptionError, ShapeError
from pumice.lower import maps
from pumice.ops.tensor import SparseTensor


def prepare_levels(x: SparseTensor, steps: Sequence[Relation], same: Sequence[Sequence[Relation]]) -> None:
    """See SparseTensor.prepare."""
    if not all(isinstance(step, Relation) for step in _listed(steps)):
        raise OptionError(f"steps takes a list of Relations, found {steps!r}")
    if not all(isinstance(window, Relation) for windows in _listed(same) for window in _listed(windows)):
        raise OptionError(f"same takes a list of Relations for each level, found {same!r}")
    if len(same) > len(steps) + 1:
        raise ShapeError(f"windows are given for {len(same)} levels, {len(steps)} steps lead to {len(steps) + 1}")
    if torch.compiler.is_compiling():
        return
    levels = pyramid(x.geometry, steps)
    found = [kernel_map(level, step)[0] for level, step in zip(levels, steps, strict=False)]
    found += [
        kernel_map(level, relation)[0] for level, windows in zip(levels, same, strict=False) for relation in windows
    ]
    if x.geometry.device.type == "cuda":
        maps.settled([*found, *(one.transpose() for one in found[: len(steps)])], torch.is_grad_enabled())


def _listed(values: Any) -> Sequence[Any]:
    """Itself if it is a sequence, else one entry that is none of those wanted."""
    return values if isinstance(values, Sequence) else (None,)


def prepare(model: nn.Module, x: SparseTensor) -> SparseTensor:
    """Find every kernel map that `model` will ask for on x's coordinates, without any arithmetic; returns x.

    The model runs once on features without values (torch's meta device), so that afterwards torch.compile can trace
    it and a later pass does not wait for maps. The maps are kept by x's geometry.

    Raises OptionError for a model that has no module form.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"prepare takes a torch.nn.Module, found {type(model).__name__}")
    shadow = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    with torch.no_grad():
        torch.func.functional_call(model, shadow, (x.replace(torch.empty_like(x.feats, device="meta")),))
    return x
