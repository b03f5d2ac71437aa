"""Tiles, and the work a device does: values that print and compare."""

from dataclasses import replace

import pytest

from pumice.errors import OptionError
from pumice.language.contraction import contraction_roles, packed
from pumice.language.parse import parse
from pumice.schedule.predict import DEVICES, Work, seconds
from pumice.schedule.tile import (
    SHARED_CHUNK,
    WHOLE_SEGMENTS,
    Problem,
    Tile,
    candidates,
    default,
    mean_class,
    occupancy,
    power_above,
    segment_class,
    size_class,
    splits,
    table_parts,
)

MATMUL = parse("C[m,n] = A[m,k] * B[k,n]")
SPMM = parse("C[R[p],n] = V[p] * B[K[p],n] ; R:sorted")
BLOCKS = parse("C[32*R[p]+a,n] = V[p,a,b] * B[32*K[p]+b,n] ; R:sorted")
SIZES = {
    MATMUL: {"m": 512, "n": 256, "k": 128},
    SPMM: {"p": 5000, "n": 128},
    BLOCKS: {"p": 500, "a": 32, "b": 32, "n": 1024},
}


def problem(statement, **more):
    return Problem(contraction_roles(statement, SIZES[statement]), SIZES[statement], **more)


@pytest.mark.parametrize("statement", SIZES, ids=str)
def test_candidates_begin_with_the_default_and_differ(statement):
    found = list(candidates(problem(statement)))
    assert found[0] == default(problem(statement))
    assert len(set(found)) == len(found) > 3


def test_a_short_side_becomes_the_columns_of_the_tile():
    """wgmma wants 64 rows."""
    assert default(problem(BLOCKS)).swapped and default(problem(BLOCKS)).columns == 32
    assert not default(problem(BLOCKS, bits=32)).swapped


def test_long_rows_get_lanes_and_short_ones_no_loads_ahead():
    assert default(problem(SPMM, mean=5)).segment_threads == 1 and default(problem(SPMM, mean=5)).stages == 1
    assert default(problem(SPMM, mean=100)).segment_threads > 1 and default(problem(SPMM, mean=100)).stages == 2


def test_long_rows_of_halves_are_stacked():
    """Where tensor cores multiply them exactly; a stack stays as high as it was put together."""
    assert default(problem(SPMM, mean=100, stacks=True)) == Tile(
        16, 128, 128, stages=2, stacked=True, prefetch_indices=True
    )
    assert not default(problem(SPMM, mean=5, stacks=True)).stacked
    assert any(tile.stacked for tile in candidates(problem(SPMM, mean=5, stacks=True)))
    assert not any(tile.stacked for tile in candidates(problem(SPMM, mean=100)))
    tile, seen = Tile(16, 64, 128, stages=3, stacked=True), []
    while tile is not None:
        seen.append((tile.rows, tile.columns, tile.stages))
        tile = tile.smaller()
    assert seen == [(16, 64, 3), (16, 64, 2), (16, 32, 2), (16, 16, 2)]


@pytest.mark.parametrize(
    "wrong,said",
    [
        ({"rows": 48}, "rows of a tile is a power of two, at least 1; found 48"),
        ({"stages": 0}, "stages of a tile is a power of two, at least 1; found 0"),
        ({"segment_threads": 32}, "32 lanes do not divide 16 rows"),
        ({"epilogue_subtiles": 256}, "256 slices do not divide 128 columns"),
        ({"packed": True, "stacked": True}, "a packed tile cannot be stacked"),
        ({"packed": True, "segment_threads": 4}, "have several segment_threads"),
        ({"rows": 2048, "columns": 1024}, "at most 1048576 results, found 2048 x 1024"),
    ],
)
def test_a_wrong_tile_says_what_is_wrong(wrong, said):
    with pytest.raises(OptionError, match=said):
        replace(Tile(16, 128), **wrong)


def test_a_smaller_tile_has_no_more_slices_than_columns():
    tile = Tile(16, 64, 16, epilogue_subtiles=64)
    found = []
    while (tile := tile.smaller()) is not None:
        found.append((tile.columns, tile.epilogue_subtiles))
    assert found == [(32, 32), (16, 16)]


