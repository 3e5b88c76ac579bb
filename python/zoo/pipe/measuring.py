"""What each layer of a pipeline costs, measured: weights by which layers are spread over stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from zoo.pipe.module import PipelineModule
from zoo.pipe.specs import LayerSpec, TiedCall, TiedLayerSpec
from zoo.pipe.trees import flatten
from zoo.profiling.layers import check_options, measure_layers

__all__ = ["measure"]


def measure(
    layers: Iterable[Any] | PipelineModule, sample: Any, *, what: Literal["time", "memory"] = "time",
    repeats: int = 3, in_flight: int = 1, device: torch.device | str | None = None,
) -> list[float]:  # fmt: skip
    """One weight for each layer, for ``PipelineModule(layers, partition_method=weights)``.

    ::

        weights = measure(layers, sample_inputs)
        model = PipelineModule(layers, num_stages=4, partition_method=weights)

    What is measured, and how, :func:`zoo.profiling.measure_layers` says: it does this for any layers, and here for
    those of a pipeline. Rank 0 of the job measures and tells all others, since every rank has to cut at the same
    places: a collective where there is a process group. A layer that is a spec is built on rank 0 alone, and dropped
    after it was measured.

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
    check_options(what, repeats, in_flight)
    calls = _calls(layers)
    tensors, _ = flatten(sample, "the sample")
    where = torch.device(device) if device is not None else tensors[0].device if tensors else torch.device("cpu")

    def measured() -> list[float]:
        return measure_layers(
            calls, sample, what=what, repeats=repeats, in_flight=in_flight, device=where, build=_Build(where)
        )

    if not dist.is_initialized():
        return measured()
    from zoo.comm import Communicator

    comm = Communicator()
    values, error = [0.0] * len(calls), None
    if comm.rank == 0:
        try:
            values = measured()
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


class _Build:
    """Of an entry of the layers, what is measured. Entries with one key are one module."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tied: dict[str, nn.Module] = {}

    def __call__(self, layer: Any) -> _Layer:
        if not isinstance(layer, LayerSpec):
            return _Layer(layer)
        with self._device:
            if not isinstance(layer, TiedLayerSpec):
                return _Layer(layer.build())
            if layer.key not in self._tied:
                self._tied[layer.key] = layer.build()
        return _Layer(TiedCall(self._tied[layer.key], layer.forward_fn))


class _Layer:
    """A layer whose output could go to another stage, with the module that has its parameters."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self._call = call
        self.module = call if hasattr(call, "parameters") else getattr(call, "module", None)

    def __call__(self, x: Any) -> Any:
        out = self._call(x)
        flatten(out)
        return out
