"""The side of a ZeRO optimizer that torch's users know: its groups and its states, which are not theirs to replace; and
what each step and everything beside it ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from zoo.shard.gradients import GradientPhase
from zoo.shard.partitioned import VIEWS, flat_tensors

if TYPE_CHECKING:
    from zoo.shard.gradients import BucketGradients
    from zoo.shard.runtime.hooks import Runtime
    from zoo.shard.sharded import ShardedModel
    from zoo.zero.update.alike import Outcome
    from zoo.zero.update.clipping import Clipping
    from zoo.zero.update.loss_scale import LossScaler

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
        made: Any = torch.tensor(value).as_subclass(StateNumber)
        made._zoo_place = parameter, key
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Plain tensors of what is computed; a write raises ValueError."""
        if func in VIEWS and isinstance(args[0], cls):
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
        return found

    def refuse_write(self) -> NoReturn:
        """Say what was written to, and what to do instead."""
        parameter, key = self._zoo_place  # type: ignore[attr-defined]
        _refuse(f"a write to optimizer.state[p][{key!r}]", parameter, key)


def _refuse(use: str, key: object, state: str) -> NoReturn:
    name = getattr(key, "_zoo_name", None)
    of = f" of {name!r}" if name is not None else ""
    raise ValueError(
        f"{use}{of}: states of a ZeRO optimizer lie in flat buffers, which ranks may split. "
        f"{_INSTEAD.format(state=state)}"
    )


class OuterOptimizer(torch.optim.Optimizer):
    """Takes its groups once, from :meth:`seal` on, and shows the states of the optimizer that it wraps.

    Attributes:
        num_updates: that all ranks have made together; of a state that was loaded, at least its own.
        outcome: of the latest step, while nobody has read it; else None.
        sharded: the model. runtime: what gathers, releases and reduces. clipping: what a step multiplies by.
    """

    num_updates: int
    outcome: Outcome | None = None
    sharded: ShardedModel
    runtime: Runtime
    clipping: Clipping
    _scaler: LossScaler | None
    _gradients: list[BucketGradients]
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
        super().add_param_group(param_group)

    def check_groups(self) -> None:
        """Raise ValueError if somebody has added or removed groups, or parameters of one."""
        groups, lists = self.param_groups, self._lists
        if len(groups) != len(lists):
            raise ValueError(
                f"param_groups has {len(groups)} groups, and had {len(lists)} at construction, when all of them were "
                "laid out. Give the groups to a new optimizer (params=...); to leave one out for a while set its "
                "lr=0.0 and weight_decay=0.0."
            )
        for index, (group, (members, count)) in enumerate(zip(groups, lists, strict=True)):
            now = group.get("params")
            if now is not members or len(members) != count:
                self._check_members(index, now)

    def _check_members(self, index: int, now: Any) -> None:
        before = self._members[index]
        here = list(now) if isinstance(now, (list, tuple)) else []
        if len(here) == len(before) and all(a is b for a, b in zip(here, before, strict=True)):
            return
        kept, known = {id(p) for p in here}, {id(p) for p in before}
        gone = [cast("Any", p)._zoo_name for p in before if id(p) not in kept]
        new = [getattr(p, "_zoo_name", f"a {type(p).__name__}") for p in here if id(p) not in known]
        told = [
            f"{', '.join(map(repr, names[:5]))} {what}"
            for names, what in ((gone, "taken out"), (new, "added"))
            if names
        ]
        raise ValueError(
            f"param_groups[{index}]['params'] was changed ({'; '.join(told) or 'another order'}); parameters are laid "
            "out in groups at construction. Put the list back, give the groups to a new optimizer (params=...), or "
            "leave parameters out for a while by the options of a group of their own (lr=0.0, weight_decay=0.0)."
        )

    # What each step asks ---------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ValueError after :meth:`~zoo.zero.ZeroOptimizer.close`."""
        if self.sharded.closed:
            raise ValueError("this optimizer was closed: the model is an ordinary one again. Construct a new one.")

    def read_outcome(self) -> None:
        """Wait for what the latest step came to, where it has not waited itself: the norm and the tally.

        What follows from them happens here: the loss scale moves, and gradients that were kept get the new one.
        Everything that needs it calls this; a second call does nothing. Starts no collective.
        """
        outcome, self.outcome = self.outcome, None
        if outcome is not None:
            if not self.clipping.learn(outcome) and outcome.made:
                self.num_updates -= 1  # it was counted before that was known
            self.clipping.rescale()
            self.runtime.backward.scale = self.loss_scale

    @property
    def loss_scale(self) -> float:
        """The factor :meth:`~zoo.zero.ZeroOptimizer.backward` multiplies the loss by; 1.0 without loss scaling."""
        if self._scaler is None:
            return 1.0
        self.read_outcome()
        return self._scaler.scale

    def _has_gradients(self) -> bool:
        """There is something to step with; what was dropped one by one counts as zero then."""
        for gradients in self._gradients:
            gradients.check_strays()
        here = self.runtime.reduced and any(g.reduced for g in self._gradients)
        if not self.sharded.on_any_layer(here):
            self.runtime.reduced = False
            return False
        for gradients in self._gradients:
            gradients.make_zero()
        return True

    def _settle(self) -> None:
        if self.runtime.unreduced and not any(g.phase is GradientPhase.ACCUMULATING for g in self._gradients):
            self.runtime.unreduced = False  # the model's zero_grad() dropped it all
        self.sharded.reduce()
