"""The file of tuned tiles: what it keeps, for whom, and what harms it."""

import errno
import json
import multiprocessing
import os
import warnings
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from schedule import writers

from pumice.errors import FileError
from pumice.schedule import record_store as stores
from pumice.schedule.tile import Tile
from pumice.schedule.tuned_tiles import TILES, VERSION, Key, Ledger, Tuned

KEY = Key("some GPU", "C[i] = A[i]", ("fp16",), (3,))
OTHER = replace(KEY, device="another")
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "tiles.json"


@pytest.fixture
def started():
    """`started(function, *args)`: a process that does this, killed in the end."""
    found = []

    def start(function, *args):
        found.append(SPAWN.Process(target=function, args=args))
        found[-1].start()
        return found[-1]

    yield start
    for process in found:
        process.kill()
        process.join()


def tiles(own):
    return {key: tuned.tile for key, tuned in own.all().items()}


def stored(path):
    return json.loads(path.read_text())


# What is kept
def test_what_is_put_is_found_by_another_process(path):
    ours, tile = (
        Ledger(path),
        Tile(64, 32, 16, swapped=True, packed=True, stream_k_chunk=8, hoisted=False, padded=False, lazy=False),
    )
    assert ours.get(KEY) is None and ours.generation == 0
    ours.put(KEY, tile)
    assert ours.get(KEY) == tile and ours.generation == 1
    assert Ledger(path).get(KEY) == tile
    assert Ledger(path).get(replace(KEY, dtypes=("fp32",))) is None
    assert Ledger(path).get(replace(KEY, precision="ieee")) is None
    assert sorted(p.name for p in path.parent.iterdir()) == ["tiles.json", "tiles.json.lock"], "no draft stays"


def test_when_and_how_fast_is_kept(path):
    before = datetime.now(timezone.utc)
    Ledger(path).put(KEY, Tile(16, 16), seconds=2e-5)
    Ledger(path).put(OTHER, Tile(16, 16))
    found = Ledger(path).all()
    assert (found[KEY].seconds, found[OTHER].seconds) == (2e-5, None)
    assert before <= found[KEY].date <= found[OTHER].date <= datetime.now(timezone.utc)


def test_the_last_tile_counts(path):
    for rows in (16, 32):
        Ledger(path).put(KEY, Tile(rows, 16))
    assert tiles(Ledger(path)) == {KEY: Tile(32, 16)} and len(stored(path)["tiles"]) == 1


# Many writers
def test_two_writers_keep_what_the_other_wrote(path):
    one, two = Ledger(path), Ledger(path)
    assert one.get(KEY) is None and two.get(KEY) is None
    one.put(KEY, Tile(16, 16))
    two.put(OTHER, Tile(32, 32))
    assert tiles(Ledger(path)) == {KEY: Tile(16, 16), OTHER: Tile(32, 32)}
    assert two.get(KEY) == Tile(16, 16)


