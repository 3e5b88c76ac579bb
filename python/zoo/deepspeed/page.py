"""``docs/migration.md``, made of the tables: ``python -m zoo.deepspeed.page`` prints it."""

from __future__ import annotations

import sys

from zoo.deepspeed import FINDER
from zoo.deepspeed.modules import Name, Refused, home_of
from zoo.deepspeed.surface import TABLE
from zoo.deepspeed.surface.absent import ABSENT
from zoo.deepspeed.surface.behaviour import BEHAVIOUR
from zoo.deepspeed.surface.constants import CONSTANTS

HEAD = """# From DeepSpeed to zoo

Programs of DeepSpeed run on zoo as they are (`zoo run --as-deepspeed script.py`, see `python/zoo/deepspeed/README.md`).
What [behaves otherwise](#behaviour); each [name](#names) that is there, where it is at home in zoo, and what differs;
[what can be imported and refuses to be used](#refused); then [what is absent, and why](#absent). What is in
no list is absent too: importing it is an `ImportError`, asking for it an `AttributeError`. Made of the tables
in `python/zoo/deepspeed/surface` by `python -m zoo.deepspeed.page`.

## Behaviour

| what | in zoo |
|---|---|
"""

NAMES_HEAD = """
## Names

| name | in zoo | what differs |
|---|---|---|
"""

REFUSED_HEAD = """
## Refused

Names of parts that zoo does not have (yet). Programs that import them before they look whether the feature is wanted go
on; calling one, or an instance of a class or of its subclass, is a `NotImplementedError` with the sentence.

| in | names | why they are refused |
|---|---|---|
"""

ABSENT_HEAD = """
## Absent

Names that DeepSpeed has and zoo has not; of a module all that is in it. The error that a program gets has the sentence.

| name | why it is not there |
|---|---|
"""


def page() -> str:
    """The whole page."""
    rows, refused = [], []
    for path, names in sorted(TABLE.items()):
        module = f"deepspeed.{path}".rstrip(".")
        if isinstance(names, str):
            rows.append(f"| `{module}` | `{names}` | a module |")
            continue
        if path in CONSTANTS:
            rows.append(f"| `{module}` | `zoo.deepspeed.surface.constants` | {len(CONSTANTS[path])} constants |")
        reasons: dict[str, list[str]] = {}
        for name, entry in sorted(names.items()):
            if isinstance(entry, Refused):
                reasons.setdefault(entry.why, []).append(f"`{name}`")
                continue
            if name in CONSTANTS.get(path, {}):
                continue
            differs = entry.differs if isinstance(entry, Name) else ""
            rows.append(f"| `{module}.{name}` | `{home_of(entry).replace(':', '.')}` | {differs} |")
        refused += [f"| `{module}` | {', '.join(some)} | {why} |" for why, some in reasons.items()]
    absent = [
        f"| `deepspeed.{path}` | {why} |"
        for path, why in sorted(ABSENT.items())
        if path not in FINDER.table and FINDER.entry(path) is None
    ]
    behaves = [f"| {what} | {how} |" for what, how in BEHAVIOUR]
    head = HEAD + "\n".join(behaves) + "\n" + NAMES_HEAD
    head += "\n".join(rows) + "\n" + REFUSED_HEAD + "\n".join(refused) + "\n"
    return head + ABSENT_HEAD + "\n".join(absent) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
