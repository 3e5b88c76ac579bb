"""``deepspeed.utils.logging``: the logger "DeepSpeed", and what only some ranks say."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from zoo.deepspeed.adapters.utilities.versions import required_torch_version as required_torch_version

log_levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


class LoggerFactory:
    """Makes loggers that write to stdout, each line with time, level and place."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """The logger of that name, which passes nothing on to others.

        Raises:
            ValueError: there is no name.
        """
        if name is None:
            raise ValueError("create_logger() got no name; give it name=, a string.")
        found = logging.getLogger(name)
        found.setLevel(level)
        found.propagate = False
        if not found.handlers:
            handler = logging.StreamHandler(stream=sys.stdout)
            handler.setFormatter(
                logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s")
            )
            found.addHandler(handler)
        return found


def get_log_level_from_string(log_level_str: str) -> int:
    """``"info"`` → ``logging.INFO``, in any case.

    Raises:
        ValueError: no such level.
    """
    level: int | None = log_levels.get(str(log_level_str).lower())
    if level is None:
        raise ValueError(f"{log_level_str!r} is no level of the log; allowed are {', '.join(log_levels)}.")
    return level


logger: Any = LoggerFactory.create_logger(
    "DeepSpeed", log_levels.get(os.environ.get("DEEPSPEED_LOG_LEVEL", "").lower(), logging.WARNING)
)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of DeepSpeed's logger, or of another one, and of its handlers.

    Raises:
        ValueError: no such level.
    """
    level, chosen = get_log_level_from_string(log_level_str), custom_logger or logger
    chosen.setLevel(level)
    for handler in chosen.handlers:
        handler.setLevel(level)


def get_current_level() -> int:
    """That of DeepSpeed's logger."""
    found: int = logger.getEffectiveLevel()
    return found


def should_log_le(max_log_level_str: str) -> bool:
    """Whether DeepSpeed's logger lets messages of this level through.

    Raises:
        ValueError: no such level.
    """
    if not isinstance(max_log_level_str, str):
        raise ValueError(f"{max_log_level_str!r} is no string; allowed are {', '.join(log_levels)}.")
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def _speaks(ranks: Sequence[int] | None) -> bool:
    given: Any = ranks
    if given is not None and (isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable)):
        raise ValueError(f"ranks={given!r}, a {type(given).__name__}; give a list of ranks, as [0], or [-1] for all.")
    ranks = None if ranks is None else list(ranks)
    if not dist.is_available() or not dist.is_initialized():
        return True
    return bool(ranks) and ranks is not None and (ranks[0] == -1 or dist.get_rank() in ranks)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else -1


def get_dist_msg(message: Any, ranks: Sequence[int] | None = None) -> str | None:
    """``"[Rank 0] message"`` on these ranks (``[-1]``: all), None on others. Without a process group always, as rank
    -1; with one and no ``ranks``, nowhere."""
    return f"[Rank {_rank()}] {message}" if _speaks(ranks) else None


def log_dist(message: Any, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; see :func:`get_dist_msg`."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        logger.log(level, text, stacklevel=2)


@functools.cache
def _once(message: Any, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: Any, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """:func:`log_dist`, each message once in a process."""
    _speaks(ranks)  # what is no list of ranks
    _once(str(message), None if ranks is None else tuple(ranks), level)


@functools.cache
def _warn_once(*args: Any, **kwargs: Any) -> None:
    logger.warning(*args, **kwargs)


def warning_once(*args: Any, **kwargs: Any) -> None:
    """``logger.warning``, each message once in a process."""
    _warn_once(*args, **kwargs)


def print_dist(message: Any, ranks: Sequence[int] | None = None) -> None:
    """Print on these ranks; see :func:`get_dist_msg`."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        print(text, flush=True)  # noqa: T201


def print_json_dist(message: dict[str, Any], ranks: Sequence[int] | None = None, path: Any = None) -> None:
    """Write a dict, with "rank" added to it, into the file ``path`` on these ranks."""
    if _speaks(ranks):
        message["rank"] = _rank()
        with open(path, "w", encoding="utf-8") as file:
            json.dump(message, file)
            file.flush()
            os.fsync(file.fileno())


def print_configuration(args: Any, name: str) -> None:
    """Log the attributes of an object, one a line, by name."""
    logger.info("%s:", name)
    for key, value in sorted(vars(args).items()):
        logger.info("  %s %s", f"{key} ".ljust(32, "."), value)


logger.warning_once, logger.log_dist_once = warning_once, log_dist_once
