"""Checkpoints of other libraries as state dicts of the same network written with pumice.nn.

    library        parameter   layout                                    becomes
    spconv 2.2+    weight      KRSC [C_out, *kernel, C_in]               as it is
    spconv 2.0-1   weight      RSKC [*kernel, C_out, C_in]               permuted
    spconv 1, mmcv weight      RSCK [*kernel, C_in, C_out]               permuted
    torchsparse    kernel      [K, C_in, C_out], x fastest if K is odd   `weight`
    MinkowskiEngine kernel     [K, C_in, C_out], first axis fastest      `weight`, bias [1, C] becomes [C]
    FlexGEMM       weight      KRSC                                      as it is

Axes keep their order: those of pumice's coordinates are the library's. A transposed layer's taps need no reversal for
pumice.nn.InverseConv and GenerativeConvTranspose; see `flipped` for those of stride 1.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from pumice.compat.layouts import LAYOUTS, from_layout, from_taps
from pumice.errors import DtypeError, OptionError

_LOG = logging.getLogger("pumice.compat")
_LARGEST = 11  # kernel size that a layout is taken to have
Kernels = Mapping[str, int | Sequence[int]]


class Converted(dict[str, Tensor]):
    """A state dict. report: what was done, a line for each kind of change; it is logged, too."""

    report: tuple[str, ...] = ()

    def told(self, library: str, done: Mapping[str, int]) -> Converted:
        self.report = tuple(f"{library}: {what}: {count}" for what, count in done.items())
        for line in self.report:
            _LOG.info(line)
        return self


def spconv(
    state_dict: Mapping[str, Any], *, layout: str | None = None, dim: int = 3, only: str = "", strided: str = "(?!)"
) -> Converted:
    """From spconv, or mmcv.ops (RSCK). layout: KRSC, RSKC or RSCK; None: the one that all weights of dim + 2 axes fit,
    with kernel sizes up to 11 and the C_out of their bias or of the norm that follows. only: a regular expression that
    keys of sparse layers match; dense weights of as many axes need it, unless they fit no layout.

    Weights of kernel size 1 are stored transposed by spconv 2, which reads their memory as [C_in, C_out]: undone, but
    for the layers of larger strides, which `strided`, another expression, names.
    Raises OptionError if the layout is unknown or ambiguous, naming a key.
    """
    state = state_of(state_dict)
    keys = [k for k, v in state.items() if v.ndim == dim + 2 and k.endswith("weight") and re.search(only, k)]
    layout = _layout_of(state, keys) if layout is None else layout
    found, done = Converted(state), Counter[str]()
    for key in keys:
        if not _fits(state, key, layout):
            done["left, no sparse weight"] += 1
            continue
        moved = bool(re.search(strided, key))
        found[key] = from_layout(state[key], layout, moved)
        pointwise = layout != "RSCK" and not moved and math.prod(found[key].shape[1:-1]) == 1
        done[f"weights from {layout}" + (" of kernel size 1, transposed" if pointwise else "")] += 1
    for key in [key for key in found if key.endswith("max_num_voxels_during_training")]:
        del found[key]
        done["buffers dropped"] += 1
    return found.told("spconv", done)


def torchsparse(
    state_dict: Mapping[str, Any], *, kernels: Kernels = MappingProxyType({}), flipped: str = "(?!)", dim: int = 3
) -> Converted:
    """From torchsparse 1.4 to 2.1. kernels: sizes by the name of the layer, for those that are no cubes. flipped: a
    regular expression for layers of stride 1 with transposed=True, which become a Conv: their taps are reversed.

    Raises OptionError for a kernel of no known size, naming the key.
    """
    return _of_taps(state_of(state_dict), "torchsparse", kernels, flipped, dim, lambda size: math.prod(size) % 2 == 1)


def minkowski(
    state_dict: Mapping[str, Any], *, kernels: Kernels = MappingProxyType({}), flipped: str = "(?!)", dim: int = 3
) -> Converted:
    """From MinkowskiEngine 0.4 to 0.5, as `torchsparse`; a size that is one number is that of a list of offsets, as of
    HYPER_CROSS regions: the weight becomes [C_out, K, C_in], for Conv(offsets=...). Biases [1, C] become [C]; the
    names within its norms and linear layers, `.bn.` and `.linear.`, are dropped."""
    state = state_of(state_dict)
    found = _of_taps(state, "minkowski", kernels, flipped, dim, lambda _: True)
    done, renamed = Counter[str](), Converted()
    for key, value in found.items():
        new = re.sub(r"\.(bn|linear)\.(\w+)$", r".\2", key)
        if new != key:
            done["names without .bn or .linear"] += 1
        if key.endswith("bias") and value.ndim == 2 and len(value) == 1:
            value = value[0]
            done["biases [1, C] to [C]"] += 1
        renamed[new] = value
    report = found.report
    renamed.told("minkowski", done).report = (*report, *renamed.report)
    return renamed


def flexgemm(state_dict: Mapping[str, Any]) -> Converted:
    """From FlexGEMM, as TRELLIS.2 has it: nothing changes."""
    return Converted(state_of(state_dict)).told("flexgemm", {"weights KRSC, as they are": 1})


LIBRARIES: Mapping[str, Callable[..., Converted]] = {
    "spconv": spconv,
    "torchsparse": torchsparse,
    "minkowski": minkowski,
    "flexgemm": flexgemm,
}


def state_of(loaded: Any) -> dict[str, Tensor]:
    """The tensors of a loaded checkpoint: those under `state_dict`, `model_state`, `model` or `net`, if nested, and
    without the prefix `module.` if all have it. Raises DtypeError if there are none."""
    state = loaded
    while isinstance(state, Mapping):
        inner = [state[name] for name in ("state_dict", "model_state", "model", "net") if name in state]
        if not inner or not isinstance(inner[0], Mapping):
            break
        state = inner[0]
    tensors = {str(k): v for k, v in state.items() if isinstance(v, Tensor)} if isinstance(state, Mapping) else {}
    if not tensors:
        raise DtypeError(f"a state dict holds tensors by name, found {type(loaded).__name__} without any")
    if all(key.startswith("module.") for key in tensors):
        return {key.removeprefix("module."): value for key, value in tensors.items()}
    return tensors


def _of_taps(
    state: Mapping[str, Tensor], library: str, kernels: Kernels, flipped: str, dim: int, first: Callable[[Any], bool]
) -> Converted:
    """`kernel`s as `weight`s. first: by size, whether the first axis is fastest."""
    found, done = Converted(), Counter[str]()
    for key, value in state.items():
        layer, _, name = key.rpartition(".")
        if name != "kernel" or value.ndim not in (2, 3):
            found[key] = value
            continue
        size = _size_of(key, value, kernels.get(layer), dim)
        weight = from_taps(value, size, first(size))
        if re.search(flipped, key):
            weight = weight.flip(*range(1, weight.ndim - 1))
            done["kernels with taps reversed"] += 1
        found[f"{layer}.weight".removeprefix(".")] = weight.contiguous()
        done[f"kernels, {'first' if first(size) else 'last'} axis fastest, to weights {[*size]}"] += 1
    return found.told(library, done)


def _size_of(key: str, kernel: Tensor, given: int | Sequence[int] | None, dim: int) -> tuple[int, ...]:
    taps = 1 if kernel.ndim == 2 else len(kernel)
    if given is not None:
        size = (given,) if isinstance(given, int) else tuple(given)
        if math.prod(size) != taps:
            raise OptionError(f"{key} has {taps} taps, the kernel size given is {size}")
        return size
    edge = round(taps ** (1 / dim))
    if edge**dim != taps:
        raise OptionError(f"{key} has {taps} taps, no {dim}-dimensional cube: name its size in kernels")
    return (edge,) * dim


def _layout_of(state: Mapping[str, Tensor], keys: Sequence[str]) -> str:
    fits = {key: {layout for layout in LAYOUTS if _fits(state, key, layout)} for key in keys}
    sparse = {key: layouts for key, layouts in fits.items() if layouts}
    common = set.intersection(*sparse.values()) if sparse else set()
    if sparse and len(common) != 1:
        key = min(sparse, key=lambda key: len(sparse[key]))
        found = f"{sorted(common) or 'none'} fit all weights, as {key} {[*state[key].shape]}"
        raise OptionError(f"layout is one of {', '.join(LAYOUTS)}; found {found}: name it")
    return common.pop() if common else "KRSC"


def _fits(state: Mapping[str, Tensor], key: str, layout: str) -> bool:
    """True if a weight's kernel sizes, and its C_out as far as it is known, are those of the layout."""
    OptionError.check("layout", layout, LAYOUTS)
    weight = state[key]
    kernel = weight.shape[1:-1] if layout == "KRSC" else weight.shape[:-2]
    names = [*state]
    after = names[names.index(key) + 1 : names.index(key) + 2]
    known = [len(state[name]) for name in after if state[name].ndim == 1]
    return max(kernel) <= _LARGEST and all(weight.shape[LAYOUTS[layout]] == count for count in known)
