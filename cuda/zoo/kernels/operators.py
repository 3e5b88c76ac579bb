"""What torch is told about an operator beside its kernels, and who runs it: a kernel, or the reference.

The ``ops.py`` of a folder has an :class:`Operator` for each that its binding defines. Once the folder is imported and
the library loaded, torch learns their fakes and gradients; who calls ``torch.ops.zoo`` directly imports the folder
first. A reference gets the same gradient, so
that it is the formula of the header too, and not what autograd makes of the reference's steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from zoo.kernels import loading

_lock = threading.Lock()
_waiting: list[Operator] | None = []  # until the library is loaded; None from then on

Gradient = tuple[Callable[..., None], Callable[..., Any]]
"""``setup_context`` and ``backward``, as :func:`torch.library.register_autograd` takes them."""


def has_tangents() -> bool:
    """Whether derivatives are computed forwards: a kernel would lose them."""
    return forward_ad._current_level >= 0


def computes_alone() -> bool:
    """Whether values are computed and nothing else: no gradient, cast, batch of calls, trace or compiler."""
    return not (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or has_tangents()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
    )


class Operator:
    """``zoo::name``: call it with the arguments of its schema and ``check``.

    Args:
        name: as the binding defines it.
        reference: the same in plain torch; None where the caller chooses between the two.
        fake: the results for tensors without data, as :func:`torch.library.register_fake` takes it; None: no results.
        gradient: None where there is none.
    """

    def __init__(
        self, name: str, reference: Callable[..., Any] | None, *, fake: Callable[..., Any] | None = None,
        gradient: Gradient | None = None,
    ) -> None:  # fmt: skip
        self.name, self._fake, self._gradient = name, fake, gradient
        self._kernel: Callable[..., Any] | None = None
        self._reference = reference if reference is None or gradient is None else _function(reference, *gradient)
        with _lock:
            if _waiting is None:
                self.register()
            else:
                _waiting.append(self)

    def __call__(self, *args: Any, check: Callable[[], None], of: int = 0) -> Any:
        """The result of the kernel, where there is one for argument ``of``; else, after ``check()``, of the reference.

        The binding refuses wrong arguments itself; ``check`` raises the same ValueErrors.
        """
        # Tangents of forward-mode differentiation would be lost in a kernel.
        if not has_tangents() and loading.runs(self.name, args[of]):
            kernel = self._kernel or self._find()
            try:
                if self._gradient is None or torch.is_grad_enabled():
                    return kernel(*args)
                with torch._C._AutoDispatchBelowAutograd():  # half of the host's time of an operation is autograd's
                    return kernel(*args)
            except NotImplementedError:
                check()  # tensors of several devices may reach no kernel
                raise
        check()
        if self._reference is None:
            raise AssertionError(f"zoo::{self.name} has no reference that can be called")
        return self._reference(*args)

    def native(self, *args: Any, check: Callable[[], None]) -> Any:
        """The result of the kernel, for callers who have asked :func:`zoo.kernels.loading.runs` themselves."""
        try:
            return (self._kernel or self._find())(*args)
        except NotImplementedError:
            check()
            raise

    def _find(self) -> Callable[..., Any]:
        kernel: Callable[..., Any] = getattr(torch.ops.zoo, self.name).default
        return kernel

    def register(self) -> None:
        """Tell torch about the fake and the gradient; once, after the library is loaded."""

        def fake(*args: Any) -> Any:
            # A meta tensor among real ones leads here instead of to the kernel that would refuse it.
            devices = {str(t.device) for t in _tensors(args)}
            if len(devices) > 1:
                raise NotImplementedError(f"tensors on {', '.join(sorted(devices))} in one call")
            return None if self._fake is None else self._fake(*args)

        self._kernel = self._find()
        torch.library.register_fake(f"zoo::{self.name}", fake)
        if self._gradient is not None:
            setup_context, backward = self._gradient
            torch.library.register_autograd(f"zoo::{self.name}", backward, setup_context=setup_context)


def register() -> None:
    """Tell torch about the operators that there are and, from now on, about each when it is made; once, after the
    library is loaded."""
    global _waiting
    with _lock:
        for operator in _waiting or ():
            operator.register()
        _waiting = None


def _function(forward: Callable[..., Any], setup_context: Any, backward: Any) -> Callable[..., Any]:
    members = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(torch.autograd.function.once_differentiable(backward)),
    }
    function: Any = type(forward.__name__, (torch.autograd.Function,), members)
    return function.apply  # type: ignore[no-any-return]


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)
