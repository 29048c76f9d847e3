"""Tests that ``src`` has no import cycles, counting imports for types and within functions too.

The contract in ``.importlinter`` forbids cycles of siblings. This test also finds cycles through
the ``__init__`` of a package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"

Graph = Mapping[str, frozenset[str]]


def modules() -> dict[str, Path]:
    found = {}
    for path in SRC.rglob("*.py"):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports are not followed here"
            for alias in node.names:
                child = f"{node.module}.{alias.name}"
                yield from [name for name in (child, node.module) if name in known][:1]


def circles(graph: Graph) -> list[list[str]]:
    """Returns groups of modules that reach each other, found by a walk from each module."""

    def reached_from(start: str) -> set[str]:
        reached: set[str] = set()
        ahead = [start]
        while ahead:
            fresh = graph[ahead.pop()] - reached
            reached |= fresh
            ahead += fresh
        return reached

    reaches = {name: reached_from(name) for name in graph}
    groups = {
        frozenset(other for other in reaches[name] if name in reaches[other])
        for name in graph
        if name in reaches[name]
    }
    return sorted(map(sorted, groups))


def test_circles_are_found() -> None:
    arrows = {"a": "b", "b": "c", "c": "bd", "d": "e", "e": "d", "f": "a"}
    assert circles({k: frozenset(v) for k, v in arrows.items()}) == [["b", "c"], ["d", "e"]]


def test_modules_do_not_import_each_other_in_circles() -> None:
    known = modules()
    graph = {name: frozenset(imports(path, known)) for name, path in known.items()}
    assert len(graph) > 200
    assert sum(map(len, graph.values())) > 1000
    assert circles(graph) == []
