"""DeepSpeed's names, with zoo behind them: scripts and libraries that ``import deepspeed`` run as they are.

``zoo.deepspeed.initialize``, ``.zero.Init``, ``.comm``, ... become ``deepspeed.initialize`` and so on by one of

* ``zoo run --as-deepspeed script.py``: for a script and the processes that it starts;
* :func:`install_as_deepspeed`: for this process, before anything imports DeepSpeed;
* the distribution in the folder ``deepspeed/`` of the repository, which nothing installs by itself.

Names are tables (``zoo.deepspeed.surface``), imported when they are first asked for; what translates arguments and
results is in ``zoo.deepspeed.adapters``. ``docs/migration.md`` and the lists in
``docs/reference/deepspeed-names.md`` are made of the tables.
"""

from __future__ import annotations

from typing import Any

from zoo.deepspeed.modules import TableFinder, attribute, install
from zoo.deepspeed.standin import VERSION as __version__
from zoo.deepspeed.standin import install_as_deepspeed, installed_folder
from zoo.deepspeed.surface import TABLE
from zoo.deepspeed.surface.absent import ABSENT

__all__ = ["install_as_deepspeed", "installed_folder"]

__version_major__, __version_minor__, __version_patch__ = (int(x) for x in __version__.split("+")[0].split("."))
version, git_hash, git_branch = __version__, "unknown", "unknown"
__git_hash__, __git_branch__ = git_hash, git_branch

FINDER = TableFinder(TABLE, ABSENT)
_names: dict[str, Any] = dict(FINDER.table[""])  # type: ignore[arg-type]
_below, _why = tuple(FINDER.below("")), FINDER.why
__all__ += [*_names, *_below]
install(FINDER)


def __getattr__(name: str) -> Any:
    return attribute(globals(), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_names, *_below})
