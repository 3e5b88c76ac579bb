"""The side of a ZeRO optimizer that torch's users know: its groups and its states, which are not theirs to replace."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

import torch

from zoo.shard.partitioned import VIEWS, flat_tensors

_DATA: Any = torch.Tensor.data  # the C level attribute beneath the property
Look = Callable[[Any], tuple[Sequence[str], Mapping[str, float]]]
_INSTEAD = (
    "Read and write states by parameter: safe_get_full_optimizer_state(p, {state!r}), "
    "safe_set_full_optimizer_state(p, value, {state!r}) of zoo.zero; to begin anew construct a new optimizer."
)


class ParameterStates(MutableMapping[torch.Tensor, Any]):
    """The states of each trainable parameter, by its name: which there are, and numbers such as "step".

    They are there before the first step too, as zeros that take no memory. What is split over ranks has no value on one
    of them alone: see :class:`StatesOfParameter`. Nothing can be set.

    Args:
        look: gives for a parameter the names of its states and, by name, the numbers that this rank knows.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], look: Look) -> None:
        self._parameters, self._look = {id(p): p for p in parameters}, look

    def __getitem__(self, key: torch.Tensor) -> StatesOfParameter:
        if id(key) not in self._parameters:
            raise KeyError(getattr(key, "_zoo_name", type(key).__name__))
        return StatesOfParameter(key, *self._look(key))

    def __contains__(self, key: object) -> bool:
        return id(key) in self._parameters

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._parameters.values())

    def __len__(self) -> int:
        return len(self._parameters)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} parameters)"

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        self.refuse("optimizer.state[p] = ...", key)

    def __delitem__(self, key: torch.Tensor) -> None:
        self.refuse("del optimizer.state[p]", key)

    def pop(self, key: torch.Tensor, *default: Any) -> NoReturn:
        """Refused."""
        self.refuse("optimizer.state.pop(p)", key)

    def popitem(self) -> NoReturn:
        """Refused."""
        self.refuse("optimizer.state.popitem()")

    def clear(self) -> NoReturn:
        """Refused."""
        self.refuse("optimizer.state.clear()")

    def refuse(self, use: str, key: object = None) -> NoReturn:
        """Say what to do instead, with the name of a state that there is."""
        looked = key if id(key) in self._parameters else next(iter(self), None)
        names, numbers = self._look(looked) if looked is not None else ((), {})
        _refuse(use, key, next((name for name in names if name not in numbers and name != "step"), "exp_avg"))


class StatesOfParameter(MutableMapping[str, Any]):
    """``optimizer.state[p]``: the names of the states of one parameter; values of those that are numbers.

    A tensor is in flat buffers, in parts that other ranks may have; asking for it here is refused, and the message says
    what gathers it. So is whatever would write, numbers too.
    """

    def __init__(self, parameter: torch.Tensor, names: Sequence[str], numbers: Mapping[str, float]) -> None:
        self._parameter, self._names, self._numbers = parameter, tuple(names), numbers

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._names:
            raise KeyError(key)
        if key not in self._numbers:
            _refuse(f"optimizer.state[p][{key!r}]", self._parameter, key)
        return StateNumber.of(float(self._numbers[key]), self._parameter, key)

    def __setitem__(self, key: str, value: Any) -> None:
        _refuse(f"optimizer.state[p][{key!r}] = ...", self._parameter, key)

    def __delitem__(self, key: str) -> None:
        _refuse(f"del optimizer.state[p][{key!r}]", self._parameter, key)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._names)})"


