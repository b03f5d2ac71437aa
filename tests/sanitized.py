"""Run generated C under AddressSanitizer and UndefinedBehaviorSanitizer of gcc.

`PYTHONPATH=src:tests python tests/sanitized.py 200` runs 200 random statements over sparse operands, pruned and sparse
convolutions and kernel maps, all compiled with the sanitizers; a report ends the process with a nonzero status.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pumice.runtime import native

FLAGS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def runtime() -> Path | None:
    """gcc's AddressSanitizer, which is loaded before Python; None where there is none."""
    if not (command := shutil.which("gcc")):
        return None
    found = subprocess.run([command, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    path = Path(found.stdout.strip())
    return path if path.is_absolute() and path.exists() else None


def run(count: int) -> subprocess.CompletedProcess[str]:
    """This file in a process of its own, with the sanitizers loaded."""
    # Exceptions of C++ go through the sanitizer, which finds their library only if it is loaded.
    options = {"LD_PRELOAD": f"{runtime()}:libstdc++.so.6", "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, __file__, str(count), "loaded"]
    return subprocess.run(command, env=os.environ | options, capture_output=True, text=True, check=False)


def sanitize() -> None:
    """Compile with the sanitizers from here on in this process."""
    found = native.Compiler.find()
    made = replace(found, command=(*found.command, *FLAGS))
    native.Compiler.find = staticmethod(lambda: made)  # type: ignore[method-assign]
    native._FLAGS = tuple("-O0" if flag == "-O2" else flag for flag in native._FLAGS)  # Compiles in less time
    assert native.compiler() is made, native.compiler()


def overflow() -> None:
    """A write after the end of a tensor: reported, if the sanitizers see tensors at all."""
    import torch

    made = native.compiler()
    assert isinstance(made, native.Compiler)
    library = made.library("void past(void *region, int threads, float *x, long long n) { x[n] = 1; }")
    native.call(library, "past", [torch.zeros(100)], [100])


def statements(count: int) -> None:
    from einsum_sparse_fuzz import check, random_sparse_case

    for seed in range(count):
        check(random_sparse_case(seed))


def convolutions(count: int) -> None:
    """Pruned layers of random kernels, strides, dilations and groups; sparse 3-D convolutions, their kernel maps."""
    import torch

    import pumice as pm
    from pumice.testing import random_tensor

    rng = random.Random(0)
    for seed in range(count):
        torch.manual_seed(seed)
        groups, size = rng.choice((1, 1, 2)), (rng.randint(5, 19), rng.randint(5, 23))
        channels = [groups * rng.randint(1, 20) for _ in range(2)]
        options: dict[str, Any] = {
            "stride": rng.choice((1, 2)),
            "padding": rng.choice((0, 1, 2)),
            "dilation": rng.choice((1, 1, 2)),
        }
        conv = torch.nn.Conv2d(channels[0], channels[1], rng.choice((1, 2, 3)), groups=groups, **options)
        layer = pm.nn.PrunedConv2d.from_dense(conv, torch.rand_like(conv.weight) < rng.choice((0.0, 0.1, 0.5, 1.0)))
        layer(torch.randn(rng.choice((1, 2, 3)), channels[0], *size, requires_grad=True)).sum().backward()
        x = random_tensor(rng.randint(1, 300), rng.randint(1, 40), seed=seed)
        out = rng.choice((2, 3))
        pm.nn.Conv3d(x.feats.shape[1], rng.randint(1, 40), out, stride=rng.choice((1, out)))(x).feats.sum().backward()


if __name__ == "__main__":
    if sys.argv[2:] != ["loaded"]:
        done = run(int((*sys.argv[1:], 200)[0]))
        print(done.stdout, done.stderr[-6000:], sep="\n")
        sys.exit(done.returncode)
    sanitize()
    wanted = int(sys.argv[1])
    if wanted < 0:
        overflow()
    statements(wanted)
    convolutions(wanted // 4)
    print(f"{wanted} statements and {wanted // 4} layers of both kinds without a report")
