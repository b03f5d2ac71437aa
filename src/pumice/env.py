"""All environment variables of pumice, read once."""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pumice.errors import OptionError

__all__ = ["Settings", "settings"]


@dataclass(frozen=True)
class Settings:
    """Settings from the environment.

    data: folder of real scans (PUMICE_DATA), None if not set.
    cache: folder for tuned tiles and plans (PUMICE_CACHE, default ~/.cache/pumice).
    map_graphs: build kernel maps of successive scenes by CUDA graphs (PUMICE_MAP_GRAPHS, 0 or 1, default 1).
    """

    data: Path | None
    cache: Path
    map_graphs: bool = True


@lru_cache(maxsize=1)
def settings() -> Settings:
    """Settings of this process; later changes of the environment have no effect.

    Raises OptionError if PUMICE_DATA is not a folder, PUMICE_CACHE is a file, or PUMICE_MAP_GRAPHS is neither 0 nor 1.
    """
    data = os.environ.get("PUMICE_DATA")
    cache = os.environ.get("PUMICE_CACHE")
    return Settings(
        data=_existing_folder("PUMICE_DATA", data) if data else None,
        cache=_folder_or_new("PUMICE_CACHE", cache) if cache else Path("~/.cache/pumice").expanduser(),
        map_graphs=_switch("PUMICE_MAP_GRAPHS", os.environ.get("PUMICE_MAP_GRAPHS") or "1"),
    )


def _switch(name: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise OptionError(f"{name} should be 0 or 1, found {value!r}")
    return value == "1"


def _existing_folder(name: str, value: str) -> Path:
    path = Path(value).expanduser()
    if not path.is_dir():
        raise OptionError(f"{name} should name an existing folder, found {value!r}")
    return path


def _folder_or_new(name: str, value: str) -> Path:
    path = Path(value).expanduser()
    if path.exists() and not path.is_dir():
        raise OptionError(f"{name} should name a folder, found the file {value!r}")
    return path
