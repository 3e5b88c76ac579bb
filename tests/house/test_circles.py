"""Files of zoo.shard and zoo.zero that import each other in a circle, imports for types and in functions included.

Of such files none can be read, or taken out, without the others. The numbers may fall, and do not rise unseen.
"""

from __future__ import annotations

import ast

from tests.house.pages import ROOT

NUM_CIRCLES = 1
NUM_FILES = 3


def imports() -> dict[str, set[str]]:
    """By module the modules of both packages that it imports, wherever it does."""
    paths = {
        ".".join(path.relative_to(ROOT / "python").with_suffix("").parts): path
        for package in ("shard", "zero")
        for path in (ROOT / "python/zoo" / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    found: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                named = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
            elif isinstance(node, ast.Import):
                named = {alias.name for alias in node.names}
            else:
                continue
            found[name] |= named & paths.keys()
    return found


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one module."""
    reached = {name: _reached(graph, name) for name in graph}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return [set(group) for group in groups if len(group) > 1]


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, todo = set[str](), [start]
    while todo:
        for name in graph[todo.pop()] - seen:
            seen.add(name)
            todo.append(name)
    return seen


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set[str]()}
    assert circles(graph) == [{"a", "b", "c"}]


def test_circles_are_few_and_small() -> None:
    found = circles(imports())
    told = sorted(sorted(circle) for circle in found)
    assert len(found) <= NUM_CIRCLES, told
    assert sum(map(len, found)) <= NUM_FILES, told
