"""Where scans come from (files, folders, patterns, lists of them, URLs that fsspec reads), and what their outputs are
called."""

from __future__ import annotations

import glob
import os
import posixpath
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pumice.data import READERS, find_scans
from pumice.data.scan import optional_package
from pumice.errors import FileError, OptionError

_LARGEST = 2**32
"""Bytes of a scan's file, unpacked: larger ones are refused before they fill the memory or the disk."""
_MAGIC = "*?["


@dataclass(frozen=True)
class Input:
    """A scan to label: its absolute path or URL, and its output's path below the output folder, without suffix."""

    source: str
    name: str


@dataclass(frozen=True)
class Sources:
    """Absolute paths and URLs of scans, each once, and the folder that all of them lie below ("" if there is none)."""

    paths: tuple[str, ...]
    root: str

    def named(self, root: str) -> list[Input]:
        """The scans with their names below `root`; of scans that differ in the suffix only, names keep it."""
        stems = [output_name(path, root) for path in self.paths]
        shared = Counter(stems)
        return [
            Input(path, stem if shared[stem] == 1 else output_name(path, root, suffix=True))
            for path, stem in zip(self.paths, stems, strict=True)
        ]

    def below(self, root: str) -> bool:
        """True if all of them lie below `root`."""
        return not root or all(path.startswith(root.rstrip("/") + "/") for path in self.paths)


def find_sources(arguments: Sequence[str], out: Path) -> Sources:
    """The scans that arguments name: a file, a folder (all scans below it), a pattern with * or ?, @FILE (a file of one
    path or URL per line, relative to its folder; blank lines and lines that begin with # are skipped), or a URL of
    fsspec to a file, a folder or a pattern. What lies below `out` is left out.

    Files of a list or at a URL are not looked for: those that are missing fail when they are read. Raises FileError for
    another argument that is missing or without scans, OptionError for a URL of unknown kind or that leaves its folder.
    """
    own = f"{_absolute(out)}/"
    paths, roots = dict[str, None](), list[str]()
    for argument in arguments:
        found, root = _expanded(argument)
        paths.update(dict.fromkeys(path for path in found if not path.startswith(own)))
        roots += root
    if not paths:
        raise FileError(f"{', '.join(arguments)}: expected scans, found none")
    return Sources(tuple(paths), _common(roots))


def output_name(source: str, root: str, suffix: bool = False) -> str:
    """The path of a source below `root`, or its whole path below "", without the suffix of its format or with it.
    Raises OptionError for one outside of `root`, or that leaves its folder (..)."""
    root = root.rstrip("/")
    if root and not source.startswith(root + "/"):
        raise OptionError(f"expected scans below {root}, found {source}")
    rest = source[len(root) + 1 :] if root else source.replace("://", "/").replace("::", "/")
    parts = [part for part in rest.replace("\\", "/").split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        raise OptionError(f"expected the path of a scan without .., found {source}")
    known = _suffix(parts[-1])
    if known and not suffix and len(parts[-1]) > len(known):
        parts[-1] = parts[-1][: -len(known)]
    return "/".join(part.replace(":", "_") for part in parts)


@contextmanager
def local_file(source: str) -> Iterator[Path]:
    """The file of a source: the path itself, or a copy of what the URL names, removed afterwards. Raises FileError for
    a URL that cannot be read, and for files that would exhaust memory or disk."""
    if "://" not in source:
        yield _bounded(Path(source))
        return
    with tempfile.TemporaryDirectory(prefix="pumice-") as folder:
        files, path = _file_system(source)
        target = Path(folder) / (posixpath.basename(path) or "scan")
        # Each file system has errors of its own.
        try:
            size = files.size(path)
            if size is not None and size > _LARGEST:
                raise _too_large(source, size)
            files.get_file(path, str(target))
        except FileError:
            raise
        except Exception as error:
            raise FileError(
                f"{source}: expected a file that can be read, found {type(error).__name__}: {error}"
            ) from None
        yield _bounded(target)


def _bounded(path: Path) -> Path:
    size = path.stat().st_size if path.is_file() else 0
    if path.suffix.lower() == ".npz" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    if size > _LARGEST:
        raise _too_large(str(path), size)
    return path


def _too_large(source: str, size: int) -> FileError:
    return FileError(f"{source}: expected at most {_LARGEST} bytes, found {size}")


def _expanded(argument: str) -> tuple[list[str], list[str]]:
    """(the paths and URLs of an argument, the folders that they lie below)."""
    argument = argument.removeprefix("file://")
    if argument.startswith("@"):
        return _listed(Path(argument[1:]))
    if "://" in argument:
        found, root = _remote(argument)
    elif any(c in argument for c in _MAGIC) and not os.path.exists(argument):
        root = _absolute(argument[: min(argument.find(c) for c in _MAGIC if c in argument)].rpartition("/")[0] or ".")
        found = [_absolute(path) for path in sorted(glob.glob(argument, recursive=True)) if _is_scan(path)]
    else:
        path = Path(argument)
        found, root = [_absolute(file) for file in find_scans(path)], _absolute(path if path.is_dir() else path.parent)
    if not found:
        raise FileError(f"{argument}: expected scans, found none")
    return found, [root]


def _is_scan(path: str) -> bool:
    return _suffix(path) is not None and os.path.isfile(path)


def _listed(path: Path) -> tuple[list[str], list[str]]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: expected a list of paths, one per line, found {error}") from None
    lines = [line.removeprefix("file://") for line in lines if line and not line.startswith("#")]
    found = [line if "://" in line else place(path.parent / line) for line in lines]
    for protocol in {line.partition("://")[0] for line in found if "://" in line}:
        _known(protocol)
    return found, sorted({posixpath.dirname(line) for line in found})


def _remote(url: str) -> tuple[list[str], str]:
    files, path = _file_system(url)
    if "::" in url:
        return [url], posixpath.dirname(url)
    if any(c in path for c in _MAGIC):
        root = path[: min(path.find(c) for c in _MAGIC if c in path)].rpartition("/")[0]
        found = [name for name in sorted(files.glob(path)) if _suffix(name)]
    elif _suffix(path):
        root, found = posixpath.dirname(path), [path]
    else:
        root, found = path, [name for name in sorted(files.find(path)) if _suffix(name)]
    return [files.unstrip_protocol(name) for name in found], files.unstrip_protocol(root).rstrip("/")


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path there."""
    _known(url.partition("://")[0])
    return optional_package("fsspec.core").url_to_fs(url)


def _known(protocol: str) -> None:
    """Raises OptionError if fsspec, or the package that it needs for a protocol, is missing."""
    fsspec = optional_package("fsspec")
    for part in protocol.split("::"):
        try:
            fsspec.get_filesystem_class(part)
        except (ImportError, ValueError) as error:
            raise OptionError(f"expected URLs that fsspec reads, found {part}://: {error}") from None


def _suffix(name: str) -> str | None:
    name = name.lower()
    return max((suffix for suffix in READERS if name.endswith(suffix)), key=len, default=None)


def place(source: str | Path) -> str:
    """The absolute path of a file, or the URL that it is."""
    return str(source) if "://" in str(source) else _absolute(source)


def _absolute(path: str | Path) -> str:
    return Path(os.path.abspath(path)).as_posix()


def _common(roots: Iterable[str]) -> str:
    """The longest folder that is a beginning of all; "" if they share none, or only a protocol."""
    split = [root.split("/") for root in roots]
    shared = os.path.commonprefix(split)
    return "" if shared in ([""], []) or shared[-1] == "" else "/".join(shared)
