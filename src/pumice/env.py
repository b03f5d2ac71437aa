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
    layout = os.environ.get("SPCONV_SAVED_WEIGHT_LAYOUT", "")
    OptionError.check("SPCONV_SAVED_WEIGHT_LAYOUT", layout, ("KRSC", "RSKC", "RSCK", ""))
    cache = _folder("PUMICE_CACHE", True) or Path("~/.cache/pumice").expanduser()
    return Settings(data=_folder("PUMICE_DATA", False), cache=cache, spconv_layout=layout)


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


def _folder(name: str, new: bool) -> Path | None:
    """The folder that a variable names, None if it names none. new: it need not exist yet."""
    value = os.environ.get(name)
    path = Path(value).expanduser() if value else None
    if path is not None and not path.is_dir() and not (new and not path.exists()):
        raise OptionError(
            f"{name} should name {'a' if new else 'an existing'} folder, found {'the file ' * new}{value!r}"
        )
    return path
