"""Every environment variable that pumice reads, read once."""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pumice.errors import OptionError

__all__ = ["Settings", "settings"]


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    data: the folder of real scans (PUMICE_DATA), or None where it is not set.
    cache: the folder for tuned tiles and plans (PUMICE_CACHE, default ~/.cache/pumice).
    map_graphs: whether maps of scene after scene are found by CUDA graphs (PUMICE_MAP_GRAPHS, 0 or 1, default 1).
    """

    data: Path | None
    cache: Path
    map_graphs: bool = True


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process; later changes of the environment are not seen.

    Raises OptionError where PUMICE_DATA names something that is not a folder, PUMICE_CACHE a file, or PUMICE_MAP_GRAPHS
    is neither 0 nor 1.
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
