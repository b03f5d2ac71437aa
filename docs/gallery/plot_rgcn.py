"""
Node classes in a graph
=======================

A relational graph network (R-GCN, Schlichtkrull et al., 2018) learns the classes of nodes from a few that are known.
Edges of relation 0 mostly join nodes of one class, those of relation 1 any two.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

import pumice as pm

generator = torch.Generator().manual_seed(0)
torch.manual_seed(0)
NODES, CLASSES = 120, 3
classes = torch.randint(0, CLASSES, (NODES,), generator=generator)
ends = torch.randint(0, NODES, (2, 3000), generator=generator)
alike = classes[ends[0]] == classes[ends[1]]
chance = torch.rand(3000, generator=generator)
within, anywhere = ends[:, alike & (chance < 0.5)][:, :400], ends[:, chance > 0.9][:, :200]
edges = torch.cat([within, anywhere], 1)
types = torch.cat([torch.zeros(within.shape[1]), torch.ones(anywhere.shape[1])]).long()
graph = pm.Graph(torch.cat([edges, edges.flip(0)], 1), torch.cat([types, types + 2]), num_nodes=NODES, num_relations=4)
print(graph)

# %%
# Nodes have no features: the first layer has a row of weights for each node and relation.

net = pm.models.RGCN(NODES, 16, CLASSES, num_relations=4)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
known = torch.randperm(NODES, generator=generator)[:30]
for _ in range(60):
    loss = cross_entropy(net(None, graph)[known], classes[known])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
net.eval()
with torch.no_grad():
    found = net(None, graph).argmax(1)
rest = torch.ones(NODES, dtype=torch.bool)
rest[known] = False
print(f"{(found == classes)[rest].float().mean():.0%} of the other {int(rest.sum())} nodes are right")

# %%
# Nodes lie around the centre of their class; the ring is the class that was found, squares were known.

angle = classes * 2 * torch.pi / CLASSES
places = torch.stack([angle.cos(), angle.sin()], 1) + 0.3 * torch.randn(NODES, 2, generator=generator)
colours = plt.get_cmap("Set2")
figure, axis = plt.subplots(figsize=(7, 6), layout="constrained")
for kind, colour in ((1, "#d9d9d9"), (0, "#8da0b3")):
    for source, target in edges[:, types == kind].T.tolist():
        axis.plot(*places[[source, target]].T, color=colour, lw=0.5, zorder=1)
for marker, chosen in (("s", ~rest), ("o", rest)):
    axis.scatter(*places[chosen].T, s=60, marker=marker, color=colours(classes[chosen].numpy()),
                 edgecolors=colours(found[chosen].numpy()), linewidths=2.5, zorder=2)  # fmt: skip
wrong = places[found != classes]
axis.scatter(*wrong.T, s=140, facecolors="none", edgecolors="red", zorder=3, label=f"wrong: {len(wrong)}")
axis.legend(loc="upper right")
axis.set(aspect="equal", xticks=[], yticks=[])
plt.show()
