"""Sparse convolutions over kernel maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pumice.coords import Geometry, KernelMap, Relation, kernel_map
from pumice.errors import DeviceError, DtypeError, OptionError, ShapeError
from pumice.lower import maps, plan
from pumice.lower.call import MapCall, keep_call, product_call, run_product
from pumice.lower.dataflow import CONV, GROUPED_CONV
from pumice.lower.epilogue import NO_EPILOGUE, Epilogue, EpilogueSignature, applied, check_epilogue
from pumice.lower.reference import EIGHT_BITS
from pumice.ops import autograd
from pumice.ops.ahead import Calls, Compilation, compilations_of, compile_layers
from pumice.ops.autograd import by_dataflow
from pumice.ops.prepare import layer_map
from pumice.ops.tensor import SparseTensor, from_raw_feats, not_sparse, one_node, raw_feats, unchecked_tensor
from pumice.schedule.dataflow import Dataflow, Dataflows, chosen

Size = int | Sequence[int]
Target = str | SparseTensor | Geometry | None
Flow = str | Dataflow | Dataflows | None


@one_node
def conv(
    x: SparseTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Size = 1,
    padding: Size | None = None,
    dilation: Size = 1,
    groups: int = 1,
    out: Target = None,
    offsets: Sequence[Sequence[int]] | None = None,
    epilogue: Epilogue | None = None,
    dataflow: Flow = None,
) -> SparseTensor:
    """Sparse convolution. Defaults at stride 1: submanifold, centred padding.

        y[o, n] = bias[n] + sum over kernel offsets r and inputs i with  in = stride * out + dilation * r - padding  of
                  x[i, c] * weight[n, r, c]

    Parameters
    ----------
    x: N voxels x C_in channels, D axes.
    weight: [C_out, *kernel, C_in / groups], kernel offsets row-major; with `offsets` [C_out, K, C_in / groups].
    bias: [C_out] or None.
    stride, padding, dilation: an int or one per axis. Default padding: dilation * (k // 2), for even kernels 0.
    groups: channel groups; C_in for a depthwise convolution.
    out: output coordinates. "same" (submanifold; default at stride 1), "support" (the active set of the dense
        convolution; default at larger strides if padding is given), "floor_unique" (the distinct floor(in / stride);
        default at larger strides otherwise), or a SparseTensor or Geometry on the output coordinates.
    offsets: K distinct offsets of D integers instead of a kernel window: in = stride * out + dilation * offsets[k].
    epilogue: replaces y by activation((y - mean) / sqrt(variance + eps) * scale + shift + residual), cast: a batch
        norm in evaluation mode, a residual sum, the scales of 8-bit values. Fused if no gradient is needed.
    dataflow: a name of pumice.schedule.dataflow.DATAFLOWS, a Dataflow, or one per pass as
        Dataflows(forward, dgrad, wgrad). None: automatic.

    Returns a SparseTensor of C_out channels, in the dtype of x; under autocast in the autocast dtype; for 8-bit x and
    weight (ops.quantize) in float32 or the dtype of the epilogue. New coordinates are in (batch, Morton) order; given
    or unchanged ones keep their order.
    Raises ShapeError, DtypeError, DeviceError, OptionError, CoordinateError.

    Dilation, stride and padding as in torch.nn.functional.conv3d; the submanifold rule is that of Graham, Engelcke
    and van der Maaten, "3D Semantic Segmentation with Submanifold Sparse Convolutional Networks", CVPR 2018, sec. 3.
    """
    _check_weight(x, weight, bias, groups, spatial=offsets is None)
    policy, target = target_of(out)
    if offsets is None:
        window = tuple(weight.shape[1:-1])
        relation = Relation.of(x.spatial_dim, window, stride=stride, padding=padding, dilation=dilation, policy=policy)
    else:
        _check_offsets(weight, offsets, padding)
        relation = Relation.of_offsets(x.spatial_dim, offsets, stride=stride, dilation=dilation, policy=policy)
    found = _map_of(x.geometry, (relation, target), weight, dataflow)
    return _over_map(x, weight, bias, groups, found, epilogue, dataflow)


def convolve(
    x: SparseTensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    map_request: tuple[Relation, Geometry | None],
    dataflow: Flow = None,
    epilogue: Epilogue | None = None,
) -> SparseTensor:
    """Convolution for a relation and target geometry (`map_request`), as layers call it."""
    relation, target = map_request
    known = groups == 1 and dataflow is None
    if known and (y := _by_known_kernel(x, weight, bias, map_request, epilogue)) is not None:
        return y
    check_layer(x, weight, bias, groups, relation)
    found = _map_of(x.geometry, (relation, target), weight, dataflow)
    return _over_map(x, weight, bias, groups, found, epilogue, dataflow)


def _map_of(
    geometry: Geometry, request: tuple[Relation, Geometry | None], weight: Tensor, dataflow: Flow
) -> tuple[KernelMap, Geometry]:
    return layer_map(geometry, *request, weight) if dataflow is None else kernel_map(geometry, *request)


def _by_known_kernel(
    x: SparseTensor,
    weight: Tensor,
    bias: Tensor | None,
    map_request: tuple[Relation, Geometry | None],
    epilogue: Epilogue | None,
) -> SparseTensor | None:
    """Fast path of `convolve`: the result of a kernel cached by an equal earlier call, without its checks, or of a
    differentiable call if autograd records and the operands match; else None."""
    if torch.compiler.is_compiling() or not isinstance(x, SparseTensor):
        return None
    if epilogue is not None and (bias is not None or not isinstance(epilogue, Epilogue)):
        return None
    geometry, feats = x.geometry, raw_feats(x)
    if not autograd.uses_gpu(feats):
        return None
    tensors, finish = _tensors_and_signature(feats, weight, epilogue if bias is None else Epilogue(shift=bias))
    plain = autograd.is_plain_call(tensors)
    if not (plain or epilogue is None) or geometry.buffered is not None:
        return None
    relation, target = map_request
    kept = geometry.maps.get((relation, None)) if target is None else None
    found, outputs = kept or layer_map(geometry, relation, target, weight)
    if outputs is not None:
        outputs.require_unwritten()
    y = run_product(tensors, found, finish) if plain else _recorded(feats, weight, bias, found)
    return None if y is None else unchecked_tensor(y, geometry if outputs is None else outputs)


def _recorded(x: Tensor, weight: Tensor, bias: Tensor | None, found: KernelMap) -> Tensor | None:
    """The result with an autograd node; None if none is needed, if more than autograd is active, or if operands do not
    match."""
    if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
        return None
    if not autograd.only_autograd_active((x, weight) if bias is None else (x, weight, bias)):
        return None
    dtype = autocast_dtype(x)
    if not _fits(x, weight, bias, found) or not (_is_cast(x, weight) if dtype else _is_alike(x, weight)):
        return None
    if dtype is not None:
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    y = differentiable_call(x, weight, found, found.num_outputs)(x, weight)
    return y if bias is None else y + bias


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None, found: KernelMap) -> bool:
    """True if devices and shapes match each other and the map."""
    table, relation, shape = found.table, found.relation, weight.shape
    window = table.shape[1:] if relation.custom is not None else relation.kernel
    if bias is not None and (bias.shape, bias.dtype, bias.device) != (shape[:1], weight.dtype, weight.device):
        return False
    alike = x.device == weight.device == table.device
    return alike and x.shape == (found.num_inputs, shape[-1]) and shape[1:-1] == window


def _is_alike(x: Tensor, weight: Tensor) -> bool:
    """True if features and weight have the same dtype, one with gradients."""
    return x.dtype == weight.dtype and x.is_floating_point() and x.dtype not in EIGHT_BITS


@one_node
def conv_transpose(
    x: SparseTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Size = 1,
    padding: Size | None = 0,
    dilation: Size = 1,
    groups: int = 1,
    output_padding: Size = 0,
    bounded: bool = True,
    dataflow: Flow = None,
) -> SparseTensor:
    """Transposed sparse convolution, which generates new coordinates.

        y[o, n] = bias[n] + sum over kernel offsets r and inputs i with  out = stride * in + dilation * r - padding  of
                  x[i, c] * weight[n, r, c]

    weight is [C_out, *kernel, C_in / groups], output channels of this layer first, not flipped. The outputs are all
    such `out`. With a spatial_shape S they are bounded by (S-1) * stride - 2 * padding + dilation * (k-1) + 1 +
    output_padding, as in torch; with bounded=False (generative convolution) they are unbounded. padding=None centres
    odd kernels. The stride of the result is that of x divided by `stride`.
    Raises as conv does.
    """
    _check_weight(x, weight, bias, groups, spatial=True)
    relation = Relation.of_transposed(
        x.spatial_dim,
        tuple(weight.shape[1:-1]),
        stride=stride,
        padding=padding,
        dilation=dilation,
        output_padding=output_padding,
        bounded=bounded,
    )
    return _over_map(x, weight, bias, groups, kernel_map(x.geometry, relation), None, dataflow)


@one_node
def conv_inverse(
    x: SparseTensor,
    weight: Tensor,
    target: SparseTensor | Geometry | None = None,
    bias: Tensor | None = None,
    *,
    stride: Size = 1,
    padding: Size | None = None,
    dilation: Size = 1,
    groups: int = 1,
    dataflow: Flow = None,
) -> SparseTensor:
    """Inverse of a strided convolution: from x to the known, finer coordinates of `target`.

        y[o, n] = bias[n] + sum over kernel offsets r and inputs i with  out = stride * in + dilation * r - padding  of
                  x[i, c] * weight[n, r, c]

    only for the `out` in `target`: over the transposed kernel map of the forward convolution with the same stride,
    padding and dilation. target=None: the coordinates from which x's derive. weight is [C_out, *kernel, C_in / groups].
    Raises as conv does, and GeometryError if x's coordinates are known to derive from other coordinates than the
    target's or by another window, or if target is None and their origin is unknown.
    """
    _check_weight(x, weight, bias, groups, spatial=True)
    relation = Relation.of(
        x.spatial_dim,
        tuple(weight.shape[1:-1]),
        stride=stride,
        padding=padding,
        dilation=dilation,
        policy="cached_inverse",
    )
    _, finer = target_of(target)
    return _over_map(x, weight, bias, groups, kernel_map(x.geometry, relation, finer), None, dataflow)


def conv_features(
    x: Tensor,
    weight: Tensor,
    found: KernelMap,
    rows: int,
    groups: int = 1,
    epilogue: Epilogue | None = None,
    dataflow: Flow = None,
) -> Tensor:
    """Convolution over a kernel map: x [N_in, C_in], weight [C_out, K, C_in / groups] -> [rows, C_out].

    found: the kernel map; rows: its number of outputs; dataflow: as in `conv`. Differentiable any number of times in x
    and weight. On a GPU small groups are merged for the tensor cores: inf and NaN then spread to neighbouring groups.
    Raises ShapeError, DtypeError, DeviceError, OptionError.
    """
    _check_dtypes(x, weight)
    if dataflow is None and groups == 1 and weight.ndim == 3:
        return _features(x, weight, found, rows, epilogue)
    return _checked_forward(x, weight, found, rows, groups, epilogue, dataflow)


def _features(x: Tensor, weight: Tensor, found: KernelMap, rows: int, epilogue: Epilogue | None) -> Tensor:
    """conv_features for groups=1, the automatic dataflow and any number of kernel axes; reuses the kernel of earlier
    calls."""
    tensors, finish = _tensors_and_signature(x, weight, epilogue)
    plain = autograd.is_plain_call(tensors)
    launches = plain and autograd.uses_gpu(x)
    if launches and rows == found.num_outputs and (y := run_product(tensors, found, finish)) is not None:
        return y
    if launches and not found.buffered:
        compile_layers(Calls(x, rows))
    # Under autograd a view of the weight would add a node.
    flat = _flat(weight) if plain else weight
    y = _checked_forward(x, flat, found, rows, 1, epilogue, None, plain)
    if launches:
        _keep_call(tensors, flat, found, finish)
    return y


def _flat(weight: Tensor) -> Tensor:
    """The weight as [C_out, K, C_in]."""
    return weight if weight.ndim == 3 else weight.reshape(weight.shape[0], -1, weight.shape[-1])


def _tensors_and_signature(
    x: Tensor, weight: Tensor, epilogue: Epilogue | None
) -> tuple[tuple[Tensor, ...], EpilogueSignature]:
    if epilogue is None:
        return (x, weight), NO_EPILOGUE
    return (x, weight, *epilogue.operands.values()), epilogue.signature


def _keep_call(tensors: Sequence[Tensor], flat: Tensor, found: KernelMap, finish: EpilogueSignature) -> None:
    """Cache the launch of an executed call, and its template, for later calls, if it is one kernel."""
    x, weight, *more = tensors
    call_plan = found.get_cached((finish, _call_key(x, flat, found.num_outputs, 1)))
    if call_plan is None or flat.data_ptr() != weight.data_ptr():
        # `flat` is a copy of a strided weight: the launch would not read the weight of later calls.
        return
    call = product_call(tensors, finish, maps.bound_map(found), found.num_outputs)
    bound = call_plan.keep_call(call, (x, flat, *more), (0, 1), finish)
    if bound is not None:
        keep_call(found, call.signature, bound)


def compilation(x: Tensor, weight: Tensor, found: KernelMap, epilogue: Epilogue | None) -> Callable[[], object] | None:
    """Task that compiles the kernel of a plain conv_features call with groups=1 on such tensors, without running it;
    None if a template is known or none can be made."""
    tokens, arrays = maps.planner_operands(found, False)
    return _compilation(x, weight, tokens, (arrays, found.num_outputs), epilogue)


def plan_for_other_tiles(
    x: Tensor, weight: Tensor, found: KernelMap, epilogue: Epilogue | None
) -> Callable[[], object] | None:
    """Plan the kernel of such calls over maps with the other tile height; row counts may differ from the map's. Returns
    a function that starts to compile it in the background; None if nothing is to be compiled, or without a GPU."""
    if not x.is_cuda:
        return None
    tiles = maps.other_tiles(found)
    task = _compilation(x, weight, tiles.tokens, (tiles.arrays(x.device), tiles.outputs), epilogue)
    return None if task is None else partial(maps.TILE_HEIGHTS.compile, tiles.block, task)


def plan_gradient_for_other_tiles(
    weight: Tensor, found: KernelMap, of: tuple[int, torch.dtype]
) -> Callable[[], object] | None:
    """plan_for_other_tiles for a gradient. weight: [C_out, K, C_in]; of: (0 for the feature gradient or 1 for the
    weight gradient, its dtype)."""
    if not weight.is_cuda:
        return None
    tiles = maps.other_tiles(found if of[0] or found.symmetric else found.transpose())
    call, x, grad = _call_over_tiles(weight, tiles, found.symmetric)
    task = call.compilation((x, weight, grad), of)
    return None if task is None else partial(maps.TILE_HEIGHTS.compile, tiles.block, task)


def _call_over_tiles(
    weight: Tensor, tiles: maps.UsualTiles, symmetric: bool
) -> tuple[autograd.DifferentiableCall, Tensor, Tensor]:
    """(differentiable call over such tiles, example features, example output gradient). weight: [C_out, K, C_in]."""
    rows = tiles.outputs
    arrays = tiles.arrays_of_passes(weight.shape[1], symmetric, weight.device)
    x, grad = weight.new_empty((rows, weight.shape[2])), weight.new_empty((rows, weight.shape[0]))
    return _call_over_arrays((x, weight), arrays, rows, {}), x, grad


@compilations_of("convolution")
def _layer_compilations(layer: Any, calls: Calls) -> Iterator[Compilation]:
    """Compilations of a layer with groups=1 and the automatic dataflow: for the tiles usual in a scene and, at lower
    priority, for those of larger scenes."""
    if layer.groups > 1 or layer.dataflow is not None:
        return
    volume = math.prod(layer.weight.shape[1:-1])
    for tiles in maps.usual_tiles(volume, calls.rows):
        yield from _compilations_over(layer, calls, tiles)
    for tiles in maps.tiles_of_larger_scenes(volume, calls.rows):
        for found in _compilations_over(layer, calls, tiles):
            yield found._replace(submit=partial(maps.TILE_HEIGHTS.compile, tiles.block))


def _compilations_over(layer: Any, calls: Calls, tiles: maps.UsualTiles) -> Iterator[Compilation]:
    weight, bias, like = layer.weight, layer.bias, calls.like
    dtype, device, shape = weight.dtype, weight.device, _shape_of(weight)
    # The differentiable call casts a float32 weight.
    if calls.training and device == like.device and dtype in (like.dtype, torch.float32):
        symmetric = layer.relation.policy == "same" and layer.relation.mirrored
        for of in (None, (0, like.dtype), (1, dtype)):
            task = partial(_compile_pass, like.new_empty(weight.shape), symmetric, tiles, of)
            yield Compilation(("pass", shape, symmetric, tiles, of), task, back=of is not None)
    elif not calls.training and (dtype, device) == (like.dtype, like.device):
        x, epilogue = like.new_empty((1, weight.shape[-1])), None if bias is None else Epilogue(shift=bias.detach())
        task = partial(_compile_over, x, weight.detach(), epilogue, tiles)
        yield Compilation(("result", shape, bias is None, tiles), task)


def _shape_of(weight: Tensor) -> tuple[int, int, int]:
    """(C_out, number of kernel offsets, C_in)."""
    return weight.shape[0], math.prod(weight.shape[1:-1]), weight.shape[-1]


def _compile_pass(weight: Tensor, symmetric: bool, tiles: maps.UsualTiles, of: tuple[int, torch.dtype] | None) -> None:
    """Compile one kernel of a layer in training. weight: example, in the features' dtype; symmetric: True if its maps
    are their own transposes up to the order of kernel offsets; of: None for the forward pass, or (0 for the feature
    gradient or 1 for the weight gradient, its dtype)."""
    flat = _flat(weight)
    call, x, grad = _call_over_tiles(flat, tiles, symmetric)
    task = call.compilation((x, flat) if of is None else (x, flat, grad), of)
    if task is not None:
        task()


def _compile_over(x: Tensor, weight: Tensor, epilogue: Epilogue | None, tiles: maps.UsualTiles) -> None:
    # Allocated within the task: all layers at once would need much memory.
    over = tiles.arrays(x.device), tiles.outputs
    call = _call_like(x, weight, tiles.tokens, over, epilogue)
    known = call.template
    task = (
        _planned(x, weight, call, tiles.tokens, epilogue)
        if known is None
        else known.compilation(call.on, call.rows, call.shape)
    )
    if task is not None:
        task()


def _compilation(
    x: Tensor, weight: Tensor, tokens: tuple[str, ...], over: tuple[Sequence[Tensor], int], epilogue: Epilogue | None
) -> Callable[[], object] | None:
    """`compilation` for the arrays of a map. over: (arrays, number of outputs)."""
    call = _call_like(x, weight, tokens, over, epilogue)
    return _planned(x, weight, call, tokens, epilogue) if call.template is None else None


def _planned(
    x: Tensor, weight: Tensor, call: MapCall, tokens: tuple[str, ...], epilogue: Epilogue | None
) -> Callable[[], object] | None:
    """Cache a template for the call. Returns the task that compiles its kernel, None unless the call is one kernel."""
    flat = _flat(weight)
    if flat.data_ptr() != weight.data_ptr():
        return None
    tensors, finish = _tensors_and_signature(x, weight, epilogue)
    names, text, shape = _statement_of(tokens, flat, call.shape[0], 1)
    ask = plan.PlanRequest(names, text, shape, _STATIC_OPERANDS, (0, 1), "", finish)
    ready = plan.bound_plan([x, flat, *call.on.arrays], ask)
    return ready.compilation(call, (x, flat, *tensors[2:]), (0, 1), finish)


def _call_like(
    x: Tensor, weight: Tensor, tokens: tuple[str, ...], over: tuple[Sequence[Tensor], int], epilogue: Epilogue | None
) -> MapCall:
    (arrays, rows), (tensors, finish) = over, _tensors_and_signature(x, weight, epilogue)
    signature = maps.MapSignature.of(tokens, math.prod(weight.shape[1:-1]), arrays)
    return product_call(tensors, finish, maps.BoundMap(arrays, signature), rows)


def _call_key(x: Tensor, weight: Tensor, rows: int, groups: int) -> Hashable:
    """Cache key of a call's plan, among those kept with a map."""
    facts = x.shape, x.dtype, x.device, weight.shape, weight.dtype, weight.device
    return rows, groups, plan.deterministic(), facts


def _checked_forward(
    x: Tensor,
    weight: Tensor,
    found: KernelMap,
    rows: int,
    groups: int,
    epilogue: Epilogue | None = None,
    dataflow: Flow = None,
    plain: bool | None = None,
) -> Tensor:
    """conv_features with all checks. plain: the result of is_plain_call, if known."""
    weight, groups = merge_small_groups(x, weight, groups)
    if epilogue is not None:
        check_epilogue(epilogue, (rows, weight.shape[0]), x.device)
    if dataflow is not None:
        _check_devices(x, weight, found)
        _check_call(x, weight, found, rows, groups)
        return by_dataflow((x, weight), found, groups, chosen(dataflow), epilogue)
    if plain is None:
        plain = autograd.is_plain_call(_tensors_and_signature(x, weight, epilogue)[0])
    if plain:
        finish = NO_EPILOGUE if epilogue is None else epilogue.signature
        key = finish, _call_key(x, weight, rows, groups)
        call_plan = found.cached(key, lambda m: _plan_of((x, weight), m, rows, groups, finish))
        y = plan.execute_plan(
            call_plan, _grouped(x, weight, groups), None if epilogue is None else epilogue.split(groups)
        )
        return y if groups == 1 else y.flatten(1)
    differentiable = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if differentiable and x.dtype in EIGHT_BITS:
        raise DtypeError(f"{x.dtype} is for inference and has no gradients; train in wider floats, then quantize")
    if autograd.only_autograd_active((x, weight)):
        y = differentiable_call(x, weight, found, rows, groups, differentiable)(*_grouped(x, weight, groups))
    else:
        weight = _flat(weight)
        y = autograd.einsum(*_planner_operands((x, weight), found, rows, groups, differentiable))
    y = y if groups == 1 else y.flatten(1)
    return y if epilogue is None else applied(y, epilogue)


def differentiable_call(
    x: Tensor, weight: Tensor, found: KernelMap, rows: int, groups: int = 1, differentiable: bool = True
) -> autograd.DifferentiableCall:
    """The DifferentiableCall, cached with the map, for operands like x [N_in, C_in] and weight
    [C_out, K, C_in / groups], or for groups=1 a weight with any number of kernel axes."""
    key = ("differentiable", differentiable, _call_key(x, weight, rows, groups))
    return found.cached(key, lambda m: _bound_call((x, weight), m, rows, groups, differentiable))


_NARROW = 32
"""Channels per group below which tensor cores would be mostly idle."""
_WIDE = 256
"""Channels from which a depthwise convolution without tensor cores is memory-bound."""


def merge_small_groups(x: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, int]:
    """Merge small channel groups into block-diagonal weights: (weight, groups). Not cached: writes through `.data` or
    between replays of a CUDA graph do not change a tensor's version."""
    together = _groups_to_merge(x, weight, groups) if groups > 1 else 1
    if together == 1:
        return weight, groups
    (outputs, volume, each), fewer = weight.shape, groups // together
    parts = weight.reshape(fewer, together, outputs // groups, volume, each)
    # [group, output part, n, kernel offset, input part, c]: nonzero where output part = input part.
    whole = torch.diag_embed(parts.permute(0, 2, 3, 4, 1), dim1=1, dim2=4)
    return whole.reshape(outputs, volume, together * each), fewer


def _groups_to_merge(x: Tensor, weight: Tensor, groups: int) -> int:
    """Number of groups to merge into one; 1 unless groups are small, on a GPU. H200, 128 channels (waymo_1f_5cm, fp16):
    0.75 ms in 32 groups without tensor cores, 0.064 ms in 4 groups."""
    fits = x.ndim == 2 and weight.ndim == 3 and weight.shape[2] * groups == x.shape[1]
    if not _has_tensor_cores(x) or not fits or weight.shape[0] % groups:
        return 1
    each = min(weight.shape[0] // groups, weight.shape[2])
    if not each or each >= _NARROW or (x.shape[1] == groups >= _WIDE):
        return 1
    enough = (n for n in range(2, groups + 1) if groups % n == 0 and n * each >= _NARROW)
    return next(enough, groups)


def _has_tensor_cores(x: Tensor) -> bool:
    return x.is_cuda


def _plan_of(
    given: tuple[Tensor, Tensor], found: KernelMap, rows: int, groups: int, finish: EpilogueSignature
) -> plan.Plan:
    """The plan of a call, bound to the arrays of the map."""
    operands, names, text, shape = _planner_operands(given, found, rows, groups, False)
    ask = plan.PlanRequest(names, text, shape, _STATIC_OPERANDS, (0, 1), _lowering(found, operands), finish)
    return plan.bound_plan(operands, ask, _kinds(found))


def _bound_call(
    given: tuple[Tensor, Tensor], found: KernelMap, rows: int, groups: int, differentiable: bool
) -> autograd.DifferentiableCall:
    """A DifferentiableCall bound to the map's arrays; it casts the weight to the dtype of x."""
    if groups == 1:
        given = given[0], _flat(given[1].detach())
    _check_devices(*given, found)
    _check_shapes(*given, found, rows, groups)
    arrays, lowering = maps.MapArrays.of(found, differentiable), _lowering(found, given)
    return _call_over_arrays(given, arrays, rows, found.calls, groups, lowering)


def _call_over_arrays(
    given: tuple[Tensor, Tensor],
    arrays: maps.MapArrays,
    rows: int,
    launches: dict[Hashable, Any],
    groups: int = 1,
    lowering: str = "",
) -> autograd.DifferentiableCall:
    """A DifferentiableCall over the arrays of a map. launches: over the map, by signature."""
    names, text, shape = _statement_of(arrays.tokens, given[1], rows, groups)
    ask = plan.PlanRequest(names, text, shape, _STATIC_OPERANDS, (0, 1), lowering)
    like = _grouped(*given, groups), given[0].dtype
    return autograd.DifferentiableCall(ask, like, arrays, launches)


def _lowering(found: KernelMap, operands: Sequence[Tensor]) -> str:
    """Force "triton" for padded buffers on a GPU, where only kernels skip padding entries. On a CPU prefer "gathered":
    the bits of an output do not depend on how many there are. Else "", automatic."""
    if operands[0].device.type == "cpu":
        return f"gathered{plan.PREFERRED}"
    return "triton" if found.buffered is not None and operands[0].is_cuda else ""


def _kinds(found: KernelMap) -> Sequence[plan.Kind | None]:
    """Planner kinds of the operands in inference: None for x and w, those of the map's arrays cached."""
    return found.cached("kinds", lambda m: (None, None, *map(plan.kind_of, maps.planner_operands(m, False)[1])))


_STATIC_OPERANDS = (1,)
"""Position, in (x, w, arrays of a map), of the operand whose first axis has a fixed size: w."""


def _planner_operands(
    given: tuple[Tensor, Tensor], found: KernelMap, rows: int, groups: int, differentiable: bool
) -> tuple[list[Tensor], str, str, tuple[int, ...]]:
    """All operands, their names, the statement, and the shape of its target."""
    x, weight = given
    _check_devices(x, weight, found)
    _check_call(x, weight, found, rows, groups)
    tokens, arrays = maps.planner_operands(found, differentiable)
    names, text, shape = _statement_of(tokens, weight, rows, groups)
    return [*_grouped(x, weight, groups), *arrays], names, text, shape


def _statement_of(tokens: Sequence[str], weight: Tensor, rows: int, groups: int) -> tuple[str, str, tuple[int, ...]]:
    """Names of the operands, the statement, and the shape of its target."""
    names, outputs = "|".join(("x", "w", *tokens)), weight.shape[0]
    return (names, CONV, (rows, outputs)) if groups == 1 else (names, GROUPED_CONV, (rows, groups, outputs // groups))


def _grouped(x: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    if groups == 1:
        return x, weight
    return x.unflatten(1, (groups, -1)), weight.unflatten(0, (groups, weight.shape[0] // groups))


def _over_map(
    x: SparseTensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    mapped: tuple[KernelMap, Geometry],
    epilogue: Epilogue | None = None,
    dataflow: Flow = None,
) -> SparseTensor:
    if epilogue is not None and not isinstance(epilogue, Epilogue):
        raise OptionError(f"epilogue takes a pumice.ops.Epilogue, found {type(epilogue).__name__}")
    given = raw_feats(x)
    within = groups == 1 and dataflow is None and epilogue is None and _cast_within(given, weight)
    feats, cast, bias = _autocast(given, weight, bias, within)
    if feats.dtype != cast.dtype and not within:
        how = "quantize both" if {feats.dtype, cast.dtype} & {*EIGHT_BITS} else "convert one, or use torch.autocast"
        raise DtypeError(f"x is {feats.dtype}, weight is {cast.dtype}; {how}")
    if x.geometry.buffered is None:
        return _product(feats, cast, bias, groups, mapped, epilogue, dataflow)
    # All casts are done: without autocast the call can be plain and bound to a kernel.
    with autograd.autocast_disabled((feats,)):
        return _product(feats, cast, bias, groups, mapped, epilogue, dataflow)


def _product(
    feats: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    mapped: tuple[KernelMap, Geometry],
    epilogue: Epilogue | None,
    dataflow: Flow,
) -> SparseTensor:
    found, outputs = mapped
    if outputs.trains and epilogue is not None:
        # Gradients of an epilogue sum over rows: `feats` zeroes padding rows.
        y = _product(feats, weight, bias, groups, mapped, None, dataflow)
        return SparseTensor(applied(y.feats, epilogue), outputs)
    if bias is not None:
        _check_bias(bias, feats.dtype)
    apart = None
    if epilogue is None and bias is not None and not autograd.is_plain_call((feats, weight, bias)):
        # A separate addition has a cheaper gradient than an epilogue.
        apart, bias = bias, None
    if bias is not None:
        epilogue = (epilogue or Epilogue()).with_bias(bias)
    rows = outputs.coords.shape[0]
    if groups == 1 and dataflow is None:
        y = _features(feats, weight, found, rows, epilogue)
    else:
        y = _checked_forward(feats, _flat(weight), found, rows, groups, epilogue, dataflow)
    return from_raw_feats(y, outputs) if apart is None else SparseTensor(y + apart, outputs)


def _check_bias(bias: Tensor, dtype: torch.dtype) -> None:
    """Check the bias against the dtype of features and weight."""
    if dtype not in EIGHT_BITS:
        if bias.dtype != dtype:
            raise DtypeError(f"bias is {bias.dtype}, weight is {dtype}; convert one")
    elif not bias.is_floating_point() or bias.dtype in EIGHT_BITS:
        raise DtypeError(f"a bias of {dtype} weights is in wider floats, found {bias.dtype}")


def _check_devices(x: Tensor, weight: Tensor, found: KernelMap) -> None:
    """Raise DeviceError for tensors on another device than the map: kernels take raw addresses. Meta x is allowed."""
    if x.is_meta or (x.device == found.device and weight.device == found.device):
        return
    name, tensor = ("x", x) if x.device != found.device else ("weight", weight)
    raise DeviceError(f"{name} is on {tensor.device}, the kernel map on {found.device}")


def _check_dtypes(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype or not (x.is_floating_point() or x.dtype in EIGHT_BITS):
        raise DtypeError(f"x and weight are of one dtype, floating point or int8, found {x.dtype} and {weight.dtype}")


def _check_call(x: Tensor, weight: Tensor, found: KernelMap, rows: int, groups: int) -> None:
    """Check dtypes and shapes, which kernels do not."""
    _check_dtypes(x, weight)
    _check_shapes(x, weight, found, rows, groups)


def _check_shapes(x: Tensor, weight: Tensor, found: KernelMap, rows: int, groups: int) -> None:
    if rows != found.num_outputs:
        raise ShapeError(f"rows are the {found.num_outputs} outputs of the kernel map, found {rows}")
    if x.ndim != 2 or x.shape[0] != found.num_inputs:
        raise ShapeError(f"x is [{found.num_inputs}, C_in] for this kernel map, found shape {list(x.shape)}")
    fits = weight.ndim == 3 and weight.shape[1] == found.volume and weight.shape[2] * groups == x.shape[1]
    if not fits or weight.shape[0] % groups:
        taken = f"[C_out, {found.volume}, {x.shape[1]} / {groups}], C_out a multiple of the groups"
        raise ShapeError(f"weight is {taken}, found shape {list(weight.shape)}")
    if x.dtype == torch.int8 and found.volume * weight.shape[2] > _INT8_TERMS:
        terms = f"{found.volume} kernel offsets x {weight.shape[2]} channels"
        raise ShapeError(f"a sum of int8 has at most {_INT8_TERMS} terms, within int32; found {terms}")


_INT8_TERMS = 1 << 17
"""Number of int8 products whose sum cannot overflow int32."""


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Autocast dtype for x; None if autocast is off, and for float64 (as in torch), 8-bit and meta tensors."""
    kind = x.device.type
    if x.dtype == torch.float64 or x.dtype in EIGHT_BITS or kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None, within: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands in the autocast dtype, if any; within: leave the weight uncast."""
    dtype = autocast_dtype(x)
    if dtype is None or weight.dtype in EIGHT_BITS:
        return x, weight, bias
    return x.to(dtype), weight if within else weight.to(dtype), None if bias is None else bias.to(dtype)


def _cast_within(x: Tensor, weight: Tensor) -> bool:
    """True if the differentiable call casts the weight, whose gradient is then not rounded to the autocast dtype."""
    if not torch.is_grad_enabled() or autocast_dtype(x) is None:
        return False
    return _is_cast(x, weight) and autograd.only_autograd_active((x, weight))


def _is_cast(x: Tensor, weight: Tensor) -> bool:
    """True if autocast casts both, and the weight needs a gradient in float32."""
    return weight.requires_grad and weight.dtype == torch.float32 and x.dtype in AUTOCAST_DTYPES


AUTOCAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Feature dtypes that autocast casts."""


def target_of(out: Target) -> tuple[str | None, Geometry | None]:
    """(policy, target geometry) of the argument `out`."""
    if out is None or (isinstance(out, str) and out in ("same", "support", "floor_unique")):
        return out, None
    if isinstance(out, SparseTensor | Geometry):
        return "given", out.geometry if isinstance(out, SparseTensor) else out
    found = repr(out) if isinstance(out, str) else type(out).__name__
    raise OptionError(
        f"out is 'same', 'support', 'floor_unique', or, given to a call, the SparseTensor or Geometry of the outputs, "
        f"layer(x, out=target); found {found}. To finer coordinates: ConvTranspose, InverseConv, unpool"
    )


def check_layer(x: SparseTensor, weight: Tensor, bias: Tensor | None, groups: int, relation: Relation) -> None:
    """Raise ShapeError, DtypeError, DeviceError or OptionError if weight, bias, groups or relation do not fit x."""
    _check_weight(x, weight, bias, groups, spatial=relation.custom is None)
    if relation.dim != x.spatial_dim:
        raise ShapeError(f"the offsets have {relation.dim} entries, the tensor has {x.spatial_dim} spatial axes")


def _check_weight(x: SparseTensor, weight: Tensor, bias: Tensor | None, groups: int, spatial: bool) -> None:
    if not isinstance(x, SparseTensor):
        raise not_sparse(x, "a convolution")
    if not isinstance(weight, Tensor):
        raise DtypeError(f"weight is a tensor, found {type(weight).__name__}")
    if weight.ndim != (x.spatial_dim + 2 if spatial else 3):
        axes = f"{x.spatial_dim} kernel axes" if spatial else "one axis of K offsets"
        raise ShapeError(
            f"weight is [C_out, kernel..., C_in / groups] with {axes} for a tensor of {x.spatial_dim} spatial axes, "
            f"found shape {list(weight.shape)}"
        )
    if not isinstance(groups, int) or groups < 1:
        raise OptionError(f"groups must be an int of at least 1, found {groups!r}")
    if x.channels % groups or weight.shape[0] % groups:
        raise ShapeError(f"groups={groups} must divide C_in={x.channels} and C_out={weight.shape[0]}")
    if weight.shape[-1] * groups != x.channels:
        raise ShapeError(
            f"weight takes {weight.shape[-1] * groups} channels ({weight.shape[-1]} x {groups} groups), "
            f"x has {x.channels}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias must be [C_out] = [{weight.shape[0]}], found shape {list(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise DeviceError(f"{name} is on {tensor.device}, x is on {x.device}")


def _check_offsets(weight: Tensor, offsets: Sequence[Any], padding: Any) -> None:
    if padding is not None:
        raise OptionError(f"offsets cannot be combined with padding, found padding={padding!r}")
    if weight.shape[1] != len(offsets):
        raise ShapeError(f"weight has {weight.shape[1]} kernel offsets, `offsets` has {len(offsets)}")
