from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from pumice import errors
from pumice.env import ProcessRank, launch, settings


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PUMICE_DATA", "PUMICE_CACHE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for read in (settings, launch):
        read.cache_clear()
    yield
    for read in (settings, launch):
        read.cache_clear()


def test_defaults():
    assert settings().data is None
    assert settings().cache == Path.home() / ".cache" / "pumice"


def test_reads_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PUMICE_DATA", str(tmp_path))
    monkeypatch.setenv("PUMICE_CACHE", str(tmp_path / "new"))
    assert settings().data == tmp_path
    assert settings().cache == tmp_path / "new"
    assert not (tmp_path / "new").exists()


def test_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "first")
    assert launch() == ProcessRank()
    for size, rank in (("4", "1"), ("4", "4"), ("x", "0"), ("0", "0")):
        launch.cache_clear()
        monkeypatch.setenv("WORLD_SIZE", size)
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", "1")
        if (size, rank) == ("4", "1"):
            assert launch() == ProcessRank(1, 4, 1)
            continue
        with pytest.raises(errors.OptionError, match="RANK below WORLD_SIZE"):
            launch()


def test_empty_is_unset(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PUMICE_DATA", "")
    assert settings().data is None


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PUMICE_CACHE", "~/elsewhere")
    assert settings().cache == Path.home() / "elsewhere"


def test_read_once_and_frozen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    before = settings()
    monkeypatch.setenv("PUMICE_DATA", str(tmp_path))
    assert settings() is before
    with pytest.raises(FrozenInstanceError):
        before.data = tmp_path  # type: ignore[misc]


def test_missing_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PUMICE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(errors.OptionError, match="should name an existing folder, found .*nowhere"):
        settings()


def test_cache_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("PUMICE_CACHE", str(file))
    with pytest.raises(errors.OptionError, match="PUMICE_CACHE should name a folder, found the file"):
        settings()


KINDS = {"DtypeError": TypeError, "CaptureError": RuntimeError, "MissingAttributeError": AttributeError}


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n != "PumiceError"])
def test_errors_are_also_builtin_kinds(name: str):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.PumiceError)
    assert issubclass(kind, KINDS.get(name, ValueError))
