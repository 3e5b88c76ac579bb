"""torchft's DiLoCo with the methods of a :class:`~zoo.zero.ZeroOptimizer` that the benchmarks call."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

NAME = "DiLoCo of torchft"


def there() -> bool:
    """torchft is installed."""
    return importlib.util.find_spec("torchft") is not None


def own_address() -> str:
    """Of this rank, as the first one sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])


class TorchftDiLoCo:
    """Each rank is a replica group of one; rank 0 has the lighthouse by which they find each other.

    Args:
        lr, betas, weight_decay: of the inner ``torch.optim.AdamW``; clip_norm: of its gradients, this rank's.
        sync_every: steps.
        outer_lr, outer_momentum: of the outer SGD with Nesterov's momentum.
    """

    def __init__(
        self, model: nn.Module, *, lr: float, sync_every: int, betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01, clip_norm: float | None = None, outer_lr: float = 0.7, outer_momentum: float = 0.9,
    ) -> None:  # fmt: skip
        os.environ.setdefault("RUST_LOG", "warn")
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        for name in ("torchft", "torchft.manager"):
            logging.getLogger(name).setLevel(logging.WARNING)
        rank, size, limit, host = dist.get_rank(), dist.get_world_size(), timedelta(seconds=60), own_address()
        where: list[str] = [""]
        if rank == 0:
            self.lighthouse = LighthouseServer(bind=f"{host}:0", min_replicas=size)
            where = [f"http://{host}:{self.lighthouse.address().rsplit(':', 1)[1]}"]
        dist.broadcast_object_list(where)
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.model, self.clip_norm, self.sync_every, self.steps = model, clip_norm, sync_every, 0
        self.manager = Manager(
            pg=ProcessGroupGloo(limit), load_state_dict=None, state_dict=None, min_replica_size=size, rank=0,
            world_size=1, use_async_quorum=False, store_addr=host, store_port=self.store.port,
            lighthouse_addr=where[0], replica_id=f"replica_{rank}", hostname=host, init_sync=False,
            timeout=limit, quorum_timeout=limit,
        )  # fmt: skip
        self.inner = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=weight_decay)
        self.outer = torch.optim.SGD(model.parameters(), lr=outer_lr, momentum=outer_momentum, nesterov=True)
        self.diloco = DiLoCo(self.manager, [model], self.inner, self.outer, sync_every=sync_every)
        self.diloco.__enter__()
        numel = sum(p.numel() for p in model.parameters())
        self.comm = SimpleNamespace(log=SimpleNamespace(reset=lambda: None, wire_bytes=0))
        self._message = 4 * numel * 2 * (size - 1) // size

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the inner optimizer."""
        return self.inner.param_groups

    @property
    def meets(self) -> bool:
        """The next step brings the parameters together."""
        return (self.steps + 1) % self.sync_every == 0

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of this rank."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """An inner step, and after each ``sync_every`` of them an outer one; bytes are those of an fp32 ring."""
        self.comm.log.wire_bytes = self._message if self.meets else 0
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.inner.step()
        self.steps += 1

    def zero_grad(self) -> None:
        """See torch."""
        self.inner.zero_grad()

    def close(self) -> None:
        """Give back what it holds."""
        self.diloco.__exit__(None, None, None)
        dist.barrier()
        self.manager.shutdown()
        dist.barrier()
        if dist.get_rank() == 0:
            self.lighthouse.shutdown()
