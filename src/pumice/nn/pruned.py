"""Layers whose weights are stored without their zeros, and the conversion of a pruned network to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pumice.errors import DeviceError, DtypeError, OptionError, ShapeError
from pumice.ops import Sparse, einsum, sparse

_REPEATS = 5  # Calls of each way in a measurement
_SIZES = 16  # Sizes of inputs whose calls a layer keeps
_TENSOR_CORES = (torch.float16, torch.bfloat16, torch.float32)
_DENSITY = 0.5  # Maximum share of kept weights with which a layer is stored sparsely, without a measurement


class Blocks(NamedTuple):
    """Blocks of a filter, of so many outputs by channels at one tap, of each of which all weights are kept or none.

    Worked example, blocks of 2 x 2 of a matrix: [[0, 0, 1, 2], [0, 0, 3, 4], [5, 6, 0, 0], [7, 8, 0, 0]] is kept as
    [1, 2, 3, 4, 5, 6, 7, 8]."""

    outputs: int
    channels: int

    @classmethod
    def of(cls, mask: Tensor, groups: int = 1) -> Blocks | None:
        """The largest blocks of a mask [M, C, ...]; None if blocks with sides of at least 16 are not there."""
        sides = [_side(mask, mask.shape[0] // groups), _side(mask.transpose(0, 1), mask.shape[1])]
        return cls(*sides) if min(sides) > 1 and bool(mask.any()) else None

    def split(self, weight: Tensor) -> Tensor:
        """[M, C, *taps] as [M / outputs, *taps, C / channels, outputs, channels]."""
        apart = weight.unflatten(1, (-1, self.channels)).unflatten(0, (-1, self.outputs))
        return apart.permute(0, *range(4, apart.ndim), 2, 1, 3)

    def join(self, blocks: Tensor) -> Tensor:
        """The reverse of `split`."""
        taps = range(1, blocks.ndim - 3)
        return blocks.permute(0, -2, -3, -1, *taps).flatten(2, 3).flatten(0, 1)

    def format(self, taps: str, listed: bool) -> str:
        """The format of a filter [m,c,*taps], as blocks, or as a list of entries in the same order."""
        axes = f"[{','.join(['m', 'c', *taps])}]"
        if listed:
            levels = [f"m:U{self.outputs}", *(f"{tap}:U" for tap in taps), f"c:U{self.channels}", "(m c):C"]
        else:
            levels = ["m:U", f"({' '.join([*taps, 'c'])}):C", f"m:B{self.outputs}", f"c:B{self.channels}"]
        return " ".join([axes, *levels])


_SIDES = (32, 16)  # Larger blocks are no faster
_NEARLY = 0.98  # Of a kept block, the least share that is not zero


def _side(mask: Tensor, extent: int) -> int:
    """The first of _SIDES such that neighbours along the first axis, so many, are kept together; else 1. extent: what
    it divides."""
    for side in _SIDES:
        if extent % side == 0:
            apart = mask.unflatten(0, (-1, side))
            if torch.equal(apart.all(1), apart.any(1)):
                return side
    return 1


def _completed(mask: Tensor, groups: int) -> Tensor:
    """The mask of weights that are not zero, with those that are zero by chance if it then consists of blocks."""
    for side in _SIDES:
        if mask.shape[0] // groups % side == 0 and mask.shape[1] % side == 0:
            blocks = Blocks(side, side)
            apart = blocks.split(mask)
            share = apart.sum((-2, -1))
            if bool(((share == 0) | (share >= _NEARLY * side * side)).all()):
                return blocks.join((share > 0)[..., None, None].expand_as(apart))
    return mask


class _Pruned(nn.Module):
    """Base of pruned layers. mask: bool, of the weight's shape; values: the kept weights, a parameter, block after
    block if there are blocks, else in row-major order; way: "sparse", or "dense" if the whole weight is used."""

    mask: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, mask: Tensor | None, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        if not isinstance(mask, Tensor | None):
            raise DtypeError(f"a mask is a tensor, found {type(mask).__name__}")
        kept = _completed(weight.detach() != 0, groups) if mask is None else mask.to(weight.device) != 0
        if kept.shape != weight.shape:
            raise ShapeError(f"the mask has shape {list(kept.shape)}, the weight {list(weight.shape)}")
        self.register_buffer("mask", kept)
        self.way = "sparse"
        self._found: tuple[Any, Blocks | None] | None = None
        self._stored: tuple[Any, Sparse] | None = None
        self.values: nn.Parameter = nn.Parameter(self._split(weight.detach())[self._split(kept)])
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone()))

    @property
    def density(self) -> float:
        """Share of the weights that are kept."""
        return self.values.numel() / max(1, self.mask.numel())

    @property
    def weight(self) -> Tensor:
        """The whole weight, with zeros; differentiable in `values`."""
        kept = self._split(self.mask)
        whole = self.values.new_zeros(kept.shape).masked_scatter(kept, self.values)
        return whole if self.blocks is None else self.blocks.join(whole)

    @property
    def blocks(self) -> Blocks | None:
        """The blocks that the mask consists of, if any."""
        key = self.mask.data_ptr(), self.mask._version
        if self._found is None or self._found[0] != key:
            self._found = key, Blocks.of(self.mask, self.groups)
        return self._found[1]

    def _split(self, weight: Tensor) -> Tensor:
        return weight if self.blocks is None else self.blocks.split(weight)

    def _filter(self) -> Sparse:
        """The weight over its kept entries or, on a GPU, blocks."""
        # Attributes of modules take long to find.
        mask, values = self._buffers["mask"], self._parameters["values"]
        assert mask is not None and values is not None
        key = mask.data_ptr(), mask._version, id(values), values.data_ptr(), values.dtype
        if self._stored is None or self._stored[0] != key:
            # Training may follow a first call in inference mode.
            with torch.inference_mode(False):
                self._stored = key, self._made(values)
        found = self._stored[1]
        (held,) = (part.values for part in found.parts)
        if held is not values and held is not None and values.requires_grad and torch.is_grad_enabled():
            return found.with_values([values.view(held.shape)])
        return found

    def _made(self, values: Tensor) -> Sparse:
        """The filter, its values in the memory of `values`."""
        entries, blocks = self._entries().to(torch.float32), self.blocks
        taps = "rs"[: entries.ndim - 2]
        if blocks is None:
            return sparse(entries, f"({' '.join(['m', 'c', *taps])}):C").with_values([values])
        if not self._in_blocks:
            return sparse(entries, blocks.format(taps, listed=True)).with_values([values])
        return sparse(entries, blocks.format(taps, listed=False)).with_values([values.detach().view(-1, *blocks)])

    @property
    def _in_blocks(self) -> bool:
        """True if the filter is stored as blocks, for tensor cores."""
        return self.blocks is not None and self.values.is_cuda and self.values.dtype in _TENSOR_CORES

    def _entries(self) -> Tensor:
        return self.mask

    def _check_input(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise DtypeError(f"input is a tensor, found {type(x).__name__}")
        mask = self._buffers["mask"]
        if mask is not None and x.device != mask.device:
            raise DeviceError(f"the layer is on {mask.device}, the input on {x.device}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_found": None, "_stored": None, "_convolutions": {}}

    def extra_repr(self) -> str:
        blocks = "" if self.blocks is None else f" in blocks of {self.blocks.outputs} x {self.blocks.channels}"
        return f"{list(self.mask.shape)}, {self.density:.0%} kept{blocks}, {self.way}"


class PrunedConv2d(_Pruned):
    """2-D convolution over the kept weights of a filter,

        O[n,m,p,q] = bias[m] + sum over kept (m,c,r,s) of I[n, c, s_h p + d_h r - p_h, s_w q + d_w s - p_w] F[m,c,r,s]

    as torch.nn.Conv2d: input [N, C, H, W] or [C, H, W], any stride, dilation, groups and zero padding, float dtypes. On
    a CPU with a C compiler it runs as a loop nest in C, whose time is proportional to the kept weights.
    Make it with `from_dense`. The mask and the kept values are in its state_dict. Gradients reach the kept values only.

    Source: "Unified Convolution Framework", section 6 (filter-sparse convolution).
    """

    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    def __init__(self, conv: nn.Conv2d, mask: Tensor | None = None) -> None:
        super().__init__(conv.weight, conv.bias, mask, conv.groups)
        if conv.padding_mode != "zeros":
            raise OptionError(f"padding_mode is 'zeros', found {conv.padding_mode!r}")
        self.stride, self.dilation = conv.stride, conv.dilation
        self.padding: tuple[int, ...] = _padding(conv)
        self._convolutions: dict[torch.Size, tuple[Sparse, torch.device, Callable[[Tensor], Tensor]]] = {}

    @classmethod
    def from_dense(cls, conv: nn.Conv2d, mask: Tensor | None = None) -> PrunedConv2d:
        """The pruned form of a layer, with the same results if the mask keeps all non-zero weights.

        mask: of the weight's shape, non-zero where a weight is kept; default: where it is not zero, and zeros by chance
            in blocks of 16 or 32 outputs and channels.
        Raises DtypeError if `conv` is no Conv2d, ShapeError for a mask of another shape, OptionError for a padding mode
        other than zeros or asymmetric "same" padding."""
        if type(conv) is not nn.Conv2d:
            raise DtypeError(f"a torch.nn.Conv2d is expected, found {type(conv).__name__}")
        return cls(conv, mask)

    def _entries(self) -> Tensor:
        """The mask over all input channels, [M, C, R, S] without axes of the kernel of size 1."""
        count, channels, *kernel = self.mask.shape
        whole = self.mask.new_zeros(count, self.groups, channels, *kernel)
        rows = torch.arange(count, device=whole.device)
        whole[rows, rows // (count // self.groups)] = self.mask
        return whole.view(count, -1, *(size for size in kernel if size > 1))

    def forward(self, x: Tensor) -> Tensor:
        plain = isinstance(x, Tensor) and not torch.compiler.is_compiling()
        known = self._convolutions.get(x.shape) if plain else None
        if known is None or known[0] is not self._filter() or x.device != known[1] or self.way == "dense":
            return self._first(x)
        out, bias = known[2](x), self._parameters["bias"]
        return out if bias is None else out + bias[:, None, None]

    def _first(self, x: Tensor) -> Tensor:
        """`forward` of inputs of a size that is new, or in another way."""
        self._check_input(x)
        channels = self.mask.shape[1] * self.groups
        if x.dim() not in (3, 4) or x.shape[-3] != channels:
            raise ShapeError(f"input is [N, {channels}, H, W] or [{channels}, H, W], found {list(x.shape)}")
        if self.way == "dense":
            options = self.bias, self.stride, self.padding, self.dilation, self.groups
            return functional.conv2d(x, self.weight, *options)
        images, filter = x if x.dim() == 4 else x[None], self._filter()
        options = self.mask.shape[2:], self.stride, self.padding, self.dilation, self._in_blocks
        text = _statement(images.shape[2:], *options)
        lasting = x.dim() == 4 and not torch.compiler.is_compiling() and self._stored and filter is self._stored[1]
        call = partial(_of_filter, text, filter)
        call = partial(_of_last, call) if self._in_blocks else call
        if lasting:
            if len(self._convolutions) >= _SIZES:
                self._convolutions.clear()
            self._convolutions[x.shape] = filter, x.device, call
        out = call(images)
        out = out if self.bias is None else out + self.bias[:, None, None]
        return out if x.dim() == 4 else out[0]


def _of_filter(text: str, filter: Sparse, x: Tensor) -> Tensor:
    return einsum(text, I=x, F=filter)


def _of_last(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The result of a call on [N, H, W, C] for [N, C, H, W]; both are stored channels last."""
    return call(x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


Pair = tuple[int, ...]


@lru_cache(maxsize=1024)
def _statement(sizes: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, last: bool) -> str:
    """The convolution of an image, channels last or not. The filter has no axes of size 1 of its kernel."""
    each = [*zip("pq", "rs", sizes, kernel, stride, padding, dilation, strict=True)]
    outputs = [(size + 2 * pad - step * (k - 1) - 1) // s + 1 for _, _, size, k, s, pad, step in each]
    if min(outputs) < 1:
        raise ShapeError(f"a kernel of {list(kernel)} with dilation {list(dilation)} exceeds {list(sizes)}")
    taps = [f"{step}*{r}" if k > 1 else "0" for _, r, _, k, _, _, step in each]
    at = [f"{s}*{p}+{tap}-{pad}" for (p, _, _, _, s, pad, _), tap in zip(each, taps, strict=True)]
    places = ",".join(["m", "c", *(r for _, r, _, k, *_ in each if k > 1)])
    out, image = ("n,p,q,m", [*at, "c"]) if last else ("n,m,p,q", ["c", *at])
    return f"O[{out}] = I[n,{','.join(image)}] * F[{places}] ; p:{outputs[0]}, q:{outputs[1]}"


class PrunedLinear(_Pruned):
    """y[..., m] = bias[m] + sum over kept (m, k) of W[m,k] x[..., k], as torch.nn.Linear; make it with `from_dense`."""

    @classmethod
    def from_dense(cls, linear: nn.Linear, mask: Tensor | None = None) -> PrunedLinear:
        """The pruned form of a layer; see PrunedConv2d.from_dense."""
        if type(linear) is not nn.Linear:
            raise DtypeError(f"a torch.nn.Linear is expected, found {type(linear).__name__}")
        return cls(linear.weight, linear.bias, mask)

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        if x.shape[-1:] != self.mask.shape[1:]:
            raise ShapeError(f"input is [..., {self.mask.shape[1]}], found {list(x.shape)}")
        if self.way == "dense":
            return functional.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, x.shape[-1])
        if self._in_blocks:
            out = einsum("Y[b,m] = X[b,c] * W[m,c]", W=self._filter(), X=rows)
        else:
            # Rows are the vector index.
            out = einsum("Y[m,b] = W[m,c] * X[c,b]", W=self._filter(), X=rows.t().contiguous()).t()
        out = out if self.bias is None else out + self.bias
        return out.reshape(*x.shape[:-1], -1)


_FORMS: Mapping[type[nn.Module], type[PrunedConv2d] | type[PrunedLinear]] = {
    nn.Conv2d: PrunedConv2d,
    nn.Linear: PrunedLinear,
}


def prune_model(net: nn.Module, masks: Mapping[str, Tensor] | None = None, example: Tensor | None = None) -> nn.Module:
    """Replace the Conv2d and Linear layers of a network by their pruned forms, in place, and return the network.

    masks: by name of the layer or of its weight ("layer1.0.conv1", "layer1.0.conv1.weight"), non-zero where a weight is
        kept; other layers stay as they are. Default: layers of which at most half of the weights are not zero.
    example: input of the network. Every replaced layer is run on what it gets there, over its kept weights and as a
        dense layer, and keeps the faster way (`layer.way`). Default: over the kept weights.
    Raises DtypeError if `net` is no module, OptionError for names that are no such layers; see PrunedConv2d.from_dense.
    """
    if not isinstance(net, nn.Module):
        raise DtypeError(f"a network is a torch.nn.Module, found {type(net).__name__}")
    # A layer that is used under several names is replaced under all of them.
    every = [*net.named_modules(remove_duplicate=False)]
    layers = {name: layer for name, layer in every if type(layer) in _FORMS}
    if masks is None:
        chosen: dict[str, Tensor | None] = {n: None for n, one in layers.items() if _density(one) <= _DENSITY}
    else:
        chosen = {name.removesuffix(".weight"): mask for name, mask in masks.items()}
    if unknown := [name for name in chosen if name not in layers]:
        raise OptionError(f"no Conv2d or Linear is named {', '.join(unknown)}; there are {', '.join(layers) or 'none'}")
    if "" in chosen:
        raise OptionError("the network is one layer: use its pruned form, for instance PrunedConv2d.from_dense")
    made = {layers[name]: _FORMS[type(layers[name])].from_dense(layers[name], mask) for name, mask in chosen.items()}  # pyright: ignore[reportArgumentType]
    for name, layer in every:
        if layer in made:
            parent, _, own = name.rpartition(".")
            setattr(net.get_submodule(parent), own, made[layer].train(layer.training))
    if example is not None:
        _choose_ways(net, [*made.values()], example)
    return net


def _density(layer: nn.Module) -> float:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return int(torch.count_nonzero(weight.detach())) / max(1, weight.numel())


def _choose_ways(net: nn.Module, layers: list[PrunedConv2d | PrunedLinear], example: Tensor) -> None:
    """Set each layer's way to the faster one for what it gets when the network runs on the example."""

    def measure(layer: Any, given: tuple[Any, ...]) -> None:
        seconds = {}
        for way in ("dense", "sparse"):
            layer.way = way
            seconds[way] = _seconds(lambda: layer.forward(*given))
        layer.way = min(seconds, key=seconds.__getitem__)

    hooks = [layer.register_forward_pre_hook(measure) for layer in layers]
    training = net.training
    try:
        with torch.no_grad():
            net.eval()(example)
    finally:
        net.train(training)
        for hook in hooks:
            hook.remove()


def _seconds(call: Callable[[], Tensor]) -> float:
    """Seconds of the fastest of some calls, after one that compiles."""
    device, found = call().device, []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begin)
    return min(found)


def _padding(conv: nn.Conv2d) -> tuple[int, ...]:
    """Zeros before and after each axis."""
    if conv.padding == "valid":
        return 0, 0
    if conv.padding != "same":
        return tuple(conv.padding)  # pyright: ignore[reportReturnType]
    spans = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    if any(span % 2 for span in spans):
        raise OptionError(f"'same' padding of a kernel of {list(conv.kernel_size)} is not symmetric")
    return tuple(span // 2 for span in spans)
