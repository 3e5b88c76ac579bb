"""What all schedules share: their constructor, the count of steps, the optimizer's groups, and the state."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

if TYPE_CHECKING:
    from typing_extensions import Self

Rates = float | list[float]
"""One number, or one for each parameter group."""


class HasParamGroups(Protocol):
    """What a schedule needs of an optimizer: the list of its groups, each a dict with the key "lr"."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups; the schedule writes ``group["lr"]``."""


class Schedule:
    """A learning rate for each step k = 0, 1, 2, …: the optimizer's step number k + 1 is taken with ``rate(k, group)``.

    The rate of the first step is set when the schedule is built; :meth:`step`, called after each optimizer step, sets
    the next one. A subclass has a dataclass ``Config`` and defines :meth:`rate`, a pure function of k, so that resuming
    is nothing but setting k. It is built as ``Subclass(optimizer, first_option, ..., option=...)``, options being the
    fields of ``Config`` in their order, or by its name in the registry.

    Args:
        optimizer: of any kind that has ``param_groups``.
        last_batch_iteration: calls of :meth:`step` that were made before, less one; -1 begins anew. Groups then have
            the rate of that step. The rates that a schedule multiplies are ``group["initial_lr"]`` where there is one.
        options: of ``Config``.

    Attributes:
        config: the options.
        base_rates: the learning rates the groups had when the schedule was built; of one that the optimizer got later
            that which it had when the schedule first saw it.
        last_step: k of the rate that the groups have now.

    Raises:
        ValueError: options that cannot be.
    """

    Config: ClassVar[Any]
    per_group: ClassVar[tuple[str, ...]] = ()
    """Options that are a number, or a list with one for each group."""

    def __init__(self, optimizer: HasParamGroups, *options: Any, last_batch_iteration: int = -1, **named: Any) -> None:
        count = len(dataclasses.fields(self.Config))
        if len(options) == count + 1:
            *options, last_batch_iteration = options  # type: ignore[assignment]
        self._begin(optimizer, self.Config(*options, **named), last_batch_iteration)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "Config" in vars(cls) and "__init__" not in vars(cls):
            cls.__signature__ = _signature(cls.Config)  # type: ignore[attr-defined]

    @classmethod
    def from_config(cls, config: Any, *, optimizer: HasParamGroups) -> Self:
        """How the registry builds it; one with a constructor of its own as ``Subclass(config, optimizer=...)``."""
        if cls.__init__ is not Schedule.__init__:
            build: Any = cls
            return cast("Self", build(config, optimizer=optimizer))
        made = cls.__new__(cls)
        made._begin(optimizer, config, -1)
        return made

    def _begin(self, optimizer: HasParamGroups, config: Any, last_batch_iteration: int) -> None:
        if not isinstance(getattr(optimizer, "param_groups", None), Sequence):
            raise ValueError(
                f"{type(self).__name__} got a {type(optimizer).__name__} as its optimizer; give an object that has "
                "param_groups, as the optimizers of torch have."
            )
        if type(last_batch_iteration) is not int or last_batch_iteration < -1:
            raise ValueError(
                f"{type(self).__name__} got last_batch_iteration={last_batch_iteration!r}; -1 begins anew, and n >= 0 "
                "goes on after n + 1 steps."
            )
        self.optimizer, self.config = optimizer, config
        for key in self.per_group:
            check_groups(type(self).__name__, key, getattr(config, key), len(optimizer.param_groups))
        groups = optimizer.param_groups
        again = last_batch_iteration >= 0
        self.base_rates = [float(g.get("initial_lr", g["lr"]) if again else g["lr"]) for g in groups]
        self.last_step = last_batch_iteration + 1
        self.check_optimizer()
        self._apply()

    def check_optimizer(self) -> None:
        """For subclasses that need more of an optimizer than rates."""

    def rate(self, step: int, group: int) -> float:
        """The learning rate of step ``step`` (from 0) for parameter group number ``group``."""
        raise NotImplementedError(f"{type(self).__name__} defines no rate(step, group).")

    def values(self, step: int, group: int) -> dict[str, Any]:
        """Everything that the group gets for this step."""
        return {"lr": self.rate(step, group)}

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on to the rate of the next step, or of that after batch number ``last_batch_iteration`` (from 0)."""
        self.last_step = self.last_step + 1 if last_batch_iteration is None else last_batch_iteration + 1
        self._apply()

    @property
    def last_batch_iteration(self) -> int:
        """Calls of :meth:`step`, less one."""
        return self.last_step - 1

    def get_lr(self) -> list[float]:
        """The rate of each group at this step, by the formula."""
        self._take_up()
        return [self.rate(self.last_step, group) for group in range(len(self.optimizer.param_groups))]

    def get_last_lr(self) -> list[float]:
        """The rate of each group as it is now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """All there is to save: where the schedule stands and what it multiplies."""
        return {"last_step": self.last_step, "base_rates": list(self.base_rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; the groups get the rate of that step.

        ``{"last_batch_iteration": n}``, which other implementations save, is taken too.

        Raises:
            ValueError: the state is of an optimizer with another number of groups, or of another kind of schedule.
        """
        if set(state) == {"last_batch_iteration"}:
            if type(state["last_batch_iteration"]) is not int or state["last_batch_iteration"] < -1:
                raise ValueError(
                    f"{type(self).__name__} got a state with last_batch_iteration={state['last_batch_iteration']!r}; "
                    "it is -1 or more."
                )
            state = {"last_step": state["last_batch_iteration"] + 1, "base_rates": self.base_rates}
        if set(state) != {"last_step", "base_rates"}:
            raise ValueError(
                f"{type(self).__name__} got a state with the keys {sorted(state)}; it wants base_rates and last_step, "
                "as its own state_dict() gives them."
            )
        self._take_up()
        if len(state["base_rates"]) != len(self.base_rates):
            raise ValueError(
                f"{type(self).__name__} got the state of {len(state['base_rates'])} parameter groups; the optimizer "
                f"has {len(self.base_rates)}. Build it with the same groups as when the state was saved."
            )
        self.last_step = int(state["last_step"])
        self.base_rates = [float(rate) for rate in state["base_rates"]]
        self._apply()

    def _take_up(self) -> None:
        """Groups that the optimizer has got since.

        Raises:
            ValueError: an option has a list with values for the groups of before.
        """
        groups = self.optimizer.param_groups
        if len(groups) > len(self.base_rates):
            for key in self.per_group:
                check_groups(type(self).__name__, key, getattr(self.config, key), len(groups))
            self.base_rates += [float(group["lr"]) for group in groups[len(self.base_rates) :]]

    def _apply(self) -> None:
        self._take_up()
        for index, group in enumerate(self.optimizer.param_groups):
            values = self.values(self.last_step, index)
            fill = getattr(group.get("lr"), "fill_", None)
            if fill is not None:  # a tensor, which others may hold: a captured graph, a compiled step
                fill(values.pop("lr"))
            group.update(values)


class WarmupSchedule(Schedule):
    """One that begins with the ramp of ``warmup_num_steps`` steps; attributes tell what the ramp is."""

    @property
    def warmup_num_steps(self) -> int:
        """n, at least 2."""
        return max(2, int(self.config.warmup_num_steps))

    @property
    def warmup_type(self) -> str:
        """ "log" or "linear"."""
        return str(self.config.warmup_type)

    @property
    def total_num_steps(self) -> int:
        """N, of one that has an end.

        Raises:
            AttributeError: it has none.
        """
        return int(self.config.total_num_steps)


def _signature(config: type[Any]) -> inspect.Signature:
    first = inspect.Parameter("optimizer", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="HasParamGroups")
    last = first.replace(name="last_batch_iteration", default=-1, annotation="int")
    return inspect.Signature([first, *inspect.signature(config).parameters.values(), last])


def for_groups(value: Rates, num_groups: int) -> list[float]:
    """A number for each group."""
    return [of_group(value, group) for group in range(num_groups)]


def of_group(value: Rates, group: int) -> float:
    """``value`` itself, or its element for the group."""
    return float(value[group] if isinstance(value, (list, tuple)) else value)


def ramp(step: int, num_steps: int, kind: str) -> float:
    """From 0 in the first two steps, k = 0 and 1, up to 1 at step n + 1 and after it; n = ``num_steps``, at least 2.

    "linear": ``(k - 1) / n``. "log": ``ln(k) / ln(n)``, at most 1 (it gets there at k = n).
    """
    done, num_steps = max(0, step - 1), max(2, num_steps)
    if done >= num_steps:
        return 1.0
    if kind == "linear":
        return done / num_steps
    return min(1.0, math.log(done + 1) / math.log(num_steps))


def check_warmup(name: str, warmup_num_steps: int, warmup_type: str) -> None:
    """Raise ValueError for a ramp that cannot be."""
    if warmup_type not in ("log", "linear"):
        raise ValueError(f"{name} got warmup_type={warmup_type!r}; allowed are 'log' and 'linear'.")
    if type(warmup_num_steps) is not int:
        raise ValueError(
            f"{name} got warmup_num_steps={warmup_num_steps!r}, a {type(warmup_num_steps).__name__}; it is a number of "
            "steps, such as 1000."
        )
    if warmup_num_steps < 0:
        raise ValueError(f"{name} got warmup_num_steps={warmup_num_steps}; give 0 (as 2: the shortest) or more steps.")


def check_total(name: str, total_num_steps: int) -> None:
    """Raise ValueError for a run without steps. One that is shorter than its warm-up ends on the ramp."""
    if total_num_steps < 1:
        raise ValueError(f"{name} got total_num_steps={total_num_steps}; it must be at least 1.")


def check_numbers(name: str, config: Any) -> None:
    """Raise ValueError for an option that is no number where one is meant, or not finite: every parameter would be lost
    in one step."""
    for option in dataclasses.fields(config):
        value, meant = getattr(config, option.name), str(option.type)
        several = isinstance(value, (list, tuple)) and "Rates" in meant
        for number in value if several else [value]:
            found = number.item() if getattr(number, "ndim", None) == 0 else number  # of torch or NumPy
            if isinstance(found, int):
                if found.bit_length() > _MOST_BITS:
                    raise ValueError(f"{name} got {option.name} with {found.bit_length()} bits; it takes smaller ones.")
            elif isinstance(found, Real):
                if not math.isfinite(found):
                    raise ValueError(f"{name} got {option.name}={value}; it takes finite numbers.")
            elif not _may_be(found, meant):
                raise ValueError(f"{name} got {option.name}={number!r}, a {type(number).__name__}; it takes a number.")


_MOST_BITS = 1000  # a float holds a few more


def _may_be(value: Any, meant: str) -> bool:
    """What is no number, where an option's annotation has something beside them."""
    return ("None" in meant and value is None) or not any(kind in meant for kind in ("int", "float", "Rates"))


def check_groups(name: str, key: str, value: float | Sequence[float] | None, num_groups: int) -> None:
    """Raise ValueError for a list of values that is not one per parameter group."""
    if isinstance(value, (list, tuple)) and len(value) != num_groups:
        raise ValueError(
            f"{name} got {len(value)} values for {key}; the optimizer has {num_groups} parameter groups: give one "
            "value for all or one for each."
        )