def test_tiles_print():
    assert str(Tile(64, 32, 16, warps=8, stages=3, swapped=True)) == "64x32x16 w8 s3 swapped"
    assert str(Tile(32, 128, segment_threads=4, column_major_grid=True)) == "32/4x128x1 w4 s2 column-major"
    assert str(Tile(16, 128, 64, stacked=True, prefetch_indices=True)) == "16x128x64 w4 s2 stacked prefetch"
    assert str(Tile(128, 32, 64, packed=True, prefetch_indices=True)) == "128x32x64 w4 s2 packed prefetch"
    assert (
        str(Tile(128, 128, 32, prefetch_indices=True, epilogue_subtiles=4)) == "128x128x32 w4 s2 prefetch in 4 slices"
    )


def test_indices_are_loaded_ahead_in_longer_loops():
    entries = {"mean": 8, "chained": True, "segments": 1000}
    found = default(problem(BLOCKS, **entries))
    assert found.prefetch_indices and found.stages == 4 and found.swapped
    assert not default(problem(BLOCKS, **{**entries, "mean": 3, "segments": 50})).prefetch_indices
    assert not default(problem(BLOCKS, mean=8)).prefetch_indices
    assert {tile.prefetch_indices for tile in candidates(problem(BLOCKS, **entries))} == {True, False}


@pytest.mark.parametrize(
    "rows,channels,expected",
    [
        (64, 32, "64x32x32 w4 s4 prefetch"),
        (64, 64, "64x64x64 w4 s4 prefetch"),
        (64, 96, "64x128x32 w4 s4 prefetch in 4 slices"),
        (64, 128, "64x128x64 w4 s4 prefetch"),
        (64, 256, "64x128x64 w4 s4 prefetch"),
        (128, 32, "128x32x32 w4 s4 prefetch"),
        (128, 64, "128x64x64 w4 s3 prefetch"),
        (128, 96, "128x128x32 w4 s4 prefetch in 4 slices"),
        (128, 128, "128x128x64 w4 s3 prefetch"),
        (128, 256, "128x256x64 w8 s3 prefetch"),
    ],
)
def test_a_convolution_has_one_kernel_for_all_sizes(rows, channels, expected):
    """But one for each height of tiles: chunks of any length are taken by one kernel."""
    found = [
        default(convolution(channels, mean, tiles, channels, block=rows))
        for mean in (2.5, 4, 8, 16, 32)
        for tiles in (1, 20, 81, 122, 316, 1352, 7800)
    ]
    assert {str(replace(tile, stream_k_chunk=0)) for tile in found} == {expected}
    assert all(tile.has_code_of(found[0]) for tile in found)
    assert {tile.stream_k_chunk for tile in found} == ({8, WHOLE_SEGMENTS} if rows == 64 else {0})


@pytest.mark.parametrize(
    "tiles,channels,mean,chunk",
    [(316, 128, 4.3, 8), (316, 32, 4.3, 8), (24, 256, 16.4, 8), (31, 256, 23.9, WHOLE_SEGMENTS)],
)
def test_few_segments_are_shared_whose_longest_would_be_waited_for(tiles, channels, mean, chunk):
    """What a sweep on an H200 found best."""
    assert default(convolution(channels, mean, tiles, channels, block=64)).stream_k_chunk == chunk


def test_tiles_with_chunks_have_one_kernel_and_those_without_another():
    tile = Tile(64, 64, 32, stream_k_chunk=8)
    assert tile.has_code_of(replace(tile, stream_k_chunk=WHOLE_SEGMENTS))
    assert not tile.has_code_of(replace(tile, stream_k_chunk=0)) and not replace(tile, stream_k_chunk=0).has_code_of(
        tile
    )
    assert not tile.has_code_of(replace(tile, stages=3))


def test_values_of_32_bits_have_no_tiles_of_256_columns():
    assert str(default(convolution(256, 16.8, 216, 256, bits=32))) == "128x128x32 w8 s3 prefetch"


def test_a_weight_in_three_parts_leaves_no_room_for_a_fourth_stage():
    for bits, mixed, stages in ((16, False, 4), (32, False, 4), (32, True, 3)):
        found = default(convolution(128, 12, 300, 128, block=64, bits=bits, mixed=mixed))
        assert (found.rows, found.columns, found.stages) == (64, 128, stages)


