"""Finding all kernel maps of a network before it runs."""

from __future__ import annotations

import torch
from torch import nn

from pumice.errors import OptionError
from pumice.ops.tensor import SparseTensor


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
