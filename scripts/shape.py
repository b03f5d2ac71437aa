"""Print how the code is shaped, room by room: a report to steer by, not a gate."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "pumice"
LIMITS = {"lines": 60, "args": 7, "nesting": 3}
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)


@dataclass(frozen=True)
class Function:
    where: str
    lines: int
    args: int
    nesting: int


def nesting(node: ast.AST) -> int:
    """The deepest stack of if, for, while, with and try; an elif adds none, an inner function starts anew."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            args = node.args
            count = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
            names = [a.arg for a in (*args.posonlyargs, *args.args)][:1]
            count -= names in (["self"], ["cls"])
            where = f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
            yield Function(where, (node.end_lineno or 0) - first.lineno + 1, count, nesting(node))


def main() -> None:
    rooms: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        rooms[path.relative_to(PACKAGE).parts[0]].append(path)
    print(f"{'room':<14}{'files':>6}{'lines':>7}{'functions':>10}{'median':>7}{'longest':>8}{'args':>5}{'nesting':>8}")
    over = []
    for room, paths in rooms.items():
        found = [f for path in paths for f in functions(path)]
        sizes = sorted(f.lines for f in found) or [0]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        args, depth = (max((getattr(f, key) for f in found), default=0) for key in ("args", "nesting"))
        middle = sizes[len(sizes) // 2]
        print(f"{room:<14}{len(paths):>6}{lines:>7}{len(found):>10}{middle:>7}{sizes[-1]:>8}{args:>5}{depth:>8}")
        over += [f for f in found if any(getattr(f, key) > limit for key, limit in LIMITS.items())]
    for f in over:
        print(f"over: {f.where}: {f.lines} lines, {f.args} arguments, nesting {f.nesting}")


if __name__ == "__main__":
    main()
