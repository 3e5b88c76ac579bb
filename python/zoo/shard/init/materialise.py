"""Values for modules that were built on the meta device: one module at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

_RESETS = ("reset_parameters", "_reset_parameters")


class Materialiser:
    """Makes parameters and buffers that are on the meta device, and lets the module initialise them.

    Args:
        device: where they are made.
        function: called with each module that holds some itself; by default its ``reset_parameters``.

    Raises:
        ValueError: a module has neither, or left floating-point values undefined.
    """

    def __init__(self, device: torch.device, function: Callable[[nn.Module], object] | None) -> None:
        self._device, self._function = device, function
        # By the parameter on the meta device, which is kept so that its id stays its own: the real one, for ties.
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def give_values(self, module: nn.Module) -> None:
        """Materialise what ``module`` holds itself."""
        parameters = {k: p for k, p in module._parameters.items() if p is not None and p.device.type == "meta"}
        buffers = {k: b for k, b in module._buffers.items() if b is not None and b.device.type == "meta"}
        if not parameters and not buffers:
            return
        initialise = self._initialiser(module, [*parameters, *buffers])
        tied: dict[str, nn.Parameter] = {}
        fresh: dict[str, nn.Parameter] = {}
        for leaf, meta in parameters.items():
            if id(meta) in self._made:
                # It has its values from its first owner. Initialising the module must not change them.
                tied[leaf] = self._made[id(meta)][1]
                module._parameters[leaf] = self._empty(meta)
                continue
            made = fresh[leaf] = self._empty(meta)
            module._parameters[leaf] = made
            self._made[id(meta)] = (meta, made)
        for leaf, buffer in buffers.items():
            module._buffers[leaf] = _undefined(buffer, self._device)
        with torch.device(self._device):
            initialise()
        for leaf, parameter in tied.items():
            module._parameters[leaf] = parameter
        self._check(module, fresh, list(buffers))

    def _initialiser(self, module: nn.Module, leaves: list[str]) -> Callable[[], object]:
        if self._function is not None:
            function = self._function
            return lambda: function(module)
        for name in _RESETS:
            found = getattr(module, name, None)
            if callable(found):
                return found  # type: ignore[no-any-return]
        raise ValueError(
            f"{type(module).__name__} holds {', '.join(map(repr, leaves))} on the meta device and has no "
            "reset_parameters() that would give them values. Add one, pass materialise=function(module), or build it "
            "on a real device."
        )

    def _empty(self, meta: nn.Parameter) -> nn.Parameter:
        made = nn.Parameter(_undefined(meta, self._device), meta.requires_grad)
        made.__dict__.update(meta.__dict__)
        return made

    def _check(self, module: nn.Module, fresh: dict[str, nn.Parameter], buffers: list[str]) -> None:
        named = [(leaf, module._parameters[leaf]) for leaf in fresh] + [(b, module._buffers[b]) for b in buffers]
        for leaf, tensor in named:
            # One that was replaced by a parameter which is partitioned already has values.
            if tensor is None or type(tensor) not in (nn.Parameter, torch.Tensor) or not tensor.is_floating_point():
                continue
            if tensor.device.type == "meta" or bool(tensor.detach().isnan().any()):
                raise ValueError(
                    f"{type(module).__name__} was built on the meta device, and its initialisation left {leaf!r} "
                    "undefined. Let reset_parameters() set all of its values, or pass materialise=function(module)."
                )


def _undefined(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    # NaN shows afterwards which values nobody has set.
    made = torch.empty(like.shape, dtype=like.dtype, device=device)
    return made.fill_(math.nan) if made.is_floating_point() else made.zero_()
