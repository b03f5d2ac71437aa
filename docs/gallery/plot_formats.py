"""
Formats of a sparse matrix
==========================

An einsum stays the same whichever format its operand is stored in. What differs is what is stored: coordinates, blocks
with their zeros, groups with their padding.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import pumice as pm

torch.manual_seed(1)
W = torch.randn(16, 16) * (torch.rand(16, 16) < 0.12)
W[4:8, 8:12] = torch.randn(4, 4)  # a dense block among scattered entries
B = torch.randn(16, 3)

FORMATS = {
    "COO": "(m k):C",
    "CSR": "m:U k:C",
    "GroupCOO": "m:C k:G4",
    "ELL": "m:U k:G",
    "BCSR, blocks of 4": "m:U k:C m:B4 k:B4",
    "blocks of 4 with a bit mask": "(m k):C m:M4 k:M4",
}

# %%
# Colours show the order in which entries are stored, from dark to light. Grey squares are stored, too: zeros within a
# block, and behind a row the padding of its groups. All give the same product.


def order(blocked):
    """The place of each entry in storage [16, 16]: row by row, or block by block of 4 x 4; NaN where there is none."""
    number = torch.arange(256.0).view(16, 16)
    if blocked:
        number = number.view(4, 4, 4, 4).transpose(1, 2).reshape(16, 16)
    return torch.where(W != 0, number, torch.nan)


def zeros(name):
    """(row, column) of what is stored besides the entries."""
    counts = (W != 0).sum(1)
    if name.startswith("BCSR"):
        blocks = (W != 0).view(4, 4, 4, 4).any(3).any(1).repeat_interleave(4, 0).repeat_interleave(4, 1)
        return (blocks & (W == 0)).nonzero().tolist()
    width = {"GroupCOO": -counts % 4, "ELL": counts.max() - counts}.get(name, 0 * counts)
    return [(row, 16.5 + column) for row, count in enumerate(width.tolist()) for column in range(count)]


figure, axes = plt.subplots(2, 3, figsize=(12, 8), layout="constrained")
for axis, (name, text) in zip(axes.flat, FORMATS.items(), strict=True):
    S = pm.sparse(W, text)
    assert torch.allclose(pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=S, B=B), W @ B, atol=1e-5)
    print(f"{name}: {S}")
    axis.imshow(order("4 k:" in text and name != "GroupCOO"), cmap="viridis", vmin=-20, vmax=300)
    for row, column in zeros(name):
        axis.add_patch(plt.Rectangle((column - 0.4, row - 0.4), 0.8, 0.8, color="#cfd6dd"))
    axis.set(xlim=(-0.5, 23), ylim=(15.5, -0.5), xticks=np.arange(-0.5, 16, 4), yticks=np.arange(-0.5, 16, 4))
    axis.tick_params(labelbottom=False, labelleft=False, length=0)
    axis.grid(color="#c8d0d8", lw=0.6)
    axis.spines[:].set_visible(False)
    axis.set_title(f"{name}: {text}\n{S.nbytes} bytes, {S.padding:.0%} padding", fontsize=11)
plt.show()
