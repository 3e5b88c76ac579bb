"""How Init learns that a module has been built, and how ``Module.apply`` shows whole parameters.

While any Init is active, the ``__init__`` of every subclass of ``nn.Module``, ``Module.__init_subclass__`` and
``Module.apply`` are replaced. The replacements ask for the Init of the running thread and do nothing else without one;
when the last Init ends everything is put back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zoo.shard.init.sharing import current

_lock = threading.Lock()
_num_active = 0
_replaced: list[tuple[type, str, Any, Any]] = []  # class, attribute, what was there or None, what is there now


def install() -> None:
    """One more Init is active."""
    global _num_active
    with _lock:
        _num_active += 1
        if _num_active > 1:
            return
        for cls in _subclasses(nn.Module):
            _wrap_init(cls)
        _replace(nn.Module, "apply", _wrap_apply(nn.Module.apply))
        _replace(nn.Module, "__init_subclass__", classmethod(_subclass_hook))


def uninstall() -> None:
    """One Init less."""
    global _num_active
    with _lock:
        _num_active -= 1
        if _num_active:
            return
        for cls, name, before, now in reversed(_replaced):
            if cls.__dict__.get(name) is not now:
                continue  # another library replaced ours; without an Init it only passes calls on
            if before is None:
                delattr(cls, name)
            else:
                setattr(cls, name, before)
        _replaced.clear()


def _replace(cls: type, name: str, value: Any) -> None:
    before = cls.__dict__.get(name)
    setattr(cls, name, value)
    _replaced.append((cls, name, before, cls.__dict__[name]))


def _subclasses(cls: type) -> Iterator[type]:
    seen: set[type] = set()
    waiting: list[type] = list(cls.__subclasses__())
    while waiting:
        found = waiting.pop()
        if found not in seen and not issubclass(found, torch.jit.ScriptModule):
            seen.add(found)
            yield found
            waiting.extend(found.__subclasses__())


def _wrap_init(cls: type) -> None:
    original = cls.__dict__.get("__init__")
    if not callable(original):
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        session = current()
        if session is None or session.is_building(self):
            original(self, *args, **kwargs)
            return
        with session.building(self):
            original(self, *args, **kwargs)

    _replace(cls, "__init__", __init__)


def _subclass_hook(cls: Any, /, **kwargs: Any) -> None:
    super(nn.Module, cls).__init_subclass__(**kwargs)
    with _lock:
        if _num_active:
            _wrap_init(cls)


def _wrap_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
        session = current()
        if session is None or not session.override_apply:
            return original(self, fn)  # type: ignore[no-any-return]
        for child in self.children():
            child.apply(fn)
        with session.whole_for_apply(self, fn):
            fn(self)
        return self

    return apply
