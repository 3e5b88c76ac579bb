"""What an optimizer is like, found out by trying it on small tensors."""

from __future__ import annotations

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
