"""The key-value store of a simulated job: like a ``HashStore``, but waiting passes the baton on."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zoo.sim.calls import user_line
from zoo.sim.scheduler import Rank, Scheduler

__all__ = ["SimStore"]


class _KeysWait:
    """A rank waits until all keys are there."""

    def __init__(self, data: dict[str, bytes], keys: list[str]) -> None:
        self._data = data
        self._keys = keys
        self._where = user_line()

    @property
    def done(self) -> bool:
        return all(key in self._data for key in self._keys)

    def waiting_for(self) -> str:
        missing = [key for key in self._keys if key not in self._data]
        return f"the store at {self._where}; waiting for any rank to set {missing}"


class SimStore(dist.Store):  # type: ignore[name-defined,misc]
    """One rank's view of the data that all ranks of a run share."""

    def __init__(self, scheduler: Scheduler, me: Rank) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._me = me
        self._data = scheduler.store_data

    @classmethod
    def for_run(cls, scheduler: Scheduler) -> Callable[[Rank], SimStore]:
        """A function that makes the store of a rank."""
        return lambda me: cls(scheduler, me)

    def set(self, key: str, value: Any) -> None:
        self._data[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        self._wait([key])
        return self._data[key]

    def add(self, key: str, value: int) -> int:
        total = int(self._data.get(key, b"0")) + value
        self._data[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        expected, desired = (v if isinstance(v, bytes) else str(v).encode() for v in (expected_value, desired_value))
        if self._data.get(key, b"") == expected:
            self._data[key] = desired
        return self._data.get(key, expected)

    def check(self, keys: list[str]) -> bool:
        self._scheduler.yield_(self._me)
        return all(key in self._data for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._data.pop(key, None) is not None

    deleteKey = delete_key  # the name that C++ looks for

    def num_keys(self) -> int:
        return len(self._data)

    getNumKeys = num_keys  # the name that C++ looks for

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._wait(list(keys), timeout.total_seconds() if timeout else None)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Nothing: only a timeout that ``wait`` itself is given counts."""

    def _wait(self, keys: list[str], timeout_s: float | None = None) -> None:
        on = _KeysWait(self._data, keys)
        if not on.done and not self._scheduler.block(self._me, on, timeout_s):
            raise dist.DistStoreError(
                f"rank {self._me.index} waited {timeout_s:g} s (of simulated time) for {on.waiting_for()}"
            )