def test_eight_processes_lose_nothing(path, started):
    start = SPAWN.Barrier(8)
    processes = [started(writers.put_many, path, writer, 25, start) for writer in range(8)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    found = Ledger(path).all()
    assert {k: (t.tile, t.seconds) for k, t in found.items()} == {
        writers.key(w, n): (Tile(16, 1 << w), n + 1) for w in range(8) for n in range(25)
    }


def test_a_killed_writer_does_no_harm(path, started, monkeypatch):
    """Those that cannot wait for it serve their own process, and are written with the next one."""
    monkeypatch.setattr(stores, "WAIT", 0.02)
    Ledger(path).put(KEY, Tile(16, 16))
    ready, own = SPAWN.Event(), Ledger(path)
    holder = started(writers.hold, path, ready)
    assert ready.wait(60)
    with pytest.warns(RuntimeWarning, match="cannot be written .*kept in this process only"):
        own.put(OTHER, Tile(32, 32))
    assert own.get(OTHER) == Tile(32, 32) and own.get(KEY) == Tile(16, 16)
    assert own.all().keys() == {KEY, OTHER} and tiles(Ledger(path)) == {KEY: Tile(16, 16)}
    holder.kill()
    holder.join()
    third = replace(KEY, sizes=(4,))
    own.put(third, Tile(64, 64))
    assert tiles(Ledger(path)) == {KEY: Tile(16, 16), OTHER: Tile(32, 32), third: Tile(64, 64)}


def test_a_lock_file_that_was_left_does_not_lock(path):
    path.parent.mkdir()
    path.with_name("tiles.json.lock").write_text("4711")
    Ledger(path).put(KEY, Tile(16, 16))
    assert Ledger(path).get(KEY) == Tile(16, 16)


# What others have tuned
def test_others_are_seen_where_one_looks(path):
    ours, theirs = Ledger(path), Ledger(path)
    assert ours.get(KEY) is None and ours.look(KEY) is None and ours.generation == 0
    theirs.put(KEY, Tile(16, 16))
    assert ours.get(KEY) is None and ours.generation == 0, "what is prepared stays as it is"
    assert ours.look(KEY) == ours.get(KEY) == Tile(16, 16)
    assert ours.generation == 1, "and is made anew from then on"
    theirs.put(OTHER, Tile(32, 32))
    assert ours.look(KEY) == Tile(16, 16) and ours.get(OTHER) is None, "found at hand: nothing is read"


def test_a_file_is_read_again_only_where_it_has_changed(path, monkeypatch):
    ours = Ledger(path)
    ours.put(KEY, Tile(16, 16))
    read = []
    entries = stores.RecordType.entries
    monkeypatch.setattr(stores.RecordType, "entries", lambda *args: read.append(args) or entries(*args))
    assert ours.look(OTHER) is None and ours.look(OTHER) is None and ours.get(KEY) and not read
    assert ours.generation == 1
    Ledger(path).put(OTHER, Tile(32, 32))
    read.clear()
    assert ours.look(OTHER) and len(read) == 1


def test_a_file_replaced_while_it_is_read(path, monkeypatch):
    Ledger(path).put(KEY, Tile(16, 16))
    text, problems = stores._text, [OSError(errno.ESTALE, "stale")]

    def once(*args):
        if problems:
            raise problems.pop()
        return text(*args)

    monkeypatch.setattr(stores, "_text", once)
    assert Ledger(path).get(KEY) == Tile(16, 16) and not problems


# Files that are not as they should be
DEEP = "[" * 100_000
BROKEN = [
    "[]",
    "{",
    DEEP,
    '{"version": 2, "tiles": ' + DEEP,
    '{"version": 2}',
    '{"version": 2, "tiles": {}}',
    '{"tiles": []}',
    "\x00\xff",
]


@pytest.mark.parametrize("text", [*BROKEN, '{"version": 1, "tiles": {}}', '{"version": 999, "tiles": []}'])
def test_what_is_no_ledger_of_ours_is_named_and_left_alone(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text, encoding="latin-1")
    own = Ledger(path)
    for asked in (own.all, own.export, own.clear):
        with pytest.raises(FileError, match=r"t.json is (not )?a tuning cache of tiles.*; remove it to start over"):
            asked()
    with pytest.warns(RuntimeWarning, match="remove it to start over; tiles tuned here are kept in this process only"):
        assert own.get(KEY) is None
    own.put(KEY, Tile(16, 16))
    assert own.look(OTHER) is None and own.get(KEY) == Tile(16, 16) and own.generation == 1
    assert path.read_text(encoding="latin-1") == text


def test_an_empty_file_has_no_tiles(tmp_path):
    path = tmp_path / "t.json"
    path.touch()
    assert Ledger(path).get(KEY) is None and Ledger(path).all() == {}
    Ledger(path).put(KEY, Tile(16, 16))
    assert Ledger(path).get(KEY) == Tile(16, 16)


def changed(entry, **more):
    return {**entry, **more}


@pytest.mark.parametrize("spoil", [
    lambda e: changed(e, tile={**e["tile"], "woven": 3}),
    lambda e: changed(e, tile={**e["tile"], "rows": "x"}),
    lambda e: changed(e, tile={**e["tile"], "rows": 17}),
    lambda e: changed(e, tile=None),
    lambda e: changed(e, date="yesterday"),
    lambda e: changed(e, date="2026-01-01T00:00:00"),
    lambda e: changed(e, seconds="fast"),
    lambda e: changed(e, seconds=10**400),
    lambda e: changed(e, key={**e["key"], "sizes": [float("inf")]}),
    lambda e: changed(e, tile={**e["tile"], "warps": 64}),
    lambda e: changed(e, tile={**e["tile"], "rows": 1024, "reduced": 2048}),
    lambda e: changed(e, key=3),
    lambda e: "a word",
])  # fmt: skip
def test_entries_that_cannot_be_read_are_passed_over_and_kept(path, spoil):
    Ledger(path).put(OTHER, Tile(32, 32))
    Ledger(path).put(KEY, Tile(16, 16))
    found = stored(path)
    strange = spoil(found["tiles"][0])
    found["tiles"][0] = strange
    path.write_text(json.dumps(found))
    assert tiles(Ledger(path)) == {KEY: Tile(16, 16)}
    Ledger(path).put(KEY, Tile(64, 64))
    assert strange in stored(path)["tiles"] and len(stored(path)["tiles"]) == 2
    assert Ledger(path).clear() == 2


def test_an_entry_that_is_nested_too_deeply_to_be_written_again(path, monkeypatch):
    """How deep that is depends on the stack of the caller."""
    own = Ledger(path)
    own.put(KEY, Tile(16, 16))

    def refused(*given):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(stores.json, "dumps", refused)
    with pytest.warns(RuntimeWarning, match="kept in this process only"):
        own.put(OTHER, Tile(32, 32))
    assert own.get(OTHER) == Tile(32, 32)


def test_a_tile_without_newer_fields_has_their_defaults(path):
    Ledger(path).put(KEY, Tile(16, 16))
    found = stored(path)
    del found["tiles"][0]["tile"]["padded"]
    path.write_text(json.dumps(found))
    assert Ledger(path).get(KEY) == Tile(16, 16)


# Folders that are not as they should be
def forbidden(*args, **more):
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize("call", ["FileLock", "_replace"])
def test_a_home_that_cannot_be_written(path, monkeypatch, call):
    Ledger(path).put(KEY, Tile(16, 16))
    other = path.with_name("other.json")
    Ledger(other).put(OTHER, Tile(16, 16))
    monkeypatch.setattr(stores, call, forbidden)
    own = Ledger(path)
    with pytest.warns(RuntimeWarning, match="cannot be written .Read-only file system.; tiles tuned here") as said:
        own.put(OTHER, Tile(32, 32))
        own.put(replace(OTHER, sizes=(4,)), Tile(32, 32))
    assert len(said) == 1
    assert own.get(OTHER) == Tile(32, 32) and own.get(KEY) == Tile(16, 16) and own.generation == 2
    for asked in (own.clear, lambda: own.merge(other)):
        with pytest.raises(FileError, match="cannot be written"):
            asked()
    assert own.get(OTHER) == Tile(32, 32), "nothing is forgotten"
    monkeypatch.undo()
    assert tiles(Ledger(path)) == {KEY: Tile(16, 16)}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_folder_that_is_read_only(path):
    Ledger(path).put(KEY, Tile(16, 16))
    path.with_name("tiles.json.lock").unlink()
    path.parent.chmod(0o555)
    try:
        own = Ledger(path)
        with pytest.warns(RuntimeWarning, match="cannot be written"):
            own.put(OTHER, Tile(32, 32))
        assert own.get(KEY) == Tile(16, 16) and own.get(OTHER) == Tile(32, 32)
    finally:
        path.parent.chmod(0o755)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("precious")
    own = Ledger(tmp_path / "file" / "tiles.json")
    with pytest.warns(RuntimeWarning, match="cannot be read") as said:
        assert own.get(KEY) is None
        own.put(KEY, Tile(16, 16))
    assert len(said) == 1 and own.get(KEY) == Tile(16, 16)
    with pytest.raises(FileError, match="cannot be read"):
        own.all()


def test_a_disk_that_is_full_leaves_the_file_as_it_is(path, monkeypatch):
    Ledger(path).put(KEY, Tile(16, 16))
    monkeypatch.setattr(stores.os, "fsync", forbidden)
    with pytest.warns(RuntimeWarning):
        Ledger(path).put(OTHER, Tile(32, 32))
    assert tiles(Ledger(path)) == {KEY: Tile(16, 16)} and not list(path.parent.glob("*.tmp"))


# From ledger to ledger
def dated(own, key, tile, days):
    date = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(days=days)
    source = own.path.with_name("source.json")
    source.write_text(TILES.document([TILES.write(key, Tuned(tile, date, days))]))
    return own.merge(source)


def test_what_is_forgotten_is_gone_for_all(path, monkeypatch):
    one, two = Ledger(path), Ledger(path)
    one.put(KEY, Tile(16, 16))
    two.put(OTHER, Tile(32, 32))
    one.forget([OTHER, replace(KEY, sizes=(9,))])
    assert tiles(Ledger(path)) == {KEY: Tile(16, 16)} and one.get(OTHER) is None and one.generation == 2
    two.forget([KEY, OTHER])
    assert tiles(Ledger(path)) == {} and two.get(OTHER) is None
    two.put(KEY, Tile(16, 16))
    monkeypatch.setattr(stores, "FileLock", forbidden)
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        two.forget([KEY])
    assert two.get(KEY) is None and tiles(Ledger(path)) == {KEY: Tile(16, 16)}


def test_a_merge_prefers_the_newer(path):
    path.parent.mkdir()
    own = Ledger(path)
    assert own.get(KEY) is None
    assert dated(own, KEY, Tile(16, 16), 1) == 1 and own.get(KEY) == Tile(16, 16) and own.generation == 1
    assert dated(own, KEY, Tile(32, 32), 0) == 0 and own.get(KEY) == Tile(16, 16)
    assert dated(own, KEY, Tile(64, 64), 2) == 1 and own.get(KEY) == Tile(64, 64)
    assert dated(own, OTHER, Tile(8, 8), -5) == 1
    assert tiles(Ledger(path)) == {KEY: Tile(64, 64), OTHER: Tile(8, 8)} and Ledger(path).all()[KEY].seconds == 2


def test_what_is_exported_can_be_merged(path, tmp_path):
    one, two = Ledger(path), Ledger(tmp_path / "two.json")
    one.put(KEY, Tile(16, 16), 1e-3)
    one.put(OTHER, Tile(32, 32))
    text = one.export()
    assert json.loads(text)["version"] == VERSION
    assert two.merge(text) == 2 and two.merge(text) == 0 and two.all() == one.all()
    assert Ledger(tmp_path / "three.json").merge(path) == 2


@pytest.mark.parametrize("text", [*BROKEN, "", '{"version": 1, "tiles": {}}'])
def test_a_merge_of_something_else(path, tmp_path, text):
    own = Ledger(path)
    own.put(KEY, Tile(16, 16))
    file = tmp_path / "else.json"
    file.write_text(text, encoding="latin-1")
    for source, name in ((file, "else.json"), (text, "the text")):
        with pytest.raises(FileError, match=f"{name} is (not )?a tuning cache of tiles"):
            own.merge(source)
    for source in (tmp_path / "gone.json", tmp_path):
        with pytest.raises(FileError, match="cannot be read"):
            own.merge(source)
    assert tiles(own) == {KEY: Tile(16, 16)}


def test_clear(path):
    own, other = Ledger(path), Ledger(path)
    assert own.clear() == 0 and not path.parent.exists()
    own.put(KEY, Tile(16, 16))
    other.put(OTHER, Tile(32, 32))
    assert own.clear() == 2 and own.get(KEY) is None and own.generation == 3
    other.put(OTHER, Tile(64, 64))
    assert tiles(Ledger(path)) == {OTHER: Tile(64, 64)}, "what was cleared does not come back"


def test_nothing_is_said_of_what_works(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = Ledger(path)
        own.put(KEY, Tile(16, 16))
        assert own.look(OTHER) is None
