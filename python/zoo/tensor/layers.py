"""Layers of which every rank has a part: what a linear layer or an embedding becomes, keeping its place and names.

A module keeps its identity, its parameters and hooks and gets another class, a subclass of its own; so ``isinstance``
and names stay true. Its parameters are parts of whole ones, and say so (``zoo.layout.declare_split``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from zoo.comm.check import values_count
from zoo.kernels.thin_linear import linear
from zoo.layout import declare_as, split_of
from zoo.layout.declared import WHOLE
from zoo.nn import PackedLinear
from zoo.tensor.plans import Cut
from zoo.tensor.region import Region, has_values
from zoo.tensor.same_batch import bytes_of_each, check_alike, checksums
from zoo.tensor.shares import Run

_STATE = "_zoo_tensor"


@dataclass
class Part:
    """What a layer knows of its part.

    Attributes:
        region: the ways in and out. cut: of the dealt dim. dim: which dim of the weight that is.
        sizes: of every rank's part, where outputs are gathered.
        rows: the rows of a whole weight that this rank multiplies by; None: the weight is the part.
        take: the order in which the model sees outputs, of the rows that are multiplied; None as they are.
        turned: the weight is (in, out), not (out, in).
        features: of what a module that computes with parts of its own parameters gets and returns. once: those of its
            parameters that the first rank alone adds.
        direct: of outputs that are whole, [start, stop) of what goes straight to heads of all ranks.
        path: of the layer in the model, for errors.
    """

    region: Region
    cut: Cut
    dim: int = 0
    turned: bool = False
    rows: tuple[Run, ...] | None = None
    take: tuple[Run, ...] | None = None
    sizes: tuple[int, ...] | None = None
    scatter: bool = False
    direct: Run | None = None
    features: int = 0
    once: tuple[str, ...] = ()
    path: str = ""


def part_of(module: nn.Module) -> Part | None:
    """Of a layer; None for one that is whole."""
    found: Part | None = module.__dict__.get(_STATE)
    return found


def goes_on_as(module: nn.Module | None, before: nn.Module) -> bool:
    """Whether ``module`` took over from ``before`` (:meth:`LinearPart.hand_over`)."""
    one, other = (None if module is None else part_of(module)), part_of(before)
    return one is not None and other is not None and one.region is other.region and one.cut is other.cut


def become(module: nn.Module, kind: type[Layer], part: Part | None) -> None:
    """Give ``module`` the forward of ``kind``: its class becomes a subclass of both."""
    own = type(module)
    known = _CLASSES.get((kind, own))
    if known is None:
        # A subclass that scales what an embedding finds calls its base: the part comes after it.
        bases = (kind,) if own in kind.__bases__ else (own, kind) if issubclass(own, nn.Embedding) else (kind, own)
        known = _CLASSES[kind, own] = type(f"{kind.__name__}{own.__name__}", bases, {"__module__": kind.__module__})
    module.__class__ = known
    if part is not None:
        module.__dict__[_STATE] = part


_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}
"""One for each pair, so that a compiler sees one class for equal layers."""


def _at(weight: torch.Tensor, runs: Sequence[Run], dim: int) -> torch.Tensor:
    """Runs of a dim, side by side; a view where it is one."""
    parts = [weight.narrow(dim, start, stop - start) for start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _product(layer: LinearPart, part: Part, x: torch.Tensor, *, biased: bool) -> torch.Tensor:
    """Of the rows that this rank multiplies by."""
    if isinstance(layer, PackedLinear):
        return layer.multiply(x, layer.bias if biased else None)
    weight, bias = layer.multiplied()
    return linear(x, weight.t() if part.turned else weight, bias if biased else None)


def _takes(layer: LinearPart, part: Part) -> int:
    """Features of what a column-parallel layer gets."""
    if isinstance(layer, PackedLinear):
        return layer.in_features
    return layer.weight.shape[0 if part.turned else 1]


def _refuse(layer: LinearPart, part: Part, given: int, takes: str) -> None:
    row = isinstance(layer, Row)
    raise ValueError(
        f"{part.path or type(layer).__name__} is {'row' if row else 'column'}-parallel: it takes {takes} features, and "
        f"got {given}. The layer before it has to be {'column' if row else 'row'}-parallel, or "
        + ("this one needs no rule, or one with scatter." if row else "to gather its outputs.")
    )


class Layer(nn.Module):
    """Base of layers with parts: a copy says of its parameters what the original says, and so do those that
    :meth:`to_empty` makes. Alone: one whose parameters are whole, and their gradients sums over ranks."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Parameters that its forward reads."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        found = type(self).__new__(type(self))
        memo[id(self)] = found
        found.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        for name, parameter in self._parameters.items():
            if parameter is not None:
                declare_as(found._parameters[name], parameter)
        return found

    def __copy__(self) -> Layer:
        found = type(self).__new__(type(self))
        found.__dict__.update(self.__dict__)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            "a split model is not pickled (torch.save(model), multiprocessing): its parts belong to the ranks of a "
            "process group. Save state_dict(), each rank its own, or zoo.tensor.slices(model, comm) for any degree; "
            "copy.deepcopy copies it."
        )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """What takes the place of a parameter, as in ``load_state_dict(assign=True)``, is the same part of the same
        matrix, and says so.

        Raises:
            ValueError: it cannot be, or the layer would compute with something else than its weight.
        """
        own = self._parameters.get(name)
        if own is not None and param is not None:
            _take_the_place(self, name, own, param)
        elif param is not None and any(name != needed not in self._parameters for needed in self.needs):
            raise ValueError(
                f"a {type(self).__name__} gets a parameter {name} in the place of its {self.needs[0]}, as in weight "
                "norm; do so before zoo.tensor.split."
            )
        super().register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        if name in self._parameters:
            raise ValueError(
                f"a {type(self).__name__} has its parameter {name} taken away, which is a part of a matrix that is "
                "split; put parametrizations on layers before zoo.tensor.split."
            )
        super().__delattr__(name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Layer:
        before = dict(self._parameters)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, parameter in before.items():
            if parameter is not None and self._parameters[name] is not parameter:
                declare_as(self._parameters[name], parameter)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        part = part_of(self)
        if part is not None and hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][_RANK] = (part.region.comm.rank, part.region.comm.size)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        part, theirs = part_of(self), local_metadata.get(_RANK)
        if part is not None and theirs is not None:
            mine = (part.region.comm.rank, part.region.comm.size)
            if tuple(theirs) != mine:  # parts may have one shape, and be others
                error_msgs.append(
                    f"{prefix[:-1]} has the part of rank {theirs[0]} of {theirs[1]} tensor-parallel ranks, and this is "
                    f"rank {mine[0]} of {mine[1]}. Each rank loads its own state_dict; zoo.tensor.load and slices are "
                    "for any rank and degree."
                )
                return
        whole = [
            prefix + name
            for name, own in self._parameters.items()
            if own is not None and split_of(own).shape not in (None, tuple(own.shape))
            and tuple(getattr(state_dict.get(prefix + name), "shape", ())) == split_of(own).shape
        ]  # fmt: skip
        if whole:
            error_msgs.append(
                f"{', '.join(whole)}: this is the whole tensor, of which this rank has a part. zoo.tensor.load(model, "
                "source) takes parts out of a checkpoint of whole tensors; or load before zoo.tensor.split."
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _take_the_place(layer: Layer, name: str, own: nn.Parameter, param: nn.Parameter) -> None:
    said = split_of(own)
    if tuple(param.shape) != tuple(own.shape):
        raise ValueError(
            f"a {name} of shape {tuple(param.shape)} in the place of that of a {type(layer).__name__}, which is this "
            f"rank's part, of shape {tuple(own.shape)}, of one of {said.shape or tuple(own.shape)}. zoo.tensor.load "
            "reads parts from whole tensors."
        )
    if split_of(param) not in (WHOLE, said):
        raise ValueError(
            f"a {name} in the place of that of a {type(layer).__name__} is another part of a matrix: "
            f"{split_of(param)}, and not {said}."
        )
    declare_as(param, own)


class LinearPart(Layer):
    """A linear layer whose product is of this rank's part (``zoo.nn.packed.PartialLinear``)."""

    needs = ("weight",)
    weight: torch.Tensor
    bias: torch.Tensor | None

    def multiplied(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What of its weight and bias it multiplies by: parts of heads may be of other rows than others have."""
        part: Part = self.__dict__[_STATE]
        weight: Any = self.weight
        bias: Any = self.bias
        if part.rows is None:
            return weight, bias
        return _at(weight, part.rows, 1 if part.turned else 0), None if bias is None else _at(bias, part.rows, 0)

    def hand_over(self, successor: nn.Module) -> None:
        """``successor``, which multiplies by :meth:`multiplied` in a way of its own, goes on as this layer does, which
        keeps nothing."""
        part: Part = self.__dict__[_STATE]
        kind = Column if isinstance(self, Column) else Row
        own, theirs = self._parameters.get("bias"), successor._parameters.get("bias")
        become(successor, kind, replace(part, rows=None))
        if own is not None and theirs is not None and part.rows is None:
            declare_as(theirs, own)
        self._parameters.update(dict.fromkeys(self._parameters))


class Column(LinearPart):
    """y = x W_r^T + b_r with this rank's rows; x is whole.

    Shapes: x (…, C), y (…, rows of this rank as the model sees them), or (…, all rows) where outputs are gathered.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part: Part = self.__dict__[_STATE]
        whole = _takes(self, part)
        if x.shape[-1] != whole:
            _refuse(self, part, x.shape[-1], f"all {whole}")
        y = _product(self, part, part.region.go_in(x), biased=True)
        if part.take is not None:
            y = _at(y, part.take, -1)
        if part.sizes is not None and self.__dict__.get(KEEP, False):
            part.region.rest()
        elif part.sizes is not None:
            y = part.region.gather(y, list(part.sizes))
        return y


class Row(LinearPart):
    """y = Σ over ranks of x_r W_r^T, + b once. Shapes: x (…, this rank's features), y (…, C)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part: Part = self.__dict__[_STATE]
        total, own = part.cut.total, part.cut.size
        if x.shape[-1] != (total if part.scatter else own):
            _refuse(self, part, x.shape[-1], f"all {total}" if part.scatter else f"this rank's {own} of {total}")
        if part.scatter:
            ((start, stop),) = part.cut.runs
            x = part.region.scatter(x, start, stop)
        if part.region.pieces > 1 and isinstance(self, PackedLinear):
            return self._biased(self._in_pieces(x, part.region))
        if part.region.pieces > 1:
            y = part.region.product(x, self.weight.t() if part.turned else self.weight)
            return self._biased(y)
        return self.add_up(_product(self, part, x, biased=False))

    def _in_pieces(self: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        """Codes: as many sums as other ranks make, which may have numbers."""
        rows = x.reshape(-1, x.shape[-1]).tensor_split(region.pieces)
        found = [region.leave(self.multiply(one, None)) for one in rows if len(one)]
        return torch.cat(found or [self.multiply(rows[0], None)]).view(*x.shape[:-1], self.out_features)

    def add_up(self, y: torch.Tensor) -> torch.Tensor:
        """The output, of this rank's own product."""
        part: Part = self.__dict__[_STATE]
        return self._biased(part.region.leave(y))

    def _biased(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.bias is None else y + self.bias.to(y.dtype)  # under autocast as where the product adds it


class Vocabulary(Layer, nn.Embedding):
    """y = Σ over ranks of what each finds: words of other ranks are zeros. Shapes: ids (…), y (…, C).

    One more row tells whether all ranks have the same ids (:mod:`zoo.tensor.same_batch`).
    """

    needs = ("weight",)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        part: Part = self.__dict__[_STATE]
        ((start, stop),) = part.cut.runs
        elsewhere = (ids < start) | (ids >= stop)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - start if start <= padding < stop else None
        _check_ids(ids, part.cut.total)
        width, comm = self.weight.shape[1], part.region.comm
        num_bytes = bytes_of_each(width, comm.size) if has_values(ids) and values_count() else 0
        rows, elsewhere = (ids - start).masked_fill(elsewhere, 0), elsewhere.unsqueeze(-1)
        if num_bytes == 0:
            return part.region.leave(F.embedding(rows, self.weight, padding).masked_fill(elsewhere, 0.0))
        rows, elsewhere = F.pad(rows.flatten(), (0, 1)), F.pad(elsewhere.flatten(), (0, 1), value=True)
        found = F.embedding(rows, self.weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        mine = found.detach()[-1, comm.rank * num_bytes : (comm.rank + 1) * num_bytes]
        mine.copy_(checksums(ids, num_bytes, draws=self.training and part.region.draws))
        found = part.region.leave(found)
        check_alike(found.detach()[-1, : comm.size * num_bytes].view(comm.size, num_bytes), comm.rank)
        return found[:-1].view(*ids.shape, width)


def _check_ids(ids: torch.Tensor, total: int) -> None:
    """What no rank has would be zeros in silence."""
    if not has_values(ids):
        return
    known = ((ids >= 0) & (ids < total)).all()
    if ids.device.type != "cpu":  # nothing waits for the device
        torch._assert_async(known, f"ids outside of a vocabulary of {total}")
    elif not bool(known):
        raise IndexError(f"ids from {int(ids.min())} to {int(ids.max())}, of a vocabulary of {total}.")


class Drop(Layer):
    """Dropout of an adapter's input: this rank's features of a whole one, or a whole one where other tensors are parts.
    The mask is that of one process."""

    p: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part: Part = self.__dict__[_STATE]
        if not self.training or self.p == 0:
            return x
        shape = (*x.shape[:-1], part.cut.total) if part.cut.runs else x.shape
        before, part.region.drawing = part.region.drawing, True
        try:
            mask = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), self.p, True)
        finally:
            part.region.drawing = before
        return x * (_at(mask, part.cut.runs, -1) if part.cut.runs else mask)


class Features(Layer, nn.Embedding):
    """y = this rank's features of each row: no rank needs another's. Shapes: ids (…), y (…, features of this rank)."""

    needs = ("weight",)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        part: Part = self.__dict__[_STATE]
        y = F.embedding(ids, self.weight, self.padding_idx)
        return y if part.take is None else _at(y, part.take, -1)


class Inside(Layer):
    """y = Σ over ranks of what the module computes with this rank's parts of its parameters; inputs are whole.

    Which experts get which token is computed by every rank from the same bits.
    """

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        part: Part = self.__dict__[_STATE]

        def enter(x: Any) -> Any:
            return part.region.enter(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        others = part.once if part.region.comm.rank else ()
        for name in others:  # found before the parameter, for the time of the call
            self.__dict__[name] = self._parameters[name] * 0  # type: ignore[operator]
        try:
            y: torch.Tensor = super().forward(*map(enter, args), **{key: enter(x) for key, x in kwargs.items()})
        finally:
            for name in others:
                del self.__dict__[name]
        return part.region.leave(y)


class Direct(Layer):
    """y = (a, b, c), of which b goes to the heads of every rank: its gradient is summed, that of a and c is not."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        part: Part = self.__dict__[_STATE]
        y: torch.Tensor = super().forward(*args, **kwargs)
        if part.direct is None or not (torch.is_grad_enabled() and y.requires_grad):
            return y
        start, stop = part.direct
        return torch.cat([y[..., :start], part.region.enter(y[..., start:stop]), y[..., stop:]], dim=-1)


_RANK = "zoo_tensor_rank"
"""In the metadata of a state_dict: (rank, degree) whose part a layer's is."""

KEEP = "_zoo_keeps_parts"
"""Set on a layer for the time of a forward whose loss takes the parts of outputs."""