class StateNumber(torch.Tensor):
    """A number among the states of a parameter, () fp32: to be read; a write to it would be lost, and is refused."""

    @staticmethod
    def of(value: float, parameter: torch.Tensor, key: str) -> StateNumber:
        """That of ``parameter`` by the name ``key``."""
        with torch.inference_mode(False):  # else nothing would count writes
            return StateNumber._at(torch.tensor(value), (parameter, key))

    @staticmethod
    def _at(tensor: torch.Tensor, place: tuple[torch.Tensor, str]) -> StateNumber:
        made: Any = tensor.as_subclass(StateNumber)
        made._zoo_place = place
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Plain tensors of what is computed; a write raises ValueError, to a view as well."""
        if func in VIEWS and args and isinstance(args[0], cls):
            return args[0]
        if func == _DATA.__set__ and isinstance(args[0], cls):
            args[0].refuse_write()
        with torch._C.DisableTorchFunctionSubclass():
            numbers = [t for t in flat_tensors((args, kwargs or {})) if isinstance(t, cls)]
            before = [t._version for t in numbers]
            plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.as_subclass(torch.Tensor), (args, kwargs or {}))
            found = func(*plain[0], **plain[1])
            for tensor, version in zip(numbers, before, strict=True):
                if tensor._version != version:
                    tensor.refuse_write()
            places = {t.data_ptr(): t._zoo_place for t in numbers}  # type: ignore[attr-defined]
            return torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda t: cls._at(t, places[t.data_ptr()]) if _starts_in(t, places) else t, found
            )

    def refuse_write(self) -> NoReturn:
        """Say what was written to, and what to do instead."""
        parameter, key = self._zoo_place  # type: ignore[attr-defined]
        _refuse(f"a write to optimizer.state[p][{key!r}]", parameter, key)


def _starts_in(tensor: torch.Tensor, places: Mapping[int, object]) -> bool:
    """Whether the memory of a plain tensor begins at one of these addresses."""
    try:
        return type(tensor) is torch.Tensor and tensor.data_ptr() in places
    except (RuntimeError, NotImplementedError):  # sparse, or of torch.func: it has none
        return False


def _refuse(use: str, key: object, state: str) -> NoReturn:
    name = getattr(key, "_zoo_name", None)
    of = f" of {name!r}" if name is not None else ""
    raise ValueError(
        f"{use}{of}: states of a ZeRO optimizer lie in flat buffers, which ranks may split. "
        f"{_INSTEAD.format(state=state)}"
    )


class OuterOptimizer(torch.optim.Optimizer):
    """Takes its groups once, from :meth:`seal` on, and shows the states of the optimizer that it wraps."""

    _kept: ParameterStates | None = None
    _lists: tuple[tuple[list[torch.Tensor], int], ...] = ()

    def seal(self, groups: Sequence[dict[str, Any]], inner: torch.optim.Optimizer, look: Look) -> None:
        """Be the optimizer of these groups, with the defaults of ``inner``; ``look``: of :class:`ParameterStates`."""
        super().__init__(groups, inner.defaults)
        self._kept = ParameterStates(
            [p for g in self.param_groups for p in g["params"] if p._zoo_bucket.spec.trainable], look
        )
        self._lists = tuple((group["params"], len(group["params"])) for group in self.param_groups)
        self._members = [list(group["params"]) for group in self.param_groups]

    @property
    def state(self) -> Any:
        """Which states each parameter has; see :class:`ParameterStates`."""
        return {} if self._kept is None else self._kept

    @state.setter
    def state(self, value: Any) -> None:
        if self._kept is not None:  # torch's constructor makes an empty one
            self._kept.refuse("optimizer.state = ...")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only construction adds groups: buckets are laid out once."""
        if self._kept is not None:
            raise NotImplementedError("a ZeRO optimizer takes all its parameter groups at construction (params=...).")
        add_group(self, param_group)


def add_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """``torch.optim.Optimizer.add_param_group`` without an import of ``torch._dynamo``: as zoo.optim.base has it,
    which nothing here may import."""
    method: Any = torch.optim.Optimizer.add_param_group
    if "torch._dynamo" not in sys.modules and method.__globals__ is vars(torch._compile):
        method = method.__wrapped__
    method(optimizer, group)
