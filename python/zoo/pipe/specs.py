"""Layers that are described and built later, on the rank that has them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["LayerSpec", "TiedLayerSpec"]

_log = logging.getLogger("zoo.pipe")


class LayerSpec:
    """A class and its arguments: ``LayerSpec(nn.Linear, 4, 8, bias=False)`` is ``nn.Linear(4, 8, bias=False)`` later.

    Raises:
        ValueError: ``typename`` is no class of modules.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        given: Any = typename
        if not (isinstance(given, type) and issubclass(given, nn.Module)):
            raise ValueError(
                f"{type(self).__name__}({typename!r}, ...): it takes a class derived from torch.nn.Module and its "
                "arguments. A function is a layer without a spec."
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs
        self.global_rank: int | None = None

    def build(self, log: bool = False) -> nn.Module:
        """The module; with ``log`` that is logged."""
        if log:
            _log.info("building %r", self)
        return self.typename(*self.module_args, **self.module_kwargs)

    def outline(self) -> nn.Module:
        """The module on the meta device, without memory and without drawing random numbers; where its constructor needs
        values, a real one."""
        try:
            with torch.device("meta"):
                return self.build()
        except Exception:
            with torch.random.fork_rng(devices=[]):
                return self.build()

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{k}={v!r}" for k, v in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(given)})"


class TiedLayerSpec(LayerSpec):
    """Layers with one ``key`` are one module, wherever in the model they are.

    On stages that both have it, both have a copy, with equal bits: what is tied is taken from the first of these stages
    when the model is sharded, and its gradient is the sum over all of them in every step.

    Args:
        key: of the module; the same class and arguments for all layers with it.
        forward_fn: ``forward_fn(module, x)`` instead of ``module(x)``, such as an embedding's transposed use.
        tied_weight_attr: names of the parameters that are tied (``"weight"``, ``"embed.weight"``), at least one. Those
            of the module that are not named are tied all the same: with them it is one module at any number of stages.
    """

    def __init__(
        self, key: str, typename: type[nn.Module], *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None, tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(typename, *module_args, **module_kwargs)
        names = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        if not key or "." in key or not names:
            raise ValueError(
                f"TiedLayerSpec({key!r}, ..., tied_weight_attr={tied_weight_attr!r}); it takes a name without dots, "
                "and at least one name of a parameter."
            )
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, names


class TiedCall:
    """A use of a module that other layers use too."""

    def __init__(self, module: nn.Module, forward_fn: Callable[[nn.Module, Any], Any] | None) -> None:
        self.module, self._forward_fn = module, forward_fn

    @property
    def as_given(self) -> Callable[[Any], Any]:
        """The module, or ``forward_fn`` of it."""
        return self.module if self._forward_fn is None else functools.partial(self._forward_fn, self.module)

    def __call__(self, x: Any) -> Any:
        forward_fn, module = self._forward_fn, self.module
        if forward_fn is None:
            return module(x)
        # Through the module's own call, so that whoever gathers its parameters knows that they are needed.
        own = module.__dict__.get("forward")

        def restore() -> None:
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own

        def instead(given: Any) -> Any:
            restore()
            return forward_fn(module, given)

        module.__dict__["forward"] = instead
        try:
            return module(x)
        finally:
            restore()
