"""``docs/migration.md``, made of the tables: ``python -m zoo.deepspeed.page`` prints it."""

from __future__ import annotations

import sys

from zoo.deepspeed.modules import Name, Refused, home_of
from zoo.deepspeed.surface import TABLE
from zoo.deepspeed.surface.absent import ABSENT
from zoo.deepspeed.surface.behaviour import BEHAVIOUR

HEAD = """# From DeepSpeed to zoo

Programs of DeepSpeed run on zoo as they are (`zoo run --as-deepspeed script.py`, see `python/zoo/deepspeed/README.md`).
What [behaves otherwise](#behaviour); each [name](#names) that is there, where it is at home in zoo, and what differs;
then [what is absent, and why](#absent). What is in
neither list is absent too: importing it is an `ImportError`, asking for it an `AttributeError`. Made of the tables
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

ABSENT_HEAD = """
## Absent

Names that DeepSpeed has and zoo has not; of a module all that is in it. The error that a program gets has the sentence.

| name | why it is not there |
|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = []
    for path, names in sorted(TABLE.items()):
        module = f"deepspeed.{path}".rstrip(".")
        if isinstance(names, str):
            rows.append(f"| `{module}` | `{names}` | a module |")
            continue
        for name, entry in sorted(names.items()):
            if isinstance(entry, Refused):
                rows.append(f"| `{module}.{name}` | refuses when it is used | {entry.why} |")
                continue
            differs = entry.differs if isinstance(entry, Name) else ""
            rows.append(f"| `{module}.{name}` | `{home_of(entry).replace(':', '.')}` | {differs} |")
    absent = [f"| `deepspeed.{path}` | {why} |" for path, why in sorted(ABSENT.items())]
    behaves = [f"| {what} | {how} |" for what, how in BEHAVIOUR]
    head = HEAD + "\n".join(behaves) + "\n" + NAMES_HEAD
    return head + "\n".join(rows) + "\n" + ABSENT_HEAD + "\n".join(absent) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
