"""Random networks of torch's modules and functions on features, in the spellings that code bases have."""

import random

import torch
from torch import nn
from torch.nn import functional as F

import pumice as pm


class Spelled(nn.Module):
    """A random network: each step makes a tensor of earlier ones, and the result is all of them."""

    STEPS = ("conv", "norm", "act", "in place", "function", "sum", "own sum", "cat", "linear", "half", "twice", "times")

    def __init__(self, seed):
        super().__init__()
        chance = random.Random(seed)
        torch.manual_seed(seed)
        self.layers, self.plan = nn.ModuleList(), []
        widths = [4]
        for _ in range(chance.randint(4, 14)):
            step, a = chance.choice(self.STEPS), chance.randrange(len(widths))
            others = [n for n, width in enumerate(widths) if width == widths[a] or chance.random() < 0.2 and width == 1]
            b, out = chance.choice(others), chance.choice((1, 4, 8))
            # A sum of tensors does not broadcast.
            step = "sum" if step == "own sum" and widths[a] != widths[b] else step
            width = {"conv": out, "linear": out, "cat": widths[a] + widths[b], "half": out}.get(step, widths[a])
            self.layers.append(self._layer(step, widths[a], out))
            self.plan.append((step, a, b))
            widths.append(width)

    @staticmethod
    def _layer(step, width, out):
        made = {
            "conv": lambda: pm.nn.Conv3d(width, out, 3, bias=width > 1),
            "half": lambda: nn.ModuleList([pm.nn.Conv3d(width, 4, 2, 2), pm.nn.InverseConv3d(4, out, 2, 2)]),
            "norm": lambda: nn.BatchNorm1d(width),
            "linear": lambda: nn.Linear(width, out),
            "act": nn.ReLU,
            "in place": lambda: nn.ReLU(inplace=True),
        }
        return made.get(step, nn.Identity)()

    def forward(self, x):
        made = [x]
        for layer, (step, a, b) in zip(self.layers, self.plan, strict=True):
            made.append(self._step(layer, step, made[a], made[b]))
        return [y.feats for y in made[1:]]

    def _step(self, layer, step, x, y):
        if step == "conv":
            return layer(x)
        if step == "half":
            down, up = layer
            return up(down(x), x)
        if step in ("norm", "act", "linear"):
            return x.replace(layer(x.feats))
        if step == "in place":
            # Of a tensor of its own: the input is not the network's.
            return x.replace(layer(x.feats + 0))
        if step == "function":
            return x.replace(F.relu(x.feats))
        if step == "sum":
            return x.replace(x.feats + y.feats)
        if step == "own sum":
            return x + y
        if step == "cat":
            return x.replace(torch.cat((x.feats, y.feats), dim=1))
        if step == "twice":
            return x.replace(F.relu(x.feats) + x.feats)
        return x.replace(x.feats * 0.5)
