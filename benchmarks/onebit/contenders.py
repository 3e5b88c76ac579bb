"""The optimizers that are compared: AdamW and LAMB with full means, and those that send less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.onebit.torchft_diloco import NAME as TORCHFT
from benchmarks.onebit.torchft_diloco import TorchftDiLoCo, there

from zoo.optim import AdamW, DiLoCo, Lamb, OnebitAdam, OnebitLamb, ZeroOneAdam
from zoo.zero import ZeroOptimizer

ADAMW, LAMB, ZERO_ONE = "AdamW", "Lamb", "ZeroOneAdam"
LOCAL = "nothing (a step of its own)"
BASE = {"OnebitAdam": ADAMW, ZERO_ONE: ADAMW, "DiLoCo": ADAMW, TORCHFT: ADAMW, "OnebitLamb": LAMB}
"""Which one each is compared with."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Options of ``ZeroOneAdam``, and of the others those that say when ranks meet."""

    freeze_step: int
    local_step_scaler: int
    local_step_clipper: int = 16
    var_update_scaler: int = 16
    sync_every: int = 20
    coeff_beta: float = 0.9

    def options(self, name: str) -> dict[str, Any]:
        """Of one contender."""
        found: dict[str, dict[str, Any]] = {
            "OnebitAdam": {"freeze_step": self.freeze_step},
            "OnebitLamb": {"freeze_step": self.freeze_step, "coeff_beta": self.coeff_beta},
            ZERO_ONE: {
                "var_freeze_step": self.freeze_step, "var_update_scaler": self.var_update_scaler,
                "local_step_scaler": self.local_step_scaler, "local_step_clipper": self.local_step_clipper,
            },
            "DiLoCo": {"sync_every": self.sync_every}, TORCHFT: {"sync_every": self.sync_every},
        }  # fmt: skip
        return found.get(name, {})


CLASSES: dict[str, Any] = {
    ADAMW: AdamW, "OnebitAdam": OnebitAdam, ZERO_ONE: ZeroOneAdam, "DiLoCo": DiLoCo, LAMB: Lamb,
    "OnebitLamb": OnebitLamb, **({TORCHFT: TorchftDiLoCo} if there() else {}),
}  # fmt: skip


def build(name: str, model: Any, schedule: Schedule, **options: Any) -> ZeroOptimizer | TorchftDiLoCo:
    """A contender at stage 0, with these options of its own and of :class:`~zoo.zero.ZeroOptimizer`."""
    options = schedule.options(name) | options
    if name == TORCHFT:
        return TorchftDiLoCo(model, **options)
    return ZeroOptimizer(model, stage=0, optimizer=CLASSES[name], **options)


def kind_of(optimizer: ZeroOptimizer | TorchftDiLoCo) -> str:
    """What the next step sends, in words."""
    if isinstance(optimizer, TorchftDiLoCo):
        return "parameters" if optimizer.meets else LOCAL
    inner: Any = optimizer.inner
    now: Callable[[], Any] | Any = getattr(inner, "now", None)
    if now is None:
        return "mean gradient"
    parts = [
        text for text, there in (
            ("mean gradient", now.gradients), ("momentum", now.momentum), ("parameters", now.parameters),
        ) if there
    ]  # fmt: skip
    return " + ".join(parts) or LOCAL
