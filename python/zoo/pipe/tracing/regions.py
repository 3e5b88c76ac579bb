"""What surrounds the nodes of a traced forward: ``no_grad``, ``inference_mode``, ``enable_grad``, ``autocast`` and
``sdpa_kernel``.

A forward enters them once, while it is traced; the nodes that it makes in them run in them each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Around", "Region", "Regions"]


@dataclass(frozen=True, kw_only=True)
class Region:
    """Attributes:
    grad: whether operations are recorded by autograd; None: as it is around the whole forward.
    inference: within ``torch.inference_mode()``.
    autocasts: device, whether it is on, dtype, whether casts are kept; of each ``torch.autocast``, outermost first.
    attention: names of the kernels that scaled_dot_product_attention may use; None: as around the whole.
    """

    grad: bool | None
    inference: bool
    autocasts: tuple[tuple[str, bool, torch.dtype, bool], ...]
    attention: tuple[str, ...] | None


class Regions:
    """While :meth:`open`, knows where a forward is. What is around the whole of it is not looked at.

    Args:
        text: the string that is meant by what a forward gives as a device (``x.device.type``).
    """

    def __init__(self, text: Callable[[Any], str]) -> None:
        self._text = text
        self._kernels: tuple[str, ...] = ()
        self._autocasts: list[tuple[str, bool, torch.dtype, bool]] = []
        self._enabled = 0
        self._inference = False

    def now(self) -> Region | None:
        """The region that a node is made in; None outside of all."""
        grad = None if torch.is_grad_enabled() and not self._enabled else torch.is_grad_enabled()
        inference = torch.is_inference_mode_enabled() and not self._inference
        kernels = _kernels()
        attention = None if kernels == self._kernels else kernels
        if grad is None and not inference and not self._autocasts and attention is None:
            return None
        return Region(grad=grad, inference=inference, autocasts=tuple(self._autocasts), attention=attention)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Watch ``autocast`` and ``enable_grad``, of which not even a difference may be seen from inside."""
        self._inference, self._kernels = torch.is_inference_mode_enabled(), _kernels()
        autocast: Any = torch.amp.autocast_mode.autocast
        enable: Any = torch.enable_grad
        kept = [(one, name, vars(one)[name]) for one in (autocast, enable) for name in ("__enter__", "__exit__")]
        kept.append((autocast, "__init__", autocast.__init__))
        enter_autocast, exit_autocast, enter_enable, exit_enable, init_autocast = (before for _, _, before in kept)

        def made_autocast(one: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
            init_autocast(one, self._text(device_type), *args, **kwargs)

        def entered_autocast(one: Any) -> Any:
            self._autocasts.append((str(one.device), one._enabled, one.fast_dtype, one._cache_enabled))
            return enter_autocast(one)

        def left_autocast(one: Any, *error: Any) -> Any:
            self._autocasts.pop()
            return exit_autocast(one, *error)

        def entered_enable(one: Any) -> Any:
            self._enabled += 1
            return enter_enable(one)

        def left_enable(one: Any, *error: Any) -> Any:
            self._enabled -= 1
            return exit_enable(one, *error)

        new = (entered_autocast, left_autocast, entered_enable, left_enable, made_autocast)
        try:
            with torch.enable_grad():  # so that no_grad is seen wherever split() is called
                for (one, name, _), function in zip(kept, new, strict=True):
                    setattr(one, name, function)
                try:
                    yield
                finally:
                    for one, name, function in kept:
                        setattr(one, name, function)
        finally:
            self._autocasts, self._enabled = [], 0


class Around(contextlib.AbstractContextManager["Around"]):
    """Enters and leaves regions from node to node. What two neighbours have in common stays entered, as autocast keeps
    its casts of weights until its end."""

    def __init__(self) -> None:
        self._now: Region | None = None
        self._open: list[tuple[Any, contextlib.AbstractContextManager[Any]]] = []

    def move(self, region: Region | None) -> None:
        """Be in ``region``."""
        if region == self._now:
            return
        wanted = _contexts(region)
        common = 0
        while common < min(len(wanted), len(self._open)) and wanted[common] == self._open[common][0]:
            common += 1
        self._leave(common)
        for key in wanted[common:]:
            context = _context(*key)
            context.__enter__()
            self._open.append((key, context))
        self._now = region

    def _leave(self, kept: int) -> None:
        while len(self._open) > kept:
            self._open.pop()[1].__exit__(None, None, None)

    def __exit__(self, *error: Any) -> None:
        self._leave(0)
        self._now = None


def _kernels() -> tuple[str, ...]:
    cuda: Any = torch.backends.cuda
    allowed = {
        "FLASH_ATTENTION": cuda.flash_sdp_enabled(), "EFFICIENT_ATTENTION": cuda.mem_efficient_sdp_enabled(),
        "MATH": cuda.math_sdp_enabled(), "CUDNN_ATTENTION": cuda.cudnn_sdp_enabled(),
    }  # fmt: skip
    return tuple(name for name, one in allowed.items() if one)


def _contexts(region: Region | None) -> list[tuple[Any, ...]]:
    if region is None:
        return []
    inference = [("inference",)] if region.inference else []
    grad = [] if region.grad is None else [("grad", region.grad)]
    attention = [] if region.attention is None else [("attention", *region.attention)]
    return [*inference, *grad, *attention, *(("autocast", *one) for one in region.autocasts)]


def _context(kind: str, *options: Any) -> contextlib.AbstractContextManager[Any]:
    if kind == "inference":
        return torch.inference_mode()
    if kind == "grad":
        return torch.enable_grad() if options[0] else torch.no_grad()
    if kind == "attention":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([getattr(SDPBackend, name) for name in options])
    device, enabled, dtype, cached = options
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached)
