"""What an optimizer is like, found out by trying it on small tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Keeps:
    """What an optimizer keeps of a tensor: states with one element for each of it, and bytes of all the others.

    ``numbers``: the names of those that are a single number.
    """

    states: dict[str, torch.dtype]
    scalar_bytes: int
    numbers: frozenset[str] = frozenset()

    @property
    def bytes_per_element(self) -> int:
        """Of the states."""
        return sum(dtype.itemsize for dtype in self.states.values())


def what_it_keeps(build: Callable[[list[torch.Tensor]], Any], dtype: torch.dtype) -> Keeps:
    """From one step on a matrix of ``dtype``."""
    tensor = torch.ones(2, 3, dtype=dtype).requires_grad_()
    optimizer = build([tensor])
    tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    entries = optimizer.state[tensor]
    kept = {k: v for k, v in entries.items() if isinstance(v, torch.Tensor)}
    whole = {k: v.dtype for k, v in kept.items() if v.shape == tensor.shape}
    numbers = {k for k, v in entries.items() if isinstance(v, (int, float)) or (k in kept and v.numel() == 1)}
    return Keeps(whole, sum(v.nbytes for k, v in kept.items() if k not in whole), frozenset(numbers))


def counts_calls(build: Callable[[list[torch.Tensor]], Any]) -> bool:
    """Whether a step changes numbers that the optimizer has as attributes: its update cannot be cut into several."""
    tensor = torch.ones(2).requires_grad_()
    optimizer = build([tensor])
    tensor.grad = torch.ones_like(tensor)
    before = _numbers_of(optimizer)
    optimizer.step()
    return _numbers_of(optimizer) != before


def takes_found_inf(build: Callable[[list[torch.Tensor]], Any], num_groups: int) -> bool:
    """Whether a step with the attribute ``found_inf`` at 1 changes nothing, and at 0 what a step without it changes.

    That is how torch.amp.GradScaler tells optimizers that say ``_step_supports_amp_scaling`` (torch's with fused=True,
    whose kernels look at it on the device). It is tried all the same: a class that is derived from one of them may do
    more in its step.

    Args:
        build: from a tensor for each group.
    """
    found = []
    for flags in ((None, None), (None, 0.0), (None, 0.0, 1.0)):
        tensors = [torch.linspace(1, 2, 3).requires_grad_() for _ in range(num_groups)]
        optimizer = build(tensors)
        old = "grad_scaler" in inspect.signature(optimizer.step).parameters  # an earlier way to tell them
        if old or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        for number, flag in enumerate(flags):
            for tensor in tensors:
                tensor.grad = torch.linspace(-1, 3, 3) * (number + 1)
            if flag is not None:
                optimizer.found_inf = torch.tensor(flag)
            try:
                optimizer.step()
            except Exception:  # whatever it says: it does not take it
                return False
            if flag is not None:
                del optimizer.found_inf
        found.append(_all_of(optimizer, tensors))
    return found[0] == found[1] == found[2]


def _all_of(optimizer: Any, tensors: list[torch.Tensor]) -> list[Any]:
    """Everything that a step may change, to be compared."""
    entries = [sorted(optimizer.state.get(t, {}).items()) for t in tensors]
    states = [[(k, v.tolist() if isinstance(v, torch.Tensor) else repr(v)) for k, v in found] for found in entries]
    options = [sorted((k, repr(v)) for k, v in g.items() if k != "params") for g in optimizer.param_groups]
    return [[t.tolist() for t in tensors], states, options, _numbers_of(optimizer)]


def _numbers_of(optimizer: Any) -> dict[str, float]:
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, (int, float))}


def check_elementwise(build: Callable[[list[torch.Tensor]], Any], name: str) -> None:
    """Raise NotImplementedError unless the optimizer updates every element by itself.

    Tries it: two small tensors are updated twice, whole and laid flat and cut elsewhere; the results must agree.
    """
    generator = torch.Generator().manual_seed(0)
    values, *grads = (torch.randn(24, generator=generator) for _ in range(3))
    results: list[torch.Tensor] = []
    for cuts, shape in (([12, 12], (3, 4)), ([7, 17], (-1,))):
        tensors = [part.clone().view(shape).requires_grad_() for part in torch.split(values, cuts)]
        if not results:
            optimizer = build(tensors)  # options that it refuses are not about flat tensors
        try:
            if results:
                optimizer = build(tensors)
            for grad in grads:
                for tensor, part in zip(tensors, torch.split(grad, cuts), strict=True):
                    tensor.grad = part.clone().view(shape)
                optimizer.step()
        except Exception as error:
            raise NotImplementedError(
                f"{name} cannot run under a ZeRO optimizer: a step on a flat tensor ended with {type(error).__name__}: "
                f"{error}. It must work element by element, without a closure."
            ) from error
        results.append(torch.cat([t.detach().flatten() for t in tensors]))
    if not torch.allclose(results[0], results[1], rtol=1e-6, atol=1e-7):
        raise NotImplementedError(
            f"{name} cannot run under a ZeRO optimizer: its update of an element depends on other elements of the "
            "tensor, which may be on other ranks. Use an elementwise one: SGD, Adam, AdamW, Adagrad, RMSprop, … or one "
            "that says needs_whole_tensors and takes parts=, as zoo.optim.Lamb and zoo.optim.Muon do."
        )