def test_candidates_have_their_columns_in_slices():
    """Where they are enough for several."""
    for columns, wanted in ((96, {1, 2, 4}), (64, {1, 2, 4}), (32, {1})):
        assert {tile.epilogue_subtiles for tile in candidates(convolution(96, 5.9, 1352, columns))} == wanted


@pytest.mark.parametrize(
    "tiles,channels,mean,expected",
    [
        (1352, 96, 1.1, "128x128x32 w4 s3 prefetch in 4 slices"),
        (982, 32, 1.1, "128x32x32 w4 s3 prefetch"),
        (300, 32, 3.5, "128x32x32 w4 s3 prefetch"),
    ],
)
def test_windows_of_eight_taps_share_nothing(tiles, channels, mean, expected):
    assert str(default(convolution(channels, mean, tiles, channels, longest=8))) == expected
    few = convolution(channels, mean, 100, channels, block=64, longest=8)
    assert (default(few).stream_k_chunk, default(few._replace(longest=27)).stream_k_chunk) == (0, 8)


@pytest.mark.parametrize(
    "rows,channels,columns,expected",
    [
        (173_011, 128, 96, "128x128x32 w4 s4 in 4 slices"),
        (173_011, 192, 128, "64x128x64 w4 s2"),
        (173_011, 384, 128, "128x128x64 w8 s3"),
        (173_011, 128, 256, "128x256x64 w8 s3"),
        (20_000, 128, 96, "128x128x32 w4 s4 in 4 slices"),
        (64, 128, 96, "64x128x64 w4 s3"),
    ],
)
def test_linear_maps_of_many_rows_are_small_programs(rows, channels, columns, expected):
    linear = parse("y[n,m] = x[n,c] * w[m,c]")
    sizes = {"n": rows, "m": columns, "c": channels}
    assert str(default(Problem(contraction_roles(linear, sizes), sizes))) == expected
    assert default(Problem(contraction_roles(linear, sizes), sizes, bits=32)).epilogue_subtiles == 1


def test_segments_are_shared_where_a_barrier_waits_for_what_was_stored():
    shared, alone = (convolution(128, 4.3, 316, 128, block=64, waits=waits) for waits in (True, False))
    assert default(shared).stream_k_chunk and any(tile.stream_k_chunk for tile in candidates(shared))
    assert not any(tile.stream_k_chunk for tile in candidates(alone))
    assert default(alone) == replace(default(shared), stream_k_chunk=0)


def convolution(channels, mean, tiles=3000, columns=32, block=128, **more):
    conv = parse("O[rows[tile[e],b],n] = x[met[e,b],c] * w[n,k[e],c] ; tile:sorted, rows:distinct, rows:onto")
    sizes = {"e": int(tiles * mean), "b": block, "n": columns, "c": channels}
    form = contraction_roles(conv, sizes)
    together = packed(form, conv, sizes)
    return Problem(form, sizes, mean=mean, chained=True, segments=tiles, packed=together, **more)


@pytest.mark.parametrize(
    "channels,mean,bits,expected",
    [
        (1, 18, 16, "128x32x32 w4 s3 packed"),
        (3, 5, 16, "128x32x64 w4 s3 packed"),
        (3, 20, 16, "128x32x64 w4 s3 packed"),
        (4, 18, 16, "128x32x64 w4 s3 packed"),
        (4, 18, 32, "128x32x32 w4 s3 packed"),
        (4, 5, 32, "128x32x32 w4 s3 packed"),
        (16, 30, 16, "128x32x64 w4 s5 packed"),
        (16, 18, 8, "128x32x128 w4 s5 packed"),
        (32, 18, 16, "128x32x32 w4 s4 prefetch"),
        (16, 1, 16, "128x32x16 w4 s4 prefetch"),
    ],
)
def test_entries_of_few_channels_are_packed(channels, mean, bits, expected):
    """As many as a segment has, in 16 and 32 bits as it may have, to 128 bytes of a row; loops of few turns ask for
    little memory."""
    found = default(convolution(channels, mean, bits=bits))
    assert str(found) == expected


def test_sides_are_exchanged_where_the_columns_are_read_across():
    """In float32, as in a gradient of features: wgmma reads its second operand along the reduction only."""
    found = default(convolution(128, 9, columns=96, bits=32, across=True))
    assert found.swapped and (found.rows, found.columns) == (128, 128)
    for other in ({"bits": 16}, {"columns": 32}, {"across": False}):
        given = {"columns": 96, "bits": 32, "across": True} | other
        assert not default(convolution(128, 9, **given)).swapped


