"""Kernels compiled by worker processes, on a GPU and with its version of Triton."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from pumice.runtime.compile import BACKGROUND
from pumice.runtime.launch import BoundKernel, jitted

pytestmark = pytest.mark.gpu

NETWORK = """
import sys
import torch
import pumice as pm
from pumice.runtime import compile as ahead

done = []
compiled = ahead.Worker.compile
ahead.Worker.compile = lambda self, told: done.append(compiled(self, told)) or done[-1]
net = torch.nn.Sequential(pm.nn.Conv3d(4, 32, 3), pm.nn.BatchNorm(32), pm.nn.ReLU(), pm.nn.Conv3d(32, 48, 2, stride=2))
program = pm.compile(net.cuda().half().eval())
with torch.no_grad():
    for count in (2_000, 50_000):
        coords = torch.unique(torch.randint(0, 200, (count, 3), device="cuda"), dim=0).int()
        coords = torch.nn.functional.pad(coords, (1, 0))
        x = pm.SparseTensor(torch.randn(len(coords), 4, device="cuda").half(), coords)
        found, wanted = program(x), net(x)
        assert torch.allclose(found.feats.float(), wanted.feats.float(), atol=2e-2, rtol=2e-2)
print(len(done), all(done), ahead.BACKGROUND.left)
"""


def test_workers_compile_and_the_process_ends_while_they_do(tmp_path):
    """With an empty cache; kernels for other sizes are still under way when the interpreter ends."""
    kept = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "PUMICE_CACHE": str(tmp_path / "pumice")}
    (tmp_path / "pumice").mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", NETWORK], env=os.environ | kept, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    count, right, _ = ended.stdout.split()
    assert int(count) >= 3 and right == "True"


def test_kernels_are_loaded_while_a_user_captures_a_graph():
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = BoundKernel(jitted("tile_kernels.put", "coords"), (32,))
    x, graph = torch.ones(4, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        BACKGROUND.run([partial(kernel.compile, device, [torch.int32] * 7, (1, 1, 1, 1))])
    graph.replay()
    assert kernel.known and y.tolist() == [2.0] * 4
