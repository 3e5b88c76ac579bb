"""Checkpointed functions: what they save waits in a storage, and they run again in backward as they ran the first time.

The recomputation is ``torch.utils.checkpoint``'s. It saves a function's arguments as autograd saves tensors, so that
hooks on saved tensors, set around it, are all that a storage needs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zoo.activation_checkpointing.config import ActivationCheckpointingConfig
from zoo.activation_checkpointing.forms import Form, flatten, stays, unflatten
from zoo.activation_checkpointing.reentrant import Reentrant
from zoo.activation_checkpointing.rng import CudaRNGStatesTracker, replaying, set_state, state_of
from zoo.activation_checkpointing.selective import contexts_of
from zoo.activation_checkpointing.state import State, current, entered
from zoo.activation_checkpointing.storages import Contiguous, Held, Host, Keep, Nvme, Partition, Storage
from zoo.comm import Communicator
from zoo.io import AioConfig

__all__ = ["ActivationCheckpointing"]

_log = logging.getLogger("zoo.activation_checkpointing")


class _Inside(threading.local):
    depth = 0
    """Checkpointed functions that run on this thread, one in another."""


_inside = _Inside()
_LOOK_BACK = 8  # calls before a fetched one among which the next one to be fetched is looked for


class ActivationCheckpointing:
    """Calls functions so that of their graph only the arguments are kept; the rest is computed again in backward.

    With L calls in a row of activations A and arguments of B bytes each, L·B + A bytes are kept in place of L·A, for
    one more forward (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.1). Gradients, the
    random numbers that are drawn in and after the function, and autocast are bit for bit those without it.

    Args:
        config: the section ``activation_checkpointing``; by default arguments stay where they are.
        group: for ``partition_activations``: a Communicator, process group or one-dimensional DeviceMesh of the
            tensor-parallel ranks.
        storage: where saved arguments wait, in the place of what the configuration says.
        tracker: whose random states are replayed with the generators' own; by default that of
            :func:`~zoo.activation_checkpointing.get_cuda_rng_tracker`.
        aio: how files are read and written.

    Raises:
        ValueError: settings that contradict each other, or a directory that cannot be written.
    """

    def __init__(
        self, config: ActivationCheckpointingConfig | None = None, group: Any = None, *,
        storage: Storage | None = None, tracker: CudaRNGStatesTracker | None = None, aio: AioConfig | None = None,
    ) -> None:  # fmt: skip
        self.config = config = config or ActivationCheckpointingConfig()
        problems = list(config.contradictions())
        if problems:
            raise ValueError("; ".join(problems) + ".")
        self._given = storage
        self.storage = storage if storage is not None else _storage_of(config, group, aio)
        self.group, self.aio, self._tracker = group, aio, tracker
        self._contexts = contexts_of(config.save) if config.save else None
        self._watches = config.synchronize_checkpoint_boundary or config.profile
        self._told = False
        self._numbers = itertools.count()
        self._calls: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()

    def __reduce__(self) -> Any:
        """A copy has the same settings, and a storage of its own in which nothing waits."""
        return _like, (type(self), self.config, self.group, self._given, self._tracker, self.aio)

    @property
    def tracker(self) -> CudaRNGStatesTracker:
        """Whose states are replayed."""
        return current().tracker if self._tracker is None else self._tracker

    @property
    def saved_bytes(self) -> int:
        """What waits now occupies so many bytes of the storage; 0 where tensors stay where they are."""
        return sum(call.num_bytes for call in list(self._calls.values()))

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(function, *args, **kwargs)

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, computed again in backward. Without gradients it is just called.

        Arguments and results may be anything, tensors at any depth of tuples, lists and dicts. Whatever else the
        function reads has to be the same when it runs again.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if self.config.use_reentrant:
            return self.reentrant(function, *args, **kwargs)
        return self.non_reentrant(function, *args, **kwargs)

    def non_reentrant(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Whatever ``use_reentrant`` says: a graph without what it would save, which is computed again in backward."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        more: dict[str, Any] = {} if self._contexts is None else {"context_fn": self._contexts}
        special = self._watches or self.storage is not None or bool(self.tracker.states_)
        if not special and not kwargs and not any(isinstance(arg, _CONTAINERS) for arg in args):
            return torch_checkpoint(function, *args, use_reentrant=False, **more)
        if torch.compiler.is_compiling():
            return self._compiled(function, args, kwargs, special, more)
        run, given = _Run.of(self, function, args, kwargs)
        with self._saving():
            return torch_checkpoint(run, *given, use_reentrant=False, **more)

    def reentrant(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Whatever ``use_reentrant`` says: forward makes no graph, and an autograd function makes it in backward.

        Its gradients come by ``backward`` only (not by ``torch.autograd.grad``), and have none of their own. It knows
        its arguments alone: without one that needs a gradient those of the function's parameters would be lost, and
        so such a call is not re-entrant, which is logged once.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        run, given = _Run.of(self, function, args, kwargs)
        if not any(tensor.requires_grad for tensor in given):
            if not self._told:
                self._told = True
                _log.info("%s has no argument that needs a gradient: it is not re-entrant", _name_of(function))
            return self.non_reentrant(function, *args, **kwargs)
        _check_open(run.places, "is given", lambda tensor: tensor.requires_grad)
        run.flattens = True
        with self._saving():
            leaves = Reentrant.apply(run, True, *given)
        return run.output(leaves)

    def reset(self) -> None:
        """Give back free memory, and begin contiguous buffers anew. What waits for a backward stays valid."""
        if self.storage is not None:
            self.storage.reset()

    def _compiled(self, function: Any, args: Any, kwargs: Any, special: bool, more: Any) -> Any:
        if special:
            raise NotImplementedError(
                "a checkpointed function under torch.compile with partition_activations, cpu_checkpointing, contiguous "
                "buffers, nvme_path, synchronize, profile or a random state tracker: the compiler cannot follow them; "
                "compile the function that is checkpointed, and not what calls checkpoint."
            )
        return torch_checkpoint(functools.partial(_called, function), args, kwargs, use_reentrant=False, **more)

    def _saving(self) -> contextlib.AbstractContextManager[Any]:
        """Hooks for the arguments of one call; in another checkpointed function they belong to that one."""
        if self.storage is None or _inside.depth:
            return contextlib.nullcontext()
        call = _Call(self, next(self._numbers))
        self._calls[call.number] = call
        return torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack)

    def fetch_before(self, number: int) -> None:
        """Begin to bring back what the call before this one has saved: backward comes to it next."""
        for earlier in range(number - 1, max(-1, number - 1 - _LOOK_BACK), -1):
            call = self._calls.get(earlier)
            if call is not None:
                call.fetch()
                return


def _like(
    kind: type[ActivationCheckpointing], config: ActivationCheckpointingConfig, group: Any, storage: Storage | None,
    tracker: CudaRNGStatesTracker | None, aio: AioConfig | None,
) -> ActivationCheckpointing:  # fmt: skip
    return kind(config, group, storage=storage, tracker=tracker, aio=aio)


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _storage_of(config: ActivationCheckpointingConfig, group: Any, aio: AioConfig | None) -> Storage | None:
    """The storage that a section describes; None where tensors stay where they are."""
    number = config.number_checkpoints if config.contiguous_memory_optimization else None
    if config.contiguous_memory_optimization and number is None:
        _log.warning(
            "activation_checkpointing.contiguous_memory_optimization without number_checkpoints: there are no buffers, "
            "and saved tensors stay where they are. Say how many checkpointed calls wait for their backward at the "
            "same time, there or by configure(num_checkpoints=...) before."
        )
    below: Storage | None = None
    if config.nvme_path is not None:
        below = Nvme(config.nvme_path, aio=aio)
    elif config.cpu_checkpointing:
        below = Host(num_checkpoints=number)
    elif number is not None:
        below = Contiguous(number)
    if config.partition_activations:
        comm = group if isinstance(group, Communicator) or group is None else Communicator(group)
        if comm is not None and comm.size > 1:
            return Partition(comm, below or Keep())
        _log.info("partition_activations: there are no tensor-parallel ranks to share saved tensors with")
    return below


class _Call:
    """What one checkpointed call has saved."""

    def __init__(self, owner: ActivationCheckpointing, number: int) -> None:
        self.owner, self.number = owner, number
        self._held: list[Held] = []

    @property
    def num_bytes(self) -> int:
        return sum(held.num_bytes for held in self._held)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps in the place of an argument."""
        storage = self.owner.storage
        if storage is None or _inside.depth or stays(tensor):
            # Of a graph that the function makes by itself, or nothing to be gained.
            return self, Keep().put(tensor.detach(), 0, False), None
        flat, form = flatten(tensor)
        private = flat.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        held = storage.put(flat, len(self._held), private)
        self._held.append(held)
        return self, held, form

    def unpack(self, packed: tuple[_Call, Held, Form | None]) -> torch.Tensor:
        """The argument, for the function to run again."""
        _, held, form = packed
        if form is None:
            return held.get()
        if self.owner.storage is not None and self.owner.storage.fetches:
            self.fetch()
            self.owner.fetch_before(self.number)
        return unflatten(held.get(), form)

    def fetch(self) -> None:
        for held in self._held:
            held.fetch()


