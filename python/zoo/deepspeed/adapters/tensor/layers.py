"""``deepspeed.module_inject.layers``: linear layers of which each rank of a group has a part.

``LinearLayer(linear, group)`` takes the parameters of a linear layer and leaves this rank's part of them, as
:func:`zoo.tensor.split` does for whole models. They say which part it is, so that ZeRO, checkpoints and norms know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.tensor.layers import Column, LinearPart, Row, part_of
from zoo.tensor.patterns import LayerSpec, PartitionType
from zoo.tensor.plans import AXIS, Plan, Rule
from zoo.tensor.splitting import split
from zoo.tensor.ways import Way, plan_of_ways

_COMMS: WeakKeyDictionary[Any, Communicator] = WeakKeyDictionary()
"""By the process group of the program."""


def comm_of(group: Any) -> Communicator | None:
    """Of a process group; None for None."""
    if group is None:
        return None
    if group not in _COMMS:
        _COMMS[group] = Communicator(group)
    return _COMMS[group]


class TensorParallel_Layer(LinearPart, nn.Linear):  # type: ignore[misc]
    """Base of the layers here: a linear layer whose parameters are those of another one.

    Args:
        module: the linear layer, whole, the same on all ranks. Its parameters become this layer's.
        mp_group: the ranks that get parts; None: this rank alone, which keeps all.
        name: of the layer, for errors.
    """

    tp_overlap_comm: ClassVar[bool] = False
    _way: ClassVar[str] = "column"

    def __init__(self, module: nn.Module, mp_group: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        unknown = sorted(set(kwargs) - {"name", "fused_module"})
        if unknown or not isinstance(module, nn.Linear):
            raise ValueError(
                f"{type(self).__name__} got a {type(module).__name__}"
                f"{' and ' + ', '.join(unknown) if unknown else ''}; it takes a torch.nn.Linear, a group, and name."
            )
        self._adopt(module, mp_group, kwargs.get("name"))

    def _adopt(self, module: nn.Linear, mp_group: Any, name: str | None) -> None:
        comm = comm_of(mp_group)
        if comm is not None and comm.size > 1:
            split(module, self._plan(module, comm.size), comm, axis=AXIS)
        mine = {key: value.copy() if isinstance(value, dict) else value for key, value in module.__dict__.items()}
        self.__dict__.update(mine)
        self._describe(mp_group, name)

    def _describe(self, mp_group: Any, name: str | None) -> None:
        comm = comm_of(mp_group)
        self.mp_group, self.name, self.support_training = mp_group, name, True
        self.tp_world_size = self.world_size = 1 if comm is None else comm.size
        self.tp_index = self.rank = 0 if comm is None else comm.rank

    def _plan(self, module: nn.Linear, degree: int) -> Plan:
        rule = Rule(module="", cut="inner", **{"columns" if self._way == "row" else "rows": "inner"})  # type: ignore[arg-type]
        return Plan(name=type(self).__name__, rules=(rule,))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.mp_group)] = self.mp_group  # ranks are not copied
        return super().__deepcopy__(memo)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, I) → (…, O), of the parts that the class says."""
        if part_of(self) is None:
            return nn.Linear.forward(self, x)
        kind = Row if self._way == "row" else Column
        found: torch.Tensor = kind.forward(self, x)  # type: ignore[arg-type]
        return found

    def extra_repr(self) -> str:
        """Features, and the ranks."""
        return f"{super().extra_repr()}, dtype={self.weight.dtype}, ranks={self.tp_world_size}"