@pytest.mark.parametrize("channels", [3, 8, 16, 32, 64])
def test_packed_tiles_are_tried_beside_others(channels):
    found = list(candidates(convolution(channels, 18)))
    assert len(set(found)) == len(found)
    assert {tile.packed for tile in found} == ({True, False} if channels <= 32 else {False})
    points = power_above(channels)
    assert all(2 * points <= tile.reduced for tile in found if tile.packed and tile != found[0])


def test_what_packs_is_what_has_segments_of_its_own():
    for statement in SIZES:
        assert packed(contraction_roles(statement, SIZES[statement]), statement, SIZES[statement]) is None
    few = convolution(4, 18, columns=4)
    assert few.packed is None and not default(few).packed


def test_bytes_are_multiplied_as_many_bytes_at_a_time():
    conv = parse("O[rows[tile[e],b],n] = x[met[e,b],c] * w[n,k[e],c] ; tile:sorted, rows:distinct, rows:onto")
    for channels, depth in ((256, 128), (64, 64), (8, 32)):
        sizes = {"e": 9000, "b": 128, "n": 64, "c": channels}
        found = default(Problem(contraction_roles(conv, sizes), sizes, mean=9, bits=8, chained=True, segments=1000))
        assert found.reduced == depth or not contraction_roles(conv, sizes).product


def test_products_of_products_are_left_to_few_warps():
    """wgmma, for which Triton may read past shared memory, takes four warps and 64 rows."""
    text = "Z[b,l,u,w] = V[l,i,j] * X[b,j,u] * Y[b,l,i,j] * G[b,i,w]"
    sizes = {"b": 1000, "l": 11, "i": 9, "j": 9, "u": 64, "w": 64}
    form = contraction_roles(parse(text), sizes)
    assert form.within
    found = list(candidates(Problem(form, sizes, bits=32)))
    assert found and all(tile.warps <= 2 for tile in found if tile.rows >= 64) and found[0].rows == 64


def test_few_tiles_are_made_narrower():
    """Of 8 bits; those of 16 and 32 are the same for all sizes."""
    for tiles, sides in ((3000, (128, 128)), (40, (64, 64))):
        found = default(convolution(128, 12, tiles, columns=128, bits=8))
        assert (found.rows, found.columns) == sides
        for bits in (16, 32):
            assert default(convolution(128, 12, tiles, columns=128, bits=bits)).columns == 128


@pytest.mark.parametrize(
    "channels,tiles,expected",
    [
        (64, 3000, "128x128x64 w4 s3 prefetch"),
        (96, 3000, "128x128x32 w4 s4 prefetch in 4 slices"),
        (128, 3000, "128x128x64 w4 s3 prefetch"),
        (160, 3000, "128x128x64 w4 s3 prefetch"),
    ],
)
def test_turns_are_half_as_deep_where_the_last_would_be_mostly_empty(channels, tiles, expected):
    problem = convolution(channels, 12, tiles, 96)
    assert str(default(problem)) == expected
    # Both depths are tried, whichever is the default.
    assert {32, 64} <= {tile.reduced for tile in candidates(problem) if not tile.packed}
    assert default(convolution(channels, 12, tiles, 96, bits=32)).reduced == 32


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("channels", [32, 64, 128, 256])
def test_gradients_of_weights_have_one_tile(channels, bits):
    """For any number of groups of pairs: each is a kernel to compile."""
    weights, found = parse("W[k[g],c,n] += x[i[g,q],c] * y[o[g,q],n]"), set()
    for groups in (1, 8, 33, 66, 133, 264, 265, 528, 2000, 40000):
        sizes = {"g": groups, "q": 1024, "c": channels, "n": channels}
        tile = default(Problem(contraction_roles(weights, sizes), sizes, chained=True, bits=bits))
        side = min(128, channels)
        assert (tile.rows, tile.columns, tile.prefetch_indices) == (side, side, True)
        found.add(tile)
    assert len(found) == 1


