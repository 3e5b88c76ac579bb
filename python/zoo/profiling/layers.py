"""What each of a chain of layers costs, measured: its time, or the memory that it keeps for its backward."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["check_options", "measure_layers"]


def measure_layers(
    layers: Sequence[Any], sample: Any, *, what: Literal["time", "memory"] = "time", repeats: int = 3,
    in_flight: int = 1, device: torch.device | str | None = None, build: Callable[[Any], Any] | None = None,
) -> list[float]:  # fmt: skip
    """One number for each layer: seconds, or bytes.

    ``sample`` goes through all layers, each on the output of the one before; it, the layers' buffers and the state of
    random numbers stay as they are.

    time: median seconds of forward and backward, after one turn that does not count. The backward is that of the sum of
    what the layer returns, to its input and its parameters.
    memory: parameters_bytes + in_flight · activations_bytes. Activations are the tensors that autograd keeps for the
    backward, whole storages, without parameters; one that several layers keep (an output that its layer keeps, and that
    the next one keeps as its input) counts at the first of them. Memory of the backward itself does not count.

    Args:
        layers: each is called with what the one before returned: a tensor, or tuples, lists and dicts of such. One with
            ``parameters()``, or with a ``module`` that has them, is measured with these.
        repeats: turns that count, for time.
        in_flight: how often activations are kept at the same time, for memory.
        device: whose work is waited for, and whose random numbers come back; that of the sample's first tensor by
            default.
        build: makes of an entry of ``layers`` what is called, when its turn comes; it is dropped after that.

    Raises:
        ValueError: an option that there is not. RuntimeError: a layer failed; it says which.
    """
    check_options(what, repeats, in_flight)
    first = next(iter(_tensors(sample)), None)
    where = torch.device(device) if device is not None else torch.device("cpu") if first is None else first.device
    seen: dict[int, Any] = {}
    found = []
    x = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), sample)  # a layer may change it
    devices = [where.index or 0] if where.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        for number, layer in enumerate(layers):
            try:
                call = layer if build is None else build(layer)
                with _buffers(call):
                    if what == "time":
                        value, x = _seconds(call, x, number, repeats, where)
                    else:
                        value, x = _bytes(call, x, number, in_flight, seen)
            except Exception as error:
                raise RuntimeError(f"layer {number} failed while it was measured: {error}") from error
            found.append(value)
    return found


def check_options(what: str, repeats: int, in_flight: int) -> None:
    """Of :func:`measure_layers`: raise ValueError for one that there is not."""
    if what not in ("time", "memory"):
        raise ValueError(f"measure got what={what!r}; allowed are 'time' and 'memory'.")
    if repeats < 1 or in_flight < 1:
        raise ValueError(f"measure got repeats={repeats} and in_flight={in_flight}; each is at least 1.")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _parameters(call: Any) -> list[nn.Parameter]:
    module = call if hasattr(call, "parameters") else getattr(call, "module", None)
    return list({id(p): p for p in module.parameters()}.values()) if module is not None else []


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
    inputs: list[torch.Tensor] = []

    def given(tensor: torch.Tensor) -> torch.Tensor:
        alone = tensor.detach().clone() if copied else tensor.detach()
        if number == 0 or not (alone.is_floating_point() or alone.is_complex()):
            return alone
        inputs.append(alone.requires_grad_())
        return _Same.apply(alone)  # type: ignore[no-any-return]

    return pytree.tree_map_only(torch.Tensor, given, x), inputs


@contextlib.contextmanager
def _buffers(call: Any) -> Iterator[None]:
    """What a layer counts beside (a BatchNorm's means) is afterwards what it was before."""
    module = call if hasattr(call, "buffers") else getattr(call, "module", None)
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()] if module is not None else []
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def _backward(out: Any, inputs: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]) -> None:
    ends = [t for t in _tensors(out) if t.requires_grad]
    leaves = [*inputs, *(p for p in parameters if p.requires_grad)]
    if ends and leaves:
        torch.autograd.grad(ends, leaves, [torch.ones_like(t) for t in ends], allow_unused=True)


def _seconds(call: Any, x: Any, number: int, repeats: int, device: torch.device) -> tuple[float, Any]:
    parameters = _parameters(call)
    times = []
    out: Any = None
    for _ in range(repeats + 1):
        given, inputs = _entering(x, number, copied=True)
        _wait(device)
        begun = time.perf_counter()
        out = call(given)
        _backward(out, inputs, parameters)
        _wait(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:]), out


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bytes(call: Any, x: Any, number: int, in_flight: int, seen: dict[int, Any]) -> tuple[float, Any]:
    parameters = _parameters(call)
    own = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, torch.UntypedStorage] = {}
    given, _ = _entering(x, number, copied=False)
    with _keeping(kept):
        out = call(given)
    activations = sum(s.nbytes() for at, s in kept.items() if at not in own and at not in seen)
    seen.update(kept)  # alive, so that no other gets its address
    return float(sum(p.nbytes for p in parameters) + in_flight * activations), out


@contextlib.contextmanager
def _keeping(kept: dict[int, torch.UntypedStorage]) -> Iterator[None]:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