class LinearLayer(TensorParallel_Layer, Column):  # type: ignore[misc]
    """Column-parallel: each rank has some of the output features.

    Args:
        skip_partition: the parameters are parts already; not there, since nothing would say which ones.
        gather_output: outputs of all ranks side by side on each.
    """

    def __init__(
        self, module: nn.Module, mp_group: Any = None, skip_partition: bool = False, gather_output: bool = False,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        if skip_partition:
            raise ValueError(
                f"{type(self).__name__}(skip_partition=True): a layer whose parameters are parts already does not say "
                "which ones. Give the whole layer."
            )
        self.__dict__["gather_output"] = gather_output
        super().__init__(module, mp_group, **kwargs)
        self.gather_output = gather_output

    def _plan(self, module: nn.Linear, degree: int) -> Plan:
        rule = Rule(module="", rows="inner", cut="inner", gather=self.__dict__["gather_output"])
        return Plan(name=type(self).__name__, rules=(rule,))


class LinearAllreduce(TensorParallel_Layer, Row):  # type: ignore[misc]
    """Row-parallel: each rank has some of the input features, and outputs are summed."""

    _way = "row"

    def __init__(self, module: nn.Module, mp_group: Any, **kwargs: Any) -> None:
        super().__init__(module, mp_group, **kwargs)


class LmHeadLinearAllreduce(LinearAllreduce):
    """Row-parallel, of inputs that every rank has whole: it takes its own features of them."""

    def _plan(self, module: nn.Linear, degree: int) -> Plan:
        rule = Rule(module="", columns="inner", cut="inner", scatter=True)
        return Plan(name=type(self).__name__, rules=(rule,))


class SubParamLinearLayer(TensorParallel_Layer):
    """Column-parallel, of several blocks of output features, each of which is dealt.

    Args:
        shape, partition_dim: as of a spec (:mod:`zoo.tensor.patterns`): (3, -1), ((q, k, v), -1).
    """

    def __init__(
        self, module: nn.Module, mp_group: Any, shape: Sequence[Any], partition_dim: int = 0, **kwargs: Any
    ) -> None:  # fmt: skip
        self.__dict__["_spec"] = LayerSpec([".*"], PartitionType(self._way), tuple(shape), partition_dim)
        self.__dict__["shape"], self.__dict__["partition_dim"] = tuple(shape), partition_dim
        super().__init__(module, mp_group, **kwargs)

    def _adopt(self, module: nn.Linear, mp_group: Any, name: str | None) -> None:
        self._way_of(module, name or type(self).__name__)  # what the shape does not fit is told at any degree
        super()._adopt(module, mp_group, name)

    def _way_of(self, module: nn.Linear, name: str) -> Way:
        way: Way = self.__dict__["_spec"].way(name, tuple(module.weight.shape))
        return way

    def _plan(self, module: nn.Linear, degree: int) -> Plan:
        holder = nn.ModuleDict({"layer": module})
        plan = plan_of_ways(holder, {"layer": self._way_of(module, "layer")}, type(self).__name__)
        return Plan(name=plan.name, rules=tuple(_at_root(rule) for rule in plan.rules))


class SubParamLinearAllreduce(SubParamLinearLayer):
    """Row-parallel, of several blocks of input features, each of which is dealt."""

    _way = "row"

    def __init__(
        self, module: nn.Module, mp_group: Any, shape: Sequence[Any], partition_dim: int = 1, **kwargs: Any
    ) -> None:  # fmt: skip
        super().__init__(module, mp_group, shape, partition_dim, **kwargs)


class GateUpPack_LinearLayer(SubParamLinearLayer):
    """Column-parallel, of the two matrices of a gated perceptron, one after the other."""

    def __init__(self, module: nn.Module, mp_group: Any = None, **kwargs: Any) -> None:
        super().__init__(module, mp_group, (2, -1), 0, **kwargs)


def _at_root(rule: Rule) -> Rule:
    return Rule(module="", rows=rule.rows, columns=rule.columns, cut=rule.cut, gather=rule.gather)


def adopt(
    module: nn.Module, mp_group: Any, name: str, *, row: bool, scatter: bool = False, gather: bool = False
) -> None:
    """Say of a linear layer that was split in place, or that is whole at degree 1, that it is one of these."""
    kind: type[TensorParallel_Layer] = LinearLayer
    if row:
        kind = LmHeadLinearAllreduce if scatter else LinearAllreduce
    module.__class__ = kind
    layer: Any = module
    layer._describe(mp_group, name)
    if kind is LinearLayer:
        layer.gather_output = gather


def adopt_all(model: nn.Module, mp_group: Any) -> None:
    """The same of all plain linear layers of a model that was split."""
    for path, module in model.named_modules():
        part = part_of(module)
        if part is None or not isinstance(module, (Column, Row)) or isinstance(module, TensorParallel_Layer):
            continue
        if nn.Linear in type(module).__bases__:
            row = isinstance(module, Row)
            adopt(module, mp_group, path, row=row, scatter=part.scatter, gather=part.sizes is not None)
