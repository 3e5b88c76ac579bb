"""What torch.compile sees of a model's hooks and parameters: no hook, and one class of parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zoo.parts.hooks import Nameless, hide_from_compiler, is_compiled, is_own_hook, own_hook
from zoo.shard.buckets import Bucket
from zoo.shard.runtime.contexts import Unit

Mark = Callable[[int, bool, Any], None]


class Compiled:
    """Looks for modules that are compiled, before construction or at any time after it.

    The compiler guards on classes of parameters. Each bucket has one of its own, so that equal modules would make a
    graph each, and after some of them none: those of compiled modules have one in common.

    Args:
        model: whose modules may be compiled. hooks: handles of those on it. units, buckets: of it.

    Attributes:
        sees_hooks: the compiler would trace into them. whole: the graph of all of the model is called.
        ran: since it was called last, it has come to something of the model.
    """

    def __init__(self, model: nn.Module, hooks: list[Any], units: Sequence[Unit], buckets: Sequence[Bucket]) -> None:
        self._model, self._hooks, self._units, self._buckets = model, hooks, units, buckets
        self.sees_hooks = True
        # That runs the model as one graph, and those before it: somebody may still go back through their graphs.
        self._calls: list[Callable[..., Any]] = []
        self.whole = self.ran = False
        self._others = [unit.module for unit in units]  # that were not compiled when somebody looked
        self.hide()

    def look(self) -> None:
        """A pass begins: has somebody compiled a unit?"""
        if any(map(is_compiled, self._others)):
            self.hide()

    def hide(self, whole: bool = False) -> None:
        """Hooks are hidden, and parameters of compiled modules have their class, where there are any. ``whole``: all of
        the model is compiled, or will be."""
        compiled = [m for m in self._model.modules() if whole or is_compiled(m)]
        if not compiled:
            return
        if self.sees_hooks:
            hide_from_compiler(self._hooks, torch.compiler.disable)
            self.sees_hooks = False
        self._others = [unit.module for unit in self._units if not is_compiled(unit.module)]
        inside = {id(p) for module in compiled for p in module.parameters()}
        for bucket in self._buckets:
            if any(id(p) in inside for p in bucket.spec.parameters):
                bucket.parameters.share_class()

    def use_whole_graph(self, call: Callable[..., Any], mark: Mark) -> None:
        """``call`` stands for the model's from now on, and runs it as one graph.

        That has events in the places of hooks: while it is traced these ``mark(unit, begins, output)`` in it where
        forwards of units (by number) begin and end, and do nothing else.
        """
        self._calls.append(call)
        self._model._compiled_call_impl = call
        self.hide(whole=True)
        marks: dict[int, Callable[..., None]] = {}
        for number, unit in enumerate(self._units):
            for handle, begins in zip(unit.hooks, (True, False), strict=False):
                marks[id(handle)] = partial(mark, number, begins)
        for handle in self._hooks:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                hook = hooks[handle.id]
                hook = hook.hook if isinstance(hook, _Untraced) else hook
                hooks[handle.id] = own_hook(_Untraced(hook, self, marks.get(id(handle))))

    @contextlib.contextmanager
    def in_whole_graph(self) -> Iterator[None]:
        """The graph of all of the model is called, with parameters that are not here."""
        self.ran = False
        self._hold(True)
        try:
            yield
        finally:
            self._hold(False)

    def run_by_hooks(self) -> None:
        """torch runs the model as it is instead: it was told so, or there is nothing to compute."""
        self.ran = True
        self._hold(False)

    def _hold(self, whole: bool) -> None:
        self.whole = whole
        for bucket in self._buckets:
            if bucket.partitioned:
                bucket.parameters.hold(whole)

    def end(self) -> None:
        """Nothing stands for the model's own call any more."""
        if self.has_whole_graph:
            self._model._compiled_call_impl = None

    @property
    def has_whole_graph(self) -> bool:
        """Whether :meth:`use_whole_graph` was called, and :meth:`end` was not since then."""
        return self._model._compiled_call_impl in self._calls

    def watched_gradient(self) -> str | None:
        """The name of a parameter whose gradient the user watches by a hook, which a graph would not call."""
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self._buckets:
                for slot, parameter in enumerate(bucket.spec.parameters if bucket.gradients is not None else ()):
                    for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
                        if hooks and not all(map(is_own_hook, hooks.values())):
                            return bucket.called(slot)
        return None

    def compile_units(self, **options: Any) -> int:
        """``module.compile(**options)`` of each unit that has no other one inside and is more than one layer: hooks run
        outside of the graphs, and equal units have one. Where there is none, of the model. How many there are.

        They come in the place of a graph of all of the model."""
        self.end()
        above = {other for unit in self._units for other in unit.within}
        inner = [unit.module for unit in self._units if unit.name and unit not in above]
        inner = [module for module in inner if any(True for _ in module.children())]
        for module in inner or [self._model]:
            module.compile(**options)
        self.hide(whole=not inner)
        return len(inner)


class _Untraced(Nameless):
    """A hook that marks where it is, or does nothing, while a whole graph is traced."""

    def __init__(self, hook: Callable[..., Any], compiled: Compiled, mark: Callable[[Any], None] | None) -> None:
        self.hook, self._compiled, self._mark = hook, compiled, mark

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled.whole:
            if torch.compiler.is_compiling():
                return self._mark(args[-1]) if self._mark is not None else None
            self._compiled.run_by_hooks()
        return self.hook(*args, **kwargs)
