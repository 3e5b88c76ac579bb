"""The engine part of the section ``moe``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo.moe.config import MoEConfig
from zoo.moe.huggingface.parallel import experts_of, parallelise
from zoo.moe.huggingface.upcycling import balance_loss
from zoo.moe.part import MoEPart, layers_of
from zoo.parts import Clock, Environment


class MoESectionPart(MoEPart):
    """What the section ``moe`` asks for: :func:`zoo.moe.parallelise` before anything is sharded, the balance loss of
    upcycled layers, and all that :class:`~zoo.moe.part.MoEPart` does.

    Args:
        section: of the configuration.
        environment: of the engine.
    """

    def __init__(self, section: MoEConfig, environment: Environment) -> None:
        super().__init__(nn.Module(), environment)
        self._section = section
        if section.balance_coefficient:  # otherwise this part changes no loss, and has no such method
            self.on_loss = self._with_balance

    def prepare(self, module: nn.Module, mesh: Any) -> nn.Module:
        """The same module with parallel experts; one that has zoo's own layers only is left as it is."""
        section = self._section
        presets = tuple(preset.preset() for preset in section.presets)
        if experts_of(module, presets, section.modules) or not layers_of(module):
            parallelise(
                module, ep_size=section.ep_size, mesh=mesh if section.ep_size > 1 else None, presets=presets,
                modules=section.modules, chunks=section.chunks, bias_speed=section.bias_speed,
            )  # fmt: skip
        self._layers = layers_of(module)
        return module

    def _with_balance(self, loss: torch.Tensor, clock: Clock) -> torch.Tensor:
        """With the balance losses of the forward before it."""
        return loss + self._section.balance_coefficient * balance_loss(*self._layers.values()).to(loss.device)
