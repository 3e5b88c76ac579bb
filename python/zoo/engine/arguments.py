"""Command-line arguments that scripts of this field have."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Give a script's parser ``--deepspeed`` (a flag, for scripts that can do without) and ``--deepspeed_config FILE``.

    The file is what :func:`zoo.engine.initialize` takes as ``config``.

    Returns:
        The parser.
    """
    group = parser.add_argument_group("DeepSpeed", "Training with a configuration")
    group.add_argument("--deepspeed", action="store_true", help="Train with the configuration's engine.")
    group.add_argument("--deepspeed_config", metavar="FILE", default=None, help="The configuration, JSON or YAML.")
    return parser
