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

import torch
from torch import nn

from zoo.parts import Clock

Route = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(number of the block, the block, its arguments) → its output."""

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_log = logging.getLogger("zoo.data_efficiency")


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


class _LeftBehind:
    """A hook that a copy or a pickle of its module has not."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        return self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nothing, ()


class _Nothing:
    def __call__(self, *args: Any) -> None:
        return None


class Scope:
    """Which forward of training runs: the one that the engine has told of, and its recomputation in backward.

    ``clock`` is its clock; None in evaluation, and in forwards that did not go through the engine.
    """

    def __init__(self, module: nn.Module) -> None:
        self.clock: Clock | None = None
        self._told: Clock | None = None
        self._saved: list[Clock | None] = []
        self._hooks = [
            module.register_forward_pre_hook(_LeftBehind(self._enter)),
            module.register_forward_hook(_LeftBehind(self._leave), always_call=True),
        ]

    def tell(self, clock: Clock) -> None:
        """The next forward of the model is one of training."""
        self._told = clock

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._saved.append(self.clock)
        # What was told of a forward that then did not come, because something before it raised, is of no evaluation.
        trains = module.training and torch.is_grad_enabled()
        self.clock, self._told = self._told if trains else None, None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        before = self._saved.pop() if self._saved else None
        if self.clock is None:  # none of ours: what an activation checkpoint recomputes belongs to the one before
            self.clock = before

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self.clock = None


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any], who: str) -> torch.Tensor:
    """The hidden states among a block's arguments: the first, ``hidden_states``, or the first tensor by name.

    Raises:
        ValueError: there are none.
    """
    found = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"{who}: a block was called without hidden states, a tensor, as its first argument.")
    return found


def split_output(output: Any, who: str, wanted: torch.Size) -> tuple[torch.Tensor, int | None]:
    """The hidden states that a block returned, and the length of the tuple that they came in; None for no tuple.

    Raises:
        ValueError: it returned more than them, or they have another shape than expected.
    """
    items = output if isinstance(output, tuple) else (output,)
    hidden = items[0] if items else None
    if not isinstance(hidden, torch.Tensor) or any(item is not None for item in items[1:]):
        raise ValueError(
            f"{who} is for blocks that return hidden states, as a tensor or a tuple with nothing else in it; this one "
            "returned more. Switch off caches and attention outputs (use_cache=False, output_attentions=False)."
        )
    if hidden.shape != wanted:
        raise ValueError(
            f"{who} is for blocks whose output has the shape of their input, {tuple(wanted)}; this one returned "
            f"{tuple(hidden.shape)}. Choose other blocks."
        )
    return hidden, len(output) if isinstance(output, tuple) else None


def join_output(hidden: torch.Tensor, form: int | None) -> Any:
    """The reverse of :func:`split_output`."""
    return hidden if form is None else (hidden, *([None] * (form - 1)))
