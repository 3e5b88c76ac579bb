"""``docs/migration.md``, made of the tables: ``python -m zoo.deepspeed.page`` prints it."""

from __future__ import annotations

import sys

from zoo.deepspeed.modules import Name, home_of
from zoo.deepspeed.surface import TABLE

HEAD = """# From DeepSpeed to zoo

Programs of DeepSpeed run on zoo as they are (`zoo run --as-deepspeed script.py`, see `python/zoo/deepspeed/README.md`).
Each name that is there, where it is at home in zoo, and what differs. What is not in this list is absent: importing it
is an `ImportError`, asking for it an `AttributeError`. Made of the tables in `python/zoo/deepspeed/surface` by
`python -m zoo.deepspeed.page`.

| name | in zoo | what differs |
|---|---|---|
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
            differs = entry.differs if isinstance(entry, Name) else ""
            rows.append(f"| `{module}.{name}` | `{home_of(entry).replace(':', '.')}` | {differs} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
