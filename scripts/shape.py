"""Print metrics of the code's shape, by subpackage and in total: a report, not a check."""

import ast
import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "pumice"
LIMITS = {"lines": 60, "args": 7, "nesting": 3}
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Function:
    where: str
    lines: int
    args: int
    nesting: int


def nesting(node: ast.AST) -> int:
    """Depth of nested if, for, while, with and try; an elif adds none, and inner functions do not count."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def functions(path: str, tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            args = node.args
            count = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
            names = [a.arg for a in (*args.posonlyargs, *args.args)][:1]
            count -= names in (["self"], ["cls"])
            where = f"{path}:{node.lineno} {node.name}"
            yield Function(where, (node.end_lineno or 0) - first.lineno + 1, count, nesting(node))


# Imports


WHEN = ("load", "call", "types")
"""When an import runs: on loading the file, in a function call, or under `if TYPE_CHECKING`, for type checkers only."""


@dataclass(frozen=True)
class Import:
    """An import in a file: the module, and the names imported from it. when: one of WHEN."""

    module: str
    names: tuple[str, ...]
    when: str


def imports(path: str, tree: ast.Module) -> Iterator[Import]:
    """The imports of a file of the package, with relative ones resolved."""
    package = ["pumice", *Path(path).parts[:-1]]
    stack: list[tuple[ast.AST, str]] = [(tree, "load")]
    while stack:
        node, when = stack.pop()
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, (), when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield Import(module, tuple(alias.name for alias in node.names), when)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            stack += [*((child, "types") for child in node.body), *((child, when) for child in node.orelse)]
        else:
            inner = "call" if when == "load" and isinstance(node, FUNCTIONS) else when
            stack += [(child, inner) for child in ast.iter_child_nodes(node)]


def graph(trees: Mapping[str, ast.Module], when: Container[str] = ("load",)) -> dict[str, set[str]]:
    """By file, the files it imports at these times. `from package import name` imports the file of that name, or the
    package's own file if there is none."""
    files = {_module(path): path for path in trees}
    found: dict[str, set[str]] = {path: set() for path in trees}
    for path, tree in trees.items():
        for one in (each for each in imports(path, tree) if each.when in when):
            named = [f"{one.module}.{name}" for name in one.names] or [one.module]
            found[path] |= {files[n] for n in (n if n in files else one.module for n in named) if n in files}
    return {path: targets - {path} for path, targets in found.items()}


def _module(path: str) -> str:
    return ".".join(["pumice", *Path(path).with_suffix("").parts]).removesuffix(".__init__")


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Sets of several files that import each other (strongly connected components)."""
    reached = {path: _reached(path, edges) for path in edges}
    groups = {tuple(sorted(b for b in reached[a] | {a} if a in reached[b])) for a in edges}
    return sorted([*group] for group in groups if len(group) > 1)


def _reached(start: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
    found, stack = set[str](), [start]
    while stack:
        new = set(edges[stack.pop()]) - found
        found |= new
        stack += new
    return found


# Report


def repeated_classes(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Class names that are defined several times, with their places."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path}:{node.lineno}")
    return {name: where for name, where in sorted(found.items()) if len(where) > 1}


def sites(trees: Mapping[str, ast.Module], of: str) -> list[str]:
    """Places where a class is called or inherited from. of: suffix of its dotted name."""
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            used = node.bases if isinstance(node, ast.ClassDef) else [node.func] if isinstance(node, ast.Call) else []
            if any(f".{ast.unparse(one)}".endswith(f".{of}") for one in used):
                found.append(f"{path}:{node.lineno}")
    return found


def percentile(values: Iterable[int], share: float) -> int:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def print_rooms(lines: Mapping[str, int], found: Mapping[str, list[Function]]) -> None:
    rooms: dict[str, list[str]] = defaultdict(list)
    for path in lines:
        rooms[Path(path).parts[0]].append(path)
    print(f"{'room':<14}{'files':>6}{'lines':>7}{'functions':>10}{'median':>7}{'longest':>8}{'args':>5}{'nesting':>8}")
    for room, paths in rooms.items():
        own = [f for path in paths for f in found[path]]
        sizes = sorted(f.lines for f in own) or [0]
        args, depth = (max((getattr(f, key) for f in own), default=0) for key in ("args", "nesting"))
        total, middle = sum(lines[path] for path in paths), sizes[len(sizes) // 2]
        print(f"{room:<14}{len(paths):>6}{total:>7}{len(own):>10}{middle:>7}{sizes[-1]:>8}{args:>5}{depth:>8}")
    for f in (f for own in found.values() for f in own):
        if any(getattr(f, key) > limit for key, limit in LIMITS.items()):
            print(f"over: {f.where}: {f.lines} lines, {f.args} arguments, nesting {f.nesting}")


def print_whole(trees: Mapping[str, ast.Module], lines: Mapping[str, int], found: list[Function]) -> None:
    """Print the metrics of the whole package."""
    chained = {kinds: circles(graph(trees, kinds)) for kinds in (WHEN[:1], WHEN[:2], WHEN)}
    twice = repeated_classes(trees)
    for kinds, groups in chained.items():
        for group in groups:
            print(f"circle ({', '.join(kinds)}): {', '.join(group)}")
    for name, where in twice.items():
        print(f"class {name}: {', '.join(where)}")
    sizes, args = [f.lines for f in found], [f.args for f in found]
    rows: dict[str, object] = {
        "lines in the wheel": sum(lines.values()),
        "files in the wheel": len(lines),
        "import circles": len(chained[WHEN[:1]]),
        "import circles, those within functions counted": len(chained[WHEN[:2]]),
        "import circles, those for types counted too": len(chained[WHEN]),
        "class names used twice or more": len(twice),
        "function length, median / p95": f"{percentile(sizes, 0.5)} / {percentile(sizes, 0.95)}",
        "arguments, p95": percentile(args, 0.95),
    }
    for title, of in (("torch.autograd.Function classes", "Function"), ("CUDAGraph() sites", "CUDAGraph")):
        rows[title] = len(sites(trees, of))
    print()
    for name, value in rows.items():
        print(f"{name:<48}{value:>10}")


def main() -> None:
    texts = {p.relative_to(PACKAGE).as_posix(): p.read_text(encoding="utf-8") for p in sorted(PACKAGE.rglob("*.py"))}
    trees = {path: ast.parse(text, path) for path, text in texts.items()}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    found = {path: [*functions(path, tree)] for path, tree in trees.items()}
    print_rooms(lines, found)
    print_whole(trees, lines, [f for own in found.values() for f in own])


if __name__ == "__main__":
    main()
