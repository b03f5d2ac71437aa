"""The rooms of the house, and who may look into which: every import, read from the source."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.shape import WHEN, circles, graph

PACKAGE = Path(__file__).parents[1] / "src" / "pumice"

ROOT = frozenset({"errors", "env"})
RUNTIME = ROOT | {"runtime"}
LOWER = RUNTIME | {"language", "coords", "schedule"}
OPS = LOWER | {"lower"}
NN = OPS | {"ops"}
ENGINE = NN | {"nn"}
MODELS = ENGINE | {"engine"}
EVERY_ROOM = MODELS | {"models", "data", "compat", "label"}

MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "env": frozenset({"errors"}),
    "runtime": ROOT,
    "language": ROOT,
    "coords": RUNTIME,
    "schedule": ROOT | {"language"},
    "lower": LOWER,
    "ops": OPS,
    "nn": NN,
    "engine": ENGINE,
    "models": MODELS,
    "data": MODELS,
    "compat": ROOT | {"ops", "nn", "coords"},
    "label": MODELS | {"models", "data"},
    "testing": EVERY_ROOM | {"__init__"},
    "cli": EVERY_ROOM | {"__init__", "testing"},
    "__init__": EVERY_ROOM,
    "__main__": frozenset({"cli"}),
}

# Packages of others, and the only rooms that may import them.
ONLY_IN: dict[str, frozenset[str]] = {
    "triton": frozenset({"runtime", "coords", "lower"}),
    "torch": frozenset(MAY_IMPORT) - {"errors", "env", "language", "schedule"},
    "typer": frozenset({"cli"}),
    "rich": frozenset({"cli", "engine"}),
    "plotly": frozenset({"cli"}),
    "matplotlib": frozenset(),
}

# Rooms of which others may take the names in `__all__` alone, as a user does.
PUBLIC = ("__init__", "coords", "data", "engine", "errors", "models", "nn", "ops")
# Of the rooms that are written of public names: what they take besides, by file and module, and why.
BESIDES: dict[str, dict[str, dict[str, set[str]]]] = {
    "models": {},
    "nn": {
        # A layer has its relation from construction: it calls what `ops.conv` calls behind its checks.
        "nn/conv.py": {
            "pumice.ops.ahead": {"CompiledTogether"},
            "pumice.ops.conv": {"Flow", "Size", "Target", "convolve", "target_of"},
            "pumice.schedule.dataflow": {"chosen"},
        },
        # Layers keep the graph, and the ends, of the edges that they are given, and add to their own part.
        "nn/graph.py": {
            "pumice.ops.graph": {"EdgeType", "graph_of"},
            "pumice.ops.relational": {"AGGREGATIONS", "Own", "convolved"},
        },
        "nn/tensor_product.py": {"pumice.ops.graph": {"ends_of"}},
        # A layer has its statement from construction: it calls what is prepared for that.
        # Padding rows of buffers may be undefined for what works on each row alone.
        "nn/layers.py": {
            "pumice.ops.ahead": {"CompiledTogether"},
            "pumice.ops.conv": {"Size", "target_of"},
            "pumice.ops.tensor": {"not_sparse", "row_wise"},
        },
    },
}

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


@dataclass(frozen=True)
class Source:
    """A file of the package: its path below the package folder, and its syntax tree."""

    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.path.parts[0].removesuffix(".py")

    @property
    def package(self) -> list[str]:
        return ["pumice", *self.path.parts[:-1]]


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported, wherever it stands; relative names are resolved."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = source.package[: len(source.package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from pumice import nn` imports a room; `from pumice.nn import Conv3d` says so already.
            names = [f"pumice.{a.name}" for a in node.names] if module == "pumice" else [module]
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"} and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _room_of(name: str) -> str:
    """The room a dotted name of ours lies in; what is no room is a name of the package's own file."""
    part = name.split(".")[1] if "." in name else "__init__"
    return part if part in MAY_IMPORT else "__init__"


def wrong_imports(source: Source) -> Iterator[str]:
    for line, name in imported_modules(source):
        top = name.split(".")[0]
        if top == "pumice":
            target = _room_of(name)
            if target != source.room and target not in MAY_IMPORT[source.room]:
                yield f"{source.path}:{line}: {source.room} may not import {target} ({name})"
        elif source.room not in ONLY_IN.get(top, MAY_IMPORT):
            yield f"{source.path}:{line}: {source.room} may not import {top}; only {sorted(ONLY_IN[top])} may"


def taken_names(source: Source) -> Iterator[tuple[str, str]]:
    """(module, name) of what is imported from other rooms of ours; the name is "" of a module as a whole."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = source.package[: len(source.package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found = [(module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in found:
            if module.split(".")[0] == "pumice" and not f"{module}.{name}.".startswith(f"pumice.{source.room}."):
                yield module, name


def private_names(source: Source, public: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """By module the names taken from other rooms that are not public. public: names by module."""
    found: dict[str, set[str]] = {}
    for module, name in taken_names(source):
        if name not in public.get(module, set()):
            found.setdefault(module, set()).add(name)
    return found


def names_in_all(path: Path) -> set[str]:
    """`__all__` of a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["__all__"]:
            return {*ast.literal_eval(node.value)}
    raise AssertionError(f"{path} has no __all__")


