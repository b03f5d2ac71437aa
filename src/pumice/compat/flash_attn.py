"""flash_attn (2.x) over pumice.ops.attention, which runs torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pumice import ops
from pumice.errors import OptionError

# Options that are served as they are by default; of `deterministic` there is nothing to choose.
_DEFAULTS = {"window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "return_attn_probs": False}


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, **more: Any,
) -> Tensor:  # fmt: skip
    """q [T, H, D], k and v [S, G, D] of sequences one after the other."""
    for name, value in more.items():
        if name != "deterministic" and (name not in _DEFAULTS or value != _DEFAULTS[name]):
            raise OptionError(f"{name}={value!r} is not served: torch.nn.attention.flex_attention has such masks")
    keys = None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k
    return ops.attention(q, k, v, cu_seqlens_q, keys, dropout=dropout_p, scale=softmax_scale, causal=causal)


_varlen: Callable[..., Tensor] = flash_attn_varlen_func


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **more: Any
) -> Tensor:
    """qkv [T, 3, H, D]."""
    return _varlen(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **more)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **more: Any) -> Tensor:
    """q [B, N, H, D], k and v [B, M, G, D]."""
    ends = [torch.arange(len(x) + 1) * x.shape[1] for x in (q, k)]
    flat = (x.flatten(0, 1) for x in (q, k, v))
    found = _varlen(*flat, *ends, q.shape[1], k.shape[1], *args, **more)
    return found.reshape(*q.shape[:3], v.shape[3])


class MHA(nn.Module):
    """Multi-head attention of x [B, N, C], with flash_attn's parameters: Wqkv, or Wq and Wkv, and out_proj."""

    Wq: nn.Module
    Wkv: nn.Module
    Wqkv: nn.Module
    out_proj: nn.Module

    def __init__(self, embed_dim: int, num_heads: int, num_heads_kv: int = 0, cross_attn: bool = False, **more: Any):
        super().__init__()
        if wrong := more.keys() - {"dropout", "softmax_scale", "causal", "use_flash_attn"}:
            raise OptionError(f"MHA takes embed_dim, num_heads, cross_attn, dropout and so on; found {sorted(wrong)}")
        width = embed_dim // num_heads
        self.heads, self.keys, self.options = (num_heads, width), (2, num_heads_kv or num_heads, width), more
        rows = {"Wq": embed_dim, "Wkv": 2 * self.keys[1] * width}
        rows = rows if cross_attn else {"Wqkv": sum(rows.values())}
        for name, count in (rows | {"out_proj": embed_dim}).items():
            self.add_module(name, nn.Linear(embed_dim, count))

    def forward(self, x: Tensor, x_kv: Tensor | None = None) -> Tensor:
        if hasattr(self, "Wqkv"):
            q, kv = self.Wqkv(x).tensor_split([x.shape[-1]], -1)
        else:
            q, kv = self.Wq(x), self.Wkv(x if x_kv is None else x_kv)
        dropout = self.options.get("dropout", 0.0) if self.training else 0.0
        k, v = kv.unflatten(-1, self.keys).unbind(2)
        options = dropout, self.options.get("softmax_scale"), self.options.get("causal", False)
        return self.out_proj(flash_attn_func(q.unflatten(-1, self.heads), k, v, *options).flatten(-2))


_FUNCTIONS = {f.__name__: f for f in (flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func, flash_attn_func)} | {
    "flash_attn_varlen_kvpacked_func": lambda q, kv, *args, **more: _varlen(q, *kv.unbind(1), *args, **more),
    "flash_attn_qkvpacked_func": lambda qkv, *args, **more: flash_attn_func(*qkv.unbind(2), *args, **more),
    "flash_attn_kvpacked_func": lambda q, kv, *args, **more: flash_attn_func(q, *kv.unbind(2), *args, **more),
}
MODULES: Mapping[str, Mapping[str, Any]] = {
    "flash_attn": {**_FUNCTIONS, "__version__": "2.8.3"},
    "flash_attn.flash_attn_interface": _FUNCTIONS,
    "flash_attn.modules": {},
    "flash_attn.modules.mha": {"MHA": MHA},
}
