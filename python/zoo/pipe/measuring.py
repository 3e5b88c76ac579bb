"""What each layer costs, measured: weights by which layers are spread over stages."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from zoo.pipe.module import PipelineModule
from zoo.pipe.specs import LayerSpec, TiedCall, TiedLayerSpec
from zoo.pipe.trees import flatten, unflatten

__all__ = ["measure"]


def measure(
    layers: Iterable[Any] | PipelineModule, sample: Any, *, what: Literal["time", "memory"] = "time",
    repeats: int = 3, in_flight: int = 1, device: torch.device | str | None = None,
) -> list[float]:  # fmt: skip
    """One weight for each layer, for ``PipelineModule(layers, partition_method=weights)``.

    ::

        weights = measure(layers, sample_inputs)
        model = PipelineModule(layers, num_stages=4, partition_method=weights)

    ``sample`` goes through all layers, each on the output of the one before; it, buffers and the state of random
    numbers stay as they are. Rank 0 of the job measures and tells all
    others, since every rank has to cut at the same places: a collective where there is a process group. A layer that is
    a spec is built on rank 0 alone, and dropped after it was measured.

    time: median seconds of forward and backward, after one turn that does not count. The backward is that of the sum of
    what the layer returns, to its input and its parameters.
    memory: parameters_bytes + in_flight · activations_bytes. Activations are the tensors that autograd keeps for the
    backward, whole storages, without parameters; one that several layers keep (an output that its layer keeps, and that
    the next one keeps as its input) counts at the first of them. Memory of the backward itself does not count.

    Args:
        layers: what PipelineModule takes, or a PipelineModule of one stage (``split(model, num_stages=1, ...)``).
        sample: inputs of a micro-batch, without labels, on the device where layers are measured.
        repeats: turns that count, for time.
        in_flight: micro-batches whose activations are kept at the same time, for memory: with 1F1B on P ranks at most
            P on the first one.
        device: where specs are built; that of the first tensor in ``sample`` by default.

    Raises:
        ValueError: an option that there is not, or a module of several stages.
    """
    if what not in ("time", "memory"):
        raise ValueError(f"measure got what={what!r}; allowed are 'time' and 'memory'.")
    if repeats < 1 or in_flight < 1:
        raise ValueError(f"measure got repeats={repeats} and in_flight={in_flight}; each is at least 1.")
    calls = _calls(layers)
    kept = _buffers(layers if isinstance(layers, PipelineModule) else nn.ModuleList(
        layer for layer in calls if isinstance(layer, nn.Module)
    ))  # fmt: skip
    tensors, _ = flatten(sample, "the sample")
    where = torch.device(device) if device is not None else tensors[0].device if tensors else torch.device("cpu")
    if not dist.is_initialized():
        with kept:
            return _measured(calls, sample, what, repeats, in_flight, where)
    from zoo.comm import Communicator

    comm = Communicator()
    values, error = [0.0] * len(calls), None
    if comm.rank == 0:
        try:
            with kept:
                values = _measured(calls, sample, what, repeats, in_flight, where)
        except Exception as raised:
            values, error = [-1.0] * len(calls), raised
    told = torch.tensor(values, dtype=torch.float64, device=where)
    comm.broadcast(told).wait()
    if error is not None:
        raise error
    if bool((told < 0).any()):
        raise RuntimeError("measure failed on rank 0; see there why.")
    return told.tolist()


def _calls(layers: Iterable[Any] | PipelineModule) -> list[Any]:
    if not isinstance(layers, PipelineModule):
        return list(layers)
    if layers.num_stages != 1:
        raise ValueError(f"measure got a PipelineModule of {layers.num_stages} stages; it takes one that has them all.")
    return [layers.layer_call(number) for number in range(layers.num_layers)]


def _measured(
    layers: Sequence[Any], sample: Any, what: str, repeats: int, in_flight: int, device: torch.device
) -> list[float]:  # fmt: skip
    tied: dict[str, nn.Module] = {}
    seen: dict[int, Any] = {}
    found = []
    tensors, outline = flatten(sample, "the sample")
    x = unflatten([t.detach().clone() for t in tensors], outline)  # a layer may change it
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        for number, layer in enumerate(layers):
            call = _built(layer, device, tied)
            try:
                if what == "time":
                    value, x = _seconds(call, x, number, repeats, device)
                else:
                    value, x = _bytes(call, x, number, in_flight, seen)
            except Exception as error:
                raise RuntimeError(f"layer {number} failed while it was measured: {error}") from error
            found.append(value)
    return found


def _built(layer: Any, device: torch.device, tied: dict[str, nn.Module]) -> Callable[[Any], Any]:
    if not isinstance(layer, LayerSpec):
        return layer  # type: ignore[no-any-return]
    with device:
        if not isinstance(layer, TiedLayerSpec):
            return layer.build()
        if layer.key not in tied:
            tied[layer.key] = layer.build()
    return TiedCall(tied[layer.key], layer.forward_fn)


def _parameters(call: Any) -> list[nn.Parameter]:
    module = call if hasattr(call, "parameters") else getattr(call, "module", None)
    return list(module.parameters()) if module is not None else []


class _Same(torch.autograd.Function):
    """A tensor in the same memory that is no leaf, so that a layer may change it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0]


def _entering(x: Any, number: int, *, copied: bool) -> tuple[Any, list[torch.Tensor]]:
    """The inputs, cut off from what made them, and those that get gradients. Copied: of each turn its own."""
    tensors, outline = flatten(x, f"the input of layer {number}")
    tensors = [
        (t.detach().clone() if copied else t.detach())
        .requires_grad_(number > 0 and (t.is_floating_point() or t.is_complex()))
        for t in tensors
    ]  # fmt: skip
    given = [_Same.apply(t) if t.requires_grad else t for t in tensors]
    return unflatten(given, outline), [t for t in tensors if t.requires_grad]


@contextlib.contextmanager
def _buffers(module: nn.Module) -> Iterator[None]:
    """What layers count beside (a BatchNorm's means) is afterwards what it was before."""
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def _backward(out: Any, number: int, inputs: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]) -> None:
    tensors, _ = flatten(out, f"the output of layer {number}")
    ends = [t for t in tensors if t.requires_grad]
    leaves = [*inputs, *(p for p in parameters if p.requires_grad)]
    if ends and leaves:
        torch.autograd.grad(ends, leaves, [torch.ones_like(t) for t in ends], allow_unused=True)


def _seconds(call: Any, x: Any, number: int, repeats: int, device: torch.device) -> tuple[float, Any]:
    parameters = list({id(p): p for p in _parameters(call)}.values())
    times = []
    out: Any = None
    for _ in range(repeats + 1):
        given, inputs = _entering(x, number, copied=True)
        _wait(device)
        begun = time.perf_counter()
        out = call(given)
        _backward(out, number, inputs, parameters)
        _wait(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:]), out


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bytes(call: Any, x: Any, number: int, in_flight: int, seen: dict[int, Any]) -> tuple[float, Any]:
    parameters = {id(p): p for p in _parameters(call)}
    own = {p.untyped_storage().data_ptr() for p in parameters.values()}
    kept: dict[int, torch.UntypedStorage] = {}
    given, _ = _entering(x, number, copied=False)
    with _keeping(kept):
        out = call(given)
    activations = sum(s.nbytes() for at, s in kept.items() if at not in own and at not in seen)
    seen.update(kept)  # alive, so that no other gets its address
    return float(sum(p.nbytes for p in parameters.values()) + in_flight * activations), out


@contextlib.contextmanager
def _keeping(kept: dict[int, torch.UntypedStorage]) -> Iterator[None]:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