def environment_reads(source: Source) -> Iterator[str]:
    if source.room == "env":
        return
    for node in ast.walk(source.tree):
        names = {a.name for a in node.names} if isinstance(node, ast.ImportFrom) and node.module == "os" else set()
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = {node.attr}
        for name in sorted(names & ENVIRONMENT):
            yield f"{source.path}:{node.lineno}: os.{name} is for env.py alone"


def global_statements(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"{source.path}:{node.lineno}: global {', '.join(node.names)}"


def misplaced(source: Source) -> Iterator[str]:
    if len(source.path.parts) > 2:
        yield f"{source.path}: three levels at most (pumice/room/file.py)"
    if source.room not in MAY_IMPORT:
        yield f"{source.path}: {source.room} is not a room; the rooms are {sorted(MAY_IMPORT)}"


def problems(path: str, text: str) -> list[str]:
    """Everything wrong with one file, one line each."""
    source = Source(Path(path), ast.parse(text, path))
    found = list(misplaced(source))
    if source.room in MAY_IMPORT:
        for check in (wrong_imports, environment_reads, global_statements):
            found += check(source)
    return found


FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def test_there_is_a_house():
    assert {"errors.py", "env.py"} <= set(FILES)


def test_rooms():
    found = [line for path in FILES for line in problems(path, (PACKAGE / path).read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def public_names() -> dict[str, set[str]]:
    files = {room: PACKAGE / f"{room}.py" for room in PUBLIC}
    found = {room: file if file.exists() else PACKAGE / room / "__init__.py" for room, file in files.items()}
    return {f"pumice.{room}".removesuffix(".__init__"): names_in_all(file) for room, file in found.items()}


@pytest.mark.parametrize("room", BESIDES)
def test_rooms_of_public_names(room: str):
    public, found = public_names(), dict[str, dict[str, set[str]]]()
    for path in FILES:
        source = Source(Path(path), ast.parse((PACKAGE / path).read_text(encoding="utf-8")))
        if source.room == room and (own := private_names(source, public)):
            found[path] = own
    assert found == BESIDES[room]


PUBLIC_IMPORTS = {
    "public": ("models/a.py", "from pumice.nn import ReLU\nfrom pumice.ops import cat\nimport torch", {}),
    "of the package": ("models/a.py", "from pumice import nn, voxelize", {}),
    "its own": ("nn/a.py", "from pumice.nn.conv import convolutions\nfrom . import layers\nfrom .conv import f", {}),
    "of a file": ("models/a.py", "from pumice.nn.conv import Conv3d", {"pumice.nn.conv": {"Conv3d"}}),
    "not in __all__": ("models/a.py", "from pumice.ops import autograd", {"pumice.ops": {"autograd"}}),
    "relative": ("models/a.py", "from ..nn.blocks import CONV", {"pumice.nn.blocks": {"CONV"}}),
    "a module": ("models/a.py", "import pumice.nn.conv as c", {"pumice.nn.conv": {""}}),
    "within a function": ("nn/a.py", "def f():\n  from pumice.lower import norm", {"pumice.lower": {"norm"}}),
    "of a room without public names": ("nn/a.py", "from pumice import lower", {"pumice": {"lower"}}),
}


@pytest.mark.parametrize("case", PUBLIC_IMPORTS)
def test_finds_private_names(case: str):
    path, text, expected = PUBLIC_IMPORTS[case]
    assert private_names(Source(Path(path), ast.parse(text)), public_names()) == expected


def test_no_files_import_each_other():
    trees = {path: ast.parse((PACKAGE / path).read_text(encoding="utf-8")) for path in FILES}
    assert circles(graph(trees)) == []
    # Within functions and for types there are some yet.
    assert len(circles(graph(trees, WHEN))) <= 5


CIRCLES = {
    "none": ({"a.py": "import torch", "b.py": "from pumice.a import x"}, "load", []),
    "two files": ({"a.py": "from pumice import b", "b.py": "import pumice.a"}, "load", [["a.py", "b.py"]]),
    "through a room": (
        {"r/__init__.py": "from .c import x", "r/c.py": "from ..a import y", "a.py": "from pumice.r import x"},
        "load",
        [["a.py", "r/__init__.py", "r/c.py"]],
    ),
    "a file of a room": (
        {
            "r/__init__.py": "from .c import x",
            "r/c.py": "from ..a import y",
            "a.py": "from pumice.r import d",
            "r/d.py": "",
        },
        "load",
        [],
    ),
    "a function's": ({"a.py": "from pumice import b", "b.py": "def f():\n  import pumice.a"}, "load", []),
    "a function's, counted": (
        {"a.py": "from pumice import b", "b.py": "def f():\n  import pumice.a"},
        "load call",
        [["a.py", "b.py"]],
    ),
    "for types": ({"a.py": "import pumice.b", "b.py": "if TYPE_CHECKING:\n  import pumice.a"}, "load call", []),
    "for types, counted": (
        {"a.py": "import pumice.b", "b.py": "if typing.TYPE_CHECKING:\n  import pumice.a"},
        "load types",
        [["a.py", "b.py"]],
    ),
}


@pytest.mark.parametrize("case", CIRCLES)
def test_finds_circles(case: str):
    files, when, expected = CIRCLES[case]
    assert circles(graph({path: ast.parse(text) for path, text in files.items()}, when.split())) == expected


GOOD = {
    "within a room": ("coords/maps.py", "from .keys import pack\nfrom pumice.coords.box import unpack"),
    "the root files": (
        "language/parse.py",
        "from pumice.errors import E\nfrom ..env import settings",
    ),
    "down": ("nn/conv.py", "from pumice.ops.conv import conv\nfrom pumice import coords"),
    "the surface": ("__init__.py", "from pumice import nn\nfrom .ops import conv\nfrom .env import settings"),
    "cli looks everywhere": (
        "cli/main.py",
        "import typer\nimport pumice\nfrom pumice.testing import x",
    ),
    "triton where kernels are": ("lower/emit.py", "import triton.language as tl"),
    "environment in env": ("env.py", "import os\nhome = os.environ['HOME']"),
    "other attributes of os": ("data/scan.py", "import os\nsize = os.path.getsize('x')"),
    "similar names": ("language/parse.py", "import torchless\nimport tritonic"),
}

BAD = {
    "upward": ("coords/maps.py", "from pumice.ops.conv import conv", "coords may not import ops"),
    "upward, relative": ("coords/maps.py", "from ..lower import run", "coords may not import lower"),
    "upward, bare dots": ("ops/conv.py", "from .. import nn", "ops may not import nn"),
    "upward, plain": ("ops/conv.py", "import pumice.nn.conv as c", "ops may not import nn"),
    "upward, inside a function": (
        "ops/conv.py",
        "def f():\n  import pumice.nn",
        "ops may not import nn",
    ),
    "upward, for types": (
        "ops/x.py",
        "if TYPING:\n  import pumice.nn",
        "ops may not import nn",
    ),
    "upward, by name": ("ops/x.py", "import_module('pumice.engine')", "ops may not import engine"),
    "the surface from below": ("nn/conv.py", "import pumice", "nn may not import __init__"),
    "a name of the surface": ("nn/conv.py", "from pumice import voxelize", "nn may not import __init__"),
    "sideways": ("models/unet.py", "from pumice.data import scenes", "models may not import data"),
    "language and coords": ("language/plan.py", "import pumice.coords", "language may not import coords"),
    "schedule and coords": ("schedule/tile.py", "import pumice.coords", "schedule may not import coords"),
    "compat below ops": ("compat/spconv.py", "from pumice.lower import run", "compat may not import lower"),
    "cli from anywhere": (
        "engine/tune.py",
        "from pumice.cli import main",
        "engine may not import cli",
    ),
    "cli from the surface": ("__init__.py", "from .cli import main", "__init__ may not import cli"),
    "testing from a room": ("ops/conv.py", "from pumice import testing", "ops may not import testing"),
    "errors import nothing": ("errors.py", "from pumice.env import settings", "errors may not import env"),
    "torch in language": ("language/plan.py", "import torch.fx", "language may not import torch"),
    "torch in schedule": ("schedule/tile.py", "from torch import nn", "schedule may not import torch"),
    "triton in ops": ("ops/conv.py", "import triton", "ops may not import triton"),
    "triton in cli": ("cli/info.py", "def f():\n    import triton", "cli may not import triton"),
    "plots in data": ("data/scan.py", "import matplotlib.pyplot", "data may not import matplotlib"),
    "environment": ("ops/conv.py", "import os\nx = os.environ['X']", "os.environ is for env.py alone"),
    "getenv": ("cli/main.py", "import os\nx = os.getenv('X')", "os.getenv is for env.py alone"),
    "environ by name": ("nn/conv.py", "from os import environ", "os.environ is for env.py alone"),
    "global": ("ops/conv.py", "def f():\n    global x, y\n    x = y = 1", "global x, y"),
    "a fourth level": ("ops/details/conv.py", "", "three levels at most"),
    "no such room": ("utils/misc.py", "", "utils is not a room"),
    "no such file": ("helpers.py", "", "helpers is not a room"),
}


@pytest.mark.parametrize("case", GOOD)
def test_allows(case: str):
    assert problems(*GOOD[case]) == []


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str):
    path, text, expected = BAD[case]
    found = problems(path, text)
    assert len(found) == 1
    assert found[0].startswith(path)
    assert expected in found[0]
