"""CUDA graphs of a model's forward: the kernels of a call are recorded once and started together ever after."""

from __future__ import annotations

import logging
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zoo.inference.described import PLAIN, Description, is_watched, plain

logger = logging.getLogger(__name__)
Tensor = torch.Tensor
Recorder = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Of a function without arguments: what repeats it, and its result, which a repetition writes anew."""
SETTLES = 3
"""Calls after which a model that is never the same before and after a call is recorded no more."""


class _Graph(NamedTuple):
    """inputs: the tensors that the graph reads. replay: runs it. leaves: what it gave; tensors are written again.
    held: objects by whose identity the kind is told, so that no other one gets it."""

    inputs: list[Tensor]
    replay: Callable[[], None]
    leaves: list[Any]
    form: Any
    held: list[Any]


def record_on_cuda(run: Callable[[], Any], *, warm_ups: int = 3) -> tuple[Callable[[], None], Any]:
    """A :data:`Recorder` of the current device; ``run`` is called ``warm_ups`` times before, on a stream of its own, as
    libraries allocate in their first calls.

    Raises:
        RuntimeError: the function waits for the device, or does what a graph cannot.
    """
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph.replay, found


class Graphs:
    """``model(*args, **kwargs)`` without gradients, recorded once for each kind of call.

    A kind is: the shapes, strides, dtypes and devices of the tensors, all other values, where the model's parameters,
    buffers and other tensors are, and its modules with all their attributes. Values of tensors are read anew by each
    call, so that weights may change in place. The first call of a kind runs as it is, then it is recorded. Results are
    tensors of their own: a later call does not write into an earlier one's.

    All other calls run as they are, unrecorded. Without a word: those with something else than tensors, numbers and
    words, such as a cache, those on tensors of another device than CUDA's current one, and those under a mode that
    watches functions. With a warning and the reason, once: a model with forward hooks, which a graph would not call;
    a call that writes into its arguments, the model's tensors or its attributes, or draws random numbers on the host;
    and what cannot be recorded.

    Threads take turns, and each stream has graphs of its own.

    Args:
        model: a module. What it decides from anything but its arguments and itself is recorded too.
        most: kinds that are kept; the one used least lately goes, with its memory.
        record: how a function is recorded; None: as a CUDA graph.
        devices: the types of device whose tensors are recorded.
    """

    def __init__(
        self, model: nn.Module, *, most: int = 8, record: Recorder | None = None, devices: tuple[str, ...] = ("cuda",)
    ) -> None:
        if type(most) is not int or most < 1:
            raise ValueError(f"most={most!r}; at least one kind of call has to be kept, a whole number of them.")
        if isinstance(devices, str):
            raise ValueError(f"devices={devices!r}; it must be a tuple of types, such as ({devices!r},).")
        self.model, self.most, self.devices = model, most, devices
        self._record: Recorder = record_on_cuda if record is None else record
        self._graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        self._described: Description | None = None
        self._said: set[str] = set()
        self._unsettled = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Kinds that are recorded."""
        return sum(graph is not None for graph in self._graphs.values())

    def __reduce__(self) -> Any:
        """A copy is of the copied model, and has recorded nothing yet."""
        return _made, (self.model, self.most, self._record, self.devices)

    def clear(self) -> None:
        """Forget all, and free their memory."""
        with self._lock:
            self._graphs.clear()
            self._said.clear()
            self._described = None
            self._unsettled = 0

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        leaves, form = pytree.tree_flatten((args, kwargs))
        with self._lock:
            call = self._kind(leaves, form)
            if call is not None and call[0] not in self._graphs:
                return self._first(call[0], leaves, form, args, kwargs)
            graph = None if call is None else self._graphs[call[0]]
            if call is not None and graph is not None:
                self._graphs.move_to_end(call[0])
                return _replayed(graph, leaves)
        return self.model(*args, **kwargs)

    def _kind(self, leaves: list[Any], form: Any) -> tuple[Hashable, list[Any]] | None:
        """The kind of this call, and the objects that it is told by; None: it runs as it is."""
        if self._unsettled >= SETTLES or is_watched():
            return None
        where = _where(self.devices)
        kinds: list[Hashable] = []
        tensors = 0
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if not self._takes(leaf) or where is None:
                    return None
                kinds.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
                tensors += 1
            elif isinstance(leaf, PLAIN):
                kinds.append(plain(leaf))
            else:
                return None
        if not tensors:
            return None
        if self._described is None or not self._described.holds():
            self._described = Description(self.model)
        if self._described.runs_python():
            self._warn("has forward hooks, which a CUDA graph would not call: it runs kernel by kernel.")
            return None
        casts = [(torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in self.devices]
        numbers = torch.get_default_dtype(), torch.get_float32_matmul_precision()
        return (tuple(kinds), str(form), *casts, numbers, where, self._described.key), self._described.held

    def _takes(self, leaf: Tensor) -> bool:
        if leaf.device.type not in self.devices or leaf.requires_grad or type(leaf) not in (Tensor, nn.Parameter):
            return False
        here = leaf.device.type != "cuda" or leaf.device.index == torch.cuda.current_device()
        return here and leaf.layout is torch.strided and not leaf.is_nested

    def _first(
        self, key: Hashable, leaves: list[Any], form: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # fmt: skip
        """A call that runs as it is, and is recorded if it leaves all as it was."""
        before = _Before(self.model, leaves)
        found = self.model(*args, **kwargs)
        after = self._kind(leaves, form)
        if after is None or after[0] != key:  # something made in the first call; or the next one, too
            self._unsettled += 1
            if self._unsettled == SETTLES:
                self._warn("changes attributes or tensors of the model each time, which a CUDA graph would not: it "
                           "runs kernel by kernel.")  # fmt: skip
            return found
        self._unsettled = 0
        wrote = before.wrote(pytree.tree_flatten((args, kwargs)), form)
        if wrote:
            self._warn(f"{wrote}, which a CUDA graph would not do each time: it runs kernel by kernel.")
        self._graphs[key] = None if wrote else self._recorded(leaves, form, after[1])
        while len(self._graphs) > self.most:
            self._graphs.popitem(last=False)
        return found

    def _recorded(self, leaves: list[Any], form: Any, held: list[Any]) -> _Graph | None:
        with torch.inference_mode(False), torch.no_grad():  # later calls write where these are
            static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(static, form)
            try:
                replay, found = self._record(lambda: self.model(*args, **kwargs))
            except RuntimeError as error:
                self._warn("is not recorded as a CUDA graph and runs kernel by kernel: " + str(error).split("\n")[0])
                return None
        results, shape = pytree.tree_flatten(found)
        others = [one for one in results if not isinstance(one, (Tensor, *PLAIN))]
        if others:  # an object that the graph filled would be the same one in each result
            self._warn(
                f"gives a {type(others[0]).__name__}, and only tensors, numbers and words come out of a CUDA graph: it "
                "runs kernel by kernel. With use_cache=False a model of transformers gives no cache."
            )
            return None
        return _Graph([one for one in static if isinstance(one, Tensor)], replay, results, shape, held)

    def _warn(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            logger.warning("a forward of %s %s", type(self.model).__name__, why)


def _made(model: nn.Module, most: int, record: Recorder, devices: tuple[str, ...]) -> Graphs:
    return Graphs(model, most=most, record=record, devices=devices)


def _where(devices: tuple[str, ...]) -> tuple[Hashable, ...] | None:
    """The device and the stream that kernels are started on: graphs of two streams share no memory. None: they are
    being recorded by somebody else."""
    if "cuda" not in devices or not torch.cuda.is_available():
        return ()
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream


def _replayed(graph: _Graph, leaves: list[Any]) -> Any:
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    with torch.inference_mode(False), torch.no_grad():
        for mine, one in zip(graph.inputs, given, strict=True):
            mine.copy_(one)
        graph.replay()
    found = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in graph.leaves]
    return pytree.tree_unflatten(found, graph.form)


class _Before:
    """What a call may have written, as it was before; attributes are in the kind."""

    def __init__(self, model: nn.Module, leaves: Iterable[Any]) -> None:
        self.leaves = list(leaves)
        inputs = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.versions = [(one, _version(one)) for one in (*inputs, *model.parameters())]
        self.num_inputs = len(inputs)
        self.buffers = [(name, one, one.clone()) for name, one in model.named_buffers()]  # some kernels count nothing
        self.drawn = torch.get_rng_state(), random.getstate()

    def wrote(self, flattened: tuple[list[Any], Any], form: Any) -> str:
        """What; "": nothing."""
        now, form_now = flattened
        changed = [i for i, (one, version) in enumerate(self.versions) if _version(one) != version]
        alike = len(now) == len(self.leaves) and all(one is other for one, other in zip(now, self.leaves, strict=True))
        if not alike or form_now != form or (changed and changed[0] < self.num_inputs):
            return "writes into its arguments"
        if changed:
            return "writes into the model's parameters"
        for name, one, before in self.buffers:
            if one.layout is torch.strided and not bool(((one == before) | (one != one) & (before != before)).all()):
                return f"writes into the buffer {name}"
        if random.getstate() != self.drawn[1] or not torch.equal(torch.get_rng_state(), self.drawn[0]):
            return "draws random numbers on the host"
        return ""


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # those count nothing