_CONTAINERS = (tuple, list, dict)
_PLAIN = (torch.Tensor, torch.nn.Module, str, bytes, int, float, complex, type(None), type)


class _Run:
    """The function as torch's checkpoint calls it: first, and again. Its arguments are tensors and all else by itself.

    Attributes:
        flattens: it returns a tuple of leaves, and keeps how they were put together.
    """

    def __init__(
        self, owner: ActivationCheckpointing, function: Callable[..., Any], places: list[Any], spec: Any
    ) -> None:
        self.owner, self.function, self.places, self.spec = owner, function, places, spec
        self.flattens = False
        self._form: Any = None
        self._state: State | None = None
        self._states: Mapping[str, torch.Tensor] = {}
        self._device_state: torch.Tensor | None = None

    @classmethod
    def of(
        cls, owner: ActivationCheckpointing, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Run, list[torch.Tensor]]:
        """The function, and the tensors to give to it; parameters, which live anyway, stay with it."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if _travels(leaf)]
        return cls(owner, function, [_HERE if _travels(leaf) else leaf for leaf in leaves], spec), given

    def __call__(self, *given: torch.Tensor) -> Any:
        coming = iter(given)
        args, kwargs = pytree.tree_unflatten([next(coming) if x is _HERE else x for x in self.places], self.spec)
        again = self._state is not None
        with contextlib.ExitStack() as stack:
            self._enter(stack, given, again)
            output = self.function(*args, **kwargs)
        if not self.flattens:
            return output
        leaves, self._form = pytree.tree_flatten(output)
        _check_open(leaves, "returns", torch.is_floating_point)
        return tuple(leaves)

    def output(self, leaves: tuple[Any, ...]) -> Any:
        """What the function returned, of the leaves as autograd knows them."""
        return pytree.tree_unflatten(list(leaves), self._form)

    def _enter(self, stack: contextlib.ExitStack, given: tuple[torch.Tensor, ...], again: bool) -> None:
        if self._state is None:
            self._state, self._states = current(), self.owner.tracker.get_states()
            # torch's checkpoint asks the arguments on which devices numbers are drawn.
            if _uses_gpu() and not any(tensor.is_cuda for tensor in given):
                self._device_state = state_of(torch.device("cuda"))
        else:
            stack.enter_context(entered(self._state))  # backward may run on another thread
            tracker = self.owner.tracker
            if self._states or tracker.states_:
                stack.enter_context(replaying(tracker, self._states))
            if self._device_state is not None:
                stack.callback(set_state, state_of(torch.device("cuda")), torch.device("cuda"))
                set_state(self._device_state, torch.device("cuda"))
        if self.owner.config.synchronize_checkpoint_boundary or self.owner.config.profile:
            stack.callback(self._leave, again, _now())
        _inside.depth += 1
        stack.callback(_out)

    def _leave(self, again: bool, start: float) -> None:
        stop = _now()
        if self.owner.config.profile:
            what = "recomputation" if again else "forward"
            _log.info("%s of checkpointed %s: %.3f ms", what, _name_of(self.function), (stop - start) * 1e3)


class _Here:
    """Stands for a tensor that is given."""


_HERE = _Here()


def _travels(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)


def _check_open(leaves: Iterable[Any], what: str, lost: Callable[[torch.Tensor], bool]) -> None:
    """Raise ValueError if there are tensors of whose gradients an autograd function would not know."""
    for leaf in leaves:
        if isinstance(leaf, _PLAIN):
            continue
        inside = [*getattr(leaf, "__dict__", {}).values()]
        inside += [getattr(leaf, name, None) for name in getattr(type(leaf), "__slots__", ())]
        if any(isinstance(x, torch.Tensor) and lost(x) for x in inside):
            raise ValueError(
                f"a re-entrant checkpoint of a function that {what} a {type(leaf).__name__} with tensors in it, whose "
                "gradients would be lost: use the form that is not (use_reentrant=False), or tuples, lists and dicts."
            )


def _name_of(function: Any) -> str:
    if isinstance(function, functools.partial):  # of a module's call, as blocks are
        function = function.args[0] if function.args else function.func
    return str(getattr(function, "__qualname__", type(function).__name__))


def _uses_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _out() -> None:
    _inside.depth -= 1


def _now() -> float:
    """Seconds, when the device has done what it was given."""
    if _uses_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()
