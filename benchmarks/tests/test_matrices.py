"""Stand-ins are like the graphs they stand for; real matrices are read whole."""

import numpy as np
import pytest

from benchmarks.scenes import matrices
from pumice.env import settings
from pumice.errors import OptionError

# Non-zeros of the graph, and its 16 x 8 tiles before and after compaction, from TC-GNN's logs.
TILES = {
    "artist-like": (1_638_396, 1_476_687, 201_600),
    "blog-like": (2_093_195, 904_955, 203_670),
    "amazon0505-like": (4_878_875, 2_469_469, 455_410),
    "dd-like": (1_686_092, 352_902, 130_006),
    "ppi-like": (818_716, 293_819, 81_006),
    "proteins-like": (162_088, 19_045, 12_867),
    "ovcar-like": (3_946_402, 567_979, 408_653),
    "yeast-like": (3_636_546, 446_335, 340_051),
    "yeasth-like": (6_487_230, 893_326, 662_469),
    "com-amazon-like": (1_851_744, 1_807_989, 238_338),
    "amazon0601-like": (3_387_388, 1_617_201, 308_011),
}
# Of the baselines' table, and of TC-GNN's table 4.
SIZES = {
    "artist-like": (50_515, 1_638_396),
    "blog-like": (88_784, 2_093_195),
    "amazon0505-like": (410_236, 4_878_875),
    "stencil5": (1_000_000, 4_996_000),
    "dd-like": (300_000, 1_700_000),
    "uniform": (100_000, 1_000_000),
    "ppi-like": (56_944, 818_716),
    "proteins-like": (43_471, 162_088),
    "ovcar-like": (1_890_931, 3_946_402),
    "yeast-like": (1_714_644, 3_636_546),
    "yeasth-like": (3_139_988, 6_487_230),
    "com-amazon-like": (334_863, 1_851_744),
    "amazon0601-like": (403_394, 3_387_388),
}


def tiles(matrix, height=16, width=8):
    """Number of non-empty tiles, as is and after removing the empty columns of each `height` rows."""
    window = matrix.rows // height
    columns = matrix.shape[1]
    before = len(np.unique(window * -(-columns // width) + matrix.cols // width))
    distinct = np.bincount(np.unique(window * columns + matrix.cols) // columns)
    return before, int((-(-distinct // width)).sum())


BIG = [pytest.param(name, marks=[pytest.mark.wide] if SIZES[name][1] > 3_000_000 else []) for name in SIZES]


@pytest.mark.parametrize("name", BIG)
def test_sizes_are_those_of_the_baselines_and_tiles_as_full_as_those_of_the_graph(name):
    found = matrices.stand_in(name)
    size, nnz = SIZES[name]
    assert found.shape == (size, size) and found.nnz == pytest.approx(nnz, rel=1e-3)
    if name not in TILES:
        return
    nnz, *expected = TILES[name]
    # dd-like has the size of the recorded baselines, not quite that of the graph: tiles per non-zero are compared.
    for count, known in zip(tiles(found), expected, strict=True):
        assert count / found.nnz == pytest.approx(known / nnz, rel=0.1)


@pytest.mark.parametrize("name", matrices.STAND_INS)
def test_a_small_one_is_sorted_and_the_same_each_time(name):
    first, second = (matrices.stand_in(name, 0.01) for _ in range(2))
    assert np.array_equal(first.rows, second.rows) and np.array_equal(first.cols, second.cols)
    keys = first.rows * first.shape[1] + first.cols
    assert (np.diff(keys) > 0).all() and keys[0] >= 0 and keys[-1] < first.shape[0] * first.shape[1]
    assert first.pointers[-1] == first.nnz == first.occupancy.sum()
    whole = SIZES[name]
    assert first.nnz / first.shape[0] == pytest.approx(whole[1] / whole[0], rel=0.25)


def test_tiles_are_counted():
    found = matrices.Matrix("two", (32, 24), np.array([0, 3, 17]), np.array([0, 23, 8]))
    assert tiles(found) == (3, 2)


def test_blocks_have_the_sparsity():
    assert matrices.blocks(32, 0.9).nnz == round(1024 * 0.1)
    assert matrices.blocks(4, 1.0).nnz == 1


def test_an_unknown_stand_in_lists_the_known():
    with pytest.raises(OptionError, match="artist-like"):
        matrices.stand_in("nothing")


def test_real_matrices_are_read():
    if settings().data is None:
        pytest.skip("PUMICE_DATA is not set")
    found = {m.name: m for m in matrices.real(settings().data)}
    if not found:
        pytest.skip("PUMICE_DATA has no matrices")
    assert found["cora"].nnz == 10_556 and found["pubmed"].shape == (19_717, 19_717)
    assert found["bcsstk16"].nnz == 290_378 and found["mbeacxc"].shape == (492, 490)
    assert found["musae-git"].nnz == 2 * 289_003 and np.array_equal(
        found["musae-git"].occupancy, np.bincount(found["musae-git"].cols, minlength=found["musae-git"].shape[0])
    )
