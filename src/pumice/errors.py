"""Every error the library raises on purpose. Each is also the builtin kind a caller would expect to catch."""

__all__ = [
    "CaptureError",
    "CoordinateError",
    "DeviceError",
    "DtypeError",
    "FileError",
    "GeometryError",
    "OptionError",
    "PumiceError",
    "ShapeError",
    "StatementError",
]


class PumiceError(Exception):
    """The root of all errors that pumice raises on purpose."""


class ShapeError(PumiceError, ValueError):
    """Sizes or ranks that do not fit each other; the message holds both numbers."""


class DtypeError(PumiceError, TypeError):
    """A tensor of a dtype that the function does not take."""


class DeviceError(PumiceError, ValueError):
    """Tensors on different devices, or a device that cannot do what was asked."""


class CoordinateError(PumiceError, ValueError):
    """Coordinates that are duplicated, out of range, or too many to be indexed."""


class GeometryError(PumiceError, ValueError):
    """Geometries that should agree and do not, or a kernel map that is missing."""


class OptionError(PumiceError, ValueError):
    """An argument value that is not known; the message lists the known ones."""


class CaptureError(PumiceError, RuntimeError):
    """A network that cannot be captured, or whose captured results are not those of its forward pass."""


class FileError(PumiceError, ValueError):
    """A file that cannot be used; the message names it, what was expected and what was found."""


class StatementError(PumiceError, ValueError):
    """A text that is not a statement of the language; the message shows the place."""
