"""The repeated blocks of a model: finding them, and standing between a block and whoever calls it.

A *route* gets each call of a block in the place of the block: it may leave it out, or change what goes in and out.
It stands outside of the block's hooks, so that what gathers a block's parameters (ZeRO stage 3) is not asked for
a block that is left out.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

Route = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(number of the block, the block, its arguments) → its output."""

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_log = logging.getLogger("zoo.nn")


def find_blocks(module: nn.Module, names: Sequence[str] | None, who: str) -> dict[str, nn.Module]:
    """Path → block, in order.

    Args:
        names: paths of the blocks, or the path of one container; None for the longest ``ModuleList`` or ``Sequential``
            of at least two modules that are all of one class (of equally long ones the first).
        who: the section that asks, for the sentence of an error.

    Raises:
        ValueError: there are none, or no such path.
    """
    modules = dict(module.named_modules())
    if names is not None:
        missing = [name for name in names if name not in modules]
        if missing or not names:
            raise ValueError(
                f"{who}.blocks = {names}: " + (f"the model has no module {missing[0]!r}" if missing else "it is empty")
                + "; give paths of named_modules(), such as 'transformer.h' or 'layers.0'."
            )  # fmt: skip
        if len(names) == 1 and isinstance(modules[names[0]], _CONTAINERS):
            _check_once(names[0], modules[names[0]], who)
            return _children(names[0], modules[names[0]])
        return {name: modules[name] for name in names}
    best: dict[str, nn.Module] = {}
    container = ""
    for path, found in modules.items():
        if isinstance(found, _CONTAINERS) and len(found) >= 2 and len({type(child) for child in found}) == 1:
            children = _children(path, found)
            if len(children) > len(best):
                best, container = children, path
    if not best:
        raise ValueError(
            f"{who} found no repeated blocks in {type(module).__name__}: no ModuleList or Sequential of modules of one "
            f"class. Name them: {who}.blocks = ['path.of.the.container']."
        )
    _check_once(container, modules[container], who)
    _log.info("%s: the blocks are %s to %s", who, next(iter(best)), list(best)[-1])
    return best


def _check_once(path: str, container: nn.Module, who: str) -> None:
    if len(list(container.children())) < len(container._modules):
        raise ValueError(
            f"{who}: {path or 'the model'} holds one module several times, so that its calls cannot be told apart by "
            f"the module. Name blocks that are called once in a forward: {who}.blocks."
        )


def _children(path: str, container: nn.Module) -> dict[str, nn.Module]:
    return {f"{path}.{name}" if path else name: child for name, child in container.named_children()}


class _Intercepted:
    """What a block has in the place of ``_call_impl``; a copy or a pickle of the block has none of it."""

    def __init__(self, block: nn.Module, number: int, route: Route) -> None:
        self.block, self.number, self.route = block, number, route
        self.before = block.__dict__.get("_call_impl")  # of another part
        self.inner: Callable[..., Any] = self.before or functools.partial(type(block)._call_impl, block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.route(self.number, self.inner, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (nn.Module._call_impl, self.block)


class Blocks:
    """Stands between blocks and their callers, from now to :meth:`close`.

    Raises:
        ValueError: a block is compiled, so that calls of it cannot be changed.
    """

    def __init__(self, blocks: dict[str, nn.Module], route: Route, who: str) -> None:
        for name, block in blocks.items():
            if block._compiled_call_impl is not None or hasattr(block, "_orig_mod"):
                raise ValueError(
                    f"{who}: the block {name!r} is compiled, so that its calls cannot be changed; compile after "
                    "initialize, and not the blocks themselves."
                )
        self._installed = [_Intercepted(block, number, route) for number, block in enumerate(blocks.values())]
        for item in self._installed:
            item.block.__dict__["_call_impl"] = item

    def close(self) -> None:
        """The blocks are called as before."""
        for item in self._installed:
            if item.block.__dict__.get("_call_impl") is item:
                if item.before is None:
                    del item.block.__dict__["_call_impl"]
                else:
                    item.block.__dict__["_call_impl"] = item.before
        self._installed = []
