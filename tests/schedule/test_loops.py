"""Schedules of loop nests: text and JSON, what is refused and why, the rule, the presets, the candidates."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pumice.errors import OptionError
from pumice.schedule import loops
from pumice.schedule.loop_rule import PRESETS, ImageTiles, candidates, completed, estimate
from pumice.schedule.loops import Image, LoopSchedule, NestFacts, check_of_levels

NAME = st.sampled_from(["m", "e", "p", "q", "p.q", "F_c", "größe", "order", "chunk"])
NUMBER = st.integers(1, loops.MOST_NUMBER)
NAMES = st.lists(NAME, unique=True, max_size=4).map(tuple)


def pairs(numbers, **sizes):
    return st.lists(st.tuples(NAME, numbers), unique_by=lambda pair: pair[0], **sizes).map(tuple)


SCHEDULES = st.builds(
    LoopSchedule,
    order=NAMES,
    split=pairs(NUMBER, max_size=3),
    fuse=st.lists(NAME, unique=True, min_size=2, max_size=3).map(tuple).map(lambda group: (group,)) | st.just(()),
    parallel=pairs(NUMBER | st.just(0), max_size=1),
    vector=pairs(st.just(0), max_size=1) | pairs(NUMBER, min_size=2, max_size=2),
    unroll=pairs(st.integers(1, loops.MOST_UNROLL), max_size=2),
    pack=NAMES.map(lambda names: names[:1]),
    locate=NAMES,
    hold=st.integers(0, loops.MOST_NUMBER),
)


@given(SCHEDULES)
def test_text_is_read_back(schedule):
    assert LoopSchedule.parse(str(schedule)) == schedule
    assert LoopSchedule.parse(f"  {str(schedule).replace(' ', '   ')} ;;") == schedule


@given(st.text(max_size=80) | st.text("order split fuse()mpqe,;.0123456789\n", max_size=80))
def test_other_text_is_refused(text):
    try:
        found = LoopSchedule.parse(text)
    except OptionError:
        return
    assert LoopSchedule.parse(str(found)) == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("reorder m e", "unknown directive 'reorder m e'.*there are order, split"),
        ("split(p)", r"expected the directive split as in `split\(p, 7\)`, found 'split\(p\)'"),
        ("split(p, 7.5)", "expected the directive split"),
        ("split(p, -7)", "expected the directive split"),
        ("split(p, 0)", "expected numbers from 1 to 1048576, found 0"),
        ("hold 0", "expected numbers from 1 to 1048576, found 0"),
        ("parallel m chunk 0", "expected numbers from 1 to 1048576, found 0"),
        ("hold 99999999999999999999", "expected numbers from 1 to 1048576, found 9999"),
        ("unroll e 17", "expected numbers from 1 to 16, found 17"),
        ("vector p q", "expected the directive vector"),
        ("vector p 2 q", "expected the directive vector"),
        ("order m e m", "order: m is named twice"),
        ("split(p, 2); split(p, 4)", "split: p is named twice"),
        ("fuse(p, q); fuse(q, r)", "fuse: q is named twice"),
        ("hold 3; hold 4", "the directive hold is expected once"),
        ("order m; __import__('os')", "unknown directive"),
        ("order " + "m " * 2000, "at most 2000 characters, found 4006"),
    ],
)
def test_refused_text(text, reason):
    with pytest.raises(OptionError, match=reason):
        LoopSchedule.parse(text)


def test_schedules_are_values():
    schedule = LoopSchedule.parse("order m e; hold 4")
    assert {schedule: 1}[LoopSchedule(order=("m", "e"), hold=4)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.hold = 3  # type: ignore[misc]


def facts(**changes) -> NestFacts:
    """O[n,F_m[e],p,q] = I[n,F_c[e],p+F_r[e]-1,q+F_s[e]-1] * F_values[e] with 128 channels, 28 x 28 pixels."""
    image = Image("I", ("p", "q"), (28, 28), (1, 1), (2, 2), False, (128 * 784, 128 * 784), False, 1 << 24, "c")
    rows = Image("I", ("q",), (28,), (1,), (2,), False, (128 * 784, 128 * 784), False, 1 << 24, "r")
    found = NestFacts(
        {"n": 1, "p": 28, "q": 28},
        (),
        ("m",),
        {"c": 128, "r": 3, "s": 3},
        ("e", 30000),
        128,
        ("I", "F_values"),
        (("I", "p", ()), ("I", "q", ())),
        ("q",),
        (image, rows),
        (8, 16, 4, 32 << 10),
    )
    return dataclasses.replace(found, **changes)


POINTWISE = facts(
    dense={"n": 1, "p.q": 784},
    coordinates={"c": 128},
    windows=(),
    vectors=("p.q",),
    images=(Image("I", ("p.q",), (784,), (1,), (0,), True, (128 * 784, 128 * 784), False, 1 << 24, "c"),),
)
PRODUCT = facts(  # y[D[e],m] = x[S[e],k] * W[K[e],k,m]
    dense={"m": 64, "k": 32},
    reduced=("k",),
    segments=("D",),
    coordinates={"S": 900, "K": 27},
    factors=("x", "W"),
    windows=(),
    vectors=("m",),
    images=(),
)
MATRIX = dataclasses.replace(PRODUCT, segments=("i", "j"), coordinates={})
OFFSETS = facts(
    dense={"p": 100, "k": 3},
    reduced=("k",),
    windows=(("I", "p", ("k",)),),
    vectors=("p", "k"),
    images=(),
    coordinates={},
)


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        ("order m x", facts(), "x: the nest has no such index; it has n, p, q, m, c, r, s, e"),
        ("order e m", facts(), "order e m: e is before its parent level m"),
        ("order j i e", MATRIX, "j is before its parent level i"),
        ("order e p", facts(), "the results along p are held in registers while e runs"),
        ("order m c", facts(), "c is a coordinate of the entries, whose loop is e"),
        ("order k e", PRODUCT, "k is summed, and runs inside e"),
        ("vector m", facts(), "m is a compressed level"),
        ("vector p", facts(), "p is not contiguous in some operand; along q all are"),
        ("vector p 4 q 4; pack I", facts(), "a vector has 8 lanes"),
        ("vector p 40 q 1; pack I", facts(), "p has 28 points, for 40 blocks"),
        ("vector p 2 q 4", facts(), "blocks of an image need `pack`, and tiles of 8 or more"),
        ("vector p; pack I", OFFSETS, "I is read at p . k: the offset k is inside its base index p"),
        ("vector m; pack x", PRODUCT, "pack x: no image has the axes m; none are images"),
        ("pack I; vector q; split(p, 2)", facts(), r"split\(p, 2\): p is neither an axis of the vector's image nor"),
        ("pack W", facts(), "pack W: the nest has no such factor; it has I, F_values"),
        ("pack F_values", facts(), "images are I along p q"),
        ("vector p.q; split(p.q, 100)", POINTWISE, "tiles of 8 or more neighbours divide the axis of a flat image"),
        ("vector p.q; split(p.q, 196)", POINTWISE, "split 196: 25 accumulators, but registers hold 14"),
        ("vector p.q 8", POINTWISE, "blocks of an image need `pack`"),
        ("parallel c", facts(), "parallel c: c is summed: tasks would write the same results"),
        ("parallel e", facts(), "e is summed"),
        ("parallel k", PRODUCT, "k is summed"),
        ("parallel p chunk 3", facts(), "chunks are of segments, m"),
        ("vector q; parallel q", facts(), "q is the vector's index"),
        ("split(p, 4); split(q, 7)", facts(), "split 4 x 7: 28 accumulators, but registers hold 14"),
        ("hold 15", facts(), "hold 15: registers hold 14 accumulators"),
        ("split(p.q, 785); hold 2", dataclasses.replace(POINTWISE, processor=(8, 999, 4, 1)), "p.q has 784 points"),
        ("split(m, 2)", facts(), r"split\(m, 2\): m is neither"),
        ("fuse(p, q)", facts(), r"fuse\(p, q\): I is read through a window along p"),
        ("fuse(m, k)", PRODUCT, r"fuse\(m, k\): these are not neighbours in every access"),
        ("unroll m 2", facts(), "unroll m: expected the entries e or a dense index that is summed"),
        ("locate I", facts(), "locate I: the entries of this nest are iterated, and no factor is located"),
        ("locate F", facts(), "locate F: the entries of this nest are iterated"),
    ],
)
def test_illegal_schedules(text, where, reason):
    with pytest.raises(OptionError, match=reason):
        completed(LoopSchedule.parse(text), where)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("locate B", "locate B: the sparse factors that meet are M, I"),
        ("locate M I", "no sparse factor is left to be iterated"),
        ("order p q; hold 4", "hold: a nest over the levels of sparse factors takes order, vector and locate"),
    ],
)
def test_schedules_that_nests_over_levels_cannot_have(text, reason):
    check_of_levels(LoopSchedule.parse("order p q; vector m; locate I"), ("M", "I"))
    with pytest.raises(OptionError, match=reason):
        check_of_levels(LoopSchedule.parse(text), ("M", "I"))


EVERY = {"windows": facts(), "pointwise": POINTWISE, "product": PRODUCT, "matrix": MATRIX, "offsets": OFFSETS}


@pytest.mark.parametrize("name", EVERY)
def test_complete_schedules_stay_as_they_are(name):
    where = EVERY[name]
    every = [completed(LoopSchedule(), where), *(completed(preset(where), where) for preset in PRESETS.values())]
    for one in [*every, *candidates(where, 2, 30)]:
        assert completed(LoopSchedule.parse(str(one)), where) == one


TILES = "pack I; vector p 2 q 4; split(p, 2); split(q, 7)"
FLAT, PACKED = "order p.q m e; vector p.q", "order p.q m e; pack I; vector p.q"
RULE = f"order p m e; {TILES}; split(c, 22)"


@pytest.mark.parametrize(
    ("text", "where", "wanted"),
    [
        ("", facts(), f"order p m e; {TILES}; split(c, 22); parallel m; hold 14"),
        ("split(c, 500)", facts(), f"order p m e; {TILES}; split(c, 500); parallel m; hold 14"),
        ("parallel m chunk 2; unroll e 2", facts(), f"{RULE}; parallel m chunk 2; unroll e 2; hold 14"),
        ("parallel p", facts(), f"{RULE}; parallel p; hold 14"),
        ("vector q", facts(), "order p m q e; vector q; parallel m; hold 4"),
        ("order m p; vector q", facts(), "order m p q e; vector q; parallel m chunk 1; hold 4"),
        ("vector q 8; pack I", facts(), "order p m e; pack I; vector q 8; split(q, 4); parallel m; hold 4"),
        ("", POINTWISE, f"fuse(p, q); {FLAT}; split(p.q, 112); split(c, 64); parallel m; hold 14"),
        ("pack I", POINTWISE, f"fuse(p, q); {PACKED}; split(p.q, 112); split(c, 64); parallel m; hold 14"),
        ("split(p.q, 56)", POINTWISE, f"fuse(p, q); {FLAT}; split(p.q, 56); parallel m; hold 7"),
        ("", PRODUCT, "order D m e k; vector m; parallel D; hold 4"),
    ],
)
def test_rule(text, where, wanted):
    assert str(completed(LoopSchedule.parse(text), where)) == wanted


def test_presets_are_the_papers():
    """Table 2: direct by rows of the filter; entries of a pixel; tiles of 32 pixels; masks iterated, inputs located."""
    found = {name: str(completed(preset(facts()), facts())) for name, preset in PRESETS.items()}
    assert found["skimcaffe"] == "order m p q e; vector q; parallel m chunk 1; hold 4"
    assert found["deepsparse"] == "order p m q e; vector q; parallel m; hold 4"
    assert "parallel p; hold 3" in found["xnnpack"] and "pack I" in found["xnnpack"]
    assert str(completed(PRESETS["map-based"](PRODUCT), PRODUCT)) == "order D m e k; vector m; parallel D; hold 4"


def test_candidates_are_the_cheapest_by_the_model():
    found = candidates(facts(), 1, 30)
    costs = [estimate(one, facts()) for one in found]
    assert len({*found}) == 30 and costs == sorted(costs)
    assert completed(LoopSchedule(), facts()) not in found
    assert not {"parallel m chunk 4"} & {part for one in found for part in str(one).split("; ")}
    assert {"parallel m chunk 4"} & {part for one in candidates(facts(), 2, 30) for part in str(one).split("; ")}


def test_model():
    """Fewer results per load, more tiles than points, a window beyond the cache and a copy cost more."""

    def cost(text, where=POINTWISE):
        return estimate(completed(LoopSchedule.parse(text), where), where)

    assert cost("vector p.q; split(p.q, 112)") < cost("vector p.q; split(p.q, 56)") < cost("vector p.q; split(p.q, 8)")
    assert cost("vector p.q; split(p.q, 112)") < cost("pack I; vector p.q; split(p.q, 112)")
    assert cost("split(c, 64)", facts()) > cost("split(c, 13)", facts()) < cost("split(c, 1)", facts())


def test_image_tiles():
    one = completed(LoopSchedule.parse("pack I; vector p 2 q 4; split(p, 3); split(q, 4)"), facts())
    tiles = ImageTiles.of(one, facts())
    assert tiles is not None and tiles.numbers == [5, 2] and tiles.block == (15, 8)
    assert tiles.reads(tiles.tile) == [5, 6] and tiles.copied
    assert ImageTiles.of(completed(LoopSchedule.parse("vector q"), facts()), facts()) is None
    assert tiles.schedule == LoopSchedule.parse("pack I; vector p 2 q 4; split(p, 3); split(q, 4); hold 12")
    flat = ImageTiles.of(completed(LoopSchedule.parse("vector p.q; split(p.q, 98)"), POINTWISE), POINTWISE)
    assert flat is not None and (flat.tile, flat.points, flat.copied) == ((13,), 98, False)
    assert (flat.numbers, flat.block, flat.reads(flat.tile)) == ([8], (104,), [13])
