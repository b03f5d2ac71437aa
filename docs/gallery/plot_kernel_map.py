"""
Kernel maps and output policies
===============================

A kernel map lists which input voxels meet which output voxels, at which kernel offset. The three policies below differ
in the outputs that exist; the loop over the pairs is the same.
"""

import matplotlib.pyplot as plt
import torch

import pumice as pm

coords = torch.tensor([[0, x, y] for x, y in [(1, 1), (2, 2), (3, 2), (3, 3), (5, 2), (6, 2), (6, 6)]])
x = pm.SparseTensor(torch.ones(len(coords), 1), coords.int(), dim=2)

CASES = {
    "same: a 3x3 kernel\nat stride 1 (submanifold)": pm.Relation.of(2, 3),
    "floor_unique: a 2x2 kernel\nat stride 2": pm.Relation.of(2, 2, stride=2, policy="floor_unique"),
    "support: a 3x3 kernel at stride 2,\nas in a dense convolution": pm.Relation.of(
        2, 3, stride=2, padding=1, policy="support"
    ),
}

# %%
# Inputs are blue, outputs orange rings, drawn where they lie among the inputs; a line is a pair of the map.

figure, axes = plt.subplots(1, 3, figsize=(12, 4.6), layout="constrained")
for axis, (title, relation) in zip(axes, CASES.items(), strict=True):
    found, outputs = pm.kernel_map(x.geometry, relation)
    print(found)
    places = x.coords[:, 1:].float()
    stride = torch.tensor(relation.stride)
    targets = outputs.coords[:, 1:] * stride + (stride - 1) / 2 * (relation.policy == "floor_unique")
    rows = found.rows()  # [N_out, K]: the input row, -1 where there is none
    for output, offset in (rows >= 0).nonzero().tolist():
        ends = torch.stack([places[rows[output, offset]], targets[output].float()])
        axis.plot(ends[:, 0], ends[:, 1], color=plt.get_cmap("viridis")(offset / rows.shape[1]), lw=1.6)
    axis.scatter(*places.T, s=130, marker="s", color="#4a7ba6", zorder=2)
    axis.scatter(*targets.T, s=260, facecolors="none", edgecolors="#e8833a", linewidths=2, zorder=3)
    axis.set(aspect="equal", xlim=(-1, 8), ylim=(-1, 8), xticks=range(8), yticks=range(8))
    axis.set_title(f"{title}\n{len(outputs.coords)} outputs, {int((rows >= 0).sum())} pairs", fontsize=11)
    axis.grid(alpha=0.3)
plt.show()
