"""CUDA graphs of a model's forward: the kernels of a call are recorded once and started together ever after."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

logger = logging.getLogger(__name__)
Tensor = torch.Tensor
Recorder = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Of a function without arguments: what repeats it, and its result, which a repetition writes anew."""
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class _Graph(NamedTuple):
    """inputs: the tensors that the graph reads. replay: runs it. leaves: what it gave; tensors are written again."""

    inputs: list[Tensor]
    replay: Callable[[], None]
    leaves: list[Any]
    form: Any


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

    A kind is: the shapes, strides, dtypes and devices of the tensors, all other values, whether the model trains, and
    where its parameters and buffers are. Their values are read anew by each call, so that weights may change in place.
    Results are tensors of their own: a later call does not write into an earlier one's.

    As they are, unrecorded, run calls with something else than tensors, numbers and words, such as a cache; calls on
    tensors of another device than CUDA's; and a kind whose recording failed, which is logged once with the reason.

    Args:
        model: a module. It must do the same for all values of its tensors: what it decides in Python is recorded too.
        most: kinds that are kept; the one used least lately goes, with its memory.
        record: how a function is recorded; None: as a CUDA graph.
        devices: the types of device whose tensors are recorded.
    """

    def __init__(
        self, model: nn.Module, *, most: int = 8, record: Recorder | None = None, devices: tuple[str, ...] = ("cuda",)
    ) -> None:
        if most < 1:
            raise ValueError(f"most={most}; at least one kind of call has to be kept.")
        self.model, self.most, self.devices = model, most, devices
        self._record: Recorder = record_on_cuda if record is None else record
        self._graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()

    def __len__(self) -> int:
        """Kinds that are recorded."""
        return sum(graph is not None for graph in self._graphs.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        """Those of the copied model, which has recorded nothing yet."""
        model = copy.deepcopy(self.model, memo)
        return Graphs(model, most=self.most, record=self._record, devices=self.devices)

    def clear(self) -> None:
        """Forget all, and free their memory."""
        self._graphs.clear()

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        leaves, form = pytree.tree_flatten((args, kwargs))
        key = self._key(leaves, form)
        if key is None:
            return self.model(*args, **kwargs)
        if key not in self._graphs:
            self._graphs[key] = self._recorded(leaves, form)
            while len(self._graphs) > self.most:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        graph = self._graphs[key]
        if graph is None:
            return self.model(*args, **kwargs)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for mine, one in zip(graph.inputs, given, strict=True):
            mine.copy_(one)
        graph.replay()
        found = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in graph.leaves]
        return pytree.tree_unflatten(found, graph.form)

    def _key(self, leaves: list[Any], form: Any) -> Hashable | None:
        """The kind of this call; None: it runs as it is."""
        kinds: list[Hashable] = []
        tensors = 0
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if leaf.device.type not in self.devices or leaf.requires_grad:
                    return None
                kinds.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
                tensors += 1
            elif isinstance(leaf, PLAIN):
                kinds.append((type(leaf), leaf))
            else:
                return None
        if not tensors:
            return None
        casts = [(torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in self.devices]
        return (tuple(kinds), str(form), *casts, *self._state())

    def _state(self) -> tuple[Hashable, ...]:
        """What of the model is recorded with it. Modules are walked each time: one may have been replaced."""
        places: list[int] = []
        modes: list[bool] = []
        for module in self.model.modules():
            modes.append(module.training)
            for held in (module._parameters, module._buffers):
                places.extend(one.data_ptr() for one in held.values() if one is not None)
        return tuple(modes), tuple(places)

    def _recorded(self, leaves: list[Any], form: Any) -> _Graph | None:
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(static, form)
        try:
            replay, found = self._record(lambda: self.model(*args, **kwargs))
        except RuntimeError as error:
            logger.warning(
                "a forward of %s is not recorded as a CUDA graph and runs kernel by kernel: %s",
                type(self.model).__name__, str(error).split("\n")[0],
            )  # fmt: skip
            return None
        results, shape = pytree.tree_flatten(found)
        others = [one for one in results if not isinstance(one, (Tensor, *PLAIN))]
        if others:  # an object that the graph filled would be the same one in each result
            logger.warning(
                "a forward of %s gives a %s, and only tensors, numbers and words come out of a CUDA graph: it runs "
                "kernel by kernel. With use_cache=False a model of transformers gives no cache.",
                type(self.model).__name__, type(others[0]).__name__,
            )  # fmt: skip
            return None
        return _Graph([one for one in static if isinstance(one, Tensor)], replay, results, shape)
