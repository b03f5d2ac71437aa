"""A network of sparse tensors as a module of plain ones, which torch.export takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pumice.errors import OptionError
from pumice.ops import SparseTensor


class Exportable(nn.Module):
    """forward(coords int32 [N, 1+D], feats [N, C]) -> what `model` gives for them, in plain tensors; see exportable."""

    def __init__(
        self, model: nn.Module, stride: int | Sequence[int], spatial_shape: Sequence[int] | None, batch_size: int | None
    ) -> None:
        super().__init__()
        self.model = model
        self.stride = stride if isinstance(stride, int) else tuple(stride)
        self.spatial_shape = None if spatial_shape is None else tuple(spatial_shape)
        self.batch_size = batch_size

    def forward(self, coords: Tensor, feats: Tensor) -> Any:
        """(coords, feats) in place of every SparseTensor that the model gives, and tensors as they are."""
        return _plain(self.model(SparseTensor(feats, coords, self.stride, self.spatial_shape, self.batch_size)))

    @property
    def dynamic_shapes(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """What torch.export.export takes under this name: any number of voxels, the same for both."""
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
) -> Exportable:
    """`model`, which takes a SparseTensor, as a module that takes its coordinates and features, for torch.export.

    Parameters
    ----------
    model: takes a SparseTensor, gives SparseTensors or tensors, also in lists, tuples and mappings. Its weights are
        shared, and it keeps its mode: call eval() before exporting for inference.
    stride, spatial_shape, batch_size: of the SparseTensor, as there, once for all scans. batch_size: by default the
        largest batch index + 1 of each.

    Coordinates are checked in every call, as those of a SparseTensor are. The program can be saved; who loads it needs
    torch and pumice, and none of the model's code:

        net = pm.exportable(model.eval())
        program = torch.export.export(net, (x.coords, x.feats), dynamic_shapes=net.dynamic_shapes)
        torch.export.save(program, "net.pt2")

    Raises OptionError for a model that is no torch.nn.Module. Layers with named dataflows raise OptionError as they are
    traced: take these off first.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"exportable takes a torch.nn.Module, found {type(model).__name__}")
    return Exportable(model, stride, spatial_shape, batch_size)


def _plain(found: Any) -> Any:
    """Coordinates and features in place of sparse tensors."""
    if isinstance(found, SparseTensor):
        return found.coords, found.feats
    if isinstance(found, Mapping):
        return {key: _plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        values = [_plain(value) for value in found]
        return values if isinstance(found, list) else tuple(values)
    return found
