"""``deepspeed.runtime.activation_checkpointing.offload_activations``: what checkpointed layers keep waits on the host.

The layers are those of transformers (``GradientCheckpointingLayer``); where their inputs wait is a storage of
``zoo.activation_checkpointing``.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from zoo.activation_checkpointing.forms import Form, flatten, stays, unflatten
from zoo.activation_checkpointing.storages import Held, Host, Storage

_LAYER = "GradientCheckpointingLayer"


@dataclass
class CheckpointActivationOffloadStats:
    """Counts of a :class:`CheckpointHiddenStatesOffload` since its last ``reset``."""

    saved_tensors_seen: int = 0
    marked_tensors: int = 0
    offloaded_tensors: int = 0
    restored_tensors: int = 0
    skipped_marked_tensors: int = 0
    kept_last_tensors: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


@dataclass(eq=False)
class _Waiting:
    """A marked tensor that autograd keeps: as it is, or (``held``) in the storage. ``before``: what was marked before
    it; all references but the graph's are weak, so that nothing waits longer than the graph."""

    number: int
    tensor: torch.Tensor | None
    held: Held | None = None
    form: Form | None = None
    before: weakref.ref[_Waiting] | None = None


class CheckpointHiddenStatesOffload(torch.autograd.graph.saved_tensors_hooks):
    """Inside of it the inputs of checkpointed layers of transformers go from the GPU to host memory until backward.

    What else autograd saves stays where it is, and so do tensors that are on the CPU. Hidden states are the first
    argument of a layer, given by position, as transformers gives them; :meth:`mark` names others.

    Args:
        min_offload_bytes: smaller tensors stay.
        keep_last_count: so many that were marked last stay: backward begins with them.
        use_pin_memory, use_streams, max_fwd_stash_count, max_cpu_buffer_pool_count: make no difference; memory is
            page-locked where it can be, copies go on a stream of their own, and memory is taken as it is needed.
    """

    def __init__(
        self, use_pin_memory: bool = True, use_streams: bool = True, min_offload_bytes: int = 1024,
        max_fwd_stash_count: int = 2, max_cpu_buffer_pool_count: int = 64, keep_last_count: int = 1,
    ) -> None:  # fmt: skip
        if keep_last_count < 0 or min_offload_bytes < 0:
            raise ValueError(
                f"keep_last_count={keep_last_count}, min_offload_bytes={min_offload_bytes}; both are 0 or more."
            )
        super().__init__(self._pack, self._unpack)
        self.min_offload_bytes, self.keep_last_count = min_offload_bytes, keep_last_count
        self.storage: Storage = Host()
        self.stats = CheckpointActivationOffloadStats()
        self._marks: set[tuple[Any, ...]] = set()
        self._last: deque[weakref.ref[_Waiting]] = deque()
        self._before: weakref.ref[_Waiting] | None = None
        self._hook: Any = None

    def __enter__(self) -> CheckpointHiddenStatesOffload:  # type: ignore[override]
        if self._hook is not None:
            raise RuntimeError(
                "CheckpointHiddenStatesOffload is entered already, and is not re-entrant; use another one inside of it."
            )
        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._before_layer)
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._hook.remove()
        self._hook = None
        self._marks.clear()
        self._last.clear()
        self._before = None

    def _before_layer(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        checkpoints = getattr(module, "gradient_checkpointing", False) and module.training
        if (
            checkpoints
            and args
            and isinstance(args[0], torch.Tensor)
            and any(kind.__name__ == _LAYER for kind in type(module).__mro__)
        ):
            self.mark(args[0])

    def mark(self, tensor: torch.Tensor) -> None:
        """It goes to the host when autograd saves it next."""
        if not stays(tensor):
            self._marks.add(_key(tensor))

    def reset(self) -> None:
        """Forget marks and counts, and give back free memory. What waits stays valid."""
        self._marks.clear()
        self.stats = CheckpointActivationOffloadStats()
        self.storage.reset()

    def _pack(self, tensor: torch.Tensor) -> Any:
        self.stats.saved_tensors_seen += 1
        if stays(tensor) or _key(tensor) not in self._marks:
            return tensor
        self._marks.discard(_key(tensor))
        self.stats.marked_tensors += 1
        if not self._travels(tensor):
            self.stats.skipped_marked_tensors += 1
            return tensor
        waiting = _Waiting(self.stats.marked_tensors, tensor.detach(), before=self._before)
        self._before = weakref.ref(waiting)
        self._last.append(self._before)
        while len(self._last) > self.keep_last_count:
            oldest = self._last.popleft()()
            if oldest is not None:  # otherwise backward has been there
                self._offload(oldest)
        self.stats.kept_last_tensors = len(self._last)
        return waiting

    def _travels(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and tensor.nbytes >= self.min_offload_bytes

    def _offload(self, waiting: _Waiting) -> None:
        if waiting.tensor is None:
            raise AssertionError(f"marked tensor {waiting.number} is offloaded twice")
        flat, waiting.form = flatten(waiting.tensor)
        private = flat.untyped_storage().data_ptr() != waiting.tensor.untyped_storage().data_ptr()
        waiting.held, waiting.tensor = self.storage.put(flat, 0, private), None
        self.stats.offloaded_tensors += 1
        self.stats.offloaded_bytes += flat.nbytes

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Waiting):
            return packed  # type: ignore[no-any-return]
        next_one = packed.before() if packed.before is not None else None  # that backward comes to
        if next_one is not None and next_one.held is not None:
            next_one.held.fetch()
        if packed.held is None or packed.form is None:
            if packed.tensor is None:
                raise AssertionError(f"marked tensor {packed.number} waits nowhere")
            return packed.tensor
        found = unflatten(packed.held.get(), packed.form)
        self.stats.restored_tensors += 1
        self.stats.restored_bytes += found.nbytes
        return found


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where its values are, and how they lie: autograd gives another object for the same tensor."""
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def get_checkpoint_hidden_states_offloading_ctx_manager(
    use_pin_memory: bool = True, use_streams: bool = True, min_offload_bytes: int = 1024, max_fwd_stash_count: int = 2,
    max_cpu_buffer_pool_count: int = 64, keep_last_count: int = 1,
) -> CheckpointHiddenStatesOffload:  # fmt: skip
    """See :class:`CheckpointHiddenStatesOffload`."""
    return CheckpointHiddenStatesOffload(
        use_pin_memory, use_streams, min_offload_bytes, max_fwd_stash_count, max_cpu_buffer_pool_count, keep_last_count
    )
