"""pumice.compat.flash_attn against torch's attention of one sequence at a time."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pumice.compat import flash_attn, install, uninstall
from pumice.errors import OptionError

torch.manual_seed(0)
NAMES = flash_attn.MODULES["flash_attn"]
QKV, ENDS = torch.randn(11, 3, 2, 4), torch.tensor([0, 4, 11], dtype=torch.int32)


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: object) -> torch.Tensor:
    """Of one sequence [N, H, D]."""
    return scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), **more).transpose(0, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_different_lengths(causal: bool):
    wanted = torch.cat([alone(*part.unbind(1), is_causal=causal, scale=0.7) for part in (QKV[:4], QKV[4:])])
    found = flash_attn.flash_attn_varlen_qkvpacked_func(
        QKV, ENDS, max_seqlen=7, dropout_p=0.0, softmax_scale=0.7, causal=causal
    )
    torch.testing.assert_close(found, wanted)
    q, k, v = QKV.unbind(1)
    for found in (
        flash_attn.flash_attn_varlen_func(q, k, v, ENDS, ENDS, 7, 7, 0.0, 0.7, causal),
        NAMES["flash_attn_varlen_kvpacked_func"](q, QKV[:, 1:], ENDS, ENDS, 7, 7, 0.0, 0.7, causal),
    ):
        torch.testing.assert_close(found, wanted)


def test_batches():
    x = torch.randn(2, 5, 3, 2, 4)
    wanted = torch.stack([alone(*one.unbind(1)) for one in x])
    q, k, v = x.unbind(2)
    for found in (
        NAMES["flash_attn_qkvpacked_func"](x),
        flash_attn.flash_attn_func(q, k, v),
        NAMES["flash_attn_kvpacked_func"](q, x[:, :, 1:]),
    ):
        torch.testing.assert_close(found, wanted)
    few = flash_attn.flash_attn_func(q[:, :3], k, v)
    torch.testing.assert_close(few, wanted[:, :3])


@pytest.mark.parametrize("cross", [False, True])
def test_multi_head_attention(cross: bool):
    layer, x = flash_attn.MHA(8, 2, cross_attn=cross), torch.randn(3, 5, 8)
    names = {"Wq", "Wkv", "out_proj"} if cross else {"Wqkv", "out_proj"}
    assert {name.split(".")[0] for name in layer.state_dict()} == names
    other = torch.randn(3, 6, 8)
    y = layer(x, other) if cross else layer(x)
    weights = [layer.Wq, layer.Wkv] if cross else [layer.Wqkv]
    w, b = (torch.cat([getattr(one, name) for one in weights]) for name in ("weight", "bias"))
    plain = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    plain.load_state_dict(
        {"in_proj_weight": w, "in_proj_bias": b, **{f"out_proj.{n}": p for n, p in layer.out_proj.state_dict().items()}}
    )
    keys = other if cross else x
    torch.testing.assert_close(y, plain(x, keys, keys, need_weights=False)[0])


def test_options_that_are_not_served_are_told():
    with pytest.raises(OptionError, match="window_size"):
        flash_attn.flash_attn_varlen_qkvpacked_func(QKV, ENDS, 7, window_size=(4, 4))
    with pytest.raises(OptionError, match="rotary_emb_dim"):
        flash_attn.MHA(8, 2, rotary_emb_dim=4)
    flash_attn.flash_attn_varlen_qkvpacked_func(QKV, ENDS, 7, window_size=(-1, -1), deterministic=True)


def test_imports():
    libraries = ("torch_scatter", "torch_cluster", "pointops", "flash_attn")
    install(*libraries)
    try:
        from flash_attn.modules.mha import MHA  # pyright: ignore
        from torch_scatter import scatter_mean  # pyright: ignore

        assert MHA is flash_attn.MHA
        assert scatter_mean(torch.tensor([1.0, 3]), torch.tensor([0, 0])).tolist() == [2]
    finally:
        uninstall(*libraries)
