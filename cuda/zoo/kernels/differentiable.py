"""Operations with gradients: what torch is told about the native ones, and how a reference gets the same backward.

Each folder has a ``registration.py`` with the fake kernels and, for both at once, ``setup_context`` and ``backward``
in the form that :func:`torch.library.register_autograd` and :class:`torch.autograd.Function` share. So the gradient of
a reference is the formula of the header too, and not what autograd makes of the reference's steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from zoo.kernels import loading

FOLDERS = ("layer_norm", "bias_gelu", "softmax", "bias_dropout_residual", "gating")


def register() -> None:
    """Give the native operations of :data:`FOLDERS` fakes and autograd; called once, after the library is loaded."""
    for folder in FOLDERS:
        import_module(f"zoo.kernels.{folder}.registration").register()


def register_fake(name: str, fake: Callable[..., Any]) -> None:
    """A fake kernel that leaves tensors of several devices to the sentence of the operation (see :func:`call`)."""

    @functools.wraps(fake)
    def checked(*args: Any) -> Any:
        devices = {str(t.device) for t in args if isinstance(t, torch.Tensor)}
        if len(devices) > 1:
            raise NotImplementedError(f"tensors on {', '.join(sorted(devices))} in one call")
        return fake(*args)

    torch.library.register_fake(name, checked)


def reference_function(
    forward: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """``forward`` with this backward, as a function of tensors."""
    members = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(torch.autograd.function.once_differentiable(backward)),
    }
    function: Any = type(forward.__name__, (torch.autograd.Function,), members)
    return function.apply  # type: ignore[no-any-return]


def native(x: torch.Tensor, name: str = "") -> bool:
    """Whether ``zoo::name``, whose main input is ``x``, runs natively; the binding refuses wrong dtypes.

    Without a name: on the CPU only.
    """
    return loading.runs(name, x) if name or x.device.type == "cpu" else False


def call(name: str, args: tuple[Any, ...], explain: Callable[[], None]) -> Any:
    """The native operator; ``explain`` raises the ValueError for tensors of several devices, which reach no kernel."""
    try:
        return getattr(torch.ops.zoo, name).default(*args)
    except NotImplementedError:
        explain()
        raise


def wide(x: torch.Tensor) -> torch.Tensor:
    """As the references compute: fp32, or fp64 where that is given."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
