"""The section ``checkpoint`` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from zoo.config import Section
from zoo.config.fates import Fate, refused, setting, unnecessary

__all__ = ["CheckpointConfig"]


class CheckpointConfig(Section):
    """How an engine saves."""

    carried_by: ClassVar[str] = "zoo.engine"

    asynchronous: bool = True
    """Whether training goes on while a checkpoint is written: ``save_checkpoint`` returns when this rank's state is
    copied to host memory, which takes as much of it as the state has. States on NVMe are not copied: an update waits
    before it overwrites one that is not written yet."""

    errors: Literal["ranks", "folded"] = "ranks"
    """Of what compressed reductions have not sent yet: "ranks" saves the error of each of R ranks, from which as many
    go on with the same bits; "folded" saves their sum, one tensor in the place of R + 1, which any number of ranks goes
    on from with nothing lost."""

    load_universal: bool = False
    """Of a folder that DeepSpeed wrote ``load_checkpoint`` without a tag takes what ``latest_universal`` names, and not
    what ``latest`` does, where both are there. Any checkpoint is read at any world size and stage in any case."""

    fates: ClassVar[Mapping[str, Fate]] = {
        "tag_validation": unnecessary(
            "a save in which ranks give other tags fails on all of them, and through zoo.deepspeed does what this says",
            "Warn",
            tuple(spelled(word) for word in ("Ignore", "Warn", "Fail") for spelled in (str, str.upper, str.lower)),
            asks=False,
        ),
        "checkpoint_serialization": unnecessary("tensors are written as safetensors", True, nothing=(False,)),
        "use_node_local_storage": refused("a checkpoint is one directory that all ranks see", False),
        "parallel_write": unnecessary(
            "every rank writes its own slices at the same time",
            keys={"pipeline_stage": setting(False, nothing=(True,))},
        ),
        "writer": unnecessary("every rank writes one safetensors file", {}, open=True),
    }  # fmt: skip
