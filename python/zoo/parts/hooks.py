"""Hooks of zoo on a model: who asks whether a module has hooks means the user's.

A hook that watches a model and changes nothing that the model computes is marked where it is registered. It belongs to
the object that it was registered for, so that a copy or a pickle of the module, which is an ordinary model, has a hook
that does nothing in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

HookT = TypeVar("HookT", bound=Callable[..., Any])

_OWN = "_zoo_own_hook"
FORWARD = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


def own_hook(hook: HookT) -> HookT:
    """Mark a hook as one of zoo's that changes nothing, and return it.

    Args:
        hook: a function, a partial or an instance with a ``__dict__``; not a bound method.
    """
    setattr(hook, _OWN, True)
    hook.__deepcopy__ = lambda memo: _nothing  # type: ignore[attr-defined]
    hook.__reduce_ex__ = lambda protocol: (_made_anew, ())  # type: ignore[method-assign]
    return hook


class Nameless:
    """A hook that has no ``__name__``, by which torch.jit.script would compile it, and says why and what to do."""

    unscripted: ClassVar[str] = (
        "these move and reduce its parameters. Script the model before the engine or optimizer is constructed, or "
        "close it first (optimizer.close(), engine.destroy()); or trace it with torch.jit.trace."
    )

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":
            raise AttributeError(
                "the name of a hook of zoo's: torch.jit.script compiles the hooks of a model, and " + self.unscripted
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class BoundHook(Nameless, partial[Any]):
    """A hook of zoo's, with its first arguments."""


def checking_hook(hook: HookT) -> HookT:
    """Mark a hook of zoo's that raises or does nothing, whoever runs the module: copies have it too."""
    setattr(hook, _OWN, False)
    return hook


def is_own_hook(hook: Any) -> bool:
    """Whether :func:`own_hook` or :func:`checking_hook` has marked it, or it stands for one on a copy of the model."""
    return getattr(hook, _OWN, None) is not None


def is_checking_hook(hook: Any) -> bool:
    """Whether :func:`checking_hook` has marked it."""
    return getattr(hook, _OWN, None) is False


def is_compiled(module: Any) -> bool:
    """Whether ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


HIDDEN = "zoo gathers and releases parameters of a model here, which no graph of torch.compile does"
"""Why: torch says it where it finds them."""


def hide_from_compiler(handles: Iterable[Any], disable: Callable[..., Any]) -> None:
    """Put hooks that torch.compile does not trace into in the places of these, by the handles that registering them
    gave and ``torch.compiler.disable``. Each costs 0.3 µs more."""
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = own_hook(BoundHook(disable(hooks[handle.id], reason=HIDDEN)))


def is_watched(module: Any) -> bool:
    """Whether a hook of :func:`own_hook` is on the module itself, and not what a copy has in its place."""
    return any(getattr(hook, _OWN, False) is True for kind in FORWARD for hook in getattr(module, kind).values())


def has_user_hooks(module: Any, kinds: Iterable[str] = FORWARD) -> bool:
    """Whether a ``torch.nn.Module`` has hooks, of these kinds, that are not zoo's own."""
    return any(not is_own_hook(hook) for kind in kinds for hook in getattr(module, kind).values())


@contextmanager
def without_own_hooks(modules: Iterable[Any]) -> Iterator[None]:
    """For the time of a call that is none of training (a trace), the modules have the user's hooks alone."""
    kept = [(table, dict(table)) for module in modules for table in (getattr(module, kind) for kind in FORWARD)]
    kept = [(table, before) for table, before in kept if any(map(is_own_hook, before.values()))]
    try:
        for table, before in kept:
            for number in [number for number, hook in before.items() if is_own_hook(hook)]:
                del table[number]
        yield
    finally:
        for table, before in kept:
            table.clear()
            table.update(before)


class _Nothing(Nameless):
    """What stands for a hook of zoo on a copy of the model."""

    _zoo_own_hook = False
    unscripted = (
        "this one stands for such a hook on a copy. Script a copy that is made after the engine or optimizer is closed "
        "(optimizer.close(), engine.destroy()); or trace this one with torch.jit.trace."
    )

    def __call__(self, *_: Any, **__: Any) -> None:
        return

    def __reduce__(self) -> Any:
        return _made_anew, ()


_nothing = _Nothing()


def _made_anew() -> Any:
    return _nothing
