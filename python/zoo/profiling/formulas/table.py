"""Which formula an operator has."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from zoo.cost.operators import Work
from zoo.profiling.formulas.attention import ATTENTION, HIGHER_ORDER
from zoo.profiling.formulas.call import Call, Formula, nbytes, tensors
from zoo.profiling.formulas.linear_algebra import LINEAR_ALGEBRA
from zoo.profiling.formulas.others import MOVES, OTHERS, pointwise, reduction
from zoo.profiling.formulas.products import PRODUCTS
from zoo.profiling.formulas.zoo_operators import OWN, OWN_MOVES

__all__ = ["ASKS", "COMMUNICATES", "Kind", "bytes_of", "kind_of", "register_formula"]

_TORCH: dict[str, Formula] = {**OTHERS, **PRODUCTS, **LINEAR_ALGEBRA, **ATTENTION}
_registered: dict[str, Formula] = {}
_known: dict[Any, Kind | Formula] = {}
COMMUNICATES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"}
"""Libraries whose operators send to other ranks."""
ASKS = {"prim", "prims", "profiler", "debugprims"}
"""Those whose operators ask something of a tensor."""


class Kind(Enum):
    """Of an operator that has no formula."""

    VIEW = "view"
    """Makes other sizes and strides of the same memory."""
    MOVES = "moves"
    """Copies, gathers, draws, sends: no floating-point operation."""
    MADE_OF_OTHERS = "made of others"
    """torch runs other operators in its place, which are counted."""
    UNKNOWN = "unknown"
    """Is listed among what was not counted."""


def register_formula(name: str, formula: Formula) -> None:
    """Count an operator of one's own, or one of torch's in another way.

    Args:
        name: "namespace::operator", without an overload.
        formula: gets a :class:`~zoo.profiling.formulas.call.Call`, whose arguments have the names of the schema, and
            returns a :class:`~zoo.cost.operators.Work`; of a gradient a pair of them, the second for what it computes
            again.

    Raises:
        ValueError: a name without a namespace.
    """
    if name.count("::") != 1 or "." in name:
        raise ValueError(f'register_formula({name!r}); a name is "namespace::operator", without an overload.')
    _registered[name] = formula
    _known.clear()


def kind_of(op: Any) -> Kind | Formula:
    """The formula of an operator, or what else it is."""
    found = _known.get(op)
    if found is None:
        found = _known[op] = _find(op)
    return found


def _find(op: Any) -> Kind | Formula:
    if not isinstance(op, torch._ops.OpOverload):
        return _higher_order(op)
    name: str = op._schema.name
    space, _, short = name.partition("::")
    for key in (name, name.removesuffix("_")):
        if key in _registered:
            return _registered[key]
    if name in OWN:
        return OWN[name]
    if name in OWN_MOVES or space in COMMUNICATES or space in ASKS:
        return Kind.MOVES
    if space == "aten":
        for key in (short, short.removesuffix("_")):
            if key in _TORCH:
                return _TORCH[key]
            if key in MOVES:
                return Kind.MOVES
    return _by_tags(op, short)


def _by_tags(op: Any, short: str) -> Kind | Formula:
    tags = _tags(op._overloadpacket)
    if op.namespace == "aten" and short.endswith("_"):  # torch does not repeat all of them for operators in place
        tags |= _tags(getattr(torch.ops.aten, short[:-1], None))
    if op.is_view:
        return Kind.VIEW
    if torch.Tag.pointwise in tags:
        return pointwise
    if torch.Tag.reduction in tags:
        return reduction
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return Kind.MADE_OF_OTHERS
    if torch.Tag.view_copy in tags or short.endswith("_copy"):
        return Kind.MOVES
    if op.namespace == "aten" and short.startswith("_foreach_"):
        return pointwise
    return Kind.UNKNOWN


def _tags(packet: Any) -> set[Any]:
    if packet is None:
        return set()
    return {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}


def _higher_order(op: Any) -> Kind | Formula:
    """An operator that takes functions."""
    name = op.name()
    own = _registered.get(f"higher_order::{name}")
    return HIGHER_ORDER.get(name, Kind.UNKNOWN) if own is None else own


# -- bytes ------------------------------------------------------------------------------------------------------------

_LOOKS_UP = {
    "aten::embedding", "aten::index_select", "aten::gather", "aten::index", "aten::take", "aten::_embedding_bag",
    "aten::masked_select", "aten::_unsafe_index",
}  # fmt: skip
"""Of what they read from, only as much as they return."""
_MAKES = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::empty_permuted",
}  # fmt: skip
"""Neither read nor write."""


def bytes_of(work: Work, call: Call) -> tuple[int, int]:
    """(read, written): those of the tensors, where the formula has not said how many."""
    if work.read_bytes or work.written_bytes:
        return work.read_bytes, work.written_bytes
    if call.name in _MAKES:
        return 0, 0
    written = sum([nbytes(t) for t in call.outputs]) or sum([nbytes(t) for t in _changed(call)])
    inputs = [nbytes(t) for t in call.inputs]
    if call.name in _LOOKS_UP:
        inputs[0] = min(inputs[0], written)
    return sum(inputs), written


def _changed(call: Call) -> list[torch.Tensor]:
    """What an operator without a result writes to: its first argument."""
    return list(tensors(call.given[:1]))
