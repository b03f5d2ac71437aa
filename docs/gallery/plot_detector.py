"""
A detector's bird's-eye view
============================

Detectors such as CenterPoint encode voxels sparsely, fold the height into channels, and find objects on the dense map
that is left. Here such a network learns where vehicles are from six generated streets.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, max_pool2d

import pumice as pm
from pumice.data import STREET, street_scene

torch.manual_seed(0)
EXTENT, SIZE = 32.0, 0.5  # metres to each side, and the edge of a voxel
SHAPE = (128, 128, 16)
VEHICLE = STREET.names.index("vehicle")


def scene(seed):
    """(voxels within the grid, map of the cells with a vehicle [1, 32, 32], points of vehicles)."""
    scan = street_scene(seed, beams=24, azimuths=320)
    xyz, labels = torch.from_numpy(scan.xyz), torch.from_numpy(scan.labels)
    origin = (-EXTENT, -EXTENT, -3.0)
    feats = torch.cat([torch.from_numpy(scan.feats), xyz[:, 2:]], 1)  # intensity and height
    x = pm.voxelize(xyz, feats, SIZE, origin=origin, spatial_shape=SHAPE)
    cells = ((xyz[:, :2] + EXTENT) / (4 * SIZE)).floor().long()
    inside = (labels == VEHICLE) & (cells >= 0).all(1) & (cells < 32).all(1)
    target = torch.zeros(1, 32, 32)
    target[0, cells[inside, 0], cells[inside, 1]] = 1
    return x, target, xyz[labels == VEHICLE]


# %%
# Two strided layers, then `to_dense`: [1, C, 32, 32, 4] becomes the map [1, 4 C, 32, 32] of a 2-D network.


class Detector(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        layers = [
            pm.nn.Conv3d(2, width, 3), pm.nn.BatchNorm(width), pm.nn.ReLU(),
            pm.nn.Conv3d(width, width, 3, stride=2, padding=1), pm.nn.BatchNorm(width), pm.nn.ReLU(),
            pm.nn.Conv3d(width, width, 3, stride=2, padding=1), pm.nn.BatchNorm(width), pm.nn.ReLU(),
        ]  # fmt: skip
        self.encoder = pm.nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Conv2d(4 * width, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 1, 1))
        nn.init.constant_(self.head[2].bias, -3.0)  # most cells are empty

    def forward(self, x):
        dense = self.encoder(x).to_dense()
        folded = dense.permute(0, 1, 4, 2, 3).flatten(1, 2)
        return self.head(folded)[:, 0]


net = Detector()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scenes = [scene(seed) for seed in range(6)]
for step in range(60):
    x, target, _ = scenes[step % 6]
    loss = binary_cross_entropy_with_logits(net(x), target, pos_weight=torch.tensor(2.0))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")

# %%
# An unseen street: the map, and its peaks as detections.

x, target, vehicles = scene(11)
net.eval()
with torch.no_grad():
    heat = net(x).sigmoid()
peaks = ((heat == max_pool2d(heat, 3, 1, 1)) & (heat > 0.5)).nonzero()[:, 1:]
places = (peaks + 0.5) * 4 * SIZE - EXTENT
print(f"{len(peaks)} detections; {target[0][peaks[:, 0], peaks[:, 1]].mean():.0%} are cells with a vehicle")

side = (-EXTENT, EXTENT, -EXTENT, EXTENT)
figure, axes = plt.subplots(1, 3, figsize=(12, 4.3), layout="constrained")
where = x.coords[:, 1:3] * SIZE - EXTENT
axes[0].scatter(where[:, 0], where[:, 1], s=1, c=x.coords[:, 3], cmap="viridis")
axes[0].set_title(f"{len(x)} voxels, coloured by height")
axes[1].imshow(target[0].T, origin="lower", extent=side, cmap="magma")
axes[1].set_title("cells with a vehicle")
axes[2].imshow(heat[0].T, origin="lower", extent=side, cmap="magma", vmin=0, vmax=1)
axes[2].scatter(places[:, 0], places[:, 1], s=60, facecolors="none", edgecolors="cyan")
axes[2].set_title("predicted, and its peaks")
for axis in axes:
    axis.set(aspect="equal", xlim=side[:2], ylim=side[2:], xlabel="m")
plt.show()
