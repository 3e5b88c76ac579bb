"""Which unit made the first value that is not finite: the micro-batches of a step once more, looking at each output."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from zoo.engine import Engine
from zoo.parts import own_hook
from zoo.parts.hooks import BoundHook
from zoo.shard.runtime.outputs import tensors_in


@dataclass(frozen=True)
class Kept:
    """What a micro-batch began with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: tuple[Any, ...]


class Recorder:
    """Keeps the inputs and the random state of each micro-batch until its step is known to be finite; inputs are not
    copied.

    Args:
        engine: whose module it watches until :meth:`close`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: dict[int, list[Kept]] = {}
        self._hook = engine.module.register_forward_pre_hook(
            own_hook(BoundHook(self._begin)), prepend=True, with_kwargs=True
        )

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        self._kept.setdefault(self._engine.global_steps + 1, []).append(Kept(args, kwargs, _random_state()))

    def forget(self, step: int) -> None:
        """This step, and those before it, are finite."""
        self._kept = {number: kept for number, kept in self._kept.items() if number > step}

    def of(self, step: int) -> list[Kept]:
        """The micro-batches of a step."""
        return list(self._kept.get(step, ()))

    def close(self) -> None:
        """Watch no longer."""
        self._hook.remove()
        self._kept.clear()


def find(recorder: Recorder, engine: Engine, step: int) -> str:
    """A sentence about the first value that is not finite in a step, of all ranks. A collective: all run their
    micro-batches.

    The model is as it was before the step, which was skipped. Each micro-batch runs forward again with its own random
    numbers; a unit is blamed whose outputs are not finite and whose inputs are.
    """
    before = _random_state()
    kept = recorder.of(step)
    recorder.close()
    found = ""
    try:
        for number, micro in enumerate(kept):
            _set_random_state(micro.random)
            said = _look(engine.module, micro)
            if said and not found:
                found = f"micro-batch {number + 1} of {len(kept)}: {said}"
    finally:
        _set_random_state(before)
    everyone = engine.comm.all_gather_object(found)
    blamed = [f"rank {rank}, {said}" for rank, said in enumerate(everyone) if said]
    if not blamed:
        return "run again, the forward of every micro-batch is finite on all ranks: the gradient is not."
    more = f" (and {len(blamed) - 1} more ranks)" if len(blamed) > 1 else ""
    return f"run again with the same random numbers: {blamed[0]}{more}"


def _look(module: nn.Module, micro: Kept) -> str:
    """What is wrong first in a forward, "" if nothing is."""
    bad_inputs = [index for index, tensor in enumerate(tensors_in((micro.args, micro.kwargs))) if not _finite(tensor)]
    said = [f"the batch itself has values that are not finite (tensor {bad_inputs[0]})"] if bad_inputs else []
    names = {child: name or type(module).__name__ for name, child in module.named_modules()}

    def ahead(child: nn.Module, args: Any) -> None:  # parameters are whole now, at stage 3 too
        for own, p in () if said else child.named_parameters(recurse=False):
            if not said and not _finite(p):
                said.append(f"the parameter {names[child]}.{own} is not finite")

    def after(child: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # Children end before their parents, so the first to come here is the innermost one.
        if not said and not all(map(_finite, tensors_in(output))):
            said.append(_blame(names[child], type(child).__name__, args, kwargs))

    hooks: list[Any] = [child.register_forward_pre_hook(ahead) for child in names]
    hooks += [child.register_forward_hook(after, with_kwargs=True) for child in names]
    try:
        with torch.no_grad():
            module(*micro.args, **micro.kwargs)  # with a bad batch too: at stage 3 other ranks need this one
    finally:
        for hook in hooks:
            hook.remove()
    return said[0] if said else ""


def _blame(name: str, kind: str, args: Any, kwargs: Any) -> str:
    inputs = list(_own(args, kwargs))
    came = "its inputs are finite" if all(map(_finite, inputs)) else "and so are its inputs"
    shown = f", up to {max(float(t.detach().abs().max()) for t in inputs):.3g}" if inputs else ""
    return f"the first output that is not finite is that of {name!r} ({kind}); {came}{shown}"


def _own(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for tensor in tensors_in((args, kwargs)):
        if tensor.is_floating_point() and tensor.numel():
            yield tensor


def _finite(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor.detach()).all())


def _random_state() -> tuple[Any, ...]:
    # As the generators give them: this is asked for in every micro-batch.
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return torch.get_rng_state(), random.getstate(), np.random.get_state(), cuda


def _set_random_state(state: tuple[Any, ...]) -> None:
    own, python, numpy, cuda = state
    torch.set_rng_state(own)
    random.setstate(python)
    np.random.set_state(numpy)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
