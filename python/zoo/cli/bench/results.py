"""Result files: it is known before a measurement whether they can be written, and they are whole or not there."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from zoo.cost.writing import write_whole


def check_writable(path: Path) -> None:
    """Make and remove a file beside it.

    Raises:
        ValueError: the folder is missing, or nothing can be written to it; or the path is a folder.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file in it, such as {path / 'found.json'}.")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror}; give a file in a folder that is there and can be written to."
        ) from None


def write_json(path: Path, value: Any) -> None:
    """Write it whole: to a file beside it, which then takes its name.

    Raises:
        OSError: there is no space, or the folder has gone.
    """
    write_whole(path, json.dumps(value, indent=1) + "\n")
