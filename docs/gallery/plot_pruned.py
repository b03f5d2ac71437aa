"""
A pruned layer
==============

The time of a convolution whose filter is stored without its zeros, beside the dense layer of PyTorch, on one thread of
the machine that drew this page, for one layer and one image. :doc:`/guide/pruned` says from how many zeros on layers
of a whole network pay, and :doc:`/status` has what was measured on other machines.
"""

import time

import matplotlib.pyplot as plt
import torch

import pumice as pm

torch.manual_seed(0)
torch.set_num_threads(1)
image = torch.randn(1, 64, 28, 28)
dense = torch.nn.Conv2d(64, 64, 3, padding=1).eval()


def milliseconds(layer, repeats=30):
    """The fastest of some calls."""
    spent = []
    with torch.no_grad():
        for _ in range(repeats):
            start = time.perf_counter()
            layer(image)
            spent.append(time.perf_counter() - start)
    return 1e3 * min(spent)


shares = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
times = []
for share in shares:
    kept = torch.rand_like(dense.weight) >= share
    layer = pm.nn.PrunedConv2d.from_dense(dense, kept)
    reference = torch.nn.functional.conv2d(image, dense.weight * kept, dense.bias, padding=1)
    assert torch.allclose(layer(image), reference, atol=1e-4)
    times.append(milliseconds(layer))
    print(f"{share:.0%} zeros: {times[-1]:.3f} ms")
base = milliseconds(dense)
print(f"dense: {base:.3f} ms")

# %%

figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
axis.axhline(base, color="#51606e", ls="--", label="dense, PyTorch")
axis.plot([100 * share for share in shares], times, "o-", color="#e8833a", label="pruned, pm.nn.PrunedConv2d")
axis.set(xlabel="zeros in the filter, %", ylabel="ms", ylim=(0, None), title="3x3, 64 to 64 channels, 28 x 28 image")
axis.legend()
plt.show()
