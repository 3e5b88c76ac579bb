"""Mutants: where a change can be made, and which are drawn."""

from __future__ import annotations

import ast
import hashlib
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

LEFT_OUT = "CallLeftOut"
# Those need a name of a variable to put in; decorators of ours declare (dataclass, property) and fail at import.
UNUSED = {"VariableReplacer", "VariableInserter", "RemoveDecorator"}
Place = tuple[int, int]


@dataclass(frozen=True)
class Mutant:
    """One change: ``mutated`` is the whole file with it."""

    id: str
    package: str
    file: str
    line: int
    operator: str
    source: str
    mutated: str


def draw(root: Path, packages: list[str], count: int, seed: int) -> list[Mutant]:
    """``count`` mutants, or all there are. Places are drawn: an operator of many variants has no more weight."""
    dice = random.Random(seed)
    places: list[tuple[str, Path, Place, list[tuple[str, int]]]] = []
    for package in packages:
        for file in files_of(root, package):
            for place, ways in sorted(changes(file.read_text(encoding="utf-8")).items()):
                places.append((package, file, place, ways))
    dice.shuffle(places)
    drawn: list[Mutant] = []
    for package, file, place, ways in places:
        operator, occurrence = dice.choice(ways)
        source = file.read_text(encoding="utf-8")
        mutated = changed(source, operator, occurrence)
        if mutated is None or not differs(source, mutated):
            continue
        name = str(file.relative_to(root))
        key = hashlib.sha256("\0".join((name, operator, str(occurrence), source)).encode()).hexdigest()[:16]
        drawn.append(Mutant(key, package, name, place[0], operator, source, mutated))
        if len(drawn) == count:
            break
    return drawn


def files_of(root: Path, name: str) -> list[Path]:
    """The files of a package, or the one of a module."""
    places = [root / top / name.replace(".", "/") for top in ("python", "cuda", "moe", "compression")]
    files = [file for place in places for file in [place.with_suffix(".py"), *sorted(place.rglob("*.py"))]]
    found = [file for file in files if file.is_file()]
    if not found:
        raise SystemExit(f"zoo: mutants: there is no package and no module {name}")
    return found


def changes(source: str) -> dict[Place, list[tuple[str, int]]]:
    """Place → the changes that can be made there: (operator, which of its occurrences)."""
    found: dict[Place, list[tuple[str, int]]] = defaultdict(list)
    declared = list(spans_of_declarations(ast.parse(source)))
    tree = get_ast(source)
    provider = OperatorProvider()
    for name in (name for name in provider if name not in UNUSED):
        operator: Any = provider[name]()
        positions = (p for node in ast_nodes(tree) for p in operator.mutation_positions(node))
        for occurrence, (begin, _) in enumerate(positions):
            if not any(low <= begin < high for low, high in declared):
                found[begin].append((name, occurrence))
    for occurrence, call in enumerate(calls(source)):
        found[call.lineno, call.col_offset].append((LEFT_OUT, occurrence))
    return found


def changed(source: str, operator: str, occurrence: int) -> str | None:
    """The text with that change."""
    if operator != LEFT_OUT:
        made: str | None = mutate_code(source, OperatorProvider()[operator](), occurrence)
        return made
    call = calls(source)[occurrence]
    lines = source.splitlines(keepends=True)
    first, last = call.lineno - 1, (call.end_lineno or call.lineno) - 1
    head = lines[first].encode()[: call.col_offset].decode()
    tail = lines[last].encode()[call.end_col_offset :].decode()
    return "".join([*lines[:first], f"{head}pass{tail}", *lines[last + 1 :]])


def differs(source: str, mutated: str) -> bool:
    """Whether Python would run something else, and something that it can compile."""
    try:
        return ast.dump(ast.parse(source)) != ast.dump(ast.parse(mutated))
    except SyntaxError:
        return False


def calls(source: str) -> list[ast.Expr]:
    """Statements that are a call and nothing else, in the order of the text."""
    found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def spans_of_declarations(tree: ast.AST) -> Iterator[tuple[Place, Place]]:
    """Where nothing runs: annotations, and what is imported for type checkers only."""
    for node in ast.walk(tree):
        parts: Iterable[ast.AST | None] = ()
        if isinstance(node, (ast.AnnAssign, ast.arg)):
            parts = (node.annotation,)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = (node.returns,)
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            parts = (node,)
        for part in parts:
            if part is not None:
                place: Any = part
                yield (place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset)
