"""Which variables of the environment go along to other hosts, and the file ``.deepspeed_env`` that adds some."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX")
"""Variables whose names begin with one of these go along."""
ENVIRONMENT_FILE = ".deepspeed_env"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exported(
    variables: Mapping[str, str], *, prefixes: Iterable[str] = PREFIXES,
    without: Mapping[str, Sequence[str]] | None = None, files: Iterable[Path] = (),
) -> dict[str, str]:  # fmt: skip
    """What other hosts are given: variables by their prefix, then what the files say, the later file first.

    Args:
        without: variable → names that stay here where that variable is set.
        files: of lines ``NAME=value``; those that are not there say nothing.

    Raises:
        ValueError: see :func:`parse_environment`.
    """
    beginnings = tuple(prefixes)
    kept = {name for key, names in (without or {}).items() if key in variables for name in names}
    found = {
        name: value for name, value in variables.items()
        if beginnings and name.startswith(beginnings) and name not in kept and _NAME.fullmatch(name)
    }  # fmt: skip
    for file in files:
        if file.is_file():
            try:
                lines = file.read_text(encoding="utf-8-sig").splitlines()
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is no text in UTF-8 ({error}); a line is NAME=value.") from None
            found |= parse_environment(lines, str(file))
    return found


def environment_files(variables: Mapping[str, str]) -> list[Path]:
    """Where the file may be: the home folder, then this one. ``DS_ENV_FILE`` gives another name, or a whole path."""
    name = variables.get("DS_ENV_FILE") or ENVIRONMENT_FILE
    home = variables.get("HOME") or os.path.expanduser("~")
    return list(dict.fromkeys(Path(folder, name) for folder in (home, ".")))


def parse_environment(lines: Iterable[str], named: str = ENVIRONMENT_FILE) -> dict[str, str]:
    """Name → value, of lines ``NAME=value``: all after the first ``=`` is the value, without spaces around it.
    Empty lines and those that begin with # say nothing.

    Raises:
        ValueError: a line without ``=``, or one whose name is none.
    """
    found: dict[str, str] = {}
    for line in (line.strip() for line in lines):
        if not line or line.startswith("#"):
            continue
        name, sign, value = line.partition("=")
        if not sign or not _NAME.fullmatch(name.strip()):
            raise ValueError(f"{named} has the line {line!r}; a line is NAME=value, as NCCL_DEBUG=INFO.")
        found[name.strip()] = value.strip()
    return found
