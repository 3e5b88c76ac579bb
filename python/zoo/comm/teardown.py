"""What has to be over before torch's process groups go: whoever works beside the program waits for its end there.

torch has no hook for that, so ``torch.distributed.destroy_process_group`` is put behind one, once, when the first
callback comes; a program that imported the function by its name before that calls torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["before_teardown"]

_callbacks: list[Callable[[], None]] = []


def before_teardown(callback: Callable[[], None]) -> None:
    """Call ``callback`` each time before all process groups of this process are destroyed. Given twice, it is called
    once."""
    if not _callbacks:
        _put_in_place()
    if callback not in _callbacks:
        _callbacks.append(callback)


def _put_in_place() -> None:
    plain = dist.destroy_process_group

    @functools.wraps(plain)
    def destroy_process_group(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            for callback in _callbacks:
                callback()
        plain(group)

    for module in (dist, distributed_c10d):
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
