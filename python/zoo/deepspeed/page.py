"""``docs/migration.md`` and the lists of names, made of the tables: ``python -m zoo.deepspeed.page`` writes them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zoo.deepspeed import FINDER
from zoo.deepspeed.modules import Name, Refused, home_of
from zoo.deepspeed.surface import TABLE
from zoo.deepspeed.surface.absent import ABSENT
from zoo.deepspeed.surface.behaviour import BEHAVIOUR
from zoo.deepspeed.surface.constants import CONSTANTS

MIGRATION = "docs/migration.md"
INDEX = "docs/reference/deepspeed-names.md"
"""Its pages, one a package of DeepSpeed, are in the folder ``deepspeed`` beside it."""
MOST, FEWEST = 400, 20
"""A package of more names has pages for those of its modules that have not fewer; the others share its own."""

HEAD = """# From DeepSpeed to zoo

Programs of DeepSpeed run on zoo as they are:

```text
zoo run --as-deepspeed --ranks 2 my_script.py --deepspeed --deepspeed_config ds_config.json
```

1. Run it. A key or a name that zoo does not have is an error with a sentence.
2. Look at what [behaves otherwise](#behaviour), below. Most programs meet none of it.
3. Look up names that your program imports: [all names](reference/deepspeed-names.md).
4. See what became of each key: `zoo config explain ds_config.json`.
5. Load old checkpoints with `engine.load_checkpoint(folder)`, at any number of processes.

More: [run my DeepSpeed script](start/deepspeed-script.md), [zoo.deepspeed](../python/zoo/deepspeed/README.md).
This page is made of the tables in `python/zoo/deepspeed/surface`, by `python -m zoo.deepspeed.page`.

## Behaviour

| what | in zoo |
|---|---|
"""

INDEX_HEAD = """# Names of DeepSpeed

Each name of DeepSpeed 0.19.8 is one of three:

- *there*: it has a home in zoo, which its page names, with what differs;
- *refused*: it can be imported, and using it is a `NotImplementedError` with the reason. Programs that import a
  name before they look whether the feature is wanted still run;
- *[absent](#absent)*: importing it is an `ImportError`, asking for it an `AttributeError`. What is in no list is absent
  too.

| package | there | refused |
|---|---|---|
"""

ROOT_HEAD = """
## At the root

| name | in zoo | what differs |
|---|---|---|
"""

NAMES_HEAD = """
## Names

| name | in zoo | what differs |
|---|---|---|
"""

REFUSED_HEAD = """
## Refused

They can be imported. Calling one, or an instance of a class or of its subclass, is a `NotImplementedError` with
the reason.

| in | names | why they are refused |
|---|---|---|
"""

ABSENT_HEAD = """
## Absent

Names that DeepSpeed has and zoo has not; of a module all that is in it. The error that a program gets has the sentence.

| name | why it is not there |
|---|---|
"""


@dataclass
class Package:
    """Of one package of DeepSpeed: rows of names that are there and of names that are refused, and how many."""

    there: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    num_refused: int = 0


def pages() -> dict[str, str]:
    """Path from the root of the repository → the whole page."""
    packages = _packages()
    root = packages.pop("")
    behaves = [f"| {what} | {how} |" for what, how in BEHAVIOUR]
    found = {MIGRATION: HEAD + _lines(behaves)}
    listed = [
        f"| [`deepspeed.{name}`](deepspeed/{name}.md) | {len(package.there):,} | {package.num_refused:,} |"
        for name, package in packages.items()
    ]
    absent = [
        f"| `deepspeed.{path}` | {why} |"
        for path, why in sorted(ABSENT.items())
        if path not in FINDER.table and FINDER.entry(path) is None
    ]
    found[INDEX] = INDEX_HEAD + _lines(listed) + ROOT_HEAD + _lines(root.there)
    found[INDEX] += (REFUSED_HEAD + _lines(root.refused) if root.refused else "") + ABSENT_HEAD + _lines(absent)
    for name, package in packages.items():
        text = f"# deepspeed.{name}\n\n[All packages](../deepspeed-names.md)\n"
        text += NAMES_HEAD + _lines(package.there) if package.there else ""
        text += REFUSED_HEAD + _lines(package.refused) if package.refused else ""
        found[f"docs/reference/deepspeed/{name}.md"] = text
    return found


def _homes() -> dict[str, str]:
    """Path of the table → the package on whose page its names are: the first word, or the first two."""
    sizes: Counter[str] = Counter()
    for path, names in TABLE.items():
        for depth in (1, 2):
            sizes[_words(path, depth)] += 1 if isinstance(names, str) else len(names)
    return {
        path: _words(path, 2 if sizes[_words(path, 1)] > MOST and sizes[_words(path, 2)] >= FEWEST else 1)
        for path in TABLE
    }


def _words(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])


def _packages() -> dict[str, Package]:
    """By the first words below ``deepspeed``, sorted; the root's own names under ""."""
    found: dict[str, Package] = defaultdict(Package)
    homes = _homes()
    for path, names in sorted(TABLE.items()):
        module, package = f"deepspeed.{path}".rstrip("."), found[homes[path]]
        if isinstance(names, str):
            package.there.append(f"| `{module}` | `{names}` | a module |")
            continue
        if path in CONSTANTS:
            package.there.append(
                f"| `{module}` | `zoo.deepspeed.surface.constants` | {len(CONSTANTS[path])} constants |"
            )
        reasons: dict[str, list[str]] = {}
        for name, entry in sorted(names.items()):
            if isinstance(entry, Refused):
                reasons.setdefault(entry.why, []).append(f"`{name}`")
            elif name not in CONSTANTS.get(path, {}):
                differs = entry.differs if isinstance(entry, Name) else ""
                package.there.append(f"| `{module}.{name}` | `{home_of(entry).replace(':', '.')}` | {differs} |")
        package.refused += [f"| `{module}` | {', '.join(some)} | {why} |" for why, some in reasons.items()]
        package.num_refused += sum(map(len, reasons.values()))
    return {name: package for name, package in sorted(found.items()) if package.there or package.refused}


def _lines(rows: Sequence[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def write(root: Path) -> None:
    """All pages, below the root of the repository; pages of packages that are no more are removed."""
    found = pages()
    folder = (root / INDEX).with_name("deepspeed")
    folder.mkdir(exist_ok=True)
    for page in folder.glob("*.md"):
        if f"docs/reference/deepspeed/{page.name}" not in found:
            page.unlink()
    for path, text in found.items():
        (root / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[3])
