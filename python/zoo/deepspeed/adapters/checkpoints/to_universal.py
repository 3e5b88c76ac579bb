"""``ds_to_universal``: a checkpoint in the format that DeepSpeed loads at any number of ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from zoo.checkpointing import load
from zoo.checkpointing.foreign import deepspeed_tags, load_deepspeed, write_universal
from zoo.comm import Communicator


def parse_arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description="Make a checkpoint universal.")
    parser.add_argument("--input_folder", type=str, required=True, help="a checkpoint: the folder of a tag")
    parser.add_argument("--output_folder", type=str, required=True, help="that of the new one")
    parser.add_argument("--num_extract_workers", default=4, type=int, help="makes no difference")
    parser.add_argument("--num_merge_workers", default=2, type=int, help="makes no difference")
    parser.add_argument("--keep_temp_folder", action="store_true", help="makes no difference: there is none")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="makes no difference")
    parser.add_argument("--inject_missing_state", action="store_true", help="makes no difference: none is missing")
    return parser.parse_args()


def main(args: Any) -> None:
    """Write ``args.output_folder`` from ``args.input_folder``, a checkpoint of DeepSpeed or of zoo.

    ``latest_universal`` beside the new folder names it then. On one rank: the others of a job need not call it.

    Raises:
        ValueError: (zoo.checkpointing.CheckpointError) what is wrong with the one, or that the other is there already.
    """
    alone = Communicator.alone()
    given, made = Path(args.input_folder).resolve(), Path(args.output_folder).resolve()
    if given.name in deepspeed_tags(given.parent):
        theirs = load_deepspeed(given.parent, given.name, alone)
        write_universal(made.parent, made.name, theirs, theirs.meta.get("deepspeed", {}).get("param_groups", ()))
    else:
        write_universal(made.parent, made.name, load(given.parent, given.name, alone))
