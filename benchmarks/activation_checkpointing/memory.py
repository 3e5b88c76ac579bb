"""Bytes of living tensors on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Peak(TorchDispatchMode):
    """The most bytes of tensors made under it that lived at once, looked at after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[Any, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self._live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return out