@pytest.mark.parametrize(
    "sizes,shared",
    [
        ({"m": 64, "n": 64, "k": 1 << 20}, True),
        ({"m": 64, "n": 64, "k": 256}, False),
        ({"m": 8192, "n": 8192, "k": 1 << 20}, False),
    ],
)
def test_a_long_loop_of_few_tiles_is_shared(sizes, shared):
    found = splits(contraction_roles(MATMUL, sizes), sizes)
    assert (found > 1) == shared
    assert found <= sizes["k"]


@pytest.mark.parametrize(
    "rows, columns, volume, parts",
    [
        (100, 64, 27, 27),  # one tile: as many parts as kernel offsets
        (8_000, 64, 27, 5),  # 63 tiles, twice 132 programs
        (17_000, 128, 27, 2),
        (1_000_000, 64, 27, 2),  # never fewer than two
        (1_000_000, 64, 1, 1),
        (0, 0, 27, 27),
        (3_400, 128, 27, 9),  # 27 tiles: 10 parts, of three offsets each
    ],
)
def test_parts_of_a_split_over_the_table(rows, columns, volume, parts):
    assert table_parts(rows, columns, volume) == parts


@pytest.mark.parametrize("volume", [1, 2, 8, 27, 125])
@pytest.mark.parametrize("rows", [0, 1, 1000, 5000, 20_000, 10**6])
def test_no_part_is_empty(rows, volume):
    parts = table_parts(rows, 64, volume)
    each = -(-volume // parts)
    assert (parts - 1) * each < volume <= parts * each


def test_segments_are_not_shared():
    assert splits(contraction_roles(SPMM, {"p": 1 << 24, "n": 8}), {"p": 1 << 24, "n": 8}) == 1


def test_seconds():
    gpu = DEVICES["cuda"]
    assert seconds(Work(launches=2), gpu) == 2 * gpu.launch
    assert seconds(Work(flops=1e12, matrix=True), gpu) < seconds(Work(flops=1e12), gpu)
    assert seconds(Work(memory=4.3e12, launches=0), gpu) == pytest.approx(1)
    both = Work(1, 2, 3, 4) + Work(10, 20, 30, 40, True)
    assert both == Work(11, 22, 33, 44, True)


def test_a_class_of_segments_spans_a_factor_of_two():
    """And belongs to one size class."""
    assert [segment_class(n) for n in (0, 1, 3, 64, 65, 127, 128, 500)] == [1, 1, 4, 64, 96, 96, 192, 384]
    assert all(size_class(segment_class(n)) == size_class(n) for n in range(3000))


def test_few_tiles_of_many_entries_are_shared():
    """71 tiles of 256 columns leave a GPU idle where 226 do not (H200, float32: 132 us for 277, and 438 for 420)."""
    few, many = (default(convolution(256, 16, segment_class(n), 256, block=64)) for n in (71, 226))
    assert (few.stream_k_chunk, many.stream_k_chunk) == (SHARED_CHUNK, WHOLE_SEGMENTS)


def test_a_size_class_spans_a_factor_of_four():
    assert [size_class(n) for n in (0, 1, 3, 4, 15, 16, 48, 64, 65)] == [1, 1, 4, 4, 16, 16, 64, 64, 128]
    for n in (100, 1000, 17_856, 173_011, 10**9):
        assert size_class(n) / 2 <= n < 2 * size_class(n) and size_class(size_class(n)) == size_class(n)
    assert len({size_class(n) for n in range(1 << 12, 1 << 20, 64)}) == 4


def test_entries_of_a_segment_are_rounded_to_a_power_of_two():
    assert [mean_class(n, 100) for n in (0, 100, 140, 150, 870, 2240)] == [2.0**-7, 1, 1, 2, 8, 16]


def test_programs_at_once_are_those_that_fit():
    # 74 KB of shared memory each, as compiled: three.
    assert occupancy(Tile(128, 64, 64, warps=4, stages=3, prefetch_indices=True), 16) == 3
    assert occupancy(Tile(128, 64, 64, warps=4, stages=5), 16) == 3
    assert occupancy(Tile(128, 128, 64, warps=8, stages=3, prefetch_indices=True), 16) == 2
    assert occupancy(Tile(128, 256, 64, warps=8, stages=3, prefetch_indices=True), 16) == 1
    # By registers, and by warps.
    assert occupancy(Tile(128, 128, 16, warps=4, stages=2), 16) == 2
    assert occupancy(Tile(16, 16, 16, warps=8, stages=2), 8) == 4
