"""Exceptions raised by pumice. Each also derives from the matching builtin exception."""

from collections.abc import Collection, Hashable

__all__ = [
    "CaptureError",
    "CoordinateError",
    "DeviceError",
    "DtypeError",
    "FileError",
    "GeometryError",
    "MissingAttributeError",
    "OptionError",
    "PumiceError",
    "ShapeError",
    "StatementError",
]


class PumiceError(Exception):
    """Base class of all pumice exceptions."""


class ShapeError(PumiceError, ValueError):
    """Mismatched sizes or ranks; the message names both."""


class DtypeError(PumiceError, TypeError):
    """Argument of an unsupported dtype or type."""


class DeviceError(PumiceError, ValueError):
    """Tensors on different devices, or an operation that the device does not support."""


class CoordinateError(PumiceError, ValueError):
    """Coordinates that are duplicated, out of range, or too many to be indexed."""


class GeometryError(PumiceError, ValueError):
    """Mismatched geometries, or a missing kernel map."""


class OptionError(PumiceError, ValueError):
    """Invalid argument value; the message lists the valid ones."""

    @classmethod
    def check(cls, name: str, value: object, known: Collection[object]) -> None:
        """Raise it unless the value of an option is one of the known ones."""
        if not isinstance(value, Hashable) or value not in known:
            raise cls(f"{name}={value!r} is unknown; there are {', '.join(map(str, known))}")


class MissingAttributeError(PumiceError, AttributeError):
    """Attribute that a tensor does not have; the message names the one to use."""


class CaptureError(PumiceError, RuntimeError):
    """A network that cannot be captured, or whose captured results differ from its forward pass."""


class FileError(PumiceError, ValueError):
    """Unusable file; the message names the file, what was expected and what was found."""


class StatementError(PumiceError, ValueError):
    """Invalid einsum statement; the message shows the position."""
