"""Being found under the name ``deepspeed``: by ``import``, and by who asks which version is installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, distributions
from pathlib import Path
from typing import Any

from zoo.deepspeed.modules import NICKNAME

VERSION = "0.19.8+zoo"
"""The release whose names and signatures are followed; the suffix says that it is not that release."""


def installed_folder() -> Path:
    """A folder with the package ``deepspeed`` and its metadata, for the front of PYTHONPATH: children inherit it."""
    return Path(__file__).parent / "folder"


class _Installed(Distribution):
    """What ``importlib.metadata`` tells of ``deepspeed``, read from the folder."""

    def read_text(self, filename: str) -> str | None:
        """A file of the metadata."""
        path = installed_folder() / f"{NICKNAME}-{VERSION}.dist-info" / filename
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def locate_file(self, path: Any) -> Any:
        """Where a file of the distribution is."""
        return installed_folder() / path


class _MetadataFinder(DistributionFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Finds no modules."""

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context()) -> Iterable[Any]:  # noqa: B008
        """See :class:`importlib.metadata.DistributionFinder`."""
        asked = None if context.name is None else re.sub(r"[-_.]+", "-", context.name).lower()
        return [_Installed()] if asked in (None, NICKNAME) else []


def _already() -> list[tuple[str, Any]]:
    """Modules of DeepSpeed itself that are imported, the root first."""
    modules: dict[str, Any] = dict(sys.modules)  # None is what keeps something from being imported
    found = [(name, m) for name, m in sorted(modules.items()) if name.partition(".")[0] == NICKNAME and m is not None]
    return [
        (n, m)
        for n, m in found
        if not hasattr(m, "__zoo_standin__") and not str(getattr(m, "__name__", "")).startswith("zoo.")
    ]


def install_as_deepspeed() -> None:
    """From now on ``import deepspeed`` gives ``zoo.deepspeed`` in this process, whether DeepSpeed is installed or not.

    ``deepspeed.x.y`` and ``zoo.deepspeed.x.y`` are the same module objects, and ``importlib.metadata`` gives the
    version, which ends in "+zoo". A second call does nothing. Processes that are started are not reached: see
    ``zoo run --as-deepspeed``.

    Raises:
        RuntimeError: DeepSpeed itself, or a part of it, is imported already.
    """
    import zoo.deepspeed as facade

    if sys.modules.get(NICKNAME) is facade:
        return
    for name, here in _already():
        raise RuntimeError(
            f"install_as_deepspeed(): {name} {getattr(here, '__version__', '')} is imported already, from "
            f"{getattr(here, '__file__', 'somewhere')}. Call it before anything imports {NICKNAME}, also "
            "transformers and accelerate."
        )
    sys.modules[NICKNAME] = facade
    facade.FINDER.nickname = NICKNAME
    if all(found.version != VERSION for found in distributions(name=NICKNAME)):
        sys.meta_path.insert(0, _MetadataFinder())
