"""What Hugging Face's accelerate does not find out by itself where there is no GPU.

Its ``PartialState`` knows a backend for each kind of device and none for a CPU with DeepSpeed. Without one it asks no
further: each process takes itself for the only one, and all of them see the same data. While it is made it asks
``deepspeed.comm`` whether a process group is joined, or to join one; by then it can be told over which backend, as a
program otherwise does with ``PartialState(backend="gloo")``.
"""

from __future__ import annotations

import sys

import torch.distributed as dist


def tell_accelerate() -> None:
    """The backend of the joined process group, to a ``PartialState`` that is being made without one."""
    module = sys.modules.get("accelerate.state")
    state = getattr(getattr(module, "PartialState", None), "_shared_state", None)
    if state is not None and "num_processes" not in state and state.get("backend", "") is None:
        state["backend"] = dist.get_backend()
