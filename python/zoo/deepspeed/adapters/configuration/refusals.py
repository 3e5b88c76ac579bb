"""What DeepSpeed refuses of a configuration that would run here.

``zero_allow_untested_optimizer: false``, where a configuration says it: other optimizers than DeepSpeed's list are
refused under ZeRO. Without the key every optimizer is tried at construction, and runs if it can. An odd
``allgather_bucket_size`` at stages 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zoo.config import ConfigError

_CLASSES = (
    "FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedLion", "MuonWithAuxAdam",
)  # fmt: skip
_TYPES = ("adam", "adamw", "adagrad", "lion", "muon")


class UntestedOptimizerError(ConfigError, AssertionError):
    """An optimizer that is not on the list, and the configuration allows no other."""


class AlignmentError(ConfigError, AssertionError):
    """A size that DeepSpeed cannot cut into aligned halves."""


def refuse_odd_buckets(zero: Any) -> None:
    """Raise AlignmentError for an odd ``allgather_bucket_size`` at stages 1 and 2."""
    size = zero.get("allgather_bucket_size") if isinstance(zero, Mapping) else None
    if isinstance(size, int | float) and size % 2 and zero.get("stage") in (1, 2):
        raise AlignmentError(
            f"zero_optimization.allgather_bucket_size is {size:g}: allgather_bucket_size must be a multiple of "
            f"nccl_start_alignment_factor, which is 2, at stages 1 and 2 of DeepSpeed. Give an even number."
        )


def refuse_untested(document: Mapping[str, Any], optimizer: Any) -> None:
    """Raise UntestedOptimizerError if the configuration forbids this optimizer, or that of its section."""
    zero, section = document.get("zero_optimization"), document.get("optimizer")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if document.get("zero_allow_untested_optimizer") is not False or not stage:
        return
    if isinstance(optimizer, torch.optim.Optimizer):
        cls = type(optimizer)
        known = cls in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad) or cls.__name__ in _CLASSES
        name = cls.__name__
    else:
        name = str(section.get("type")) if isinstance(section, Mapping) else ""
        known = not name or name.lower() in _TYPES
    if not known:
        raise UntestedOptimizerError(
            f"{name} under ZeRO stage {stage} is not on DeepSpeed's list of tested optimizers, and the "
            'configuration has "zero_allow_untested_optimizer": false. Set it to true, or leave it out: then it is '
            "tried at construction."
        )
