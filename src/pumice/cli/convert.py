"""Files of checkpoints in, safetensors out: `pumice convert`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pumice import convert
from pumice.errors import FileError, OptionError, PumiceError


def convert_file(source: Path, target: Path, library: str, options: Mapping[str, Any]) -> Sequence[str]:
    """Convert a checkpoint; returns the report. options: of pumice.convert's function; None: its default.

    Raises OptionError for an unknown library or option, FileError for an unusable file."""
    OptionError.check("--from", library, convert.LIBRARIES)
    given = {name: value for name, value in options.items() if value}
    loaded = _loaded(source)
    try:
        found = convert.LIBRARIES[library](loaded, **given)
    except PumiceError as error:
        raise type(error)(f"{source}: {error}") from None
    except TypeError as error:
        raise OptionError(f"--from {library} takes other options: {error}") from None
    try:
        save_file({name: value.detach().cpu().contiguous().clone() for name, value in found.items()}, target)
    except (OSError, SafetensorError) as error:
        raise FileError(f"{target}: expected a file that can be written, found: {error}") from None
    return found.report


def kernel_sizes(given: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Sizes by layer of texts LAYER=3,3,1. Raises OptionError for others."""
    found: dict[str, tuple[int, ...]] = {}
    for text in given:
        layer, _, size = text.rpartition("=")
        try:
            found[layer] = tuple(int(number) for number in size.split(","))
        except ValueError:
            raise OptionError(f"--kernel takes LAYER=3,3,1, found {text!r}") from None
    return found


def _loaded(path: Path) -> Any:
    """What a file holds; of a pickle only tensors and plain values."""
    if not path.is_file():
        raise FileError(f"{path}: expected a checkpoint, found no such file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            # Of pickle protocols; what cannot be read is an error below.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Arbitrary bytes raise arbitrary errors.
        lines = str(error).strip().splitlines()
        first = lines[0] if lines else type(error).__name__
        raise FileError(f"{path}: expected tensors and plain values in .pth or .safetensors, found: {first}") from None
