"""All environment variables of pumice, read once."""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pumice.errors import OptionError

__all__ = ["ProcessRank", "Settings", "launch", "settings"]


@dataclass(frozen=True)
class Settings:
    """Settings from the environment.

    data: folder of real scans (PUMICE_DATA), None if not set.
    cache: folder for tuned tiles and plans and compiled C kernels (PUMICE_CACHE, default ~/.cache/pumice).
    spconv_layout: spconv's SPCONV_SAVED_WEIGHT_LAYOUT, the layout of weights in checkpoints: KRSC, RSKC, RSCK or "".
    """

    data: Path | None
    cache: Path
    spconv_layout: str = ""


@lru_cache(maxsize=1)
def settings() -> Settings:
    """Settings of this process; later changes of the environment have no effect.

    Raises OptionError if PUMICE_DATA is not a folder, PUMICE_CACHE is a file, or a layout is unknown.
    """
    data = os.environ.get("PUMICE_DATA")
    cache = os.environ.get("PUMICE_CACHE")
    return Settings(
        data=_existing_folder("PUMICE_DATA", data) if data else None,
        cache=_folder_or_new("PUMICE_CACHE", cache) if cache else Path("~/.cache/pumice").expanduser(),
        spconv_layout=_one_of("SPCONV_SAVED_WEIGHT_LAYOUT", ("", "KRSC", "RSKC", "RSCK")),
    )


@dataclass(frozen=True)
class ProcessRank:
    """What torchrun tells a process. rank: among `ranks` processes; local_rank: among those of its host."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0


@lru_cache(maxsize=1)
def launch() -> ProcessRank:
    """What torchrun told this process (RANK, WORLD_SIZE, LOCAL_RANK); without a WORLD_SIZE it is the only one.

    Raises OptionError for other values than numbers, and ranks beyond WORLD_SIZE."""
    if "WORLD_SIZE" not in os.environ:
        return ProcessRank()
    found = {name: os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    rank, ranks, local = (int(value) if value.isdecimal() else -1 for value in found.values())
    if not (0 <= rank < ranks and local >= 0):
        raise OptionError(f"RANK and LOCAL_RANK are numbers from 0, RANK below WORLD_SIZE; found {found}")
    return ProcessRank(rank, ranks, local)


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


def _one_of(name: str, values: tuple[str, ...]) -> str:
    value = os.environ.get(name, values[0])
    if value not in values:
        raise OptionError(f"{name} takes one of {', '.join(values[1:])}, found {value!r}")
    return value
