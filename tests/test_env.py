from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from pumice import errors
from pumice.env import settings


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PUMICE_DATA", "PUMICE_CACHE", "PUMICE_MAP_GRAPHS"):
        monkeypatch.delenv(name, raising=False)
    settings.cache_clear()
    yield
    settings.cache_clear()


def test_defaults():
    assert settings().data is None
    assert settings().cache == Path.home() / ".cache" / "pumice"
    assert settings().map_graphs is True


def test_reads_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PUMICE_DATA", str(tmp_path))
    monkeypatch.setenv("PUMICE_CACHE", str(tmp_path / "new"))
    assert settings().data == tmp_path
    assert settings().cache == tmp_path / "new"
    assert not (tmp_path / "new").exists()


def test_empty_is_unset(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PUMICE_DATA", "")
    assert settings().data is None


@pytest.mark.parametrize(("value", "graphs"), [("0", False), ("1", True), ("", True)])
def test_map_graphs_are_switched(monkeypatch: pytest.MonkeyPatch, value: str, graphs: bool):
    monkeypatch.setenv("PUMICE_MAP_GRAPHS", value)
    assert settings().map_graphs is graphs


@pytest.mark.parametrize("value", ["2", "true", "no", " 0"])
def test_a_switch_is_0_or_1(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("PUMICE_MAP_GRAPHS", value)
    with pytest.raises(errors.OptionError, match=f"PUMICE_MAP_GRAPHS should be 0 or 1, found '{value}'"):
        settings()


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
