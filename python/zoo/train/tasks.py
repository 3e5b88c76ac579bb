"""A task of the user's own, named on the command line as ``module:function``."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence

from zoo.registry import DEFAULT, Registry


@contextlib.contextmanager
def with_task(name: str | None, registry: Registry = DEFAULT) -> Iterator[Sequence[str]]:
    """Inside, the task is in the registry under its own name; gives what has to be set in a configuration to use it.

    Only a command line names code to import; a configuration file cannot. The function is called as components are:
    with ``train.task.params`` as keyword arguments, or with a ``Config`` that it has as an attribute, and with
    ``seed``.

    Args:
        name: ``module:function``, found from the working directory or where packages are; None for no such task.

    Raises:
        ValueError: it is not of that form.
    """
    if name is None:
        yield ()
        return
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise ValueError(f"--task {name!r}; it is MODULE:FUNCTION, such as my_package.tasks:translation.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    with registry.scope():
        registry.register("task", name, name)
        yield (f"train.task.type={json.dumps(name)}",)
