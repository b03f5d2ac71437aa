"""A network of sparse tensors as a module of plain tensors, for torch.export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pumice.errors import OptionError
from pumice.ops import SparseTensor


class Exportable(nn.Module):
    """forward(coords int32 [N, 1+D], feats [N, C]) -> the result of `model`, as plain tensors; see exportable."""

    def __init__(
        self,
        model: nn.Module,
        stride: int | Sequence[int],
        spatial_shape: Sequence[int] | None,
        batch_size: int | None,
        dim: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.stride: int | tuple[int, ...] = stride if isinstance(stride, int) else tuple(stride)
        self.spatial_shape: tuple[int, ...] | None = None if spatial_shape is None else tuple(spatial_shape)
        self.batch_size = batch_size
        self.dim = dim

    def forward(self, coords: Tensor, feats: Tensor) -> Any:
        """Result of the model, with every SparseTensor replaced by (coords, feats)."""
        x = SparseTensor(feats, coords, self.stride, self.spatial_shape, self.batch_size, dim=self.dim)
        return _plain(self.model(x))

    @property
    def dynamic_shapes(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """The argument of torch.export.export: a dynamic number of voxels, the same for both inputs."""
        voxels = torch.export.Dim("voxels")
        return {0: voxels}, {0: voxels}

    def extra_repr(self) -> str:
        return f"stride={self.stride}, spatial_shape={self.spatial_shape}, batch_size={self.batch_size}"


def exportable(
    model: nn.Module,
    *,
    stride: int | Sequence[int] = 1,
    spatial_shape: Sequence[int] | None = None,
    batch_size: int | None = None,
    dim: int = 3,
) -> Exportable:
    """Wrap `model`, which takes a SparseTensor, as a module of coordinates and features, for torch.export.

    Parameters
    ----------
    model: takes a SparseTensor, returns SparseTensors or tensors, also in lists, tuples and mappings. Its weights are
        shared and its mode is kept: call eval() before exporting for inference.
    stride, spatial_shape, batch_size, dim: as in SparseTensor, fixed for all scenes. batch_size: default the largest
        batch index of each scene + 1.

    Coordinates are checked in every call, as by SparseTensor. Loading a saved program needs torch and pumice, but not
    the model's code:

        net = pm.exportable(model.eval())
        program = torch.export.export(net, (x.coords, x.feats), dynamic_shapes=net.dynamic_shapes)
        torch.export.save(program, "net.pt2")

    Raises OptionError if `model` is no torch.nn.Module. Layers with named dataflows raise OptionError when traced:
    set `dataflow = None` first.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"exportable takes a torch.nn.Module, found {type(model).__name__}")
    return Exportable(model, stride, spatial_shape, batch_size, dim)


def _plain(found: Any) -> Any:
    """Replace sparse tensors by (coords, feats)."""
    if isinstance(found, SparseTensor):
        return found.coords, found.feats
    if isinstance(found, Mapping):
        return {key: _plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        values = [_plain(value) for value in found]
        return values if isinstance(found, list) else tuple(values)
    return found
