"""In which dtypes a model uses its parameters: what it casts before anything reads it can be cast before it travels."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.compile.capture import CASTS, is_view
from zoo.shard.placement.precision import COMPUTES


def use_dtypes(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, torch.dtype]:
    """By name, the dtype of fewer bytes to which everything that reads a parameter casts it first.

    Parameters that something reads otherwise, or in two dtypes, are left out; ``Precision(gather=...)`` takes the
    others. The forward runs once without values, in the autocast context of the caller::

        with torch.autocast("cuda", torch.bfloat16):
            found = use_dtypes(model, tokens)
        optimizer = ZeroOptimizer(model, stage=3, precision=Precision(gather=found))

    Raises:
        ValueError: parameters have no values here: they are partitioned already; or the forward asks for a value.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    from zoo.shard.buckets import bucket_of

    named = dict(model.named_parameters(remove_duplicate=False))
    taken = next((name for name, p in named.items() if bucket_of(p) is not None), None)
    if taken is not None:
        raise ValueError(
            f"use_dtypes() of a model whose parameter {taken!r} is split: call it before the optimizer is made."
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    watch = _Uses()
    with torch.no_grad(), mode:
        given, structure = pytree.tree_flatten((args, kwargs))
        given = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in given]
        fakes = {id(p): mode.from_tensor(p) for p in named.values()}
        values: dict[str, torch.Tensor] = {name: fakes[id(p)] for name, p in named.items()}
        values |= {name: mode.from_tensor(b) for name, b in model.named_buffers(remove_duplicate=False)}
        for fake, names in _by_fake(fakes, named):
            watch.follow(fake, names)
        args, kwargs = pytree.tree_unflatten(given, structure)
        try:
            with watch, _left_as_it_was(model):
                torch.func.functional_call(model, values, args, kwargs, tie_weights=False)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"use_dtypes() runs the forward of {type(model).__name__} without values, and it asks for one (by "
                f"{error}). Name the parameters that it casts: Precision(gather={{name: torch.bfloat16}})."
            ) from error
    return {name: dtype for name, (dtype, *more) in watch.uses.items() if dtype is not None and not more}


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """What a forward leaves in its modules (a table that is made once) has no values: it goes again."""
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    inside = [value for _, found in attributes for value in found.values() if type(value) in (dict, list, set)]
    contents = [(value, value.copy()) for value in inside]
    try:
        yield
    finally:
        for now, before in (*attributes, *contents):
            now.clear()
            (now.extend if isinstance(now, list) else now.update)(before)


def _by_fake(fakes: dict[int, Any], named: dict[str, nn.Parameter]) -> list[tuple[Any, list[str]]]:
    return [(fake, [name for name, p in named.items() if id(p) == key]) for key, fake in fakes.items()]


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what reads each parameter: a cast to which dtype, or (None) something else."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: dict[str, set[torch.dtype | None]] = defaultdict(set)
        self._names: dict[int, list[str]] = {}
        self._kept: list[Any] = []  # so that no other tensor gets their number

    def follow(self, value: torch.Tensor, names: list[str]) -> None:
        """``value`` is memory of these parameters."""
        self._names[id(value)] = names
        self._kept.append(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # it asks where something is
            return out
        for value in pytree.tree_leaves((args, kwargs)):
            names = self._names.get(id(value)) if isinstance(value, torch.Tensor) else None
            if names is None:
                continue
            if func in CASTS and isinstance(out, torch.Tensor):
                fewer = out.dtype in COMPUTES and out.dtype.itemsize < value.dtype.itemsize
                for name in names:
                    self.uses[name].add(out.dtype if fewer else None)
            elif is_view(func):
                for made in pytree.tree_leaves(out):
                    if isinstance(made, torch.Tensor):
                        self.follow(made, names)
            else:
                for name in names:
                    self.uses[name].add(None)
        return out
