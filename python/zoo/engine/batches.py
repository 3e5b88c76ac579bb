"""The batches of an engine: its own, and what it looks at in one: where tensors are, how many samples and tokens."""

from __future__ import annotations

import contextlib
from collections import UserDict, UserList
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.shard.containers import map_tensors

if TYPE_CHECKING:
    from zoo.parts import Unused


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module has its own mode again."""
    before = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in before:
            child.training = training


def placed(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """``value`` with its tensors on ``device``; with a ``dtype`` floating-point ones in it. Containers have their own
    class, and are the objects given where nothing in them changes (:func:`zoo.shard.containers.map_tensors`)."""
    return map_tensors(lambda t: t.to(device, dtype if dtype is not None and t.is_floating_point() else None), value)


def count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """(samples, tokens) of a micro-batch: the length of its first tensor, and the number of elements of its first
    integer tensor of two dimensions or more, such as (B, T) ids; 0 where there is none."""
    samples = 0
    for tensor in tensors((args, kwargs)):
        samples = samples or (int(tensor.size(0)) if tensor.dim() else 1)  # a nested one has no shape
        if tensor.dim() > 1 and not tensor.is_floating_point() and tensor.dtype is not torch.bool:
            return samples, int(tensor.numel())
    return samples, 0


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in nested tuples, lists and mappings, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, UserList)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, (dict, UserDict)):
        for item in value.values():
            yield from tensors(item)


class OwnBatches:
    """The batches of the engine's own loader, epoch after epoch.

    Attributes:
        loader: as ``initialize`` returned it; None where there is none.
    """

    def __init__(self) -> None:
        self.loader: Any = None
        self._batches: Iterator[Any] | None = None
        self._followed: Unused | None = None
        self._serial: int | None = None  # of the loader's iteration that the latest batch is of

    def next_ones(self) -> Iterator[Any]:
        """From where the loader stands.

        Raises:
            ValueError: there is none.
        """
        from zoo.engine.loader import RepeatingLoader

        if self.loader is None:
            raise ValueError(
                "train_batch() needs an iterator of batches, or data given to initialize(training_data=...)."
            )
        serial = getattr(self.loader, "serial", None)
        if self._batches is None or serial != self._serial:  # somebody else has gone through it, or moved it
            self._batches = iter(RepeatingLoader(self.loader))
        return self._numbered(self._batches)

    def _numbered(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._serial = getattr(self.loader, "serial", None)
            yield batch

    def follow(self) -> None:
        """From now on it is known which batches of a plain loader forwards have had."""
        self._followed = None
        if self.loader is None:
            return
        from zoo.engine.loader import ShardedLoader
        from zoo.parts import Unused

        if isinstance(self.loader, ShardedLoader) and self.loader.unused is None:
            self._followed = self.loader.unused = Unused("training_data")

    def use(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of training begins."""
        if self._followed is None:
            return
        given = list(tensors((args, kwargs)))
        with contextlib.suppress(ValueError):  # of another size: a batch that is not the loader's
            if (found := self._followed.find(given)) is not None:
                self._followed.use(found, given)

    def forget(self) -> None:
        """The loader was moved: the next batch is the one where it stands."""
        self._batches = None
