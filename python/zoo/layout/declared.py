"""What a layer says about its parameters, for whoever shards them: expert and tensor parallelism, global indices.

An expert layer, a tensor-parallel layer or a pipeline stage holds a part of the model on each rank. It knows nothing of
those who split training state over ranks, and they know nothing of it; it leaves a declaration on its parameters and
modules, and they read it:

* :func:`declare_split`: along these mesh axes every rank has another part of the tensor;
* :func:`declare_partial`: along these axes every rank has the same tensor and a part of its gradient, whose sum counts;
* :func:`declare_tied`: other layers of the model have this very parameter too, perhaps on other ranks;
* :func:`declare_first`: the children of this module are numbered from ``first`` in the whole model, so that names are
  global: expert 3 is ``experts.3`` wherever it lives;
* :func:`declare_unit`: this module is needed as a whole, even if its forward calls only some of its children;
* :func:`declare_axis`: this module needs a mesh axis; it is told of the mesh by its method ``enter_mesh``.

Nothing here needs torch: a declaration is an attribute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zoo.layout.boxes import Box

if TYPE_CHECKING:
    from zoo.layout.laid import Boxes, Part

_SPLIT, _FIRST, _UNIT, _AXIS = "_zoo_split", "_zoo_first", "_zoo_unit", "_zoo_axis"


@dataclass(frozen=True, kw_only=True)
class Split:
    """Of one parameter on one rank.

    Attributes:
        axes: mesh axes along which the ranks have different parts; along all others they have the same.
        shape: of the whole tensor; None where each part is a tensor of its own (an expert with a name of its own).
        box: this rank's part of it: a box, or several that lie side by side in the parameter.
        partial: mesh axes along which ranks have the same tensor, and each a summand of its gradient.
        tied: a key that ranks with other layers which have the same parameter declare too; empty for one layer only.
    """

    axes: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    box: Part | None = None
    partial: tuple[str, ...] = ()
    tied: str = ""


WHOLE = Split()


def declare_split(
    parameter: Any, axes: Sequence[str], *, shape: Sequence[int] | None = None, offsets: Sequence[int] | None = None,
    boxes: Sequence[Box] | Boxes | None = None,
) -> None:  # fmt: skip
    """Say that ``parameter`` is a part: along each of ``axes`` other ranks have other parts.

    Args:
        parameter: anything with a ``shape``.
        axes: names of mesh axes.
        shape: of the whole tensor.
        offsets: with ``shape``: where this part, one box, begins in it.
        boxes: instead of ``offsets``: the boxes of the whole tensor that the part is, one after the other along the
            first dim (this rank's queries, keys and values), or :class:`~zoo.layout.Boxes` that lie otherwise.

    Raises:
        ValueError: one without the other, or a part that is not in the tensor.
    """
    if (shape is None) != (offsets is None and boxes is None) or (offsets is not None and boxes is not None):
        raise ValueError(
            "declare_split takes shape and offsets, or shape and boxes: the whole tensor, and where the part is in it."
        )
    box: Part | None = None
    if boxes is not None:
        from zoo.layout.laid import Boxes

        box = boxes if isinstance(boxes, Boxes) else Boxes.side_by_side(boxes)
        if box.sizes != tuple(parameter.shape):
            raise ValueError(
                f"declare_split got boxes that are a part of shape {box.sizes}, and the parameter has "
                f"{tuple(parameter.shape)}."
            )
        box = box.laid[0].box if len(box.laid) == 1 else box
    elif offsets is not None:
        box = Box(tuple(offsets), tuple(parameter.shape))
    whole = None if shape is None else tuple(shape)
    if box is not None and whole is not None and not box.fits(whole):
        where = f"at {box.offsets}" if isinstance(box, Box) else "; ".join(str(laid.box) for laid in box.laid)
        raise ValueError(
            f"declare_split got a part of shape {tuple(parameter.shape)}, {where}, which is not inside of a tensor of "
            f"shape {whole}."
        )
    parameter.__dict__[_SPLIT] = replace(split_of(parameter), axes=tuple(axes), shape=whole, box=box)


def declare_partial(parameter: Any, axes: Sequence[str]) -> None:
    """Say that along each of ``axes``, which are no data axes, ranks see other samples' share of the work of
    ``parameter``: its gradient is the sum of theirs."""
    parameter.__dict__[_SPLIT] = replace(split_of(parameter), partial=tuple(axes))


def declare_tied(parameter: Any, key: str) -> None:
    """Say that ``parameter`` is one with those that ranks with other layers (stages of a pipeline) declare by ``key``.

    All of them have the same name in the whole model, and its gradient is the sum of theirs.
    """
    if not key:
        raise ValueError("declare_tied needs a key, the same one on all ranks that have the parameter.")
    parameter.__dict__[_SPLIT] = replace(split_of(parameter), tied=key)


def declare_as(parameter: Any, other: Any) -> None:
    """Say of ``parameter`` what was said of ``other``, which it is a copy of: torch copies values alone."""
    if _SPLIT in getattr(other, "__dict__", {}):
        parameter.__dict__[_SPLIT] = other.__dict__[_SPLIT]


def split_of(parameter: Any) -> Split:
    """What was declared of a parameter; whole on every rank if nothing was."""
    found: Split = getattr(parameter, "__dict__", {}).get(_SPLIT, WHOLE)
    return found


def declare_first(module: Any, first: int) -> None:
    """Say that child ``i`` of ``module`` is number ``first + i`` of the whole model."""
    if first < 0:
        raise ValueError(f"declare_first got {first}; the number of a first child is at least 0.")
    module.__dict__[_FIRST] = first


def logical_name(model: Any, path: str) -> str:
    """The name that ``path`` (as in ``named_parameters``) has in the whole model."""
    module, parts = model, path.split(".")
    found = []
    for part in parts:
        first = getattr(module, "__dict__", {}).get(_FIRST, 0)
        found.append(str(int(part) + first) if first and part.isdigit() else part)
        module = getattr(module, "_modules", {}).get(part)
    return ".".join(found)


def declare_unit(module: Any, *, whole: bool = True) -> None:
    """Say that the parameters of ``module`` and of everything in it are gathered together, and nothing of it alone.

    For a module of which the data decide what is used: ranks that use different children would wait for each other.

    Args:
        whole: False: modules in it that are declared units themselves stay so, and a user who chooses units chooses.
    """
    module.__dict__[_UNIT] = "whole" if whole else "outer"


def withdraw_unit(module: Any) -> None:
    """Take back what :func:`declare_unit` said; nothing where it said nothing."""
    module.__dict__.pop(_UNIT, None)


def is_unit(module: Any, *, whole: bool = True) -> bool:
    """Whether that was declared, with this ``whole``."""
    return bool(getattr(module, "__dict__", {}).get(_UNIT) == ("whole" if whole else "outer"))


def declare_axis(module: Any, name: str, size: int) -> None:
    """Say that ``module`` needs the ranks along a mesh axis of this name and size, along which samples differ.

    Raises:
        ValueError: the size is not positive, or the module has no method ``enter_mesh(mesh)``.
    """
    if size < 1 or not callable(getattr(module, "enter_mesh", None)):
        raise ValueError(
            f"declare_axis({type(module).__name__}, {name!r}, {size}); the size is positive, and the module has a "
            "method enter_mesh(mesh)."
        )
    module.__dict__[_AXIS] = (name, size)


def axes_of(model: Any) -> dict[str, int]:
    """Name and size of the axes that modules of ``model`` need.

    Raises:
        ValueError: two of them need different sizes of one axis.
    """
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        name, size = module.__dict__.get(_AXIS, (None, 1))
        if name is not None and found.setdefault(name, size) != size:
            raise ValueError(
                f"{path} needs a mesh axis {name!r} of size {size}, and another module one of {found[name]}: a model "
                "has one size for each axis."
            )
    return found


def enter_mesh(model: Any, mesh: Any) -> None:
    """Tell each module of ``model`` that has a method ``enter_mesh`` of the mesh; ``model`` itself is the last.
    Collective over the mesh, with the same modules in the same order on all ranks."""
    for module in reversed(list(model.modules())):
        enter = getattr(type(module), "enter_mesh", None)
        if callable(enter):
            enter(module, mesh)
