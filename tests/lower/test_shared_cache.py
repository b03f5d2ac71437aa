"""A cache folder that many users share: nothing in it is executed, and a tile that does not fit ends no call."""

import hashlib
import inspect
import warnings

import pytest
import torch
from emulated import emulated

import pumice as pm
from pumice.env import settings
from pumice.language.bind import bind
from pumice.language.parse import parse
from pumice.lower import kernel as kernels
from pumice.lower.emit import Source
from pumice.schedule.tile import Tile

MATMUL = "C[i,n] = A[i,k] * B[k,n]"
SEGMENTS = "C[R[e],n] = A[e,k] * B[e,k,n] ; R:sorted, C:[7,20]"
FOLDED = "Y[b,K[i,j]] = X[b,j,u] * G[b,i,w] * W[u,w] ; Y:[3,4]"
BODY = "import triton\n\n\n@triton.jit\ndef kernel(x, SIZE):\n    x + SIZE\n"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder that PUMICE_CACHE names."""
    monkeypatch.setenv("PUMICE_CACHE", str(tmp_path))
    settings.cache_clear()
    kernels.loaded.cache_clear()
    yield tmp_path
    settings.cache_clear()
    kernels.loaded.cache_clear()


@pytest.mark.parametrize("linked", [False, True])
def test_no_file_of_the_cache_folder_is_executed(cache, linked):
    pytest.importorskip("triton")
    evil, digest = f"raise SystemExit('executed')\n{BODY}", hashlib.sha256(BODY.encode()).hexdigest()[:24]
    folder = cache / "kernels"
    if linked:
        (cache / "elsewhere").mkdir()
        folder.symlink_to(cache / "elsewhere")
    else:
        folder.mkdir()
    (folder / f"k{digest}.py").write_text(evil)
    found = kernels.loaded(Source("kernel", BODY, ())).function
    assert found.src == "def kernel(x, SIZE):\n    x + SIZE\n"
    assert [file.read_text() for file in folder.iterdir()] == [evil]


def test_the_text_of_a_kernel_can_be_read(cache):
    """By Triton, when it interprets a kernel, and by tracebacks."""
    pytest.importorskip("triton")
    found = kernels.loaded(Source("kernel", BODY, ())).function
    assert inspect.getsource(found.fn) == BODY[BODY.index("@") :]
    assert not [*cache.iterdir()], "nothing is written"


def operands(text):
    generator = torch.Generator().manual_seed(2)
    if text is MATMUL:
        return {"A": torch.randn(40, 33, generator=generator), "B": torch.randn(33, 20, generator=generator)}
    if text is FOLDED:
        sizes = {"X": (3, 5, 9), "G": (3, 4, 10), "W": (9, 10)}
        values = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
        return {"K": torch.arange(20).view(4, 5) % 4, **values}
    a, b = torch.randn(50, 33, generator=generator), torch.randn(50, 33, 20, generator=generator)
    return {"R": torch.arange(50) // 8, "A": a, "B": b}


UNFIT = {
    "stacked": (MATMUL, Tile(16, 16, 16, stacked=True), "cannot be stacked"),
    "in pieces": (MATMUL, Tile(16, 16, 16, stream_k_chunk=4), "requires a segmented product"),
    "packed": (MATMUL, Tile(16, 16, 16, packed=True), "cannot be packed"),
    "not padded": (MATMUL, Tile(16, 16, 16, padded=False), "padded=False requires"),
    "no product": (SEGMENTS, Tile(16, 16, 16, swapped=True), "not a matrix product"),
    "columns are added up": (FOLDED, Tile(16, 16, 16, swapped=True), "sums the columns"),
    "a product of one row": (MATMUL, Tile(1, 16, 16), "at least 16"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_tile_that_does_not_fit_is_ignored(tmp_path, name):
    text, tile, reason = UNFIT[name]
    given = operands(text)
    with emulated(tmp_path):
        bound = bind(parse(text), {name: tuple(x.shape) for name, x in given.items()})
        want = kernels.tile_of(bound, given)
        kernels.ledger().put(kernels._key(bound, given, kernels.float32_precision()), tile)
        kernels._warn_unfit.cache_clear()
        with pytest.warns(RuntimeWarning, match=f"(?s)is ignored.*{reason}") as told:
            assert kernels.tile_of(bound, given) == want
            assert pm.compile_einsum(text, lowering="triton").explain(**given)
        assert len(told) == 1
        if text is MATMUL:
            with warnings.catch_warnings():
                torch.testing.assert_close(pm.einsum(text, lowering="triton", **given), given["A"] @ given["B"])


def test_a_tile_that_fits_is_taken(tmp_path):
    given = operands(MATMUL)
    with emulated(tmp_path):
        bound = bind(parse(MATMUL), {name: tuple(x.shape) for name, x in given.items()})
        kernels.ledger().put(kernels._key(bound, given, kernels.float32_precision()), Tile(32, 16, 16))
        assert kernels.tile_of(bound, given) == Tile(32, 16, 16)
