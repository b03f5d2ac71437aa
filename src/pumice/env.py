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
    cache: the folder for tuned plans and generated code (PUMICE_CACHE, default ~/.cache/pumice).
    """

    data: Path | None
    cache: Path


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process; later changes of the environment are not seen.

    Raises OptionError where PUMICE_DATA names something that is not a folder, or PUMICE_CACHE a file.
    """
    data = os.environ.get("PUMICE_DATA")
    cache = os.environ.get("PUMICE_CACHE")
    return Settings(
        data=_existing_folder("PUMICE_DATA", data) if data else None,
        cache=_folder_or_new("PUMICE_CACHE", cache) if cache else Path("~/.cache/pumice").expanduser(),
    )


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
