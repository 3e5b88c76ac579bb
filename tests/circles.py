"""What is kept alive by circles of references alone, until Python looks for them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensors_in_circles() -> Iterator[list[tuple[int, ...]]]:
    """A list that has, after the context, the shapes of tensors that circles which were made within have kept."""
    found: list[tuple[int, ...]] = []
    was, flags = gc.isenabled(), gc.get_debug()
    gc.collect()
    gc.disable()
    gc.freeze()  # what earlier tests have left behind, and one collection did not free, is not looked at
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [tuple(one.shape) for one in gc.garbage if isinstance(one, torch.Tensor)]
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
        gc.unfreeze()
        if was:
            gc.enable()
