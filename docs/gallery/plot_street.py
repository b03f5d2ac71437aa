"""
Segmentation of a street
========================

A small U-Net learns from four generated streets what each point is, and labels one that it has not seen. Everything is
as it would be on scans of your own: `pumice.data.read_scan` in place of `street_scene`.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

import pumice as pm
from pumice.data import STREET, street_scene

torch.manual_seed(0)
SIZE = 0.5


def scene(seed):
    scan = street_scene(seed, beams=24, azimuths=256)
    xyz, labels = torch.from_numpy(scan.xyz), torch.from_numpy(scan.labels)
    feats = torch.cat([torch.from_numpy(scan.feats), xyz[:, 2:]], 1)  # intensity and height
    return xyz, labels, pm.voxelize(xyz, feats, size=SIZE)


# %%
# The network: a level at full and one at half resolution, and a score for each class.


class UNet(torch.nn.Module):
    def __init__(self, channels, classes, width=16):
        super().__init__()
        self.stem = pm.nn.Sequential(pm.nn.Conv3d(channels, width, 3), pm.nn.BatchNorm(width), pm.nn.ReLU())
        self.down = pm.nn.Conv3d(width, 2 * width, 2, stride=2, out="floor_unique")
        self.block = pm.nn.ResidualBlock(2 * width, 2 * width)
        self.up = pm.nn.InverseConv3d(2 * width, width, 2, stride=2)
        self.head = pm.nn.Linear(2 * width, classes)

    def forward(self, x):
        skip = self.stem(x)
        y = self.block(self.down(skip))
        return self.head(pm.cat([self.up(y, skip), skip]))


net = UNet(2, len(STREET))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scenes = [scene(seed) for seed in range(4)]
weight = 1 / torch.cat([labels for _, labels, _ in scenes]).bincount().sqrt()  # rare classes count more
for step in range(32):
    xyz, labels, x = scenes[step % 4]
    loss = cross_entropy(net(x).feats[x.inverse], labels, weight)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.2f}")

# %%
# A street that it has not seen, from above.

xyz, labels, x = scene(7)
net.eval()
with torch.no_grad():
    found = net(x).feats[x.inverse].argmax(1)
print(f"{len(xyz)} points in {len(x)} voxels, {(found == labels).float().mean():.1%} of the points are right")

colours = plt.get_cmap("tab10")
figure, axes = plt.subplots(1, 3, figsize=(12, 4.4), sharex=True, sharey=True, layout="constrained")
wrong = (found != labels).long()
for axis, title, shown in zip(axes, ("label", "prediction", "error"), (labels, found, wrong), strict=True):
    tint = [("#b8c0c8", "#d62728")[v] for v in shown] if title == "error" else colours(shown.numpy())
    axis.scatter(xyz[:, 0], xyz[:, 1], s=0.6, c=tint)
    axis.set(title=title, aspect="equal", xlim=(-40, 40), ylim=(-40, 40), xlabel="m")
dots = [plt.Line2D([], [], marker="o", ls="", color=colours(number)) for number in range(len(STREET))]
figure.legend(dots, STREET.names, loc="outside lower center", ncols=len(STREET), frameon=False)
plt.show()
